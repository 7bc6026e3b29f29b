"""Kinds of calls: what ranks agree on once, and keep for every later call of the same layouts and options."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile import dispatch
from flashtile.arguments import Options, Tensors
from flashtile.backends.base import directions_of
from flashtile.distributed.exchange import Line, Ranks, add_up, agree, refuse_differences
from flashtile.distributed.heads import Heads
from flashtile.distributed.layouts import Layout, ranges, shard_length
from flashtile.distributed.plan import make_plan
from flashtile.distributed.steps import OfRows, Part, Steps, Sums
from flashtile.errors import InvalidInputError, UnsupportedError
from flashtile.masks import Band
from flashtile.problem import Problem
from flashtile.states import Partial

COMMS = ("auto", "ring", "allgather", "ulysses")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A call but for its tensors.

    Attributes:
        ranks: Those that share it.
        layout: Of queries and keys.
        comm: One of ``COMMS``.
        lengths_q: Queries of each document of the whole; of a dense call its one length.
        lengths_k: Keys, likewise.
        packed: Whether documents are packed.
        options: Its options.
        with_lse: Whether lse is returned.
    """

    ranks: Ranks
    layout: Layout
    comm: str
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    packed: bool
    options: Options
    with_lse: bool

    @property
    def band(self) -> Band:
        """Its mask."""
        return Band(self.options.window_left, self.options.window_right)


class Saved(NamedTuple):
    """What the backward needs: packed tensors, of this rank's heads where heads are exchanged."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    rng_state: Tensor | None


def make_kind(spec: Spec, t: Tensors) -> Kind:
    """Compares the call with those of the other ranks, and prepares it; all ranks raise the same.

    Raises:
        InvalidInputError: Naming what differs between ranks, or what a rank was called with that is not valid.
        UnsupportedError: On some rank no backend can run it, or it is not supported here.
        ExchangeError: A rank did not answer.
    """
    refused: tuple[str, ...] = ()
    try:
        _check(spec, t)
    except InvalidInputError as error:
        refused = "InvalidInputError", error.argument, error.message
    except UnsupportedError as error:
        refused = "UnsupportedError", "", str(error)
    everyone = agree(spec.ranks, t.q.device, {"refused": refused, **_said(spec, t)})
    refuse_differences(spec.ranks, everyone)
    _check_rows(spec, [record["rows"] for record in everyone], t)
    return Kind(spec, t)


def _said(spec: Spec, t: Tensors) -> dict[str, Any]:
    """What ranks must have alike, by argument; and how many rows they have."""
    o = spec.options
    rows = t.q.shape[:1] if spec.packed else t.q.shape[:2]
    about = {
        name: None if x is None else f"{x.dtype} {tuple(x.shape[len(rows):])}"
        for name, x in (("q", t.q), ("k", t.k), ("v", t.v))
    }
    return about
