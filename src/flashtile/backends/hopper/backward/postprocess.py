"""From the Hopper backward's sums in the workspace to the gradients, in plain Triton; see ``workspace``."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.hopper.backward.workspace import has_keys, last_first, locate


@triton.jit(do_not_specialize=["cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "batch", "seqlen_q", "num_heads_q", "scale"])
def finish_dq(
    dq_ptr, out_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, seqlen_q, num_heads_q, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, VARLEN: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """64 rows of dq from the workspace, times ``scale``, to out, or added to it: contiguous, like q.

    With cu_seqlens_k_ptr, sequences without keys add nothing.
    """
    pid = last_first()
    parts: tl.constexpr = BLOCK_M // 64
    b, h, start, first, length = locate(
        pid // parts, cu_seqlens_q_ptr, batch, seqlen_q, num_heads_q, BLOCK_M, VARLEN
    )  # fmt: skip
    at = first + pid % parts * 64 + tl.arange(0, 64)
    exists = first + pid % parts * 64 < length
    if cu_seqlens_k_ptr is not None:
        exists = exists & has_keys(cu_seqlens_k_ptr, b, batch)
    if exists:
        # A power of two of columns, of which the last may not be there.
        cols: tl.constexpr = triton.next_power_of_2(BLOCK_D)
        place = tl.arange(0, 64 * cols)
        held = tl.load(dq_ptr + tl.cast(pid, tl.int64) * (64 * BLOCK_D) + place, mask=place < 64 * BLOCK_D)
        # Columns by 8; warp, row of 8 and column pair of a thread; rows 8 apart; the two columns of a pair.
        held = tl.reshape(held, [cols // 8, 4, 8, 4, 2, 2])
        dq = tl.reshape(tl.permute(held, (1, 4, 2, 0, 3, 5)), [64, cols]) * scale
        b64 = tl.cast(b, tl.int64)
        if VARLEN:
            b64 = b64 * 0
        row = b64 * seqlen_q + tl.cast(start, tl.int64) + at
        col = tl.arange(0, cols)[None, :]
        out_at = out_ptr + (row * num_heads_q + h)[:, None] * HEAD_DIM + col
        inside = (at < length)[:, None] & (col < HEAD_DIM)
        if ADDS:
            dq += tl.load(out_at, mask=inside, other=0.0)
        tl.store(out_at, dq, mask=inside)


@triton.jit(do_not_specialize=["heads", "subgroups"])
def sum_subgroups(
    dk_sums_ptr, dv_sums_ptr, dk_ptr, dv_ptr, heads, subgroups,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Sums of subgroups, which follow one another, in order: dk and dv of 32 of all rows of key heads.

    Pointers are None for what is not wanted. ADDS: to what is there.
    """
    at = tl.program_id(0) * 32 + tl.arange(0, 32)
    exists = (at < heads)[:, None]
    at = at.to(tl.int64)[:, None]
    if dk_ptr is not None:
        _sum(dk_sums_ptr, dk_ptr, at, exists, subgroups, HEAD_DIM, ADDS)
    if dv_ptr is not None:
        _sum(dv_sums_ptr, dv_ptr, at, exists, subgroups, HEAD_DIM_V, ADDS)


@triton.jit
def _sum(sums_ptr, out_ptr, at, exists, subgroups, HEAD_DIM: tl.constexpr, ADDS: tl.constexpr):
    col = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
    inside = exists & (col < HEAD_DIM)
    sums_at = sums_ptr + at * subgroups * HEAD_DIM + col
    total = tl.load(sums_at, mask=inside, other=0.0)
    for i in range(1, subgroups):
        total += tl.load(sums_at + i * HEAD_DIM, mask=inside, other=0.0)
    if ADDS:
        total += tl.load(out_ptr + at * HEAD_DIM + col, mask=inside, other=0.0)
    tl.store(out_ptr + at * HEAD_DIM + col, total, mask=inside)
