"""flash-attn's ``layers.rotary.apply_rotary_emb``, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from flashtile.errors import InvalidInputError
from flashtile.rotary import apply_rotary, row_positions

__all__ = ["apply_rotary_emb"]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotary embedding from tables of cosines and sines.

    Args:
        x: ``(batch, seqlen, num_heads, head_dim)``, or packed ``(total, num_heads, head_dim)`` with cu_seqlens.
        cos: ``(seqlen_rotary, rotary_dim / 2)``; rotary_dim is at most head_dim, the features after it are unchanged.
        sin: Like cos.
        interleaved: Pair feature 2i with 2i + 1; otherwise i with ``i + rotary_dim / 2``.
        inplace: Write the result into x and return x.
        seqlen_offsets: Position of each sequence's first row: one number, or ``(batch,)`` integers.
        cu_seqlens: ``(batch + 1,)`` int32.
        max_seqlen: Longest packed sequence. Positions come from cu_seqlens; this is checked against the tables.

    Returns:
        Like x. Differentiable in x.

    Raises:
        InvalidInputError: If shapes do not fit, or the tables are too short.
    """
    if x.dim() != (4 if cu_seqlens is None else 3):
        must = "4 without cu_seqlens" if cu_seqlens is None else "3 with cu_seqlens"
        raise InvalidInputError("x", f"has {x.dim()} dimensions, must have {must}")
    if cos.dim() != 2:
        raise InvalidInputError("cos", f"has {cos.dim()} dimensions, must have 2: (seqlen_rotary, rotary_dim / 2)")
    longest = x.shape[1] if cu_seqlens is None else max_seqlen
    if longest is not None and not isinstance(seqlen_offsets, Tensor) and longest + seqlen_offsets > cos.shape[0]:
        raise InvalidInputError(
            "cos", f"has {cos.shape[0]} rows, but positions go up to {longest + seqlen_offsets - 1}"
        )
    positions = row_positions(x.shape[-3], seqlen_offsets, cu_seqlens, x.device)
    turned = apply_rotary(x, cos[positions], sin[positions], interleaved=interleaved)
    return x.copy_(turned) if inplace else turned
