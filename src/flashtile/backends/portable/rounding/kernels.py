"""Kernels that quantise q, k and v: each reads a tensor and writes e4m3 numbers and their scales.

A program takes one block of rows, see ``quantization.blocks``, of a few heads. A tile as wide as head_dim consists of
parts of WIDTH columns, a power of two. The Hadamard matrix of n parts is one part's, which a product of matrices
applies, and then sums and differences of whole parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.decode.append import e4m3_bits
from flashtile.backends.portable.device import records
from flashtile.call.blocks import BLOCK as _BLOCK
from flashtile.call.blocks import LARGEST as _LARGEST
from flashtile.call.blocks import MOST_KEYS as _MOST_KEYS

BLOCK: tl.constexpr = tl.constexpr(_BLOCK)
LARGEST: tl.constexpr = tl.constexpr(_LARGEST)
# The keys of a head are summed in so many parts, then these, always in this order: the same bits in every run.
SPLITS: tl.constexpr = tl.constexpr(records.MEAN_SPLITS)
MOST_KEYS: tl.constexpr = tl.constexpr(_MOST_KEYS)


class SequenceBlock(NamedTuple):
    """128 rows of a sequence.

    Attributes:
        b: The sequence.
        start: Its first row in the tensor, or in its entry of a dense one.
        first: The block's first row in the sequence.
        length: Rows of the sequence.
        stop: Rows to write; the last sequence's are followed by those that belong to none.
        index: The block's number among its entry's.
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
def append(parts, part):
    """One part more."""
    return parts + (part,)  # noqa: RUF005


@triton.jit
def bounds_of(sequences, b):
    """First row and length of a sequence."""
    start, length = 0, sequences.length
    if sequences.cu_seqlens is not None:
        start = tl.load(sequences.cu_seqlens + b)
        length = tl.load(sequences.cu_seqlens + b + 1) - start
    return start, length


@triton.jit
def block_at(slot, sequences, SEARCH: tl.constexpr):
    """The ``SequenceBlock`` of a number from 0 on; a packed one may have no rows."""
    if sequences.cu_seqlens is None:
        blocks = (sequences.length + BLOCK - 1) // BLOCK
        b, index = slot // blocks, slot % blocks
        start, length = 0, sequences.length
        first, stop = index * BLOCK, length
    else:
        b, index = -1, slot
        for i in range(0, sequences.count, SEARCH):
            at = i + tl.arange(0, SEARCH)
            starts = tl.load(sequences.cu_seqlens + at, mask=at < sequences.count, other=0)
            b += tl.sum(((starts // BLOCK + at <= slot) & (at < sequences.count)).to(tl.int32))
        start, length = bounds_of(sequences, b)
        first = (slot - start // BLOCK - b) * BLOCK
        stop = tl.where(b == sequences.count - 1, sequences.length - start, length)
    return SequenceBlock(b, start, first, length, stop, index)


@triton.jit
def load_parts(x, block, row, h, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The parts of rows of a head, [rows, WIDTH] each; 0 where the sequence has no row."""
    at = x.ptr + tl.cast(block.b, tl.int64) * x.stride_b + tl.cast(h, tl.int64) * x.stride_head
    at += (block.start + row).to(tl.int64)[:, None] * x.stride_row
    parts = ()
    for p in tl.static_range(DIM // WIDTH):
        col = tl.arange(0, WIDTH)[None, :] + p * WIDTH
        parts = append(parts, tl.load(at + col, mask=(row < block.length)[:, None], other=0.0))
    return parts


@triton.jit
def load_angles(angles, position, first, COUNT: tl.constexpr):
    """Cosines and sines of pairs from ``first`` on, [rows, COUNT] float32; past the tables' end, of angle 0."""
    HALF: tl.constexpr = angles.DIM // 2
    pair = first + tl.arange(0, COUNT)[None, :]
    at = position.to(tl.int64)[:, None] * HALF + pair
    inside = ((position >= 0) & (position < angles.rows))[:, None] & (pair < HALF)
    cos = tl.load(angles.cos_ptr + at, mask=inside, other=1.0).to(tl.float32)
    return cos, tl.load(angles.sin_ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def turned(parts, angles, position, WIDTH: tl.constexpr):
    """Parts turned by the angles of their rows' positions, those in float32."""
    found, seconds = (), ()
    if angles.INTERLEAVED and angles.DIM > 0:
        for p in tl.static_range(len(parts)):
            if p * WIDTH < angles.DIM:
                part = parts[p].to(tl.float32)
                a, b = part.reshape(part.shape[0], WIDTH // 2, 2).split()
                cos, sin = load_angles(angles, position, p * WIDTH // 2, WIDTH // 2)
                found = append(found, tl.join(a * cos - b * sin, b * cos + a * sin).reshape(part.shape[0], WIDTH))
            else:
                found = append(found, parts[p])
    else:
        HALF: tl.constexpr = angles.DIM // 2 // WIDTH
        for p in tl.static_range(HALF):
            a, b = parts[p].to(tl.float32), parts[p + HALF].to(tl.float32)
            cos, sin = load_angles(angles, position, p * WIDTH, WIDTH)
            found, seconds = append(found, a * cos - b * sin), append(seconds, b * cos + a * sin)
        found = found + seconds
        for p in tl.static_range(2 * HALF, len(parts)):
            found = append(found, parts[p])
    return found


@triton.jit
def hadamard(seed, part, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """The matrix of 1 and -1, [WIDTH, WIDTH]; WIDTH is at most 64. A row has the sign of its feature of a part.

    The signs are ``rotation.signs``.
    """
    x = tl.arange(0, WIDTH)[:, None] & tl.arange(0, WIDTH)[None, :]
    x ^= x >> 4
    x ^= x >> 2
    x ^= x >> 1
    sign = tl.cast(seed, tl.uint32) + (tl.arange(0, WIDTH) + part * WIDTH).to(tl.uint32) * 0x9E3779B9
    sign = (sign ^ (sign >> 16)) * 0x85EBCA6B
    sign = (sign ^ (sign >> 13)) * 0xC2B2AE35
    return tl.where(((x & 1) ^ (sign >> 31).to(tl.int32)[:, None]) == 1, -1.0, 1.0).to(dtype)


@triton.jit
def add_parts(parts, HALF: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Sums and differences of parts that are HALF apart."""
    found = ()
    for i in tl.static_range(DIM // WIDTH):
        if adds(i, HALF, DIM, WIDTH) == 0:
            found = append(found, parts[i])
        elif adds(i, HALF, DIM, WIDTH) == 1:
            found = append(found, parts[i] + parts[i + HALF])
        else:
            found = append(found, parts[i - HALF] - parts[i])
    return found


@triton.jit
def rotated(parts, seed, dtype: tl.constexpr, ROTATE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of parts times random signs and the Hadamard matrix, in float32; ``dtype``: in which they are multiplied.

    Float32 parts, those that angles have turned, are multiplied as the sum of two numbers of 16 bits: one alone would
    leave few digits once a large mean is taken off.
    """
    found = ()
    for p in tl.static_range(DIM // WIDTH):
        matrix, high = hadamard(seed, p, WIDTH, dtype), parts[p].to(dtype)
        part = tl.dot(high, matrix, input_precision=ROTATE)
        if parts[p].dtype != dtype:
            part = tl.dot((parts[p] - high.to(tl.float32)).to(dtype), matrix, part)
        found = append(found, part * norm_of(p, DIM, WIDTH))
    for stage in tl.static_range(4):
        if 1 << stage < DIM // WIDTH:
            found = add_parts(found, 1 << stage, DIM, WIDTH)
    return found


@triton.jit
def rows_of_head(
    x, angles, mean, block, row, length_k, h, rounding, HAS_SHIFT: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The parts of a block of q or k, [BLOCK, WIDTH] float32 each, and each row's product with the mean of k.

    With HAS_SHIFT the mean is not taken off: the rows are queries.
    """
    given, shift = load_parts(x, block, row, h, DIM, WIDTH), tl.zeros([BLOCK], tl.float32)
    given = turned(given, angles, row + length_k - block.length, WIDTH)
    if rounding.ROTATE is not None:
        given = rotated(given, rounding.seed, x.ptr.dtype.element_ty, rounding.ROTATE, DIM, WIDTH)
    parts = ()
    for p in tl.static_range(DIM // WIDTH):
        part = given[p].to(tl.float32)
        if mean.ptr is not None:
            entry = (tl.cast(block.b, tl.int64) * mean.num_heads + h // mean.group) * DIM
            center = tl.load(mean.ptr + entry + tl.arange(0, WIDTH) + p * WIDTH)[None, :]
            if HAS_SHIFT:
                shift += tl.sum(part * center, 1)
            else:
                part = tl.where((row < block.length)[:, None], part - center, 0.0)
        parts = append(parts, part)
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
        block: ``SequenceBlock``.
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


@triton.jit
def quantize_rows(source, sequences, keys, angles, mean, written, rounding):
    """Quantises q or k: angles, minus the mean, rotation, scale, rounding. A program has a block of HEADS heads.

    The next head's rows are on their way while one's are written.

    Args:
        source: ``Source``.
        sequences: Its ``records.Sequences``.
        keys: ``records.Sequences`` of the keys.
        angles: ``Angles``.
        mean: ``Mean``, which is taken off keys; queries have a ``shift`` of it.
        written: ``Written``.
        rounding: ``Rounding``.
    """
    HEADS: tl.constexpr = rounding.HEADS
    STAGES: tl.constexpr = rounding.STAGES
    DIM: tl.constexpr = source.DIM
    WIDTH: tl.constexpr = source.WIDTH
    num_heads = source.num_heads
    groups = (num_heads + HEADS - 1) // HEADS
    first_head = tl.program_id(0) % groups * HEADS
    block = block_at(tl.program_id(0) // groups, sequences, rounding.SEARCH)
    length_k = bounds_of(keys, block.b)[1]
    row = block.first + tl.arange(0, BLOCK)
    is_written, line, entry = row < block.stop, (block.start + row).to(tl.int64), tl.cast(0, tl.int64)
    if sequences.cu_seqlens is None:
        entry = tl.cast(block.b, tl.int64) * sequences.length
    for h in tl.range(first_head, tl.minimum(first_head + HEADS, num_heads), num_stages=STAGES):
        parts, shift = rows_of_head(
            source, angles, mean, block, row, length_k, h, rounding, written.shift is not None, DIM, WIDTH
        )  # fmt: skip
        peak = peak_of(parts, WIDTH)
        if written.out is None:
            raise_largest(peak, written.largest, block.b, h)
        else:
            factor = 1.0 / decide_scale(peak, written.largest, written.scales, block, h)
            at = ((entry + line) * num_heads + h)[:, None] * DIM
            for p in tl.static_range(DIM // WIDTH):
                # As wide as loads are, 8 numbers of 16 bits: then they have one layout.
                col = tl.max_contiguous(tl.arange(0, WIDTH) + p * WIDTH, 8)[None, :]
                tl.store(written.out + at + col, eight_bit(parts[p] * factor, rounding.BITS), mask=is_written[:, None])
            if written.shift is not None:
                shift_at = entry * num_heads + tl.cast(h, tl.int64) * sequences.length + line
                tl.store(written.shift + shift_at, shift, mask=is_written)


@triton.jit
def quantize_columns(source, sequences, written, stride_dim, rounding):
    """Quantises v and writes it transposed, each 16 keys in ORDER; arguments as above; stride_dim: its columns."""
    DIM: tl.constexpr = source.DIM
    WIDTH: tl.constexpr = source.WIDTH
    num_heads = source.num_heads
    h = tl.program_id(0) % num_heads
    block = block_at(tl.program_id(0) // num_heads, sequences, rounding.SEARCH)
    n = tl.arange(0, BLOCK)
    # Bits 3 2 1 0 of a key's number are bits 1 3 2 0 of its column's.
    row = block.first + ((n & -15) | (n & 2) << 2 | (n & 12) >> 1)
    parts = load_parts(source, block, row, h, DIM, WIDTH)
    peak = peak_of(parts, WIDTH)
    if written.out is None:
        raise_largest(peak, written.largest, block.b, h)
    else:
        factor = 1.0 / decide_scale(peak, written.largest, written.scales, block, h)
        line = tl.cast(h, tl.int64)
        if sequences.cu_seqlens is None:
            line += tl.cast(block.b, tl.int64) * num_heads
        for p in tl.static_range(DIM // WIDTH):
            feature = line * DIM + tl.arange(0, WIDTH) + p * WIDTH
            codes = tl.trans(eight_bit(parts[p].to(tl.float32) * factor, rounding.BITS))
            at = feature[:, None] * stride_dim + block.index * BLOCK + n[None, :]
            tl.store(written.out + at, codes)


@triton.jit
def sum_keys(source, sequences, angles, sums_ptr):
    """Sums of at most MOST_KEYS keys, spread evenly and turned by their angles: (batch, heads, SPLITS, DIM) float32.

    A program has one of them.
    """
    DIM: tl.constexpr = source.DIM
    WIDTH: tl.constexpr = source.WIDTH
    ROWS: tl.constexpr = MOST_KEYS // SPLITS
    h, item = tl.program_id(0) % source.num_heads, tl.program_id(0) // source.num_heads
    split, b = item % SPLITS, item // SPLITS
    start, length = bounds_of(sequences, b)
    # Past the last one a row is past the sequence.
    number = (split * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    row = (number * length // tl.minimum(tl.maximum(length, 1), MOST_KEYS)).to(tl.int32)
    parts = load_parts(source, SequenceBlock(b, start, 0, length, length, 0), row, h, DIM, WIDTH)
    totals = turned(parts, angles, row, WIDTH)
    at = sums_ptr + ((tl.cast(b, tl.int64) * source.num_heads + h) * SPLITS + split) * DIM + tl.arange(0, WIDTH)
    for p in tl.static_range(DIM // WIDTH):
        tl.store(at + p * WIDTH, tl.sum(totals[p].to(tl.float32), 0))


@triton.jit
def mean_of_keys(sums_ptr, mean_ptr, sequences, num_heads, rounding, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The ``Mean`` of keys from their sums, 0 of no keys. A program has one of them."""
    length = bounds_of(sequences, tl.program_id(0) // num_heads)[1]
    keys = tl.minimum(tl.maximum(length, 1), MOST_KEYS).to(tl.float32)
    entry, col, split, parts = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH), tl.arange(0, SPLITS), ()
    for p in tl.static_range(DIM // WIDTH):
        at = (entry * SPLITS + split)[:, None] * DIM + col[None, :] + p * WIDTH
        parts = append(parts, tl.load(sums_ptr + at) / keys)
    if rounding.ROTATE is not None:
        # This rotates the sums, which are as many rows as a product of matrices takes.
        parts = rotated(parts, rounding.seed, tl.float32, "ieee", DIM, WIDTH)
    for p in tl.static_range(DIM // WIDTH):
        tl.store(mean_ptr + entry * DIM + col + p * WIDTH, tl.sum(parts[p], 0))
