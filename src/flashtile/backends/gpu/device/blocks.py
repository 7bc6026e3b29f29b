"""The blocks of keys that a block of rows has to visit, or the reverse, and those among them that need a mask.

One function serves both directions. A row position i keeps keys ``i - left ... i + right``, so a key j is kept by the
row positions ``j - right ... j + left``: the backward over keys calls it with the two sides exchanged and with
positions counted from ``seqlen_k - seqlen_q``. A chunk limits both to the chunks of the first and the last position.
For later positions, the range that any of them touches, and the range that all of them touch, never begins or ends
earlier.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.device.mods import chunk_start, chunk_stop


class KeyBlocks(NamedTuple):
    """Blocks of a loop, of keys or of rows: those at positions start ... stop - 1, which ``lists.number_of`` converts.

    Blocks full_start ... full_stop - 1 need no mask (None: all blocks are treated alike). Unless MASKED, no block needs
    a mask or reaches past the end of the sequence. Unless PARTIAL, the user's mask function keeps all pairs of all
    blocks.
    """

    start: Any
    stop: Any
    full_start: Any
    full_stop: Any
    MASKED: Any
    PARTIAL: Any = True


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
        (block_min, full_min, full_max, block_max): some position touches blocks [block_min, block_max). Every position
        touches the whole of blocks [full_min, full_max), and these exist entirely, so they need no mask.
        block_min <= full_min <= full_max <= block_max always holds.
    """
    any_start, all_start, any_stop, all_stop = element_range(first, last, length, before, after, HAS_BEFORE, HAS_AFTER)
    return blocks_between(any_start, all_start, any_stop, all_stop, first, last, BLOCK)


@triton.jit
def element_range(first, last, length, before, after, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr):
    """(any_start, all_start, any_stop, all_stop): the elements that some position touches, and that all of them do."""
    any_start, all_start = 0, 0
    any_stop, all_stop = length, length
    if HAS_BEFORE:
        any_start = tl.maximum(first - before, 0)
        all_start = tl.maximum(last - before, 0)
    if HAS_AFTER:
        any_stop = tl.minimum(last + after + 1, length)
        all_stop = tl.minimum(first + after + 1, length)
    return any_start, all_start, any_stop, all_stop


@triton.jit
def blocks_between(any_start, all_start, any_stop, all_stop, first, last, BLOCK: tl.constexpr):
    """The results of ``block_range``, from the elements of ``element_range``."""
    any_stop = tl.where(last < first, any_start, any_stop)
    block_min = any_start // BLOCK
    block_max = tl.maximum(block_min, tl.where(any_stop > any_start, (any_stop + BLOCK - 1) // BLOCK, 0))
    full_min = tl.minimum(tl.maximum((all_start + BLOCK - 1) // BLOCK, block_min), block_max)
    # all_stop may be negative, where // rounds towards zero: the clamp makes both roundings the same.
    full_max = tl.minimum(tl.maximum(all_stop // BLOCK, full_min), block_max)
    return block_min, full_min, full_max, block_max


@triton.jit
def key_blocks(row_first, row_last, seqlen_q, seqlen_k, band, BLOCK_N: tl.constexpr):
    """(n_block_min, n_full_min, n_full_max, n_block_max) for rows row_first ... row_last, inclusive, which exist.

    band: ``Band``.
    """
    HAS_LEFT: tl.constexpr = band.left is not None
    HAS_RIGHT: tl.constexpr = band.right is not None
    shift = seqlen_k - seqlen_q
    first, last = row_first + shift, row_last + shift
    any_start, all_start, any_stop, all_stop = element_range(
        first, last, seqlen_k, band.left, band.right, HAS_LEFT, HAS_RIGHT
    )
    if band.chunk is not None:
        any_start = tl.maximum(any_start, chunk_start(first, band.chunk))
        all_start = tl.maximum(all_start, chunk_start(last, band.chunk))
        any_stop = tl.minimum(any_stop, chunk_stop(last, band.chunk))
        all_stop = tl.minimum(all_stop, chunk_stop(first, band.chunk))
    return blocks_between(any_start, all_start, any_stop, all_stop, first, last, BLOCK_N)


@triton.jit
def query_blocks(key_first, key_last, seqlen_q, seqlen_k, band, BLOCK_M: tl.constexpr):
    """(m_block_min, m_full_min, m_full_max, m_block_max) for keys key_first ... key_last, inclusive, which exist."""
    HAS_LEFT: tl.constexpr = band.left is not None
    HAS_RIGHT: tl.constexpr = band.right is not None
    shift = seqlen_k - seqlen_q
    first, last = key_first - shift, key_last - shift
    any_start, all_start, any_stop, all_stop = element_range(
        first, last, seqlen_q, band.right, band.left, HAS_RIGHT, HAS_LEFT
    )
    if band.chunk is not None:
        any_start = tl.maximum(any_start, chunk_start(key_first, band.chunk) - shift)
        all_start = tl.maximum(all_start, chunk_start(key_last, band.chunk) - shift)
        any_stop = tl.minimum(any_stop, chunk_stop(key_last, band.chunk) - shift)
        all_stop = tl.minimum(all_stop, chunk_stop(key_first, band.chunk) - shift)
    return blocks_between(any_start, all_start, any_stop, all_stop, first, last, BLOCK_M)


@triton.jit
def phase_blocks(phase: tl.constexpr, block_min, full_min, full_max, block_max, ONE_LOOP: tl.constexpr):
    """The blocks of one phase of a loop: 0 before the blocks that need no mask, 1 those blocks, 2 after them.

    With ONE_LOOP phase 2 covers all blocks. Phase 0 is empty if ``block_range`` has HAS_BEFORE False.

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
