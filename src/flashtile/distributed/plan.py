"""Plans: what each rank computes and sends, step by step, made once from lengths, mask and layout.

Step s of rank r is a packed call of r's rows over the keys of rank ``r - s``, counted around the ring of N ranks. A
rank receives only the keys of a shard that its own rows see, and receives them once: from the rank before it, if that
rank used the same keys in the step before, else from their owner. So a shard that all ranks see goes around the whole
ring, and with a window only the end of a shard goes to one rank. In the backward the float32 sums of dk and dv follow
the keys: the sums of step s go to the rank that uses the same keys in step ``s + lag``, if there is one; the last sums
go home to the owner, which adds them to the sums of its own rows. With a lag of 2 the sums travel in two chains, and
each has a whole step for it.

Work that no other rank takes part in is planned apart (``Own``). Documents that one rank holds in full are one call.
Rows that see no other rank's keys need no running output. Keys that no other rank sees need no sums in float32.

Pure integers: nothing here needs torch, a device or a process group.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from flashtile.core.errors import InvalidInputError
from flashtile.core.masks import Band
from flashtile.distributed.calls import RingCall, aligned, calls_of, moved, parts_in, repeated
from flashtile.distributed.intervals import Kept
from flashtile.distributed.layouts import Layout, check, shard_length
from flashtile.distributed.ring import Own, RankRing, RingStep, Send, Spans, count, own_of


@dataclass(frozen=True)
class RingPlan:
    """All steps of a rank.

    Attributes:
        world: Number of ranks.
        rank: This one.
        rows: Its queries, with all entries of the batch.
        keys: Its own keys, likewise.
        steps: In the order of their numbers. The first is step 0, over the rank's own keys.
        own: Step 0, divided into parts.
    """

    world: int
    rank: int
    rows: int
    keys: int
    steps: tuple[RingStep, ...]
    own: Own

    @property
    def pairs(self) -> int:
        """Pairs of a row and a key that the rank computes for one head."""
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
) -> RingPlan:
    """The plan of one rank. It is cached: the same arguments give the same object.

    Args:
        lengths_q: Queries of each document. A dense call is one document.
        lengths_k: Keys of each document. Query i of a document has the position of key ``i + length_k - length_q``.
        world: Number of ranks.
        rank: The rank.
        layout: The layout of queries and of keys.
        band: The mask between positions of a document.
        batch: Entries of a dense call. All have these lengths, and a rank holds their rows one entry after another.
        origins: Whether calls say where their sequences lie. Positions in a sequence are then evenly spaced. Without
            origins, pieces may be joined if the mask means the same for the joined piece.
        lag: Steps from the step in which a rank adds to sums to the step in which the next rank adds to them.
        whole: Whether a rank that needs any keys of a shard receives all of them, as where all keys are gathered.
        intervals: What an interval mask keeps. Calls then have origins.

    Raises:
        InvalidInputError: lengths_q and lengths_k hold different numbers of documents, or ``layouts.check`` refuses.
    """
    if len(lengths_q) != len(lengths_k):
        raise InvalidInputError("lengths_k", f"has {len(lengths_k)} documents, but lengths_q has {len(lengths_q)}")
    check(lengths_q, world, rank, layout)
    check(lengths_k, world, rank, layout)
    if batch < 1 or lag < 1:
        raise InvalidInputError("batch" if batch < 1 else "lag", f"must be at least 1, got {min(batch, lag)}")
    ring = RankRing(lengths_q, lengths_k, world, layout, band, origins, whole, intervals)
    rows, before = shard_length(sum(lengths_q), world, rank), ring.private(rank)[0]
    known: dict[tuple[RingCall, ...], tuple[RingCall, ...]] = {}  # equal calls of many steps are one object
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
    return RingPlan(world, rank, rows * batch, ring.keys(rank) * batch, tuple(steps), own)


def _of_batch(spans: Spans, rows: int, batch: int) -> Spans:
    """The spans of one entry, repeated for all entries of the batch."""
    if batch == 1 or not spans:
        return spans
    if spans == ((0, rows),):
        return ((0, rows * batch),)
    return tuple((entry * rows + start, entry * rows + stop) for entry in range(batch) for start, stop in spans)


def _step(ring: RankRing, rank: int, number: int, lag: int, batch: int, calls: tuple[RingCall, ...]) -> RingStep:
    """A step, with the keys and sums that travel for it."""
    source, before = ((rank - number + back) % ring.world for back in (0, 1))
    if number == 0:
        return RingStep(number, source, ((0, ring.keys(source) * batch),), calls)

    def spans(user: int, shard: int) -> Spans:
        return _of_batch(ring.seen(user, shard), ring.keys(shard), batch)

    # The shard that this rank used in the step before goes on to the next rank, if that rank sees the same keys of it.
    # The own shard goes to each rank that sees other keys of it than the rank before, or follows one that sees none.
    after, first = ring.at(before, number), ring.at(rank, number)
    sends = []
    if after is not None and ring.alike(before, number - 1, after) is not None:
        sends.append(Send(after, before, spans(after, before)))
    if first is not None and ring.alike(rank, number - 1, first) is None:
        sends.append(Send(first, rank, spans(first, rank)))
    comes = first is not None and ring.alike(rank, number + lag, first) is None
    found = RingStep(
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
