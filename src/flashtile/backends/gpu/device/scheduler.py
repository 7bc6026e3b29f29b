"""Chooses the tile that a program works on. The longest tiles start first, so that the last tiles to end are short."""

from __future__ import annotations

import triton
import triton.language as tl

TAIL_ROUNDS = tl.constexpr(2)


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


# A head with at most this many blocks is short: its keys and values take about as long to load as to multiply.
_SHORT_HEAD = tl.constexpr(4)


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
