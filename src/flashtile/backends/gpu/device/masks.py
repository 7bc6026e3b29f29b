"""Chunks, interval masks and block lists: which blocks a loop visits, and which pairs of a block a row keeps.

With an interval a row keeps keys ``start <= j < end``, or rows ``start <= i < end`` keep a key. Loops leave out blocks
that no interval reaches, by bounds: four numbers for each tile of rows or of keys, which ``interval_bounds`` writes
beforehand. Blocks that an interval cuts are masked by pair.

A list has the blocks of keys that a block of rows keeps, or the reverse; see ``mods.block_mask``. A loop over a list is
a loop over a range of positions, and ``block_at`` gives the block at a position. A list has partial blocks first, in
which the mask's function or bits decide, and then full blocks.
"""

# ruff: noqa: RET505 - Triton compiles code after a return, even if the condition is decided.
from __future__ import annotations

import triton
import triton.language as tl

# A number past every row and key.
FAR = tl.constexpr(2**30)


@triton.jit
def chunk_start(p, chunk):
    """The first key of a position's chunk; 0 for positions before the first key, which are in no chunk with keys."""
    return tl.maximum(p, 0) // chunk * chunk


@triton.jit
def chunk_stop(p, chunk):
    """The end of the keys in a position's chunk."""
    return tl.where(p < 0, 0, chunk_start(p, chunk) + chunk)


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
    """The results of ``tiles.block_range`` narrowed to a tile's ``bounds_of``, in the same order."""
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
    """The ``TileBounds`` of one tile of one head.

    Args:
        own: ``Interval`` for the tiles' side, or None.
        others: ``Interval`` for the other side, or None.
        table: ``BoundsTable``.
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


@triton.jit
def list_bounds(lists, b, h, first, exists):
    """The three bounds of the list for the block that contains element ``first``; an empty list if not ``exists``."""
    block = first // lists.BLOCK
    there = exists & (block < lists.count)
    head = tl.cast(h // lists.heads_each, tl.int64)
    at = lists.bounds + (tl.cast(b, tl.int64) * lists.batch_step + head * lists.head_step) + 3 * block
    return tl.load(at, mask=there, other=0), tl.load(at + 1, mask=there, other=0), tl.load(at + 2, mask=there, other=0)


@triton.jit
def bits_of(lists, b, h, first, start, exists):
    """Offset in ``items`` of this row block's bitmaps. The bitmap at list position p begins at offset + p * WORDS."""
    WORDS: tl.constexpr = lists.BLOCK * lists.OTHER // 32
    number = (b * lists.batch_step + h // lists.heads_each * lists.head_step) // 3 + first // lists.BLOCK
    there = exists & (first // lists.BLOCK < lists.count)
    return tl.load(lists.items + number, mask=there, other=0) - start * WORDS


@triton.jit
def bits_at(lists, first, position, own, TILE: tl.constexpr):
    """(the place of the bits for a row of 64 elements by TILE, the number of other elements' low bits in each number).

    Args:
        lists: ``Lists`` with bits.
        first: The result of ``bits_of``.
        position: The position of the other side's tile in its list.
        own: The first element of this side.
        TILE: Elements of the other side's tile.
    """
    SPLIT: tl.constexpr = lists.OTHER // TILE
    at = first + position // SPLIT * (lists.BLOCK * lists.OTHER // 32) + own % lists.BLOCK * 4
    if TILE % 128 == 0:
        return at + position % SPLIT * (TILE // 128 * lists.BLOCK * 4), 0
    else:
        col = position % SPLIT * TILE
        return at + col // 128 * (lists.BLOCK * 4), col % 128 // 4


@triton.jit
def positions_of(lists, b, h, first, exists, length, TILE: tl.constexpr):
    """The results of ``tiles.block_range`` for a list, in positions of tiles of the other side.

    Blocks before full_start are partial. Blocks from full_stop on are full, but may lie on an edge.

    Args:
        lists: ``Lists``.
        b: The sequence.
        h: The query head.
        first: First element of this side's tile.
        exists: Whether the sequence exists.
        length: Elements of the other side.
        TILE: Elements of a tile of the other side; it divides ``OTHER``.
    """
    SPLIT: tl.constexpr = lists.OTHER // TILE
    start, full_start, stop = list_bounds(lists, b, h, first, exists)
    full_stop = full_start
    if not lists.EDGES:
        last = tl.load(lists.items + stop - 1, mask=stop > full_start, other=0)
        full_stop = tl.where((stop > full_start) & ((last + 1) * lists.OTHER > length), stop - 1, stop)
    return start * SPLIT, full_start * SPLIT, full_stop * SPLIT, stop * SPLIT


@triton.jit
def block_at(position, lists, TILE: tl.constexpr):
    """The tile of the other side at a position; if ``lists`` is None, the position itself."""
    number = position
    if lists is not None:
        SPLIT: tl.constexpr = lists.OTHER // TILE
        number = tl.load(lists.items + position // SPLIT) * SPLIT + position % SPLIT
    return number


@triton.jit
def kind_of(lists, b, h, first, other):
    """The kind of the pair of blocks with elements ``first`` and ``other``: 0, 1 (partial) or 2 (full)."""
    start, full_start, stop = list_bounds(lists, b, h, first, True)
    block = other // lists.OTHER
    partial, full = _has(lists, start, full_start, block), _has(lists, full_start, stop, block)
    return tl.where(full, 2, tl.where(partial, 1, 0))


@triton.jit
def _has(lists, low, high, block):
    """Whether a block is in the sorted items ``low ... high - 1``."""
    stop = high
    while low < high:
        middle = (low + high) // 2
        before = tl.load(lists.items + middle) < block
        low, high = tl.where(before, middle + 1, low), tl.where(before, high, middle)
    return (low < stop) & (tl.load(lists.items + low, mask=low < stop, other=-1) == block)
