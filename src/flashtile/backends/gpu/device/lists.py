"""Block lists: which blocks of keys each block of rows keeps, or of rows each block of keys; ``mods.block_mask``.

A loop over a list is a loop over a range: it walks positions, and ``number_of`` says which block is at one. A list has
partial blocks first, which the mask's function or bits decide about, then full ones.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bounds_of(lists, b, h, first, exists):
    """The three bounds of the list of the block in which element ``first`` lies; an empty list if not ``exists``."""
    block = first // lists.BLOCK
    there = exists & (block < lists.count)
    at = lists.bounds + (tl.cast(b, tl.int64) * lists.batch_step + tl.cast(h, tl.int64) * lists.head_step) + 3 * block
    return tl.load(at, mask=there, other=0), tl.load(at + 1, mask=there, other=0), tl.load(at + 2, mask=there, other=0)


@triton.jit
def bits_of(lists, b, h, first, start, exists):
    """Where in ``items`` the bits of the block at position 0 would be, if the list from ``start`` on began there."""
    WORDS: tl.constexpr = lists.BLOCK * lists.OTHER // 32
    number = (b * lists.batch_step + h * lists.head_step) // 3 + first // lists.BLOCK
    there = exists & (first // lists.BLOCK < lists.count)
    return tl.load(lists.items + number, mask=there, other=0) - start * WORDS


@triton.jit
def positions_of(lists, b, h, first, exists, length, TILE: tl.constexpr):
    """What ``blocks.block_range`` returns, of a list, in positions of tiles of the other side.

    Before full_start are partial blocks; from full_stop on are full ones that may lie on an edge.

    Args:
        lists: ``Lists``.
        b: The sequence.
        h: The query head.
        first: First element of this side's tile.
        exists: Whether there is such a sequence.
        length: Elements of the other side.
        TILE: Elements of a tile of the other side, which divides ``OTHER``.
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
    """The tile of the other side at a position: of a range, where ``lists`` is None, the position itself."""
    number = position
    if lists is not None:
        SPLIT: tl.constexpr = lists.OTHER // TILE
        number = tl.load(lists.items + position // SPLIT) * SPLIT + position % SPLIT
    return number


@triton.jit
def kind_of(lists, b, h, first, other):
    """Whether the blocks of element ``first`` and of ``other``, of the other side, are 0, 1 (partial) or 2 (full)."""
    start, full_start, stop = bounds_of(lists, b, h, first, True)
    block = other // lists.OTHER
    partial, full = _has(lists, start, full_start, block), _has(lists, full_start, stop, block)
    return tl.where(full, 2, tl.where(partial, 1, 0))


@triton.jit
def _has(lists, low, high, block):
    """Whether a block is in the sorted part ``low ... high - 1`` of the items."""
    stop = high
    while low < high:
        middle = (low + high) // 2
        before = tl.load(lists.items + middle) < block
        low, high = tl.where(before, middle + 1, low), tl.where(before, high, middle)
    return (low < stop) & (tl.load(lists.items + low, mask=low < stop, other=-1) == block)
