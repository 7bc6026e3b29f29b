"""Quantized calls that every backend is tested on, and the rule that their results must meet.

A case is data; ``build`` draws e4m3 numbers and scales and lays them out as docs/semantics.md says, by code of its own.
Columns of v that hold no key are 0, and scales of blocks that no row has are 1. The reference is attention in float64
over the numbers as drawn. ``judge`` bounds the error of each element by what rounding probabilities to e4m3 may do, and
the error of all elements together by what it does on average.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile import UnsupportedError, dispatch, reference
from flashtile.masks import Band
from flashtile.problem import Problem, Tensors
from flashtile.quantization import ops
from flashtile.quantization.arguments import FLOAT8, QuantizedOptions, QuantizedTensors, tensor_values
from flashtile.quantization.problem import problem_of
from tests.poison import poisoned_memory

BLOCK, ORDER = 128, (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


@dataclass(frozen=True)
class QuantizedCase:
    """One call: pairs (seqlen_q, seqlen_k), one for each sequence of a packed call, else the same for all.

    Attributes:
        spare: Packed rows past the last bound, of q and of k.
        say_longest: Whether a packed call gives max_seqlen_q and max_seqlen_k.
        scales: Of q, k and v: "block", "head" or "tensor".
        shifted: Whether a shift is given.
        half: Whether the output is float16.
    """

    name: str
    lengths: tuple[tuple[int, int], ...] = ((37, 45), (37, 45))
    packed: bool = False
    spare: int = 0
    say_longest: bool = True
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    head_dim_v: int | None = None
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    scales: tuple[str, str, str] = ("block", "block", "block")
    shifted: bool = False
    half: bool = False

    def __str__(self) -> str:
        return self.name


_LONG = ((150, 300), (150, 300))
CASES: tuple[QuantizedCase, ...] = (
    QuantizedCase("full"),
    QuantizedCase("causal", causal=True),
    QuantizedCase("blocks", _LONG, head_dim=32),
    QuantizedCase("blocks_causal", _LONG, causal=True, shifted=True),
    QuantizedCase("window", _LONG, window=(40, 9)),
    QuantizedCase("window_left", ((200, 130),), window=(70, -1), heads=3, kv_heads=1),
    QuantizedCase("window_one", window=(0, 0)),
    QuantizedCase("group", heads=6, kv_heads=2, causal=True),
    QuantizedCase("one_kv_head", heads=5, kv_heads=1, shifted=True),
    QuantizedCase("softcap", softcap=3.0),
    QuantizedCase("scale", scale=0.7, half=True),
    QuantizedCase("scale_negative", scale=-0.3),
    QuantizedCase("sinks", sinks=True),
    QuantizedCase("sinks_shifted", ((41, 37),), sinks=True, shifted=True, causal=True),
    QuantizedCase("by_head", _LONG, scales=("head", "head", "head")),
    QuantizedCase("by_tensor", _LONG, scales=("tensor", "tensor", "tensor"), shifted=True),
    QuantizedCase("mixed_scales", _LONG, scales=("tensor", "block", "head")),
    QuantizedCase("wider_v", head_dim=16, head_dim_v=48),
    QuantizedCase("narrower_v", head_dim=80, head_dim_v=32, causal=True),
    QuantizedCase("dim_96", ((33, 140),), head_dim=96, half=True),
    QuantizedCase("dim_256", ((20, 33),), head_dim=256, heads=1, kv_heads=1),
    QuantizedCase("one", ((1, 1),), heads=1, kv_heads=1),
    QuantizedCase("one_row", ((1, 129),), causal=True),
    QuantizedCase("one_key", ((61, 1),)),
    QuantizedCase("more_rows_causal", ((47, 19),), causal=True, shifted=True),
    QuantizedCase("a_block", ((128, 128),), causal=True),
    QuantizedCase("no_rows", ((0, 9),)),
    QuantizedCase("no_keys", ((9, 0),)),
    QuantizedCase("no_keys_sinks", ((9, 0),), sinks=True, shifted=True),
    QuantizedCase("no_batch", ()),
    QuantizedCase("packed", ((13, 13), (1, 1), (29, 29)), packed=True),
    QuantizedCase("packed_blocks", ((130, 257), (1, 128), (127, 129), (5, 300)), packed=True, causal=True, shifted=True),
    QuantizedCase("packed_empty", ((0, 5), (7, 0), (0, 0), (11, 11)), packed=True, causal=True, sinks=True),
    QuantizedCase("packed_spare", ((8, 8), (15, 150)), packed=True, spare=5, sinks=True, shifted=True, say_longest=False),
    QuantizedCase("packed_window", ((140, 140), (9, 33)), packed=True, window=(60, 3), heads=4, kv_heads=2),
    QuantizedCase("packed_by_tensor", ((140, 140), (9, 33)), packed=True, scales=("tensor", "head", "tensor")),
    QuantizedCase("packed_no_sequences", (), packed=True, spare=3),
    QuantizedCase("everything", ((131, 70), (40, 290), (0, 3)), packed=True, spare=2, causal=True, window=(100, 0),
                  sinks=True, heads=4, kv_heads=2, head_dim=48, head_dim_v=32, scales=("block", "block", "head"),
                  shifted=True, half=True, scale=0.2),
)  # fmt: skip


def random_case(number: int, longest: int = 700, head_dims: tuple[int, ...] = tuple(range(16, 257, 16))) -> QuantizedCase:
    """Case ``number`` of an endless list of random ones."""
    draw = random.Random(number)
    packed = draw.random() < 0.4
    batch = draw.randint(1, 5 if packed else 3)

    def length() -> int:
        most = draw.choice((3, longest // 8 + 1, longest // 2 + 1, longest))
        return draw.choice((draw.randint(0 if packed or draw.random() < 0.05 else 1, most), min(most, 128), 1))

    lengths = [(length(), length()) for _ in range(batch)]
    if draw.random() < 0.3:
        lengths = [(n, n) for n, _ in lengths]
    group, kv_heads = draw.choice((1, 1, 2, 3, 8)), draw.randint(1, 3)
    head_dim = draw.choice(head_dims)
    bounds = (None, -1, 0, 1, draw.randint(0, longest), 64, 127, 128)
    kinds = ("block", "block", "block", "head", "tensor")
    capped = draw.random() < 0.25
    return QuantizedCase(
        f"random_{number}",
        tuple(lengths) if packed else (lengths[0],) * batch,
        packed=packed,
        spare=draw.choice((0, 0, 1, 130)) if packed else 0,
        say_longest=draw.random() < 0.5,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=draw.choice((None, None, None, draw.choice(head_dims))),
        causal=draw.random() < 0.4,
        window=(draw.choice(bounds), draw.choice(bounds)) if draw.random() < 0.3 else (None, None),
        scale=draw.choice((None, None, None, 0.3, -0.1, 0.0)),
        softcap=draw.choice((1.0, 20.0)) if capped else 0.0,
        sinks=draw.random() < 0.3,
        scales=(draw.choice(kinds), draw.choice(kinds), draw.choice(kinds)),
        shifted=not capped and draw.random() < 0.5,
        half=draw.random() < 0.5,
    )


@dataclass(frozen=True, eq=False)
class QuantizedCall:
    """A case's tensors and options, and the same numbers as rows in float64: ``wide``, in main memory."""

    case: QuantizedCase
    problem: Problem
    tensors: QuantizedTensors
    options: QuantizedOptions
    wide: Tensors

    def run(self, backend: str) -> tuple[Tensor, Tensor]:
        """out and lse of the operator."""
        return ops.attend(self.tensors, QuantizedOptions(**vars_of(self.options) | {"backend": backend}))


def vars_of(options: QuantizedOptions) -> dict[str, Any]:
    """The options by name."""
    return {name: value for name, value in vars(options).items() if not name.startswith("_")}


def build(case: QuantizedCase, device: str = "cpu", seed: int = 0) -> QuantizedCall:
    """The tensors of a case, random with a fixed seed; the same numbers on every device."""
    make = torch.Generator().manual_seed(seed)
    rows_q, rows_k = _rows(case, 0), _rows(case, 1)
    dim_v = case.head_dim_v or case.head_dim
    codes, scales, wide = {}, {}, {}
    for name, rows, heads, dim, kind in (
        ("q", rows_q, case.heads, case.head_dim, case.scales[0]),
        ("k", rows_k, case.kv_heads, case.head_dim, case.scales[1]),
        ("v", rows_k, case.kv_heads, dim_v, case.scales[2]),
    ):
        scale = _scale(case, kind, heads, rows, make)
        each = torch.stack([scale[..., block] for _, block, _ in rows], -2) if rows else scale.new_empty(0, heads)
        values = torch.randn(len(rows), heads, dim, generator=make).mul(100).to(FLOAT8)
        codes[name], scales[f"{name}_scale"] = values, scale
        wide[name] = values.double() * _by_row(case, scale, rows)[..., None]
        del each
    batch = len(case.lengths)
    tensors = {name: codes[name] if case.packed else _dense(codes[name], batch) for name in ("q", "k")}
    tensors |= scales | {"v": _transposed(case, codes["v"], rows_k)}
    if case.shifted:
        shape = (len(rows_q),) if case.packed else (batch, len(rows_q) // max(batch, 1))
        shape = (*shape[:-1], case.heads, shape[-1])
        tensors["shift"] = torch.randn(shape, generator=make) * case.head_dim**0.5
    if case.sinks:
        tensors["sinks"] = torch.randn(case.heads, generator=make)
    if case.packed:
        for name, side in (("cu_seqlens_q", 0), ("cu_seqlens_k", 1)):
            tensors[name] = _bounds(case, side)
    longest = [max((pair[side] for pair in case.lengths), default=0) for side in (0, 1)]
    options = QuantizedOptions(
        None if case.window[0] in (None, -1) else case.window[0],
        0 if case.causal else None if case.window[1] in (None, -1) else case.window[1],
        *(longest if case.packed and case.say_longest else (None, None)),
        torch.float16 if case.half else torch.bfloat16,
        case.scale,
        case.softcap,
    )
    made = QuantizedTensors(**{name: x.to(device) for name, x in tensors.items()})
    shaped = {name: x if case.packed else _dense(x, batch) for name, x in wide.items()}
    rows = Tensors(
        *shaped.values(), cu_seqlens_q=tensors.get("cu_seqlens_q"), cu_seqlens_k=tensors.get("cu_seqlens_k")
    )
    return QuantizedCall(case, problem_of(made, options), made, options, rows)


def _bounds(case: QuantizedCase, side: int) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(pair[side] for pair in case.lengths)], dtype=torch.int32)


def _rows(case: QuantizedCase, side: int) -> list[tuple[int, int, int]]:
    """Of each row its sequence, the number of its block, and its place there; -1 for rows past the last bound."""
    found, start = [], 0
    for b, pair in enumerate(case.lengths):
        first = start // BLOCK + b if case.packed else 0
        found += [(b, first + j // BLOCK, j % BLOCK) for j in range(pair[side])]
        start += pair[side]
    return found + [(-1, -1, -1)] * case.spare


def _num_blocks(case: QuantizedCase, rows: list[tuple[int, int, int]]) -> int:
    batch = len(case.lengths)
    return len(rows) // BLOCK + batch if case.packed else -(-(len(rows) // max(batch, 1)) // BLOCK)


def _scale(case: QuantizedCase, kind: str, heads: int, rows: list[tuple[int, int, int]], make: torch.Generator) -> Tensor:
    """Scales of which numbers of size 100 become about 1, each by another factor; 1 for blocks that nobody has."""
    batch, blocks = len(case.lengths), _num_blocks(case, rows)
    used = torch.zeros(max(batch, 1), blocks, dtype=torch.bool)
    for b, block, _ in rows:
        if b >= 0:
            used[b, block] = True
    lead: tuple[int, ...] = () if case.packed else (batch,)
    shape = {"block": (*lead, heads, blocks), "head": (*lead, heads, 1), "tensor": (1,) * (len(lead) + 2)}[kind]
    scale = (torch.rand(shape, generator=make) + 0.5) / 100
    if kind == "block":
        some = used.any(0) if case.packed else used[:batch, None]
        scale = torch.where(some.expand(shape), scale, 1.0)
    return scale


def _by_row(case: QuantizedCase, scale: Tensor, rows: list[tuple[int, int, int]]) -> Tensor:
    """``(rows, heads or 1)`` float64; 1 past the last bound."""
    found = []
    for b, block, _ in rows:
        of = scale if case.packed else scale[b if scale.shape[0] > 1 else 0]
        one = torch.ones_like(of[..., 0]) if b < 0 else of[..., block if of.shape[-1] > 1 else 0]
        found.append(one)
    return torch.stack(found).double() if found else torch.ones(0, 1).double()


def _dense(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, len(x) // batch)) if batch else x[None, :0].expand(0, 0, *x.shape[1:])


def _transposed(case: QuantizedCase, values: Tensor, rows: list[tuple[int, int, int]]) -> Tensor:
    """v as a call takes it, from ``(rows, heads, dim)``."""
    batch, columns = len(case.lengths), _num_blocks(case, rows) * BLOCK
    bits = torch.zeros(max(batch, 1) if not case.packed else 1, *values.shape[1:], columns, dtype=torch.uint8)
    for row, (b, block, place) in zip(values.view(torch.uint8), rows, strict=True):
        if b >= 0:
            column = block * BLOCK + place // 16 * 16 + ORDER.index(place % 16)
            bits[0 if case.packed else b, :, :, column] = row
    return (bits[0] if case.packed else bits[:batch]).view(FLOAT8)
