"""What the Hopper backward needs of each row before its main kernel, in plain Triton; see ``workspace``."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device import softmax
from flashtile.backends.hopper.backward.workspace import has_keys, last_first, locate

_RUN_TIME = ["cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "sums_size", "batch", "seqlen_q", "num_heads_q"]
# Numbers of the sums of dk and dv that a program sets to 0 at a time.
_ZEROS = tl.constexpr(4096)


@triton.jit(do_not_specialize=_RUN_TIME)
def prepare_rows(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, rows_ptr, dq_ptr, counter_ptr,
    dq_order_ptr, sums_ptr, dout_stride_b, dout_stride_row, dout_stride_head, dlse_stride_b, dlse_stride_head,
    dlse_stride_row, sums_size, batch, seqlen_q, num_heads_q,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Fills a row block's rows, and zeroes its dq, its dq_order, the counter of tiles and the sums of dk and dv.

    out and lse are contiguous, of the backend's shapes. A row past its sequence or without keys gets (inf, 0): its
    probabilities are then 0 without a mask, whatever lies in its place. None: dq_ptr if dq is not wanted, dq_order_ptr
    if its sums may be added in any order, sums_ptr without gqa_splits; with cu_seqlens_k_ptr, sequences without keys
    are skipped.
    """
    pid = last_first()
    b, h, start, first, length = locate(pid, cu_seqlens_q_ptr, batch, seqlen_q, num_heads_q, BLOCK_M, VARLEN)
    tl.store(counter_ptr, 0, mask=pid == 0)
    if sums_ptr is not None:
        for place in range(pid, tl.cdiv(sums_size, _ZEROS), tl.num_programs(0)):
            at = tl.cast(place, tl.int64) * _ZEROS + tl.arange(0, _ZEROS)
            tl.store(sums_ptr + at, tl.zeros([_ZEROS], tl.float32), mask=at < sums_size)
    if cu_seqlens_k_ptr is not None:  # noqa: SIM102
        if not has_keys(cu_seqlens_k_ptr, b, batch):
            return
    b64, start64 = tl.cast(b, tl.int64), tl.cast(start, tl.int64)
    at = first + tl.arange(0, BLOCK_M)
    exists = at < length
    if VARLEN:
        exists = exists & (b < batch)
        b64 = b64 * 0
    i = start64 + at
    col = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
    inside = exists[:, None] & (col < HEAD_DIM)
    out_at = out_ptr + ((b64 * seqlen_q + i) * num_heads_q + h)[:, None] * HEAD_DIM + col
    out = tl.load(out_at, mask=inside, other=0.0)
    dout_row = b64 * dout_stride_b + i * dout_stride_row + h * dout_stride_head
    dout = tl.load(dout_ptr + dout_row[:, None] + col, mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if dlse_ptr is not None:
        dlse_at = dlse_ptr + b64 * dlse_stride_b + h * dlse_stride_head + i * dlse_stride_row
        delta -= tl.load(dlse_at, mask=exists, other=0.0)
    lse = tl.load(lse_ptr + (b64 * num_heads_q + h) * seqlen_q + i, mask=exists, other=float("-inf"))
    row_at = rows_ptr + tl.cast(pid, tl.int64) * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
    tl.store(row_at, softmax.lse_log2_of(lse))
    tl.store(row_at + BLOCK_M, tl.where(lse == float("-inf"), 0.0, delta))
    if dq_ptr is not None:
        size: tl.constexpr = triton.next_power_of_2(BLOCK_M * BLOCK_D)
        place = tl.arange(0, size)
        dq_at = dq_ptr + tl.cast(pid, tl.int64) * (BLOCK_M * BLOCK_D) + place
        tl.store(dq_at, tl.zeros([size], tl.float32), mask=place < BLOCK_M * BLOCK_D)
    if dq_order_ptr is not None:
        tl.store(dq_order_ptr + pid, 0)
