"""Calls of PyTorch's CPU flash kernel, which handle rows that keep no key; lengths of zero are never passed to it."""

from __future__ import annotations

import torch
from torch import Tensor

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def bias_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the kernel requires of an additive tile: float32 for 16-bit floats, else that of q."""
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
    out, lse = _FORWARD(q, k, v, 0.0, triangle, attn_mask=bias, scale=softmax_scale)
    if bias is None or not has_empty_rows:
        return out, lse
    # The kernel writes lse 0 for a row whose biases are all -inf.
    empty = (bias == -torch.inf).all(dim=-1)
    return torch.where(empty[..., None], 0.0, out), torch.where(empty, -torch.inf, lse)


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

    dout is like out, and out and lse are those of the rows; all else is as in ``forward``.

    Returns:
        Contributions to dq, dk, dv in the inputs' dtype.
    """
    return _BACKWARD(dout, q, k, v, out, lse, 0.0, triangle, attn_mask=bias, scale=softmax_scale)
