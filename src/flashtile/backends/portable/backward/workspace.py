"""What the backward's kernels hand on to one another: the terms of rows, and dk and dv by gqa_splits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashtile.backends.gpu.launch import Pointer
from flashtile.backends.portable.backward.config import heads_per_split
from flashtile.backends.portable.device.records import RowTerms
from flashtile.call.problem import Problem, Tensors

_MAX_TILE = 128


class Repair(NamedTuple):
    """A repair of rows that another backend's kernels have lost: ``RowTerms.flags``.

    Attributes:
        flag_rows: ``RowTerms.FLAG_ROWS``.
        bounds: The operand with the bounds of intervals.
    """

    flag_rows: int
    bounds: str


def row_pitch(rows: int, varlen: bool) -> int:
    """Rows of delta and lse per head, padded so that the last tile of rows fits.

    A dense sequence's tiles start on multiples of their size, so with a pitch that is a multiple of the largest size no
    load needs a mask, and all are aligned. A packed sequence's tiles start anywhere.
    """
    return -(-(rows + (_MAX_TILE if varlen else 0)) // _MAX_TILE) * _MAX_TILE


def num_rows(problem: Problem, tensors: Tensors) -> int:
    """Float32 numbers of delta, of lse, which follows it, and of its second part."""
    batch = 1 if problem.varlen else problem.batch
    return batch * problem.num_heads_q * row_pitch(tensors.q.shape[-3], problem.varlen)


def places_of(problem: Problem, tensors: Tensors) -> tuple[int, int, int, int]:
    """Where lse, dk by split and dv by split begin in the workspace, and its size, in float32 numbers."""
    rows, splits = num_rows(problem, tensors), gqa_splits(problem)
    dk, dv = (-(-x.numel() * splits // 4) * 4 if splits > 1 else 0 for x in (tensors.k, tensors.v))
    start = (3 if problem.large_scores else 2) * rows
    return rows, start, start + dk, start + dk + dv


def gqa_splits(problem: Problem) -> int:
    """How many programs share the query heads of one key head in dk and dv."""
    return -(-problem.group_size // (heads_per_split(problem) or problem.group_size))


def row_terms(problem: Problem, tensors: Tensors, repair: Repair | None = None) -> RowTerms:
    """Where ``prepare_rows`` puts them, or a kernel that leaves rows to a repair."""
    delta, lse, rest, flags = (
        Pointer(torch.int32 if n == 3 else torch.float32, "rows", 4 * n * num_rows(problem, tensors)) for n in range(4)
    )
    made = RowTerms(lse, delta, row_pitch(tensors.q.shape[-3], problem.varlen), rest if problem.large_scores else None)
    return made if repair is None else made._replace(flags=flags, FLAG_ROWS=repair.flag_rows)
