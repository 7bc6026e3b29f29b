"""Runs a plan: the kernels of each step, the transfers of keys beside them, and in the backward the transfers of sums.

Tensors are packed here: all rows of a rank, ``(rows, heads, head_dim)``, one entry of a batch after another. Stage s
runs step s of the plan. Meanwhile the keys of step s + 1 arrive, and the float32 dk and dv to which step s - 1 added
leave for their next rank or their owner. All sends and receives of a stage are posted together, before its kernels, in
the same order on all ranks.

Work that no other rank takes part in (``ring.Own``) is computed while the first keys arrive. It writes its results in
their final place and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile.call.arguments import Options, Tensors
from flashtile.call.backend import Chain, Gradients
from flashtile.distributed.calls import RingCall, held_back, of_first_rows
from flashtile.distributed.copies import Copies
from flashtile.distributed.exchange import Messages, Parcel, RankLine, gather, scatter_sums
from flashtile.distributed.launches import CallPlan, Keys, OfRows, RankPart, Running, Stage, some_of, stages_of, wide
from flashtile.distributed.plan import RingPlan
from flashtile.distributed.ring import OwnShare, RingStep, Spans
from flashtile.distributed.sums import NO_SUMS, Sums, add, parcels, rounded


class Steps:
    """The steps of one rank, with everything that repeated calls of one kind share.

    Args:
        plan: The rank's plan.
        line: The ring.
        options: Options of the call; the band is taken from the plan.
        part: Which part of the whole call the tensors are.
        device: The device of the tensors.
        messages: Sends and receives.
        most_keys: Rows of the largest shard, if all keys are gathered at once and sums scattered; None if keys travel
            around a ring.
        share: The part of the backward over the rank's own keys that runs first.
        rounds: Whether gradients of keys are wanted in the keys' dtype; else in lse's dtype.
    """

    def __init__(
        self,
        plan: RingPlan,
        line: RankLine,
        options: Options,
        part: RankPart,
        device: torch.device,
        messages: Messages | Copies,
        most_keys: int | None = None,
        share: float = 0.5,
        rounds: bool = False,
    ) -> None:
        self._line, self._rank, self._grads, self._messages = line, plan.rank, options.grads, messages
        self._own = own = plan.own
        self._rounds, self._large_scores = rounds, part.large_scores
        # Shards in a gathered tensor start on 16 bytes, whatever their width.
        self._most_keys = None if most_keys is None else -(-most_keys // 8) * 8
        # The keys for which sums come home, for each step in which some do.
        self._comes = [step.back for step in plan.steps if step.sums_back is not None]
        made: dict[Any, CallPlan] = {}

        def launches(calls: Iterable[RingCall], ends: bool = False, rows: int | None = None) -> list[CallPlan]:
            """The launches of calls. ``ends``: they end their rows, so the results of the last call are final."""
            calls = [call if rows is None else of_first_rows(call, rows) for call in calls]
            found = []
            for call in calls:
                key = call, ends and call is calls[-1]
                if key not in made:
                    made[key] = CallPlan(call, options, part, device, key[1])
                found.append(made[key])
            return found

        def unshared(calls: Iterable[RingCall]) -> list[CallPlan]:
            """Backward launches for keys that no other call adds to: dk and dv are final."""
            found = [CallPlan(call, options, part, device, True) for call in calls]
            for launch in found:
                launch.rounds = rounds
            return found

        remote, common = own.remote_rows.rows[1], own.common.rows[1]
        last = next((step for step in reversed(plan.steps) if step.calls), None)
        self._local_rows = launches(own.local_rows.calls, True)
        self._private = unshared(() if own.private is None else own.private.calls)
        joined = own.joined if most_keys is None else None

        def forwards(step: RingStep) -> list[CallPlan]:
            if joined is not None:
                return launches(joined.calls, True) if step.number and step.calls else []
            if step.number:
                return launches(step.calls, step is last, remote)
            return launches(own.remote_rows.calls, last is None or not last.number)

        self._forward_stages = stages_of(plan, forwards)
        self._stages = stages_of(plan, lambda step: launches(step.calls, False, common) if step.number else [])
        first, *others = self._forward_stages
        self._forward_stages = [first, *(x for x in others if x.launches or x.following.sends or x.following.keys)]
        # In the backward a part of step 0 runs first, while keys leave, and the rest last, while sums return.
        calls, self._later = own.common.calls, [launch for stage in self._stages for launch in stage.launches]
        ends = held_back(calls, share, sum(stop - start for spans in self._comes for start, stop in spans))
        self._first, self._final = (launches(half) for half in ends)
        # Or half of the heads first. With several returns of sums, later ones would overwrite sums not yet added.
        self._whole: CallPlan | None = None
        if len(calls) == 1 and len(self._comes) == 1:
            self._whole = CallPlan(calls[0], options, part, device, False)
        # Or the keys that no other rank sees first, and then the rest.
        self._private_keys = [unshared(each.calls) for each in own.private_keys]
        self._shared_keys = launches(own.shared_keys.calls)
        # Whether the backward's calls form a chain; set in the first backward.
        self._chains: bool | None = None
        self._heads, self._by_keys = 0, False

    def forward(self, t: Tensors, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attention of the rank's rows over all keys: out in q's dtype, and lse."""
        own = self._own
        shares = [each for each in (own.remote_rows, own.local_rows) if each.rows[0] < each.rows[1]]
        into = t.q.new_empty((*t.q.shape[:2], t.v.shape[2])) if len(shares) > 1 else None
        parts = [(each, Running(t, each, sinks, into, self._large_scores)) for each in shares or [own.remote_rows]]
        for stage, keys in self._coming(t):
            for share, running in parts:
                if share is own.remote_rows:
                    running.add(stage.launches, keys if stage.here.number else None)
                elif stage.here.number == 0:
                    running.add(self._local_rows)
        found = [running.result() for _, running in parts]
        return found[0] if into is None else (into, torch.cat([lse for _, lse in found], 1))

    def _coming(self, t: Tensors) -> Iterator[tuple[Stage, Keys]]:
        """The forward's stages with their keys. The keys of the next stage arrive meanwhile."""
        held = t.k, t.v
        if self._most_keys is not None:
            everyone, pending = gather(self._line, "the gathering of keys", held, self._most_keys)
            for stage in self._forward_stages:
                yield stage, held if stage.here.number == 0 else _shard(everyone, stage.here)
                pending.wait()
            return
        for stage in self._forward_stages:
            sends, receives, arriving = self._keys(stage, t, held, self._own.joined)
            pending = self._messages.post(stage.here.number, sends, receives)
            yield stage, held
            pending.wait()
            held = arriving

    def backward(self, t: Tensors, rows: OfRows) -> Gradients:
        """The gradients that are wanted: dq in q's dtype; dk and dv in the keys' dtype, or in lse's."""
        common, private = self._own.common, self._own.private
        beside: list[Gradients] = []

        def run_private() -> None:
            if private is not None:
                some = some_of(t, private.rows, private.keys)
                beside.append(self._private[0].backward(some, (some.k, some.v), rows.of(private.rows), None))

        if private is not None and self._most_keys is None and len(self._stages) == 1 and common.is_empty:
            run_private()
            return beside[0]
        some, of_some = some_of(t, common.rows, common.keys), rows.of(common.rows)
        if self._most_keys is None:
            found = self._backward(some, of_some, run_private)
        else:
            found = self._backward_gathered(some, of_some, run_private, (t.k, t.v))
        if not beside:
            return found
        last = beside[0]
        pairs = (found.dq, last.dq), (found.dk, last.dk), (found.dv, last.dv)
        dq, dk, dv = (None if a is None or b is None else torch.cat([a, b]) for a, b in pairs)
        return Gradients(dq, dk, dv)

    def _backward(self, t: Tensors, rows: OfRows, beside: Callable[[], None]) -> Gradients:
        chain, held = self._chain(t), (t.k, t.v)
        finished = NO_SUMS
        total, shared_keys = Gradients(), self._own.shared_keys
        sums = left = back = NO_SUMS
        spans: Spans = ()
        for stage in self._stages:
            sends, receives, arriving = self._keys(stage, t, held)
            coming = NO_SUMS
            here, before, following = stage.here, stage.before, stage.following
            if before.sums_to is not None:
                sends += parcels(left, before.sums_to, "back" if before.sums_to == before.source else "sums")
            if following.sums_from is not None:
                coming = self._room_for_sums("sums", here.number, following.keys, t)
                receives += parcels(coming, following.sums_from, "sums")
            if before.sums_back is not None:
                add(total, back, spans)
                spans = before.back
                if self._by_keys:
                    spans = tuple((start - shared_keys.keys[0], stop - shared_keys.keys[0]) for start, stop in spans)
                back = self._room_for_sums("back", here.number, sum(b - a for a, b in spans), t)
                receives += parcels(back, before.sums_back, "back")
            pending = self._messages.post(here.number, sends, receives)
            if stage is self._stages[0]:
                beside()
                total, finished = self._begin(t, rows, chain)
            elif stage.launches:
                given: Gradients | None = None
                if sums is not NO_SUMS or chain is None:
                    given = Gradients(total.dq, *(self._zero_sums(held, t) if sums is NO_SUMS else sums))
                for launch in stage.launches:
                    given = launch.backward(t, held, rows, given, chain)
                assert given is not None
                total.dq, left = given.dq if total.dq is None else total.dq, (given.dk, given.dv)
            if stage is self._stages[-1]:
                total = self._end(t, rows, total, chain)
            pending.wait()
            held, sums = arriving, coming
        first = self._own.shared_keys.keys[0] if self._by_keys else 0
        return rounded(total, back, spans, finished, first, t.q.dtype, t.k.dtype if self._rounds else wide(t))

    def _chain(self, t: Tensors) -> Chain | None:
        """What the calls of a backward share, if all of them can. Sets which launches come first and last."""
        if self._chains is None:
            can, half = all(launch.may_chain(t) for launch in self._later), t.k.shape[1] // 2
            by_keys = [launch for launches in self._private_keys for launch in launches]
            if all(len(launches) == 1 for launches in self._private_keys) and self._private_keys:
                self._by_keys = can and all(launch.may_chain(t) for launch in (*by_keys, *self._shared_keys))
            if self._by_keys:
                self._first, self._final = by_keys, self._shared_keys
            elif can and self._whole and half * t.k.shape[0] >= _ENOUGH_KEYS and self._whole.may_chain(t):
                self._first, self._final, self._heads = [self._whole], [self._whole], half
            calls = [*self._first, *self._final]
            self._chains = can and len(calls) + len(self._later) > 1 and all(launch.may_chain(t) for launch in calls)
            self._by_keys = self._by_keys and self._chains
        return Chain(len(self._first) + len(self._final) + len(self._later)) if self._chains else None

    def _begin(self, t: Tensors, rows: OfRows, chain: Chain | None) -> tuple[Gradients, Sums]:
        """Sums of the first calls over the rank's own keys; and the gradients of its keys that are final already."""
        if not self._by_keys:
            return self._over_own(self._first, t, rows, None, chain, 0), NO_SUMS
        dtype, total = t.k.dtype if self._rounds else wide(t), Gradients()
        dk, dv = (
            torch.empty_like(x, dtype=dtype) if wanted else None
            for x, wanted in zip((t.k, t.v), self._grads[1:3], strict=True)
        )
        for launch, share in zip(self._first, self._own.private_keys, strict=True):
            some = slice(*share.keys)
            into = Gradients(None, None if dk is None else dk[some], None if dv is None else dv[some])
            found = launch.backward(t, (t.k[some], t.v[some]), rows, into, chain, (0, t.k.shape[1]))
            total.dq = found.dq if total.dq is None else total.dq
        if len(self._comes) > 1:
            some = slice(*self._own.shared_keys.keys)
            total.dk, total.dv = self._zero_sums((t.k[some], t.v[some]), t)
        return total, (dk, dv)

    def _end(self, t: Tensors, rows: OfRows, total: Gradients, chain: Chain | None) -> Gradients:
        """The sums, to which the last calls over the rank's own keys are added."""
        if not self._by_keys:
            return self._over_own(self._final, t, rows, total, chain, 1)
        some = slice(*self._own.shared_keys.keys)
        keys = t.k[some], t.v[some]
        given = None if total.dk is None and total.dv is None else total
        for launch in self._final:
            given = launch.backward(t, keys, rows, given, chain)
        if given is None:
            given = Gradients(None, *self._zero_sums(keys, t))
        given.dq = total.dq if given.dq is None else given.dq
        return given

    def _backward_gathered(self, t: Tensors, rows: OfRows, beside: Callable[[], None], own: Keys) -> Gradients:
        most = self._most_keys or 0
        everyone, pending = gather(self._line, "the gathering of keys", own, most)
        beside()
        total = self._over_own(self._first, t, rows, None, None)
        pending.wait()
        sums = self._zero_sums(everyone, t)
        for stage in self._stages[1:]:
            step = stage.here
            dk, dv = (None if x is None else x[step.source, : step.keys] for x in sums)
            for launch in stage.launches:
                launch.backward(t, _shard(everyone, step), rows, Gradients(total.dq, dk, dv))
        back, pending = scatter_sums(self._line, "the sum of gradients", [x for x in sums if x is not None])
        total = self._over_own(self._final, t, rows, total, None)
        pending.wait()
        found, some = iter(back), t.k.shape[0]
        more = [None if x is None else next(found)[:some] for x in sums]
        dtype = t.k.dtype if self._rounds else wide(t)
        return rounded(total, (more[0], more[1]), ((0, some),), NO_SUMS, 0, t.q.dtype, dtype)

    def _over_own(
        self, launches: Sequence[CallPlan], t: Tensors, rows: OfRows, total: Gradients | None, chain: Chain | None,
        half: int = 0,
    ) -> Gradients:  # fmt: skip
        """The sums, with the gradients of some calls over the rank's own keys added; zeros without any call."""
        if total is None and rows.wholes is not None:  # added to: what rows have other keys is then expected
            total = self._zeros(t, rows)
        for launch in launches:
            heads = None
            if self._heads:
                heads = (0, self._heads) if half == 0 else (self._heads, t.k.shape[1])
            total = launch.backward(t, (t.k, t.v), rows, total, chain, heads)
        if total is not None:
            return total
        return Gradients(None, *self._zero_sums((t.k, t.v), t)) if chain else self._zeros(t, rows)

    def _zeros(self, t: Tensors, rows: OfRows) -> Gradients:
        """Zeros for the wanted gradients of q and of the own keys."""
        dq = rows.out.new_zeros(t.q.shape, dtype=wide(t)) if self._grads.q else None
        return Gradients(dq, *self._zero_sums((t.k, t.v), t))

    def _zero_sums(self, keys: Keys, t: Tensors) -> Sums:
        """Zeros for the gradients of keys that are wanted."""
        dk, dv = (
            torch.zeros_like(x, dtype=wide(t)) if is_wanted else None
            for x, is_wanted in zip(keys, self._grads[1:3], strict=True)
        )
        return dk, dv

    def _room_for_sums(self, kind: str, number: int, keys: int, t: Tensors) -> Sums:
        """Tensors that receive the wanted gradients of ``keys`` keys."""
        dk, dv = (
            self._messages.room(kind, number, part, (keys, *x.shape[1:]), x, wide(t)) if is_wanted else None
            for part, (x, is_wanted) in enumerate(zip((t.k, t.v), self._grads[1:3], strict=True))
        )
        return dk, dv

    def _keys(
        self, stage: Stage, t: Tensors, held: Keys, joined: OwnShare | None = None
    ) -> tuple[list[Parcel], list[Parcel], Keys]:
        """The keys that leave and arrive in a stage, and the pair of tensors for those that arrive, or the own keys.

        If own keys are joined to the keys that arrive, the pair holds these first and then the own keys.
        """
        number, step = stage.here.number, stage.following
        sends = []
        for each in step.sends:
            if each.source == self._rank:
                parts = tuple(tuple(x[start:stop] for start, stop in each.spans) for x in (t.k, t.v))
            else:
                parts = _in_spans(held, each.spans)
            sends.append(Parcel(parts, each.to, "keys"))
        if step.receive_from is None:
            return sends, [], (t.k, t.v)
        some = slice(0, 0) if joined is None else slice(*joined.keys)
        rows = step.keys + some.stop - some.start
        k, v = (
            self._messages.room("keys", number, part, (rows, *x.shape[1:]), x, x.dtype)
            for part, x in enumerate((t.k, t.v))
        )
        if joined is not None:
            for x, mine in ((k, t.k), (v, t.v)):
                x[step.keys :].copy_(mine[some])
        arriving = k[: step.keys], v[: step.keys]
        return sends, [Parcel(_in_spans(arriving, step.spans), step.receive_from, "keys")], (k, v)


# Keys times half of the heads at which half of the heads occupy a GPU's multiprocessors: halves then take half the
# time.
_ENOUGH_KEYS = 32768


def _in_spans(keys: Keys, spans: Spans) -> tuple[tuple[Tensor, ...], ...]:
    """Tensors of a shard's spans, which follow one another, divided span by span."""
    lengths = [stop - start for start, stop in spans]
    return tuple(x.split(lengths) if len(lengths) > 1 else (x,) for x in keys)


def _shard(everyone: Keys, step: RingStep) -> Keys:
    """The part of the gathered keys that a step uses."""
    k, v = (x[step.source, : step.keys] for x in everyone)
    return k, v
