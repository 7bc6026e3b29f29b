"""From the Hopper backward's sums in the workspace to the gradients, in plain Triton; see ``workspace``."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.hopper.backward.workspace import blocks_per_head, has_keys, last_first, locate


@triton.jit
def finish_gradient(sums, out, sequences, others, num_heads, scale, ADDS: tl.constexpr):
    """64 rows of a gradient from the workspace, times ``scale``, to ``out``, or added to it: contiguous, like q or k.

    ``records.Sums`` are added up in order. With others, cu_seqlens of the keys where rows are queries, sequences
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
        num_blocks = blocks_per_head(sequences.length, sequences.count, BLOCK_M, VARLEN)
        block = tl.cast(index // num_blocks, tl.int64) * sums.count * num_blocks + index % num_blocks
        # A power of two of columns, of which the last may not be there.
        cols: tl.constexpr = triton.next_power_of_2(BLOCK_D)
        place = tl.arange(0, 64 * cols)
        held_at = sums.ptr + (block * parts + pid % parts) * (64 * BLOCK_D) + place
        held = tl.load(held_at, mask=place < 64 * BLOCK_D)
        for i in range(1, sums.count):
            more = tl.cast(num_blocks, tl.int64) * i * (BLOCK_M * BLOCK_D)
            held += tl.load(held_at + more, mask=place < 64 * BLOCK_D)
        # Columns by 8; warp, row of 8 and column pair of a thread; rows 8 apart; the two columns of a pair.
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
