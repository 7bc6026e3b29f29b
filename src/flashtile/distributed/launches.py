"""One packed call of a step: the backend's plans of it, made when they are first needed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.call.arguments import Grads, Options, Tensors
from flashtile.call.backend import Backward, Chain, Forward, Gradients
from flashtile.call.problem import Problem
from flashtile.core.states import Partial
from flashtile.distributed.plan import Call
from flashtile.ops import dispatch
from flashtile.ops import operators as ops

# Keys and values of a shard.
Keys = tuple[Tensor, Tensor]


class Part(NamedTuple):
    """Which part of the whole call a rank's tensors are: how many query heads that has, and the first of this one's."""

    heads: int
    first_head: int


class OfRows(NamedTuple):
    """What the backward needs of the rows, contiguous; see ``call.backend.Backward``."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None

    def of(self, rows: tuple[int, int]) -> OfRows:
        """That of some of them."""
        if rows == (0, self.out.shape[0]):
            return self
        some, dlse = slice(*rows), self.dlse
        lse, dlse = (None if x is None else x[:, some].contiguous() for x in (self.lse, dlse))
        assert lse is not None
        return self._replace(out=self.out[some], lse=lse, dout=self.dout[some], dlse=dlse)


def some_of(t: Tensors, rows: tuple[int, int], keys: tuple[int, int]) -> Tensors:
    """The tensors of some rows and some keys."""
    if rows == (0, t.q.shape[0]) and keys == (0, t.k.shape[0]):
        return t
    some = slice(*keys)
    return dataclasses.replace(t, q=t.q[slice(*rows)], k=t.k[some], v=t.v[some])


class CallPlan:
    """One call of a step with the backend's plans of it, made when they are first needed."""

    def __init__(self, call: Call, options: Options, part: Part, device: torch.device, is_last: bool) -> None:
        self._bounds, band = (call.cu_seqlens_q, call.cu_seqlens_k), call.band
        self.options = dataclasses.replace(
            options,
            window_left=band.left,
            window_right=band.right,
            max_seqlen_q=call.max_seqlen_q,
            max_seqlen_k=call.max_seqlen_k,
            grads=Grads(*options.grads[:3]),
        )
        self._bounds_q = self._bounds_k = _int32(call.cu_seqlens_q, device)
        if call.cu_seqlens_k != call.cu_seqlens_q:
            self._bounds_k = _int32(call.cu_seqlens_k, device)
        self._origins: Tensor | None = None
        if call.origins:
            rows = [o._replace(head=o.head * part.heads + part.first_head) for o in call.origins]
            self._origins = _int32(rows, device)
            self._entries = _int32([o.head for o in call.origins], device)
        self._is_last = is_last
        # Whether dk and dv of calls of a chain are in the keys' dtype: no others are added to them.
        self.rounds = False
        self._forward: Forward | None = None
        self._backwards: dict[Any, Backward] = {}

    def _given(self, t: Tensors, keys: Keys) -> Tensors:
        slopes = t.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes.index_select(0, self._entries)
        bounds = self._bounds_q, self._bounds_k
        return Tensors(t.q, *keys, slopes, None, None, None, *bounds, rng_state=t.rng_state, origins=self._origins)

    def forward(self, t: Tensors, keys: Keys, state: Partial | None, into: Tensor | None = None) -> Partial:
        """The state after these keys; in q's dtype if the call is the last, whose out may be written into a tensor."""
        given = self._given(t, keys)
        if self._forward is None:
            dtype = t.q.dtype if self._is_last else wide(t)
            self._forward = ops.REGULAR.plan("forward", given, self.options, out_dtype=dtype)
        return Partial(*self._forward(given, state, into if self._is_last else None))

    def backward(
        self, t: Tensors, keys: Keys, rows: OfRows, sums: Gradients | None, chain: Chain | None = None,
        heads: tuple[int, int] | None = None,
    ) -> Gradients:  # fmt: skip
        """The sums with this call's gradients added; new ones if there are none. Heads: see ``Chain``."""
        given = self._given(t, keys)
        # Hooks of saved tensors may have given q other strides; all others are contiguous.
        key = t.q.stride(), t.q.data_ptr() % 16, rows.dlse is None
        run: Any = self._backwards.get(key)
        if run is None:
            dtype = t.q.dtype if self.rounds else wide(t)
            douts = rows.dout, rows.dlse
            run = self._backwards[key] = ops.REGULAR.plan("backward", given, self.options, douts, grad_dtype=dtype)
        return run(given, *rows, sums) if chain is None else run.in_chain(given, *rows, sums, chain, heads)

    def may_chain(self, t: Tensors) -> bool:
        """Whether the call may be one of a ``Chain``; t has any keys."""
        bounds_q, bounds_k = self._bounds
        k, v = (x.new_empty((bounds_k[-1], *x.shape[1:])) for x in (t.k, t.v))
        problem = Problem.of(self._given(t, (k, v)), self.options)
        chosen = dispatch.select(problem.but(grad_dtype=problem.lse_dtype), "backward", self.options.backend)
        can = chosen.capabilities("backward")
        places = zip(itertools.pairwise(bounds_q), itertools.pairwise(bounds_k), strict=True)
        ends = [end for row, (key, key_stop) in places if key < key_stop and row[0] < row[1] for end in row]
        rows = 0 if can is None else can.chain_rows
        return rows > 0 and all(end % rows == 0 or end == bounds_q[-1] for end in ends)


def wide(t: Tensors) -> torch.dtype:
    """The dtype of results to which others are added, that of lse."""
    return torch.promote_types(t.q.dtype, torch.float32)


def _int32(values: Sequence[Any], device: torch.device) -> Tensor:
    # A training step could not save a tensor that was made in inference mode.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int32, device=device)
