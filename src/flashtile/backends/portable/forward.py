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
from flashtile.backends.portable.tiles import Config, choose
from flashtile.backends.vocab import blocks, dropout, finite, mask, scheduler, scores, sequence, softmax
from flashtile.problem import Problem, Tensors


@triton.jit
def locate(
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, seqlen_q, seqlen_k, num_heads, heads_at_once,
    BLOCK: tl.constexpr, OVER_KEYS: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """The tile of this program: sequence, head, block, and where its queries and keys lie.

    Programs of packed sequences count blocks first, then heads. Dense ones take heads_at_once heads (of all sequences
    together) after one another, so that those share the cache, and of those the longest blocks of all heads first.

    Returns:
        (b, head, block, start_q, length_q, start_k, length_k); b == batch for rows behind the last packed sequence,
        which have no counterpart on the other side.
    """
    VARLEN: tl.constexpr = cu_seqlens_q_ptr is not None
    pid = tl.program_id(0)
    total = seqlen_k if OVER_KEYS else seqlen_q
    if VARLEN:
        num_tiles = total // BLOCK + batch + 1
        if OVER_KEYS:
            b, block = scheduler.packed_tile(cu_seqlens_k_ptr, batch, pid % num_tiles, BLOCK)
        else:
            b, block = scheduler.packed_tile(cu_seqlens_q_ptr, batch, pid % num_tiles, BLOCK)
        head = pid // num_tiles
    else:
        num_tiles = (total + BLOCK - 1) // BLOCK
        block, head = scheduler.grouped_tile(pid, num_tiles, batch * num_heads, heads_at_once)
        b = head // num_heads
        head = head % num_heads
    start_q, length_q = sequence.sequence(cu_seqlens_q_ptr, b, batch, seqlen_q, VARLEN)
    start_k, length_k = sequence.sequence(cu_seqlens_k_ptr, b, batch, seqlen_k, VARLEN)
    if VARLEN:
        # Rows behind the last query sequence see no keys, keys behind the last key sequence no rows.
        if OVER_KEYS:
            length_q = tl.where(b < batch, length_q, 0)
        else:
            length_k = tl.where(b < batch, length_k, 0)
    if HAS_RIGHT and not OVER_KEYS:
        # A tile behind the end of a packed sequence stays behind it.
        num_blocks = (length_q + BLOCK - 1) // BLOCK
        block = tl.where(block < num_blocks, scheduler.longest_first(block, num_blocks, True), block)
    return b, head, block, start_q, length_q, start_k, length_k


@triton.jit
def load_rows(
    source, base_ptr, b, head, start, first, length, stride_row,
    BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, CHECK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A [BLOCK, BLOCK_DIM] tile of rows first ... of a sequence; columns at or behind DIM are 0.

    Args:
        source: A descriptor over (batch, rows, heads, DIM), used with TMA.
        base_ptr: The address of (b, start, head), used without TMA.
        b: Index of the batch entry, 0 for packed tensors.
        head: Head.
        start: First row of the sequence in its batch entry.
        first: First row of the tile in the sequence.
        length: Rows of the sequence.
        stride_row: Row stride, without TMA.
        BLOCK: Rows of the tile.
        DIM: Columns of the tensor.
        BLOCK_DIM: Columns of the tile.
        CHECK: Whether the tile may reach behind the sequence, where its rows are then 0. With TMA, which knows the end
            of the whole tensor alone, that holds for dense tensors only.
        TMA: Whether to use the descriptor.
    """
    if TMA:
        tile = source.load([b, start + first, head, 0]).reshape(BLOCK, BLOCK_DIM)
    else:
        row = tl.arange(0, BLOCK)[:, None]
        col = tl.arange(0, BLOCK_DIM)[None, :]
        ptrs = base_ptr + tl.cast(first, tl.int64) * stride_row + (row.to(tl.int64) * stride_row + col)
        if CHECK:
            if BLOCK_DIM == DIM:
                tile = tl.load(ptrs, mask=first + row < length, other=0.0)
            else:
                tile = tl.load(ptrs, mask=(first + row < length) & (col < DIM), other=0.0)
        elif BLOCK_DIM == DIM:
            tile = tl.load(ptrs)
        else:
            tile = tl.load(ptrs, mask=col < DIM, other=0.0)
    return tile


@triton.jit
def store_rows(
    base_ptr, first, length, stride_row, tile, BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """Stores the part of a [BLOCK, BLOCK_DIM] tile that exists: rows before length, columns before DIM."""
    row = tl.arange(0, BLOCK)[:, None]
    col = tl.arange(0, BLOCK_DIM)[None, :]
    ptrs = base_ptr + tl.cast(first, tl.int64) * stride_row + (row.to(tl.int64) * stride_row + col)
    tl.store(ptrs, tile.to(base_ptr.dtype.element_ty), mask=(first + row < length) & (col < DIM))


@triton.jit
def attend(
    acc, row_max, row_sum, q, n_start, n_stop, full_start, full_stop, k_source, k_ptr, k_stride_row, v_source, v_ptr,
    v_stride_row,
    batch_index, head_kv, start_k, b, h, head_index, rows, length_q, length_k, left, right,
    scale, param, slope, bias_ptr, bias_stride_row, bias_stride_col, mask_ptr, mask_stride_row, mask_stride_col,
    rng_state_ptr, dropout_threshold,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_ALIBI: tl.constexpr,
    SCORE_MOD: tl.constexpr, TRANSFORMED: tl.constexpr, INPUT_PRECISION: tl.constexpr, TMA: tl.constexpr,
    MASKED: tl.constexpr, BRANCH: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Takes key blocks n_start ... n_stop - 1 into the state of BLOCK_M rows.

    MASKED applies the band and the end of the keys, with BRANCH outside blocks full_start ... full_stop - 1 only;
    without MASKED every row keeps every key. CAREFUL takes 0 for every infinity and NaN of v; ``poison.spread`` then
    adds what they do.
    """
    for n in tl.range(n_start, n_stop, num_stages=1 if CAREFUL else None):
        first = n * BLOCK_N
        cols = first + tl.arange(0, BLOCK_N)[None, :]
        k = load_rows(k_source, k_ptr, batch_index, head_kv, start_k, first, length_k, k_stride_row,
                      BLOCK_N, HEAD_DIM, BLOCK_D, MASKED, TMA)  # fmt: skip
        x = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)  # [BLOCK_M, BLOCK_N] float32
        scale_log2 = scale * softmax.LOG2_E
        if TRANSFORMED:
            x, _ = scores.transform(x, scale, param, slope, bias_ptr, bias_stride_row, bias_stride_col, b, h, rows,
                                    cols, length_q, length_k, SCORE_MOD, None, HAS_ALIBI)  # fmt: skip
            scale_log2 = softmax.LOG2_E
        edge = MASKED
        if BRANCH:
            edge = (n < full_start) | (n >= full_stop)
        if edge:
            x = mask.band_scores(x, rows + (length_k - length_q), cols, length_k, left, right, HAS_LEFT, HAS_RIGHT)
        x = scores.select_mask(
            x, mask_ptr, mask_stride_row, mask_stride_col, rows, cols, length_q, length_k, float("-inf")
        )
        probs, rescale, row_max, row_sum = softmax.update(row_max, row_sum, x, scale_log2, True)
        if rng_state_ptr is not None:
            key_blocks = n * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)[None, :]
            kept = dropout.keep(rng_state_ptr, dropout_threshold, head_index, rows, key_blocks)
            probs = tl.where(kept, probs, 0.0)
        v = load_rows(v_source, v_ptr, batch_index, head_kv, start_k, first, length_k, v_stride_row,
                      BLOCK_N, HEAD_DIM_V, BLOCK_DV, MASKED, TMA)  # fmt: skip
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
    b, h, m_block, start_q, length_q, start_k, length_k = locate(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, seqlen_q, seqlen_k, num_heads_q, heads_at_once,
        BLOCK_M, False, HAS_RIGHT,
    )  # fmt: skip
    m_first = m_block * BLOCK_M
    if m_first >= length_q:
        return
    VARLEN: tl.constexpr = cu_seqlens_q_ptr is not None
    HAS_ALIBI: tl.constexpr = alibi_ptr is not None
    head_kv = h // group_size
    rows = m_first + tl.arange(0, BLOCK_M)
    batch_index = b
    if VARLEN:
        batch_index = 0
    slope = scores.slope_of(alibi_ptr, alibi_stride_b, b, h)
    mask_at = None if mask_ptr is None else scores.plane_of(mask_ptr, b, h, mask_stride_b, mask_stride_head)
    bias_at = None if bias_ptr is None else scores.plane_of(bias_ptr, b, h, bias_stride_b, bias_stride_head)
    k_at = sequence.base(k_ptr, b, start_k, head_kv, k_stride_b, k_stride_row, k_stride_head)
    v_at = sequence.base(v_ptr, b, start_k, head_kv, v_stride_b, v_stride_row, v_stride_head)
    q_at = sequence.base(q_ptr, b, start_q, h, q_stride_b, q_stride_row, q_stride_head)
    # Not by descriptor, here and in the backward: what that brings before a loop stays in registers all along.
    q = load_rows(q_at, q_at, batch_index, h, start_q, m_first, length_q, q_stride_row,
                  BLOCK_M, HEAD_DIM, BLOCK_D, True, False)  # fmt: skip

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
            acc, row_max, row_sum, q, n_start, n_stop, n_full_min, n_full_max, k_source, k_at, k_stride_row, v_source,
            v_at, v_stride_row,
            batch_index, head_kv, start_k, b, h, b * num_heads_q + h, rows[:, None], length_q, length_k, left, right,
            scale, param, slope, bias_at, bias_stride_row, bias_stride_col, mask_at, mask_stride_row, mask_stride_col,
            rng_state_ptr, dropout_threshold, HEAD_DIM, HEAD_DIM_V, poison.STEP if phase == 3 else BLOCK_N, BLOCK_D,
            BLOCK_DV, HAS_LEFT, HAS_RIGHT, HAS_ALIBI, SCORE_MOD, TRANSFORMED, INPUT_PRECISION,
            TMA and phase != 3 and not (VARLEN and phase != 1), MASKED=phase != 1,
            BRANCH=ONE_LOOP and phase != 3 and not MASK_ALL, CAREFUL=phase == 3,
        )  # fmt: skip

    out, lse = finish(acc, row_max, row_sum, sinks_ptr, h, b < batch, keep_scale)
    out_stride_row = num_heads_q * HEAD_DIM_V
    out_at = out_ptr + (tl.cast(batch_index, tl.int64) * seqlen_q + start_q) * out_stride_row + h * HEAD_DIM_V
    store_rows(out_at, m_first, length_q, out_stride_row, out, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    lse_at = lse_ptr + (tl.cast(batch_index, tl.int64) * num_heads_q + h) * seqlen_q + start_q
    tl.store(lse_at + rows, lse, mask=rows < length_q)
    if leaked:
        tl.debug_barrier()  # the same elements are stored again, perhaps by other threads
        poison.spread(
            out_at, out_stride_row, m_first, length_q, (lse == lse)[:, None], v_at, v_stride_row, n_min * BLOCK_N,
            n_max * BLOCK_N, length_k, length_q, length_k, left, right, mask_at, mask_stride_row, mask_stride_col,
            HEAD_DIM_V, BLOCK_M, HAS_LEFT, HAS_RIGHT, False, False,
        )  # fmt: skip


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
