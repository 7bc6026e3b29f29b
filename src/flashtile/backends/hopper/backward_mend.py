"""Gradients into which a NaN or an infinity came from behind a mask, computed again, in plain Triton.

The main kernel's products are over whole blocks: they multiply a gradient of 0 of a masked pair with the query, with
dout or with the key, and 0 times NaN or infinity is NaN. The main kernel pays nothing to prevent that. An element of dk
is spoilt by a query, one of dv by a row of dout, in a block of which the key masks some rows; an element of dq by a key
in a block of which the row masks some keys. ``backward_rows`` flags the rows that might be at fault, and the rows of dq
that hold a NaN. Where nothing is flagged, this kernel reads one number. Otherwise it looks at the NaN of dk and dv of
keys whose blocks have flagged rows, and at those of dq, and computes again, with 0 in place of every infinity and NaN,
what none of its own rows or keys has made NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.hopper.backward_rows import (
    BAD_DOUT,
    BAD_DQ,
    BAD_Q,
    UNIT,
    blocks_a_head,
    first_block,
    locate,
)
from flashtile.backends.vocab import blocks, finite, mask, quick_scores, sequence, softmax

# Rows or keys that are added up at a time, and columns that are worked on at a time.
STEP = tl.constexpr(32)
COLS = tl.constexpr(64)


@triton.jit
def load_tile(operand, i, length, first_col, HEAD_DIM: tl.constexpr):
    """[i, COLS] of an operand as ``head_of`` gives it; 0 where there is nothing."""
    at, stride = operand
    col = first_col + tl.arange(0, COLS)[None, :]
    inside = (i < length)[:, None] & (col < HEAD_DIM)
    return tl.load(at + (i.to(tl.int64) * stride * 8)[:, None] + col, mask=inside, other=0.0)


@triton.jit
def products(mine, i, length, others, j, num_others, HEAD_DIM: tl.constexpr):
    """[i, j] float32: products of rows i of one operand with rows j of another."""
    s = tl.zeros([UNIT, STEP], tl.float32)
    for col in range(0, HEAD_DIM, COLS):
        a = load_tile(mine, i, length, col, HEAD_DIM)
        b = load_tile(others, j, num_others, col, HEAD_DIM)
        s = tl.dot(a, tl.trans(b), s)
    return s


@triton.jit
def row_state(rows_at, row, length_q, BLOCK_M: tl.constexpr):
    """(origin, delta) of rows, from the workspace's row block of row 0; (inf, 0) behind the last row."""
    at = rows_at + tl.cast(row // BLOCK_M, tl.int64) * (2 * BLOCK_M) + row % BLOCK_M
    origin = tl.load(at, mask=row < length_q, other=float("inf"))
    return origin, tl.load(at + BLOCK_M, mask=row < length_q, other=0.0)


@triton.jit
def is_lost(origin, delta, VALUES: tl.constexpr):
    """Whether a row makes every gradient NaN that it has a part in: of values, or else of queries and keys."""
    lost = origin != origin
    if not VALUES:
        lost = lost | ~finite.is_finite(delta)
    return lost


@triton.jit
def some(condition):
    """Whether a condition holds anywhere in a tile."""
    return tl.max(tl.max(condition.to(tl.int32), 1), 0) > 0


@triton.jit
def add_others(
    acc, met, is_nan, mine, others, rows_at, first, start, stop, first_col, length_q, length_k, left, right, transform,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, KEYS_FIRST: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Adds up UNIT rows and COLS columns of a gradient, until all of ``is_nan`` have met what makes them NaN.

    acc and met, [UNIT, COLS] float32, are the sums so far, without the factor softmax_scale, and how many infinities
    and NaN each has met; both are returned, acc complete where met is 0. mine and others are the operands of scores and
    of dprobs on this side and the other, as ``load_tile`` takes them: (keys, values) of the gradient's own keys against
    (queries, dout) with KEYS_FIRST, which may be a gradient of VALUES; else the other way round. rows_at is the
    workspace's row block of the sequence's row 0, ``first`` this side's first key or row, ``start ... stop - 1`` are
    the other side's; transform: (scale_log2, softcap, prescale) of ``gradients.scales``.
    """
    scale_log2, softcap, prescale = transform
    i = first + tl.arange(0, UNIT)
    length, num_others = length_q, length_k
    if KEYS_FIRST:
        length, num_others = length_k, length_q
    other = start
    is_open = some(is_nan & (met == 0.0))
    while (other < stop) & is_open:
        j = other + tl.arange(0, STEP)
        rows, keys = i[:, None], j[None, :]
        if KEYS_FIRST:
            rows, keys = j[None, :], i[:, None]
        origin, delta = row_state(rows_at, rows, length_q, BLOCK_M)
        s = products(mine[0], i, length, others[0], j, num_others, HEAD_DIM)
        factor = s
        if HAS_SOFTCAP:
            s = quick_scores.softcap(s, softcap, prescale)
            probs = tl.exp2(s * softmax.LOG2_E - origin)
            ratio = s / softcap
            factor = probs * (1.0 - ratio * ratio)
        else:
            probs = tl.exp2(s * scale_log2 - origin)
            factor = probs
        if VALUES:
            factor = probs
            x = load_tile(others[1], j, num_others, first_col, HEAD_DIM)
        else:
            dprobs = products(mine[1], i, length, others[1], j, num_others, HEAD_DIM)
            factor = factor * (dprobs - delta)
            x = load_tile(others[0], j, num_others, first_col, HEAD_DIM)
        keep = mask.band_keep(rows + (length_k - length_q), keys, length_k, left, right, HAS_LEFT, HAS_RIGHT)
        keep = keep & (rows < length_q)
        bad = (~finite.is_finite(x)).to(tl.float16)
        if KEYS_FIRST:
            origin, delta = row_state(rows_at, j, length_q, BLOCK_M)
            bad = tl.where(is_lost(origin, delta, VALUES)[:, None], 1.0, bad).to(tl.float16)
        met = tl.dot(keep.to(tl.float16), bad, met)
        acc = tl.dot(tl.where(keep, factor, 0.0).to(x.dtype), finite.finite(x), acc)
        other += STEP
        is_open = some(is_nan & (met == 0.0))
    return acc, met


@triton.jit
def flagged(flags_at, start, stop):
    """Whether queries, and whether dout, of units start ... stop - 1 of a head are flagged; each 0 or 1."""
    bad_q, bad_dout = start * 0, start * 0
    while start < stop:
        unit = start + tl.arange(0, 32)
        flags = tl.load(flags_at + unit, mask=unit < stop, other=0)
        bad_q = tl.maximum(bad_q, tl.max(flags & BAD_Q, 0) // BAD_Q)
        bad_dout = tl.maximum(bad_dout, tl.max(flags & BAD_DOUT, 0) // BAD_DOUT)
        start += 32
    return bad_q, bad_dout


@triton.jit
def head_of(operand, b, start, head, VARLEN: tl.constexpr):
    """(row 0, stride of a row) of one head of one sequence.

    operand is (pointer, strides of a sequence, a row and a head). Strides come in eights of elements, so that the
    compiler sees what TMA demands of them: that rows start on 16 bytes.
    """
    ptr, stride_b, stride_row, stride_head = operand
    if VARLEN:
        b = b * 0
    offset = tl.cast(b, tl.int64) * stride_b + tl.cast(start, tl.int64) * stride_row
    return ptr + (offset + tl.cast(head, tl.int64) * stride_head) * 8, stride_row


@triton.jit
def mend_unit(
    grad, tensors, b, head, head_kv, first, sequence_q, sequence_k, rows_ptr, sizes, band, transform, softmax_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, VARLEN: tl.constexpr, KEYS_FIRST: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Computes again what may have leaked into UNIT keys or rows of a gradient, from ``first`` on.

    grad is the gradient's head, as ``load_tile`` takes it; tensors: q, k, v and dout as ``head_of`` takes them; head:
    the head, or with KEYS_FIRST the first of those that share the keys; sequence_q and sequence_k: (start, length);
    sizes: (seqlen_q, batch, num_heads_q, group_size); band: (left, right); the rest as ``add_others`` has it.
    """
    q, k, v, dout = tensors
    start_q, length_q = sequence_q
    start_k, length_k = sequence_k
    left, right = band
    seqlen_q, batch, num_heads_q, group_size = sizes
    i = first + tl.arange(0, UNIT)
    scale = 1.0 if VALUES else softmax_scale
    if KEYS_FIRST:
        length, heads = length_k, group_size
        last = tl.minimum(first + UNIT, length) - 1
        start, _, _, stop = blocks.query_blocks(first, last, length_q, length_k, left, right, HAS_LEFT, HAS_RIGHT, STEP)
    else:
        length, heads = length_q, 1
        last = tl.minimum(first + UNIT, length) - 1
        start, _, _, stop = blocks.key_blocks(first, last, length_q, length_k, left, right, HAS_LEFT, HAS_RIGHT, STEP)
    keys, values = head_of(k, b, start_k, head_kv, VARLEN), head_of(v, b, start_k, head_kv, VARLEN)
    for col in range(0, HEAD_DIM, COLS):
        now = load_tile(grad, i, length, col, HEAD_DIM)
        is_nan = now != now
        if not KEYS_FIRST:
            block = first_block(b, start_q, head, seqlen_q, batch, num_heads_q, BLOCK_M, VARLEN)
            origin, delta = row_state(rows_ptr + block * (2 * BLOCK_M), i, length_q, BLOCK_M)
            position = i + (length_k - length_q)
            first_key = tl.maximum(mask.first_key(position, left, HAS_LEFT), 0)
            has_keys = mask.last_key(position, length_k, right, HAS_RIGHT) >= first_key
            is_nan = is_nan & ~(is_lost(origin, delta, False) & has_keys)[:, None]
        if some(is_nan):
            acc = tl.zeros([UNIT, COLS], tl.float32)
            met = tl.zeros([UNIT, COLS], tl.float32)
            for member in range(heads):
                queries = head_of(q, b, start_q, head + member, VARLEN)
                douts = head_of(dout, b, start_q, head + member, VARLEN)
                mine, others = (queries, douts), (keys, values)
                if KEYS_FIRST:
                    mine, others = others, mine
                block = first_block(b, start_q, head + member, seqlen_q, batch, num_heads_q, BLOCK_M, VARLEN)
                acc, met = add_others(
                    acc, met, is_nan, mine, others, rows_ptr + block * (2 * BLOCK_M), first, start * STEP, stop * STEP,
                    col, length_q, length_k, left, right, transform, HEAD_DIM, BLOCK_M, HAS_LEFT, HAS_RIGHT,
                    HAS_SOFTCAP, KEYS_FIRST, VALUES,
                )  # fmt: skip
            cols = col + tl.arange(0, COLS)[None, :]
            at = grad[0] + (i.to(tl.int64) * grad[1] * 8)[:, None] + cols
            tl.store(at, (acc * scale).to(now.dtype), mask=is_nan & (met == 0.0) & (cols < HEAD_DIM))


@triton.jit
def may_leak(
    flags_ptr, b, head, first, start_q, length_q, length_k, sizes, band, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Whether queries, and whether dout, are flagged in blocks of which the tile of key ``first`` masks something."""
    left, right = band
    seqlen_q, batch, num_heads_q, group_size = sizes
    parts: tl.constexpr = BLOCK_M // UNIT
    tile = first // BLOCK_N * BLOCK_N
    m_min, m_full_min, m_full_max, m_max = blocks.query_blocks(
        tile, tl.minimum(tile + BLOCK_N, length_k) - 1, length_q, length_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M
    )
    bad_q, bad_dout = first * 0, first * 0
    for member in range(group_size):
        block = first_block(b, start_q, head + member, seqlen_q, batch, num_heads_q, BLOCK_M, VARLEN)
        # Flag 0 is that of the call.
        flags_at = flags_ptr + 1 + block * parts
        for side in tl.static_range(2):
            start, stop = m_min, m_full_min
            if side == 1:
                start, stop = m_full_max, m_max
            q, dout = flagged(flags_at, start * parts, stop * parts)
            bad_q, bad_dout = tl.maximum(bad_q, q), tl.maximum(bad_dout, dout)
    return bad_q > 0, bad_dout > 0


@triton.jit
def mend_keys(
    unit, tensors, dk_ptr, dv_ptr, rows_ptr, flags_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlen_k, sizes, band,
    transform, softmax_scale, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """UNIT keys of dk and dv."""
    seqlen_q, batch, num_heads_q, group_size = sizes
    num_heads_kv = num_heads_q // group_size
    b, head_kv, start_k, first, length_k = locate(unit, cu_seqlens_k_ptr, batch, seqlen_k, num_heads_kv, UNIT, VARLEN)
    # Keys behind the last packed sequence have no rows.
    if (first < length_k) & (b < batch):
        start_q, length_q = sequence.sequence(cu_seqlens_q_ptr, b, batch, seqlen_q, VARLEN)
        head = head_kv * group_size
        bad_q, bad_dout = may_leak(
            flags_ptr, b, head, first, start_q, length_q, length_k, sizes, band, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT,
            VARLEN,
        )  # fmt: skip
        stride_row = num_heads_kv * (HEAD_DIM // 8)
        for values in tl.static_range(2):
            grad_ptr, is_bad = dk_ptr, bad_q
            if values == 1:
                grad_ptr, is_bad = dv_ptr, bad_dout
            if is_bad:
                grad = (grad_ptr, tl.cast(seqlen_k, tl.int64) * stride_row, stride_row, HEAD_DIM // 8)
                mend_unit(
                    head_of(grad, b, start_k, head_kv, VARLEN), tensors, b, head, head_kv, first,
                    (start_q, length_q), (start_k, length_k), rows_ptr, sizes, band, transform, softmax_scale,
                    HEAD_DIM, BLOCK_M, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, VARLEN, True, values == 1,
                )  # fmt: skip


@triton.jit
def mend_rows(
    unit, tensors, dq_ptr, rows_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlen_k, sizes, band, transform,
    softmax_scale, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """UNIT rows of dq."""
    seqlen_q, batch, num_heads_q, group_size = sizes
    parts: tl.constexpr = BLOCK_M // UNIT
    b, head, start_q, first, length_q = locate(
        unit // parts, cu_seqlens_q_ptr, batch, seqlen_q, num_heads_q, BLOCK_M, VARLEN
    )  # fmt: skip
    start_k, length_k = sequence.sequence(cu_seqlens_k_ptr, b, batch, seqlen_k, VARLEN)
    stride_row = num_heads_q * (HEAD_DIM // 8)
    dq = (dq_ptr, tl.cast(seqlen_q, tl.int64) * stride_row, stride_row, HEAD_DIM // 8)
    mend_unit(
        head_of(dq, b, start_q, head, VARLEN), tensors, b, head, head // group_size, first + unit % parts * UNIT,
        (start_q, length_q), (start_k, length_k), rows_ptr, sizes, band, transform, softmax_scale,
        HEAD_DIM, BLOCK_M, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, VARLEN, False, False,
    )  # fmt: skip


# No argument is specialised but tensors, which are on 16 bytes, so that the compile-time arguments and the types alone
# decide which build runs.
_RUN_TIME = [
    "flags_ptr", "cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "q_stride_b", "q_stride_row", "q_stride_head", "k_stride_b",
    "k_stride_row", "k_stride_head", "v_stride_b", "v_stride_row", "v_stride_head", "dout_stride_b", "dout_stride_row",
    "dout_stride_head", "scale_log2", "softmax_scale", "softcap", "prescale", "seqlen_q", "seqlen_k", "batch",
    "num_heads_kv", "group_size", "left", "right",
]  # fmt: skip


@triton.jit(do_not_specialize=_RUN_TIME)
def mend_gradients(
    q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, dk_ptr, dv_ptr, rows_ptr, flags_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    q_stride_b, q_stride_row, q_stride_head, k_stride_b, k_stride_row, k_stride_head, v_stride_b, v_stride_row,
    v_stride_head, dout_stride_b, dout_stride_row, dout_stride_head, scale_log2, softmax_scale, softcap, prescale,
    seqlen_q, seqlen_k, batch, num_heads_kv, group_size, left, right,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Everything that may have leaked into the gradients, which are contiguous; any number of programs share it.

    Arguments as the main kernel has them, tensors by pointer and strides, which ``head_of`` takes; BLOCK_N: keys of its
    tiles.
    """
    if tl.load(flags_ptr) == 0:
        return
    tensors = (
        (q_ptr, q_stride_b, q_stride_row, q_stride_head),
        (k_ptr, k_stride_b, k_stride_row, k_stride_head),
        (v_ptr, v_stride_b, v_stride_row, v_stride_head),
        (dout_ptr, dout_stride_b, dout_stride_row, dout_stride_head),
    )
    num_heads_q = num_heads_kv * group_size
    sizes = (seqlen_q, batch, num_heads_q, group_size)
    band, transform = (left, right), (scale_log2, softcap, prescale)
    units = blocks_a_head(seqlen_k, batch, UNIT, VARLEN) * num_heads_kv
    if not VARLEN:
        units = units * batch
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        mend_keys(
            unit, tensors, dk_ptr, dv_ptr, rows_ptr, flags_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlen_k, sizes,
            band, transform, softmax_scale, HEAD_DIM, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, VARLEN,
        )  # fmt: skip
    units = blocks_a_head(seqlen_q, batch, BLOCK_M, VARLEN) * num_heads_q * (BLOCK_M // UNIT)
    if not VARLEN:
        units = units * batch
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        if (tl.load(flags_ptr + 1 + unit) & BAD_DQ) > 0:
            mend_rows(
                unit, tensors, dq_ptr, rows_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlen_k, sizes, band, transform,
                softmax_scale, HEAD_DIM, BLOCK_M, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, VARLEN,
            )  # fmt: skip
