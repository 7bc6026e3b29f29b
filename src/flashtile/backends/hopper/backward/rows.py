"""The workspace of the Hopper backward: its size, and the kernels before and after the main one, in plain Triton.

It consists of row blocks of BLOCK_M rows of one head of one sequence, so that no two sequences share one: block
``(b * num_heads_q + h) * cdiv(seqlen_q, BLOCK_M) + m`` if sequences are dense; if they are packed, block
``h * num_blocks + n`` with n and num_blocks as in ``tiles.packed_tile``. A row block has

    rows    [2, BLOCK_M] float32: lse_log2 (lse in base 2), and delta = rowsum(dout * out) - dlse
        dq      [BLOCK_M / 64, BLOCK_D / 8, 128, 4] float32: 64 rows at a time in the order of a warpgroup's
        accumulators, so that adding needs no shared memory and touches whole cache lines

With gqa_splits, dk and dv are summed in the same way, in blocks of a tile's keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device import softmax, tiles
from flashtile.backends.gpu.device.tiles import packed_tile
from flashtile.backends.hopper.backward import scheduler

# The number of elements of the sums of dk and dv that a program zeroes at a time.
_ZEROS = tl.constexpr(4096)


@triton.jit
def locate(block_index, sequences, num_heads, BLOCK_M: tl.constexpr):
    """(b, h, start, first row, rows) of a row block; 0 rows past the last packed sequence."""
    VARLEN: tl.constexpr = sequences.cu_seqlens is not None
    num_blocks = scheduler.blocks_per_head(sequences.length, sequences.count, BLOCK_M, VARLEN)
    head = block_index // num_blocks
    block = block_index % num_blocks
    if VARLEN:
        h = head
        b, block = packed_tile(sequences.cu_seqlens, sequences.count, block, BLOCK_M)
    else:
        b, h = head // num_heads, head % num_heads
    start, length = tiles.sequence(sequences.cu_seqlens, b, sequences.count, sequences.length, VARLEN)
    return b, h, start, block * BLOCK_M, length


@triton.jit
def has_keys(cu_seqlens_k_ptr, b, batch):
    """Whether a packed sequence has keys; the rows past the last one have none."""
    bound = tl.load(cu_seqlens_k_ptr + b)
    return tl.load(cu_seqlens_k_ptr + tl.minimum(b + 1, batch)) > bound


@triton.jit
def last_first():
    """The program's number, counted from the last to the first.

    The main kernel goes through the workspace from the front. So it finds in the cache the rows that were prepared
    last, and leaves there the rows that are finished first.
    """
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def leave_to_repair(lse, delta, at, exists, terms, block):
    """(lse, delta) without lost rows; the terms of these are stored from ``at`` on. lse is given in parts."""
    lost = exists & softmax.is_lost(lse[0]) & (lse[0] != float("-inf"))
    tl.store(terms.lse + at, tl.where(lost, lse[0], float("inf")), mask=exists)
    tl.store(terms.rest + at, lse[1] * softmax.LOG2_E, mask=exists)
    tl.store(terms.delta + at, tl.where(lost, delta, 0.0), mask=exists)
    tl.store(terms.flags + block, tl.max(lost.to(tl.int32), 0))
    return tl.where(lost, float("-inf"), lse[0]), delta


@triton.jit
def prepare_rows(results, cu_seqlens_k, work, terms, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Fills a row block's rows, and zeroes its dq, its dq_order, the counter of tiles and the sums of dk and dv.

    A row past its sequence or without keys gets (inf, 0): its probabilities are then 0 without a mask, whatever its
    memory contains. So does a row that ``softmax.is_lost``; its terms go to ``terms``, the portable backend's
    ``RowTerms``, for a repair; None without ``Problem.large_scores``. With cu_seqlens_k, sequences without keys are
    skipped. BLOCK_D: columns of a row block's dq.
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
    LARGE: tl.constexpr = terms is not None
    lse = softmax.load_lse(results.lse, (b64 * num_heads + h) * seqlen_q + i, exists, LARGE)
    if LARGE:
        lse, delta = leave_to_repair(lse, delta, (b64 * num_heads + h) * terms.stride_head + i, exists, terms, pid)
    row_at = work.rows + tl.cast(pid, tl.int64) * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
    tl.store(row_at, softmax.lse_log2_of(lse))
    tl.store(row_at + BLOCK_M, tl.where(lse == float("-inf"), 0.0, delta))
    if work.dq is not None:
        size: tl.constexpr = triton.next_power_of_2(BLOCK_M * BLOCK_D)
        place = tl.arange(0, size)
        dq_at = work.dq + tl.cast(pid, tl.int64) * (BLOCK_M * BLOCK_D) + place
        # Packed sequences leave up to a block each without rows, which nobody adds to or reads.
        if first < length:
            tl.store(dq_at, tl.zeros([size], tl.float32), mask=place < BLOCK_M * BLOCK_D)
    if work.dq_order is not None:
        tl.store(work.dq_order + pid, 0)


@triton.jit
def finish_gradient(sums, out, sequences, others, num_heads, scale, ADDS: tl.constexpr):
    """Writes 64 rows of a gradient from the workspace, multiplied by ``scale``, to ``out``, or adds them: contiguous.

    ``records.Sums`` are summed in order. With others, cu_seqlens of the keys if rows are queries, sequences
    without keys add nothing.
    """
    BLOCK_M: tl.constexpr = sums.BLOCK_M
    BLOCK_D: tl.constexpr = out.BLOCK_DIM
    DIM: tl.constexpr = out.DIM
    VARLEN: tl.constexpr = sequences.cu_seqlens is not None
    pid = last_first()
    parts: tl.constexpr = BLOCK_M // 64
    index = pid // parts
    b, h, start, first, length = locate(index, sequences, num_heads, BLOCK_M)
    at = first + pid % parts * 64 + tl.arange(0, 64)
    exists = first + pid % parts * 64 < length
    if others is not None:
        exists = exists & has_keys(others, b, sequences.count)
    if exists:
        num_blocks = scheduler.blocks_per_head(sequences.length, sequences.count, BLOCK_M, VARLEN)
        block = tl.cast(index // num_blocks, tl.int64) * sums.count * num_blocks + index % num_blocks
        # The number of columns is a power of two; the last ones may not exist.
        cols: tl.constexpr = triton.next_power_of_2(BLOCK_D)
        place = tl.arange(0, 64 * cols)
        held_at = sums.ptr + (block * parts + pid % parts) * (64 * BLOCK_D) + place
        held = tl.load(held_at, mask=place < 64 * BLOCK_D)
        for i in range(1, sums.count):
            more = tl.cast(num_blocks, tl.int64) * i * (BLOCK_M * BLOCK_D)
            held += tl.load(held_at + more, mask=place < 64 * BLOCK_D)
        # Dimensions: columns by 8; warp; row of 8; a thread's column pair; rows 8 apart; the two columns of a pair.
        held = tl.reshape(held, [cols // 8, 4, 8, 4, 2, 2])
        grad = tl.reshape(tl.permute(held, (1, 4, 2, 0, 3, 5)), [64, cols]) * scale
        b64 = tl.cast(b, tl.int64)
        if VARLEN:
            b64 = b64 * 0
        row = b64 * sequences.length + tl.cast(start, tl.int64) + at
        col = tl.arange(0, cols)[None, :]
        out_at = out.ptr + (row * num_heads + h)[:, None] * DIM + col
        inside = (at < length)[:, None] & (col < DIM)
        if ADDS:
            grad += tl.load(out_at, mask=inside, other=0.0)
        tl.store(out_at, grad, mask=inside)
