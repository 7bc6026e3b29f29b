"""The forward in Triton: one kernel for dense and packed sequences and every feature.

A program owns BLOCK_M query rows of one head and walks over the keys once, in base 2. Blocks of keys that every row
keeps run through an instance of the loop without any mask; those on the band's edges and at the end of the keys run
through a masked one. Mathematics: docs/algorithm.md. Source: Dao 2023, arXiv:2307.08691, algorithm 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtile.backends.portable import poison, warm
from flashtile.backends.portable.launch import (
    Launch,
    common_arguments,
    common_operands,
    descriptors,
    heads_at_once,
    num_programs,
)
from flashtile.backends.portable.rows import load_rows, locate, store_rows
from flashtile.backends.portable.tiles import Config, choose
from flashtile.backends.vocab import blocks, dropout, finite, scores, softmax
from flashtile.backends.vocab.dropout import Draws
from flashtile.backends.vocab.mask import Band
from flashtile.backends.vocab.scores import Pairs, ScoreTensor, Terms
from flashtile.backends.vocab.sequence import Operand, Rows
from flashtile.problem import Problem, Tensors


@triton.jit
def attend(
    acc, row_max, row_sum, q, rows, n_start, n_stop, full_start, full_stop, k_rows, v_rows, pairs, draws,
    BLOCK_N: tl.constexpr, SCORE_MOD: tl.constexpr, TRANSFORMED: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    TMA: tl.constexpr, MASKED: tl.constexpr, BRANCH: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Takes key blocks n_start ... n_stop - 1 into the state of BLOCK_M rows.

    MASKED applies the band and the end of the keys, with BRANCH outside blocks full_start ... full_stop - 1 only;
    without MASKED every row keeps every key. CAREFUL takes 0 for every infinity and NaN of v; ``poison.spread`` then
    adds what they do.
    """
    for n in tl.range(n_start, n_stop, num_stages=1 if CAREFUL else None):
        first = n * BLOCK_N
        cols = first + tl.arange(0, BLOCK_N)[None, :]
        k = load_rows(k_rows, first, BLOCK_N, MASKED, TMA)
        x = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)  # [BLOCK_M, BLOCK_N] float32
        scale_log2 = pairs.terms.scale * softmax.LOG2_E
        if TRANSFORMED:
            x, _ = scores.transform(x, pairs, rows, cols, SCORE_MOD, None)
            scale_log2 = softmax.LOG2_E
        edge = MASKED
        if BRANCH:
            edge = (n < full_start) | (n >= full_stop)
        if edge:
            x = scores.select_band(x, pairs, rows, cols, float("-inf"))
        x = scores.select_mask(x, pairs, rows, cols, float("-inf"))
        probs, rescale, row_max, row_sum = softmax.update(row_max, row_sum, x, scale_log2, True)
        if draws.rng_state_ptr is not None:
            kept = dropout.keep_tile(draws, pairs.b, pairs.h, rows, n * (BLOCK_N // 4), BLOCK_N)
            probs = tl.where(kept, probs, 0.0)
        v = load_rows(v_rows, first, BLOCK_N, MASKED, TMA)
        acc = acc * rescale[:, None]
        if CAREFUL:
            v = finite.finite(v)
        acc = tl.dot(probs.to(v.dtype), v, acc, input_precision=INPUT_PRECISION)
    return acc, row_max, row_sum


@triton.jit
def finish(acc, row_max, row_sum, sinks_ptr, h, in_sequence, keep_scale):
    """The output and lse of rows whose keys have all been taken in; no sink for rows that are in no sequence."""
    if sinks_ptr is not None:
        sink = tl.where(in_sequence, tl.load(sinks_ptr + h).to(tl.float32), float("-inf"))
        rescale, row_max, row_sum = softmax.add_sink(row_max, row_sum, sink)
        acc = acc * rescale[:, None]
    out_scale, lse = softmax.finalise(row_max, row_sum)
    out_scale = out_scale * keep_scale
    # An empty row's accumulator is 0 * 0, whatever it met: selected, so that nothing can turn it into NaN.
    return tl.where(out_scale[:, None] == 0.0, 0.0, acc * out_scale[:, None]), lse


@triton.jit(do_not_specialize=["batch", "seqlen_q", "seqlen_k", "heads_at_once", "left", "right", "dropout_threshold"])
def attention_forward(
    q_ptr, k_ptr, v_ptr, k_source, v_source, out_ptr, lse_ptr,
    alibi_ptr, mask_ptr, bias_ptr, sinks_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, rng_state_ptr,
    q_stride_b, q_stride_row, q_stride_head, k_stride_b, k_stride_row, k_stride_head,
    v_stride_b, v_stride_row, v_stride_head, alibi_stride_b,
    mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col,
    bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col,
    batch, seqlen_q, seqlen_k, num_heads_q, group_size, heads_at_once, left, right, scale, param, dropout_threshold,
    keep_scale, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SCORE_MOD: tl.constexpr, TRANSFORMED: tl.constexpr, INPUT_PRECISION: tl.constexpr, TMA: tl.constexpr,
    ONE_LOOP: tl.constexpr, MASK_ALL: tl.constexpr,
):  # fmt: skip
    """The output and lse of BLOCK_M rows of one head.

    seqlen_q and seqlen_k are the rows of the packed tensors if there are cu_seqlens. The batch strides of packed
    tensors are 0. k_source and v_source are descriptors of k and v with TMA, else None.
    """
    place = locate(cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, seqlen_q, seqlen_k, num_heads_q, heads_at_once,
                   BLOCK_M, False, HAS_RIGHT)  # fmt: skip
    b, h, start_q, length_q, start_k, length_k = (
        place.b, place.head, place.start_q, place.length_q, place.start_k, place.length_k
    )  # fmt: skip
    m_first = place.block * BLOCK_M
    if m_first >= length_q:
        return
    VARLEN: tl.constexpr = cu_seqlens_q_ptr is not None
    head_kv = h // group_size
    rows = m_first + tl.arange(0, BLOCK_M)
    batch_index = b
    if VARLEN:
        batch_index = 0
    cols, cols_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    dim = None if HEAD_DIM == BLOCK_D else HEAD_DIM
    dim_v = None if HEAD_DIM_V == BLOCK_DV else HEAD_DIM_V
    q_tensor = Operand(q_ptr, None, q_stride_b, q_stride_row, q_stride_head, cols, dim)
    k_tensor = Operand(k_ptr, k_source, k_stride_b, k_stride_row, k_stride_head, cols, dim)
    v_tensor = Operand(v_ptr, v_source, v_stride_b, v_stride_row, v_stride_head, cols_v, dim_v)
    q_rows = Rows(q_tensor, batch_index, h, start_q, length_q)
    k_rows = Rows(k_tensor, batch_index, head_kv, start_k, length_k)
    v_rows = Rows(v_tensor, batch_index, head_kv, start_k, length_k)
    bias = ScoreTensor(bias_ptr, bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col)
    mask = ScoreTensor(mask_ptr, mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col)
    band = Band(left if HAS_LEFT else None, right if HAS_RIGHT else None)
    terms = Terms(band, scale, param, alibi_ptr, alibi_stride_b, bias, mask)
    slope, bias_at, mask_at = scores.of_head(terms, b, h)
    pairs = Pairs(terms, b, h, length_q, length_k, slope, bias_at, mask_at)
    draws = Draws(rng_state_ptr, dropout_threshold, keep_scale, num_heads_q)
    # Not by descriptor, here and in the backward: what that brings before a loop stays in registers all along.
    q = load_rows(q_rows, m_first, BLOCK_M, True, False)

    m_last = tl.minimum(m_first + BLOCK_M, length_q) - 1
    n_min, n_full_min, n_full_max, n_max = blocks.key_blocks(
        m_first, m_last, length_q, length_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N
    )
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # Where rows of one block keep different keys, 0 * NaN would carry a NaN of v into rows that mask its key. That
    # always shows as a NaN in the result, so the loops pay nothing for it: the rare tile that has one is computed
    # again, carefully.
    leaked = False
    MAY_LEAK: tl.constexpr = HAS_LEFT or HAS_RIGHT or (mask_ptr is not None)
    REFINE: tl.constexpr = BLOCK_N // poison.STEP
    # Phases: keys on the band's left edge, keys that every row keeps, the right edge and the end, the careful repeat.
    # ONE_LOOP takes the first three together.
    for phase in tl.static_range(2 if ONE_LOOP else 0 if HAS_LEFT else 1, 4 if MAY_LEAK else 3):
        n_start, n_stop = blocks.phase_blocks(phase, n_min, n_full_min, n_full_max, n_max, ONE_LOOP)
        if phase == 3:
            leaked = finite.leaks(acc)
            n_start, n_stop = n_min * REFINE, tl.where(leaked, n_max, n_min) * REFINE
            acc = tl.where(leaked, 0.0, acc)
            row_max = tl.where(leaked, float("-inf"), row_max)
            row_sum = tl.where(leaked, 0.0, row_sum)
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, q, rows[:, None], n_start, n_stop, n_full_min, n_full_max, k_rows, v_rows, pairs,
            draws, poison.STEP if phase == 3 else BLOCK_N, SCORE_MOD, TRANSFORMED, INPUT_PRECISION,
            TMA and phase != 3 and not (VARLEN and phase != 1), MASKED=phase != 1,
            BRANCH=ONE_LOOP and phase != 3 and not MASK_ALL, CAREFUL=phase == 3,
        )  # fmt: skip

    out, lse = finish(acc, row_max, row_sum, sinks_ptr, h, b < batch, keep_scale)
    out_stride_row = num_heads_q * HEAD_DIM_V
    out_tensor = Operand(out_ptr, None, tl.cast(seqlen_q, tl.int64) * out_stride_row, out_stride_row, HEAD_DIM_V,
                         cols_v, dim_v)  # fmt: skip
    out_rows = Rows(out_tensor, batch_index, h, start_q, length_q)
    store_rows(out_rows, m_first, out, BLOCK_M)
    lse_at = lse_ptr + (tl.cast(batch_index, tl.int64) * num_heads_q + h) * seqlen_q + start_q
    tl.store(lse_at + rows, lse, mask=rows < length_q)
    if leaked:
        tl.debug_barrier()  # the same elements are stored again, perhaps by other threads
        kept_any = (lse == lse)[:, None]
        poison.spread(
            out_rows, m_first, kept_any, v_rows, n_min * BLOCK_N, n_max * BLOCK_N, pairs, BLOCK_M, False, False
        )


def _operands(tensors: Tensors, out: Tensor, lse: Tensor) -> dict[str, Tensor | None]:
    return {**common_operands(tensors), "out_ptr": out, "lse_ptr": lse, "sinks_ptr": tensors.sinks}


def forward_launch(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, config: Config) -> Launch:
    """The forward's launch: what ``run`` computes and what a build compiles."""
    arguments = common_arguments(problem, tensors, config)
    sources = {"k": (tensors.k, arguments["BLOCK_D"]), "v": (tensors.v, arguments["BLOCK_DV"])}
    arguments |= descriptors(sources, config.block_n, config, problem.varlen)
    arguments |= {"ONE_LOOP": config.one_loop, "MASK_ALL": config.mask_all}
    arguments["heads_at_once"] = heads_at_once(problem, tensors.k, tensors.v)
    arguments |= _operands(tensors, out, lse)
    return Launch(attention_forward, num_programs(problem, tensors, config.block_m), arguments, config.options())


def run(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """The output and lse, as ``Backend.forward`` says."""
    q = tensors.q
    out = torch.empty((*q.shape[:-1], problem.head_dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.lse_shape(q), dtype=torch.float32, device=q.device)
    warm.launch("forward", problem, _operands(tensors, out, lse),
                lambda: [forward_launch(problem, tensors, out, lse, choose(problem, "forward"))])  # fmt: skip
    return out, lse
