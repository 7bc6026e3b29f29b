"""Block lists: the blocks of keys that each block of rows keeps, or the reverse; see ``mods.block_mask``.

A loop over a list is a loop over a range of positions, and ``number_of`` gives the block at a position. A list has
partial blocks first, in which the mask's function or bits decide, and then full blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bounds_of(lists, b, h, first, exists):
    """The three bounds of the list for the block that contains element ``first``; an empty list if not ``exists``."""
    block = first // lists.BLOCK
    there = exists & (block < lists.count)
    at = lists.bounds + (tl.cast(b, tl.int64) * lists.batch_step + tl.cast(h, tl.int64) * lists.head_step) + 3 * block
    return tl.load(at, mask=there, other=0), tl.load(at + 1, mask=there, other=0), tl.load(at + 2, mask=there, other=0)


@triton.jit
def bits_of(lists, b, h, first, start, exists):
    """Offset in ``items`` of this row block's bitmaps. The bitmap at list position p begins at offset + p * WORDS."""
    WORDS: tl.constexpr = lists.BLOCK * lists.OTHER // 32
    number = (b * lists.batch_step + h * lists.head_step) // 3 + first // lists.BLOCK
    there = exists & (first // lists.BLOCK < lists.count)
    return tl.load(lists.items + number, mask=there, other=0) - start * WORDS


@triton.jit
def positions_of(lists, b, h, first, exists, length, TILE: tl.constexpr):
    """The results of ``blocks.block_range`` for a list, in positions of tiles of the other side.

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
    start, full_start, stop = bounds_of(lists, b, h, first, exists)
    full_stop = full_start
    if not lists.EDGES:
        last = tl.load(lists.items + stop - 1, mask=stop > full_start, other=0)
        full_stop = tl.where((stop > full_start) & ((last + 1) * lists.OTHER > length), stop - 1, stop)
    return start * SPLIT, full_start * SPLIT, full_stop * SPLIT, stop * SPLIT


@triton.jit
def number_of(position, lists, TILE: tl.constexpr):
    """The tile of the other side at a position; if ``lists`` is None, the position itself."""
    number = position
    if lists is not None:
        SPLIT: tl.constexpr = lists.OTHER // TILE
        number = tl.load(lists.items + position // SPLIT) * SPLIT + position % SPLIT
    return number


@triton.jit
def kind_of(lists, b, h, first, other):
    """The kind of the pair of blocks with elements ``first`` and ``other``: 0, 1 (partial) or 2 (full)."""
    start, full_start, stop = bounds_of(lists, b, h, first, True)
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
