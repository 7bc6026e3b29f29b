"""Merges two attention states on a GPU in one pass over their outputs, as ``flashtile.core.states.merge``."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtile.backends.gpu.device import softmax
from flashtile.backends.gpu.host import Step, run
from flashtile.backends.gpu.launch import Launch, Pointer, named

_ROWS, _OPERANDS = 16, ("a", "lse_a", "b", "lse_b", "out", "lse")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit(do_not_specialize=["rows", "seqlen", "num_heads"])
def merge_states(
    a_ptr, lse_a_ptr, b_ptr, lse_b_ptr, out_ptr, lse_ptr, rows, seqlen, num_heads, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merges ROWS rows of contiguous outputs (batch, seqlen, num_heads, DIM); lse is (batch, num_heads, seqlen)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    token, h = row // num_heads, row % num_heads
    lse_at = (token // seqlen * num_heads + h).to(tl.int64) * seqlen + token % seqlen
    col = tl.arange(0, BLOCK_DIM)[None, :]
    at, inside = row.to(tl.int64)[:, None] * DIM + col, exists[:, None] & (col < DIM)
    out, lse = softmax.merge(
        tl.load(a_ptr + at, mask=inside, other=0.0).to(tl.float32),
        tl.load(lse_a_ptr + lse_at, mask=exists, other=float("-inf")),
        tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32),
        tl.load(lse_b_ptr + lse_at, mask=exists, other=float("-inf")),
    )
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + lse_at, lse, mask=exists)


def can_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> bool:
    """Whether the kernel takes these: not float64, contiguous, on 16 bytes, fewer than 2^31 rows."""
    every = (out_a, lse_a, out_b, lse_b)
    return (
        out_a.dtype in _FLOATS
        and out_b.dtype in _FLOATS
        and lse_a.dtype == lse_b.dtype == torch.float32
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in every)
        and 0 < lse_a.numel() < 2**31
        and out_a.numel() > 0
    )


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Out in out_a's dtype, and lse, of what ``can_merge`` accepts."""
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    step = _step(out_a.shape, out_a.dtype, out_b.dtype, out_a.device)
    run((step,), (out_a, lse_a, out_b, lse_b, out, lse))
    return out, lse


@functools.lru_cache(maxsize=1024)
def _step(shape: torch.Size, dtype_a: torch.dtype, dtype_b: torch.dtype, device: torch.device) -> Step:
    *_, seqlen, num_heads, dim = shape
    rows, floats = shape.numel() // dim, Pointer(torch.float32)
    arguments = {
        "a_ptr": Pointer(dtype_a),
        "lse_a_ptr": floats,
        "b_ptr": Pointer(dtype_b),
        "lse_b_ptr": floats,
        "out_ptr": Pointer(dtype_a),
        "lse_ptr": floats,
        "rows": rows,
        "seqlen": seqlen,
        "num_heads": num_heads,
        "DIM": dim,
        "BLOCK_DIM": max(16, 1 << (dim - 1).bit_length()),
        "ROWS": _ROWS,
    }
    launch = Launch(merge_states, -(-rows // _ROWS), named(arguments), {"num_warps": 4, "num_stages": 1})
    return Step(launch, _OPERANDS, device)
