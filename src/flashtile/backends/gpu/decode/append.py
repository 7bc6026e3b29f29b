"""Writes new keys and values into a cache, rotated, and rotates the queries, in one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Tokens(NamedTuple):
    """New tokens (batch, rows, heads, dim), or packed.

    Attributes:
        ptr: Their address.
        stride_b: In elements, as the next two.
        stride_row: Of rows.
        stride_head: Of heads.
    """

    ptr: Any
    stride_b: Any
    stride_row: Any
    stride_head: Any


class Rows(NamedTuple):
    """Where tokens lie: packed by (batch + 1,) int32 bounds, or ``length`` of each sequence."""

    cu_seqlens_ptr: Any
    batch: Any
    length: Any


class Angles(NamedTuple):
    """Cosines and sines, contiguous (rows, DIM / 2); only passed as an argument, never assigned.

    DIM features are rotated, 0 for none, in pairs, as many as BLOCK at most.
    """

    cos_ptr: Any
    sin_ptr: Any
    rows: Any
    DIM: Any
    BLOCK: Any
    INTERLEAVED: Any


@triton.jit
def place_of(t, rows, SEARCH: tl.constexpr):
    """The sequence of token t and its row there; the sequence is ``batch`` for tokens past the last packed one."""
    b, i = t // tl.maximum(rows.length, 1), t % tl.maximum(rows.length, 1)
    if rows.cu_seqlens_ptr is not None:
        b = 0
        for first in range(0, rows.batch, SEARCH):
            at = first + tl.arange(0, SEARCH)
            ends = tl.load(rows.cu_seqlens_ptr + at + 1, mask=at < rows.batch, other=2**31 - 1)
            b += tl.sum((ends <= t).to(tl.int32))
        i = t - tl.load(rows.cu_seqlens_ptr + b)
    return b, i


@triton.jit
def rotate(a, b, position, angles, pair, exists):
    """A pair of features, float32, rotated by the angles of a position."""
    inside = exists & (position >= 0) & (position < angles.rows)
    at = tl.cast(position, tl.int64) * (angles.DIM // 2) + pair
    cos = tl.load(angles.cos_ptr + at, mask=inside, other=1.0).to(tl.float32)
    sin = tl.load(angles.sin_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def e4m3_bits(x):
    """float32 as e4m3 bytes: rounded to nearest even, saturated to 448; NaN stays NaN."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    # Below 2^-6 the step is 2^-9; adding 1.5 * 2^23 of it rounds to an integer.
    small = ((magnitude * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    bits = magnitude.to(tl.int32, bitcast=True)
    # 20 bits of the significand go, the exponent's bias from 127 to 7.
    large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    code = tl.where(magnitude < 0.015625, small, large)
    code = tl.where(x != x, 0x7F, code)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def store(at, x, mask, scale, LIKE: tl.constexpr):
    """Stores float32 numbers, rounded to LIKE first; as e4m3 numbers of this scale where the memory has bytes."""
    x = x.to(LIKE)
    if at.dtype.element_ty == tl.uint8:
        tl.store(at, e4m3_bits(x.to(tl.float32) / scale), mask=mask)
    else:
        tl.store(at, x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def move(source, target, position, exists, scale, angles, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Moves rows of new tokens, rotated by the angles of their position.

    Args:
        source: [HEADS, 1] addresses.
        target: [HEADS, 1] addresses.
        position: Of the token.
        exists: [HEADS, 1].
        scale: [HEADS, 1] float32, of 8-bit numbers.
        angles: ``Angles``.
        DIM: Features of a row.
        BLOCK: A power of two, at least DIM.
    """
    LIKE: tl.constexpr = source.dtype.element_ty
    if angles.DIM > 0:
        pair = tl.arange(0, angles.BLOCK)[None, :]
        first, second = pair, pair + angles.DIM // 2
        if angles.INTERLEAVED:
            first, second = 2 * pair, 2 * pair + 1
        inside = exists & (pair < angles.DIM // 2)
        a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
        a, b = rotate(a, b, position, angles, pair, inside)
        store(target + first, a, inside, scale, LIKE)
        store(target + second, b, inside, scale, LIKE)
    if angles.DIM < DIM:
        col = tl.arange(0, BLOCK)[None, :]
        rest = exists & (col >= angles.DIM) & (col < DIM)
        store(target + col, tl.load(source + col, mask=rest, other=0.0).to(tl.float32), rest, scale, LIKE)


@triton.jit
def at_heads(tokens, b, token, i, h, PACKED: tl.constexpr):
    """Addresses of one token's rows of heads h."""
    start = tl.cast(b, tl.int64) * tokens.stride_b + tl.cast(i, tl.int64) * tokens.stride_row
    if PACKED:
        start = tl.cast(token, tl.int64) * tokens.stride_row
    return tokens.ptr + start + h.to(tl.int64) * tokens.stride_head


@triton.jit
def scales_of(ptr, stride_b, entry, h, exists):
    """Scales of heads h, 1 where there are none."""
    scale = tl.full(h.shape, 1.0, tl.float32)
    if ptr is not None:
        scale = tl.load(ptr + entry * stride_b + h, mask=exists, other=1.0)
    return scale


@triton.jit
def append_token(token, h, new, rows, caches, scales, tables, angles, dims, num_heads_kv, SEARCH: tl.constexpr):
    """Writes one token's keys and values of heads h [HEADS, 1] into the cache.

    Args:
        token: Its number among the new tokens.
        h: Key heads.
        new: ``Tokens`` of keys and of values.
        rows: ``Rows`` of the new tokens.
        caches: ``Tokens`` of the caches of keys and of values.
        scales: Address and stride of the scales of keys, then of values.
        tables: cache_seqlens, positions' starts, entries, pages, the pages' stride, PAGE_SIZE, capacity.
        angles: ``Angles``.
        dims: DIM, DIM_V, BLOCK_D, BLOCK_DV.
        num_heads_kv: Key heads.
        SEARCH: See ``place_of``.
    """
    PACKED: tl.constexpr = rows.cu_seqlens_ptr is not None
    b, i = place_of(token, rows, SEARCH)
    valid = b < rows.batch
    b = tl.minimum(b, rows.batch - 1)
    cached = tl.load(tables[0] + b)
    at, position = cached + i, tl.load(tables[1] + b) + i
    valid = valid & (cached >= 0) & (at < tables[6])
    entry, row = tl.cast(b, tl.int64), at
    if tables[2] is not None:
        entry = tl.load(tables[2] + b).to(tl.int64)
    if tables[3] is not None:
        PAGE_SIZE: tl.constexpr = tables[5]
        entry = tl.load(tables[3] + entry * tables[4] + at // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
        row = at % PAGE_SIZE
    exists = valid & (h < num_heads_kv)
    move(
        at_heads(new[0], b, token, i, h, PACKED), at_heads(caches[0], entry, 0, row, h, False), position, exists,
        scales_of(scales[0], scales[1], entry, h, exists), angles, dims[0], dims[2],
    )  # fmt: skip
    move(
        at_heads(new[1], b, token, i, h, PACKED), at_heads(caches[1], entry, 0, row, h, False), position, exists,
        scales_of(scales[2], scales[3], entry, h, exists), Angles(None, None, 0, 0, 1, False), dims[1], dims[3],
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "pages_stride_b", "batch", "num_new", "seqlen_q", "num_tokens", "num_heads_q", "num_heads_kv", "capacity",
        "rows",
    ]
)  # fmt: skip
def cache_append(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, q_ptr, rotated_ptr, cached_ptr, starts_ptr, entries_ptr, pages_ptr,
    cu_seqlens_new_ptr, cu_seqlens_q_ptr, cos_ptr, sin_ptr, k_scale_ptr, v_scale_ptr,
    k_stride_b, k_stride_row, k_stride_head, v_stride_b, v_stride_row, v_stride_head,
    k_cache_stride_b, k_cache_stride_row, k_cache_stride_head,
    v_cache_stride_b, v_cache_stride_row, v_cache_stride_head,
    q_stride_b, q_stride_row, q_stride_head, pages_stride_b, k_scale_stride_b, v_scale_stride_b,
    batch, num_new, seqlen_q, num_tokens, num_heads_q, num_heads_kv, capacity, rows,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROTARY_DIM: tl.constexpr, ROTARY_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, EACH_ROW: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Appends num_tokens new tokens; if ROTARY_DIM is not 0, further programs rotate the queries into ``rotated``.

    A program moves HEADS heads of one token. With EACH_ROW query i has the i-th position, else all have the first.
    """
    pid = tl.program_id(0)
    head_blocks = (num_heads_kv + HEADS - 1) // HEADS
    if pid < num_tokens * head_blocks:
        h = (pid % head_blocks * HEADS + tl.arange(0, HEADS))[:, None]
        append_token(
            pid // head_blocks, h,
            (
                Tokens(k_ptr, k_stride_b, k_stride_row, k_stride_head),
                Tokens(v_ptr, v_stride_b, v_stride_row, v_stride_head),
            ),
            Rows(cu_seqlens_new_ptr, batch, num_new),
            (
                Tokens(k_cache_ptr, k_cache_stride_b, k_cache_stride_row, k_cache_stride_head),
                Tokens(v_cache_ptr, v_cache_stride_b, v_cache_stride_row, v_cache_stride_head),
            ),
            (k_scale_ptr, k_scale_stride_b, v_scale_ptr, v_scale_stride_b),
            (cached_ptr, starts_ptr, entries_ptr, pages_ptr, pages_stride_b, PAGE_SIZE, capacity),
            Angles(cos_ptr, sin_ptr, rows, ROTARY_DIM, ROTARY_BLOCK, INTERLEAVED),
            (HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV), num_heads_kv, SEARCH,
        )  # fmt: skip
    elif ROTARY_DIM > 0:
        q_blocks = (num_heads_q + HEADS - 1) // HEADS
        token = (pid - num_tokens * head_blocks) // q_blocks
        h = ((pid - num_tokens * head_blocks) % q_blocks * HEADS + tl.arange(0, HEADS))[:, None]
        b, i = place_of(token, Rows(cu_seqlens_q_ptr, batch, seqlen_q), SEARCH)
        valid = b < batch
        position = tl.load(starts_ptr + tl.minimum(b, batch - 1))
        if EACH_ROW:
            position += i
        PACKED: tl.constexpr = cu_seqlens_q_ptr is not None
        pitch = num_heads_q * HEAD_DIM  # of a contiguous row
        move(
            at_heads(Tokens(q_ptr, q_stride_b, q_stride_row, q_stride_head), b, token, i, h, PACKED),
            at_heads(Tokens(rotated_ptr, seqlen_q * pitch, pitch, HEAD_DIM), b, token, i, h, PACKED),
            position, valid & (h < num_heads_q), tl.full(h.shape, 1.0, tl.float32),
            Angles(cos_ptr, sin_ptr, rows, ROTARY_DIM, ROTARY_BLOCK, INTERLEAVED), HEAD_DIM, BLOCK_D,
        )  # fmt: skip
