"""Masks of intervals and of blocks that data have chosen, as ``block_mask``.

With ``Intervals`` each row keeps an interval of keys, or an interval of rows keeps each key. Such masks take memory
linear in the lengths, are exact to the row and key, and skip blocks without kept pairs. If they are combined with
``causal``, ``window_size``, ``attention_chunk`` and ``attn_mask``, all of these must keep a pair. Rows and keys are
counted from a sequence's first; each packed sequence uses the first rows and keys of its mask. ``mask[b]`` and
``mask[first:stop]`` are the masks of some samples. ``selected_blocks`` makes lists of whole blocks.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashtile.core.errors import InvalidInputError
from flashtile.core.samples import BySample

if TYPE_CHECKING:
    from flashtile.api.blocks import selected_blocks

__all__ = ["Intervals", "chunks", "columns", "documents", "prefix", "rows", "selected_blocks"]


def __getattr__(name: str) -> Any:
    if name == "selected_blocks":
        return importlib.import_module("flashtile.api.blocks").selected_blocks
    raise AttributeError(f"module 'flashtile.masks' has no attribute {name!r}")


@dataclass(frozen=True, eq=False)
class Intervals(BySample):
    """A mask made by ``rows``, ``columns``, ``documents``, ``prefix`` or ``chunks``. ``a & b`` keeps what both keep.

    Attributes:
        row_keys: ``(batch or 1, num_heads_q or 1, seqlen_q or 1, 2)`` int32: the first key that a row keeps, and the
            end of its keys; None if rows are not bounded.
        key_rows: The same for the rows that keep a key, with seqlen_k.
        mirrored: Whether both tensors describe the same mask, so that either may be used.
    """

    row_keys: Tensor | None
    key_rows: Tensor | None
    mirrored: bool = False

    def __and__(self, other: object) -> Intervals:
        if not isinstance(other, Intervals):
            return super().__and__(other)
        return Intervals(
            _both(self.row_keys, other.row_keys),
            _both(self.key_rows, other.key_rows),
            self.mirrored and other.mirrored,
        )

    def to(self, device: torch.device | str) -> Intervals:
        """The mask on a device."""
        row_keys, key_rows = (x if x is None else x.to(device) for x in (self.row_keys, self.key_rows))
        return replace(self, row_keys=row_keys, key_rows=key_rows)

    @property
    def batch(self) -> int:
        """The number of samples with masks of their own; 1 if all share one mask."""
        sizes = [x.shape[0] for x in (self.row_keys, self.key_rows) if x is not None]
        return max(sizes) if sizes else 1

    def _some(self, first: int, stop: int) -> Intervals:
        row_keys, key_rows = (
            x if x is None or x.shape[0] == 1 else x[first:stop] for x in (self.row_keys, self.key_rows)
        )
        return replace(self, row_keys=row_keys, key_rows=key_rows)


def rows(start: Tensor | int, end: Tensor) -> Intervals:
    """Row i keeps the keys ``start[i] <= j < end[i]``.

    Args:
        start: int32, broadcastable to ``(batch, num_heads_q, seqlen_q)``; or a number for all rows.
        end: The same, a tensor.

    Raises:
        InvalidInputError: Naming the argument that is wrong.
    """
    return Intervals(_pairs(start, end), None)


def columns(start: Tensor | int, end: Tensor) -> Intervals:
    """The rows ``start[j] <= i < end[j]`` keep key j. Arguments are as for ``rows``, with seqlen_k."""
    return Intervals(None, _pairs(start, end))


def documents(ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None, seqlen: int | None = None) -> Intervals:
    """Rows see the keys of their own document. Documents lie one after another in each sequence.

    Args:
        ids: Integers ``(seqlen,)`` or ``(batch, seqlen)``: a run of equal ids is a document.
        cu_seqlens: In place of ids the bounds ``(documents + 1,)`` int32, the same for the whole batch. Rows after the
            last bound see nothing.
        seqlen: With cu_seqlens, the rows of a sequence. By default the last bound, which is read from the device.
            for.

    Raises:
        InvalidInputError: Naming the argument that is wrong.
    """
    start, end, _ = _documents(ids, cu_seqlens, seqlen)
    pairs = _pairs(start, end)
    return Intervals(pairs, pairs, True)


def prefix(
    lengths: Tensor,
    seqlen: int | None = None,
    *,
    seqlen_k: int | None = None,
    ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Intervals:
    """A causal mask, ``j <= i + seqlen_k - seqlen``, that also keeps a prefix of each sequence for all of its rows.

    With ids or cu_seqlens, see ``documents``, of each document: its rows keep its prefix, earlier keys of its own, and
    none of other documents.

    Args:
        lengths: ``(batch,)`` integers: keys of each prefix. With cu_seqlens ``(documents,)``; with ids ``(documents,)``
            or ``(batch, documents)``, in the order of its runs; a run past the last has no prefix.
        seqlen: Rows of a sequence. Not with ids; with cu_seqlens the last bound by default.
        seqlen_k: Keys of a sequence; as many as rows by default. Not with ids or cu_seqlens.
        ids: As of ``documents``.
        cu_seqlens: As of ``documents``.

    Raises:
        InvalidInputError: Naming the argument that is wrong.
    """
    length = _integers("lengths", lengths)
    if ids is not None or cu_seqlens is not None:
        if seqlen_k is not None:
            raise InvalidInputError("seqlen_k", "is given, but documents have as many keys as rows")
        return _prefix_of_documents(length, *_documents(ids, cu_seqlens, seqlen))
    if seqlen is None:
        raise InvalidInputError("seqlen", "is None, as are ids and cu_seqlens")
    if length.dim() != 1:
        raise InvalidInputError("lengths", f"has {length.dim()} dimensions, must have 1: (batch,)")
    num_keys = seqlen if seqlen_k is None else seqlen_k
    i, j = (torch.arange(n, device=length.device, dtype=torch.int32) for n in (seqlen, num_keys))
    shift, length = num_keys - seqlen, length[:, None, None]
    end = torch.maximum(i + shift + 1, length)
    start = torch.where(j < length, 0, (j - shift).clamp(min=0))
    return Intervals(_pairs(0, end), _pairs(start, torch.full_like(start, seqlen)), True)


def chunks(size: int, seqlen: int, *, seqlen_k: int | None = None, device: torch.device | str = "cpu") -> Intervals:
    """Rows see the keys of their chunk, as with ``attention_chunk=size``, which takes no memory for a mask."""
    num_keys = seqlen if seqlen_k is None else seqlen_k
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidInputError("size", f"is {size!r}, must be an integer >= 1")
    shift = num_keys - seqlen
    p = torch.arange(seqlen, device=device, dtype=torch.int32) + shift
    j = torch.arange(num_keys, device=device, dtype=torch.int32)
    start, of_key = (x.div(size, rounding_mode="floor") * size for x in (p, j))
    return Intervals(_pairs(start, start + size), _pairs(of_key - shift, of_key - shift + size), True)


def _documents(ids: Tensor | None, cu_seqlens: Tensor | None, seqlen: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """For each place the first place of its document, the end of it, and its number: ``([batch, 1,] seqlen)`` each."""
    if (ids is None) == (cu_seqlens is None):
        raise InvalidInputError("ids", "is given with cu_seqlens" if ids is not None else "is None, as is cu_seqlens")
    if cu_seqlens is not None:
        bounds = _integers("cu_seqlens", cu_seqlens)
        if bounds.dim() != 1 or len(bounds) < 1:
            raise InvalidInputError("cu_seqlens", f"has shape {tuple(bounds.shape)}, must be (documents + 1,)")
        i = torch.arange(int(bounds[-1]) if seqlen is None else seqlen, device=bounds.device, dtype=torch.int32)
        if len(bounds) == 1:
            return (torch.zeros_like(i),) * 3
        which = torch.bucketize(i, bounds[1:], right=True).clamp(max=len(bounds) - 2)
        inside = i < bounds[-1]
        start, end = (torch.where(inside, x[which], 0) for x in (bounds[:-1], bounds[1:]))
        return start, end, which
    if seqlen is not None:
        raise InvalidInputError("seqlen", "is given, but goes with cu_seqlens")
    assert ids is not None
    found = _integers("ids", ids)
    if found.dim() not in (1, 2):
        raise InvalidInputError("ids", f"has {found.dim()} dimensions, must have 1 or 2: ([batch,] seqlen)")
    start, end, run = (x[:, None] if found.dim() == 2 else x for x in _runs(found))
    return start, end, run


def _prefix_of_documents(length: Tensor, start: Tensor, end: Tensor, which: Tensor) -> Intervals:
    """``prefix`` of documents, from lengths and what ``_documents`` returns."""
    most = 2 if start.dim() == 3 else 1
    if not 1 <= length.dim() <= most:
        shape = "(documents,)" if most == 1 else "([batch,] documents)"
        raise InvalidInputError("lengths", f"has {length.dim()} dimensions, must have {shape}")
    if length.dim() == 2 and length.shape[0] != start.shape[0]:
        raise InvalidInputError("lengths", f"is of {length.shape[0]} sequences, but ids of {start.shape[0]}")
    # One more, for documents past the last.
    padded = torch.nn.functional.pad(length, (0, 1))
    number = which.clamp(max=length.shape[-1]).long()
    length = padded.gather(1, number[:, 0])[:, None] if length.dim() == 2 else padded[number]
    i = torch.arange(start.shape[-1], device=start.device, dtype=torch.int32)
    seen = torch.minimum(torch.maximum(i + 1, start + length), end)
    return Intervals(_pairs(start, seen), _pairs(torch.where(i < start + length, start, i), end), True)


def _integers(name: str, x: object) -> Tensor:
    return check_integers(name, x).to(torch.int32)


def check_integers(name: str, x: object) -> Tensor:
    """An argument that must be a tensor of int32 or int64; raises InvalidInputError with its name for another."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        what = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise InvalidInputError(name, f"is {what}, must be an int32 tensor")
    return x


def _pairs(start: Tensor | int, end: Tensor) -> Tensor:
    """Both ends of intervals as one tensor, ``(batch or 1, heads or 1, length or 1, 2)``."""
    end = _integers("end", end)
    start = end.new_full((), start) if isinstance(start, int) else _integers("start", start)
    if start.device != end.device:
        raise InvalidInputError("start", f"is on {start.device}, but end is on {end.device}")
    for name, x in (("start", start), ("end", end)):
        if x.dim() > 3:
            raise InvalidInputError(name, f"has {x.dim()} dimensions, must broadcast to (batch, num_heads_q, seqlen)")
    try:
        pairs = torch.stack(torch.broadcast_tensors(start, end), dim=-1)
    except RuntimeError:
        shapes = f"{tuple(start.shape)}, which does not broadcast with end's {tuple(end.shape)}"
        raise InvalidInputError("start", f"has shape {shapes}") from None
    return pairs[(None,) * (4 - pairs.dim())] if pairs.dim() > 1 else pairs.view(1, 1, 1, 2)


def _runs(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each place, the first place and the end of the run of equal ids around it, and the run's number."""
    # Slices and cummax would guard on sizes when they are traced.
    before = (torch.arange(ids.shape[-1], device=ids.device) - 1).clamp(min=0)
    run = (ids != ids[..., before]).cumsum(-1)
    start, end = (torch.searchsorted(run, run, right=right, out_int32=True) for right in (False, True))
    return start, end, run


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return torch.stack((torch.maximum(a[..., 0], b[..., 0]), torch.minimum(a[..., 1], b[..., 1])), dim=-1)
