"""Stages of a plan's execution: what of three steps that follow one another happens at once; and running results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.call.arguments import Tensors
from flashtile.core.states import Partial
from flashtile.distributed.launches import CallPlan, Keys, some_of, wide
from flashtile.distributed.own import Share
from flashtile.distributed.plan import Plan, Step


class Stage(NamedTuple):
    """A step with its launches, and the steps before and after it: what of theirs is posted before the launches.

    Attributes:
        here: The step; after the last one it may be none.
        before: Its sums leave now, or come back.
        following: Its keys and sums arrive.
        launches: The step's calls; of step 0 those of the forward that keys of other steps are merged into.
    """

    here: Step
    before: Step
    following: Step
    launches: list[CallPlan]


def stages_of(plan: Plan, launches_of: Callable[[Step], list[CallPlan]]) -> list[Stage]:
    """The stages of a plan, in order; the first is that of step 0."""
    steps = {step.number: step for step in plan.steps}
    after = {step.number + 1 for step in plan.steps if step.sums_to is not None or step.sums_back is not None}
    found = []
    for number in sorted({*steps, *(number - 1 for number in steps if number), *after}):
        here, before, following = (steps.get(number + i, Step(number + i, 0, (), ())) for i in (0, -1, 1))
        found.append(Stage(here, before, following, launches_of(here)))
    return found


class Running:
    """The running result of some rows.

    Args:
        t: The tensors of all rows.
        share: Which rows, and which of the rank's own keys they see.
        sinks: Of each head, a key whose value is 0.
        into: What gets the rows' out.
    """

    def __init__(self, t: Tensors, share: Share, sinks: Tensor | None, into: Tensor | None) -> None:
        self._t = some_of(t, share.rows, share.keys)
        self._into = None if into is None else into[slice(*share.rows)]
        self._state = None if sinks is None else _start(self._t, sinks)

    def add(self, launches: Iterable[CallPlan], keys: Keys | None = None) -> None:
        """Merges the results of calls, over the own keys if no others are given."""
        for launch in launches:
            self._state = launch.forward(self._t, keys or (self._t.k, self._t.v), self._state, self._into)

    def result(self) -> tuple[Tensor, Tensor]:
        """Out in q's dtype, and lse."""
        state = self._state or _start(self._t, None)
        out = state.out.to(self._t.q.dtype)
        if self._into is not None and out.data_ptr() != self._into.data_ptr():
            self._into.copy_(out)
        return out, state.lse


def _start(t: Tensors, sinks: Tensor | None) -> Partial:
    """The state before any key."""
    dtype, rows = wide(t), t.q.shape[0]
    out = t.q.new_zeros((*t.q.shape[:2], t.v.shape[2]), dtype=dtype)
    if sinks is None:
        return Partial(out, t.q.new_full((t.q.shape[1], rows), -torch.inf, dtype=dtype))
    return Partial(out, sinks.to(dtype)[:, None].repeat(1, rows))
