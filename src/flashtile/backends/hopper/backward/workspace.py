"""The workspace of the Hopper backward: its size, and in plain Triton which rows a row block of it has.

It consists of row blocks of BLOCK_M rows of one head of one sequence, so that no two sequences share one: block
``(b * num_heads_q + h) * cdiv(seqlen_q, BLOCK_M) + m`` if sequences are dense; if they are packed, block
``h * num_blocks + n`` with n and num_blocks as ``scheduler.packed_tile`` has them. A row block has

    rows    [2, BLOCK_M] float32: lse_log2 (lse in base 2), and delta = rowsum(dout * out) - dlse
    dq      [BLOCK_M / 64, BLOCK_D / 8, 128, 4] float32: 64 rows at a time as a warpgroup's accumulators hold them, so
            that adding them up needs no shared memory and touches whole cache lines

With gqa_splits, dk and dv are added up likewise, in blocks of a tile's keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashtile.backends.gpu.device import scheduler, sequence
from flashtile.backends.gpu.launch import Pointer
from flashtile.backends.hopper.backward import gqa_splits
from flashtile.backends.hopper.backward.config import Config
from flashtile.backends.hopper.backward.records import Work
from flashtile.call.problem import Problem, Tensors


class Workspace(NamedTuple):
    """What the kernels hand on to one another: one piece of memory, which takes the host one allocation.

    First come dq's sums in float32, padded to whole row blocks, if dq is wanted; then two float32 a row, then int32:
    the counter of tiles and, where those sums are ordered, dq_order, a semaphore for each row block; then the sums of
    dk and of dv in float32, with gqa_splits.

    Attributes:
        blocks: Row blocks.
        gqa_splits: Tiles that share the query heads of one key head.
        rows_at: Where the rows begin, in bytes; 0 without dq.
        counter_at: Where the counter is.
        dq_order_at: Where the semaphores begin, None where sums may be added in any order.
        sum_heads: Heads of the sums of dk and dv for each key head: one for each split where their order is fixed,
            else one to which all add.
        dk_at: Where the sums of dk begin, None without splits or if dk is not wanted.
        dv_at: The same for dv.
        floats: Its size, in float32.
    """

    blocks: int
    gqa_splits: int
    rows_at: int
    counter_at: int
    dq_order_at: int | None
    sum_heads: int
    dk_at: int | None
    dv_at: int | None
    floats: int

    @classmethod
    def of(cls, problem: Problem, config: Config, tensors: Tensors) -> Workspace:
        """Of a call with these queries, keys and values."""
        rows = tensors.q.shape[-3]
        if problem.varlen:
            blocks = scheduler.num_packed_tiles(rows, problem.batch, config.block_m) * problem.num_heads_q
        else:
            blocks = -(-rows // config.block_m) * problem.batch * problem.num_heads_q
        rows_at = 4 * blocks * config.block_m * config.block_d if problem.grads.q else 0
        counter_at = rows_at + 4 * blocks * 2 * config.block_m
        dq_order_at = counter_at + 16 if problem.grads.q and problem.deterministic else None
        end = counter_at + 16 if dq_order_at is None else dq_order_at + 16 * -(-blocks // 4)
        count = gqa_splits.choose(problem, config, tensors.k.shape[-3])
        sum_heads = count if problem.deterministic else 1
        keys = key_blocks(problem, config, tensors) * config.block_n * sum_heads
        dk_at = end if count > 1 and problem.grads.k else None
        end += 0 if dk_at is None else 4 * keys * config.block_d
        dv_at = end if count > 1 and problem.grads.v else None
        end += 0 if dv_at is None else 4 * keys * config.block_dv
        return cls(blocks, count, rows_at, counter_at, dq_order_at, sum_heads, dk_at, dv_at, end // 4)

    def record(self) -> Work:
        """The kernels' argument, as ``preprocess.prepare_rows`` takes it."""
        sums_at = self.dv_at if self.dk_at is None else self.dk_at
        return Work(
            Pointer(torch.float32, "work", self.rows_at),
            Pointer(torch.float32, "work") if self.rows_at else None,
            None,
            None if self.dq_order_at is None else Pointer(torch.int32, "work", self.dq_order_at),
            Pointer(torch.int32, "work", self.counter_at),
            None if sums_at is None else Pointer(torch.float32, "work", sums_at),
            None if sums_at is None else self.floats - sums_at // 4,
        )


def key_blocks(problem: Problem, config: Config, tensors: Tensors) -> int:
    """Tiles' blocks of keys of all key heads and sequences."""
    rows = tensors.k.shape[-3]
    if problem.varlen:
        return scheduler.num_packed_tiles(rows, problem.batch, config.block_n) * problem.num_heads_kv
    return -(-rows // config.block_n) * problem.batch * problem.num_heads_kv


@triton.jit
def blocks_per_head(seqlen, batch, BLOCK: tl.constexpr, VARLEN: tl.constexpr):
    """Blocks of one head of a sequence, or of all packed ones."""
    num_blocks = tl.cdiv(seqlen, BLOCK)
    if VARLEN:
        # As scheduler.packed_tile counts them: every sequence starts a block of its own.
        num_blocks = seqlen // BLOCK + batch + 1
    return num_blocks


@triton.jit
def locate(block_index, sequences, num_heads, BLOCK_M: tl.constexpr):
    """(b, h, start, first row, rows) of a row block; no rows past the last packed sequence."""
    VARLEN: tl.constexpr = sequences.cu_seqlens is not None
    num_blocks = blocks_per_head(sequences.length, sequences.count, BLOCK_M, VARLEN)
    head = block_index // num_blocks
    block = block_index % num_blocks
    if VARLEN:
        h = head
        b, block = scheduler.packed_tile(sequences.cu_seqlens, sequences.count, block, BLOCK_M)
    else:
        b, h = head // num_heads, head % num_heads
    start, length = sequence.sequence(sequences.cu_seqlens, b, sequences.count, sequences.length, VARLEN)
    return b, h, start, block * BLOCK_M, length


@triton.jit
def has_keys(cu_seqlens_k_ptr, b, batch):
    """Whether a packed sequence has keys; the rows past the last one have none."""
    bound = tl.load(cu_seqlens_k_ptr + b)
    return tl.load(cu_seqlens_k_ptr + tl.minimum(b + 1, batch)) > bound


@triton.jit
def last_first():
    """Programs from the last to the first.

    The main kernel goes through the workspace from the front: it finds what was prepared last in the cache, and leaves
    there what is to be finished first.
    """
    return tl.num_programs(0) - 1 - tl.program_id(0)
