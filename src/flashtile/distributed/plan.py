"""Plans: what each rank computes and sends, step by step, made once from lengths, mask and layout.

Step s of rank r is a packed call of its rows over the keys of rank ``r - s``, counted around the ring of N ranks. Of a
shard of keys a rank gets those that its rows see, once: from the rank before, if that used the same keys in the step
before, else from their owner. So a shard that all ranks see goes around the ring, and of a window its end goes to
one rank. In the backward the float32 sums of dk and dv go after the keys: those of a shard's step s to its step
``s + lag`` if that has the same keys, and from the last ones home to the owner, which adds them to what its own rows
gave. With a lag of 2 they have a whole step to travel, in two chains.

Work that no other rank takes part in stands apart (``Own``): documents that are a rank's alone are a call of their own,
rows that see no other rank's keys need no running output, and keys that no other rank sees no sums in float32.

Pure integers: nothing here needs torch, a device or a process group.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

from flashtile.core.errors import InvalidInputError
from flashtile.core.masks import Band
from flashtile.distributed.calls import Call, aligned, calls_of, moved, parts_in, repeated
from flashtile.distributed.intervals import Kept
from flashtile.distributed.layouts import Layout, check, shard_length
from flashtile.distributed.ring import Own, Ring, Spans, count, own_of


class Send(NamedTuple):
    """What travels of a shard of keys and values, and leaves for the rank that uses it in the step.

    Attributes:
        to: The rank that gets it.
        source: The rank whose keys they are: the sender, or the source of the step before.
        spans: Rows of the shard; of the step before it is all that the sender got.
    """

    to: int
    source: int
    spans: Spans

    @property
    def keys(self) -> int:
        """Their number."""
        return count(self.spans)


@dataclass(frozen=True)
class Step:
    """What a rank does in one step. Its transfers of keys happen before its calls, those of sums after them.

    Attributes:
        number: s, from 0 to N - 1. Steps in which a rank has nothing to do are not in its plan.
        source: The rank whose keys are used, ``rank - number`` around the ring.
        spans: The rows of its shard that the rank gets; in step 0 all rows.
        calls: What is computed; none where the rank only sends, or gets sums.
        receive_from: The rank that the shard comes from: the one before, which used it in the last step, or its owner;
            None if there are no calls, and in step 0.
        sends: The shards that leave for this step of others.
        sums_from: The rank whose float32 dk and dv of the shard this step adds to; None if it starts from zero.
        sums_to: The rank that gets them then: the shard's next user in the chain, or its owner; None if nobody does, in
            step 0 and without calls.
        sums_back: The rank whose dk and dv of this rank's own keys are at the end of their chain with this step.
        back: Which of its own keys these are.
    """

    number: int
    source: int
    spans: Spans
    calls: tuple[Call, ...]
    receive_from: int | None = None
    sends: tuple[Send, ...] = ()
    sums_from: int | None = None
    sums_to: int | None = None
    sums_back: int | None = None
    back: Spans = ()

    @functools.cached_property
    def keys(self) -> int:
        """Rows of the shard that the rank gets."""
        return count(self.spans)


@dataclass(frozen=True)
class Plan:
    """All steps of a rank.

    Attributes:
        world: Number of ranks.
        rank: This one.
        rows: Its queries, with all entries of the batch.
        keys: Its own keys, likewise.
        steps: In the order of their numbers; the first is step 0, the rank's own keys.
        own: Step 0 in parts.
    """

    world: int
    rank: int
    rows: int
    keys: int
    steps: tuple[Step, ...]
    own: Own

    @property
    def pairs(self) -> int:
        """Pairs of a row and a key that the rank computes, of one head."""
        return sum(call.pairs for step in self.steps for call in step.calls)


@functools.lru_cache(maxsize=32)
def make_plan(
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
    world: int,
    rank: int,
    layout: Layout,
    band: Band = Band(),  # noqa: B008
    *,
    batch: int = 1,
    origins: bool = False,
    lag: int = 2,
    whole: bool = False,
    intervals: Kept | None = None,
) -> Plan:
    """The plan of one rank; kept, so that the same arguments give the same object.

    Args:
        lengths_q: Queries of each document; of a dense call its one length.
        lengths_k: Keys of each document. Query i of a document stands at key ``i + length_k - length_q``.
        world: Number of ranks.
        rank: The rank.
        layout: Of queries and keys.
        band: The mask, between positions of a document.
        batch: Entries of a dense call, each of these lengths, whose rows are held one entry after another.
        origins: Whether calls say where their sequences lie. Positions in a sequence are then evenly spaced; without
            them pieces may be joined for which the mask means the same.
        lag: Steps that sums of gradients have to get from one step's rank to that of the next.
        whole: Whether a rank that needs any keys of a shard has all of them, as where they are gathered.
        intervals: What an interval mask keeps, with origins.

    Raises:
        InvalidInputError: Other numbers of documents for queries than for keys, or what ``layouts.check`` refuses.
    """
    if len(lengths_q) != len(lengths_k):
        raise InvalidInputError("lengths_k", f"has {len(lengths_k)} documents, but lengths_q has {len(lengths_q)}")
    check(lengths_q, world, rank, layout)
    check(lengths_k, world, rank, layout)
    if batch < 1 or lag < 1:
        raise InvalidInputError("batch" if batch < 1 else "lag", f"must be at least 1, got {min(batch, lag)}")
    ring = Ring(lengths_q, lengths_k, world, layout, band, origins, whole, intervals)
    rows, before = shard_length(sum(lengths_q), world, rank), ring.private(rank)[0]
    known: dict[tuple[Call, ...], tuple[Call, ...]] = {}  # equal calls of many steps are one object
    steps = []
    for number in range(world):
        source = (rank - number) % world
        spans = ring.seen(rank, source) if number else ((0, ring.keys(source)),)
        found = ring.rectangles(rank, source)
        if number:
            found = aligned(moved(parts_in(found, spans) if intervals else found, spans), before[0])
        calls = tuple(repeated(call, batch) for call in calls_of(found, rows, count(spans), origins))
        step = _step(ring, rank, number, lag, batch, known.setdefault(calls, calls))
        if number == 0 or calls or step.sends or step.sums_back is not None:
            steps.append(step)
    own = own_of(ring, rank, batch, steps)
    return Plan(world, rank, rows * batch, ring.keys(rank) * batch, tuple(steps), own)


def _of_batch(spans: Spans, rows: int, batch: int) -> Spans:
    """Spans of one entry in all entries."""
    if batch == 1 or not spans:
        return spans
    if spans == ((0, rows),):
        return ((0, rows * batch),)
    return tuple((entry * rows + start, entry * rows + stop) for entry in range(batch) for start, stop in spans)


def _step(ring: Ring, rank: int, number: int, lag: int, batch: int, calls: tuple[Call, ...]) -> Step:
    """A step with what travels for it."""
    source, before = ((rank - number + back) % ring.world for back in (0, 1))
    if number == 0:
        return Step(number, source, ((0, ring.keys(source) * batch),), calls)

    def spans(user: int, shard: int) -> Spans:
        return _of_batch(ring.seen(user, shard), ring.keys(shard), batch)

    # The shard of the step before goes on to the next rank that sees the same of it; the own one to those that see
    # other keys than the rank before them, or come after one that sees none.
    after, first = ring.at(before, number), ring.at(rank, number)
    sends = []
    if after is not None and ring.alike(before, number - 1, after) is not None:
        sends.append(Send(after, before, spans(after, before)))
    if first is not None and ring.alike(rank, number - 1, first) is None:
        sends.append(Send(first, rank, spans(first, rank)))
    comes = first is not None and ring.alike(rank, number + lag, first) is None
    found = Step(
        number,
        source,
        spans(rank, source),
        calls,
        sends=tuple(sends),
        sums_back=first if comes else None,
        back=spans(first, rank) if comes and first is not None else (),
    )
    if ring.at(source, number) is None:
        return found
    last, earlier, following = (ring.alike(source, number + i, rank) for i in (-1, -lag, lag))
    return replace(
        found,
        receive_from=source if last is None else last,
        sums_from=earlier,
        sums_to=source if following is None else following,
    )
