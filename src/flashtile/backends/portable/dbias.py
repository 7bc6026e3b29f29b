"""The gradient of an additive bias: dscores, summed over every dimension the bias broadcasts.

A program owns one tile of the bias and walks, in order, over all (sequence, head, rows, keys) that read it. So nothing
of the scores' size is kept where the bias broadcasts, and the sum is bitwise repeatable.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.portable.backward import Call, probabilities, score_gradient
from flashtile.backends.portable.rows import load_rows
from flashtile.backends.vocab import blocks, dropout, scores, sequence
from flashtile.backends.vocab.dropout import Draws
from flashtile.backends.vocab.mask import Band
from flashtile.backends.vocab.scores import Pairs, ScoreTensor, Terms
from flashtile.backends.vocab.sequence import Operand, Rows


@triton.jit
def tile_gradient(
    acc, b, h, m, n, call, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, seqlen_q, seqlen_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCORE_MOD: tl.constexpr, TRANSFORMED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds dscores of tile (m, n) of one sequence and head, nothing where the band or a length leaves it empty."""
    VARLEN: tl.constexpr = cu_seqlens_q_ptr is not None
    draws = call.draws
    start_q, length_q = sequence.sequence(cu_seqlens_q_ptr, b, batch, seqlen_q, VARLEN)
    start_k, length_k = sequence.sequence(cu_seqlens_k_ptr, b, batch, seqlen_k, VARLEN)
    m_first, n_first = m * BLOCK_M, n * BLOCK_N
    m_last = tl.minimum(m_first + BLOCK_M, length_q) - 1
    left, right = call.terms.band.left, call.terms.band.right
    n_min, _full_min, _full_max, n_max = blocks.key_blocks(
        m_first, m_last, length_q, length_k, left, right, left is not None, right is not None, BLOCK_N
    )
    if (n >= n_min) & (n < n_max):
        batch_index = b
        if VARLEN:
            batch_index = 0
        head_kv = h // call.group_size
        q_rows = Rows(call.q, batch_index, h, start_q, length_q)
        k_rows = Rows(call.k, batch_index, head_kv, start_k, length_k)
        v_rows = Rows(call.v, batch_index, head_kv, start_k, length_k)
        dout_rows = Rows(call.dout, batch_index, h, start_q, length_q)
        slope, bias_at, mask_at = scores.of_head(call.terms, b, h)
        pairs = Pairs(call.terms, b, h, length_q, length_k, slope, bias_at, mask_at)
        q = load_rows(q_rows, m_first, BLOCK_M, True, False)
        k = load_rows(k_rows, n_first, BLOCK_N, True, False)
        rows = m_first + tl.arange(0, BLOCK_M)
        cols = n_first + tl.arange(0, BLOCK_N)
        row_offset = (tl.cast(batch_index, tl.int64) * draws.num_heads + h) * call.row_pitch + start_q
        origin = tl.load(call.origin_ptr + row_offset + rows, mask=rows < length_q, other=float("inf"))
        delta = tl.load(call.delta_ptr + row_offset + rows, mask=rows < length_q, other=0.0)
        product = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)
        probs, _derivative = probabilities(
            product, origin[:, None], rows[:, None], cols[None, :], True, pairs, SCORE_MOD, None, TRANSFORMED
        )
        dout = load_rows(dout_rows, m_first, BLOCK_M, True, False)
        v = load_rows(v_rows, n_first, BLOCK_N, True, False)
        dprobs = tl.dot(dout, tl.trans(v), input_precision=INPUT_PRECISION)
        if draws.rng_state_ptr is not None:
            kept = dropout.keep_tile(draws, b, h, rows[:, None], n * (BLOCK_N // 4), BLOCK_N)
            dprobs = tl.where(kept, dprobs * draws.keep_scale, 0.0)
        acc += score_gradient(probs, dprobs, delta[:, None], 1.0, True)
    return acc


@triton.jit(do_not_specialize=["batch", "seqlen_q", "seqlen_k", "left", "right", "dropout_threshold"])
def attention_backward_dbias(
    q_ptr, k_ptr, v_ptr, dout_ptr, origin_ptr, delta_ptr, dbias_ptr,
    alibi_ptr, mask_ptr, bias_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, rng_state_ptr,
    q_stride_b, q_stride_row, q_stride_head, k_stride_b, k_stride_row, k_stride_head,
    v_stride_b, v_stride_row, v_stride_head, dout_stride_b, dout_stride_row, dout_stride_head, alibi_stride_b,
    mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col,
    bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col,
    batch, seqlen_q, seqlen_k, row_pitch, num_heads_q, group_size, left, right, scale, param, dropout_threshold,
    keep_scale,
    bias_batch, bias_heads, bias_rows, bias_cols, max_rows, max_cols,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SCORE_MOD: tl.constexpr, TRANSFORMED: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    SUM_BATCH: tl.constexpr, SUM_HEADS: tl.constexpr, SUM_ROWS: tl.constexpr, SUM_COLS: tl.constexpr,
):  # fmt: skip
    """One tile of dbias, contiguous ``(bias_batch, bias_heads, bias_rows, bias_cols)``.

    A SUM_ flag says that the bias broadcasts that dimension; max_rows and max_cols are the scores' sizes.
    """
    cols, cols_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    dim = None if HEAD_DIM == BLOCK_D else HEAD_DIM
    dim_v = None if HEAD_DIM_V == BLOCK_DV else HEAD_DIM_V
    q = Operand(q_ptr, None, q_stride_b, q_stride_row, q_stride_head, cols, dim)
    k = Operand(k_ptr, None, k_stride_b, k_stride_row, k_stride_head, cols, dim)
    v = Operand(v_ptr, None, v_stride_b, v_stride_row, v_stride_head, cols_v, dim_v)
    dout = Operand(dout_ptr, None, dout_stride_b, dout_stride_row, dout_stride_head, cols_v, dim_v)
    bias = ScoreTensor(bias_ptr, bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col)
    mask = ScoreTensor(mask_ptr, mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col)
    band = Band(left if HAS_LEFT else None, right if HAS_RIGHT else None)
    terms = Terms(band, scale, param, alibi_ptr, alibi_stride_b, bias, mask)
    draws = Draws(rng_state_ptr, dropout_threshold, keep_scale, num_heads_q)
    call = Call(q, k, v, dout, origin_ptr, delta_ptr, row_pitch, group_size, terms, draws)
    m_tiles = 1 if SUM_ROWS else (bias_rows + BLOCK_M - 1) // BLOCK_M
    n_tiles = 1 if SUM_COLS else (bias_cols + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    n_tile, m_tile = pid % n_tiles, pid // n_tiles % m_tiles
    plane = pid // n_tiles // m_tiles
    head, entry = plane % bias_heads, plane // bias_heads
    b_start, b_stop = entry, entry + 1
    h_start, h_stop = head, head + 1
    m_start, m_stop = m_tile, m_tile + 1
    n_start, n_stop = n_tile, n_tile + 1
    if SUM_BATCH:
        b_start, b_stop = 0, batch
    if SUM_HEADS:
        h_start, h_stop = 0, num_heads_q
    if SUM_ROWS:
        m_start, m_stop = 0, (max_rows + BLOCK_M - 1) // BLOCK_M
    if SUM_COLS:
        n_start, n_stop = 0, (max_cols + BLOCK_N - 1) // BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for b in range(b_start, b_stop):
        for h in range(h_start, h_stop):
            for m in range(m_start, m_stop):
                for n in range(n_start, n_stop):
                    acc = tile_gradient(
                        acc, b, h, m, n, call, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, seqlen_q, seqlen_k,
                        BLOCK_M, BLOCK_N, SCORE_MOD, TRANSFORMED, INPUT_PRECISION,
                    )  # fmt: skip
    row = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    col = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if SUM_ROWS:
        acc = tl.broadcast_to(tl.sum(acc, 0, keep_dims=True), [BLOCK_M, BLOCK_N])
    if SUM_COLS:
        acc = tl.broadcast_to(tl.sum(acc, 1, keep_dims=True), [BLOCK_M, BLOCK_N])
    at = (tl.cast(plane, tl.int64) * bias_rows + row) * bias_cols + col
    tl.store(dbias_ptr + at, acc.to(dbias_ptr.dtype.element_ty), mask=(row < bias_rows) & (col < bias_cols))
