"""The backward's kernels in Triton: probabilities are recomputed from lse, so no quadratic buffer is kept.

    delta  = rowsum(dout * out) - dlse                 one float32 for each row
    dprobs = dout @ v^T                                dscores = probs * (dprobs - delta)
    dv = probs^T @ dout    dk = dscores^T @ q    dq = dscores @ k    dbias = dscores, summed over what broadcasts

One kernel computes dk and dv by blocks of keys, one dq by blocks of queries. Each element of these is summed by one
program in a fixed order, so they are bitwise repeatable without atomics. The kernel of dq also adds its dscores to
dbias, by atomic adds; a large dbias, or one that must be repeatable, has a kernel of its own (``dbias``).
Mathematics: docs/algorithm.md. Source: Dao et al. 2022, arXiv:2205.14135, algorithm 4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.device import blocks, scores
from flashtile.backends.gpu.device.blocks import Visit
from flashtile.backends.gpu.device.dropout import Dropout, keep_tile
from flashtile.backends.gpu.device.mask import Band, ScoreTensor, multiple
from flashtile.backends.gpu.device.scores import Alibi, Pairs, ScoreMod
from flashtile.backends.gpu.device.sequence import Operand, Rows, Strided
from flashtile.backends.portable.device.call import locate, with_call
from flashtile.backends.portable.device.tile_io import (
    add_product,
    load_rows,
    scaled,
    store_contiguous,
    times_transposed,
    zeros,
)


class Given(NamedTuple):
    """A backward kernel's arguments besides the ``Call``.

    Attributes:
        dout: ``Strided``, the output's gradient.
        lse_log2_ptr: lse in base 2, ``(batch, num_heads_q, row_pitch)`` like delta.
        delta_ptr: delta, as ``prepare_rows`` stores it.
        row_pitch: Their stride between heads.
        results: Where the kernel stores its gradients, and whether it adds to what is there.
        heads_per_split: Query heads over which a program sums dk and dv, None for all of a group.
        bias_sums: ``BiasSums`` for the kernel of dq.
    """

    dout: Any
    lse_log2_ptr: Any
    delta_ptr: Any
    row_pitch: Any
    results: Any
    heads_per_split: Any = None
    bias_sums: Any = None


class BiasSums(NamedTuple):
    """dbias in float32, contiguous ``(entries, heads, rows, cols)`` and 0 at first; ptr is None where it is not wanted.

    Sequence b adds to entry ``b % entries``. UNIT is ``ScoreTensor``'s. A SUM_ constant is True if the bias broadcasts
    along that dimension. It holds constants, so it is only passed as an argument, never assigned.
    """

    ptr: Any
    entries: Any
    heads: Any
    rows: Any
    cols: Any
    UNIT: Any
    SUM_HEADS: Any
    SUM_ROWS: Any
    SUM_COLS: Any


@triton.jit
def probabilities(product, lse_log2, i, cols, edge, pairs, WITH_DERIVATIVE: tl.constexpr):
    """Normalised probabilities of a block of ``q @ k^T``, in either orientation, and the score mods' derivative.

    If ``edge``, a constexpr or a run-time value, the band and the end of the keys are masked.
    """
    x, scale_log2, derivative = scores.transform(product, pairs, i, cols, WITH_DERIVATIVE)
    probs = tl.exp2(x * scale_log2 - lse_log2)
    return scores.select(probs, pairs, i, cols, 0.0, edge), derivative


@triton.jit
def over_queries(dk, dv, k, v, n_first, visit, call, given, head, queries, MASKED: tl.constexpr):
    """Adds the contribution of one head's query blocks, those of ``blocks.Visit``, to dk and dv, where needed.

    The scores' first dimension is the keys. Without MASKED no block needs a mask.
    """
    BLOCK_M: tl.constexpr = call.BLOCK_M
    BLOCK_N: tl.constexpr = call.BLOCK_N
    INPUT_PRECISION: tl.constexpr = call.terms.INPUT_PRECISION
    dropout = call.terms.dropout
    row_at = (tl.cast(queries.batch_index, tl.int64) * dropout.num_heads + head.h) * given.row_pitch + queries.start
    cols = n_first + tl.arange(0, BLOCK_N)[:, None]
    for m in tl.range(visit.start, visit.stop):
        first = m * BLOCK_M
        rows = first + tl.arange(0, BLOCK_M)
        i = rows[None, :] + head.shift
        edge = MASKED
        if visit.full_start is not None:
            edge = (m < visit.full_start) | (m >= visit.full_stop)
        q = load_rows(Rows(call.q, head.h, queries), first, BLOCK_M, MASKED)
        # Rows past the end have lse_log2 +inf, so probability 0: dense ones from prepare_rows, packed ones by a select.
        lse_log2 = tl.load(given.lse_log2_ptr + row_at + first + tl.arange(0, BLOCK_M))
        delta = tl.load(given.delta_ptr + row_at + first + tl.arange(0, BLOCK_M))
        if MASKED and call.q.layout.cu_seqlens_ptr is not None:
            lse_log2 = tl.where(rows < queries.length, lse_log2, float("inf"))
            delta = tl.where(rows < queries.length, delta, 0.0)
        product = times_transposed(k, q, INPUT_PRECISION)  # [BLOCK_N, BLOCK_M] float32
        probs, derivative = probabilities(product, lse_log2[None, :], i, cols, edge, Pairs(call.terms, head), True)
        dout = load_rows(
            Rows(Operand(given.dout, call.q.layout, call.v.DIM, call.v.BLOCK_DIM, call.v.UNIT), head.h, queries),
            first,
            BLOCK_M,
            MASKED,
        )
        dprobs = times_transposed(v, dout, INPUT_PRECISION)
        kept_probs = probs
        if dropout.rng_state_ptr is not None:
            kept = tl.trans(keep_tile(dropout, head.b, head.h, rows[:, None], n_first // 4, BLOCK_N))
            kept_probs = tl.where(kept, probs, 0.0)
            dprobs = tl.where(kept, dprobs * dropout.keep_scale, 0.0)
        if given.results[1] is not None:
            dv = add_product(dv, kept_probs.to(dout[0].dtype), dout, INPUT_PRECISION)
        if given.results[0] is not None:
            dscores = scores.score_gradient(probs, dprobs, delta[None, :], derivative, Pairs(call.terms, head), edge)
            dk = add_product(dk, dscores.to(q[0].dtype), q, INPUT_PRECISION)
    return dk, dv


@triton.jit
def dkdv_tile(call, given):
    """Computes dk and dv of BLOCK_N keys of one key head, summed over the query heads of its group in order.

    With gqa_splits, over ``heads_per_split`` of them: results then have a head for each split.
    """
    BLOCK_M: tl.constexpr = call.BLOCK_M
    BLOCK_N: tl.constexpr = call.BLOCK_N
    ONE_LOOP: tl.constexpr = call.ONE_LOOP
    BRANCH: tl.constexpr = ONE_LOOP and not call.MASK_ALL
    heads, splits = call.group_size, 1
    if given.heads_per_split is not None:
        heads, splits = given.heads_per_split, (call.group_size + given.heads_per_split - 1) // given.heads_per_split
    place = locate(call, splits)
    head_kv, queries, keys = place.head // splits, place.queries, place.keys
    ADDS: tl.constexpr = given.results[2]
    n_first = place.block * BLOCK_N
    if n_first >= keys.length:
        return
    if ADDS:  # noqa: SIM102
        if queries.length == 0:
            return
    k = load_rows(Rows(call.k, head_kv, keys), n_first, BLOCK_N, True)
    v = load_rows(Rows(call.v, head_kv, keys), n_first, BLOCK_N, True)
    left, right = call.terms.band.left, call.terms.band.right
    m_min, m_full_min, m_full_max, m_max = blocks.query_blocks(
        n_first, tl.minimum(n_first + BLOCK_N, keys.length) - 1, queries.length, keys.length, left, right,
        left is not None, right is not None, BLOCK_M,
    )  # fmt: skip
    dk = zeros(BLOCK_N, call.q.BLOCK_DIM)
    dv = zeros(BLOCK_N, call.v.BLOCK_DIM)
    first = place.head % splits * heads
    for member in range(first, tl.minimum(first + heads, call.group_size)):
        h = head_kv * call.group_size + member
        head = scores.head_of(call.terms, place.b, h, queries.length, keys.length)
        # Phases: rows on the band's right edge, rows that keep every key, the left edge and the end; ONE_LOOP: all.
        for phase in tl.static_range(2 if ONE_LOOP else 0 if right is not None else 1, 3):
            m_start, m_stop = blocks.phase_blocks(phase, m_min, m_full_min, m_full_max, m_max, ONE_LOOP)
            dk, dv = over_queries(
                dk, dv, k, v, n_first,
                Visit(m_start, m_stop, m_full_min if BRANCH else None, m_full_max if BRANCH else None),
                call, given, head, queries, phase != 1,
            )  # fmt: skip
    num_heads, head = call.num_heads // call.group_size * splits, place.head
    dk, dv = scaled(dk, call.terms.scale), scaled(dv, call.terms.dropout.keep_scale)
    if given.results[0] is not None:
        store_contiguous(
            given.results[0], call.k.layout, num_heads, head, keys, n_first, dk, call.q.DIM, call.q.BLOCK_DIM, ADDS
        )
    if given.results[1] is not None:
        store_contiguous(
            given.results[1], call.k.layout, num_heads, head, keys, n_first, dv, call.v.DIM, call.v.BLOCK_DIM, ADDS
        )


@triton.jit
def add_to_bias(sums, dscores, head, rows, cols, num_rows):
    """Adds a block of dscores to ``BiasSums``; rows [BLOCK_M] and cols [1, BLOCK_N] are its rows and keys."""
    h, row, col = head.h, rows[:, None], cols
    pitch, num_cols = multiple(sums.cols, sums.UNIT), multiple(head.seqlen_k, sums.UNIT)
    exists = (row < num_rows) & (col < num_cols)
    if sums.SUM_HEADS:
        h = 0
    # Rows and keys that do not exist have dscores 0.
    if sums.SUM_ROWS:
        dscores, row, exists = tl.sum(dscores, 0, keep_dims=True), tl.zeros([1, 1], tl.int32), col < num_cols
    if sums.SUM_COLS:
        dscores, col, exists = tl.sum(dscores, 1, keep_dims=True), tl.zeros([1, 1], tl.int32), row < num_rows
        pitch = 1
    plane = tl.cast(head.b % sums.entries * sums.heads + h, tl.int64) * sums.rows * pitch
    tl.atomic_add(sums.ptr + plane + (row.to(tl.int64) * pitch + col), dscores, mask=exists, sem="relaxed")


@triton.jit
def over_keys(dq, q, dout, lse_log2, delta, rows, visit, call, head, place, sums, MASKED: tl.constexpr):
    """Adds the contribution of the key blocks of ``blocks.Visit`` to dq and sums; MASKED as for ``over_queries``."""
    BLOCK_N: tl.constexpr = call.BLOCK_N
    INPUT_PRECISION: tl.constexpr = call.terms.INPUT_PRECISION
    dropout, keys = call.terms.dropout, place.keys
    head_kv = head.h // call.group_size
    i = rows[:, None] + head.shift
    for n in tl.range(visit.start, visit.stop):
        first = n * BLOCK_N
        cols = first + tl.arange(0, BLOCK_N)[None, :]
        edge = MASKED
        if visit.full_start is not None:
            edge = (n < visit.full_start) | (n >= visit.full_stop)
        k = load_rows(Rows(call.k, head_kv, keys), first, BLOCK_N, MASKED)
        product = times_transposed(q, k, INPUT_PRECISION)  # [BLOCK_M, BLOCK_N] float32
        probs, derivative = probabilities(product, lse_log2[:, None], i, cols, edge, Pairs(call.terms, head), True)
        v = load_rows(Rows(call.v, head_kv, keys), first, BLOCK_N, MASKED)
        dprobs = times_transposed(dout, v, INPUT_PRECISION)
        if dropout.rng_state_ptr is not None:
            kept = keep_tile(dropout, head.b, head.h, rows[:, None], n * (BLOCK_N // 4), BLOCK_N)
            dprobs = tl.where(kept, dprobs * dropout.keep_scale, 0.0)
        if sums.ptr is not None:
            # The bias is added to scores that softcap has changed.
            masked = True if sums.SUM_ROWS else edge
            dbias = scores.score_gradient(probs, dprobs, delta[:, None], 1.0, Pairs(call.terms, head), masked)
            add_to_bias(sums, dbias, head, rows, cols, place.queries.length)
        dscores = scores.score_gradient(probs, dprobs, delta[:, None], derivative, Pairs(call.terms, head), edge)
        dq = add_product(dq, dscores.to(k[0].dtype), k, INPUT_PRECISION)
    return dq


@triton.jit
def load_row_terms(given, num_heads, head, queries, rows):
    """Loads lse_log2 and delta of rows of a head; those of rows past the end make every probability and gradient 0."""
    at = (tl.cast(queries.batch_index, tl.int64) * num_heads + head.h) * given.row_pitch + queries.start
    lse_log2 = tl.load(given.lse_log2_ptr + at + rows, mask=rows < queries.length, other=float("inf"))
    delta = tl.load(given.delta_ptr + at + rows, mask=rows < queries.length, other=0.0)
    return lse_log2, delta


@triton.jit
def dq_tile(call, given):
    """Computes dq of BLOCK_M rows of one head."""
    BLOCK_M: tl.constexpr = call.BLOCK_M
    BLOCK_N: tl.constexpr = call.BLOCK_N
    ONE_LOOP: tl.constexpr = call.ONE_LOOP
    BRANCH: tl.constexpr = ONE_LOOP and not call.MASK_ALL
    place = locate(call, None)
    h, queries, keys = place.head, place.queries, place.keys
    # Read before a return: after one, Triton 3.6 has lost the constants of a record within a record.
    ADDS: tl.constexpr = given.results[1]
    UNIT: tl.constexpr = given.bias_sums.UNIT
    SUM_HEADS: tl.constexpr = given.bias_sums.SUM_HEADS
    SUM_ROWS: tl.constexpr = given.bias_sums.SUM_ROWS
    SUM_COLS: tl.constexpr = given.bias_sums.SUM_COLS
    m_first = place.block * BLOCK_M
    if m_first >= queries.length:
        return
    if ADDS:  # noqa: SIM102
        if keys.length == 0:
            return
    head = scores.head_of(call.terms, place.b, h, queries.length, keys.length)
    q = load_rows(Rows(call.q, h, queries), m_first, BLOCK_M, True)
    dout = load_rows(
        Rows(Operand(given.dout, call.q.layout, call.v.DIM, call.v.BLOCK_DIM, call.v.UNIT), h, queries),
        m_first,
        BLOCK_M,
        True,
    )
    rows = m_first + tl.arange(0, BLOCK_M)
    lse_log2, delta = load_row_terms(given, call.num_heads, head, queries, rows)
    left, right = call.terms.band.left, call.terms.band.right
    n_min, n_full_min, n_full_max, n_max = blocks.key_blocks(
        m_first, tl.minimum(m_first + BLOCK_M, queries.length) - 1, queries.length, keys.length, left, right,
        left is not None, right is not None, BLOCK_N,
    )  # fmt: skip
    dq = zeros(BLOCK_M, call.q.BLOCK_DIM)
    # Phases as in the forward.
    for phase in tl.static_range(2 if ONE_LOOP else 0 if left is not None else 1, 3):
        n_start, n_stop = blocks.phase_blocks(phase, n_min, n_full_min, n_full_max, n_max, ONE_LOOP)
        dq = over_keys(
            dq, q, dout, lse_log2, delta, rows,
            Visit(n_start, n_stop, n_full_min if BRANCH else None, n_full_max if BRANCH else None),
            call, head, place,
            BiasSums(
                given.bias_sums.ptr, given.bias_sums.entries, given.bias_sums.heads, given.bias_sums.rows,
                given.bias_sums.cols, UNIT, SUM_HEADS, SUM_ROWS, SUM_COLS,
            ),
            phase != 1,
        )  # fmt: skip
    dq = scaled(dq, call.terms.scale)
    store_contiguous(
        given.results[0], call.q.layout, call.num_heads, h, queries, m_first, dq, call.q.DIM, call.q.BLOCK_DIM, ADDS
    )


@triton.jit(
    do_not_specialize=[
        "batch",
        "seqlen_q",
        "seqlen_k",
        "num_heads_q",
        "heads_at_once",
        "heads_per_split",
        "left",
        "right",
        "dropout_threshold",
    ]
)
def attention_backward_dkdv(
    q_ptr, k_ptr, v_ptr, dout_ptr, q_source, dout_source, lse_log2_ptr, delta_ptr, dk_ptr, dv_ptr,
    alibi_ptr, mask_ptr, bias_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, rng_state_ptr, origins_ptr,
    q_stride_b, q_stride_row, q_stride_head, k_stride_b, k_stride_row, k_stride_head,
    v_stride_b, v_stride_row, v_stride_head, dout_stride_b, dout_stride_row, dout_stride_head, alibi_stride_b,
    mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col,
    bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col,
    batch, seqlen_q, seqlen_k, row_pitch, num_heads_q, group_size, heads_per_split, heads_at_once, left, right, scale,
    param,
    dropout_threshold, keep_scale, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, SCORE_UNIT: tl.constexpr, SCORE_MOD: tl.constexpr, DERIVATIVE: tl.constexpr,
    SCALE_FIRST: tl.constexpr, INPUT_PRECISION: tl.constexpr, ONE_LOOP: tl.constexpr, MASK_ALL: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv, contiguous, one tile per program, or ADDS them; the pointer of one not needed is None.

    Arguments as the forward's; row_pitch is that of delta and lse_log2; heads_per_split: see ``Given``.
    """
    with_call(
        (
            Strided(q_ptr, q_source, q_stride_b, q_stride_row, q_stride_head),
            Strided(k_ptr, None, k_stride_b, k_stride_row, k_stride_head),
            Strided(v_ptr, None, v_stride_b, v_stride_row, v_stride_head),
        ),
        (HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, UNIT),
        (cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, seqlen_q, seqlen_k, group_size),
        (scale, SCALE_FIRST, INPUT_PRECISION),
        (
            ScoreMod(SCORE_MOD, DERIVATIVE, None, param), Alibi(alibi_ptr, alibi_stride_b),
            ScoreTensor(bias_ptr, bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col, SCORE_UNIT),
        ),
        (
            Band(left if HAS_LEFT else None, right if HAS_RIGHT else None),
            ScoreTensor(mask_ptr, mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col, SCORE_UNIT),
        ),
        Dropout(rng_state_ptr, dropout_threshold, keep_scale, num_heads_q, origins_ptr),
        (heads_at_once, BLOCK_M, BLOCK_N, ONE_LOOP, MASK_ALL), dkdv_tile,
        Given(
            Strided(dout_ptr, dout_source, dout_stride_b, dout_stride_row, dout_stride_head), lse_log2_ptr, delta_ptr,
            row_pitch, (dk_ptr, dv_ptr, ADDS), heads_per_split,
        ),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "batch",
        "seqlen_q",
        "seqlen_k",
        "num_heads_q",
        "heads_at_once",
        "entries",
        "bias_heads",
        "bias_rows",
        "bias_cols",
        "left",
        "right",
        "dropout_threshold",
    ]
)
def attention_backward_dq(
    q_ptr, k_ptr, v_ptr, dout_ptr, k_source, v_source, lse_log2_ptr, delta_ptr, dq_ptr, dbias_ptr,
    alibi_ptr, mask_ptr, bias_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, rng_state_ptr, origins_ptr,
    q_stride_b, q_stride_row, q_stride_head, k_stride_b, k_stride_row, k_stride_head,
    v_stride_b, v_stride_row, v_stride_head, dout_stride_b, dout_stride_row, dout_stride_head, alibi_stride_b,
    mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col,
    bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col,
    batch, seqlen_q, seqlen_k, row_pitch, num_heads_q, group_size, heads_at_once, left, right, scale, param,
    dropout_threshold, keep_scale, entries, bias_heads, bias_rows, bias_cols,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SCORE_UNIT: tl.constexpr, SCORE_MOD: tl.constexpr, DERIVATIVE: tl.constexpr, SCALE_FIRST: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, ONE_LOOP: tl.constexpr, MASK_ALL: tl.constexpr, ADDS: tl.constexpr,
    SUM_HEADS: tl.constexpr, SUM_ROWS: tl.constexpr, SUM_COLS: tl.constexpr,
):  # fmt: skip
    """Computes dq, contiguous, one tile per program, or ADDS it. Arguments as for dk and dv, and of ``BiasSums``."""
    with_call(
        (
            Strided(q_ptr, None, q_stride_b, q_stride_row, q_stride_head),
            Strided(k_ptr, k_source, k_stride_b, k_stride_row, k_stride_head),
            Strided(v_ptr, v_source, v_stride_b, v_stride_row, v_stride_head),
        ),
        (HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, UNIT),
        (cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, seqlen_q, seqlen_k, group_size),
        (scale, SCALE_FIRST, INPUT_PRECISION),
        (
            ScoreMod(SCORE_MOD, DERIVATIVE, None, param), Alibi(alibi_ptr, alibi_stride_b),
            ScoreTensor(bias_ptr, bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col, SCORE_UNIT),
        ),
        (
            Band(left if HAS_LEFT else None, right if HAS_RIGHT else None),
            ScoreTensor(mask_ptr, mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col, SCORE_UNIT),
        ),
        Dropout(rng_state_ptr, dropout_threshold, keep_scale, num_heads_q, origins_ptr),
        (heads_at_once, BLOCK_M, BLOCK_N, ONE_LOOP, MASK_ALL), dq_tile,
        Given(
            Strided(dout_ptr, None, dout_stride_b, dout_stride_row, dout_stride_head), lse_log2_ptr, delta_ptr,
            row_pitch, (dq_ptr, ADDS), None,
            BiasSums(dbias_ptr, entries, bias_heads, bias_rows, bias_cols, SCORE_UNIT, SUM_HEADS, SUM_ROWS, SUM_COLS),
        ),
    )  # fmt: skip
