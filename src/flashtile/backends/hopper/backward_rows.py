"""What the Hopper backward does to rows before and after its main kernel, in plain Triton.

Both kernels share a workspace with the main kernel. It consists of row blocks of BLOCK_M rows of one head of one
sequence, so that no two sequences share one: block ``(b * num_heads_q + h) * cdiv(seqlen_q, BLOCK_M) + m`` if sequences
are dense; if they are packed, block ``h * num_blocks + n`` with n and num_blocks as ``scheduler.packed_tile`` has them.
A row block has

    rows    [2, BLOCK_M] float32: what is subtracted from base-2 scores, and delta = rowsum(dout * out) - dlse
    dq      [BLOCK_M / 64, BLOCK_D / 8, 128, 4] float32: 64 rows at a time as a warpgroup's accumulators hold them, so
            that adding them up needs no shared memory and touches whole cache lines
    flags   [BLOCK_M / 64] int32, if there is a band: what 64 rows hold that may spoil gradients from behind its mask,
            by bits; one more in front of all row blocks says whether any is set (``backward_mend``)
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.vocab import finite, scheduler, sequence, softmax

# Rows that share a flag, and its bits: an infinity or NaN among the queries, in dout; in dq, once it is there.
UNIT = tl.constexpr(64)
BAD_Q, BAD_DOUT, BAD_DQ = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)


@triton.jit
def blocks_a_head(seqlen, batch, BLOCK: tl.constexpr, VARLEN: tl.constexpr):
    """Blocks of one head of a sequence, or of all packed ones."""
    num_blocks = tl.cdiv(seqlen, BLOCK)
    if VARLEN:
        # As scheduler.packed_tile counts them: every sequence starts a block of its own.
        num_blocks = seqlen // BLOCK + batch + 1
    return num_blocks


@triton.jit
def first_block(b, start, h, seqlen_q, batch, num_heads_q, BLOCK_M: tl.constexpr, VARLEN: tl.constexpr):
    """The row block of row 0 of a head of a sequence, 64 bits wide."""
    num_blocks = tl.cast(blocks_a_head(seqlen_q, batch, BLOCK_M, VARLEN), tl.int64)
    block = (b * num_heads_q + h) * num_blocks
    if VARLEN:
        block = h * num_blocks + start // BLOCK_M + b
    return block


@triton.jit
def locate(
    block_index, cu_seqlens_q_ptr, batch, seqlen_q, num_heads_q, BLOCK_M: tl.constexpr, VARLEN: tl.constexpr
):  # fmt: skip
    """(b, h, start, first row, rows) of a row block; no rows behind the last packed sequence."""
    num_blocks = blocks_a_head(seqlen_q, batch, BLOCK_M, VARLEN)
    if VARLEN:
        h = block_index // num_blocks
        b, block = scheduler.packed_tile(cu_seqlens_q_ptr, batch, block_index % num_blocks, BLOCK_M)
    else:
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


@triton.jit
def flag_rows(
    q_ptr, q_row, dout_ptr, dout_row, delta, exists, flags_ptr, pid, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Stores a row block's flags of queries and dout, looking at them only if they may be bad.

    Where dout is, so is ``delta``, here rowsum(dout * out). Bad queries make out NaN, or the row has no score above
    -inf, so that out is 0; a softcap makes an infinite score finite.

    Args:
        q_ptr: q.
        q_row: [BLOCK_M] int64: where its rows begin.
        dout_ptr: dout.
        dout_row: The same of dout.
        delta: [BLOCK_M] float32.
        exists: [BLOCK_M] bool.
        flags_ptr: All flags.
        pid: The row block.
        HEAD_DIM: Columns.
        BLOCK_M: Rows.
        HAS_SOFTCAP: Whether there is a softcap.
    """
    suspect = exists & ((delta == 0.0) | ~finite.is_finite(delta))
    if HAS_SOFTCAP:
        suspect = exists
    bad_q, bad_dout = tl.zeros([BLOCK_M], tl.int32), tl.zeros([BLOCK_M], tl.int32)
    if tl.max(suspect.to(tl.int32), 0) > 0:
        # A few columns at a time, so that it takes no more registers than what comes before.
        for first in range(0, HEAD_DIM, 32):
            col = first + tl.arange(0, 32)[None, :]
            inside = exists[:, None] & (col < HEAD_DIM)
            q = tl.load(q_ptr + q_row[:, None] + col, mask=inside, other=0.0)
            bad_q = tl.maximum(bad_q, tl.max((~finite.is_finite(q)).to(tl.int32), 1))
            dout = tl.load(dout_ptr + dout_row[:, None] + col, mask=inside, other=0.0)
            bad_dout = tl.maximum(bad_dout, tl.max((~finite.is_finite(dout)).to(tl.int32), 1))
    parts: tl.constexpr = BLOCK_M // UNIT
    flags = BAD_Q * tl.max(tl.reshape(bad_q, [parts, UNIT]), 1)
    flags += BAD_DOUT * tl.max(tl.reshape(bad_dout, [parts, UNIT]), 1)
    tl.store(flags_ptr + 1 + pid * parts + tl.arange(0, parts), flags)
    tl.store(flags_ptr, 0, mask=pid == 0)


_RUN_TIME = ["flags_ptr", "cu_seqlens_q_ptr", "batch", "seqlen_q", "num_heads_q"]


@triton.jit(do_not_specialize=_RUN_TIME)
def prepare_rows(
    q_ptr, out_ptr, dout_ptr, lse_ptr, dlse_ptr, cu_seqlens_q_ptr, rows_ptr, dq_ptr, counter_ptr, turns_ptr, flags_ptr,
    q_stride_b, q_stride_row, q_stride_head, dout_stride_b, dout_stride_row, dout_stride_head, dlse_stride_b,
    dlse_stride_head, dlse_stride_row, batch, seqlen_q, num_heads_q,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, VARLEN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Fills a row block's rows and flags, and sets its dq, its turn and the counter of tiles to 0.

    out and lse are contiguous, of the backend's shapes. A row behind its sequence or without keys gets (inf, 0): its
    probabilities are then 0 without a mask, whatever lies in its place. turns_ptr is None without turns; flags_ptr,
    and with it q, if nothing is masked.
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
    dout_row = b64 * dout_stride_b + i * dout_stride_row + h * dout_stride_head
    dout = tl.load(dout_ptr + dout_row[:, None] + col, mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if flags_ptr is not None:
        q_row = b64 * q_stride_b + i * q_stride_row + h * q_stride_head
        flag_rows(q_ptr, q_row, dout_ptr, dout_row, delta, exists, flags_ptr, pid, HEAD_DIM, BLOCK_M, HAS_SOFTCAP)
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
    dq_ptr, out_ptr, flags_ptr, cu_seqlens_q_ptr, batch, seqlen_q, num_heads_q, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """64 rows of dq from the workspace, times ``scale``, to out: contiguous, like q. Flags those that hold a NaN."""
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
        if flags_ptr is not None:
            flags = tl.load(flags_ptr + 1 + pid)
            if finite.leaks(dq):
                flags = flags | BAD_DQ
                tl.store(flags_ptr + 1 + pid, flags)
            tl.store(flags_ptr, 1, mask=flags > 0)
