"""The values of cu_seqlens, which plans need on the host."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from flashtile.call.arguments import integer
from flashtile.core.errors import InvalidInputError

# Values of tensors on a GPU, by identity: what was read, and how often the tensor had been written to.
_read: dict[int, tuple[weakref.ref[Tensor], int, tuple[int, ...]]] = {}


def bounds_of(name: str, cu_seqlens: Tensor | Sequence[int]) -> tuple[int, ...]:
    """The values of cu_seqlens; a tensor on a GPU is waited for once, and again after it was written to.

    Raises:
        InvalidInputError: They are no integers in one dimension.
    """
    if not isinstance(cu_seqlens, Tensor):
        found = tuple(integer(name, x, 0) for x in cu_seqlens)
    elif cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        has = f"is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        raise InvalidInputError(name, f"{has}, must be int32 of shape (documents + 1,)")
    elif cu_seqlens.device.type == "cpu":
        found = tuple(cu_seqlens.tolist())
    else:
        found = _values(cu_seqlens)
    if not found:
        raise InvalidInputError(name, "is empty, must have shape (documents + 1,)")
    return found


def _values(x: Tensor) -> tuple[int, ...]:
    version, place = 0 if x.is_inference() else x._version, id(x)
    known = _read.get(place)
    if known is None or known[0]() is not x or known[1] != version:
        known = _read[place] = weakref.ref(x, lambda _: _read.pop(place, None)), version, tuple(x.tolist())
    return known[2]
