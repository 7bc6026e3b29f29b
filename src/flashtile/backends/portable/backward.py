"""The backward's kernels in Triton: probabilities are computed again from lse, nothing quadratic is kept.

    delta  = rowsum(dout * out) - dlse                 one float32 a row
    dprobs = dout @ v^T                                dscores = probs * (dprobs - delta)
    dv = probs^T @ dout    dk = dscores^T @ q    dq = dscores @ k    dbias = dscores, summed over what broadcasts

One kernel owns blocks of keys and makes dk and dv, one owns blocks of queries and makes dq, one owns tiles of the bias:
each gradient is written by one program, in one order, so the result is bitwise repeatable without any atomics.
Mathematics: docs/algorithm.md. Source: Dao et al. 2022, arXiv:2205.14135, algorithm 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.portable import poison
from flashtile.backends.portable.forward import load_rows, locate, store_rows
from flashtile.backends.vocab import blocks, dropout, finite, mask, scores, sequence, softmax


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
    product, origin, rows, cols, edge, length_q, length_k, b, h, left, right, scale, param, slope,
    bias_at, bias_stride_row, bias_stride_col, mask_at, mask_stride_row, mask_stride_col,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_ALIBI: tl.constexpr, SCORE_MOD: tl.constexpr,
    DERIVATIVE: tl.constexpr, TRANSFORMED: tl.constexpr,
):  # fmt: skip
    """Normalised probabilities of a block of ``q @ k^T``, in either orientation, and the score transform's derivative.

    With ``edge``, which may be known at compile time, the band and the end of the keys are selected out.
    """
    derivative = 1.0
    if TRANSFORMED:
        x, derivative = scores.transform(
            product, scale, param, slope, bias_at, bias_stride_row, bias_stride_col, b, h, rows, cols, length_q,
            length_k, SCORE_MOD, DERIVATIVE, HAS_ALIBI,
        )  # fmt: skip
        probs = tl.exp2(x * softmax.LOG2_E - origin)
    else:
        probs = tl.exp2(product * (scale * softmax.LOG2_E) - origin)
    if edge:
        i = rows + (length_k - length_q)
        probs = mask.band_select(probs, i, cols, length_k, left, right, 0.0, HAS_LEFT, HAS_RIGHT)
    probs = scores.select_mask(probs, mask_at, mask_stride_row, mask_stride_col, rows, cols, length_q, length_k, 0.0)
    return probs, derivative


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
    dk, dv, k, v, m_start, m_stop, full_start, full_stop, q_source, q_at, q_stride_row, dout_source, dout_at,
    dout_stride_row, origin_at,
    delta_at, batch_index, start_q, b, h, head_index, cols, length_q, length_k, left, right, scale, param, slope,
    bias_at, bias_stride_row, bias_stride_col, mask_at, mask_stride_row, mask_stride_col, rng_state_ptr,
    dropout_threshold, keep_scale, n_first,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_ALIBI: tl.constexpr, SCORE_MOD: tl.constexpr, DERIVATIVE: tl.constexpr, TRANSFORMED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, TMA: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr,
    BRANCH: tl.constexpr, CAREFUL: tl.constexpr, WITH_DK: tl.constexpr, WITH_DV: tl.constexpr,
):  # fmt: skip
    """Adds what query blocks m_start ... m_stop - 1 of one head give to dk and dv; scores lie keys first.

    Without MASKED no block needs a mask; with BRANCH, those from full_start to full_stop - 1 do not. CAREFUL
    takes 0 for every infinity and NaN of q and dout where a mask may have made the other factor 0.
    """
    for m in tl.range(m_start, m_stop, num_stages=1 if CAREFUL else None):
        first = m * BLOCK_M
        rows = first + tl.arange(0, BLOCK_M)
        edge = MASKED
        if BRANCH:
            edge = (m < full_start) | (m >= full_stop)
        select = edge
        if mask_at is not None:
            select = True
        q = load_rows(q_source, q_at, batch_index, h, start_q, first, length_q, q_stride_row,
                      BLOCK_M, HEAD_DIM, BLOCK_D, MASKED, TMA)  # fmt: skip
        # Rows behind the end have origin +inf, so probability 0: written there behind dense sequences, selected behind
        # packed ones.
        origin = tl.load(origin_at + first + tl.arange(0, BLOCK_M))
        delta = tl.load(delta_at + first + tl.arange(0, BLOCK_M))
        if VARLEN and MASKED:
            origin = tl.where(rows < length_q, origin, float("inf"))
            delta = tl.where(rows < length_q, delta, 0.0)
        product = tl.dot(k, tl.trans(q), input_precision=INPUT_PRECISION)  # [BLOCK_N, BLOCK_M] float32
        probs, derivative = probabilities(
            product, origin[None, :], rows[None, :], cols, edge, length_q, length_k, b, h, left, right, scale, param,
            slope,
            bias_at, bias_stride_row, bias_stride_col, mask_at, mask_stride_row, mask_stride_col,
            HAS_LEFT, HAS_RIGHT, HAS_ALIBI, SCORE_MOD, DERIVATIVE, TRANSFORMED,
        )  # fmt: skip
        dout = load_rows(dout_source, dout_at, batch_index, h, start_q, first, length_q, dout_stride_row,
                         BLOCK_M, HEAD_DIM_V, BLOCK_DV, MASKED, TMA)  # fmt: skip
        dprobs = tl.dot(v, tl.trans(dout), input_precision=INPUT_PRECISION)
        if CAREFUL:
            q, dout = finite.finite(q), finite.finite(dout)
        kept_probs = probs
        if rng_state_ptr is not None:
            key_blocks = n_first // 4 + tl.arange(0, BLOCK_N // 4)[None, :]
            kept = tl.trans(dropout.keep(rng_state_ptr, dropout_threshold, head_index, rows[:, None], key_blocks))
            kept_probs = tl.where(kept, probs, 0.0)
            dprobs = tl.where(kept, dprobs * keep_scale, 0.0)
        if WITH_DV:
            dv = tl.dot(kept_probs.to(dout.dtype), dout, dv, input_precision=INPUT_PRECISION)
        if WITH_DK:
            dscores = score_gradient(probs, dprobs, delta[None, :], derivative, select)
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=INPUT_PRECISION)
    return dk, dv


@triton.jit
def over_heads(
    k, v, n_first, b, head_kv, start_q, length_q, start_k, length_k,
    q_ptr, dout_ptr, q_source, dout_source, origin_ptr, delta_ptr, dk_ptr, dv_ptr, alibi_ptr, mask_ptr, bias_ptr,
    rng_state_ptr, q_stride_b, q_stride_row, q_stride_head, dout_stride_b, dout_stride_row, dout_stride_head,
    alibi_stride_b, mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col,
    bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col,
    seqlen_k, row_pitch, num_heads_q, group_size, left, right, scale, param, dropout_threshold, keep_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_ALIBI: tl.constexpr, SCORE_MOD: tl.constexpr, DERIVATIVE: tl.constexpr, TRANSFORMED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, TMA: tl.constexpr, VARLEN: tl.constexpr, ONE_LOOP: tl.constexpr,
    MASK_ALL: tl.constexpr, CAREFUL: tl.constexpr, WITH_DK: tl.constexpr, WITH_DV: tl.constexpr,
):  # fmt: skip
    """Stores dk and dv, those that are asked for, summed over the query heads of a group.

    CAREFUL lets no infinity and no NaN of a query reach a key that it does not keep.

    Returns:
        Whether dk and dv may hold a NaN that leaked.
    """
    batch_index = b
    if VARLEN:
        batch_index = 0
    num_heads_kv = num_heads_q // group_size
    n_last = tl.minimum(n_first + BLOCK_N, length_k) - 1
    m_min, m_full_min, m_full_max, m_max = blocks.query_blocks(
        n_first, n_last, length_q, length_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M
    )
    cols = n_first + tl.arange(0, BLOCK_N)[:, None]
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(group_size):
        h = head_kv * group_size + member
        slope = scores.slope_of(alibi_ptr, alibi_stride_b, b, h)
        mask_at = None if mask_ptr is None else scores.plane_of(mask_ptr, b, h, mask_stride_b, mask_stride_head)
        bias_at = None if bias_ptr is None else scores.plane_of(bias_ptr, b, h, bias_stride_b, bias_stride_head)
        q_at = sequence.base(q_ptr, b, start_q, h, q_stride_b, q_stride_row, q_stride_head)
        dout_at = sequence.base(dout_ptr, b, start_q, h, dout_stride_b, dout_stride_row, dout_stride_head)
        row_offset = (tl.cast(batch_index, tl.int64) * num_heads_q + h) * row_pitch + start_q
        # Phases: rows on the band's right edge, rows that keep every key, the left edge and the end; ONE_LOOP: all.
        for phase in tl.static_range(2 if ONE_LOOP else 0 if HAS_RIGHT else 1, 3):
            m_start, m_stop = blocks.phase_blocks(phase, m_min, m_full_min, m_full_max, m_max, ONE_LOOP)
            dk, dv = over_queries(
                dk, dv, k, v, m_start, m_stop, m_full_min, m_full_max, q_source, q_at, q_stride_row, dout_source,
                dout_at, dout_stride_row,
                origin_ptr + row_offset, delta_ptr + row_offset, batch_index, start_q, b, h, b * num_heads_q + h, cols,
                length_q, length_k, left, right, scale, param, slope, bias_at, bias_stride_row, bias_stride_col,
                mask_at, mask_stride_row, mask_stride_col, rng_state_ptr, dropout_threshold, keep_scale, n_first,
                HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, HAS_ALIBI, SCORE_MOD,
                DERIVATIVE, TRANSFORMED, INPUT_PRECISION, TMA and not (VARLEN and phase != 1), VARLEN,
                MASKED=phase != 1, BRANCH=ONE_LOOP and not MASK_ALL, CAREFUL=CAREFUL, WITH_DK=WITH_DK,
                WITH_DV=WITH_DV,
            )  # fmt: skip
    at = (tl.cast(batch_index, tl.int64) * seqlen_k + start_k) * num_heads_kv + head_kv
    dk_stride_row, dv_stride_row = num_heads_kv * HEAD_DIM, num_heads_kv * HEAD_DIM_V
    leaked_dk, leaked_dv = False, False
    if WITH_DK:
        store_rows(dk_ptr + at * HEAD_DIM, n_first, length_k, dk_stride_row, dk * scale, BLOCK_N, HEAD_DIM, BLOCK_D)
        leaked_dk = finite.leaks(dk)
    if WITH_DV:
        store_rows(dv_ptr + at * HEAD_DIM_V, n_first, length_k, dv_stride_row, dv * keep_scale,
                   BLOCK_N, HEAD_DIM_V, BLOCK_DV)  # fmt: skip
        leaked_dv = finite.leaks(dv)
    if CAREFUL:
        tl.debug_barrier()  # the same elements are stored again, perhaps by other threads
        for member in range(group_size):
            h = head_kv * group_size + member
            mask_at = None if mask_ptr is None else scores.plane_of(mask_ptr, b, h, mask_stride_b, mask_stride_head)
            if WITH_DK:
                q_at = sequence.base(q_ptr, b, start_q, h, q_stride_b, q_stride_row, q_stride_head)
                poison.spread(
                    dk_ptr + at * HEAD_DIM, dk_stride_row, n_first, length_k, None, q_at, q_stride_row,
                    m_min * BLOCK_M, m_max * BLOCK_M, length_q, length_q, length_k, left, right, mask_at,
                    mask_stride_row, mask_stride_col, HEAD_DIM, BLOCK_N, HAS_LEFT, HAS_RIGHT, True, True,
                )  # fmt: skip
            if WITH_DV:
                dout_at = sequence.base(dout_ptr, b, start_q, h, dout_stride_b, dout_stride_row, dout_stride_head)
                poison.spread(
                    dv_ptr + at * HEAD_DIM_V, dv_stride_row, n_first, length_k, None, dout_at, dout_stride_row,
                    m_min * BLOCK_M, m_max * BLOCK_M, length_q, length_q, length_k, left, right, mask_at,
                    mask_stride_row, mask_stride_col, HEAD_DIM_V, BLOCK_N, HAS_LEFT, HAS_RIGHT, True, True,
                )  # fmt: skip
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
    b, head_kv, n_block, start_q, length_q, start_k, length_k = locate(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, seqlen_q, seqlen_k, num_heads_kv, heads_at_once,
        BLOCK_N, True, HAS_RIGHT,
    )  # fmt: skip
    n_first = n_block * BLOCK_N
    if n_first >= length_k:
        return
    VARLEN: tl.constexpr = cu_seqlens_q_ptr is not None
    k_at = sequence.base(k_ptr, b, start_k, head_kv, k_stride_b, k_stride_row, k_stride_head)
    v_at = sequence.base(v_ptr, b, start_k, head_kv, v_stride_b, v_stride_row, v_stride_head)
    k = load_rows(k_at, k_at, b, head_kv, start_k, n_first, length_k, k_stride_row,
                  BLOCK_N, HEAD_DIM, BLOCK_D, True, False)  # fmt: skip
    v = load_rows(v_at, v_at, b, head_kv, start_k, n_first, length_k, v_stride_row,
                  BLOCK_N, HEAD_DIM_V, BLOCK_DV, True, False)  # fmt: skip
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
                k, v, n_first, b, head_kv, start_q, length_q, start_k, length_k,
                q_ptr, dout_ptr, q_source, dout_source, origin_ptr, delta_ptr, dk_ptr, dv_ptr,
                alibi_ptr, mask_ptr, bias_ptr, rng_state_ptr, q_stride_b, q_stride_row, q_stride_head,
                dout_stride_b, dout_stride_row, dout_stride_head, alibi_stride_b,
                mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col,
                bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col,
                seqlen_k, row_pitch, num_heads_q, group_size, left, right, scale, param, dropout_threshold, keep_scale,
                HEAD_DIM, HEAD_DIM_V, BLOCK_M if attempt == 0 else poison.STEP, BLOCK_N, BLOCK_D, BLOCK_DV, HAS_LEFT,
                HAS_RIGHT, alibi_ptr is not None, SCORE_MOD, DERIVATIVE, TRANSFORMED, INPUT_PRECISION,
                TMA and attempt == 0, VARLEN, ONE_LOOP or attempt > 0, MASK_ALL or attempt > 0, CAREFUL=attempt > 0,
                WITH_DK=dk_ptr is not None and attempt != 2, WITH_DV=dv_ptr is not None and attempt != 1,
            )  # fmt: skip
            if attempt == 0:
                leaked_dk, leaked_dv = leaks


@triton.jit
def over_keys(
    dq, q, dout, origin, delta, n_start, n_stop, full_start, full_stop, k_source, k_at, k_stride_row, v_source, v_at,
    v_stride_row,
    batch_index, head_kv, start_k, b, h, head_index, rows, length_q, length_k, left, right, scale, param, slope,
    bias_at, bias_stride_row, bias_stride_col, mask_at, mask_stride_row, mask_stride_col, rng_state_ptr,
    dropout_threshold, keep_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_ALIBI: tl.constexpr, SCORE_MOD: tl.constexpr, DERIVATIVE: tl.constexpr, TRANSFORMED: tl.constexpr,
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
        if mask_at is not None:
            select = True
        k = load_rows(k_source, k_at, batch_index, head_kv, start_k, first, length_k, k_stride_row,
                      BLOCK_N, HEAD_DIM, BLOCK_D, MASKED, TMA)  # fmt: skip
        product = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)  # [BLOCK_M, BLOCK_N] float32
        probs, derivative = probabilities(
            product, origin[:, None], rows[:, None], cols, edge, length_q, length_k, b, h, left, right, scale, param,
            slope,
            bias_at, bias_stride_row, bias_stride_col, mask_at, mask_stride_row, mask_stride_col,
            HAS_LEFT, HAS_RIGHT, HAS_ALIBI, SCORE_MOD, DERIVATIVE, TRANSFORMED,
        )  # fmt: skip
        v = load_rows(v_source, v_at, batch_index, head_kv, start_k, first, length_k, v_stride_row,
                      BLOCK_N, HEAD_DIM_V, BLOCK_DV, MASKED, TMA)  # fmt: skip
        dprobs = tl.dot(dout, tl.trans(v), input_precision=INPUT_PRECISION)
        if rng_state_ptr is not None:
            key_blocks = n * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)[None, :]
            kept = dropout.keep(rng_state_ptr, dropout_threshold, head_index, rows[:, None], key_blocks)
            dprobs = tl.where(kept, dprobs * keep_scale, 0.0)
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
    b, h, m_block, start_q, length_q, start_k, length_k = locate(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, seqlen_q, seqlen_k, num_heads_q, heads_at_once,
        BLOCK_M, False, HAS_RIGHT,
    )  # fmt: skip
    m_first = m_block * BLOCK_M
    if m_first >= length_q:
        return
    VARLEN: tl.constexpr = cu_seqlens_q_ptr is not None
    HAS_ALIBI: tl.constexpr = alibi_ptr is not None
    batch_index = b
    if VARLEN:
        batch_index = 0
    head_kv = h // group_size
    slope = scores.slope_of(alibi_ptr, alibi_stride_b, b, h)
    mask_at = None if mask_ptr is None else scores.plane_of(mask_ptr, b, h, mask_stride_b, mask_stride_head)
    bias_at = None if bias_ptr is None else scores.plane_of(bias_ptr, b, h, bias_stride_b, bias_stride_head)
    k_at = sequence.base(k_ptr, b, start_k, head_kv, k_stride_b, k_stride_row, k_stride_head)
    v_at = sequence.base(v_ptr, b, start_k, head_kv, v_stride_b, v_stride_row, v_stride_head)
    q_at = sequence.base(q_ptr, b, start_q, h, q_stride_b, q_stride_row, q_stride_head)
    dout_at = sequence.base(dout_ptr, b, start_q, h, dout_stride_b, dout_stride_row, dout_stride_head)
    q = load_rows(q_at, q_at, b, h, start_q, m_first, length_q, q_stride_row,
                  BLOCK_M, HEAD_DIM, BLOCK_D, True, False)  # fmt: skip
    dout = load_rows(dout_at, dout_at, b, h, start_q, m_first, length_q, dout_stride_row,
                     BLOCK_M, HEAD_DIM_V, BLOCK_DV, True, False)  # fmt: skip
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
            dq, q, dout, origin, delta, n_start, n_stop, n_full_min, n_full_max, k_source, k_at, k_stride_row,
            v_source, v_at, v_stride_row,
            batch_index, head_kv, start_k, b, h, b * num_heads_q + h, rows, length_q, length_k, left, right,
            scale, param, slope, bias_at, bias_stride_row, bias_stride_col, mask_at, mask_stride_row, mask_stride_col,
            rng_state_ptr, dropout_threshold, keep_scale, HEAD_DIM, HEAD_DIM_V, poison.STEP if phase == 3 else BLOCK_N,
            BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, HAS_ALIBI, SCORE_MOD, DERIVATIVE, TRANSFORMED, INPUT_PRECISION,
            TMA and phase != 3 and not (VARLEN and phase != 1), MASKED=phase != 1,
            BRANCH=ONE_LOOP and phase != 3 and not MASK_ALL, CAREFUL=phase == 3,
        )  # fmt: skip
    at = ((tl.cast(batch_index, tl.int64) * seqlen_q + start_q) * num_heads_q + h) * HEAD_DIM
    dq_stride_row = num_heads_q * HEAD_DIM
    store_rows(dq_ptr + at, m_first, length_q, dq_stride_row, dq * scale, BLOCK_M, HEAD_DIM, BLOCK_D)
    if leaked:
        tl.debug_barrier()  # the same elements are stored again, perhaps by other threads
        poison.spread(
            dq_ptr + at, dq_stride_row, m_first, length_q, None, k_at, k_stride_row, n_min * BLOCK_N, n_max * BLOCK_N,
            length_k, length_q, length_k, left, right, mask_at, mask_stride_row, mask_stride_col, HEAD_DIM, BLOCK_M,
            HAS_LEFT, HAS_RIGHT, False, True,
        )  # fmt: skip
