"""What runs before and after the backward's kernels: delta and lse in base 2; sums over gqa_splits."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device import softmax


@triton.jit
def prepare_rows(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, lse_log2_ptr, dout_stride_b, dout_stride_row, dout_stride_head,
    dlse_stride_b, dlse_stride_head, dlse_stride_row, batch, seqlen_q, num_heads_q, row_pitch,
    HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Computes delta and lse_log2 (lse in base 2) of BLOCK_M rows of one head.

    out is contiguous ``(batch, seqlen_q, num_heads_q, HEAD_DIM_V)``; delta and lse_log2 are ``(batch, num_heads_q,
    row_pitch)``, row_pitch a multiple of BLOCK_M. lse_log2 of an empty row and of the rows from seqlen_q on is +inf,
    so that their probabilities are 0 without a mask; their delta is 0, whatever dout contains there.
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
    tl.store(lse_log2_ptr + at, softmax.lse_log2_of(lse))


@triton.jit(do_not_specialize=["total", "splits"])
def sum_gqa_splits(splits_ptr, sum_ptr, total, splits, DIM: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums ``(rows, splits, DIM)`` float32 over the splits, in order: BLOCK of a gradient's ``total`` numbers."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    found = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        found += tl.load(splits_ptr + (at // DIM * splits + split) * DIM + at % DIM, mask=inside, other=0.0)
    if ADDS:
        found += tl.load(sum_ptr + at, mask=inside, other=0.0)
    tl.store(sum_ptr + at, found.to(sum_ptr.dtype.element_ty), mask=inside)
