"""Kernels that quantise q, k and v: each reads a tensor and writes e4m3 numbers and their scales.

A program takes one block of rows, see ``quantization.blocks``, of a few heads. A tile as wide as head_dim consists of
parts of WIDTH columns, a power of two. The Hadamard matrix of n parts is that of one part, which a product of matrices
applies, and then sums and differences of whole parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.decode.append import e4m3_bits
from flashtile.quantization.blocks import BLOCK as _BLOCK
from flashtile.quantization.record import LARGEST as _LARGEST

BLOCK: tl.constexpr = tl.constexpr(_BLOCK)
LARGEST: tl.constexpr = tl.constexpr(_LARGEST)
# The keys of a head are summed in so many parts, which are added in their order: the same bits in every run.
SPLITS: tl.constexpr = tl.constexpr(16)


class Source(NamedTuple):
    """A tensor (batch, rows, heads, dim), or packed, then stride_b is 0; dim is contiguous."""

    ptr: Any
    stride_b: Any
    stride_row: Any
    stride_head: Any


class Angles(NamedTuple):
    """Cosines and sines, contiguous (rows, DIM / 2); only passed as an argument, never assigned. DIM 0: none."""

    cos_ptr: Any
    sin_ptr: Any
    rows: Any
    DIM: Any
    INTERLEAVED: Any


class Sums(NamedTuple):
    """Sums of keys, (batch, heads, SPLITS, head_dim) float32, and the query heads of a key head; ptr None: none."""

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
def lines_of(x, block, row, h):
    """Addresses of rows of a head, [rows, 1]."""
    entry = tl.cast(block.b, tl.int64) * x.stride_b + tl.cast(h, tl.int64) * x.stride_head
    return x.ptr + entry + (block.start + row).to(tl.int64)[:, None] * x.stride_row


@triton.jit
def turned_part(x, angles, block, row, h, offset, part, WIDTH: tl.constexpr):
    """A part of rows of a head, [rows, WIDTH] float32, turned by the angles of the positions ``row + offset``."""
    at, exists = lines_of(x, block, row, h), (row < block.length)[:, None]
    col = part * WIDTH + tl.arange(0, WIDTH)
    found = tl.load(at + col[None, :], mask=exists, other=0.0).to(tl.float32)
    if angles.DIM > 0:
        HALF: tl.constexpr = angles.DIM // 2
        if angles.INTERLEAVED:
            pair, is_second, partner = col // 2, col % 2 == 1, col ^ 1
        else:
            pair, is_second = col % HALF, col >= HALF
            partner = tl.where(is_second, col - HALF, col + HALF)
        turns = exists & (col < angles.DIM)[None, :]
        other = tl.load(at + partner[None, :], mask=turns, other=0.0).to(tl.float32)
        position = row + offset
        turns &= ((position >= 0) & (position < angles.rows))[:, None]
        angle = position.to(tl.int64)[:, None] * HALF + pair[None, :]
        cos = tl.load(angles.cos_ptr + angle, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(angles.sin_ptr + angle, mask=turns, other=0.0).to(tl.float32)
        found = found * cos + other * tl.where(is_second[None, :], sin, -sin)
    return found


@triton.jit
def mean_of(sums, b, length, h, part, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """A part of the mean of the keys that head h looks at, [1, WIDTH] float32; 0 of no keys."""
    entry = (tl.cast(b, tl.int64) * sums.num_heads + h // sums.group) * SPLITS
    at = (entry + tl.arange(0, SPLITS))[:, None] * DIM + part * WIDTH + tl.arange(0, WIDTH)[None, :]
    return (tl.sum(tl.load(sums.ptr + at), 0) / tl.maximum(length, 1).to(tl.float32))[None, :]


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
    return (1 - 2 * (x & 1)).to(tl.float32).to(dtype)


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
    x, angles, sums, block, row, length_k, h, seed, HAS_SHIFT: tl.constexpr, ROTATE: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The parts of a block of q or k, [BLOCK, WIDTH] float32 each, and each row's product with the mean of k.

    With HAS_SHIFT the mean is not taken off: the rows are queries.
    """
    parts, shift = (), tl.zeros([BLOCK], tl.float32)
    dtype: tl.constexpr = x.ptr.dtype.element_ty
    if ROTATE:
        matrix = hadamard(WIDTH, dtype)
    for p in tl.static_range(DIM // WIDTH):
        part = turned_part(x, angles, block, row, h, length_k - block.length, p, WIDTH)
        if sums.ptr is not None:
            mean = mean_of(sums, block.b, length_k, h, p, WIDTH, DIM)
            if HAS_SHIFT:
                shift += tl.sum(part * mean, 1)
            else:
                part = tl.where((row < block.length)[:, None], part - mean, 0.0)
        if ROTATE:
            part = tl.dot((part * signs_of(seed, p, WIDTH)).to(dtype), matrix, input_precision="tf32")
            part *= norm_of(p, DIM, WIDTH)
        parts = also(parts, part)
    if ROTATE:
        for stage in tl.static_range(4):
            if 1 << stage < DIM // WIDTH:
                parts = add_parts(parts, 1 << stage, DIM, WIDTH)
    return parts, shift


@triton.jit
def eight_bit(x, BITS: tl.constexpr):
    """float32 as e4m3 bytes; with BITS by integer arithmetic, for GPUs that have no instruction for it."""
    if BITS:
        codes = e4m3_bits(x)
    else:
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return codes


@triton.jit
def peak_of(parts, WIDTH: tl.constexpr):
    """The largest magnitude of a block's parts."""
    peak = tl.zeros([BLOCK, WIDTH], tl.float32)
    for p in tl.static_range(len(parts)):
        peak = tl.maximum(peak, tl.abs(parts[p].to(tl.float32)))
    return tl.max(tl.max(peak, 1), 0)


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


@triton.jit(
    do_not_specialize=["batch", "length", "length_k", "num_heads", "num_heads_kv", "heads_each", "turns", "seed"]
)
def quantize_rows(
    x_ptr, out_ptr, scale_ptr, shift_ptr, sums_ptr, largest_ptr, cos_ptr, sin_ptr, cu_seqlens_ptr, cu_seqlens_k_ptr,
    x_stride_b, x_stride_row, x_stride_head, scale_stride_b, scale_stride_head, scale_stride_row, largest_stride_b,
    largest_stride_head, batch, length, length_k, num_heads, num_heads_kv, heads_each, turns, seed,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROTATE: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    BITS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Quantises q or k: angles, minus the mean, rotation, scale, rounding. Without out_ptr finds largest magnitudes.

    A program takes ``heads_each`` heads of a block. shift_ptr is given for q, and sums_ptr where there is smoothing.
    """
    chunks = (num_heads + heads_each - 1) // heads_each
    first_head = tl.program_id(0) % chunks * heads_each
    block = block_at(tl.program_id(0) // chunks, Rows(cu_seqlens_ptr, batch, length), SEARCH)
    length_k = bounds_of(Rows(cu_seqlens_k_ptr, batch, length_k), block.b)[1]
    row = block.first + tl.arange(0, BLOCK)
    is_written, line, entry = row < block.stop, (block.start + row).to(tl.int64), tl.cast(0, tl.int64)
    if cu_seqlens_ptr is None:
        entry = tl.cast(block.b, tl.int64) * length
    largest = PerHead(largest_ptr, largest_stride_b, largest_stride_head, 0)
    for h in range(first_head, tl.minimum(first_head + heads_each, num_heads)):
        parts, shift = rows_of_head(
            Source(x_ptr, x_stride_b, x_stride_row, x_stride_head),
            Angles(cos_ptr, sin_ptr, turns, ROTARY_DIM, INTERLEAVED),
            Sums(sums_ptr, num_heads_kv, num_heads // num_heads_kv), block, row, length_k, h, seed,
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
                col = p * WIDTH + tl.arange(0, WIDTH)[None, :]
                tl.store(out_ptr + at + col, eight_bit(parts[p] * factor, BITS), mask=is_written[:, None])
            if shift_ptr is not None:
                tl.store(shift_ptr + entry * num_heads + tl.cast(h, tl.int64) * length + line, shift, mask=is_written)


@triton.jit(do_not_specialize=["batch", "length", "num_heads", "heads_each"])
def quantize_columns(
    x_ptr, out_ptr, scale_ptr, largest_ptr, cu_seqlens_ptr, x_stride_b, x_stride_row, x_stride_head, scale_stride_b,
    scale_stride_head, scale_stride_row, largest_stride_b, largest_stride_head, batch, length, num_heads, heads_each,
    columns, DIM: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Quantises v and writes it transposed, each 16 keys in ORDER. Without out_ptr finds largest magnitudes.

    A program takes ``heads_each`` heads of a block. ``columns``: how many a head has.
    """
    chunks = (num_heads + heads_each - 1) // heads_each
    first_head = tl.program_id(0) % chunks * heads_each
    block = block_at(tl.program_id(0) // chunks, Rows(cu_seqlens_ptr, batch, length), SEARCH)
    n = tl.arange(0, BLOCK)
    # Bits 3 2 1 0 of a key's number are bits 1 3 2 0 of its column's.
    row = block.first + ((n & -15) | (n & 2) << 2 | (n & 12) >> 1)
    largest = PerHead(largest_ptr, largest_stride_b, largest_stride_head, 0)
    for h in range(first_head, tl.minimum(first_head + heads_each, num_heads)):
        at, parts = lines_of(Source(x_ptr, x_stride_b, x_stride_row, x_stride_head), block, row, h), ()
        for p in tl.static_range(DIM // WIDTH):
            col = p * WIDTH + tl.arange(0, WIDTH)[None, :]
            parts = also(parts, tl.load(at + col, mask=(row < block.length)[:, None], other=0.0))
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
    x_ptr, sums_ptr, cos_ptr, sin_ptr, cu_seqlens_ptr, x_stride_b, x_stride_row, x_stride_head, length, num_heads, turns,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Sums of keys, turned by their angles, (batch, heads, SPLITS, DIM) float32; a program has a part of one of them."""
    PARTS: tl.constexpr = DIM // WIDTH
    part, item = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    split, b, h = item // num_heads % SPLITS, item // num_heads // SPLITS, item % num_heads
    start, length = bounds_of(Rows(cu_seqlens_ptr, 0, length), b)
    keys = ((length + SPLITS - 1) // SPLITS + BLOCK - 1) // BLOCK * BLOCK
    block = Block(b, start, 0, length, length, 0)
    x = Source(x_ptr, x_stride_b, x_stride_row, x_stride_head)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    for first in range(split * keys, tl.minimum(split * keys + keys, length), BLOCK):
        row = first + tl.arange(0, BLOCK)
        total += turned_part(x, Angles(cos_ptr, sin_ptr, turns, ROTARY_DIM, INTERLEAVED), block, row, h, 0, part, WIDTH)
    at = ((tl.cast(b, tl.int64) * num_heads + h) * SPLITS + split) * DIM + part * WIDTH + tl.arange(0, WIDTH)
    tl.store(sums_ptr + at, tl.sum(total, 0))
