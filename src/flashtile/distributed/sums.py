"""Sums of the gradients of keys: their messages, and the last additions and rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.call.backend import Gradients
from flashtile.distributed.exchange import Parcel
from flashtile.distributed.ring import Spans

# The gradients of a shard's keys and values; None if one is not wanted.
Sums = tuple[Tensor | None, Tensor | None]
NO_SUMS: Sums = (None, None)


def parcels(sums: Sums, peer: int, kind: str) -> list[Parcel]:
    """The parcel that sends or receives the sums that are not None."""
    parts = tuple(() if x is None else (x,) for x in sums)
    return [Parcel(parts, peer, kind)] if any(parts) else []


def add(total: Gradients, sums: Sums, spans: Spans) -> None:
    """Adds sums for some of a rank's own keys to the gradients of these keys; sums that are None are left out."""
    for x, more in zip((total.dk, total.dv), sums, strict=True):
        if x is not None and more is not None:
            for (start, stop), part in zip(spans, more.split([b - a for a, b in spans]), strict=True):
                x[start:stop] += part


def rounded(
    total: Gradients, back: Sums, spans: Spans, finished: Sums, first: int, dtype_q: torch.dtype, dtype: torch.dtype
) -> Gradients:
    """Gradients from sums, after the last sums that came home are added.

    Args:
        total: Sums over a rank's own calls.
        back: The sums that came home.
        spans: The keys that ``back`` is for, as indices into ``total``.
        finished: Gradients of all keys, some of them final already. ``total`` is for the other keys, which are
            contiguous.
        first: The first key of ``total``.
        dtype_q: The dtype of the result's dq.
        dtype: The dtype of the result's dk and dv.
    """
    dq = None if total.dq is None else total.dq.to(dtype_q)
    found: list[Any] = []
    for x, more, known in zip((total.dk, total.dv), back, finished, strict=True):
        if x is None or (more is None and known is None):
            found.append(known if x is None else x.to(dtype))
            continue
        made = torch.empty_like(x, dtype=dtype) if known is None else known
        place, at, end = made[first : first + len(x)], 0, 0
        for start, stop in spans if more is not None else ():
            place[end:start].copy_(x[end:start])
            torch.add(x[start:stop], more[at : at + stop - start], out=place[start:stop])  # type: ignore[index]
            at, end = at + stop - start, stop
        place[end:].copy_(x[end:])
        found.append(made)
    return Gradients(dq, found[0], found[1])
