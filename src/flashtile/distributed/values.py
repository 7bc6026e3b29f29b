"""Reads values of tensors, from which plans are made, to the host. They are cached until a tensor is written to."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from flashtile.call.arguments import integer
from flashtile.call.axes import lengths_between
from flashtile.core.errors import InvalidInputError
from flashtile.distributed.intervals import Ends, Kept

# Values of tensors on a GPU and marks of these tensors, by the tensors' identity.
_read: dict[int, tuple[weakref.ref[Tensor], Tensor | int, tuple[int, ...]]] = {}


def document_lengths(name: str, cu_seqlens: Tensor | Sequence[int]) -> tuple[int, ...]:
    """The lengths between the values of cu_seqlens. A tensor on a GPU is waited for once, and again after each write.

    Raises:
        InvalidInputError: The values are not integers in one dimension that begin with 0 and never decrease.
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
    return tuple(lengths_between(name, list(found), found[-1], "x"))


def _values(x: Tensor) -> tuple[int, ...]:
    place = id(x)
    known = _read.get(place)
    if known is None or known[0]() is not x or not _is_still(x, known[1]):
        known = _read[place] = weakref.ref(x, lambda _: _read.pop(place, None)), _mark(x), tuple(x.tolist())
    return known[2]


def _mark(x: Tensor | None) -> Tensor | int:
    """A mark that shows later whether a tensor was written to: on a CPU a copy, on a GPU its version if it has one."""
    if x is None or x.device.type == "cpu":
        return -1 if x is None else x.clone()
    return -1 if x.is_inference() else x._version


def _is_still(x: Tensor | None, mark: Tensor | int) -> bool:
    """Whether a tensor still has the values that it had when its mark was made."""
    if x is None:
        return True
    if isinstance(mark, Tensor):
        return torch.equal(x, mark)
    return not x.is_inference() and x._version == mark


# Masks that were read, with the tensors' marks, by the tensors' identity.
_masks: dict[tuple[int, int], tuple[list[weakref.ref[Tensor] | None], list[Tensor | int], object, Kept]] = {}


def intervals(
    row_keys: Tensor | None, key_rows: Tensor | None, lengths_q: Sequence[int], lengths_k: Sequence[int]
) -> Kept | None:
    """The pairs that a mask keeps, from its values. A GPU is waited for once, and again after each write to a tensor.

    Args:
        row_keys: ``Tensors.row_keys`` of the whole, with one entry for each document.
        key_rows: ``Tensors.key_rows``, likewise.
        lengths_q: Rows of each document.
        lengths_k: Keys of each document.
    """
    both = row_keys, key_rows
    if row_keys is None and key_rows is None:
        return None
    lengths, place = (tuple(lengths_q), tuple(lengths_k)), (id(row_keys), id(key_rows))
    refs, marks, of, made = _masks.get(place, ((), (), None, None))
    is_here = of == lengths and all((ref and ref()) is x for ref, x in zip(refs, both, strict=True))
    if not is_here or not all(map(_is_still, both, marks)):
        made = Kept(*(None if x is None else _ends(x, n) for x, n in zip(both, lengths, strict=True)))
        refs = [None if x is None else weakref.ref(x, lambda _: _masks.pop(place, None) and None) for x in both]
        _masks[place] = refs, [_mark(x) for x in both], lengths, made
    return made


def _ends(x: Tensor, lengths: Sequence[int]) -> tuple[Ends, ...]:
    start, stop = x.cpu().unbind(-1)
    is_empty = start >= stop
    start, stop = (
        start.masked_fill(is_empty, torch.iinfo(torch.int32).max).amin(1),
        stop.masked_fill(is_empty, 0).amax(1),
    )
    if len(lengths) == 1:
        start, stop = start.amin(0, keepdim=True), stop.amax(0, keepdim=True)
    found = []
    for document, length in enumerate(lengths):
        rows = (x[min(document, len(x) - 1)] for x in (start, stop))
        ends = [row.expand(length) if len(row) == 1 else row[:length] for row in rows]
        found.append(tuple(zip(*(row.tolist() for row in ends), strict=True)))
    return tuple(found)
