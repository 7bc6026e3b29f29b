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
def packed_tile(cu_seqlens_ptr, num_sequences, tile, BLOCK: tl.constexpr):
    """The sequence and the block of a tile of packed sequences, in O(log num_sequences) reads, without prefix sums.

    Sequence b owns the tiles from ``cu_seqlens[b] // BLOCK + b`` to the next sequence's: always enough for its blocks,
    because a sequence that straddles a multiple of BLOCK needs at most one block more than the multiples it crosses.
    Spare tiles get a block past the sequence's end. A launch needs ``total // BLOCK + num_sequences + 1`` tiles; the
    last ones belong to ``b == num_sequences``, the rows past every sequence.

    Returns:
        (b, block).
    """
    low, high = 0, num_sequences
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_seqlens_ptr + middle) // BLOCK + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low, tile - (tl.load(cu_seqlens_ptr + low) // BLOCK + low)


def num_packed_tiles(total: int, num_sequences: int, block: int) -> int:
    """Programs that ``packed_tile`` needs to reach every row of a packed tensor."""
    return total // block + num_sequences + 1
