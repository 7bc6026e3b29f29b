"""Calls PyTorch's CPU flash kernel, and handles rows that keep no key. Lengths of zero are never passed to it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from flashtile.backends.cpu import plan

# With fewer rows a thread's scratch memory may not be a multiple of a cache line. Then the rounding of matrix products
# depends on the thread that computes them, and a result depends on the number of sequences in the call.
FEW_ROWS = 32
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def bias_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the kernel requires for an additive tile: float32 for 16-bit floats, else q's dtype."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    triangle: bool,
    softmax_scale: float,
    has_empty_rows: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of a rectangle.

    Args:
        q: ``(batch, num_heads_q, rows, head_dim)``, rows >= 1.
        k: ``(batch, num_heads_kv, keys, head_dim)``, keys >= 1.
        v: Like k.
        bias: ``(batch or 1, num_heads_q or 1, rows, keys)`` in ``bias_dtype``, or None.
        triangle: Keep key n for row m if ``n <= m``.
        softmax_scale: Factor of the scores.
        has_empty_rows: Whether some row's biases may all be -inf.

    Returns:
        out ``(batch, num_heads_q, rows, head_dim)`` and lse ``(batch, num_heads_q, rows)``, (0, -inf) for empty rows.
    """
    rows = q.shape[2]
    if rows < FEW_ROWS and torch.get_num_threads() > 1 and (more := -rows % _row_multiple(q, k)):
        # A bias with one row is the same for all rows.
        bias = bias if bias is None or bias.shape[2] == 1 else functional.pad(bias, (0, 0, 0, more))
        out, lse = _FORWARD(
            functional.pad(q, (0, 0, 0, more)), k, v, 0.0, triangle, attn_mask=bias, scale=softmax_scale
        )
        out, lse = out[:, :, :rows], lse[:, :, :rows]
        bias = bias if bias is None or bias.shape[2] == 1 else bias[:, :, :rows]
    else:
        out, lse = _FORWARD(q, k, v, 0.0, triangle, attn_mask=bias, scale=softmax_scale)
    if bias is None or not has_empty_rows:
        return out, lse
    # For a row with only -inf as biases the kernel writes lse 0.
    empty = (bias == -torch.inf).all(dim=-1)
    if not empty.any():
        return out, lse
    # There out is 0, or 0 times an element that is not finite.
    out = out if plan.all_finite(v) else out.masked_fill_(empty[..., None], 0.0)
    return out, torch.where(empty, -torch.inf, lse)


def _row_multiple(q: Tensor, k: Tensor) -> int:
    """A multiple for the number of rows: each thread's scratch memory is then a multiple of a cache line.

    The memory holds scores, two numbers and an output for each row, and for 16-bit floats probabilities in their dtype.
    """
    keys, head_dim = min(k.shape[2], 512), q.shape[3]
    numbers = 16 if q.dtype != torch.float64 else 8
    if q.dtype not in (torch.float32, torch.float64):
        return 2 * numbers
    return numbers // math.gcd(numbers, keys + 2 + head_dim)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    triangle: bool,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """A rectangle's contribution to the gradients, given the whole rows' out and lse.

    Probabilities are ``exp(score - lse)`` with the lse of all keys, so contributions add up. An empty row's lse must be
    +inf here, which makes its probabilities 0.

    dout is like out. out and lse belong to the rectangle's rows. All other arguments are as in ``forward``.

    Returns:
        Contributions to dq, dk, dv in the inputs' dtype.
    """
    return _BACKWARD(dout, q, k, v, out, lse, 0.0, triangle, attn_mask=bias, scale=softmax_scale)
