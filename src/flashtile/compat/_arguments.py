"""Converts flash-attn's forms of arguments to flashtile's; invalid values pass through, to be rejected later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from flashtile.errors import InvalidInputError, UnsupportedError


def bound(size: int | None) -> int | None:
    """One side of a window: any negative number means unbounded."""
    return None if isinstance(size, int) and size < 0 else size


def window(window_size: Sequence[int | None] | Tensor) -> Sequence[int | None]:
    """A pair of sides, which may be a tensor; a tensor on a GPU costs a synchronisation."""
    pair = window_size.tolist() if isinstance(window_size, Tensor) else window_size
    return tuple(bound(size) for size in pair) if isinstance(pair, (tuple, list)) else pair


def length(name: str, max_seqlen: Any) -> Any:
    """A longest length, which may be a tensor of one integer; a tensor on a GPU costs a synchronisation."""
    if not isinstance(max_seqlen, Tensor):
        return max_seqlen
    if max_seqlen.numel() != 1 or max_seqlen.dtype.is_floating_point:
        shape = tuple(max_seqlen.shape)
        raise InvalidInputError(name, f"is a {max_seqlen.dtype} tensor of shape {shape}, must hold one integer")
    return max_seqlen.item()


def unstack(name: str, stacked: Tensor, parts: int, *, dim: int) -> tuple[Tensor, ...]:
    """Views of the tensors stacked in one, each without the stacking dimension."""
    if not isinstance(stacked, Tensor):
        raise InvalidInputError(name, f"is a {type(stacked).__name__}, must be a torch.Tensor")
    if stacked.dim() != dim + 3 or stacked.shape[dim] != parts:
        lead = "batch, seqlen" if dim == 2 else "total"
        must = f"({lead}, {parts}, num_heads, head_dim)"
        raise InvalidInputError(name, f"has shape {tuple(stacked.shape)}, must be {must}")
    return stacked.unbind(dim)


def refuse(name: str, value: object, why: str) -> None:
    """Raises unless an argument is None."""
    if value is not None:
        raise UnsupportedError(f"{name}: {why}")


@contextmanager
def names(**written: str) -> Iterator[None]:
    """Renames the argument in an error to the name that the caller used."""
    try:
        yield
    except InvalidInputError as error:
        if error.argument not in written:
            raise
        raise InvalidInputError(written[error.argument], error.message) from None
