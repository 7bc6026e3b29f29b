"""Attention over a cache of keys and values in Triton, of few query rows or many.

The query heads of a group are rows of one tile, so a key is read once for all of them. A sequence's keys are cut into
splits by a rule that looks at the sequence alone. The softmax state of every split is computed from nothing, and a
tile's states are folded in their order, first to last. So a result does not depend on who computes which split: one
program that does all of a tile's splits folds in registers; where several programs share a tile, states go through
memory, and the program that stores the last of them folds. The splits of all tiles form one row of work items, of which
every program takes an equal, contiguous part. Mathematics: docs/algorithm.md, "Splits". Source: Dao, Haziza, Massa and
Sizov 2023, "Flash-Decoding"; Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.vocab import scores, softmax
from flashtile.backends.vocab.mask import Band, MaskMod
from flashtile.backends.vocab.scores import Alibi, Pairs, ScoreMod, Terms


class Queries(NamedTuple):
    """The queries: (batch, rows, num_heads_q, DIM), or packed.

    Attributes:
        ptr: Their address.
        stride_b: In elements, as the next two.
        stride_row: Of rows.
        stride_head: Of heads.
        cu_seqlens_ptr: (batch + 1,) int32 if packed, else None.
        length: Rows of a sequence, or of all packed ones together.
    """

    ptr: Any
    stride_b: Any
    stride_row: Any
    stride_head: Any
    cu_seqlens_ptr: Any
    length: Any


class Lengths(NamedTuple):
    """What keys each sequence has, by (batch,) int32 tensors.

    Attributes:
        cached_ptr: Keys before this call.
        leftpad_ptr: The first key that counts; None for 0.
        cu_seqlens_new_ptr: Bounds of packed new keys, (batch + 1,), or None.
        num_new: New keys of each sequence where they are not packed.
        entries_ptr: Which entry of the cache is the sequence's; None for its own number.
    """

    cached_ptr: Any
    leftpad_ptr: Any
    cu_seqlens_new_ptr: Any
    num_new: Any
    entries_ptr: Any


class Cache(NamedTuple):
    """Keys or values, (entries, rows, heads, DIM), with the scales of 8-bit ones.

    Attributes:
        ptr: Their address; 8-bit ones are int16 pairs of columns.
        stride_b: Of entries: sequences or pages; in elements, or in pairs, as the next two.
        stride_row: Of rows.
        stride_head: Of heads.
        scale_ptr: float32 by head, or by entry and head; None for 1.
        scale_stride_b: Of entries of the scales, 0 if they are by head alone.
    """

    ptr: Any
    stride_b: Any
    stride_row: Any
    stride_head: Any
    scale_ptr: Any
    scale_stride_b: Any


class Pages(NamedTuple):
    """The table of pages, (batch, pages) int32; ptr is None for a cache by sequence."""

    ptr: Any
    stride_b: Any


class Results(NamedTuple):
    """Where results go.

    Attributes:
        out_ptr: Like q, head_dim_v wide, with the strides that follow.
        stride_b: In elements, as the next two.
        stride_row: Of rows.
        stride_head: Of heads.
        lse_ptr: Contiguous (batch, num_heads_q, rows), or packed (num_heads_q, rows), float32.
        acc_ptr: float32 [slots, head_dim_v]: a row's sum of one split, unnormalised; None if nothing is ever split.
        max_ptr: float32 [slots]: its maximum, base 2.
        sum_ptr: float32 [slots]: its denominator.
        counters_ptr: int32, 0 between launches: the splits of a tile that have been stored.
        sinks_ptr: (num_heads_q,), or None.
    """

    out_ptr: Any
    stride_b: Any
    stride_row: Any
    stride_head: Any
    lse_ptr: Any
    acc_ptr: Any
    max_ptr: Any
    sum_ptr: Any
    counters_ptr: Any
    sinks_ptr: Any


class Splitting(NamedTuple):
    """How keys are cut into splits, see ``config.Splitting``; constants, so it is only passed as an argument."""

    PROGRAMS: Any
    FEWEST_KEYS: Any
    MOST_KEYS: Any
    MOST_SPLITS: Any
    MOST_ROWS: Any


class Sizes(NamedTuple):
    """Numbers of the call and its tiles; holds constants, so it is only passed as an argument, never assigned.

    Attributes:
        batch: Sequences.
        num_heads_kv: Key heads.
        GROUP: Query heads of each.
        capacity: Keys that a sequence can have at most.
        PAGE_SIZE: Rows of a page.
        DIM: head_dim, then of v, then of both as tiles have them.
        DIM_V: See DIM.
        BLOCK_D: See DIM.
        BLOCK_DV: See DIM.
        BLOCK_M: Rows of a tile.
        BLOCK_N: Keys of a block.
        MERGE_ROWS: Rows of a tile that can exist, a power of two.
        MERGE_SPLITS: Splits that are merged at once, a power of two.
        splitting: ``Splitting``.
        SEARCH: Sequences looked at together when an item's is looked for.
        BITS: Whether the kernel decodes 8-bit numbers by their bits; then they are 2^-8 times their values.
        BY_PAGE: Whether scales differ from page to page.
    """

    batch: Any
    num_heads_kv: Any
    GROUP: Any
    capacity: Any
    PAGE_SIZE: Any
    DIM: Any
    DIM_V: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_M: Any
    BLOCK_N: Any
    MERGE_ROWS: Any
    MERGE_SPLITS: Any
    splitting: Any
    SEARCH: Any
    BITS: Any
    BY_PAGE: Any


class Shape(NamedTuple):
    """Lengths of one sequence, or of many.

    Attributes:
        first_row: Of a packed sequence.
        num_rows: Queries.
        low: First key that some row may keep.
        high: The end of the keys: new ones included.
        num_tiles: Tiles of a key head.
        num_splits: Splits of a tile.
        chunk: Keys of a split, a multiple of BLOCK_N; the first begins at low, rounded down to such a multiple.
    """

    first_row: Any
    num_rows: Any
    low: Any
    high: Any
    num_tiles: Any
    num_splits: Any
    chunk: Any


class Part(NamedTuple):
    """The splits of a tile that one program computes.

    Attributes:
        first: The first of them.
        stop: The end.
        blocks: Blocks of keys of a split.
        slot: [BLOCK_M] int64, each row's slot of the first split of the part.
        pitch: Slots from one split to the next.
        exists: [BLOCK_M], which rows do.
    """

    first: Any
    stop: Any
    blocks: Any
    slot: Any
    pitch: Any
    exists: Any


@triton.jit
def cut(keys, rows, num_tiles, num_heads_kv, BLOCK_N: tl.constexpr, splitting):
    """Splits of a tile and keys of each; ``config.Splitting.cut`` is the same in Python.

    Args:
        keys: That some row may keep.
        rows: Packed rows: queries times group size.
        num_tiles: Tiles of these rows.
        num_heads_kv: Key heads.
        BLOCK_N: Keys of a block.
        splitting: ``Splitting``.
    """
    most = tl.minimum(tl.maximum(splitting.MOST_ROWS // tl.maximum(rows, 1), 1), splitting.MOST_SPLITS)
    wanted = tl.maximum(splitting.PROGRAMS // tl.maximum(num_tiles * num_heads_kv, 1), 1)
    chunk = tl.minimum(tl.maximum((keys + wanted - 1) // wanted, splitting.FEWEST_KEYS), splitting.MOST_KEYS)
    chunk = tl.maximum(chunk, (keys + most - 1) // most)
    chunk = (chunk + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    return tl.maximum((keys + chunk - 1) // chunk, 1), chunk


@triton.jit
def shape_of(b, queries, lengths, band, sizes):
    """The ``Shape`` of sequence b, a number or a tensor; beyond the batch there are no keys.

    For packed queries, b == batch stands for the rows past the last sequence.
    """
    BLOCK_M: tl.constexpr = sizes.BLOCK_M
    BLOCK_N: tl.constexpr = sizes.BLOCK_N
    exists = b < sizes.batch
    first_row, num_rows = b * 0, tl.where(exists, queries.length, 0)
    if queries.cu_seqlens_ptr is not None:
        first_row = tl.load(queries.cu_seqlens_ptr + b, mask=b <= sizes.batch, other=0)
        stop = tl.load(queries.cu_seqlens_ptr + b + 1, mask=exists, other=0)
        num_rows = tl.where(exists, stop, tl.where(b == sizes.batch, queries.length, first_row)) - first_row
    cached = tl.load(lengths.cached_ptr + b, mask=exists, other=-1)
    num_new = lengths.num_new
    if lengths.cu_seqlens_new_ptr is not None:
        num_new = tl.load(lengths.cu_seqlens_new_ptr + b + 1, mask=exists, other=0)
        num_new -= tl.load(lengths.cu_seqlens_new_ptr + b, mask=exists, other=0)
    # A negative length stands for a sequence that is not there.
    high = tl.where(cached < 0, 0, tl.minimum(cached + num_new, sizes.capacity))
    low = b * 0
    if lengths.leftpad_ptr is not None:
        low = tl.maximum(tl.load(lengths.leftpad_ptr + b, mask=exists, other=0), 0)
    if band.left is not None:
        low = tl.maximum(low, high - num_rows - band.left)
    rows = num_rows * sizes.GROUP
    num_tiles = (rows + BLOCK_M - 1) // BLOCK_M
    keys = tl.where(low < high, high - low // BLOCK_N * BLOCK_N, 0)
    num_splits, chunk = cut(keys, rows, num_tiles, sizes.num_heads_kv, BLOCK_N, sizes.splitting)
    return Shape(first_row, num_rows, low, high, num_tiles, num_splits, chunk)


@triton.jit
def work_of(shape, sizes):
    """The items of sequences, and their slots: rows of the workspace."""
    items = shape.num_tiles * shape.num_splits * sizes.num_heads_kv
    slots = tl.where(shape.num_splits > 1, shape.num_splits * shape.num_rows, 0).to(tl.int64)
    return items, slots * (sizes.GROUP * sizes.num_heads_kv)


@triton.jit
def count_sequences(queries, sizes):
    """The sequences of a call; the rows past the last packed one count as one more."""
    count = sizes.batch
    if queries.cu_seqlens_ptr is not None:
        count += 1
    return count


@triton.jit
def find_item(item, queries, lengths, band, sizes):
    """Where an item lies among those of all sequences.

    Returns:
        Its sequence, the items before that sequence, the slots before it, and the items of all sequences.
    """
    SEARCH: tl.constexpr = sizes.SEARCH
    found, before, slots_before = tl.full((), 0, tl.int32), 0, tl.full((), 0, tl.int64)
    if SEARCH == 1:
        total, _slots = work_of(shape_of(found, queries, lengths, band, sizes), sizes)
    else:
        total = 0
        for first in range(0, count_sequences(queries, sizes), SEARCH):
            shape = shape_of(first + tl.arange(0, SEARCH), queries, lengths, band, sizes)
            items, slots = work_of(shape, sizes)
            earlier = total + tl.cumsum(items, 0) <= item
            found += tl.sum(earlier.to(tl.int32))
            before += tl.sum(tl.where(earlier, items, 0))
            slots_before += tl.sum(tl.where(earlier, slots, 0))
            total += tl.sum(items)
    return found, before, slots_before, total


@triton.jit
def decoded(codes):
    """e4m3 codes in uint16 as float16, 2^-8 times their values: the two formats differ in the exponent's bias alone."""
    half = (((codes & 0x80) << 8) | ((codes & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), half)


@triton.jit
def halves(pairs, BITS: tl.constexpr):
    """The first and the second e4m3 number of int16 pairs, as float16; see ``Sizes.BITS``."""
    if BITS:
        codes = pairs.to(tl.uint16, bitcast=True)
        first, second = decoded(codes & 0xFF), decoded(codes >> 8)
    else:
        # One register holds two pairs. Its bytes 0 and 2 are first numbers, 1 and 3 second ones.
        first, second = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 bytes;
            .reg .b16 firsts, seconds;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {firsts, seconds}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, firsts;
            cvt.rn.f16x2.e4m3x2 $1, seconds;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return first, second


@triton.jit
def load_block(cache, base, place, inside, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """A block [BLOCK_N, BLOCK_DIM] of keys or values; what is not ``inside``, and columns past DIM, are 0.

    Args:
        cache: ``Cache``.
        base: Address of its entry and head.
        place: What ``place_block`` says.
        inside: [BLOCK_N].
        DIM: Columns.
        BLOCK_DIM: A power of two, at least DIM.
    """
    page, first_row, row = place
    col = tl.arange(0, BLOCK_DIM)[None, :]
    if len(page.shape) == 0:
        # One address for the block, and small offsets.
        base += page * cache.stride_b + first_row * cache.stride_row
        at = base + (row * cache.stride_row)[:, None] + col
    else:
        at = base + (page * cache.stride_b + row.to(tl.int64) * cache.stride_row)[:, None] + col
    if DIM == BLOCK_DIM:
        tile = tl.load(at, mask=inside[:, None], other=0.0)
    else:
        tile = tl.load(at, mask=inside[:, None] & (col < DIM), other=0.0)
    return tile


@triton.jit
def place_block(first, inside, b, pages, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the keys ``first`` to ``first + BLOCK_N`` lie: page, first row, and each key's rows after that.

    The page is int64: [BLOCK_N], or a number where one page holds the whole block, 0 in a cache by sequence. The table
    is read only for keys inside: its other entries may hold anything.
    """
    key = tl.arange(0, BLOCK_N)
    page, first_row, row = tl.full((), 0, tl.int64), tl.cast(first, tl.int64), key
    if pages.ptr is not None:
        table = pages.ptr + tl.cast(b, tl.int64) * pages.stride_b
        if PAGE_SIZE % BLOCK_N == 0:
            page = tl.load(table + first // PAGE_SIZE).to(tl.int64)
            first_row = tl.cast(first % PAGE_SIZE, tl.int64)
        else:
            page = tl.load(table + (first + key) // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
            first_row, row = tl.full((), 0, tl.int64), (first + key) % PAGE_SIZE
    return page, first_row, row


@triton.jit
def scale_of(cache, entry, h_kv, sizes):
    """The factor of all keys (or values) of an item, float32; scales that differ from page to page are left out."""
    factor = 1.0
    if sizes.BITS:
        factor = 256.0
    if cache.scale_ptr is not None and not sizes.BY_PAGE:
        factor *= tl.load(cache.scale_ptr + tl.cast(entry, tl.int64) * cache.scale_stride_b + h_kv)
    return factor


@triton.jit
def page_scales(cache, page, h_kv, inside):
    """The scale of every key of a block, [BLOCK_N] float32; 0 for those not ``inside``."""
    at = cache.scale_ptr + page * cache.scale_stride_b + h_kv + tl.zeros(inside.shape, tl.int64)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def fold(total, total_max, total_sum, acc, row_max, row_sum):
    """Folds the softmax state of the next split into that of all splits before it.

    Every product and sum is written as the machine must compute it, so that the same states give the same bits wherever
    this is compiled.
    """
    new_max = tl.maximum(total_max, row_max)
    origin = softmax.finite_origin(new_max)
    rescale, weight = tl.exp2(total_max - origin), tl.exp2(row_max - origin)
    total = tl.fma(acc, tl.broadcast_to(weight[:, None], acc.shape), total * rescale[:, None])
    return total, new_max, tl.fma(row_sum, weight, total_sum * rescale)


@triton.jit
def attend_block(acc, acc_odd, row_max, row_sum, n, q, q_odd, q_scale, i, keys, place, kv, sizes, pairs):
    """Adds the keys of block n to the softmax state of a tile's rows; the arguments are those of ``attend``.

    8-bit keys and values are loaded as pairs of neighbouring columns, which become two matrices: of even columns and of
    odd ones. So the tensor cores' operands are loaded from shared memory as 16-bit ones are.
    """
    BLOCK_N: tl.constexpr = sizes.BLOCK_N
    EIGHT_BIT: tl.constexpr = kv[0].ptr.dtype.element_ty == tl.int16
    UNIT: tl.constexpr = 2 if EIGHT_BIT else 1
    INPUT_PRECISION: tl.constexpr = pairs.terms.INPUT_PRECISION
    band, h_kv = pairs.terms.band, place[2]
    entry, head64 = tl.cast(place[1], tl.int64), tl.cast(h_kv, tl.int64)
    k_base = kv[0].ptr + entry * kv[0].stride_b + head64 * kv[0].stride_head
    v_base = kv[1].ptr + entry * kv[1].stride_b + head64 * kv[1].stride_head
    key = n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (key >= keys[0]) & (key < keys[1])
    at = place_block(n * BLOCK_N, inside, place[0], kv[2], sizes.PAGE_SIZE, BLOCK_N)
    k = load_block(kv[0], k_base, at, inside, sizes.DIM // UNIT, sizes.BLOCK_D // UNIT)
    if EIGHT_BIT:
        k_even, k_odd = halves(k, sizes.BITS)
        product = tl.dot(q, tl.trans(k_even.to(q.dtype)), input_precision=INPUT_PRECISION)
        product = tl.dot(q_odd, tl.trans(k_odd.to(q.dtype)), product, input_precision=INPUT_PRECISION)
        product *= q_scale[:, None]
    else:
        product = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)  # [BLOCK_M, BLOCK_N] float32
    if sizes.BY_PAGE and kv[0].scale_ptr is not None:
        product *= page_scales(kv[0], at[0], h_kv, inside)[None, :]
    x, scale_log2, _derivative = scores.transform(product, pairs, i, key[None, :], False)
    x = tl.where(inside[None, :], x, float("-inf"))
    if band.right is not None:
        x = tl.where(key[None, :] <= i + band.right, x, float("-inf"))
    if band.left is not None:
        x = tl.where(key[None, :] >= i - band.left, x, float("-inf"))
    probs, rescale, row_max, row_sum = softmax.update(row_max, row_sum, x, scale_log2, True)
    v = load_block(kv[1], v_base, at, inside, sizes.DIM_V // UNIT, sizes.BLOCK_DV // UNIT)
    acc = acc * rescale[:, None]
    if EIGHT_BIT:
        v_even, v_odd = halves(v, sizes.BITS)
        acc_odd = acc_odd * rescale[:, None]
        if sizes.BY_PAGE and kv[1].scale_ptr is not None:
            # Relative to the block's largest, so that float16 probabilities do not underflow.
            scale = page_scales(kv[1], at[0], h_kv, inside)
            largest = tl.maximum(tl.max(tl.abs(scale), 0), 1e-30)
            shares = (probs * (scale / largest)[None, :]).to(q.dtype)
            acc += tl.dot(shares, v_even.to(q.dtype), input_precision=INPUT_PRECISION) * largest
            acc_odd += tl.dot(shares, v_odd.to(q.dtype), input_precision=INPUT_PRECISION) * largest
        else:
            acc = tl.dot(probs.to(q.dtype), v_even.to(q.dtype), acc, input_precision=INPUT_PRECISION)
            acc_odd = tl.dot(probs.to(q.dtype), v_odd.to(q.dtype), acc_odd, input_precision=INPUT_PRECISION)
    else:
        acc = tl.dot(probs.to(q.dtype), v, acc, input_precision=INPUT_PRECISION)
    return acc, acc_odd, row_max, row_sum


@triton.jit
def joined(acc, acc_odd, EIGHT_BIT: tl.constexpr):
    """A state's columns in their order."""
    return tl.interleave(acc, acc_odd) if EIGHT_BIT else acc


@triton.jit
def attend(q, q_odd, q_scale, i, keys, place, kv, sizes, pairs, part, results):
    """The softmax state of a tile's rows over the splits of a ``Part``.

    Args:
        q: [BLOCK_M, BLOCK_D] in the dtype that products take; for 8-bit caches the even columns.
        q_odd: The odd columns; ignored for others.
        q_scale: [BLOCK_M] float32, a factor of the products; None for 1.
        i: [BLOCK_M, 1] position of each row.
        keys: First key that counts, end of the keys, first block, end of the blocks.
        place: Sequence, entry of the cache, key head.
        kv: ``Cache`` of keys, ``Cache`` of values, ``Pages``.
        sizes: ``Sizes``.
        pairs: ``scores.Pairs``.
        part: ``Part``.
        results: ``Results``.

    Returns:
        acc [BLOCK_M, BLOCK_DV], row_max [BLOCK_M] in base 2, and row_sum [BLOCK_M], all float32: the fold of the part's
        splits if they are a tile's first, else nothing of use: the state of each has been stored.
    """
    EIGHT_BIT: tl.constexpr = kv[0].ptr.dtype.element_ty == tl.int16
    WIDE: tl.constexpr = sizes.BLOCK_DV // 2 if EIGHT_BIT else sizes.BLOCK_DV
    ROWS: tl.constexpr = q.shape[0]
    acc, row_sum = tl.zeros([ROWS, WIDE], tl.float32), tl.zeros([ROWS], tl.float32)
    acc_odd, row_max = tl.zeros([ROWS, WIDE], tl.float32), tl.full([ROWS], float("-inf"), tl.float32)
    total, total_max, total_sum = tl.zeros([ROWS, sizes.BLOCK_DV], tl.float32), row_max, row_sum
    if results.acc_ptr is None:
        for n in tl.range(keys[2], keys[3]):
            acc, acc_odd, row_max, row_sum = attend_block(
                acc, acc_odd, row_max, row_sum, n, q, q_odd, q_scale, i, keys, place, kv, sizes, pairs
            )
        total, total_max, total_sum = joined(acc, acc_odd, EIGHT_BIT), row_max, row_sum
    else:
        slot, left = part.slot, part.blocks
        for n in tl.range(keys[2], keys[3]):
            acc, acc_odd, row_max, row_sum = attend_block(
                acc, acc_odd, row_max, row_sum, n, q, q_odd, q_scale, i, keys, place, kv, sizes, pairs
            )
            left -= 1
            if (left == 0) | (n == keys[3] - 1):
                state = joined(acc, acc_odd, EIGHT_BIT)
                if part.first == 0:
                    total, total_max, total_sum = fold(total, total_max, total_sum, state, row_max, row_sum)
                else:
                    store_split(state, row_max, row_sum, slot, part.exists, results, sizes)
                acc, acc_odd = tl.zeros([ROWS, WIDE], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
                row_max, row_sum = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
                slot += part.pitch
                left = part.blocks
    return total, total_max, total_sum


@triton.jit
def load_queries(queries, b, first_row, row, h, exists, sizes, FIRST: tl.constexpr, STEP: tl.constexpr):
    """Packed rows: ``row`` of the sequence and query head ``h`` of each; 0 where not ``exists``.

    [BLOCK_M, BLOCK_D / STEP]: every STEP-th column from FIRST on.
    """
    col = FIRST + STEP * tl.arange(0, sizes.BLOCK_D // STEP)[None, :]
    start = first_row.to(tl.int64) * queries.stride_row
    if queries.cu_seqlens_ptr is None:
        start = tl.cast(b, tl.int64) * queries.stride_b
    at = start + row.to(tl.int64) * queries.stride_row + h.to(tl.int64) * queries.stride_head
    return tl.load(queries.ptr + at[:, None] + col, mask=exists[:, None] & (col < sizes.DIM), other=0.0)


@triton.jit
def power_of_rows(q, q_odd):
    """For each row a power of two that brings its largest element between 1 and 2.

    Divided by it, bfloat16 elements are float16 ones, exactly but for those below 2^-14 of their row's largest, whose
    error is 2^-25 of it.
    """
    top = tl.maximum(tl.max(tl.abs(q.to(tl.float32)), 1), tl.max(tl.abs(q_odd.to(tl.float32)), 1))
    return tl.exp2(tl.floor(tl.log2(tl.where(top > 0.0, top, 1.0))))


@triton.jit
def scaled(q, power):
    """Rows divided by their powers of two, as float16."""
    return (q.to(tl.float32) / power[:, None]).to(tl.float16)


@triton.jit
def store_rows(acc, row_max, row_sum, b, first_row, row, h, exists, queries, results, sizes):
    """Normalises rows and stores their output and lse; sinks join here, once."""
    if results.sinks_ptr is not None:
        sink = tl.load(results.sinks_ptr + h).to(tl.float32)
        sink = tl.where(b < sizes.batch, sink, float("-inf"))
        rescale, row_max, row_sum = softmax.add_sink(row_max, row_sum, sink)
        acc = acc * rescale[:, None]
    scale, lse = softmax.finalise(row_max, row_sum)
    out = tl.where(scale[:, None] == 0.0, 0.0, acc * scale[:, None])
    num_heads, row64, h64 = sizes.num_heads_kv * sizes.GROUP, row.to(tl.int64), h.to(tl.int64)
    if queries.cu_seqlens_ptr is None:
        start = tl.cast(b, tl.int64) * results.stride_b
        lse_at = (tl.cast(b, tl.int64) * num_heads + h64) * queries.length + row64
    else:
        start = first_row.to(tl.int64) * results.stride_row
        lse_at = h64 * queries.length + first_row + row64
    col = tl.arange(0, out.shape[1])[None, :]
    at = start + row64 * results.stride_row + h64 * results.stride_head
    out = out.to(results.out_ptr.dtype.element_ty)
    tl.store(results.out_ptr + at[:, None] + col, out, mask=exists[:, None] & (col < sizes.DIM_V))
    tl.store(results.lse_ptr + lse_at, lse, mask=exists)


@triton.jit
def store_split(acc, row_max, row_sum, slot, exists, results, sizes):
    """Stores the softmax state of a tile's rows over one split."""
    col = tl.arange(0, acc.shape[1])[None, :]
    at = results.acc_ptr + slot[:, None] * sizes.DIM_V + col
    tl.store(at, acc, mask=exists[:, None] & (col < sizes.DIM_V))
    tl.store(results.max_ptr + slot, row_max, mask=exists)
    tl.store(results.sum_ptr + slot, row_sum, mask=exists)


@triton.jit
def skip_splits(slot, pitch, count, exists, results):
    """Marks splits as empty, whose keys are in the state of a later one."""
    for _split in range(count):
        tl.store(results.max_ptr + slot, tl.full(slot.shape, float("-inf"), tl.float32), mask=exists)
        slot += pitch


@triton.jit
def fold_stored(slot, pitch, num_splits, exists, results, sizes):
    """The fold of all states of a tile.

    Args:
        slot: [MERGE_ROWS] int64, each row's slot of the first split.
        pitch: Slots from one split to the next.
        num_splits: At least 2.
        exists: [MERGE_ROWS].
        results: ``Results``.
        sizes: ``Sizes``.
    """
    ROWS: tl.constexpr = sizes.MERGE_ROWS
    WIDE: tl.constexpr = sizes.BLOCK_DV
    col = tl.arange(0, WIDE)[None, :]
    acc, row_sum = tl.zeros([ROWS, WIDE], tl.float32), tl.zeros([ROWS], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    for first in range(0, num_splits, sizes.MERGE_SPLITS):
        # Unrolled, so that the loads of several splits are under way together.
        for ahead in tl.static_range(sizes.MERGE_SPLITS):
            at = slot + tl.cast(first + ahead, tl.int64) * pitch
            there = exists & (first + ahead < num_splits)
            # Past the first-level cache, which does not see what other multiprocessors store.
            top = tl.load(results.max_ptr + at, mask=there, other=float("-inf"), cache_modifier=".cg")
            part_sum = tl.load(results.sum_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
            wide = there[:, None] & (col < sizes.DIM_V)
            part = tl.load(results.acc_ptr + at[:, None] * sizes.DIM_V + col, wide, other=0.0, cache_modifier=".cg")
            # A split without keys, or skipped, may have left anything there.
            empty = top == float("-inf")
            part, part_sum = tl.where(empty[:, None], 0.0, part), tl.where(empty, 0.0, part_sum)
            acc, row_max, row_sum = fold(acc, row_max, row_sum, part, top, part_sum)
    return acc, row_max, row_sum


@triton.jit
def rows_of_tile(first, h_kv, num_rows, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Row and query head of the packed rows of a tile, and which exist; a row that does not is given as 0."""
    packed = first + tl.arange(0, BLOCK)
    row, h = packed // GROUP, h_kv * GROUP + packed % GROUP
    exists = row < num_rows
    return tl.where(exists, row, 0), h, exists


@triton.jit
def attend_rows(rows, queries, i, keys, place, kv, sizes, pairs, part, results):
    """``attend`` for the rows of a tile, with the scales of 8-bit keys; those of values are left to ``finish``.

    rows: the sequence, its first packed row, and each row's row and query head.
    """
    if kv[0].ptr.dtype.element_ty != tl.int16:
        q = load_queries(queries, rows[0], rows[1], rows[2], rows[3], part.exists, sizes, 0, 1)
        acc, row_max, row_sum = attend(q, q, None, i, keys, place, kv, sizes, pairs, part, results)
    else:
        q = load_queries(queries, rows[0], rows[1], rows[2], rows[3], part.exists, sizes, 0, 2)
        q_odd = load_queries(queries, rows[0], rows[1], rows[2], rows[3], part.exists, sizes, 1, 2)
        k_scale = scale_of(kv[0], place[1], place[2], sizes)
        if q.dtype == tl.bfloat16:
            power = power_of_rows(q, q_odd)
            acc, row_max, row_sum = attend(
                scaled(q, power), scaled(q_odd, power), power * k_scale, i, keys, place, kv, sizes, pairs, part, results
            )
        else:
            ones = tl.full([q.shape[0]], 1.0, tl.float32)
            acc, row_max, row_sum = attend(q, q_odd, ones * k_scale, i, keys, place, kv, sizes, pairs, part, results)
    return acc, row_max, row_sum


@triton.jit
def finish(acc, row_max, row_sum, place, first, b, shape, kv, queries, results, sizes):
    """Stores the results of a tile's rows, of which acc may have fewer than BLOCK_M."""
    row, h, exists = rows_of_tile(first, place[2], shape.num_rows, acc.shape[0], sizes.GROUP)
    if kv[1].ptr.dtype.element_ty == tl.int16:
        acc *= scale_of(kv[1], place[1], place[2], sizes)
    store_rows(acc, row_max, row_sum, b, shape.first_row, row, h, exists, queries, results, sizes)


@triton.jit
def share_tile(acc, row_max, row_sum, part, base, counter, place, first, b, shape, kv, queries, results, sizes):
    """Finishes a tile that several programs share, if all other splits have been stored."""
    if part.first == 0:
        skip_splits(part.slot, part.pitch, part.stop - 1, part.exists, results)
        at = part.slot + tl.cast(part.stop - 1, tl.int64) * part.pitch
        store_split(acc, row_max, row_sum, at, part.exists, results, sizes)
    # All threads have stored before one of them says so.
    tl.debug_barrier()
    count = part.stop - part.first
    if tl.atomic_add(counter, count, sem="acq_rel") == shape.num_splits - count:
        _row, _h, exists = rows_of_tile(first, place[2], shape.num_rows, sizes.MERGE_ROWS, sizes.GROUP)
        slot = base + tl.arange(0, sizes.MERGE_ROWS)
        all_acc, all_max, all_sum = fold_stored(slot, part.pitch, shape.num_splits, exists, results, sizes)
        finish(all_acc, all_max, all_sum, place, first, b, shape, kv, queries, results, sizes)
        tl.store(counter, 0)


@triton.jit
def entry_of(b, lengths, pages, sizes):
    """The entry of the cache that is a sequence's; 0 where it is in pages."""
    entry = b
    if lengths.entries_ptr is not None:
        entry = tl.load(lengths.entries_ptr + b)
    if pages.ptr is not None:
        entry = 0
    return entry


@triton.jit
def blocks_of(first, split, stop_split, shape, band, sizes):
    """First block and end of the blocks of splits; a tile that is not split needs only those that its rows may keep."""
    BLOCK_N: tl.constexpr = sizes.BLOCK_N
    start = shape.low // BLOCK_N * BLOCK_N + split * shape.chunk
    stop = tl.minimum(shape.low // BLOCK_N * BLOCK_N + stop_split * shape.chunk, shape.high)
    if shape.num_splits == 1:
        shift = shape.high - shape.num_rows
        if band.right is not None:
            last = tl.minimum((first + sizes.BLOCK_M - 1) // sizes.GROUP, shape.num_rows - 1)
            stop = tl.minimum(stop, last + shift + band.right + 1)
        if band.left is not None:
            start = tl.maximum(start, (first // sizes.GROUP + shift - band.left) // BLOCK_N * BLOCK_N)
    return start // BLOCK_N, (stop + BLOCK_N - 1) // BLOCK_N


@triton.jit
def run_part(item, stop, queries, lengths, kv, results, sizes, terms):
    """Computes the items from ``item`` on that are of the same tile; returns their number."""
    BLOCK_M: tl.constexpr = sizes.BLOCK_M
    b, before, slots_before, _total = find_item(item, queries, lengths, terms.band, sizes)
    shape = shape_of(b, queries, lengths, terms.band, sizes)
    tile, split = (item - before) // shape.num_splits, (item - before) % shape.num_splits
    stop_split = tl.minimum(shape.num_splits, split + stop - item)
    h_kv, first = tile // shape.num_tiles, tile % shape.num_tiles * BLOCK_M
    row, h, exists = rows_of_tile(first, h_kv, shape.num_rows, BLOCK_M, sizes.GROUP)
    # Rows past the last packed sequence have no keys, but addresses must exist for them too.
    valid_b = tl.minimum(b, sizes.batch - 1)
    place = (valid_b, entry_of(valid_b, lengths, kv[2], sizes), h_kv)
    start_block, stop_block = blocks_of(first, split, stop_split, shape, terms.band, sizes)
    pitch = shape.num_rows * sizes.GROUP
    base = slots_before + tl.cast(h_kv, tl.int64) * shape.num_splits * pitch + first
    slot = base + tl.cast(split, tl.int64) * pitch + tl.arange(0, BLOCK_M)
    part = Part(split, stop_split, shape.chunk // sizes.BLOCK_N, slot, pitch, exists)
    acc, row_max, row_sum = attend_rows(
        (b, shape.first_row, row, h), queries, (row + shape.high - shape.num_rows)[:, None],
        (shape.low, shape.high, start_block, stop_block), place, kv, sizes,
        Pairs(terms, scores.head_of(terms, valid_b, h[:, None], shape.num_rows, shape.high)), part, results,
    )  # fmt: skip
    if results.acc_ptr is None:  # noqa: SIM114 a compile-time condition
        finish(acc, row_max, row_sum, place, first, b, shape, kv, queries, results, sizes)
    elif stop_split - split == shape.num_splits:
        finish(acc, row_max, row_sum, place, first, b, shape, kv, queries, results, sizes)
    else:
        counter = results.counters_ptr + before + tile * shape.num_splits
        share_tile(acc, row_max, row_sum, part, base, counter, place, first, b, shape, kv, queries, results, sizes)
    return stop_split - split


@triton.jit
def run_items(queries, lengths, kv, results, sizes, terms):
    """This program's part of the items."""
    _b, _before, _slots, total = find_item(0, queries, lengths, terms.band, sizes)
    program, share, more = tl.program_id(0), total // tl.num_programs(0), total % tl.num_programs(0)
    item = program * share + tl.minimum(program, more)
    stop = item + share + (program < more).to(tl.int32)
    while item < stop:
        item += run_part(item, stop, queries, lengths, kv, results, sizes, terms)


@triton.jit(do_not_specialize=["batch", "seqlen_q", "num_heads_kv", "num_new", "capacity", "left", "right"])
def cache_attention(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, acc_ptr, max_ptr, sum_ptr, counters_ptr, cached_ptr, leftpad_ptr,
    cu_seqlens_q_ptr, cu_seqlens_new_ptr, entries_ptr, pages_ptr, alibi_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    q_stride_b, q_stride_row, q_stride_head, k_stride_b, k_stride_row, k_stride_head,
    v_stride_b, v_stride_row, v_stride_head, out_stride_b, out_stride_row, out_stride_head,
    pages_stride_b, alibi_stride_b, k_scale_stride_b, v_scale_stride_b,
    batch, seqlen_q, num_heads_kv, num_new, capacity, left, right, scale, param,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_SPLITS: tl.constexpr, PROGRAMS: tl.constexpr, FEWEST_KEYS: tl.constexpr,
    MOST_KEYS: tl.constexpr, MOST_SPLITS: tl.constexpr, MOST_ROWS: tl.constexpr, SEARCH: tl.constexpr,
    BITS: tl.constexpr, BY_PAGE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCALE_FIRST: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention over a cache; programs take items by turns, as many programs as the device runs at once."""
    run_items(
        Queries(q_ptr, q_stride_b, q_stride_row, q_stride_head, cu_seqlens_q_ptr, seqlen_q),
        Lengths(cached_ptr, leftpad_ptr, cu_seqlens_new_ptr, num_new, entries_ptr),
        (
            Cache(k_ptr, k_stride_b, k_stride_row, k_stride_head, k_scale_ptr, k_scale_stride_b),
            Cache(v_ptr, v_stride_b, v_stride_row, v_stride_head, v_scale_ptr, v_scale_stride_b),
            Pages(pages_ptr, pages_stride_b),
        ),
        Results(
            out_ptr, out_stride_b, out_stride_row, out_stride_head, lse_ptr, acc_ptr, max_ptr, sum_ptr, counters_ptr,
            sinks_ptr,
        ),
        Sizes(
            batch, num_heads_kv, GROUP, capacity, PAGE_SIZE, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
            MERGE_ROWS, MERGE_SPLITS, Splitting(PROGRAMS, FEWEST_KEYS, MOST_KEYS, MOST_SPLITS, MOST_ROWS), SEARCH,
            BITS, BY_PAGE,
        ),
        Terms(
            scale, SCALE_FIRST, INPUT_PRECISION,
            (
                ScoreMod(SCORE_MOD, None, None, param),
                ScoreMod(None if alibi_ptr is None else scores.alibi, None, scores.slope_of_head,
                         Alibi(alibi_ptr, alibi_stride_b)),
                ScoreMod(None, None, None, None),
            ),
            Band(left if HAS_LEFT else None, right if HAS_RIGHT else None),
            (MaskMod(None, None, None, None), MaskMod(None, None, None, None)),
            None,
        ),
    )  # fmt: skip
