"""The execution of a plan: the kernels of each step, the keys that travel beside them, and in the backward the sums.

Tensors are packed here: all of a rank's rows, ``(rows, heads, head_dim)``, entries of a batch one after another. Stage
s runs step s of the plan while the keys of step s + 1 arrive, and while the float32 dk and dv that step s - 1 added to
leave for their next rank or their owner. What a stage sends and receives is posted at once, in the same order on all
ranks, and before its kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile.call.arguments import Options, Tensors
from flashtile.call.backend import Chain, Gradients
from flashtile.core.states import Partial
from flashtile.distributed.calls import in_two
from flashtile.distributed.copies import Copies
from flashtile.distributed.exchange import Line, Messages, Parcel, gather, scatter_sums
from flashtile.distributed.launches import CallPlan, Keys, OfRows, Part
from flashtile.distributed.plan import Call, Plan, Step

# The gradients of keys and values of a shard, None where one is not wanted.
Sums = tuple[Tensor | None, Tensor | None]


@dataclasses.dataclass
class _Stage:
    """What is posted before the launches of a step, and the launches.

    Attributes:
        number: Of the step; the number of ranks for what follows the last.
        launches: Its calls.
        source: The rank whose keys they use.
        first: The row of its shard with which they begin.
        keys: Their rows.
        keys_to: Where keys go, and whether they are this rank's own or those of this stage.
        keys_from: Where the next stage's keys come from, None if it has none.
        next_keys: Their rows.
        sums_to: Where the sums go that the stage before added to.
        is_home: Whether that is the owner of the keys.
        sums_from: Where the next stage's sums come from.
        sums_back: Where sums of this rank's own keys come from.
    """

    number: int
    launches: list[CallPlan] = dataclasses.field(default_factory=list)
    source: int = 0
    first: int = 0
    keys: int = 0
    keys_to: list[tuple[int, bool]] = dataclasses.field(default_factory=list)
    keys_from: int | None = None
    next_keys: int = 0
    sums_to: int | None = None
    is_home: bool = False
    sums_from: int | None = None
    sums_back: int | None = None


def _stages(plan: Plan, launch_of: Callable[[Step, Call], CallPlan]) -> list[_Stage]:
    """The stages of a plan, in order; the first is that of step 0."""
    found: dict[int, _Stage] = {}

    def stage(number: int) -> _Stage:
        return found.setdefault(number, _Stage(number))

    for step in plan.steps:
        here = stage(step.number)
        here.launches = [launch_of(step, call) for call in step.calls]
        here.source, here.first, here.keys = step.source, step.first, step.keys
        if step.number:
            before = stage(step.number - 1)
            before.keys_to = [(send.to, send.source == plan.rank) for send in step.sends]
            before.keys_from, before.next_keys, before.sums_from = step.receive_from, step.keys, step.sums_from
        if step.sums_to is not None or step.sums_back is not None:
            after = stage(step.number + 1)
            after.sums_to, after.sums_back, after.is_home = step.sums_to, step.sums_back, step.sums_to == step.source
    return [found[number] for number in sorted(found)]


class Steps:
    """The steps of one rank, with all that repeated calls of one kind share.

    Args:
        plan: Of the ring that the line is.
        line: The ring.
        options: Of the call; the band is the plan's.
        part: Which part of the whole the tensors are.
        device: Theirs.
        messages: What sends and receives.
        most_keys: If all keys are gathered at once and sums scattered, rows of the largest shard; None if they travel.
        share: Of the backward over a rank's own keys, what is done first.
        rounds: Whether gradients of keys may be in their dtype.
    """

    def __init__(
        self,
        plan: Plan,
        line: Line,
        options: Options,
        part: Part,
        device: torch.device,
        messages: Messages | Copies,
        most_keys: int | None = None,
        share: float = 0.5,
        rounds: bool = False,
    ) -> None:
        self._line, self._grads, self._messages = line, options.grads, messages
        self._travels = slice(*plan.travels)
        # Shards in a gathered tensor start on 16 bytes, whatever their width.
        self._most_keys = None if most_keys is None else -(-most_keys // 8) * 8
        last = next((step for step in reversed(plan.steps) if step.calls), None)
        made: dict[Any, CallPlan] = {}

        def launch_of(step: Step, call: Call) -> CallPlan:
            is_last = step is last and call is step.calls[-1]
            key = call, is_last, step.number == 0
            if key not in made:
                made[key] = CallPlan(call, options, part, device, is_last)
            return made[key]

        self._stages = _stages(plan, launch_of)
        self._forward_stages = [each for each in self._stages if each.launches or each.keys_to or each.next_keys]
        # In the backward some of step 0 comes first, while keys leave, and the other part last, while sums return.
        own = plan.steps[0].calls
        ends = in_two(own, share) if line.size > 1 else (own, ())
        self._first, self._final = ([CallPlan(call, options, part, device, False) for call in half] for half in ends)
        # Or half of its heads; sums that came home before the other half would be written over.
        comes = sum(step.sums_back is not None for step in plan.steps)
        self._whole: CallPlan | None = None
        if len(own) == 1 and line.size > 1 and comes <= 1:
            self._whole = CallPlan(own[0], options, part, device, False)
            self._whole.rounds = rounds and not comes
        # Whether the backward's calls make a chain; known from the first one on.
        self._chains: bool | None = None
        self._heads = 0

    def forward(self, t: Tensors, state: Partial | None) -> Partial | None:
        """Attention of the rank's rows over all keys, merged into a state; in q's dtype if there was any call."""
        if self._most_keys is not None:
            return self._forward_gathered(t, state)
        held = t.k, t.v
        leaving = t.k[self._travels], t.v[self._travels]
        for stage in self._forward_stages:
            sends, receives, arriving = self._keys(stage, leaving, held)
            pending = self._messages.post(stage.number, sends, receives)
            for launch in stage.launches:
                state = launch.forward(t, held, state)
            pending.wait()
            held = arriving
        return state

    def _forward_gathered(self, t: Tensors, state: Partial | None) -> Partial | None:
        own = t.k, t.v
        everyone, pending = gather(self._line, "the gathering of keys", own, self._most_keys or 0)
        for stage in self._stages:
            keys = own if stage.number == 0 else _shard(everyone, stage)
            for launch in stage.launches:
                state = launch.forward(t, keys, state)
            pending.wait()
        return state

    def backward(self, t: Tensors, rows: OfRows) -> tuple[Gradients, Sums]:
        """The gradients of q, k and v that are wanted, in lse's dtype; to those of k and v the pair must be added.

        That of q is in its own dtype if the calls make a chain.
        """
        if self._most_keys is not None:
            return self._backward_gathered(t, rows)
        held = t.k, t.v
        leaving = t.k[self._travels], t.v[self._travels]
        total, chain = Gradients(), self._chain(t)
        sums = left = back = _NO_SUMS
        for stage in self._stages:
            sends, receives, arriving = self._keys(stage, leaving, held)
            coming = _NO_SUMS
            if stage.sums_to is not None:
                sends += _parcels(left, stage.sums_to, "back" if stage.is_home else "sums")
            if stage.sums_from is not None:
                coming = self._room_for_sums("sums", stage, arriving, rows)
                receives += _parcels(coming, stage.sums_from, "sums")
            if stage.sums_back is not None:
                _add(total, back, self._travels)
                back = self._room_for_sums("back", stage, leaving, rows)
                receives += _parcels(back, stage.sums_back, "back")
            pending = self._messages.post(stage.number, sends, receives)
            if stage is self._stages[0]:
                total = self._own(self._first, t, rows, None, chain, 0)
            elif stage.launches:
                given: Gradients | None = None
                if sums is not _NO_SUMS or chain is None:
                    given = Gradients(total.dq, *(self._zero_sums(held, rows) if sums is _NO_SUMS else sums))
                for launch in stage.launches:
                    given = launch.backward(t, held, rows, given, chain)
                assert given is not None
                total.dq, left = given.dq, (given.dk, given.dv)
            if stage is self._stages[-1]:
                total = self._own(self._final, t, rows, total, chain, 1)
            pending.wait()
            held, sums = arriving, coming
        if leaving[0].shape != t.k.shape:
            _add(total, back, self._travels)
            back = _NO_SUMS
        return total, back

    def _chain(self, t: Tensors) -> Chain | None:
        """What the calls of a backward share, if all of them can."""
        later = [launch for stage in self._stages[1:] for launch in stage.launches]
        if self._chains is None:
            can, half = all(launch.may_chain(t) for launch in later), t.k.shape[1] // 2
            if can and self._whole and half * t.k.shape[0] >= _ENOUGH_KEYS and self._whole.may_chain(t):
                self._first, self._final, self._heads = [self._whole], [self._whole], half
            calls = [*self._first, *self._final]
            self._chains = can and len(calls) + len(later) > 1 and all(launch.may_chain(t) for launch in calls)
        return Chain(len(self._first) + len(self._final) + len(later)) if self._chains else None

    def _backward_gathered(self, t: Tensors, rows: OfRows) -> tuple[Gradients, Sums]:
        own, most = (t.k, t.v), self._most_keys or 0
        everyone, pending = gather(self._line, "the gathering of keys", own, most)
        total = self._own(self._first, t, rows, None, None)
        pending.wait()
        sums = self._zero_sums(everyone, rows)
        for stage in self._stages[1:]:
            some = slice(stage.first, stage.first + stage.keys)
            dk, dv = (None if x is None else x[stage.source, some] for x in sums)
            for launch in stage.launches:
                launch.backward(t, _shard(everyone, stage), rows, Gradients(total.dq, dk, dv))
        back, pending = scatter_sums(self._line, "the sum of gradients", [x for x in sums if x is not None])
        total = self._own(self._final, t, rows, total, None)
        pending.wait()
        found = iter(x[: t.k.shape[0]] for x in back)
        return total, (None if sums[0] is None else next(found), None if sums[1] is None else next(found))

    def _own(
        self, launches: Sequence[CallPlan], t: Tensors, rows: OfRows, total: Gradients | None, chain: Chain | None,
        half: int = 0,
    ) -> Gradients:  # fmt: skip
        """The sums with the gradients of some calls over the rank's own keys added; zeros if there is nothing."""
        for launch in launches:
            heads = None
            if self._heads:
                heads = (0, self._heads) if half == 0 else (self._heads, t.k.shape[1])
            total = launch.backward(t, (t.k, t.v), rows, total, chain, heads)
        if total is not None:
            return total
        dq = rows.out.new_zeros(t.q.shape, dtype=rows.lse.dtype) if self._grads.q and chain is None else None
        return Gradients(dq, *self._zero_sums((t.k, t.v), rows))

    def _zero_sums(self, keys: Keys, rows: OfRows) -> Sums:
        """Zeros for the gradients of keys that are wanted."""
        dk, dv = (
            torch.zeros_like(x, dtype=rows.lse.dtype) if is_wanted else None
            for x, is_wanted in zip(keys, self._grads[1:3], strict=True)
        )
        return dk, dv

    def _room_for_sums(self, kind: str, stage: _Stage, keys: Keys, rows: OfRows) -> Sums:
        """Tensors to receive the gradients of keys that are wanted."""
        dk, dv = (
            self._messages.room(kind, stage.number, part, x.shape, x, rows.lse.dtype) if is_wanted else None
            for part, (x, is_wanted) in enumerate(zip(keys, self._grads[1:3], strict=True))
        )
        return dk, dv

    def _keys(self, stage: _Stage, leaving: Keys, held: Keys) -> tuple[list[Parcel], list[Parcel], Keys]:
        """The keys that leave and arrive in a stage, and the pair that arrives; the own ones if none does."""
        sends = [Parcel(leaving if is_own else held, to, "keys") for to, is_own in stage.keys_to]
        if stage.keys_from is None:
            return sends, [], leaving
        k, v = (
            self._messages.room("keys", stage.number, part, (stage.next_keys, *x.shape[1:]), x, x.dtype)
            for part, x in enumerate(leaving)
        )
        return sends, [Parcel((k, v), stage.keys_from, "keys")], (k, v)


# Keys of half the heads that occupy a GPU's multiprocessors: half the heads are then half of the work.
_ENOUGH_KEYS = 32768
_NO_SUMS: Sums = (None, None)


def _parcels(sums: Sums, peer: int, kind: str) -> list[Parcel]:
    return [Parcel(sums, peer, kind)] if any(x is not None for x in sums) else []


def _add(total: Gradients, sums: Sums, some: slice) -> None:
    """Adds sums of some of a rank's own keys, those that there are, to their gradients."""
    for x, more in zip((total.dk, total.dv), sums, strict=True):
        if x is not None and more is not None:
            x[some] += more


def _shard(everyone: Keys, stage: _Stage) -> Keys:
    """A stage's keys among gathered ones."""
    k, v = (x[stage.source, stage.first : stage.first + stage.keys] for x in everyone)
    return k, v
