"""Plans: what each rank computes and sends, step by step, made once from lengths, mask and layout.

Step s of rank r is a packed call of its rows over the keys of rank ``r - s``, counted around the ring of N ranks. A
shard of keys goes from its owner to the next rank and on, as far as somebody needs it; where ranks in between do not
need it, its owner sends it past them. Of a contiguous shard only the rows travel from the first to the last that others
keep. Each rank that needs a shard gets it once. In the backward the float32 sums of dk
and dv go after the keys: those of a shard's step s to its step ``s + lag``, and from the last ones home to the owner,
which adds them to what its own rows gave. With a lag of 2 they have a whole step to travel, in two chains.

Pure integers: nothing here needs torch, a device or a process group.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashtile.core.errors import InvalidInputError
from flashtile.core.masks import Band
from flashtile.distributed.calls import Call as Call
from flashtile.distributed.calls import Rectangle, calls_of, kept, rectangles, repeated
from flashtile.distributed.layouts import Layout, Piece, check, pieces, shard_length

# Rows that travel begin on a multiple, so that those of 16-bit elements begin on 16 bytes whatever their width.
_ALIGNED = 8


class Send(NamedTuple):
    """What travels of a shard of keys and values, and leaves for the rank that uses it in the step.

    Attributes:
        to: The rank that gets it.
        source: The rank whose keys they are: the sender, or the source of the step before.
        keys: Rows, with all entries of the batch.
    """

    to: int
    source: int
    keys: int


@dataclass(frozen=True)
class Step:
    """What a rank does in one step. Its transfers of keys happen before its calls, those of sums after them.

    Attributes:
        number: s, from 0 to N - 1. Steps in which a rank has nothing to do are not in its plan.
        source: The rank whose keys are used, ``rank - number`` around the ring.
        keys: Rows that travel of its shard, with all entries of the batch; in step 0 all rows.
        calls: What is computed; none where the rank only sends, or gets sums.
        receive_from: The rank that the shard comes from: the one before, which used it in the last step, or its owner;
            None if there are no calls, and in step 0.
        sends: The shards that leave for this step of others.
        sums_from: The rank whose float32 dk and dv of the shard this step adds to; None if it starts from zero.
        sums_to: The rank that gets them then: the shard's next user in the chain, or its owner; None if nobody does, in
            step 0 and without calls.
        sums_back: The rank whose dk and dv of this rank's own keys are at the end of their chain with this step.
        first: The row of the shard with which its keys begin.
    """

    number: int
    source: int
    keys: int
    calls: tuple[Call, ...]
    receive_from: int | None = None
    sends: tuple[Send, ...] = ()
    sums_from: int | None = None
    sums_to: int | None = None
    sums_back: int | None = None
    first: int = 0


@dataclass(frozen=True)
class Plan:
    """All steps of a rank.

    Attributes:
        world: Number of ranks.
        rank: This one.
        rows: Its queries, with all entries of the batch.
        keys: Its own keys, likewise.
        steps: In the order of their numbers; the first is step 0, the rank's own keys.
        travels: The first of its keys that others get, and the end of them.
    """

    world: int
    rank: int
    rows: int
    keys: int
    steps: tuple[Step, ...]
    travels: tuple[int, int]

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

    Raises:
        InvalidInputError: Other numbers of documents for queries than for keys, or what ``layouts.check`` refuses.
    """
    if len(lengths_q) != len(lengths_k):
        raise InvalidInputError("lengths_k", f"has {len(lengths_k)} documents, but lengths_q has {len(lengths_q)}")
    check(lengths_q, world, rank, layout)
    check(lengths_k, world, rank, layout)
    if batch < 1 or lag < 1:
        raise InvalidInputError("batch" if batch < 1 else "lag", f"must be at least 1, got {min(batch, lag)}")
    ring = _Ring(lengths_q, lengths_k, world, layout, band, batch)
    rows = shard_length(sum(lengths_q), world, rank)
    known: dict[tuple[Call, ...], tuple[Call, ...]] = {}  # equal calls of many steps are one object
    steps = []
    for number in range(world):
        source = (rank - number) % world
        first, stop = ring.travels(source) if number else (0, ring.keys(source))
        found = ring.rectangles(rank, source, origins) if number == 0 or ring.needs(rank, source) else []
        found = [each._replace(key=each.key - first) for each in found] if first else found
        calls = tuple(repeated(call, batch) for call in calls_of(found, rows, stop - first, origins))
        step = _step(ring, rank, number, lag, batch, known.setdefault(calls, calls))
        if number == 0 or calls or step.sends or step.sums_back is not None:
            steps.append(step)
    first, stop = ring.travels(rank)
    return Plan(world, rank, rows * batch, ring.keys(rank) * batch, tuple(steps), (first, stop * batch))


class _Ring:
    """Who holds what, and who needs whose keys."""

    def __init__(
        self, lengths_q: Sequence[int], lengths_k: Sequence[int], world: int, layout: Layout, band: Band, batch: int
    ) -> None:
        self.world, self.band, self._lengths_q = world, band, lengths_q
        # Of several entries the same rows do not lie together.
        self._is_cut = layout == "contiguous" and batch == 1
        self.shifts = [k - q for q, k in zip(lengths_q, lengths_k, strict=True)]
        self._rows = self._columns = functools.cache(functools.partial(_by_document, lengths_q, world, layout))
        if lengths_k != lengths_q:
            self._columns = functools.cache(functools.partial(_by_document, lengths_k, world, layout))
        self.needs, self.travels = functools.cache(self._needs), functools.cache(self._travels)
        self.keys = functools.cache(functools.partial(shard_length, sum(lengths_k), world))

    def _shared(self, rank: int, source: int) -> Iterable[tuple[int, list[Piece], list[Piece]]]:
        """Of each document that both ranks have, its number, the rank's rows and the source's keys."""
        rows, keys = self._rows(rank), self._columns(source)
        return ((document, rows[document], keys[document]) for document in rows if document in keys)

    def _needs(self, rank: int, source: int) -> bool:
        """Whether a rank keeps any pair with a rank's keys."""
        return any(
            kept(q, k, self.band, self.shifts[document])
            for document, rows, keys in self._shared(rank, source)
            for q in rows
            for k in keys
        )

    def _travels(self, source: int) -> tuple[int, int]:
        """The first of a rank's keys that others get, and the end of them."""
        if not self._is_cut:
            return 0, self.keys(source)
        ends: list[int] = []
        for document, keys in self._columns(source).items():
            mine, stop = self._rows(source).get(document, [Piece(document, 0, 1, 0, 0)])[0], self._lengths_q[document]
            after = mine.start + mine.length
            # What all other ranks have.
            for q in (Piece(document, 0, 1, mine.start, 0), Piece(document, after, 1, stop - after, 0)):
                for each in rectangles([q], keys, self.band, self.shifts[document], True) if q.length else []:
                    ends += each.key, each.key + each.keys
        return (min(ends) // _ALIGNED * _ALIGNED, max(ends)) if ends else (0, 0)

    def at(self, source: int, number: int) -> int | None:
        """The rank whose step of that number uses the source's keys, if there is such a step and it needs them."""
        rank = (source + number) % self.world
        return rank if 0 < number < self.world and self.needs(rank, source) else None

    def rectangles(self, rank: int, source: int, even: bool) -> list[Rectangle]:
        """What a rank computes over a rank's keys, in the order of documents."""
        return [
            rectangle
            for document, rows, keys in self._shared(rank, source)
            for rectangle in rectangles(rows, keys, self.band, self.shifts[document], even)
        ]


def _step(ring: _Ring, rank: int, number: int, lag: int, batch: int, calls: tuple[Call, ...]) -> Step:
    """A step with what travels for it."""
    source, before = ((rank - number + back) % ring.world for back in (0, 1))
    if number == 0:
        return Step(number, source, ring.keys(source) * batch, calls)
    first, stop = ring.travels(source)
    rows = {shard: (ring.travels(shard)[1] - ring.travels(shard)[0]) * batch for shard in (before, rank)}
    # The shard of the step before goes on to the next rank; the rank's own to one that the rank before does not serve.
    sends = (before, ring.at(before, number - 1) is not None), (rank, ring.at(rank, number - 1) is None)
    used = ring.at(source, number) is not None
    last, following = ring.at(source, number - 1), ring.at(source, number + lag)
    return Step(
        number,
        source,
        (stop - first) * batch,
        calls,
        receive_from=(source if last is None else last) if used else None,
        sends=tuple(
            Send(to, shard, rows[shard]) for shard, mine in sends if mine and (to := ring.at(shard, number)) is not None
        ),
        sums_from=ring.at(source, number - lag) if used else None,
        sums_to=(source if following is None else following) if used else None,
        sums_back=ring.at(rank, number) if ring.at(rank, number + lag) is None else None,
        first=first,
    )


def _by_document(lengths: Sequence[int], world: int, layout: Layout, rank: int) -> dict[int, list[Piece]]:
    """The pieces that a rank has of each document, in order."""
    found: dict[int, list[Piece]] = {}
    for piece in pieces(lengths, world, rank, layout):
        found.setdefault(piece.document, []).append(piece)
    return found
