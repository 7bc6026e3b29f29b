"""The parts of a sequence's rectangles that interval masks, block lists and the user's mask function keep."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flashtile.mods.block_mask import FULL, PARTIAL

if TYPE_CHECKING:
    from flashtile.backends.cpu.plan import DenseSequences, Rectangle


class BlockLists(NamedTuple):
    """The lists of some sequences, as in ``mods.block_mask.BlockMask``.

    Attributes:
        bounds: ``(batch or 1, heads or 1, blocks_q, 3)``.
        items: The numbers of blocks of keys.
        block_size: Rows and keys of a block.
    """

    bounds: Tensor
    items: Tensor
    block_size: tuple[int, int]


def cut(seq: DenseSequences, block: list[Rectangle]) -> list[Rectangle]:
    """A block of rows, without the keys that intervals or lists leave out."""
    if seq.row_keys is not None or seq.key_rows is not None:
        block = _cut_by_intervals(seq, block)
    return block if seq.lists is None else _cut_by_lists(seq, seq.lists, block)


def _cut_by_intervals(seq: DenseSequences, block: list[Rectangle]) -> list[Rectangle]:
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


def _cut_by_lists(seq: DenseSequences, lists: BlockLists, block: list[Rectangle]) -> list[Rectangle]:
    """A block of rows, without the keys that no list has; keys that all lists call full are rectangles of their own."""
    kinds, of_keys = _kinds(lists, block[0].rows, seq.seqlen_k).flatten(0, 2), lists.block_size[1]
    kept, full = (kinds != 0).any(0), (kinds == FULL).all(0)
    spans, n = [], 0
    for kind, run in itertools.groupby((kept.int() + full.int()).tolist()):
        first, n = n, n + len(list(run))
        if kind:
            spans.append((first * of_keys, n * of_keys))
    cut = ((each, max(each.keys[0], low), min(each.keys[1], high)) for each in block for low, high in spans)
    return [replace(each, keys=(start, end)) for each, start, end in cut if start < end]


def within_intervals(seq: DenseSequences, rectangle: Rectangle) -> Tensor | None:
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


def within_lists(seq: DenseSequences, rectangle: Rectangle, at: dict[str, Tensor], dtype: torch.dtype) -> Tensor | None:
    """The pairs of a rectangle that lists and the mask function keep; it broadcasts to the scores. None for all."""
    if seq.lists is None:
        return None if seq.mask_mod is None else seq.mask_mod.values([seq.mask_mod.graph.result], at, dtype)[0]
    of_rows, of_keys = seq.lists.block_size
    (row, row_stop), (key, key_stop) = rectangle.rows, rectangle.keys
    kinds = _kinds(seq.lists, rectangle.rows, seq.seqlen_k)[..., key // of_keys : -(-key_stop // of_keys)]
    if bool((kinds == FULL).all()):
        return None
    device = kinds.device
    m = torch.arange(row, row_stop, device=device) // of_rows - row // of_rows
    n = torch.arange(key, key_stop, device=device) // of_keys - key // of_keys
    kind = kinds[:, :, m][..., n]
    if seq.mask_mod is None or not bool((kinds == PARTIAL).any()):
        return kind != 0
    return (kind == FULL) | ((kind == PARTIAL) & seq.mask_mod.values([seq.mask_mod.graph.result], at, dtype)[0])


def _span(intervals: Tensor, span: tuple[int, int]) -> Tensor:
    return intervals if intervals.shape[2] == 1 else intervals[:, :, slice(*span)]


def _kinds(lists: BlockLists, rows: tuple[int, int], seqlen_k: int) -> Tensor:
    """0, ``PARTIAL`` or ``FULL`` for each block that has some rows: ``(b, h, blocks of rows, blocks_k)`` int8."""
    of_rows, of_keys = lists.block_size
    bounds = lists.bounds[:, :, rows[0] // of_rows : -(-rows[1] // of_rows)].long()
    start, full_start, stop = bounds.flatten(0, -2).unbind(-1)
    counts = stop - start
    owner = torch.repeat_interleave(counts)
    at = torch.arange(len(owner), device=owner.device) + (start - counts.cumsum(0) + counts)[owner]
    found = torch.zeros(len(counts), -(-seqlen_k // of_keys), dtype=torch.int8, device=owner.device)
    kind = torch.where(at < full_start[owner], PARTIAL, FULL).to(torch.int8)
    # The list may name blocks that a shorter packed sequence does not have.
    item = lists.items[at].long()
    there = item < found.shape[1]
    found[owner[there], item[there]] = kind[there]
    return found.view(*bounds.shape[:3], -1)
