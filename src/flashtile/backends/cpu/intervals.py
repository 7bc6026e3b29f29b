"""The parts of a sequence's rectangles that interval masks keep."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flashtile.backends.cpu.plan import DenseSequences, Rectangle


def within(seq: DenseSequences, rectangle: Rectangle) -> Tensor | None:
    """The pairs of a rectangle that intervals keep, ``(batch or 1, heads or 1, rows, keys)``; None for all."""
    keep: Tensor | None = None
    if seq.row_keys is not None:
        ends = _span(seq.row_keys, rectangle.rows)
        if ends[..., 0].max() > rectangle.keys[0] or ends[..., 1].min() < rectangle.keys[1]:
            j = torch.arange(*rectangle.keys, device=ends.device)
            keep = (ends[..., :1] <= j) & (j < ends[..., 1:])
    if seq.key_rows is not None:
        ends = _span(seq.key_rows, rectangle.keys)[:, :, None]
        if ends[..., 0].max() > rectangle.rows[0] or ends[..., 1].min() < rectangle.rows[1]:
            i = torch.arange(*rectangle.rows, device=ends.device)[:, None]
            kept = (ends[..., 0] <= i) & (i < ends[..., 1])
            keep = kept if keep is None else keep & kept
    return keep


def _span(intervals: Tensor, span: tuple[int, int]) -> Tensor:
    return intervals if intervals.shape[2] == 1 else intervals[:, :, slice(*span)]


def cut(seq: DenseSequences, block: list[Rectangle]) -> list[Rectangle]:
    """A block of rows, without the keys at its two ends that no interval of its rows contains."""
    (first, stop), (low, high) = block[0].rows, (0, seq.seqlen_k)
    if seq.row_keys is not None:
        ends = _span(seq.row_keys, (first, stop))
        ends = ends[ends[..., 0] < ends[..., 1]]
        low, high = (int(ends[:, 0].min()), int(ends[:, 1].max())) if len(ends) else (0, 0)
    if seq.key_rows is not None and seq.key_rows.shape[2] > 1:
        ends = seq.key_rows
        seen = ((ends[..., 0] < stop) & (ends[..., 1] > first)).flatten(0, 1).any(0).nonzero()
        low, high = (max(low, int(seen[0])), min(high, int(seen[-1]) + 1)) if len(seen) else (0, 0)
    cut = ((each, max(each.keys[0], low), min(each.keys[1], high)) for each in block)
    return [replace(each, keys=(start, end)) for each, start, end in cut if start < end]
