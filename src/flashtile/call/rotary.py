"""Rotary position embedding in plain PyTorch (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor, nn

from flashtile.call.arguments import check_tensor, finite, integer, refuse_mixed
from flashtile.core.errors import InvalidInputError, shown

__all__ = ["RotaryEmbedding", "apply_rotary", "row_positions"]


def row_positions(
    num_rows: int,
    offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The position of each row in its own sequence, without reading any value from the device.

    Args:
        num_rows: Rows of a sequence, or of all packed sequences together.
        offsets: Position of each sequence's first row: one number, or ``(batch,)`` integers.
        cu_seqlens: ``(batch + 1,)`` integers if the sequences are packed: sequence b is rows ``cu_seqlens[b]`` to
            ``cu_seqlens[b + 1]``. Rows past the last bound get position 0.
        device: Device of the result.

    Returns:
        int64 ``(num_rows,)``; ``(batch, num_rows)`` for offsets by sequence without cu_seqlens.
    """
    rows = torch.arange(num_rows, device=device)
    if cu_seqlens is None:
        return offsets[:, None] + rows if isinstance(offsets, Tensor) else rows + offsets
    bounds = cu_seqlens.to(torch.int64)
    sequence = torch.searchsorted(bounds[1:], rows, right=True).clamp(max=bounds.shape[0] - 2)
    first = offsets[sequence] if isinstance(offsets, Tensor) else offsets
    return torch.where(rows < bounds[-1], rows - bounds[sequence] + first, 0)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotates pairs of features by their row's angles: the first ``rotary_dim`` features; the rest is unchanged.

    Args:
        x: ``(..., seqlen, num_heads, head_dim)``, any float dtype.
        cos: ``(..., seqlen, rotary_dim / 2)``, broadcastable to x's leading dimensions.
        sin: Like cos.
        interleaved: Pair feature 2i with 2i + 1; otherwise i with ``i + rotary_dim / 2``.

    Returns:
        Like x, computed in float32 or better.

    Raises:
        InvalidInputError: If x is not of a float dtype, or shapes do not fit.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2.
    """
    _check_rows(x)
    check_tensor("cos", cos)
    check_tensor("sin", sin)
    if not type(x) is type(cos) is type(sin):
        refuse_mixed({"x": x, "cos": cos, "sin": sin})
    if sin.shape != cos.shape:
        raise InvalidInputError("sin", f"has shape {tuple(sin.shape)}, but cos has {tuple(cos.shape)}")
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim > x.shape[-1]:
        raise InvalidInputError("cos", f"turns {rotary_dim} features, but x has head_dim {x.shape[-1]}")
    rows, given = x.shape[:-2], cos.shape[:-1]
    if len(given) > len(rows) or any(b not in (1, a) for a, b in zip(rows[::-1], given[::-1], strict=False)):
        raise InvalidInputError("cos", f"has shape {tuple(cos.shape)}, must broadcast to x's rows {tuple(rows)}")
    dtype = torch.promote_types(x.dtype, torch.float32)
    turning = x[..., :rotary_dim].to(dtype)
    cos, sin = cos.to(dtype)[..., None, :], sin.to(dtype)[..., None, :]
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    turned = turned.to(x.dtype)
    return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), dim=-1)


def _check_rows(x: Tensor) -> None:
    check_tensor("x", x)
    if x.dim() < 3:
        raise InvalidInputError("x", f"has {x.dim()} dimensions, must have at least 3: (seqlen, num_heads, head_dim)")
    if not x.dtype.is_floating_point:
        raise InvalidInputError("x", f"dtype is {x.dtype}, must be a float dtype")


class RotaryEmbedding(nn.Module):
    """Rotary position embedding: scores of rotated q and k depend only on the distance between their positions.

    Holds no parameters and no buffers: angles are computed for each call in float32 (float64 for float64 inputs),
    so casting a model to a low precision does not affect them, and there is no table that limits the length.

    Args:
        dim: Features to rotate, even; the first ``dim`` of each head.
        base: Pair i rotates by ``base ** (-2i / dim)`` radians per position.
        interleaved: Pair feature 2i with 2i + 1 (GPT-J), otherwise i with ``i + dim / 2`` (GPT-NeoX, Llama).

    Source: Su et al. 2021, arXiv:2104.09864.
    """

    def __init__(self, dim: int, *, base: float = 10000.0, interleaved: bool = False) -> None:
        super().__init__()
        if integer("dim", dim, 2) % 2:
            raise InvalidInputError("dim", f"is {dim}, must be even")
        self.dim = dim
        self.base = finite("base", base)
        if not self.base > 0:
            raise InvalidInputError("base", f"is {base}, must be positive")
        self.interleaved = interleaved

    def angles(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every position's angles.

        Args:
            positions: ``(...)``, integers or floats.
            dtype: The dtype of the arithmetic and the results.

        Returns:
            Two tensors ``(..., dim / 2)``.
        """
        exponent = torch.arange(0, self.dim, 2, device=positions.device, dtype=dtype) / self.dim
        turn = positions.to(dtype)[..., None] * self.base**-exponent
        return torch.cos(turn), torch.sin(turn)

    def forward(self, x: Tensor, positions: int | Tensor = 0, cu_seqlens: Tensor | None = None) -> Tensor:
        """Rotates q or k.

        Args:
            x: ``(batch, seqlen, num_heads, head_dim)``, or ``(total, num_heads, head_dim)`` with cu_seqlens.
            positions: Position of every sequence's first row, or each row's own: ``(seqlen,)`` or
                ``(batch, seqlen)``, packed ``(total,)``.
            cu_seqlens: ``(batch + 1,)`` int32 for packed sequences; positions then count from each one's start.

        Returns:
            Like x.

        Raises:
            InvalidInputError: Naming the argument that does not fit.
        """
        _check_rows(x)
        if self.dim > x.shape[-1]:
            raise InvalidInputError(
                "x", f"has head_dim {x.shape[-1]}, must have at least the {self.dim} features to turn"
            )
        if cu_seqlens is not None:
            check_tensor("cu_seqlens", cu_seqlens)
            if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
                raise InvalidInputError("cu_seqlens", f"has shape {tuple(cu_seqlens.shape)}, must be (batch + 1,)")
        rows = x.shape[:-2]
        if not isinstance(positions, Tensor):
            if isinstance(positions, bool) or not isinstance(positions, (numbers.Real, torch.SymInt)):
                raise InvalidInputError(
                    "positions", f"is {shown(positions)}, must be a number, or a tensor of one a row"
                )
            positions = row_positions(rows[-1], positions, cu_seqlens, x.device)
        elif positions.shape not in (rows, rows[-1:]):
            raise InvalidInputError(
                "positions", f"has shape {tuple(positions.shape)}, must be {tuple(rows)} or {tuple(rows[-1:])}"
            )
        cos, sin = self.angles(positions, torch.promote_types(x.dtype, torch.float32))
        return apply_rotary(x, cos, sin, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        """The settings, for printing."""
        return f"{self.dim}, base={self.base:g}, interleaved={self.interleaved}"
