"""The execution of a plan: the kernels of each step, the keys that travel beside them, and in the backward the sums.

Tensors are packed here: all of a rank's rows, ``(rows, heads, head_dim)``, entries of a batch one after another. Stage s
runs step s of the plan while the keys of step s + 1 arrive, and while the float32 dk and dv that step s - 1 added to
leave for their next rank or their owner. A stage's sends and receives are posted at once, at the same place on all
ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile import dispatch, ops, settings
from flashtile.arguments import Grads, Options, Tensors
from flashtile.backends.base import Backward, Forward, Gradients
from flashtile.distributed.exchange import Line, Pending, gather, scatter_sums, transfer
from flashtile.distributed.plan import Call, Plan, Step
from flashtile.families import family_of
from flashtile.masks import Origin
from flashtile.problem import Problem
from flashtile.states import Partial

Pair = tuple[Tensor, Tensor]


class Part(NamedTuple):
    """Which part of the whole call a rank's tensors are.

    Attributes:
        heads: Query heads of the whole.
        first_head: The first of this rank's.
    """

    heads: int
    first_head: int


class _Launch:
    """One call of a step with the backend's plans of it, made when they are first needed."""

    def __init__(self, call: Call, options: Options, part: Part, device: torch.device, is_last: bool) -> None:
        band = call.band
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
            rows = [Origin(o.batch * part.heads + part.first_head, *o[1:]) for o in call.origins]
            self._origins = _int32(rows, device)
            self._entries = torch.tensor([o.batch for o in call.origins], device=device)
        self._is_last = is_last
        self._forward: Forward | None = None
        self._backwards: dict[Any, Backward] = {}

    def _given(self, t: Tensors, k: Tensor, v: Tensor) -> Tensors:
        slopes = t.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes.index_select(0, self._entries)
        return Tensors(
            t.q, k, v, slopes, None, None, None, self._bounds_q, self._bounds_k, t.rng_state, self._origins
        )  # fmt: skip

    def forward(self, t: Tensors, keys: Pair, state: Partial | None) -> Partial:
        """The state after these keys; in q's dtype if the call is the last."""
        given = self._given(t, *keys)
        if self._forward is None:
            problem = Problem.of(given, self.options)
            problem = problem.but(out_dtype=problem.dtype if self._is_last else problem.lse_dtype)
            known = self._known(given, problem, "forward")
            chosen = dispatch.select(problem, "forward", self.options.backend)
            self._forward = chosen.plan_forward(problem, given, known)
        return Partial(*self._forward(given, state))

    def backward(self, t: Tensors, keys: Pair, of_rows: _OfRows, sums: Gradients | None) -> Gradients:
        """The sums with this call's gradients added; new ones if there are none."""
        given = self._given(t, *keys)
        # Hooks of saved tensors may have given q other strides; keys and the rows' tensors are contiguous.
        key = t.q.stride(), t.q.data_ptr() % 16, of_rows.dlse is None
        run = self._backwards.get(key)
        if run is None:
            problem = Problem.of(given, self.options)
            problem = problem.but(grad_dtype=problem.lse_dtype)
            known = self._known(given, problem, "backward")
            chosen = dispatch.select(problem, "backward", self.options.backend)
            run = chosen.plan_backward(problem, given, of_rows.dout, of_rows.dlse, known)
            self._backwards[key] = run
        return run(given, *of_rows, sums)

    def _known(self, t: Tensors, problem: Problem, direction: str) -> dict[Any, Any] | None:
        """What plans share with those of other lengths."""
        common = family_of(t, self.options)
        if common is None:
            return None
        kind = problem.out_dtype, problem.grad_dtype, settings.BACKEND.raw(), ops.products(t.q)
        return ops.shared_family((*common, *kind)).known[direction]


class _OfRows(NamedTuple):
    """What the backward needs of the rows, contiguous; see ``backends.base.Backward``."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


@dataclasses.dataclass
class _Stage:
    """What is posted before the launches of a step, and the launches.

    Attributes:
        number: Of the step; the number of ranks for what follows the last.
        launches: Its calls.
        source: The rank whose keys they use.
        keys_to: Where keys go, and whether they are this rank's own or those of this stage.
        keys_from: Where the next stage's keys come from, None if it has none.
        next_keys: Their rows.
        sums_to: Where the sums go that the stage before added to.
        sums_from: Where the next stage's sums come from.
        sums_back: Where sums of this rank's own keys come from.
    """

    number: int
    launches: list[_Launch] = dataclasses.field(default_factory=list)
    source: int = 0
    keys_to: list[tuple[int, bool]] = dataclasses.field(default_factory=list)
    keys_from: int | None = None
    next_keys: int = 0
    sums_to: int | None = None
    sums_from: int | None = None
    sums_back: int | None = None

    @property
    def what(self) -> str:
        """The name of its exchange in errors."""
        return f"step {self.number} of the ring"


def _stages(plan: Plan, launches: dict[Call, _Launch]) -> list[_Stage]:
    """The stages of a plan, in order."""
    found: dict[int, _Stage] = {}

    def stage(number: int) -> _Stage:
        return found.setdefault(number, _Stage(number))

    for step in plan.steps:
        here = stage(step.number)
        here.launches, here.source = [launches[call] for call in step.calls], step.source
        if step.number:
            before = stage(step.number - 1)
            before.keys_to = [(send.to, send.source == plan.rank) for send in step.sends]
            before.keys_from, before.next_keys, before.sums_from = step.receive_from, step.keys, step.sums_from
        if step.sums_to is not None or step.sums_back is not None:
            after = stage(step.number + 1)
            after.sums_to, after.sums_back = step.sums_to, step.sums_back
    return [found[number] for number in sorted(found)]


@dataclasses.dataclass(frozen=True, eq=False)
class _Sums:
    """The gradients that stages add to, float32 (float64 for float64 inputs), None where none is wanted.

    Attributes:
        dq: Of the rank's rows.
        keys: dk and dv of a stage's keys, those that are wanted.
    """
