"""Quantized calls that every backend is tested on, and the rule that their results must meet.

A case is data; ``build`` draws e4m3 numbers and scales and lays them out as docs/semantics.md says, by code of its own.
Columns of v that hold no key are 0, and scales of blocks that no row has are 1. The reference is attention in float64
over the numbers as drawn. ``judge`` bounds the error of each element by what rounding probabilities to e4m3 may do, and
the error of all elements together by what it does on average.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile import UnsupportedError
from flashtile.call.problem import Problem, Tensors
from flashtile.call.quantized_call import FLOAT8, QuantizedOptions, QuantizedTensors, problem_of
from flashtile.ops import dispatch
from flashtile.ops import operators as ops
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
        out_scale: Of an output of 8 bits; None for one of 16.
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
    out_scale: float | None = None

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
    QuantizedCase("tiles_without_keys", ((1, 1), (600, 1)), packed=True, causal=True, heads=1, kv_heads=1),
    QuantizedCase("a_block", ((128, 128),), causal=True),
    QuantizedCase("no_rows", ((0, 9),)),
    QuantizedCase("no_keys", ((9, 0),)),
    QuantizedCase("no_keys_sinks", ((9, 0),), sinks=True, shifted=True),
    QuantizedCase("no_batch", ()),
    QuantizedCase("packed", ((13, 13), (1, 1), (29, 29)), packed=True),
    QuantizedCase("packed_blocks", ((130, 257), (1, 128), (127, 129), (5, 300)), packed=True, causal=True,
                  shifted=True),
    QuantizedCase("packed_empty", ((0, 5), (7, 0), (0, 0), (11, 11)), packed=True, causal=True, sinks=True),
    QuantizedCase("packed_spare", ((8, 8), (15, 150)), packed=True, spare=5, sinks=True, shifted=True,
                  say_longest=False),
    QuantizedCase("packed_window", ((140, 140), (9, 33)), packed=True, window=(60, 3), heads=4, kv_heads=2),
    QuantizedCase("packed_by_tensor", ((140, 140), (9, 33)), packed=True, scales=("tensor", "head", "tensor")),
    QuantizedCase("packed_no_sequences", (), packed=True, spare=3),
    QuantizedCase("eight_bit_output", causal=True, out_scale=0.004),
    QuantizedCase("eight_bit_output_cut", _LONG, out_scale=0.0005, shifted=True),
    QuantizedCase("eight_bit_output_packed", ((130, 257), (0, 5), (7, 0), (5, 40)), packed=True, spare=3, sinks=True,
                  head_dim=64, head_dim_v=80, out_scale=0.01),
    QuantizedCase("everything", ((131, 70), (40, 290), (0, 3)), packed=True, spare=2, causal=True, window=(100, 0),
                  sinks=True, heads=4, kv_heads=2, head_dim=48, head_dim_v=32, scales=("block", "block", "head"),
                  shifted=True, half=True, scale=0.2),
)  # fmt: skip


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
        return ops.attend_quantized(self.tensors, self.options._replace(backend=backend))


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
        values = torch.randn(len(rows), heads, dim, generator=make).mul(100).clamp(-448, 448)
        values[len(rows) - case.spare :] = torch.nan
        values = values.to(FLOAT8)
        codes[name], scales[f"{name}_scale"] = values, scale
        wide[name] = values.double() * _by_row(case, scale, rows)[..., None]
    batch = len(case.lengths)
    tensors = {name: codes[name] if case.packed else _dense(codes[name], batch) for name in ("q", "k")}
    tensors |= scales | {"v": _transposed(case, codes["v"], rows_k)}
    if case.shifted:
        shape = (len(rows_q),) if case.packed else (batch, len(rows_q) // max(batch, 1))
        shape = (*shape[:-1], case.heads, shape[-1])
        tensors["shift"] = torch.randn(shape, generator=make) * case.head_dim**0.5
        tensors["shift"][..., len(rows_q) - case.spare if case.packed else shape[-1] :] = torch.nan
    if case.sinks:
        tensors["sinks"] = torch.randn(case.heads, generator=make)
    if case.out_scale is not None:
        tensors["out_scale"] = torch.tensor([case.out_scale])
    if case.packed:
        for name, side in (("cu_seqlens_q", 0), ("cu_seqlens_k", 1)):
            tensors[name] = _bounds(case, side)
    options = options_of(case)
    made = QuantizedTensors(**{name: x.to(device) for name, x in tensors.items()})
    shaped = {name: x if case.packed else _dense(x, batch) for name, x in wide.items()}
    rows = Tensors(*shaped.values(), cu_seqlens_q=tensors.get("cu_seqlens_q"), cu_seqlens_k=tensors.get("cu_seqlens_k"))
    return QuantizedCall(case, problem_of(made, options), made, options, rows)


def options_of(case: QuantizedCase) -> QuantizedOptions:
    """The options of a case's call."""
    longest = [max((pair[side] for pair in case.lengths), default=0) for side in (0, 1)]
    return QuantizedOptions(
        None if case.window[0] in (None, -1) else case.window[0],
        0 if case.causal else None if case.window[1] in (None, -1) else case.window[1],
        *(longest if case.packed and case.say_longest else (None, None)),
        torch.float16 if case.half else torch.bfloat16,
        case.scale,
        case.softcap,
    )


def _bounds(case: QuantizedCase, side: int) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(pair[side] for pair in case.lengths)], dtype=torch.int32)


def _rows(case: QuantizedCase, side: int) -> Tensor:
    """Of each row its sequence, the number of its block, and its place there; -1 for rows past the last bound."""
    found, start = [], 0
    for b, pair in enumerate(case.lengths):
        first = start // BLOCK + b if case.packed else 0
        found += [(b, first + j // BLOCK, j % BLOCK) for j in range(pair[side])]
        start += pair[side]
    return torch.tensor([*found, *[(-1, -1, -1)] * case.spare], dtype=torch.int64).view(-1, 3)


def _num_blocks(case: QuantizedCase, rows: Tensor) -> int:
    batch = len(case.lengths)
    return len(rows) // BLOCK + batch if case.packed else -(-(len(rows) // max(batch, 1)) // BLOCK)


def _scale(case: QuantizedCase, kind: str, heads: int, rows: Tensor, make: torch.Generator) -> Tensor:
    """Scales of which numbers of size 100 become about 1, each by another factor; 1 for blocks that nobody has."""
    batch, blocks = len(case.lengths), _num_blocks(case, rows)
    lead: tuple[int, ...] = () if case.packed else (batch,)
    shape = {"block": (*lead, heads, blocks), "head": (*lead, heads, 1), "tensor": (1,) * (len(lead) + 2)}[kind]
    scale = (torch.rand(shape, generator=make) + 0.5) / 100
    if kind == "block":
        nobody = [n for n in range(blocks) if not (rows[:, 1] == n).any()]
        scale[..., nobody] = 1.0
    return scale


def _by_row(case: QuantizedCase, scale: Tensor, rows: Tensor) -> Tensor:
    """``(rows, heads or 1)`` float64; 1 past the last bound."""
    b, block, _ = rows.clamp(min=0).unbind(1)
    block = block if scale.shape[-1] > 1 else block * 0
    if not scale.numel():
        return torch.ones(len(rows), 1, dtype=torch.float64)
    found = scale[:, block].T if case.packed else scale[b if scale.shape[0] > 1 else b * 0, :, block]
    return torch.where(rows[:, :1] < 0, 1.0, found.double())


def _dense(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, len(x) // batch)) if batch else x[None, :0].expand(0, 0, *x.shape[1:])


def _transposed(case: QuantizedCase, values: Tensor, rows: Tensor) -> Tensor:
    """v as a call takes it, from ``(rows, heads, dim)``."""
    batch, columns = len(case.lengths), _num_blocks(case, rows) * BLOCK
    bits = torch.zeros(1 if case.packed else batch, *values.shape[1:], columns, dtype=torch.uint8)
    exist = rows[:, 0] >= 0
    b, block, place = rows[exist].unbind(1)
    position = torch.tensor([ORDER.index(j) for j in range(16)])[place % 16]
    bits[b * 0 if case.packed else b, :, :, block * BLOCK + place // 16 * 16 + position] = values.view(torch.uint8)[
        exist
    ]
    return (bits[0] if case.packed else bits).view(FLOAT8)


@dataclass(frozen=True, eq=False)
class Exact:
    """The reference of a call, float64, and how far rounding may take a result from it.

    Attributes:
        out: ``(rows, num_heads_q, head_dim_v)``, or the same after batch: attention over the dequantised numbers.
        lse: ``(num_heads_q, rows)``, or the same after batch: its lse, of the true scores.
        worst: Like out: how far one output may be off.
        usual: Like out: its standard deviation if roundings are independent.
        worst_lse: Like lse.
        usual_lse: Like lse.
    """

    out: Tensor
    lse: Tensor
    worst: Tensor
    usual: Tensor
    worst_lse: Tensor
    usual_lse: Tensor


@dataclass(frozen=True)
class Rounding:
    """What a backend rounds.

    Attributes:
        most: The largest relative error of a probability.
        mean: The root of the mean of its square.
        lost: What a probability may lose, against the largest of its row.
        sums: The error of a product's sum, against the sum of its terms' magnitudes.
    """

    most: float
    mean: float
    lost: float
    sums: float


# e4m3 has 3 bits after the first: half a step is at most 2^-4 of a number, and 0.0265 on average if the logarithms of
# numbers are spread evenly. The smallest number is 2^-9, and the largest probability is rounded as 2^8. Hopper's
# products keep 13 bits of their sums.
EIGHT_BIT, WIDE = Rounding(2**-4, 0.0265, 2**-18, 2**-11), Rounding(0.0, 0.0, 0.0, 2**-19)


def exact(call: QuantizedCall, rounding: Rounding) -> Exact:
    """Attention by definition, one sequence at a time."""
    p, t, packed = call.problem, call.wide, call.case.packed
    shape = (*t.q.shape[:-1], p.head_dim_v)
    wide = [torch.zeros(shape, dtype=torch.float64) for _ in range(3)]
    narrow = [torch.zeros(shape[:-1], dtype=torch.float64).transpose(-1, -2) for _ in range(3)]
    narrow[0].fill_(-torch.inf)
    starts = [_bounds(call.case, side).tolist() for side in (0, 1)]
    for b in range(p.batch):
        rows, keys = (slice(*start[b : b + 2]) if packed else b for start in starts)
        of_rows = (slice(None), rows) if packed else b
        logits = (_own(x, of) for x, of in ((call.tensors.shift, of_rows), (call.tensors.sinks, slice(None))))
        found = _attend(p, (t.q[rows], t.k[keys], t.v[keys]), *logits, rounding)
        for places, values in ((wide, found[:3]), (narrow, found[3:])):
            for place, value in zip(places, values, strict=True):
                place[rows if places is wide else of_rows] = value
    return Exact(wide[0], narrow[0], wide[1], wide[2], narrow[1], narrow[2])


def _own(x: Tensor | None, place: Any) -> Tensor | None:
    return None if x is None else x.detach().cpu().double()[place]


def _attend(
    p: Problem, rows: tuple[Tensor, Tensor, Tensor], shift: Tensor | None, sinks: Tensor | None, r: Rounding
) -> tuple[Tensor, ...]:
    """out, worst and usual ``(rows, heads, dim)``, then lse, worst_lse and usual_lse ``(heads, rows)``."""
    q, k, v = (x.transpose(0, 1) for x in rows)
    k, v = (x.repeat_interleave(p.group_size, 0) for x in (k, v))
    scores = (q @ k.mT + (0.0 if shift is None else shift[..., None])) * p.softmax_scale
    if p.softcap:
        scores = p.softcap * torch.tanh(scores / p.softcap)
    keep = p.band.dense(q.shape[1], k.shape[1])
    scores = torch.where(keep, scores, -torch.inf)
    columns = [scores, *([] if sinks is None else [sinks[:, None, None].expand(*scores.shape[:2], 1)])]
    lse = torch.cat(columns, -1).logsumexp(-1) if sum(x.shape[-1] for x in columns) else scores.sum(-1) - torch.inf
    finite_lse = torch.where(lse == -torch.inf, 0.0, lse)[..., None]
    weights = torch.exp(scores - finite_lse)
    out, size, squares = weights @ v, weights @ v.abs(), weights**2
    spread = (squares @ v**2 - 2 * out * (squares @ v) + out**2 * squares.sum(-1, keepdim=True)).clamp(min=0).sqrt()
    # Of the largest probability of a row; and what the sum of a score's terms is off by.
    top = weights.amax(-1, keepdim=True) if weights.shape[-1] else finite_lse * 0
    terms = torch.where(keep, q.abs() @ k.abs().mT, 0.0) * abs(p.softmax_scale)
    off = r.sums * (terms.amax(-1, keepdim=True) if terms.shape[-1] else finite_lse * 0)
    lost = r.lost * top * keep.double().sum(-1, keepdim=True)
    lost_out = r.lost * top * (keep.double() @ v.abs()) + lost * out.abs()
    step = torch.finfo(p.out_dtype).eps
    others = (off + r.sums) * (size + out.abs()) + 1.1 * lost_out + 0.51 * step * out.abs() + 1e-6
    worst = 1.1 * r.most / (1 - r.most) * (size + out.abs()) + others
    others_lse = off + 1.1 * lost + 2e-6 * (1 + finite_lse.abs())
    worst_lse = 1.1 * r.most / (1 - r.most) + others_lse
    usual_lse = r.mean * squares.sum(-1, keepdim=True).sqrt() + others_lse
    by_row = (x.transpose(0, 1) for x in (out, worst, r.mean * spread + others))
    return *by_row, lse, worst_lse[..., 0], usual_lse[..., 0]


def judge(call: QuantizedCall, backend: str, rounding: Rounding = EIGHT_BIT, watched: bool = False) -> None:
    """Checks a backend against the reference, or that it refuses with the reasons it declares. Never skips.

    ``watched``: a tool checks the device's memory, which is then not filled beforehand.
    """
    against = dispatch.reasons(backend, call.problem, "quantized")
    if against:
        with pytest.raises(UnsupportedError) as caught:
            call.run(backend)
        assert all(reason in str(caught.value) for reason in against)
        return
    with nullcontext() if watched else poisoned_memory():
        out, lse = (x.cpu() for x in call.run(backend))
    want, dtype = exact(call, rounding), call.options.dtype if call.case.out_scale is None else FLOAT8
    assert out.dtype == dtype == call.problem.out_dtype and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous() and out.shape == want.out.shape and lse.shape == want.lse.shape
    if (scale := call.case.out_scale) is not None:
        # Half a step of the smallest numbers, 2^-9, besides half a step of all, which ``exact`` knows.
        out, least = out.double() * scale, 2**-10 * scale
        most = 448 * scale
        want = replace(want, out=want.out.clamp(-most, most), worst=want.worst + least, usual=want.usual + least)
    _assert_within("out", out, want.out, want.worst, want.usual)
    _assert_within("lse", lse, want.lse, want.worst_lse, want.usual_lse)


def _assert_within(name: str, got: Tensor, want: Tensor, worst: Tensor, usual: Tensor) -> None:
    assert torch.equal(want == -torch.inf, got == -torch.inf), f"{name}: rows without keys differ"
    off = torch.where(want == -torch.inf, 0.0, got.double() - want).abs()
    assert (off <= worst).all(), f"{name}: off by {(off / worst).max():.2f} of what an element may be"
    if got.numel():
        # The largest error of one rounding is 2.4 times the mean.
        found, most = off.square().mean().sqrt(), 2.5 * usual.square().mean().sqrt()
        assert found <= most, f"{name}: {found:.2e} off on average, at most {most:.2e}"


def emulated(call: QuantizedCall, block_n: int = BLOCK) -> tuple[Tensor, Tensor]:
    """out and lse in float64 as a kernel computes them, but for float32: block by block, with P rounded to e4m3.

    What is not emulated is the order in which keys are visited: from the first to the last.
    """
    p, case, t = call.problem, call.case, call.wide
    out = torch.zeros(*t.q.shape[:-1], p.head_dim_v, dtype=torch.float64)
    lse = torch.full(out.shape[:-1], -torch.inf, dtype=torch.float64).transpose(-1, -2)
    starts = [_bounds(case, side).tolist() for side in (0, 1)]
    for b in range(p.batch):
        rows, keys = (slice(*start[b : b + 2]) if case.packed else b for start in starts)
        of_rows = (slice(None), rows) if case.packed else b
        q, k, v = (x.transpose(0, 1) for x in (t.q[rows], t.k[keys], t.v[keys]))
        k, v = (x.repeat_interleave(p.group_size, 0) for x in (k, v))
        scores = q @ k.mT * p.softmax_scale
        scores = p.softcap * torch.tanh(scores / p.softcap) if p.softcap else scores
        scores = torch.where(p.band.dense(q.shape[1], k.shape[1]), scores, -torch.inf)
        acc, top = torch.zeros(*q.shape[:-1], p.head_dim_v).double(), torch.full(q.shape[:-1], -torch.inf).double()
        total = torch.zeros_like(top)
        for part, values in zip(scores.split(block_n, -1), v.split(block_n, 1), strict=True):
            if not part.shape[-1]:
                continue
            raised = torch.maximum(top, part.amax(-1))
            finite_max = torch.where(raised == -torch.inf, 0.0, raised)
            probs = (256 * torch.exp(part - finite_max[..., None])).float().to(FLOAT8).double() / 256
            rescale = torch.exp(top - finite_max)
            acc, total, top = acc * rescale[..., None] + probs @ values, total * rescale + probs.sum(-1), raised
        shift, sinks = _own(call.tensors.shift, of_rows), _own(call.tensors.sinks, slice(None))
        top = top + (0.0 if shift is None else shift * p.softmax_scale)
        found = top + total.log()
        found = torch.where(total == 0, -torch.inf, found)
        weight = torch.exp(found - (found if sinks is None else torch.logaddexp(found, sinks[:, None])))
        out[rows] = torch.where(total == 0, 0.0, weight / total)[..., None].mul(acc).transpose(0, 1)
        lse[of_rows] = found if sinks is None else torch.logaddexp(found, sinks[:, None])
    return out, lse
