"""Writes new keys and values into a cache, rotated, and rotates the queries, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device import mods

# Sequences among which a token's is looked for at once, the same for any number of them.
SEARCH: tl.constexpr = tl.constexpr(256)


@triton.jit
def place_of(t, sequences):
    """The sequence of token t and its row there; the sequence is ``count`` for tokens past the last packed one."""
    b, i = t // tl.maximum(sequences.length, 1), t % tl.maximum(sequences.length, 1)
    if sequences.cu_seqlens is not None:
        b = 0
        for first in range(0, sequences.count, SEARCH):
            at = first + tl.arange(0, SEARCH)
            ends = tl.load(sequences.cu_seqlens + at + 1, mask=at < sequences.count, other=2**31 - 1)
            b += tl.sum((ends <= t).to(tl.int32))
        i = t - tl.load(sequences.cu_seqlens + b)
    return b, i


@triton.jit
def step_of(i, b, rotation):
    """How far row i of sequence b stands after its first new token: by its depth where the rows are a tree."""
    step = i
    if rotation.tree is not None:
        num_rows = rotation.queries.length
        if rotation.queries.cu_seqlens is not None:
            num_rows = tl.load(rotation.queries.cu_seqlens + b + 1) - tl.load(rotation.queries.cu_seqlens + b)
        num_rows = tl.where(num_rows <= rotation.tree_rows, num_rows, 0)
        step = mods.tree_places(rotation.tree + tl.cast(b, tl.int64) * rotation.tree_rows, num_rows, 0, i)
    return step


@triton.jit
def rotate(a, b, position, rotation, pair, exists):
    """A pair of features, float32, rotated by the angles of a position."""
    inside = exists & (position >= 0) & (position < rotation.rows)
    at = tl.cast(position, tl.int64) * (rotation.DIM // 2) + pair
    cos = tl.load(rotation.cos + at, mask=inside, other=1.0).to(tl.float32)
    sin = tl.load(rotation.sin + at, mask=inside, other=0.0).to(tl.float32)
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
def e5m2_bits(x):
    """float32 as e5m2 bytes: rounded to nearest even, saturated to 57344; NaN stays NaN."""
    magnitude = tl.minimum(tl.abs(x), 57344.0)
    # Below 2^-14 the step is 2^-16.
    small = ((magnitude * 65536.0 + 12582912.0) - 12582912.0).to(tl.int32)
    bits = magnitude.to(tl.int32, bitcast=True)
    # 21 bits of the significand go, the exponent's bias from 127 to 15.
    large = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - ((127 - 15) << 2)
    code = tl.where(magnitude < 6.103515625e-05, small, large)
    code = tl.where(x != x, 0x7F, code)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def store(at, x, mask, scale, LIKE: tl.constexpr, E5M2: tl.constexpr):
    """Stores float32 numbers, rounded to LIKE first; as 8-bit numbers of this scale where the memory has bytes."""
    x = x.to(LIKE)
    if at.dtype.element_ty == tl.uint8:
        x = x.to(tl.float32) / scale
        tl.store(at, e5m2_bits(x) if E5M2 else e4m3_bits(x), mask=mask)
    else:
        tl.store(at, x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def move(
    source, target, position, exists, scale, rotation, E5M2: tl.constexpr, ROTATED: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Moves rows of new tokens, rotated by the angles of their position.

    Args:
        source: [HEADS, 1] addresses.
        target: [HEADS, 1] addresses.
        position: Position of the token.
        exists: [HEADS, 1].
        scale: [HEADS, 1] float32, of 8-bit numbers.
        rotation: ``Rotation``.
        E5M2: Which 8-bit numbers.
        ROTATED: Features that are rotated; 0 for none.
        DIM: Features of a row.
        BLOCK: A power of two, at least DIM.
    """
    LIKE: tl.constexpr = source.dtype.element_ty
    if ROTATED > 0:
        pair = tl.arange(0, rotation.BLOCK)[None, :]
        first, second = pair, pair + ROTATED // 2
        if rotation.INTERLEAVED:
            first, second = 2 * pair, 2 * pair + 1
        inside = exists & (pair < ROTATED // 2)
        a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
        a, b = rotate(a, b, position, rotation, pair, inside)
        store(target + first, a, inside, scale, LIKE, E5M2)
        store(target + second, b, inside, scale, LIKE, E5M2)
    if ROTATED < DIM:
        col = tl.arange(0, BLOCK)[None, :]
        rest = exists & (col >= ROTATED) & (col < DIM)
        store(target + col, tl.load(source + col, mask=rest, other=0.0).to(tl.float32), rest, scale, LIKE, E5M2)


@triton.jit
def at_heads(tensor, b, token, i, h):
    """Addresses of one token's rows of heads h."""
    start = tl.cast(b, tl.int64) * tensor.stride_b + tl.cast(i, tl.int64) * tensor.stride_row
    if tensor.PACKED:
        start = tl.cast(token, tl.int64) * tensor.stride_row
    return tensor.ptr + start + h.to(tl.int64) * tensor.stride_head


@triton.jit
def scales_of(scale, entry, h, exists):
    """Scales of heads h, 1 where there are none."""
    factor = tl.full(h.shape, 1.0, tl.float32)
    if scale.ptr is not None:
        factor = tl.load(scale.ptr + entry * scale.stride_b + h, mask=exists, other=1.0)
    return factor


@triton.jit
def append_token(token, h, cache, new, rotation):
    """Writes one token's keys and values of heads h [HEADS, 1] into the cache; token is its number among new ones."""
    b, i = place_of(token, cache.new)
    valid = b < cache.new.count
    b = tl.minimum(b, cache.new.count - 1)
    cached, position = tl.load(cache.cached + b), i
    if rotation.starts is not None:
        position = step_of(i, b, rotation) + tl.load(rotation.starts + b)
    at = cached + i
    if new.slots is None:
        valid = valid & (cached >= 0) & (at < cache.capacity)
        entry, row = tl.cast(b, tl.int64), at
        if cache.entries is not None:
            entry = tl.load(cache.entries + b).to(tl.int64)
        if cache.pages is not None:
            SIZE: tl.constexpr = cache.PAGE_SIZE
            pages = cache.pages + entry * cache.pages_pitch
            if cache.indptr is not None:
                pages = cache.pages + tl.load(cache.indptr + b)
            entry = tl.load(pages + at // SIZE, mask=valid, other=0).to(tl.int64)
            row = at % SIZE
    else:
        valid = valid & (cached >= 0)
        slot = tl.load(new.slots + token, mask=valid, other=-1).to(tl.int64)
        valid = valid & (slot >= 0) & (slot < new.num_slots)
        entry, row = slot // new.entry_rows, slot % new.entry_rows
    exists = valid & (h < new.num_heads_kv)
    move(
        at_heads(new.k, b, token, i, h), at_heads(cache.k, entry, 0, row, h), position, exists,
        scales_of(cache.scales.k, entry, h, exists), rotation, cache.scales.E5M2, rotation.DIM, new.k.DIM,
        new.k.BLOCK_DIM,
    )  # fmt: skip
    move(
        at_heads(new.v, b, token, i, h), at_heads(cache.v, entry, 0, row, h), position, exists,
        scales_of(cache.scales.v, entry, h, exists), rotation, cache.scales.E5M2, 0, new.v.DIM, new.v.BLOCK_DIM,
    )  # fmt: skip


@triton.jit
def rotate_query(token, h, rotation):
    """Writes heads h [HEADS, 1] of one query, rotated."""
    b, i = place_of(token, rotation.queries)
    valid = b < rotation.queries.count
    b_valid = tl.minimum(b, rotation.queries.count - 1)
    position = tl.load(rotation.starts + b_valid)
    if rotation.EACH_ROW:
        step = step_of(i, b_valid, rotation)
        if rotation.causal is not None:
            step = tl.where(tl.load(rotation.causal + b_valid) != 0, step, 0)
        position += step
    move(
        at_heads(rotation.q, b, token, i, h), at_heads(rotation.rotated, b, token, i, h), position,
        valid & (h < rotation.num_heads_q), tl.full(h.shape, 1.0, tl.float32),
        rotation, False, rotation.DIM, rotation.q.DIM, rotation.q.BLOCK_DIM,
    )  # fmt: skip


@triton.jit
def cache_append(cache, new, rotation):
    """Appends new tokens; further programs rotate the queries. A program moves HEADS heads of one token.

    Args:
        cache: ``call.Cache``.
        new: ``call.New``.
        rotation: ``call.Rotation``.
    """
    HEADS: tl.constexpr = new.HEADS
    pid = tl.program_id(0)
    head_blocks = (new.num_heads_kv + HEADS - 1) // HEADS
    if pid < new.count * head_blocks:
        h = (pid % head_blocks * HEADS + tl.arange(0, HEADS))[:, None]
        append_token(pid // head_blocks, h, cache, new, rotation)
    elif rotation.starts is not None:
        q_blocks = (rotation.num_heads_q + HEADS - 1) // HEADS
        at = pid - new.count * head_blocks
        h = (at % q_blocks * HEADS + tl.arange(0, HEADS))[:, None]
        rotate_query(at // q_blocks, h, rotation)
