"""The tile that a program works on: its place in the order of tiles, its sequence, and the blocks that it visits.

In a dense tensor every sequence starts at row 0 of its batch entry. A packed tensor has a single entry, in which
sequence b starts at row ``cu_seqlens[b]``; its batch stride is never used.

One function, ``block_range``, finds the blocks of keys that a block of rows has to visit, or the reverse, and those
among them that need no mask. A row position i keeps keys ``i - left ... i + right``, so a key j is kept by the row
positions ``j - right ... j + left``: the backward over keys calls it with the two sides exchanged and with positions
counted from ``seqlen_k - seqlen_q``. A chunk limits both to the chunks of the first and the last position. For later
positions, the range that any of them touches, and the range that all of them touch, never begins or ends earlier.

The longest tiles start first, so that the last tiles to end are short.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.device import records
from flashtile.backends.gpu.device.masks import chunk_start, chunk_stop

# TMA bounds every dimension of a tensor, but not the sequences packed into one. A descriptor of a packed tensor has two
# further dimensions with strides that cancel modulo 2**64, so that the row coordinate reaches its bound, PACKED_ROWS,
# exactly where the sequence ends: loads past it give zeros, and stores are dropped.
PACKED_ROWS = tl.constexpr(records.PACKED_ROWS)
# The last rounds of ``paired``, in which single blocks are assigned.
TAIL_ROUNDS = tl.constexpr(2)
# A head with at most this many blocks is short: its keys and values take about as long to load as to multiply.
_SHORT_HEAD = tl.constexpr(4)


class Sequence(NamedTuple):
    """One sequence: its entry of the batch (0 if packed), its first row in the entry, and its number of rows."""

    batch_index: Any
    start: Any
    length: Any


class HeadRows(NamedTuple):
    """The rows of one head of one ``Sequence`` in ``records.Rows``; only passed on, never assigned."""

    rows: Any
    head: Any
    sequence: Any


class KeyBlocks(NamedTuple):
    """Blocks of a loop, of keys or of rows: those at positions start ... stop - 1, which ``masks.block_at`` converts.

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
def sequence(cu_seqlens_ptr, b, num_sequences, total, VARLEN: tl.constexpr):
    """First row and length of sequence b.

    Args:
        cu_seqlens_ptr: (num_sequences + 1,) int32, read only if VARLEN.
        b: The sequence; ``num_sequences`` stands for the rows past the last sequence of a packed tensor.
        num_sequences: Number of sequences.
        total: Rows of a packed tensor, or the common length of dense sequences.
        VARLEN: Whether sequences are packed.

    Returns:
        (start, length), int32 or int64 rows.
    """
    start, length = 0, total
    if VARLEN:
        start = tl.load(cu_seqlens_ptr + b)
        stop = tl.load(cu_seqlens_ptr + b + 1, mask=b < num_sequences, other=0)
        length = tl.where(b < num_sequences, stop, total) - start
    return start, length


@triton.jit
def sequence_of(sequences, b):
    """Sequence b of ``records.Sequences``; ``count`` means the rows past the last one of a packed tensor."""
    PACKED: tl.constexpr = sequences.cu_seqlens is not None
    start, length = sequence(sequences.cu_seqlens, b, sequences.count, sequences.length, PACKED)
    batch_index = b
    if PACKED:
        batch_index = 0
    return Sequence(batch_index, start, length)


@triton.jit
def base(ptr, b, start, head, stride_b, stride_row, stride_head):
    """Address of (sequence b, its first row, head); every product is 64 bits wide."""
    offset = tl.cast(b, tl.int64) * stride_b + tl.cast(start, tl.int64) * stride_row
    return ptr + offset + tl.cast(head, tl.int64) * stride_head


@triton.jit
def addresses(of, first, row, col):
    """Addresses of elements of ``HeadRows``.

    Args:
        of: The ``HeadRows``.
        first: Added to every row.
        row: Rows of the sequence, counted from ``first``.
        col: Columns, broadcastable against row.
    """
    seq = of.sequence
    stride_b, stride_row, stride_head = of.rows.stride_b, of.rows.stride_row, of.rows.stride_head
    if of.rows.VECTOR > 1:
        stride_b = stride_b // of.rows.VECTOR * of.rows.VECTOR
        stride_row = stride_row // of.rows.VECTOR * of.rows.VECTOR
        stride_head = stride_head // of.rows.VECTOR * of.rows.VECTOR
    start = base(of.rows.ptr, seq.batch_index, seq.start, of.head, stride_b, stride_row, stride_head)
    return start + tl.cast(first, tl.int64) * stride_row + (row.to(tl.int64) * stride_row + col)


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

    band: ``KeyBand``.
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


@triton.jit
def longest_first(block, num_blocks, HAS_RIGHT: tl.constexpr):
    """Query blocks in the order of decreasing work: under a right bound the last rows see the most keys."""
    if HAS_RIGHT:
        block = num_blocks - 1 - block
    return block


@triton.jit
def grouped_tile(pid, num_blocks, num_heads, heads_at_once):
    """The block and the head of a program. Groups of heads come in order, and in a group the first blocks of all heads.

    Blocks of similar cost then run at the same time. If the longest blocks come first, the last ones to start are
    short. The heads of a group share the cache.

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

    Sequence b owns the tiles from its ``first_packed_tile`` up to the one of sequence b + 1. These are always enough
    for its blocks, because a sequence that straddles a multiple of BLOCK needs at most one block more than the
    multiples it crosses. Spare tiles get a block past the sequence's end. The rows past every sequence belong to ``b ==
    num_sequences``; a launch needs one tile more than the tiles up to the end of these rows.

    Args:
        cu_seqlens_ptr: (num_sequences + 1,) int32.
        num_sequences: Number of sequences.
        tile: The tile.
        BLOCK: Rows of a tile.
        rows_per_token: Rows of a position: more than one if the heads of a group share tiles.
        SPARE: The most positions by which a length is rounded up, if tiles consist of whole strips of positions.

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
def packed_tiles(cu_seqlens_ptr, num_sequences, tiles, BLOCK: tl.constexpr):
    """``packed_tile`` for a tensor of tiles; all of their searches take the same number of steps."""
    low, left = tiles * 0, num_sequences
    high = low + num_sequences
    while left > 0:
        middle = (low + high + 1) // 2
        is_past = first_packed_tile(tl.load(cu_seqlens_ptr + middle), middle, BLOCK, 1, 0) <= tiles
        low, high = tl.where(is_past, middle, low), tl.where(is_past, high, middle - 1)
        left = left // 2
    return low, tiles - first_packed_tile(tl.load(cu_seqlens_ptr + low), low, BLOCK, 1, 0)


@triton.jit
def first_packed_tile(start, b, BLOCK: tl.constexpr, rows_per_token, SPARE: tl.constexpr):
    """The first tile of sequence b, which begins at position ``start``; see ``packed_tile``."""
    return (start + b * SPARE) * rows_per_token // BLOCK + b


@triton.jit
def longest_first_by_spans(place, num_blocks, num_heads, most, num_programs):
    """The tile at an index of the tile order, for programs that take indices from a counter.

    Spans of heads follow one another; in each span the most expensive blocks come first. If a span had as many heads as
    the cache holds, all programs would first load new keys and values and later load none: they would wait for memory
    first, and then for products. So a span has one tile for each program, or two for short heads. The last span has up
    to four tiles for each program, or two for short heads, so that the tiles that start last are short.

    Args:
        place: The index, >= 0.
        num_blocks: Blocks per head, >= 1.
        num_heads: Heads of all sequences together, >= 1.
        most: The number of heads with keys and values that fit the cache, >= 1: a span has no more heads.
        num_programs: Programs that share the work.

    Returns:
        (block, head); meaningless for an index past the last tile.
    """
    is_short = num_blocks <= _SHORT_HEAD
    span = tl.maximum(tl.minimum(tl.where(is_short, 2, 1) * num_programs // num_blocks, most), 1)
    last = tl.maximum(tl.minimum(tl.where(is_short, 2, 4) * num_programs // num_blocks, most), 1)
    early = (tl.maximum(num_heads - last, 0) + span - 1) // span * span
    which = tl.minimum(place // (span * num_blocks), early // span)
    place -= which * span * num_blocks
    width = tl.where(which * span < early, span, num_heads - early)
    rank = place // width
    return num_blocks - 1 - rank, which * span + place - rank * width


@triton.jit
def paired(step, program, num_programs, num_blocks, num_heads):
    """The tile that a program processes at a step, in closed form: no table, no counter, no atomics.

    Block m of M costs about m, so blocks m and M - 1 - m together have the same cost for every m. Most of the work is
    assigned in such pairs, head by head, which keeps the keys and values of few heads in the L2 cache. In the last
    rounds single blocks are assigned instead, longest first, and every round reverses the order of the programs, so
    that the programs end at about the same time.

    Args:
        step: 0, 1, 2, ...
        program: This program, 0 <= program < num_programs.
        num_programs: Programs that share the work.
        num_blocks: Query blocks per head, >= 1; block m costs more than block m - 1.
        num_heads: Heads of all sequences together.

    Returns:
        (block, head, is_tile, is_end): is_tile is False for a step without work; is_end is True for every step after
        the last one.
    """
    # With an odd number of blocks two heads are assigned together, so that the middle blocks have partners too.
    # Division by powers of two is a shift: other divisions take some 200 cycles, and a program waits for its first
    # tile.
    odd = num_blocks & 1
    length = num_blocks << odd
    pairs = length >> 1
    num_spans = (num_heads + odd) >> odd
    total = num_spans * pairs
    rounds = tl.maximum(total // num_programs - TAIL_ROUNDS, 0)

    if step < 2 * rounds:
        item = (step >> 1) * num_programs + program
        which = item // pairs
        pair = item - which * pairs
        last_half = (step & 1) == 1
        is_end = step < 0
    else:
        dealt = rounds * num_programs
        in_tail = total - dealt
        first_span = dealt // pairs
        first_pair = dealt - first_span * pairs
        tail_spans = num_spans - first_span
        tail_step = step - 2 * rounds
        place = tail_step * num_programs + tl.where((tail_step & 1) == 0, program, num_programs - 1 - program)
        is_end = place >= 2 * in_tail
        last_half = place >= in_tail
        place = tl.where(last_half, 2 * in_tail - 1 - place, place)
        place = tl.where(is_end, 0, place)
        # The earlier rounds have already taken the first pairs of the tail's first span.
        full_spans = tl.maximum(tail_spans - 1, 1)
        before = first_pair * (tail_spans - 1)
        if place < before:
            pair = place // full_spans
            which = first_span + 1 + place - pair * full_spans
        else:
            beyond = (place - before) // tail_spans
            pair = first_pair + beyond
            which = first_span + (place - before) - beyond * tail_spans

    position = tl.where(last_half, pair, length - 1 - pair)
    head = (which << odd) + (position & odd)
    return position >> odd, head, head < num_heads, is_end
