"""The backward's kernels in Triton: probabilities are computed again from lse, nothing quadratic is kept.

    delta  = rowsum(dout * out) - dlse                 one float32 a row
    dprobs = dout @ v^T                                dscores = probs * (dprobs - delta)
    dv = probs^T @ dout    dk = dscores^T @ q    dq = dscores @ k    dbias = dscores, summed over what broadcasts

One kernel owns blocks of keys and makes dk and dv, one owns blocks of queries and makes dq, one owns tiles of the bias:
each gradient is written by one program, in one order, so the result is bitwise repeatable without any atomics.
Mathematics: docs/algorithm.md. Source: Dao et al. 2022, arXiv:2205.14135, algorithm 4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.portable import poison
from flashtile.backends.portable.rows import load_rows, locate, store_rows
from flashtile.backends.vocab import blocks, dropout, finite, scores, softmax
from flashtile.backends.vocab.dropout import Draws
from flashtile.backends.vocab.mask import Band
from flashtile.backends.vocab.scores import Pairs, ScoreTensor, Terms
from flashtile.backends.vocab.sequence import Operand, Rows


class Call(NamedTuple):
    """What is the same for all heads of a call.

    Attributes:
        q: ``Operand``, like k, v and dout.
        k: Keys.
        v: Values.
        dout: The output's gradient.
        origin_ptr: What is subtracted from base-2 scores, ``(batch, num_heads_q, row_pitch)`` like delta.
        delta_ptr: Of ``prepare_rows``.
        row_pitch: Their stride between heads.
        group_size: Query heads a key head.
        terms: ``Terms``.
        draws: ``Draws``.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    origin_ptr: Any
    delta_ptr: Any
    row_pitch: Any
    group_size: Any
    terms: Any
    draws: Any


@triton.jit
def prepare_rows(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, origin_ptr, dout_stride_b, dout_stride_row, dout_stride_head,
    dlse_stride_b, dlse_stride_head, dlse_stride_row, batch, seqlen_q, num_heads_q, row_pitch,
    HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """delta, and what the backward subtracts from base-2 scores, of BLOCK_M rows of one head.

    out is contiguous ``(batch, seqlen_q, num_heads_q, HEAD_DIM_V)``; delta and origin are ``(batch, num_heads_q,
    row_pitch)``, row_pitch a multiple of BLOCK_M. The origin of an empty row and of the rows from seqlen_q on is +inf,
    so that their probabilities are 0 without a mask; their delta is 0, whatever dout holds there.
    """
    num_blocks = row_pitch // BLOCK_M
    pid = tl.program_id(0)
    h = pid // num_blocks % num_heads_q
    b = (pid // num_blocks // num_heads_q).to(tl.int64)
    i = (pid % num_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = i < seqlen_q
    col = tl.arange(0, BLOCK_DV)[None, :]
    inside = exists[:, None] & (col < HEAD_DIM_V)
    out_at = out_ptr + ((b * seqlen_q + i) * num_heads_q + h)[:, None] * HEAD_DIM_V + col
    out = tl.load(out_at, mask=inside, other=0.0)
    dout_at = dout_ptr + (b * dout_stride_b + i * dout_stride_row + h * dout_stride_head)[:, None] + col
    dout = tl.load(dout_at, mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if dlse_ptr is not None:
        dlse_at = dlse_ptr + b * dlse_stride_b + h * dlse_stride_head + i * dlse_stride_row
        delta -= tl.load(dlse_at, mask=exists, other=0.0)
    lse = tl.load(lse_ptr + (b * num_heads_q + h) * seqlen_q + i, mask=exists, other=float("-inf"))
    at = (b * num_heads_q + h) * row_pitch + i
    tl.store(delta_ptr + at, tl.where(lse == float("-inf"), 0.0, delta))
    tl.store(origin_ptr + at, softmax.backward_origin(lse))


@triton.jit
def probabilities(
    product, origin, rows, cols, edge, pairs,
    SCORE_MOD: tl.constexpr, DERIVATIVE: tl.constexpr, TRANSFORMED: tl.constexpr,
):  # fmt: skip
    """Normalised probabilities of a block of ``q @ k^T``, in either orientation, and the score transform's derivative.

    With ``edge``, which may be known at compile time, the band and the end of the keys are selected out.
    """
    derivative = 1.0
    if TRANSFORMED:
        x, derivative = scores.transform(product, pairs, rows, cols, SCORE_MOD, DERIVATIVE)
        probs = tl.exp2(x * softmax.LOG2_E - origin)
    else:
        probs = tl.exp2(product * (pairs.terms.scale * softmax.LOG2_E) - origin)
    if edge:
        probs = scores.select_band(probs, pairs, rows, cols, 0.0)
    return scores.select_mask(probs, pairs, rows, cols, 0.0), derivative


@triton.jit
def score_gradient(probs, dprobs, delta, derivative, select):
    """The gradient of a block of scores, in front of the score transform.

    With ``select``, 0 wherever the probability is: a masked element's dprobs, delta or derivative may be NaN.
    """
    dscores = probs * (dprobs - delta) * derivative
    if select:
        dscores = tl.where(probs == 0.0, 0.0, dscores)
    return dscores


@triton.jit
def over_queries(
    dk, dv, k, v, n_first, m_start, m_stop, full_start, full_stop, q_rows, dout_rows, origin_at, delta_at, pairs,
    draws,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCORE_MOD: tl.constexpr, DERIVATIVE: tl.constexpr,
    TRANSFORMED: tl.constexpr, INPUT_PRECISION: tl.constexpr, TMA: tl.constexpr, VARLEN: tl.constexpr,
    MASKED: tl.constexpr, BRANCH: tl.constexpr, CAREFUL: tl.constexpr, WITH_DK: tl.constexpr, WITH_DV: tl.constexpr,
):  # fmt: skip
    """Adds what query blocks m_start ... m_stop - 1 of one head give to dk and dv; scores lie keys first.

    Without MASKED no block needs a mask; with BRANCH, those from full_start to full_stop - 1 do not. CAREFUL
    takes 0 for every infinity and NaN of q and dout where a mask may have made the other factor 0.
    """
    cols = n_first + tl.arange(0, BLOCK_N)[:, None]
    for m in tl.range(m_start, m_stop, num_stages=1 if CAREFUL else None):
        first = m * BLOCK_M
        rows = first + tl.arange(0, BLOCK_M)
        edge = MASKED
        if BRANCH:
            edge = (m < full_start) | (m >= full_stop)
        select = edge
        if pairs.terms.mask.ptr is not None:
            select = True
        q = load_rows(q_rows, first, BLOCK_M, MASKED, TMA)
        # Rows behind the end have origin +inf, so probability 0: written there behind dense sequences, selected behind
        # packed ones.
        origin = tl.load(origin_at + first + tl.arange(0, BLOCK_M))
        delta = tl.load(delta_at + first + tl.arange(0, BLOCK_M))
        if VARLEN and MASKED:
            origin = tl.where(rows < pairs.length_q, origin, float("inf"))
            delta = tl.where(rows < pairs.length_q, delta, 0.0)
        product = tl.dot(k, tl.trans(q), input_precision=INPUT_PRECISION)  # [BLOCK_N, BLOCK_M] float32
        probs, derivative = probabilities(
            product, origin[None, :], rows[None, :], cols, edge, pairs, SCORE_MOD, DERIVATIVE, TRANSFORMED
        )
        dout = load_rows(dout_rows, first, BLOCK_M, MASKED, TMA)
        dprobs = tl.dot(v, tl.trans(dout), input_precision=INPUT_PRECISION)
        if CAREFUL:
            q, dout = finite.finite(q), finite.finite(dout)
        kept_probs = probs
        if draws.rng_state_ptr is not None:
            kept = tl.trans(dropout.keep_tile(draws, pairs.b, pairs.h, rows[:, None], n_first // 4, BLOCK_N))
            kept_probs = tl.where(kept, probs, 0.0)
            dprobs = tl.where(kept, dprobs * draws.keep_scale, 0.0)
        if WITH_DV:
            dv = tl.dot(kept_probs.to(dout.dtype), dout, dv, input_precision=INPUT_PRECISION)
        if WITH_DK:
            dscores = score_gradient(probs, dprobs, delta[None, :], derivative, select)
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=INPUT_PRECISION)
    return dk, dv


@triton.jit
def over_heads(
    k, v, n_first, place, call, dk_tensor, dv_tensor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCORE_MOD: tl.constexpr, DERIVATIVE: tl.constexpr,
    TRANSFORMED: tl.constexpr, INPUT_PRECISION: tl.constexpr, TMA: tl.constexpr, VARLEN: tl.constexpr,
    ONE_LOOP: tl.constexpr, MASK_ALL: tl.constexpr, CAREFUL: tl.constexpr, WITH_DK: tl.constexpr, WITH_DV: tl.constexpr,
):  # fmt: skip
    """Stores dk and dv, those that are asked for, summed over the query heads of a group.

    CAREFUL lets no infinity and no NaN of a query reach a key that it does not keep.

    Returns:
        Whether dk and dv may hold a NaN that leaked.
    """
    b, start_q, length_q, length_k = place.b, place.start_q, place.length_q, place.length_k
    draws = call.draws
    batch_index = b
    if VARLEN:
        batch_index = 0
    n_last = tl.minimum(n_first + BLOCK_N, length_k) - 1
    left, right = call.terms.band.left, call.terms.band.right
    m_min, m_full_min, m_full_max, m_max = blocks.query_blocks(
        n_first, n_last, length_q, length_k, left, right, left is not None, right is not None, BLOCK_M
    )
    dk = tl.zeros([BLOCK_N, call.q.cols.shape[0]], tl.float32)
    dv = tl.zeros([BLOCK_N, call.dout.cols.shape[0]], tl.float32)
    for member in range(call.group_size):
        h = place.head * call.group_size + member
        q_rows = Rows(call.q, batch_index, h, start_q, length_q)
        dout_rows = Rows(call.dout, batch_index, h, start_q, length_q)
        slope, bias_at, mask_at = scores.of_head(call.terms, b, h)
        pairs = Pairs(call.terms, b, h, length_q, length_k, slope, bias_at, mask_at)
        row_offset = (tl.cast(batch_index, tl.int64) * draws.num_heads + h) * call.row_pitch + start_q
        # Phases: rows on the band's right edge, rows that keep every key, the left edge and the end; ONE_LOOP: all.
        for phase in tl.static_range(2 if ONE_LOOP else 0 if right is not None else 1, 3):
            m_start, m_stop = blocks.phase_blocks(phase, m_min, m_full_min, m_full_max, m_max, ONE_LOOP)
            dk, dv = over_queries(
                dk, dv, k, v, n_first, m_start, m_stop, m_full_min, m_full_max, q_rows, dout_rows,
                call.origin_ptr + row_offset, call.delta_ptr + row_offset, pairs, draws, BLOCK_M, BLOCK_N, SCORE_MOD,
                DERIVATIVE, TRANSFORMED, INPUT_PRECISION, TMA and not (VARLEN and phase != 1), VARLEN,
                MASKED=phase != 1, BRANCH=ONE_LOOP and not MASK_ALL, CAREFUL=CAREFUL, WITH_DK=WITH_DK, WITH_DV=WITH_DV,
            )  # fmt: skip
    leaked_dk, leaked_dv = False, False
    start_k, head_kv = place.start_k, place.head
    if WITH_DK:
        dk_rows = Rows(dk_tensor, batch_index, head_kv, start_k, length_k)
        store_rows(dk_rows, n_first, dk * call.terms.scale, BLOCK_N)
        leaked_dk = finite.leaks(dk)
    if WITH_DV:
        dv_rows = Rows(dv_tensor, batch_index, head_kv, start_k, length_k)
        store_rows(dv_rows, n_first, dv * draws.keep_scale, BLOCK_N)
        leaked_dv = finite.leaks(dv)
    if CAREFUL:
        tl.debug_barrier()  # the same elements are stored again, perhaps by other threads
        m_first, m_stop = m_min * BLOCK_M, m_max * BLOCK_M
        for member in range(call.group_size):
            h = place.head * call.group_size + member
            slope, bias_at, mask_at = scores.of_head(call.terms, b, h)
            pairs = Pairs(call.terms, b, h, length_q, length_k, slope, bias_at, mask_at)
            if WITH_DK:
                q_rows = Rows(call.q, batch_index, h, start_q, length_q)
                poison.spread(dk_rows, n_first, None, q_rows, m_first, m_stop, pairs, BLOCK_N, True, True)
            if WITH_DV:
                dout_rows = Rows(call.dout, batch_index, h, start_q, length_q)
                poison.spread(dv_rows, n_first, None, dout_rows, m_first, m_stop, pairs, BLOCK_N, True, True)
    return leaked_dk, leaked_dv


@triton.jit(do_not_specialize=["batch", "seqlen_q", "seqlen_k", "heads_at_once", "left", "right", "dropout_threshold"])
def attention_backward_dkdv(
    q_ptr, k_ptr, v_ptr, dout_ptr, q_source, dout_source, origin_ptr, delta_ptr, dk_ptr, dv_ptr,
    alibi_ptr, mask_ptr, bias_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, rng_state_ptr,
    q_stride_b, q_stride_row, q_stride_head, k_stride_b, k_stride_row, k_stride_head,
    v_stride_b, v_stride_row, v_stride_head, dout_stride_b, dout_stride_row, dout_stride_head, alibi_stride_b,
    mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col,
    bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col,
    batch, seqlen_q, seqlen_k, row_pitch, num_heads_q, group_size, heads_at_once, left, right, scale, param,
    dropout_threshold, keep_scale, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SCORE_MOD: tl.constexpr, DERIVATIVE: tl.constexpr, TRANSFORMED: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    TMA: tl.constexpr, ONE_LOOP: tl.constexpr, MASK_ALL: tl.constexpr,
):  # fmt: skip
    """The gradients dk and dv of BLOCK_N keys of one key head, summed over the query heads of its group in order.

    dk and dv are contiguous; None for one that is not asked for. Arguments as the forward's; row_pitch is that of delta
    and origin.
    """
    num_heads_kv = num_heads_q // group_size
    place = locate(cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, seqlen_q, seqlen_k, num_heads_kv, heads_at_once,
                   BLOCK_N, True, HAS_RIGHT)  # fmt: skip
    b, head_kv, start_k, length_k = place.b, place.head, place.start_k, place.length_k
    n_first = place.block * BLOCK_N
    if n_first >= length_k:
        return
    VARLEN: tl.constexpr = cu_seqlens_q_ptr is not None
    batch_index = b
    if VARLEN:
        batch_index = 0
    cols, cols_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    dim = None if HEAD_DIM == BLOCK_D else HEAD_DIM
    dim_v = None if HEAD_DIM_V == BLOCK_DV else HEAD_DIM_V
    q = Operand(q_ptr, q_source, q_stride_b, q_stride_row, q_stride_head, cols, dim)
    k = Operand(k_ptr, None, k_stride_b, k_stride_row, k_stride_head, cols, dim)
    v = Operand(v_ptr, None, v_stride_b, v_stride_row, v_stride_head, cols_v, dim_v)
    dout = Operand(dout_ptr, dout_source, dout_stride_b, dout_stride_row, dout_stride_head, cols_v, dim_v)
    bias = ScoreTensor(bias_ptr, bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col)
    mask = ScoreTensor(mask_ptr, mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col)
    band = Band(left if HAS_LEFT else None, right if HAS_RIGHT else None)
    terms = Terms(band, scale, param, alibi_ptr, alibi_stride_b, bias, mask)
    draws = Draws(rng_state_ptr, dropout_threshold, keep_scale, num_heads_q)
    call = Call(q, k, v, dout, origin_ptr, delta_ptr, row_pitch, group_size, terms, draws)
    keys = tl.cast(seqlen_k, tl.int64) * num_heads_kv
    dk_tensor = Operand(dk_ptr, None, keys * HEAD_DIM, num_heads_kv * HEAD_DIM, HEAD_DIM, cols, dim)
    dv_tensor = Operand(dv_ptr, None, keys * HEAD_DIM_V, num_heads_kv * HEAD_DIM_V, HEAD_DIM_V, cols_v, dim_v)
    k_rows = Rows(k, batch_index, head_kv, start_k, length_k)
    v_rows = Rows(v, batch_index, head_kv, start_k, length_k)
    k_tile = load_rows(k_rows, n_first, BLOCK_N, True, False)
    v_tile = load_rows(v_rows, n_first, BLOCK_N, True, False)
    # Attempt 0 makes what is asked for; where a mask may have let a NaN through, 1 and 2 make dk and dv again.
    leaked_dk, leaked_dv = False, False
    MAY_LEAK: tl.constexpr = HAS_LEFT or HAS_RIGHT or (mask_ptr is not None)
    for attempt in tl.static_range(3 if MAY_LEAK else 1):
        wanted = True
        if attempt == 1:
            wanted = leaked_dk
        if attempt == 2:
            wanted = leaked_dv
        if wanted:
            leaks = over_heads(
                k_tile, v_tile, n_first, place, call, dk_tensor, dv_tensor,
                BLOCK_M if attempt == 0 else poison.STEP, BLOCK_N, SCORE_MOD, DERIVATIVE, TRANSFORMED, INPUT_PRECISION,
                TMA and attempt == 0, VARLEN, ONE_LOOP or attempt > 0, MASK_ALL or attempt > 0, CAREFUL=attempt > 0,
                WITH_DK=dk_ptr is not None and attempt != 2, WITH_DV=dv_ptr is not None and attempt != 1,
            )  # fmt: skip
            if attempt == 0:
                leaked_dk, leaked_dv = leaks


@triton.jit
def over_keys(
    dq, q, dout, origin, delta, rows, n_start, n_stop, full_start, full_stop, k_rows, v_rows, pairs, draws,
    BLOCK_N: tl.constexpr, SCORE_MOD: tl.constexpr, DERIVATIVE: tl.constexpr, TRANSFORMED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr, BRANCH: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """Adds what key blocks n_start ... n_stop - 1 give to dq; MASKED and what follows as for ``over_queries``."""
    for n in tl.range(n_start, n_stop, num_stages=1 if CAREFUL else None):
        first = n * BLOCK_N
        cols = first + tl.arange(0, BLOCK_N)[None, :]
        edge = MASKED
        if BRANCH:
            edge = (n < full_start) | (n >= full_stop)
        select = edge
        if pairs.terms.mask.ptr is not None:
            select = True
        k = load_rows(k_rows, first, BLOCK_N, MASKED, TMA)
        product = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)  # [BLOCK_M, BLOCK_N] float32
        probs, derivative = probabilities(
            product, origin[:, None], rows[:, None], cols, edge, pairs, SCORE_MOD, DERIVATIVE, TRANSFORMED
        )
        v = load_rows(v_rows, first, BLOCK_N, MASKED, TMA)
        dprobs = tl.dot(dout, tl.trans(v), input_precision=INPUT_PRECISION)
        if draws.rng_state_ptr is not None:
            kept = dropout.keep_tile(draws, pairs.b, pairs.h, rows[:, None], n * (BLOCK_N // 4), BLOCK_N)
            dprobs = tl.where(kept, dprobs * draws.keep_scale, 0.0)
        if CAREFUL:
            k = finite.finite(k)
        dscores = score_gradient(probs, dprobs, delta[:, None], derivative, select)
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=INPUT_PRECISION)
    return dq


@triton.jit(do_not_specialize=["batch", "seqlen_q", "seqlen_k", "heads_at_once", "left", "right", "dropout_threshold"])
def attention_backward_dq(
    q_ptr, k_ptr, v_ptr, dout_ptr, k_source, v_source, origin_ptr, delta_ptr, dq_ptr,
    alibi_ptr, mask_ptr, bias_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, rng_state_ptr,
    q_stride_b, q_stride_row, q_stride_head, k_stride_b, k_stride_row, k_stride_head,
    v_stride_b, v_stride_row, v_stride_head, dout_stride_b, dout_stride_row, dout_stride_head, alibi_stride_b,
    mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col,
    bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col,
    batch, seqlen_q, seqlen_k, row_pitch, num_heads_q, group_size, heads_at_once, left, right, scale, param,
    dropout_threshold, keep_scale, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SCORE_MOD: tl.constexpr, DERIVATIVE: tl.constexpr, TRANSFORMED: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    TMA: tl.constexpr, ONE_LOOP: tl.constexpr, MASK_ALL: tl.constexpr,
):  # fmt: skip
    """The gradient dq, contiguous, of BLOCK_M rows of one head. Arguments as for dk and dv."""
    place = locate(cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, seqlen_q, seqlen_k, num_heads_q, heads_at_once,
                   BLOCK_M, False, HAS_RIGHT)  # fmt: skip
    b, h, start_q, length_q, start_k, length_k = (
        place.b, place.head, place.start_q, place.length_q, place.start_k, place.length_k
    )  # fmt: skip
    m_first = place.block * BLOCK_M
    if m_first >= length_q:
        return
    VARLEN: tl.constexpr = cu_seqlens_q_ptr is not None
    batch_index = b
    if VARLEN:
        batch_index = 0
    head_kv = h // group_size
    cols, cols_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    dim = None if HEAD_DIM == BLOCK_D else HEAD_DIM
    dim_v = None if HEAD_DIM_V == BLOCK_DV else HEAD_DIM_V
    q = Operand(q_ptr, None, q_stride_b, q_stride_row, q_stride_head, cols, dim)
    k = Operand(k_ptr, k_source, k_stride_b, k_stride_row, k_stride_head, cols, dim)
    v = Operand(v_ptr, v_source, v_stride_b, v_stride_row, v_stride_head, cols_v, dim_v)
    dout = Operand(dout_ptr, None, dout_stride_b, dout_stride_row, dout_stride_head, cols_v, dim_v)
    q_rows = Rows(q, batch_index, h, start_q, length_q)
    k_rows = Rows(k, batch_index, head_kv, start_k, length_k)
    v_rows = Rows(v, batch_index, head_kv, start_k, length_k)
    dout_rows = Rows(dout, batch_index, h, start_q, length_q)
    bias = ScoreTensor(bias_ptr, bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col)
    mask = ScoreTensor(mask_ptr, mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col)
    band = Band(left if HAS_LEFT else None, right if HAS_RIGHT else None)
    terms = Terms(band, scale, param, alibi_ptr, alibi_stride_b, bias, mask)
    slope, bias_at, mask_at = scores.of_head(terms, b, h)
    pairs = Pairs(terms, b, h, length_q, length_k, slope, bias_at, mask_at)
    draws = Draws(rng_state_ptr, dropout_threshold, keep_scale, num_heads_q)
    q_tile = load_rows(q_rows, m_first, BLOCK_M, True, False)
    dout_tile = load_rows(dout_rows, m_first, BLOCK_M, True, False)
    rows = m_first + tl.arange(0, BLOCK_M)
    row_offset = (tl.cast(batch_index, tl.int64) * num_heads_q + h) * row_pitch + start_q
    origin = tl.load(origin_ptr + row_offset + rows, mask=rows < length_q, other=float("inf"))
    delta = tl.load(delta_ptr + row_offset + rows, mask=rows < length_q, other=0.0)
    m_last = tl.minimum(m_first + BLOCK_M, length_q) - 1
    n_min, n_full_min, n_full_max, n_max = blocks.key_blocks(
        m_first, m_last, length_q, length_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N
    )
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    leaked = False
    MAY_LEAK: tl.constexpr = HAS_LEFT or HAS_RIGHT or (mask_ptr is not None)
    REFINE: tl.constexpr = BLOCK_N // poison.STEP
    # Phases: keys on the band's left edge, keys that every row keeps, the right edge and the end, and all again where a
    # mask may have let a NaN through. ONE_LOOP takes the first three together.
    for phase in tl.static_range(2 if ONE_LOOP else 0 if HAS_LEFT else 1, 4 if MAY_LEAK else 3):
        n_start, n_stop = blocks.phase_blocks(phase, n_min, n_full_min, n_full_max, n_max, ONE_LOOP)
        if phase == 3:
            leaked = finite.leaks(dq)
            n_start, n_stop = n_min * REFINE, tl.where(leaked, n_max, n_min) * REFINE
            dq = tl.where(leaked, 0.0, dq)
        dq = over_keys(
            dq, q_tile, dout_tile, origin, delta, rows, n_start, n_stop, n_full_min, n_full_max, k_rows, v_rows, pairs,
            draws, poison.STEP if phase == 3 else BLOCK_N, SCORE_MOD, DERIVATIVE, TRANSFORMED, INPUT_PRECISION,
            TMA and phase != 3 and not (VARLEN and phase != 1), MASKED=phase != 1,
            BRANCH=ONE_LOOP and phase != 3 and not MASK_ALL, CAREFUL=phase == 3,
        )  # fmt: skip
    dq_stride_row = num_heads_q * HEAD_DIM
    dq_tensor = Operand(dq_ptr, None, tl.cast(seqlen_q, tl.int64) * dq_stride_row, dq_stride_row, HEAD_DIM, cols, dim)
    dq_rows = Rows(dq_tensor, batch_index, h, start_q, length_q)
    store_rows(dq_rows, m_first, dq * scale, BLOCK_M)
    if leaked:
        tl.debug_barrier()  # the same elements are stored again, perhaps by other threads
        poison.spread(dq_rows, m_first, None, k_rows, n_min * BLOCK_N, n_max * BLOCK_N, pairs, BLOCK_M, False, True)
