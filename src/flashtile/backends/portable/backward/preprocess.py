"""What runs before and after the backward's kernels: delta and lse in base 2; sums over gqa_splits."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device import softmax


@triton.jit
def prepare_rows(results, douts, of_rows, BLOCK_M: tl.constexpr):
    """Computes delta and lse of BLOCK_M rows of one head, as ``RowTerms`` has them.

    That lse of an empty row and of the rows from ``length`` on is +inf, so that their probabilities are 0 without a
    mask; their delta is 0, whatever dout contains there.
    """
    DIM: tl.constexpr = douts.DIM
    num_heads, stride_head = results.num_heads_q, of_rows.stride_head
    num_blocks = stride_head // BLOCK_M
    pid = tl.program_id(0)
    h = pid // num_blocks % num_heads
    b = (pid // num_blocks // num_heads).to(tl.int64)
    i = (pid % num_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = i < results.length
    col = tl.arange(0, douts.BLOCK_DIM)[None, :]
    inside = exists[:, None] & (col < DIM)
    out_at = results.out + ((b * results.length + i) * num_heads + h)[:, None] * DIM + col
    out = tl.load(out_at, mask=inside, other=0.0)
    dout_at = b * douts.stride_b + i * douts.stride_row + h * douts.stride_head
    dout = tl.load(douts.ptr + dout_at[:, None] + col, mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if results.dlse is not None:
        dlse_at = results.dlse + b * results.stride_b + h * results.stride_head + i * results.stride_row
        delta -= tl.load(dlse_at, mask=exists, other=0.0)
    LARGE: tl.constexpr = of_rows.rest is not None
    lse = softmax.load_lse(results.lse, (b * num_heads + h) * results.length + i, exists, LARGE)
    at = (b * num_heads + h) * stride_head + i
    if LARGE:
        empty = lse[0] == float("-inf")
        tl.store(of_rows.delta + at, tl.where(empty, 0.0, delta))
        tl.store(of_rows.lse + at, tl.where(empty, float("inf"), lse[0]))
        tl.store(of_rows.rest + at, lse[1] * softmax.LOG2_E)
    else:
        tl.store(of_rows.delta + at, tl.where(lse == float("-inf"), 0.0, delta))
        tl.store(of_rows.lse + at, softmax.lse_log2_of(lse))


@triton.jit
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
