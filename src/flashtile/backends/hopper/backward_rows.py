"""What the Hopper backward does to rows before and after its main kernel, in plain Triton.

Both kernels share a workspace with the main kernel. It consists of row blocks of BLOCK_M rows of one head of one
sequence, so that no two sequences share one: block ``(b * num_heads_q + h) * cdiv(seqlen_q, BLOCK_M) + m`` if sequences
are dense; if they are packed, block ``h * num_blocks + n`` with n and num_blocks as ``scheduler.packed_tile`` has them.
A row block has

    rows    [2, BLOCK_M] float32: what is subtracted from base-2 scores, and delta = rowsum(dout * out) - dlse
    dq      [BLOCK_M / 64, BLOCK_D / 8, 128, 4] float32: 64 rows at a time as a warpgroup's accumulators hold them, so
            that adding them up needs no shared memory and touches whole cache lines
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.vocab import scheduler, sequence, softmax


@triton.jit
def locate(
    block_index, cu_seqlens_q_ptr, batch, seqlen_q, num_heads_q, BLOCK_M: tl.constexpr, VARLEN: tl.constexpr
):  # fmt: skip
    """(b, h, start, first row, rows) of a row block; no rows behind the last packed sequence."""
    if VARLEN:
        num_blocks = seqlen_q // BLOCK_M + batch + 1
        h = block_index // num_blocks
        b, block = scheduler.packed_tile(cu_seqlens_q_ptr, batch, block_index % num_blocks, BLOCK_M)
    else:
        num_blocks = tl.cdiv(seqlen_q, BLOCK_M)
        head = block_index // num_blocks
        block = block_index % num_blocks
        b, h = head // num_heads_q, head % num_heads_q
    start, length = sequence.sequence(cu_seqlens_q_ptr, b, batch, seqlen_q, VARLEN)
    return b, h, start, block * BLOCK_M, length


@triton.jit
def last_first():
    """Programs from the last to the first.

    The main kernel goes through the workspace from the front: it finds what was prepared last in the cache, and leaves
    there what is to be finished first.
    """
    return tl.num_programs(0) - 1 - tl.program_id(0)


_RUN_TIME = ["cu_seqlens_q_ptr", "batch", "seqlen_q", "num_heads_q"]


@triton.jit(do_not_specialize=_RUN_TIME)
def prepare_rows(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, cu_seqlens_q_ptr, rows_ptr, dq_ptr, counter_ptr, turns_ptr,
    dout_stride_b, dout_stride_row, dout_stride_head, dlse_stride_b, dlse_stride_head, dlse_stride_row,
    batch, seqlen_q, num_heads_q,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Fills a row block's rows, and sets its dq, its turn (None without turns) and the counter of tiles to 0.

    out and lse are contiguous, of the backend's shapes. A row behind its sequence or without keys gets (inf, 0): its
    probabilities are then 0 without a mask, whatever lies in its place.
    """
    pid = last_first()
    b, h, start, first, length = locate(pid, cu_seqlens_q_ptr, batch, seqlen_q, num_heads_q, BLOCK_M, VARLEN)
    b64, start64 = tl.cast(b, tl.int64), tl.cast(start, tl.int64)
    at = first + tl.arange(0, BLOCK_M)
    exists = at < length
    if VARLEN:
        exists = exists & (b < batch)
        b64 = b64 * 0
    i = start64 + at
    col = tl.arange(0, BLOCK_D)[None, :]
    inside = exists[:, None] & (col < HEAD_DIM)
    out_at = out_ptr + ((b64 * seqlen_q + i) * num_heads_q + h)[:, None] * HEAD_DIM + col
    out = tl.load(out_at, mask=inside, other=0.0)
    dout_at = dout_ptr + (b64 * dout_stride_b + i * dout_stride_row + h * dout_stride_head)[:, None] + col
    dout = tl.load(dout_at, mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if dlse_ptr is not None:
        dlse_at = dlse_ptr + b64 * dlse_stride_b + h * dlse_stride_head + i * dlse_stride_row
        delta -= tl.load(dlse_at, mask=exists, other=0.0)
    lse = tl.load(lse_ptr + (b64 * num_heads_q + h) * seqlen_q + i, mask=exists, other=float("-inf"))
    row_at = rows_ptr + tl.cast(pid, tl.int64) * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
    tl.store(row_at, softmax.backward_origin(lse))
    tl.store(row_at + BLOCK_M, tl.where(lse == float("-inf"), 0.0, delta))
    size: tl.constexpr = BLOCK_M * BLOCK_D
    tl.store(dq_ptr + tl.cast(pid, tl.int64) * size + tl.arange(0, size), tl.zeros([size], tl.float32))
    if turns_ptr is not None:
        tl.store(turns_ptr + pid, 0)
    tl.store(counter_ptr, 0, mask=pid == 0)


@triton.jit(do_not_specialize=[*_RUN_TIME, "scale"])
def finish_dq(
    dq_ptr, out_ptr, cu_seqlens_q_ptr, batch, seqlen_q, num_heads_q, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """64 rows of dq from the workspace, times ``scale``, to out: contiguous, like q."""
    pid = last_first()
    parts: tl.constexpr = BLOCK_M // 64
    b, h, start, first, length = locate(
        pid // parts, cu_seqlens_q_ptr, batch, seqlen_q, num_heads_q, BLOCK_M, VARLEN
    )  # fmt: skip
    at = first + pid % parts * 64 + tl.arange(0, 64)
    if first + pid % parts * 64 < length:
        size: tl.constexpr = 64 * BLOCK_D
        held = tl.load(dq_ptr + tl.cast(pid, tl.int64) * size + tl.arange(0, size))
        # Columns by 8; warp, row of 8 and column pair of a thread; rows 8 apart; the two columns of a pair.
        held = tl.reshape(held, [BLOCK_D // 8, 4, 8, 4, 2, 2])
        dq = tl.reshape(tl.permute(held, (1, 4, 2, 0, 3, 5)), [64, BLOCK_D]) * scale
        b64 = tl.cast(b, tl.int64)
        if VARLEN:
            b64 = b64 * 0
        row = b64 * seqlen_q + tl.cast(start, tl.int64) + at
        col = tl.arange(0, BLOCK_D)[None, :]
        out_at = out_ptr + (row * num_heads_q + h)[:, None] * HEAD_DIM + col
        tl.store(out_at, dq, mask=(at < length)[:, None] & (col < HEAD_DIM))
