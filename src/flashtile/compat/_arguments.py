"""Converts flash-attn's forms of arguments to flashtile's. Invalid values pass through, and are rejected later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flashtile.core import settings
from flashtile.core.errors import InvalidInputError, UnsupportedError
from flashtile.core.sizes import differ, holds

Window = Sequence[int | None] | Tensor


def tensor(name: str, value: Any) -> Tensor:
    """The value, which must be a tensor."""
    if not isinstance(value, Tensor):
        raise InvalidInputError(name, f"is a {type(value).__name__}, must be a torch.Tensor")
    return value


def integer(name: str, value: Any) -> int:
    """The value, which must be an integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInputError(name, f"is {value!r}, must be an integer")
    return value


def bound(size: int | None) -> int | None:
    """One side of a window: any negative number means unbounded."""
    return None if isinstance(size, int) and size < 0 else size


def window(window_size: Window) -> Sequence[int | None]:
    """A pair of sides, which may be a tensor. Reading a tensor on a GPU costs a synchronisation."""
    pair = window_size.tolist() if isinstance(window_size, Tensor) else window_size
    return tuple(bound(size) for size in pair) if isinstance(pair, (tuple, list)) else pair


def chunk_of(attention_chunk: int) -> int:
    """A chunk, 0 for none: FlashAttention-3 takes every number below 1 as none."""
    return max(integer("attention_chunk", attention_chunk), 0)


def length(name: str, max_seqlen: Any) -> Any:
    """A longest length, which may be a tensor of one integer. Reading a tensor on a GPU costs a synchronisation."""
    if not isinstance(max_seqlen, Tensor):
        return max_seqlen
    if max_seqlen.numel() != 1 or max_seqlen.dtype.is_floating_point:
        shape = tuple(max_seqlen.shape)
        raise InvalidInputError(name, f"is a {max_seqlen.dtype} tensor of shape {shape}, must hold one integer")
    return max_seqlen.item()


def index_tensor(name: str, x: Any, shape: tuple[int, ...] | None, device: torch.device) -> Tensor:
    """An int32 tensor on a device, of the given shape; if shape is None, of one dimension and not empty."""
    found = tuple(tensor(name, x).shape)
    fits = not differ(found, shape) if shape is not None else len(found) == 1 and not holds(found[0] == 0)
    if not fits or x.dtype != torch.int32 or x.device != device:
        must = shape if shape is not None else "of one dimension and not empty,"
        raise InvalidInputError(name, f"{_described(x)}, must be int32 {must} on {device}")
    return x


def _described(x: Tensor) -> str:
    return f"is {x.dtype} {tuple(x.shape)} on {x.device}"


def values_are_checked(device: torch.device) -> bool:
    """Whether the contents of index tensors are checked: if that costs no synchronisation, or on request."""
    return (device.type == "cpu" or settings.CHECK.enabled()) and not torch.compiler.is_compiling()


def unstack(name: str, stacked: Tensor, parts: int, *, dim: int) -> tuple[Tensor, ...]:
    """Views of stacked tensors, each without the stacking dimension."""
    if tensor(name, stacked).dim() != dim + 3 or stacked.shape[dim] != parts:
        lead = "batch, seqlen" if dim == 2 else "total"
        must = f"({lead}, {parts}, num_heads, head_dim)"
        raise InvalidInputError(name, f"has shape {tuple(stacked.shape)}, must be {must}")
    return stacked.unbind(dim)


def split_qkv(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, ...]:
    """Views of q, k and v, which are stacked in dimension 2, or have their heads side by side in four dimensions."""
    if tensor("qkv", qkv).dim() != 4:
        q, k, v = unstack("qkv", qkv, 3, dim=2)
        if num_heads_q is not None and num_heads_q != q.shape[2]:
            raise InvalidInputError("num_heads_q", f"is {num_heads_q!r}, but qkv has {q.shape[2]}")
        return q, k, v
    heads = qkv.shape[2]
    if num_heads_q is None:
        raise InvalidInputError("num_heads_q", "is None, must be given for a qkv of 4 dimensions")
    if not 0 < integer("num_heads_q", num_heads_q) < heads or (heads - num_heads_q) % 2:
        raise InvalidInputError("num_heads_q", f"is {num_heads_q}, must leave as many heads for k as for v of {heads}")
    num_heads_kv = (heads - num_heads_q) // 2
    return qkv.split([num_heads_q, num_heads_kv, num_heads_kv], dim=2)


def used_first(side: str, x: Tensor, cu_seqlens: Tensor, seqused: Tensor) -> tuple[Tensor, Tensor]:
    """If only the first rows of each sequence are used: an order that packs these rows first, and their cu_seqlens.

    The other rows follow and belong to no sequence. Nothing is read from the device, so shapes do not depend on data.
    """
    rows = torch.arange(tensor(side, x).shape[0], device=x.device)
    outer, name = f"cu_seqlens_{side}", f"seqused_{side}"
    bounds = index_tensor(outer, cu_seqlens, None, x.device)
    must = (bounds.shape[0] - 1,)
    ok = not differ(tensor(name, seqused).shape, must) and seqused.dtype in (torch.int32, torch.int64)
    if not ok or seqused.device != x.device:
        raise InvalidInputError(name, f"{_described(seqused)}, must be int32 {must} on {x.device} as {outer} has it")
    if values_are_checked(x.device):
        starts, total = bounds.tolist(), rows.shape[0]
        if starts[0] != 0 or starts[-1] > total:
            found = f"starts with {starts[0]} and ends with {starts[-1]}"
            raise InvalidInputError(outer, f"{found}, must start with 0 and end with at most {total}")
        for b, (used, held) in enumerate(zip(seqused.tolist(), bounds.diff().tolist(), strict=True)):
            if not 0 <= used <= held:
                raise InvalidInputError(name, f"is {used} for sequence {b}, which has {held} rows")
    bounds = bounds.to(torch.int64)
    sequence = torch.searchsorted(bounds[1:], rows, right=True)
    limit = torch.nn.functional.pad(seqused, (0, 1))  # 0 for rows without a sequence
    unused = rows - bounds[sequence] >= limit[sequence]
    packed = torch.nn.functional.pad(seqused.cumsum(0), (1, 0)).to(torch.int32)
    return torch.argsort(unused, stable=True), packed


def refuse(name: str, value: object, why: str) -> None:
    """Raises unless an argument is None."""
    if value is not None:
        raise UnsupportedError(f"{name}: {why}")


@contextmanager
def names(**written: str) -> Iterator[None]:
    """Renames arguments in errors to the caller's names."""
    try:
        yield
    except InvalidInputError as error:
        raise (error.renamed(written) if written else error) from None
