"""The execution of a plan: the kernels of each step, the keys that travel beside them, and in the backward the sums.

Tensors are packed here: all of a rank's rows, ``(rows, heads, head_dim)``, entries of a batch one after another. Stage
s runs step s of the plan while the keys of step s + 1 arrive, and while the float32 dk and dv that step s - 1 added to
leave for their next rank or their owner. What a stage sends and receives is posted at once, in the same order on all
ranks, and before its kernels.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile import dispatch, ops, settings
from flashtile.arguments import Grads, Options, Tensors
from flashtile.backends.base import Backward, Chain, Forward, Gradients
from flashtile.distributed.copies import Copies
from flashtile.distributed.exchange import Line, Messages, Parcel, gather, scatter_sums
from flashtile.distributed.halves import in_two
from flashtile.distributed.plan import Call, Plan, Step
from flashtile.families import family_of
from flashtile.masks import Origin
from flashtile.problem import Problem
from flashtile.states import Partial

# Keys and values of a shard, or their gradients, None where one is not wanted.
Keys = tuple[Tensor, Tensor]
Sums = tuple[Tensor | None, Tensor | None]


class Part(NamedTuple):
    """Which part of the whole call a rank's tensors are: how many query heads that has, and the first of this one's."""

    heads: int
    first_head: int


class OfRows(NamedTuple):
    """What the backward needs of the rows, contiguous; see ``backends.base.Backward``."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


class _Launch:
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
            rows = [Origin(o.batch * part.heads + part.first_head, *o[1:]) for o in call.origins]
            self._origins = _int32(rows, device)
            self._entries = _int32([o.batch for o in call.origins], device)
        self._is_last = is_last
        self._forward: Forward | None = None
        self._backwards: dict[Any, Backward] = {}

    def _given(self, t: Tensors, keys: Keys) -> Tensors:
        slopes = t.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes.index_select(0, self._entries)
        bounds = self._bounds_q, self._bounds_k
        return Tensors(t.q, *keys, slopes, None, None, None, *bounds, t.rng_state, self._origins)

    def forward(self, t: Tensors, keys: Keys, state: Partial | None) -> Partial:
        """The state after these keys; in q's dtype if the call is the last."""
        given = self._given(t, keys)
        if self._forward is None:
            problem = Problem.of(given, self.options)
            problem = problem.but(out_dtype=problem.dtype if self._is_last else problem.lse_dtype)
            known = self._known(given, problem, "forward")
            chosen = dispatch.select(problem, "forward", self.options.backend)
            self._forward = chosen.plan_forward(problem, given, known)
        return Partial(*self._forward(given, state))

    def backward(
        self, t: Tensors, keys: Keys, rows: OfRows, sums: Gradients | None, chain: Chain | None = None
    ) -> Gradients:
        """The sums with this call's gradients added; new ones if there are none."""
        given = self._given(t, keys)
        # Hooks of saved tensors may have given q other strides; all others are contiguous.
        key = t.q.stride(), t.q.data_ptr() % 16, rows.dlse is None
        run: Any = self._backwards.get(key)
        if run is None:
            problem = Problem.of(given, self.options)
            problem = problem.but(grad_dtype=problem.lse_dtype)
            known = self._known(given, problem, "backward")
            chosen = dispatch.select(problem, "backward", self.options.backend)
            run = self._backwards[key] = chosen.plan_backward(problem, given, rows.dout, rows.dlse, known)
        return run(given, *rows, sums) if chain is None else run.in_chain(given, *rows, sums, chain)

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

    def _known(self, t: Tensors, problem: Problem, direction: str) -> dict[Any, Any] | None:
        """What plans share with those of other lengths."""
        common = family_of(t, self.options)
        if common is None:
            return None
        kind = problem.out_dtype, problem.grad_dtype, settings.BACKEND.raw(), ops.products(t.q)
        return ops.shared_family((*common, *kind)).known[direction]


def _int32(values: Sequence[Any], device: torch.device) -> Tensor:
    # A training step could not save a tensor that was made in inference mode.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int32, device=device)


@dataclasses.dataclass
class _Stage:
    """What is posted before the launches of a step, and the launches.

    Attributes:
        number: Of the step; the number of ranks for what follows the last.
        launches: Its calls.
        source: The rank whose keys they use.
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
    launches: list[_Launch] = dataclasses.field(default_factory=list)
    source: int = 0
    keys: int = 0
    keys_to: list[tuple[int, bool]] = dataclasses.field(default_factory=list)
    keys_from: int | None = None
    next_keys: int = 0
    sums_to: int | None = None
    is_home: bool = False
    sums_from: int | None = None
    sums_back: int | None = None


def _stages(plan: Plan, launch_of: Callable[[Step, Call], _Launch]) -> list[_Stage]:
    """The stages of a plan, in order; the first is that of step 0."""
    found: dict[int, _Stage] = {}

    def stage(number: int) -> _Stage:
        return found.setdefault(number, _Stage(number))

    for step in plan.steps:
        here = stage(step.number)
        here.launches = [launch_of(step, call) for call in step.calls]
        here.source, here.keys = step.source, step.keys
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
    ) -> None:
        self._line, self._grads, self._messages = line, options.grads, messages
        # Shards in a gathered tensor start on 16 bytes, whatever their width.
        self._most_keys = None if most_keys is None else -(-most_keys // 8) * 8
        last = next((step for step in reversed(plan.steps) if step.calls), None)
        made: dict[Any, _Launch] = {}

        def launch_of(step: Step, call: Call) -> _Launch:
            is_last = step is last and call is step.calls[-1]
            key = call, is_last, step.number == 0
            if key not in made:
                made[key] = _Launch(call, options, part, device, is_last)
            return made[key]

        self._stages = _stages(plan, launch_of)
        self._forward_stages = [each for each in self._stages if each.launches or each.keys_to or each.next_keys]
        # In the backward some of step 0 comes first, while keys leave, and the other part last, while sums return.
        own = plan.steps[0].calls
        ends = in_two(own, share) if line.size > 1 else (own, ())
        self._first, self._final = ([_Launch(call, options, part, device, False) for call in half] for half in ends)
        # Whether the backward's calls make a chain; known from the first one on.
        self._chains: bool | None = None

    def forward(self, t: Tensors, state: Partial | None) -> Partial | None:
        """Attention of the rank's rows over all keys, merged into a state; in q's dtype if there was any call."""
        if self._most_keys is not None:
            return self._forward_gathered(t, state)
        own = held = t.k, t.v
        for stage in self._forward_stages:
            sends, receives, arriving = self._keys(stage, own, held)
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
        own = held = t.k, t.v
        total, chain = Gradients(), self._chain(t)
        sums = left = back = _NO_SUMS
        for stage in self._stages:
            sends, receives, arriving = self._keys(stage, own, held)
            coming = _NO_SUMS
            if stage.sums_to is not None:
                sends += _parcels(left, stage.sums_to, "back" if stage.is_home else "sums")
            if stage.sums_from is not None:
                coming = self._room_for_sums("sums", stage, arriving, rows)
                receives += _parcels(coming, stage.sums_from, "sums")
            if stage.sums_back is not None:
                _add(total, back)
                back = self._room_for_sums("back", stage, own, rows)
                receives += _parcels(back, stage.sums_back, "back")
            pending = self._messages.post(stage.number, sends, receives)
            if stage is self._stages[0]:
                total = self._own(self._first, t, rows, None, chain)
            elif stage.launches:
                given: Gradients | None = None
                if sums is not _NO_SUMS or chain is None:
                    given = Gradients(total.dq, *(self._zero_sums(held, rows) if sums is _NO_SUMS else sums))
                for launch in stage.launches:
                    given = launch.backward(t, held, rows, given, chain)
                assert given is not None
                total.dq, left = given.dq, (given.dk, given.dv)
            if stage is self._stages[-1]:
                total = self._own(self._final, t, rows, total, chain)
            pending.wait()
            held, sums = arriving, coming
        return total, back

    def _chain(self, t: Tensors) -> Chain | None:
        """What the calls of a backward share, if all of them can."""
        calls = [*self._first, *self._final, *(launch for stage in self._stages[1:] for launch in stage.launches)]
        if self._chains is None:
            self._chains = len(calls) > 1 and all(launch.may_chain(t) for launch in calls)
        return Chain(len(calls)) if self._chains else None

    def _backward_gathered(self, t: Tensors, rows: OfRows) -> tuple[Gradients, Sums]:
        own, most = (t.k, t.v), self._most_keys or 0
        everyone, pending = gather(self._line, "the gathering of keys", own, most)
        total = self._own(self._first, t, rows, None, None)
        pending.wait()
        sums = self._zero_sums(everyone, rows)
        for stage in self._stages[1:]:
            dk, dv = (None if x is None else x[stage.source, : stage.keys] for x in sums)
            for launch in stage.launches:
                launch.backward(t, _shard(everyone, stage), rows, Gradients(total.dq, dk, dv))
        back, pending = scatter_sums(self._line, "the sum of gradients", [x for x in sums if x is not None])
        total = self._own(self._final, t, rows, total, None)
        pending.wait()
        found = iter(x[: t.k.shape[0]] for x in back)
        return total, (None if sums[0] is None else next(found), None if sums[1] is None else next(found))

    def _own(
        self, launches: Sequence[_Launch], t: Tensors, rows: OfRows, total: Gradients | None, chain: Chain | None
    ) -> Gradients:
        """The sums with the gradients of some calls over the rank's own keys added; zeros if there is nothing."""
        for launch in launches:
            total = launch.backward(t, (t.k, t.v), rows, total, chain)
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

    def _keys(self, stage: _Stage, own: Keys, held: Keys) -> tuple[list[Parcel], list[Parcel], Keys]:
        """The keys that leave and arrive in a stage, and the pair that arrives; the own ones if none does."""
        sends = [Parcel(own if is_own else held, to, "keys") for to, is_own in stage.keys_to]
        if stage.keys_from is None:
            return sends, [], own
        k, v = (
            self._messages.room("keys", stage.number, part, (stage.next_keys, *x.shape[1:]), x, x.dtype)
            for part, x in enumerate(own)
        )
        return sends, [Parcel((k, v), stage.keys_from, "keys")], (k, v)


_NO_SUMS: Sums = (None, None)


def _parcels(sums: Sums, peer: int, kind: str) -> list[Parcel]:
    return [Parcel(sums, peer, kind)] if any(x is not None for x in sums) else []


def _add(total: Gradients, sums: Sums) -> None:
    """Adds sums of a rank's own keys, those that there are, to their gradients."""
    for x, more in zip((total.dk, total.dv), sums, strict=True):
        if x is not None and more is not None:
            x += more


def _shard(everyone: Keys, stage: _Stage) -> Keys:
    """A stage's keys among gathered ones."""
    k, v = (x[stage.source, : stage.keys] for x in everyone)
    return k, v
