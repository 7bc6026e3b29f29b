"""Which tile a program works on. The longest tiles start first, so that the last to finish are short."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def longest_first(block, num_blocks, HAS_RIGHT: tl.constexpr):
    """Query blocks in order of decreasing work: under a right bound the last rows see the most keys."""
    if HAS_RIGHT:
        block = num_blocks - 1 - block
    return block


@triton.jit
def grouped_tile(pid, num_blocks, num_heads, heads_at_once):
    """The block and the head of a program: groups of heads in order, in a group the first blocks of all heads first.

    Blocks of about the same cost then run at the same time, the last ones to start are short if the longest come first,
    and the heads of a group share the cache.

    Args:
        pid: 0 <= pid < num_blocks * num_heads.
        num_blocks: Blocks per head.
        num_heads: Heads of all sequences together.
        heads_at_once: Heads of a group, >= 1; the last group may have fewer.

    Returns:
        (block, head).
    """
    group = tl.minimum(heads_at_once, num_heads)
    first = pid // (group * num_blocks) * group
    group_here = tl.minimum(group, num_heads - first)
    place = pid - first * num_blocks
    return place // group_here, first + place % group_here


@triton.jit
def packed_tile(cu_seqlens_ptr, num_sequences, tile, BLOCK: tl.constexpr, rows_per_token=1, SPARE: tl.constexpr = 0):
    """The sequence and the block of a tile of packed sequences, in O(log num_sequences) reads, without prefix sums.

    Sequence b owns the tiles from ``first_packed_tile`` of b to that of b + 1: always enough for its blocks,
    because a sequence that straddles a multiple of BLOCK needs at most one block more than the multiples it crosses.
    Spare tiles get a block past the sequence's end. A launch needs one tile more than come before the end of the rows
    past every sequence, which belong to ``b == num_sequences``.

    Args:
        cu_seqlens_ptr: (num_sequences + 1,) int32.
        num_sequences: How many there are.
        tile: The tile.
        BLOCK: Rows of a tile.
        rows_per_token: Rows of a position: more than one where the heads of a group share tiles.
        SPARE: Positions by which a length is rounded up at most, where tiles are made of whole strips of positions.

    Returns:
        (b, block).
    """
    low, high = 0, num_sequences
    while low < high:
        middle = (low + high + 1) // 2
        start = tl.load(cu_seqlens_ptr + middle)
        if first_packed_tile(start, middle, BLOCK, rows_per_token, SPARE) <= tile:
            low = middle
        else:
            high = middle - 1
    start = tl.load(cu_seqlens_ptr + low)
    return low, tile - first_packed_tile(start, low, BLOCK, rows_per_token, SPARE)


@triton.jit
def first_packed_tile(start, b, BLOCK: tl.constexpr, rows_per_token, SPARE: tl.constexpr):
    """The first tile of sequence b, which begins at position ``start``; see ``packed_tile``."""
    return (start + b * SPARE) * rows_per_token // BLOCK + b


def num_packed_tiles(total: int, num_sequences: int, block: int, rows_per_token: int = 1, spare: int = 0) -> int:
    """Programs that ``packed_tile`` needs to reach every row of a packed tensor."""
    return (total + (num_sequences + 1) * spare) * rows_per_token // block + num_sequences + 1
