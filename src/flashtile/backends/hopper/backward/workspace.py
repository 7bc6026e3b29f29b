"""The workspace of the Hopper backward, in plain Triton: which rows a row block of it has.

It consists of row blocks of BLOCK_M rows of one head of one sequence, so that no two sequences share one: block
``(b * num_heads_q + h) * cdiv(seqlen_q, BLOCK_M) + m`` if sequences are dense; if they are packed, block
``h * num_blocks + n`` with n and num_blocks as ``scheduler.packed_tile`` has them. A row block has

    rows    [2, BLOCK_M] float32: what is subtracted from base-2 scores, and delta = rowsum(dout * out) - dlse
    dq      [BLOCK_M / 64, BLOCK_D / 8, 128, 4] float32: 64 rows at a time as a warpgroup's accumulators hold them, so
            that adding them up needs no shared memory and touches whole cache lines
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.vocab import scheduler, sequence


@triton.jit
def blocks_per_head(seqlen, batch, BLOCK: tl.constexpr, VARLEN: tl.constexpr):
    """Blocks of one head of a sequence, or of all packed ones."""
    num_blocks = tl.cdiv(seqlen, BLOCK)
    if VARLEN:
        # As scheduler.packed_tile counts them: every sequence starts a block of its own.
        num_blocks = seqlen // BLOCK + batch + 1
    return num_blocks


@triton.jit
def locate(
    block_index, cu_seqlens_q_ptr, batch, seqlen_q, num_heads_q, BLOCK_M: tl.constexpr, VARLEN: tl.constexpr
):  # fmt: skip
    """(b, h, start, first row, rows) of a row block; no rows past the last packed sequence."""
    num_blocks = blocks_per_head(seqlen_q, batch, BLOCK_M, VARLEN)
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
