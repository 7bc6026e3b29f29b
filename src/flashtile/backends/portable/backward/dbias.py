"""The gradient of an additive bias: dscores, summed over every dimension the bias broadcasts.

A program owns one tile of the bias and loops, in a fixed order, over all (sequence, head, rows, keys) that read it. So
no buffer of the scores' size is needed where the bias broadcasts, and the sum is bitwise repeatable. Where a batch
shares a bias of few tiles, several programs own one, each with a part of the batch and sums of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.device import blocks, scores, sequence
from flashtile.backends.gpu.device.dropout import Dropout, keep_tile
from flashtile.backends.gpu.device.mask import Band, ScoreTensor
from flashtile.backends.gpu.device.scores import Alibi, Pairs, ScoreMod
from flashtile.backends.gpu.device.sequence import Operand, Rows, Strided
from flashtile.backends.portable.backward.kernel import Given, load_row_terms, probabilities
from flashtile.backends.portable.device.call import with_call
from flashtile.backends.portable.device.tile_io import load_rows, times_transposed


class BiasGradient(NamedTuple):
    """dbias, contiguous ``(bias_batch, heads, rows, cols)``, and the scores' numbers of rows and keys.

    A SUM_ constant is True if the bias broadcasts along that dimension; of the batch, dbias then has a sum for each of
    ``parts`` parts.
    """

    ptr: Any
    heads: Any
    rows: Any
    cols: Any
    max_rows: Any
    max_cols: Any
    parts: Any
    SUM_BATCH: Any
    SUM_HEADS: Any
    SUM_ROWS: Any
    SUM_COLS: Any


@triton.jit
def tile_gradient(acc, head, queries, keys, m_first, n_first, call, given):
    """Adds dscores of BLOCK_M rows and BLOCK_N keys of one sequence and head, 0 where a row does not keep a key."""
    BLOCK_M: tl.constexpr = call.BLOCK_M
    BLOCK_N: tl.constexpr = call.BLOCK_N
    INPUT_PRECISION: tl.constexpr = call.terms.INPUT_PRECISION
    dropout = call.terms.dropout
    head_kv = head.h // call.group_size
    q = load_rows(Rows(call.q, head.h, queries), m_first, BLOCK_M, True)
    k = load_rows(Rows(call.k, head_kv, keys), n_first, BLOCK_N, True)
    rows = m_first + tl.arange(0, BLOCK_M)
    cols = n_first + tl.arange(0, BLOCK_N)
    lse_log2, delta = load_row_terms(given, call.num_heads, head, queries, rows)
    product = times_transposed(q, k, INPUT_PRECISION)
    probs, _derivative = probabilities(
        product, lse_log2[:, None], rows[:, None] + head.shift, cols[None, :], True, Pairs(call.terms, head), False
    )
    dout = load_rows(
        Rows(Operand(given.dout, call.q.layout, call.v.DIM, call.v.BLOCK_DIM, call.v.UNIT), head.h, queries),
        m_first,
        BLOCK_M,
        True,
    )
    v = load_rows(Rows(call.v, head_kv, keys), n_first, BLOCK_N, True)
    dprobs = times_transposed(dout, v, INPUT_PRECISION)
    if dropout.rng_state_ptr is not None:
        kept = keep_tile(dropout, head.b, head.h, rows[:, None], n_first // 4, BLOCK_N)
        dprobs = tl.where(kept, dprobs * dropout.keep_scale, 0.0)
    return acc + scores.score_gradient(probs, dprobs, delta[:, None], 1.0, Pairs(call.terms, head), True)


@triton.jit
def keeps_some(queries, keys, m_first, n_first, call):
    """Whether a row of a tile keeps a key of it, by the band and the lengths."""
    left, right = call.terms.band.left, call.terms.band.right
    n_min, _full_min, _full_max, n_max = blocks.key_blocks(
        m_first, tl.minimum(m_first + call.BLOCK_M, queries.length) - 1, queries.length, keys.length, left, right,
        left is not None, right is not None, call.BLOCK_N,
    )  # fmt: skip
    n = n_first // call.BLOCK_N
    return (n >= n_min) & (n < n_max)


@triton.jit
def dbias_tile(call, given):
    """Computes one tile of dbias."""
    BLOCK_M: tl.constexpr = call.BLOCK_M
    BLOCK_N: tl.constexpr = call.BLOCK_N
    PACKED: tl.constexpr = call.q.layout.cu_seqlens_ptr is not None
    m_tiles = 1 if given.results.SUM_ROWS else (given.results.rows + BLOCK_M - 1) // BLOCK_M
    n_tiles = 1 if given.results.SUM_COLS else (given.results.cols + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    n_tile, m_tile = pid % n_tiles, pid // n_tiles % m_tiles
    plane = pid // n_tiles // m_tiles
    bias_head, entry = plane % given.results.heads, plane // given.results.heads
    m_start, m_stop = m_tile, m_tile + 1
    n_start, n_stop = n_tile, n_tile + 1
    if given.results.SUM_ROWS:
        m_start, m_stop = 0, (given.results.max_rows + BLOCK_M - 1) // BLOCK_M
    if given.results.SUM_COLS:
        n_start, n_stop = 0, (given.results.max_cols + BLOCK_N - 1) // BLOCK_N
    # Sequences and heads are one loop without a branch, so that the next tile's loads start early.
    first_b, count = entry, 1
    if given.results.SUM_BATCH:
        size = (call.q.layout.num_sequences + given.results.parts - 1) // given.results.parts
        first_b = entry * size
        count = tl.minimum(size, call.q.layout.num_sequences - first_b)
    if given.results.SUM_HEADS:
        count *= call.num_heads
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for m in range(m_start, m_stop):
        for n in range(n_start, n_stop):
            m_first, n_first = m * BLOCK_M, n * BLOCK_N
            stop = count
            if not PACKED:
                queries, keys = sequence.sequence_of(call.q.layout, 0), sequence.sequence_of(call.k.layout, 0)
                stop = tl.where(keeps_some(queries, keys, m_first, n_first, call), count, 0)
            for i in tl.range(stop):
                b, h = i, bias_head
                if given.results.SUM_HEADS:
                    b, h = i // call.num_heads, i % call.num_heads
                b += first_b
                queries, keys = sequence.sequence_of(call.q.layout, b), sequence.sequence_of(call.k.layout, b)
                head = scores.head_of(call.terms, b, h, queries.length, keys.length)
                if PACKED:
                    if keeps_some(queries, keys, m_first, n_first, call):
                        acc = tile_gradient(acc, head, queries, keys, m_first, n_first, call, given)
                else:
                    acc = tile_gradient(acc, head, queries, keys, m_first, n_first, call, given)
    row = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    col = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if given.results.SUM_ROWS:
        acc = tl.broadcast_to(tl.sum(acc, 0, keep_dims=True), [BLOCK_M, BLOCK_N])
    if given.results.SUM_COLS:
        acc = tl.broadcast_to(tl.sum(acc, 1, keep_dims=True), [BLOCK_M, BLOCK_N])
    at = (tl.cast(plane, tl.int64) * given.results.rows + row) * given.results.cols + col
    inside = (row < given.results.rows) & (col < given.results.cols)
    tl.store(given.results.ptr + at, acc.to(given.results.ptr.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["batch", "seqlen_q", "seqlen_k", "num_heads_q", "left", "right", "dropout_threshold", "parts"]
)
def attention_backward_dbias(
    q_ptr, k_ptr, v_ptr, dout_ptr, q_source, k_source, v_source, dout_source, lse_log2_ptr, delta_ptr, dbias_ptr,
    alibi_ptr, mask_ptr, bias_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, rng_state_ptr, origins_ptr,
    q_stride_b, q_stride_row, q_stride_head, k_stride_b, k_stride_row, k_stride_head,
    v_stride_b, v_stride_row, v_stride_head, dout_stride_b, dout_stride_row, dout_stride_head, alibi_stride_b,
    mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col,
    bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col,
    batch, seqlen_q, seqlen_k, row_pitch, num_heads_q, group_size, left, right, scale, param, dropout_threshold,
    keep_scale, bias_heads, bias_rows, bias_cols, max_rows, max_cols, parts,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SCORE_UNIT: tl.constexpr, SCORE_MOD: tl.constexpr, SCALE_FIRST: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    SUM_BATCH: tl.constexpr, SUM_HEADS: tl.constexpr, SUM_ROWS: tl.constexpr, SUM_COLS: tl.constexpr,
):  # fmt: skip
    """Computes dbias, contiguous, one tile per program, ``parts`` times.

    max_rows and max_cols are of the scores; q_source and so on are the tensors' descriptors, for all of them or none.
    """
    with_call(
        (
            Strided(q_ptr, q_source, q_stride_b, q_stride_row, q_stride_head),
            Strided(k_ptr, k_source, k_stride_b, k_stride_row, k_stride_head),
            Strided(v_ptr, v_source, v_stride_b, v_stride_row, v_stride_head),
        ),
        (HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, UNIT),
        (cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, seqlen_q, seqlen_k, group_size),
        (scale, SCALE_FIRST, INPUT_PRECISION),
        (
            ScoreMod(SCORE_MOD, None, None, param), Alibi(alibi_ptr, alibi_stride_b),
            ScoreTensor(
                bias_ptr, 0 if SUM_BATCH else bias_stride_b, 0 if SUM_HEADS else bias_stride_head, bias_stride_row,
                bias_stride_col, SCORE_UNIT,
            ),
        ),
        (
            Band(left if HAS_LEFT else None, right if HAS_RIGHT else None),
            ScoreTensor(mask_ptr, mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col, SCORE_UNIT),
        ),
        Dropout(rng_state_ptr, dropout_threshold, keep_scale, num_heads_q, origins_ptr),
        (1, BLOCK_M, BLOCK_N, False, False), dbias_tile,
        Given(
            Strided(dout_ptr, dout_source, dout_stride_b, dout_stride_row, dout_stride_head), lse_log2_ptr, delta_ptr,
            row_pitch,
            BiasGradient(
                dbias_ptr, bias_heads, bias_rows, bias_cols, max_rows, max_cols, parts, SUM_BATCH, SUM_HEADS,
                SUM_ROWS, SUM_COLS,
            ),
        ),
    )  # fmt: skip
