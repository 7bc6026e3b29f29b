"""The kernel of ``merge``."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device import softmax


@triton.jit
def merge_states(a, b, merged, shape):
    """Writes the ``State`` merged of two others, a and b."""
    DIM: tl.constexpr = shape.DIM
    row = tl.program_id(0) * shape.ROWS + tl.arange(0, shape.ROWS)
    exists = row < shape.rows
    token, h = row // shape.num_heads, row % shape.num_heads
    lse_at = (token // shape.seqlen * shape.num_heads + h).to(tl.int64) * shape.seqlen + token % shape.seqlen
    col = tl.arange(0, shape.BLOCK_DIM)[None, :]
    at, inside = row.to(tl.int64)[:, None] * DIM + col, exists[:, None] & (col < DIM)
    out, lse = softmax.merge(
        tl.load(a.out + at, mask=inside, other=0.0).to(tl.float32),
        tl.load(a.lse + lse_at, mask=exists, other=float("-inf")),
        tl.load(b.out + at, mask=inside, other=0.0).to(tl.float32),
        tl.load(b.lse + lse_at, mask=exists, other=float("-inf")),
    )
    tl.store(merged.out + at, out.to(merged.out.dtype.element_ty), mask=inside)
    tl.store(merged.lse + lse_at, lse, mask=exists)
