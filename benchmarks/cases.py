"""The cells of each suite as frozen records, and the tensors they stand for."""

from __future__ import annotations

import fnmatch
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flashtile.masks import Band

Direction = Literal["forward", "backward"]

TOTAL_TOKENS = 16384
HIDDEN_SIZE = 2048
HEAD_DIMS = (64, 128, 256)
OUTLIER_STD = 10.0
FORWARD_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
BACKWARD_SEQLENS = (512, 2048, 8192, 16384)


@dataclass(frozen=True)
class Case:
    """What defines a cell of a benchmark, and nothing that is measured.

    Attributes:
        direction: ``forward``, or ``backward`` for the gradients of q, k and v alone, given a saved forward.
        dtype: Name of a torch dtype.
        batch: Sequences; for packed sequences the number of ``lengths``.
        seqlen_q: Queries a sequence; for packed sequences the longest.
        seqlen_k: Keys a sequence; for packed sequences the longest.
        num_heads_q: Query heads.
        num_heads_kv: Key and value heads.
        head_dim: Width of q, k and v.
        causal: Whether a query sees no later key.
        window: ``(left, right)`` with both ends inclusive, or None.
        lengths: Lengths of packed sequences (queries and keys alike), or None for a dense batch.
    """

    direction: Direction
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    causal: bool = False
    window: tuple[int, int] | None = None
    lengths: tuple[int, ...] | None = None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Case:
        """The record that ``to_dict`` or a saved row describes."""
        pairs = {name: tuple(fields[name]) for name in ("window", "lengths") if fields.get(name) is not None}
        return cls(**{**fields, **pairs})

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}

    @property
    def mask(self) -> str:
        """The mask in one word."""
        if self.window is not None:
            return f"window{self.window[0]}"
        return "causal" if self.causal else "full"

    @property
    def name(self) -> str:
        """A short name, such as ``forward-d128-causal-s4096``; ``--cells`` matches against it."""
        parts = [self.direction, f"d{self.head_dim}", self.mask]
        if self.lengths is not None:
            parts.append(f"packed{len(self.lengths)}")
        lengths = f"s{self.seqlen_k}" if self.seqlen_q == self.seqlen_k else f"q{self.seqlen_q}k{self.seqlen_k}"
        return "-".join([*parts, lengths] + ([self.dtype] if self.dtype != "bfloat16" else []))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def band(self) -> Band:
        """The mask of every sequence."""
        left, right = self.window or (None, None)
        return Band(left, 0 if self.causal else right)

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """``(seqlen_q, seqlen_k)`` of every sequence."""
        if self.lengths is not None:
            return [(n, n) for n in self.lengths]
        return [(self.seqlen_q, self.seqlen_k)] * self.batch

    def kept_pairs(self) -> int:
        """(query, key) pairs of one head that the mask keeps; a square causal mask counts as exactly half."""
        if self.causal and self.window is None and self.seqlen_q == self.seqlen_k:
            return sum(q * k for q, k in self.sequences) // 2
        return sum(self.band.count(q, k) for q, k in self.sequences)

    def flops(self) -> float:
        """Floating-point operations by the usual count: two products forward, two and a half times that backward."""
        forward = 4.0 * self.num_heads_q * self.head_dim * self.kept_pairs()
        return forward if self.direction == "forward" else 2.5 * forward


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of a case.

    Attributes:
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``, or ``(total, num_heads_q, head_dim)`` packed; contiguous.
        k: ``(batch, seqlen_k, num_heads_kv, head_dim)``, or packed likewise.
        v: Like k.
        dout: Like q.
        cu_seqlens: ``(batch + 1,)`` int32 for packed sequences, else None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens: Tensor | None


def make_inputs(case: Case, device: torch.device, seed: int = 0, outliers: float = 0.0) -> Inputs:
    """Normally distributed tensors: timing on zeros would flatter every kernel.

    Args:
        case: What they are for.
        device: Where they are drawn.
        seed: Of the generator.
        outliers: Share of the elements of q, k and v to which another normal number of standard deviation 10 is added.

    Returns:
        The tensors, drawn in float32 and rounded to the case's dtype.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(seqlen: int, heads: int, outliers: float = outliers) -> Tensor:
        lead = (case.batch, seqlen) if case.lengths is None else (sum(case.lengths),)
        shape = (*lead, heads, case.head_dim)
        x = torch.randn(shape, generator=generator, device=device)
        if outliers:
            struck = torch.rand(shape, generator=generator, device=device) < outliers
            x += OUTLIER_STD * struck * torch.randn(shape, generator=generator, device=device)
        return x.to(case.torch_dtype)

    cu_seqlens = None
    if case.lengths is not None:
        bounds = torch.tensor((0, *case.lengths)).cumsum(0)
        cu_seqlens = bounds.to(device=device, dtype=torch.int32)
    q = draw(case.seqlen_q, case.num_heads_q)
    k, v = (draw(case.seqlen_k, case.num_heads_kv) for _ in range(2))
    return Inputs(q, k, v, draw(case.seqlen_q, case.num_heads_q, outliers=0.0), cu_seqlens)


def _grid(direction: Direction, seqlens: tuple[int, ...], dtype: str) -> list[Case]:
    """16k tokens in all and hidden size 2048, whatever the sequence length and the head dim."""
    cells = []
    for head_dim in HEAD_DIMS:
        heads = HIDDEN_SIZE // head_dim
        for causal in (False, True):
            for seqlen in seqlens:
                batch = TOTAL_TOKENS // seqlen
                cells.append(Case(direction, dtype, batch, seqlen, seqlen, heads, heads, head_dim, causal))
    return cells


# Sixteen documents of uneven length, 8192 tokens in all, as packed pretraining batches have them.
_DOCUMENTS = (37, 64, 113, 150, 211, 256, 300, 333, 401, 512, 640, 700, 811, 1024, 1100, 1540)


def _cpu_cases() -> list[Case]:
    longest = max(_DOCUMENTS)
    return [
        Case("forward", "float32", 1, 2048, 2048, 8, 8, 64),
        Case("forward", "float32", 1, 2048, 2048, 8, 8, 64, causal=True),
        Case("forward", "float32", 1, 8192, 8192, 4, 4, 64, causal=True),
        Case("forward", "float32", 1, 8192, 8192, 4, 4, 64, causal=True, window=(256, 0)),
        Case("forward", "float32", 16, longest, longest, 4, 4, 64, causal=True, lengths=_DOCUMENTS),
        Case("forward", "float32", 1, 1, 8192, 32, 8, 128),
        Case("backward", "float32", 1, 2048, 2048, 8, 8, 64, causal=True),
    ]


def suite(name: str, dtype: str = "bfloat16") -> list[Case]:
    """The cells of a suite.

    Args:
        name: ``forward`` (36 cells), ``backward`` (24) or ``cpu``.
        dtype: Of the GPU suites; the cpu suite is float32.
    """
    if name == "forward":
        return _grid("forward", FORWARD_SEQLENS, dtype)
    if name == "backward":
        return _grid("backward", BACKWARD_SEQLENS, dtype)
    if name == "cpu":
        return _cpu_cases()
    raise ValueError(f"suite is {name!r}, must be forward, backward or cpu")


def select(cases: list[Case], pattern: str | None) -> list[Case]:
    """The cases whose name matches one of the comma-separated patterns: a glob, or a part of the name."""
    if not pattern:
        return cases
    wanted = [p.strip() for p in pattern.split(",") if p.strip()]
    globs = [p if any(c in p for c in "*?[") else f"*{p}*" for p in wanted]
    return [c for c in cases if any(fnmatch.fnmatchcase(c.name, g) for g in globs)]
