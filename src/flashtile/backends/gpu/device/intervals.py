"""Interval masks: a row keeps keys ``start <= j < end``, or rows ``start <= i < end`` keep a key.

Loops leave out blocks that no interval reaches, by bounds: four numbers for each tile of rows or of keys, which
``interval_bounds`` writes beforehand. Blocks that an interval cuts are masked by pair.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A number past every row and key.
FAR = tl.constexpr(2**30)


@triton.jit
def base_of(interval, b, h):
    """The address of a sequence's and query head's first pair of ends."""
    return interval.ptr + (tl.cast(b, tl.int64) * interval.batch_step + tl.cast(h, tl.int64) * interval.head_step)


@triton.jit
def ends_of(interval, b, h, element, exists):
    """(start, end) of elements' intervals; (0, 0) for elements that do not exist."""
    at = base_of(interval, b, h) + element * interval.step
    exists = exists & (element >= 0) & ((element < interval.count) | (interval.step == 0))
    return tl.load(at, mask=exists, other=0), tl.load(at + 1, mask=exists, other=0)


@triton.jit
def select(x, interval, b, h, element, other, fill):
    """x, or fill where ``other`` is not in the interval of ``element``; both broadcast against x."""
    start, end = ends_of(interval, b, h, element, element >= 0)
    return tl.where(other < end, tl.where(other >= start, x, fill), fill)


@triton.jit
def bounds_of(bounds, b, h, tile, exists, COUNT: tl.constexpr):
    """(any_start, any_stop, all_start, all_stop) for COUNT tiles from ``tile`` on, as far as they exist."""
    any_start, any_stop = tile * 0 + FAR, tile * 0
    all_start, all_stop = tile * 0, tile * 0 + FAR
    base = bounds.ptr + (tl.cast(b, tl.int64) * bounds.batch_step + tl.cast(h, tl.int64) * bounds.head_step)
    for n in tl.static_range(COUNT):
        at, there = base + 4 * (tile + n), exists & (tile + n < bounds.count)
        any_start = tl.minimum(any_start, tl.load(at, mask=there, other=FAR))
        any_stop = tl.maximum(any_stop, tl.load(at + 1, mask=there, other=0))
        all_start = tl.maximum(all_start, tl.load(at + 2, mask=there, other=0))
        all_stop = tl.minimum(all_stop, tl.load(at + 3, mask=there, other=FAR))
    return any_start, any_stop, all_start, all_stop


@triton.jit
def narrowed(block_min, full_min, full_max, block_max, found, BLOCK: tl.constexpr):
    """The results of ``blocks.block_range`` narrowed to a tile's ``bounds_of``, in the same order."""
    any_start, any_stop, all_start, all_stop = found
    low = tl.minimum(tl.maximum(block_min, any_start // BLOCK), block_max)
    high = tl.maximum(tl.minimum(block_max, (any_stop + BLOCK - 1) // BLOCK), low)
    full_low = tl.minimum(tl.maximum(tl.maximum(full_min, (all_start + BLOCK - 1) // BLOCK), low), high)
    full_high = tl.minimum(tl.maximum(tl.minimum(full_max, all_stop // BLOCK), full_low), high)
    return low, full_low, full_high, high


@triton.jit
def _own_bounds(own, b, h, first, length, BLOCK: tl.constexpr):
    """``bounds_of`` for a tile, from the intervals of its elements."""
    element = first + tl.arange(0, BLOCK)
    exists = element < length
    start, end = ends_of(own, b, h, element, exists)
    start = tl.maximum(start, 0)
    keeps = exists & (start < end)
    return (
        tl.min(tl.where(keeps, start, FAR), 0),
        tl.max(tl.where(keeps, end, 0), 0),
        tl.max(tl.where(exists, start, 0), 0),
        tl.min(tl.where(exists, tl.maximum(end, 0), FAR), 0),
    )


@triton.jit
def _others_bounds(others, b, h, first, stop, table):
    """``bounds_of`` for the tile ``first ... stop - 1``, from the intervals of the other side's elements.

    The elements that keep the whole tile need not be neighbours: all_start and all_stop bound their first run.
    """
    any_start, any_stop = tl.full((), FAR, tl.int32), tl.full((), 0, tl.int32)
    all_start, all_stop = tl.full((), FAR, tl.int32), tl.full((), FAR, tl.int32)
    for at in range(0, table.other_length, table.SCAN):
        element = at + tl.arange(0, table.SCAN)
        exists = element < table.other_length
        start, end = ends_of(others, b, h, element, exists)
        meets = exists & (start < stop) & (end > first) & (start < end)
        any_start = tl.minimum(any_start, tl.min(tl.where(meets, element, FAR), 0))
        any_stop = tl.maximum(any_stop, tl.max(tl.where(meets, element + 1, 0), 0))
        all_start = tl.minimum(all_start, tl.min(tl.where(exists & (start <= first) & (end >= stop), element, FAR), 0))
    for at in range(0, table.other_length, table.SCAN):
        element = at + tl.arange(0, table.SCAN)
        exists = element < table.other_length
        start, end = ends_of(others, b, h, element, exists)
        ends = (element > all_start) & ((start > first) | (end < stop) | (element >= table.other_length))
        all_stop = tl.minimum(all_stop, tl.min(tl.where(ends, element, FAR), 0))
    return any_start, any_stop, all_start, all_stop


@triton.jit
def interval_bounds(own, others, table):
    """The ``Bounds`` of one tile of one head.

    Args:
        own: ``Interval`` for the tiles' side, or None.
        others: ``Interval`` for the other side, or None.
        table: ``Table``.
    """
    pid = tl.program_id(0)
    tile, which = pid % table.tiles, pid // table.tiles
    b, h = which // table.heads, which % table.heads
    first = tile * table.BLOCK
    stop = tl.minimum(first + table.BLOCK, table.length)
    any_start, any_stop = tl.full((), 0, tl.int32), tl.full((), FAR, tl.int32)
    all_start, all_stop = tl.full((), 0, tl.int32), tl.full((), FAR, tl.int32)
    if own is not None:
        any_start, any_stop, all_start, all_stop = _own_bounds(own, b, h, first, table.length, table.BLOCK)
    if others is not None:
        low, high, full_low, full_high = _others_bounds(others, b, h, first, stop, table)
        any_start, any_stop = tl.maximum(any_start, low), tl.minimum(any_stop, high)
        all_start, all_stop = tl.maximum(all_start, full_low), tl.minimum(all_stop, full_high)
    if any_start >= any_stop:
        any_start, any_stop = tl.full((), FAR, tl.int32), tl.full((), 0, tl.int32)
    at = table.ptr + 4 * tl.cast(pid, tl.int64)
    tl.store(at, any_start)
    tl.store(at + 1, any_stop)
    tl.store(at + 2, all_start)
    tl.store(at + 3, all_stop)
