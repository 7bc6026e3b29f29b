"""flash-attn's ``layers.rotary`` and ``ops.triton.rotary.apply_rotary``, in plain PyTorch.

Differences, all of them:

- Functions that write into their argument compute the result first: they save no memory. As with any in-place operation
  autograd notes that the argument has changed, except if it is a leaf that requires grad: then only the returned tensor
  has the gradient (in flash-attn always only the returned one).
- The classes of autograd functions and the Triton kernel are missing.
- Errors are InvalidInputError (a ValueError).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashtile.call import rotary
from flashtile.compat._arguments import split_qkv, tensor, unstack
from flashtile.core.errors import InvalidInputError

__all__ = [
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotary embedding from tables of cosines and sines.

    Args:
        x: ``(batch, seqlen, num_heads, head_dim)``, or packed ``(total, num_heads, head_dim)`` with cu_seqlens.
        cos: ``(seqlen_rotary, rotary_dim / 2)``; rotary_dim is at most head_dim, the features after it are unchanged.
        sin: Like cos.
        seqlen_offsets: Position of each sequence's first row: one number, or ``(batch,)`` integers.
        cu_seqlens: ``(batch + 1,)`` int32.
        max_seqlen: Longest packed sequence. Positions come from cu_seqlens; this is checked against the tables.
        interleaved: Pair feature 2i with 2i + 1; otherwise i with ``i + rotary_dim / 2``.
        inplace: Writes the result into x and returns x.
        conjugate: Rotate backwards, which undoes the rotation.

    Returns:
        Like x. Differentiable in x.

    Raises:
        InvalidInputError: If shapes do not fit, or the tables are too short.
    """
    for name, given in (("x", x), ("cos", cos), ("sin", sin)):
        tensor(name, given)
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
    positions = rotary.row_positions(x.shape[-3], seqlen_offsets, cu_seqlens, x.device)
    turn = -sin if conjugate else sin
    turned = rotary.apply_rotary(x, cos[positions], turn[positions], interleaved=interleaved)
    return _put(x, turned) if inplace else turned


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
    """``apply_rotary`` with another order of arguments."""
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary embedding with the table's rows for x's rows.

    Args:
        x: ``(batch, seqlen, num_heads, head_dim)``.
        cos: ``(seqlen, rotary_dim / 2)`` or ``(batch, seqlen, rotary_dim / 2)``.
        sin: Like cos.
        interleaved: As in ``apply_rotary``.

    Returns:
        Like x.
    """
    return rotary.apply_rotary(x, cos, sin, interleaved=interleaved)


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """A quarter turn of each pair (a, b) of features, to (-b, a), in ``(..., dim)``; pairs as in ``apply_rotary``."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates q and k of a packed tensor, in place.

    Args:
        qkv: ``(batch, seqlen, 3, num_heads, head_dim)``; or ``(batch, seqlen, num_heads_q + 2 * num_heads_kv,
            head_dim)``, the heads of q, then k, then v, for which num_heads_q must be given.
        cos: ``(seqlen_rotary, rotary_dim / 2)``.
        sin: Like cos.
        cos_k: The table for k, if it is another one; like cos.
        sin_k: Like cos_k.
        interleaved: As in ``apply_rotary``.
        seqlen_offsets: As in ``apply_rotary``.
        num_heads_q: Query heads, for qkv of four dimensions.

    Returns:
        qkv.

    Raises:
        InvalidInputError: If shapes do not fit, or the tables are too short.
    """
    q, k, v = split_qkv(qkv, num_heads_q)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    q = apply_rotary(q, cos, sin, seqlen_offsets, interleaved=interleaved)
    k = apply_rotary(k, cos_k, sin_k, seqlen_offsets, interleaved=interleaved)
    return _put(qkv, torch.stack((q, k, v), dim=2) if qkv.dim() == 5 else torch.cat((q, k, v), dim=2))


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotates k of a packed tensor ``(batch, seqlen, 2, num_heads, head_dim)``, in place; returns it.

    The other arguments are as in ``apply_rotary``.
    """
    k, v = unstack("kv", kv, 2, dim=2)
    return _put(kv, torch.stack((apply_rotary(k, cos, sin, seqlen_offsets, interleaved=interleaved), v), dim=2))


def _put(x: Tensor, result: Tensor) -> Tensor:
    """Writes the result into x and returns it, with its gradient."""
    if torch.is_grad_enabled() and x.requires_grad and x.is_leaf:  # autograd lets nobody write into such a tensor
        x.detach().copy_(result.detach())
        return result
    return x.copy_(result)


class RotaryEmbedding(nn.Module):
    """Rotary embedding of packed q, k and v, with tables that grow with the longest sequence seen.

    With scale_base this is XPos: pair i of q is also multiplied by ``((2i / dim + 0.4) / 1.4) ** ((position -
    seqlen_of_the_tables // 2) / scale_base)``, and pair i of k is divided by it.

    Args:
        dim: Features to rotate, even; the first ``dim`` of each head.
        base: Pair i rotates by ``base ** (-2i / dim)`` radians per position.
        interleaved: As in ``apply_rotary``.
        scale_base: None for no XPos.
        device: The device of the buffers.

    Source: Su et al. 2021, arXiv:2104.09864; Sun et al. 2022, arXiv:2212.10554, for XPos.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise InvalidInputError("dim", f"is {dim}, must be even and at least 2")
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        steps = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("scale", None if scale_base is None else (steps / dim + 0.4) / 1.4, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> Tensor:
        return self.base ** -(torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Makes the tables for positions below seqlen, unless they exist. Subclasses in other packages call this."""
        made = self._cos_cached
        if (
            made is not None
            and seqlen <= self._seq_len_cached
            and (made.device, made.dtype) == (device, dtype)
            and (torch.is_inference_mode_enabled() or not made.is_inference())
        ):
            return
        # Casting a model to a low precision casts its buffer too; large positions would then lose their angle.
        exact = self.inv_freq.dtype == torch.float32 and self.inv_freq.device == device
        frequencies = self.inv_freq if exact else self._compute_inv_freq(device)
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = positions[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        self._seq_len_cached = seqlen
        if self.scale is None or self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        power = (positions - seqlen // 2)[:, None] / self.scale_base
        scale = self.scale.to(device=device, dtype=torch.float32) ** power
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates q and k, in place.

        Args:
            qkv: As in ``apply_rotary_emb_qkv_``; with kv it is q ``(batch, seqlen, num_heads, head_dim)``.
            kv: ``(batch, seqlen, 2, num_heads_kv, head_dim)``, or None.
            seqlen_offset: Position of each sequence's first row: one number, or ``(batch,)`` integers.
            max_seqlen: The length that the tables must have; needed if seqlen_offset is a tensor, which is not read.
            num_heads_q: Query heads, for qkv of four dimensions without kv.

        Returns:
            qkv, or q and kv.

        Raises:
            InvalidInputError: If shapes do not fit, or the tables are too short.
        """
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        elif not isinstance(seqlen_offset, Tensor):
            self._update_cos_sin_cache(qkv.shape[1] + seqlen_offset, qkv.device, qkv.dtype)
        if self._cos_cached is None or self._sin_cached is None:
            raise InvalidInputError("max_seqlen", "is None, must be given where seqlen_offset is a tensor")
        table = self._cos_cached, self._sin_cached
        table_k = (self._cos_k_cached, self._sin_k_cached) if self.scale is not None else (None, None)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, *table, *table_k, self.interleaved, seqlen_offset, num_heads_q)
        if num_heads_q is not None and num_heads_q != qkv.shape[2]:
            raise InvalidInputError(
                "num_heads_q", f"is {num_heads_q}, but with kv the first tensor is q, of {qkv.shape[2]}"
            )
        q = apply_rotary(qkv, *table, seqlen_offset, interleaved=self.interleaved, inplace=True)
        if table_k[0] is not None and table_k[1] is not None:
            table = table_k[0], table_k[1]
        return q, apply_rotary_emb_kv_(kv, *table, self.interleaved, seqlen_offset)
