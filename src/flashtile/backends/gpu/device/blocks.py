"""Which blocks of keys a block of rows has to visit (or the reverse), and which of them need a mask.

One function serves both directions. A row position i keeps keys ``i - left ... i + right``, so a key j is kept by the
row positions ``j - right ... j + left``: the backward over keys calls it with the two sides exchanged and with
positions counted from ``seqlen_k - seqlen_q``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Visit(NamedTuple):
    """Blocks start ... stop - 1 of a loop; full_start ... full_stop - 1 need no mask (None: all are treated alike).

    Unless MASKED, none of them needs one, nor reaches past the end of the sequence.
    """

    start: Any
    stop: Any
    full_start: Any
    full_stop: Any
    MASKED: Any


@triton.jit
def block_range(
    first, last, length, before, after, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, BLOCK: tl.constexpr
):
    """The blocks of the other side that positions first ... last touch.

    Args:
        first: First position, inclusive.
        last: Last position, inclusive; last < first means no position.
        length: Elements of the other side; element x exists for 0 <= x < length.
        before: Position p touches x >= p - before, read only if HAS_BEFORE.
        after: Position p touches x <= p + after, read only if HAS_AFTER.
        HAS_BEFORE: Whether that side is bounded.
        HAS_AFTER: Whether that side is bounded.
        BLOCK: Elements of a block.

    Returns:
        (block_min, full_min, full_max, block_max): blocks [block_min, block_max) are touched by some position; of
        those, [full_min, full_max) exist entirely and are touched by every position, so they need no mask.
        block_min <= full_min <= full_max <= block_max always holds.
    """
    any_start, all_start = 0, 0
    any_stop, all_stop = length, length
    if HAS_BEFORE:
        any_start = tl.maximum(first - before, 0)
        all_start = tl.maximum(last - before, 0)
    if HAS_AFTER:
        any_stop = tl.minimum(last + after + 1, length)
        all_stop = tl.minimum(first + after + 1, length)
    any_stop = tl.where(last < first, any_start, any_stop)
    block_min = any_start // BLOCK
    block_max = tl.maximum(block_min, tl.where(any_stop > any_start, (any_stop + BLOCK - 1) // BLOCK, 0))
    full_min = tl.minimum(tl.maximum((all_start + BLOCK - 1) // BLOCK, block_min), block_max)
    # all_stop may be negative, where // rounds towards zero: the clamp makes both roundings the same.
    full_max = tl.minimum(tl.maximum(all_stop // BLOCK, full_min), block_max)
    return block_min, full_min, full_max, block_max


@triton.jit
def key_blocks(
    row_first, row_last, seqlen_q, seqlen_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(n_block_min, n_full_min, n_full_max, n_block_max) of rows row_first ... row_last, inclusive, which exist."""
    shift = seqlen_k - seqlen_q
    return block_range(row_first + shift, row_last + shift, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N)


@triton.jit
def query_blocks(
    key_first, key_last, seqlen_q, seqlen_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(m_block_min, m_full_min, m_full_max, m_block_max) of keys key_first ... key_last, inclusive, which exist."""
    shift = seqlen_k - seqlen_q
    return block_range(key_first - shift, key_last - shift, seqlen_q, right, left, HAS_RIGHT, HAS_LEFT, BLOCK_M)


@triton.jit
def phase_blocks(phase: tl.constexpr, block_min, full_min, full_max, block_max, ONE_LOOP: tl.constexpr):
    """The blocks of one phase of a loop: 0 before the blocks that need no mask, 1 those blocks, 2 after them.

    With ONE_LOOP phase 2 covers all blocks. Phase 0 is empty where ``block_range`` has HAS_BEFORE False.

    Returns:
        (start, stop).
    """
    start, stop = block_min, full_min
    if phase == 1:
        start, stop = full_min, full_max
    if phase == 2:
        start, stop = full_max, block_max
        if ONE_LOOP:
            start = block_min
    return start, stop
