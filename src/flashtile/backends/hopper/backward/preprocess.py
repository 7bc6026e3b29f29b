"""What the Hopper backward needs of each row before its main kernel, in plain Triton; see ``workspace``."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device import softmax
from flashtile.backends.hopper.backward.workspace import has_keys, last_first, locate

# Numbers of the sums of dk and dv that a program sets to 0 at a time.
_ZEROS = tl.constexpr(4096)


@triton.jit
def prepare_rows(results, cu_seqlens_k, work, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Fills a row block's rows, and zeroes its dq, its dq_order, the counter of tiles and the sums of dk and dv.

    A row past its sequence or without keys gets (inf, 0): its probabilities are then 0 without a mask, whatever lies in
    its place. With cu_seqlens_k, sequences without keys are skipped. BLOCK_D: columns of a row block's dq.
    """
    DIM: tl.constexpr = results.dout.DIM
    VARLEN: tl.constexpr = results.queries.cu_seqlens is not None
    HAS_DLSE: tl.constexpr = results.dlse is not None
    pid = last_first()
    seqlen_q, num_heads = results.queries.length, results.num_heads_q
    b, h, start, first, length = locate(pid, results.queries, num_heads, BLOCK_M)
    tl.store(work.counter, 0, mask=pid == 0)
    if work.sums is not None:
        for place in range(pid, tl.cdiv(work.sums_size, _ZEROS), tl.num_programs(0)):
            at = tl.cast(place, tl.int64) * _ZEROS + tl.arange(0, _ZEROS)
            tl.store(work.sums + at, tl.zeros([_ZEROS], tl.float32), mask=at < work.sums_size)
    if cu_seqlens_k is not None:  # noqa: SIM102
        if not has_keys(cu_seqlens_k, b, results.queries.count):
            return
    b64, start64 = tl.cast(b, tl.int64), tl.cast(start, tl.int64)
    at = first + tl.arange(0, BLOCK_M)
    exists = at < length
    if VARLEN:
        exists = exists & (b < results.queries.count)
        b64 = b64 * 0
    i = start64 + at
    col = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
    inside = exists[:, None] & (col < DIM)
    out_at = results.out + ((b64 * seqlen_q + i) * num_heads + h)[:, None] * DIM + col
    out = tl.load(out_at, mask=inside, other=0.0)
    dout_row = b64 * results.dout.stride_b + i * results.dout.stride_row + h * results.dout.stride_head
    dout = tl.load(results.dout.ptr + dout_row[:, None] + col, mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        dlse_at = results.dlse + b64 * results.stride_b + h * results.stride_head + i * results.stride_row
        delta -= tl.load(dlse_at, mask=exists, other=0.0)
    lse = tl.load(results.lse + (b64 * num_heads + h) * seqlen_q + i, mask=exists, other=float("-inf"))
    row_at = work.rows + tl.cast(pid, tl.int64) * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
    tl.store(row_at, softmax.lse_log2_of(lse))
    tl.store(row_at + BLOCK_M, tl.where(lse == float("-inf"), 0.0, delta))
    if work.dq is not None:
        size: tl.constexpr = triton.next_power_of_2(BLOCK_M * BLOCK_D)
        place = tl.arange(0, size)
        dq_at = work.dq + tl.cast(pid, tl.int64) * (BLOCK_M * BLOCK_D) + place
        tl.store(dq_at, tl.zeros([size], tl.float32), mask=place < BLOCK_M * BLOCK_D)
    if work.dq_order is not None:
        tl.store(work.dq_order + pid, 0)
