"""Kernels that quantise q, k and v: each reads a tensor and writes e4m3 numbers and their scales.

A program takes one block of rows, see ``quantization.blocks``, of a few heads. A tile as wide as head_dim consists of
parts of WIDTH columns, a power of two. The Hadamard matrix of n parts is that of one part, which a product of matrices
applies, and then sums and differences of whole parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.decode.append import e4m3_bits
from flashtile.call.blocks import BLOCK as _BLOCK
from flashtile.call.quantized import LARGEST as _LARGEST

BLOCK: tl.constexpr = tl.constexpr(_BLOCK)
LARGEST: tl.constexpr = tl.constexpr(_LARGEST)
# The keys of a head are summed in so many parts, then these, always in this order: the same bits in every run.
SPLITS: tl.constexpr = tl.constexpr(32)


class Source(NamedTuple):
    """A tensor (batch, rows, heads, dim), or packed, then stride_b is 0; dim is contiguous."""

    ptr: Any
    stride_b: Any
    stride_row: Any
    stride_head: Any


class Angles(NamedTuple):
    """Cosines and sines, contiguous (rows, DIM / 2); only passed as an argument, never assigned. DIM 0: none.

    Unless pairs are INTERLEAVED, DIM / 2 is a multiple of the parts' width.
    """

    cos_ptr: Any
    sin_ptr: Any
    rows: Any
    DIM: Any
    INTERLEAVED: Any


class Mean(NamedTuple):
    """The means of keys, (batch, num_heads, head_dim) float32, and the query heads of a key head; ptr None: none."""

    ptr: Any
    num_heads: Any
    group: Any


class PerHead(NamedTuple):
    """A number for each head, or for each of its blocks; strides may be 0. ptr None: none."""

    ptr: Any
    stride_b: Any
    stride_head: Any
    stride_block: Any


class Rows(NamedTuple):
    """Where sequences lie: of ``length`` rows each, or packed by (batch + 1,) int32 bounds in ``length`` rows."""

    cu_seqlens_ptr: Any
    batch: Any
    length: Any


class Block(NamedTuple):
    """128 rows of a sequence.

    Attributes:
        b: The sequence.
        start: Its first row in the tensor, or in its entry of a dense one.
        first: The block's first row in the sequence.
        length: Rows of the sequence.
        stop: Rows to write; the last sequence's are followed by those that belong to none.
        index: The block's among those of its entry.
    """

    b: Any
    start: Any
    first: Any
    length: Any
    stop: Any
    index: Any


@triton.constexpr_function
def norm_of(part, dim, width):
    """1 / sqrt of the side of the Hadamard matrix to which a part belongs; see ``rotation.parts``."""
    return float((width * (1 << ((part ^ (dim // width)).bit_length() - 1))) ** -0.5)


@triton.constexpr_function
def adds(part, half, dim, width):
    """Whether a part and another one, ``half`` away, belong to one matrix: 0 if not, 1 for the first, 2 the second."""
    return 0 if part ^ (dim // width) < 2 * half else 1 + part // half % 2


@triton.jit
def also(parts, part):
    """One part more."""
    return parts + (part,)  # noqa: RUF005


@triton.jit
def bounds_of(rows, b):
    """First row and length of a sequence."""
    start, length = 0, rows.length
    if rows.cu_seqlens_ptr is not None:
        start = tl.load(rows.cu_seqlens_ptr + b)
        length = tl.load(rows.cu_seqlens_ptr + b + 1) - start
    return start, length


@triton.jit
def block_at(slot, rows, SEARCH: tl.constexpr):
    """The ``Block`` of a number from 0 on; a packed one may have no rows."""
    if rows.cu_seqlens_ptr is None:
        blocks = (rows.length + BLOCK - 1) // BLOCK
        b, index = slot // blocks, slot % blocks
        start, length = 0, rows.length
        first, stop = index * BLOCK, length
    else:
        b, index = -1, slot
        for i in range(0, rows.batch, SEARCH):
            at = i + tl.arange(0, SEARCH)
            starts = tl.load(rows.cu_seqlens_ptr + at, mask=at < rows.batch, other=0)
            b += tl.sum(((starts // BLOCK + at <= slot) & (at < rows.batch)).to(tl.int32))
        start, length = bounds_of(rows, b)
        first = (slot - start // BLOCK - b) * BLOCK
        stop = tl.where(b == rows.batch - 1, rows.length - start, length)
    return Block(b, start, first, length, stop, index)


@triton.jit
def sum_of(parts, others):
    """The sums of parts."""
    found = ()
    for p in tl.static_range(len(parts)):
        found = also(found, parts[p] + others[p])
    return found


@triton.jit
def load_parts(x, block, row, h, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The parts of rows of a head, [rows, WIDTH] each; 0 where the sequence has no row."""
    at = x.ptr + tl.cast(block.b, tl.int64) * x.stride_b + tl.cast(h, tl.int64) * x.stride_head
    at += (block.start + row).to(tl.int64)[:, None] * x.stride_row
    parts = ()
    for p in tl.static_range(DIM // WIDTH):
        col = p * WIDTH + tl.arange(0, WIDTH)[None, :]
        parts = also(parts, tl.load(at + col, mask=(row < block.length)[:, None], other=0.0))
    return parts


@triton.jit
def load_angles(angles, position, first, COUNT: tl.constexpr):
    """Cosines and sines of pairs from ``first`` on, [rows, COUNT] float32; those of 0 where the tables end."""
    HALF: tl.constexpr = angles.DIM // 2
    pair = first + tl.arange(0, COUNT)[None, :]
    at = position.to(tl.int64)[:, None] * HALF + pair
    inside = ((position >= 0) & (position < angles.rows))[:, None] & (pair < HALF)
    cos = tl.load(angles.cos_ptr + at, mask=inside, other=1.0).to(tl.float32)
    return cos, tl.load(angles.sin_ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def turned(parts, angles, position, WIDTH: tl.constexpr):
    """Parts in float32, turned by the angles of their rows' positions."""
    found, seconds = (), ()
    if angles.INTERLEAVED and angles.DIM > 0:
        for p in tl.static_range(len(parts)):
            part = parts[p].to(tl.float32)
            if p * WIDTH < angles.DIM:
                a, b = part.reshape(part.shape[0], WIDTH // 2, 2).split()
                cos, sin = load_angles(angles, position, p * WIDTH // 2, WIDTH // 2)
                part = tl.join(a * cos - b * sin, b * cos + a * sin).reshape(part.shape[0], WIDTH)
            found = also(found, part)
    else:
        HALF: tl.constexpr = angles.DIM // 2 // WIDTH
        for p in tl.static_range(HALF):
            a, b = parts[p].to(tl.float32), parts[p + HALF].to(tl.float32)
            cos, sin = load_angles(angles, position, p * WIDTH, WIDTH)
            found, seconds = also(found, a * cos - b * sin), also(seconds, b * cos + a * sin)
        found = found + seconds
        for p in tl.static_range(2 * HALF, len(parts)):
            found = also(found, parts[p].to(tl.float32))
    return found


@triton.jit
def signs_of(seed, part, WIDTH: tl.constexpr):
    """Signs of a part's features, [1, WIDTH] float32, as ``rotation.signs`` has them."""
    x = tl.cast(seed, tl.uint32) + (part * WIDTH + tl.arange(0, WIDTH)).to(tl.uint32) * 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return tl.where(x >= 0x80000000, -1.0, 1.0)[None, :]


@triton.jit
def hadamard(WIDTH: tl.constexpr, dtype: tl.constexpr):
    """The matrix of 1 and -1, [WIDTH, WIDTH]; WIDTH is at most 64."""
    x = tl.arange(0, WIDTH)[:, None] & tl.arange(0, WIDTH)[None, :]
    x ^= x >> 4
    x ^= x >> 2
    x ^= x >> 1
    return tl.where((x & 1) == 1, -1.0, 1.0).to(dtype)


@triton.jit
def add_parts(parts, HALF: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Sums and differences of parts that are HALF apart."""
    found = ()
    for i in tl.static_range(DIM // WIDTH):
        if adds(i, HALF, DIM, WIDTH) == 0:
            found = also(found, parts[i])
        elif adds(i, HALF, DIM, WIDTH) == 1:
            found = also(found, parts[i] + parts[i + HALF])
        else:
            found = also(found, parts[i - HALF] - parts[i])
    return found


@triton.jit
def rows_of_head(
    x, angles, mean, block, row, length_k, h, seed, HAS_SHIFT: tl.constexpr, ROTATE: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The parts of a block of q or k, [BLOCK, WIDTH] float32 each, and each row's product with the mean of k.

    With HAS_SHIFT the mean is not taken off: the rows are queries. ROTATE: the precision of a product of float32, None
    for no product.
    """
    parts, shift = (), tl.zeros([BLOCK], tl.float32)
    dtype: tl.constexpr = x.ptr.dtype.element_ty
    given = turned(load_parts(x, block, row, h, DIM, WIDTH), angles, row + length_k - block.length, WIDTH)
    if ROTATE is not None:
        matrix = hadamard(WIDTH, dtype)
    for p in tl.static_range(DIM // WIDTH):
        part = given[p]
        if mean.ptr is not None:
            entry = (tl.cast(block.b, tl.int64) * mean.num_heads + h // mean.group) * DIM
            center = tl.load(mean.ptr + entry + p * WIDTH + tl.arange(0, WIDTH))[None, :]
            if HAS_SHIFT:
                shift += tl.sum(part * center, 1)
            else:
                part = tl.where((row < block.length)[:, None], part - center, 0.0)
        if ROTATE is not None:
            part = tl.dot((part * signs_of(seed, p, WIDTH)).to(dtype), matrix, input_precision=ROTATE)
            part *= norm_of(p, DIM, WIDTH)
        parts = also(parts, part)
    if ROTATE is not None:
        for stage in tl.static_range(4):
            if 1 << stage < DIM // WIDTH:
                parts = add_parts(parts, 1 << stage, DIM, WIDTH)
    return parts, shift


@triton.jit
def eight_bit(x, BITS: tl.constexpr):
    """float32 as e4m3 bytes; with BITS by integer arithmetic, for GPUs that have no instruction for it."""
    return e4m3_bits(x) if BITS else x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def peak_of(parts, WIDTH: tl.constexpr):
    """The largest magnitude of a block's parts."""
    peak = tl.zeros([BLOCK, WIDTH], tl.float32)
    for p in tl.static_range(len(parts)):
        peak = tl.maximum(peak, tl.abs(parts[p].to(tl.float32)))
    return tl.max(peak)


@triton.jit
def raise_largest(peak, largest, b, h):
    """Raises a head's number, float32 bits as int32, which are in the order of the numbers: none is negative."""
    at = largest.ptr + b * largest.stride_b + h * largest.stride_head
    tl.atomic_max(at, peak.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def decide_scale(peak, largest, scales, block, h):
    """The scale of a block, also written to its place.

    Args:
        peak: The block's largest magnitude, which decides if there is no ``largest``.
        largest: ``PerHead`` of the largest magnitudes, as ``raise_largest`` leaves them.
        scales: ``PerHead`` of the scales.
        block: ``Block``.
        h: The head.
    """
    if largest.ptr is not None:
        bits = tl.load(largest.ptr + block.b * largest.stride_b + h * largest.stride_head)
        peak = bits.to(tl.float32, bitcast=True)
    # As ``plain.scale_of``.
    scale = tl.where(peak > 0.0, tl.maximum(peak / LARGEST, 1.1754943508222875e-38), 1.0)
    at = tl.cast(block.b, tl.int64) * scales.stride_b + h * scales.stride_head + block.index * scales.stride_block
    tl.store(scales.ptr + at, scale)
    return scale


@triton.jit(do_not_specialize=["batch", "length", "length_k", "num_heads", "num_heads_kv", "turns", "seed"])
def quantize_rows(
    x_ptr, out_ptr, scale_ptr, shift_ptr, mean_ptr, largest_ptr, cos_ptr, sin_ptr, cu_seqlens_ptr, cu_seqlens_k_ptr,
    x_stride_b, x_stride_row, x_stride_head, scale_stride_b, scale_stride_head, scale_stride_row, largest_stride_b,
    largest_stride_head, batch, length, length_k, num_heads, num_heads_kv, turns, seed,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROTATE: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    BITS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Quantises q or k: angles, minus the mean, rotation, scale, rounding. Without out_ptr finds largest magnitudes.

    A program has a block of a head. shift_ptr is given for q, and mean_ptr where there is smoothing.
    """
    h = tl.program_id(0) % num_heads
    block = block_at(tl.program_id(0) // num_heads, Rows(cu_seqlens_ptr, batch, length), SEARCH)
    length_k = bounds_of(Rows(cu_seqlens_k_ptr, batch, length_k), block.b)[1]
    row = block.first + tl.arange(0, BLOCK)
    is_written, line, entry = row < block.stop, (block.start + row).to(tl.int64), tl.cast(0, tl.int64)
    if cu_seqlens_ptr is None:
        entry = tl.cast(block.b, tl.int64) * length
    largest = PerHead(largest_ptr, largest_stride_b, largest_stride_head, 0)
    parts, shift = rows_of_head(
        Source(x_ptr, x_stride_b, x_stride_row, x_stride_head),
        Angles(cos_ptr, sin_ptr, turns, ROTARY_DIM, INTERLEAVED),
        Mean(mean_ptr, num_heads_kv, num_heads // num_heads_kv), block, row, length_k, h, seed,
        shift_ptr is not None, ROTATE, DIM, WIDTH,
    )  # fmt: skip
    peak = peak_of(parts, WIDTH)
    if out_ptr is None:
        raise_largest(peak, largest, block.b, h)
    else:
        scales = PerHead(scale_ptr, scale_stride_b, scale_stride_head, scale_stride_row)
        factor = 1.0 / decide_scale(peak, largest, scales, block, h)
        at = (((entry + line) * num_heads + h) * DIM)[:, None]
        for p in tl.static_range(DIM // WIDTH):
            # As wide as loads are, 8 numbers of 16 bits: then they have one layout.
            col = tl.max_contiguous(p * WIDTH + tl.arange(0, WIDTH), 8)[None, :]
            tl.store(out_ptr + at + col, eight_bit(parts[p] * factor, BITS), mask=is_written[:, None])
        if shift_ptr is not None:
            tl.store(shift_ptr + entry * num_heads + tl.cast(h, tl.int64) * length + line, shift, mask=is_written)


@triton.jit(do_not_specialize=["batch", "length", "num_heads"])
def quantize_columns(
    x_ptr, out_ptr, scale_ptr, largest_ptr, cu_seqlens_ptr, x_stride_b, x_stride_row, x_stride_head, scale_stride_b,
    scale_stride_head, scale_stride_row, largest_stride_b, largest_stride_head, batch, length, num_heads,
    columns, DIM: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Quantises v and writes it transposed, each 16 keys in ORDER. Without out_ptr finds largest magnitudes.

    A program has a block of a head. ``columns``: how many a head has.
    """
    h = tl.program_id(0) % num_heads
    block = block_at(tl.program_id(0) // num_heads, Rows(cu_seqlens_ptr, batch, length), SEARCH)
    n = tl.arange(0, BLOCK)
    # Bits 3 2 1 0 of a key's number are bits 1 3 2 0 of its column's.
    row = block.first + ((n & -15) | (n & 2) << 2 | (n & 12) >> 1)
    largest = PerHead(largest_ptr, largest_stride_b, largest_stride_head, 0)
    parts = load_parts(Source(x_ptr, x_stride_b, x_stride_row, x_stride_head), block, row, h, DIM, WIDTH)
    peak = peak_of(parts, WIDTH)
    if out_ptr is None:
        raise_largest(peak, largest, block.b, h)
    else:
        scales = PerHead(scale_ptr, scale_stride_b, scale_stride_head, scale_stride_row)
        factor = 1.0 / decide_scale(peak, largest, scales, block, h)
        line = tl.cast(h, tl.int64)
        if cu_seqlens_ptr is None:
            line += tl.cast(block.b, tl.int64) * num_heads
        for p in tl.static_range(DIM // WIDTH):
            feature = line * DIM + p * WIDTH + tl.arange(0, WIDTH)
            codes = tl.trans(eight_bit(parts[p].to(tl.float32) * factor, BITS))
            tl.store(out_ptr + feature[:, None] * columns + block.index * BLOCK + n[None, :], codes)


@triton.jit(do_not_specialize=["length", "num_heads", "turns"])
def sum_keys(
    x_ptr, sums_ptr, cos_ptr, sin_ptr, cu_seqlens_ptr, x_stride_b, x_stride_row, x_stride_head, length, num_heads,
    turns, DIM: tl.constexpr, WIDTH: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Sums of keys, turned by their angles, (batch, heads, SPLITS, DIM) float32; a program has one of them."""
    h, item = tl.program_id(0) % num_heads, tl.program_id(0) // num_heads
    split, b = item % SPLITS, item // SPLITS
    start, length = bounds_of(Rows(cu_seqlens_ptr, 0, length), b)
    keys = ((length + SPLITS - 1) // SPLITS + ROWS - 1) // ROWS * ROWS
    block = Block(b, start, 0, length, length, 0)
    x, totals = Source(x_ptr, x_stride_b, x_stride_row, x_stride_head), ()
    for _ in tl.static_range(DIM // WIDTH):
        totals = also(totals, tl.zeros([ROWS, WIDTH], tl.float32))
    for first in range(split * keys, tl.minimum(split * keys + keys, length), ROWS):
        row = first + tl.arange(0, ROWS)
        parts = turned(
            load_parts(x, block, row, h, DIM, WIDTH),
            Angles(cos_ptr, sin_ptr, turns, ROTARY_DIM, INTERLEAVED),
            row,
            WIDTH,
        )
        totals = sum_of(totals, parts)
    at = sums_ptr + ((tl.cast(b, tl.int64) * num_heads + h) * SPLITS + split) * DIM + tl.arange(0, WIDTH)
    for p in tl.static_range(DIM // WIDTH):
        tl.store(at + p * WIDTH, tl.sum(totals[p], 0))


@triton.jit(do_not_specialize=["length", "num_heads"])
def mean_of_keys(
    sums_ptr, mean_ptr, cu_seqlens_ptr, length, num_heads, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):  # fmt: skip
    """The means of keys, (batch, heads, DIM) float32, from their sums; 0 of no keys. A program has one of them."""
    length = bounds_of(Rows(cu_seqlens_ptr, 0, length), tl.program_id(0) // num_heads)[1]
    col, entry = tl.arange(0, BLOCK_DIM), tl.program_id(0).to(tl.int64)
    at = (entry * SPLITS + tl.arange(0, SPLITS))[:, None] * DIM + col[None, :]
    total = tl.sum(tl.load(sums_ptr + at, mask=(col < DIM)[None, :], other=0.0), 0)
    tl.store(mean_ptr + entry * DIM + col, total / tl.maximum(length, 1).to(tl.float32), mask=col < DIM)
