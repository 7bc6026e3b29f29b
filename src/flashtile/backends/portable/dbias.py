"""The gradient of an additive bias: dscores, summed over every dimension the bias broadcasts.

A program owns one tile of the bias and walks, in order, over all (sequence, head, rows, keys) that read it. So nothing
of the scores' size is kept where the bias broadcasts, and the sum is bitwise repeatable.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.portable.backward import probabilities, score_gradient
from flashtile.backends.portable.forward import load_rows
from flashtile.backends.vocab import blocks, dropout, scores, sequence


@triton.jit
def tile_gradient(
    acc, b, h, m, n, q_ptr, k_ptr, v_ptr, dout_ptr, origin_ptr, delta_ptr,
    alibi_ptr, mask_ptr, bias_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, rng_state_ptr,
    q_stride_b, q_stride_row, q_stride_head, k_stride_b, k_stride_row, k_stride_head,
    v_stride_b, v_stride_row, v_stride_head, dout_stride_b, dout_stride_row, dout_stride_head, alibi_stride_b,
    mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col,
    bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col,
    batch, seqlen_q, seqlen_k, row_pitch, num_heads_q, group_size, left, right, scale, param, dropout_threshold,
    keep_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SCORE_MOD: tl.constexpr, TRANSFORMED: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds dscores of tile (m, n) of one sequence and head, nothing where the band or a length leaves it empty."""
    VARLEN: tl.constexpr = cu_seqlens_q_ptr is not None
    HAS_ALIBI: tl.constexpr = alibi_ptr is not None
    start_q, length_q = sequence.sequence(cu_seqlens_q_ptr, b, batch, seqlen_q, VARLEN)
    start_k, length_k = sequence.sequence(cu_seqlens_k_ptr, b, batch, seqlen_k, VARLEN)
    m_first, n_first = m * BLOCK_M, n * BLOCK_N
    m_last = tl.minimum(m_first + BLOCK_M, length_q) - 1
    n_min, _full_min, _full_max, n_max = blocks.key_blocks(
        m_first, m_last, length_q, length_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N
    )
    if (n >= n_min) & (n < n_max):
        batch_index = b
        if VARLEN:
            batch_index = 0
        head_kv = h // group_size
        slope = scores.slope_of(alibi_ptr, alibi_stride_b, b, h)
        mask_at = None if mask_ptr is None else scores.plane_of(mask_ptr, b, h, mask_stride_b, mask_stride_head)
        bias_at = scores.plane_of(bias_ptr, b, h, bias_stride_b, bias_stride_head)
        q_at = sequence.base(q_ptr, b, start_q, h, q_stride_b, q_stride_row, q_stride_head)
        k_at = sequence.base(k_ptr, b, start_k, head_kv, k_stride_b, k_stride_row, k_stride_head)
        v_at = sequence.base(v_ptr, b, start_k, head_kv, v_stride_b, v_stride_row, v_stride_head)
        dout_at = sequence.base(dout_ptr, b, start_q, h, dout_stride_b, dout_stride_row, dout_stride_head)
        q = load_rows(q_at, q_at, b, h, 0, m_first, length_q, q_stride_row, BLOCK_M, HEAD_DIM, BLOCK_D, True, False)
        k = load_rows(k_at, k_at, b, h, 0, n_first, length_k, k_stride_row, BLOCK_N, HEAD_DIM, BLOCK_D, True, False)
        rows = m_first + tl.arange(0, BLOCK_M)
        cols = n_first + tl.arange(0, BLOCK_N)
        row_offset = (tl.cast(batch_index, tl.int64) * num_heads_q + h) * row_pitch + start_q
        origin = tl.load(origin_ptr + row_offset + rows, mask=rows < length_q, other=float("inf"))
        delta = tl.load(delta_ptr + row_offset + rows, mask=rows < length_q, other=0.0)
        product = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)
        probs, _derivative = probabilities(
            product, origin[:, None], rows[:, None], cols[None, :], True, length_q, length_k, b, h, left, right, scale,
            param, slope, bias_at, bias_stride_row, bias_stride_col, mask_at, mask_stride_row, mask_stride_col,
            HAS_LEFT, HAS_RIGHT, HAS_ALIBI, SCORE_MOD, None, TRANSFORMED,
        )  # fmt: skip
        dout = load_rows(dout_at, dout_at, b, h, 0, m_first, length_q, dout_stride_row,
                         BLOCK_M, HEAD_DIM_V, BLOCK_DV, True, False)  # fmt: skip
        v = load_rows(v_at, v_at, b, h, 0, n_first, length_k, v_stride_row,
                      BLOCK_N, HEAD_DIM_V, BLOCK_DV, True, False)  # fmt: skip
        dprobs = tl.dot(dout, tl.trans(v), input_precision=INPUT_PRECISION)
        if rng_state_ptr is not None:
            key_blocks = n * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)[None, :]
            kept = dropout.keep(rng_state_ptr, dropout_threshold, b * num_heads_q + h, rows[:, None], key_blocks)
            dprobs = tl.where(kept, dprobs * keep_scale, 0.0)
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
                        acc, b, h, m, n, q_ptr, k_ptr, v_ptr, dout_ptr, origin_ptr, delta_ptr,
                        alibi_ptr, mask_ptr, bias_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, rng_state_ptr,
                        q_stride_b, q_stride_row, q_stride_head, k_stride_b, k_stride_row, k_stride_head,
                        v_stride_b, v_stride_row, v_stride_head, dout_stride_b, dout_stride_row, dout_stride_head,
                        alibi_stride_b, mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col,
                        bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col,
                        batch, seqlen_q, seqlen_k, row_pitch, num_heads_q, group_size, left, right, scale, param,
                        dropout_threshold, keep_scale, HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
                        HAS_LEFT, HAS_RIGHT, SCORE_MOD, TRANSFORMED, INPUT_PRECISION,
                    )  # fmt: skip
    row = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    col = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if SUM_ROWS:
        acc = tl.broadcast_to(tl.sum(acc, 0, keep_dims=True), [BLOCK_M, BLOCK_N])
    if SUM_COLS:
        acc = tl.broadcast_to(tl.sum(acc, 1, keep_dims=True), [BLOCK_M, BLOCK_N])
    at = (tl.cast(plane, tl.int64) * bias_rows + row) * bias_cols + col
    tl.store(dbias_ptr + at, acc.to(dbias_ptr.dtype.element_ty), mask=(row < bias_rows) & (col < bias_cols))
