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
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flashtile.core.errors import InvalidInputError
from flashtile.core.masks import Band
from flashtile.distributed.calls import Call as Call
from flashtile.distributed.calls import Rectangle, aligned, calls_of, moved, parts_in, rectangles, repeated, whole_documents
from flashtile.distributed.intervals import Kept
from flashtile.distributed.layouts import Layout, Piece, check, cut, pieces, shard_length

# Rows that travel begin on a multiple, so that those of 16-bit elements begin on 16 bytes whatever their width.
_ALIGNED = 8
# Rows of a block. Gaps of fewer rows travel too: the blocks on either side of one hold all of it.
BLOCK = 128

# Half-open ranges of rows of a shard, with all entries of the batch, in order.
Spans = tuple[tuple[int, int], ...]


def count(spans: Spans) -> int:
    """Rows of spans."""
    return sum(stop - start for start, stop in spans)


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


class Share(NamedTuple):
    """Calls of some of a rank's rows over some of its own keys, both in a row.

    Attributes:
        rows: The first row and the end of them.
        keys: The same of keys.
        calls: Of these alone.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    calls: tuple[Call, ...]

    @property
    def is_empty(self) -> bool:
        """Whether it has neither rows nor keys."""
        return self.rows[0] == self.rows[1] and self.keys[0] == self.keys[1]


@dataclass(frozen=True)
class Own:
    """What a rank computes over its own keys, by what other ranks take part in.

    Attributes:
        private: Documents that are this rank's alone, which are its last; None if there are none.
        common: All its other rows over its other keys.
        late: The first of these rows, up to the last that sees keys of other ranks, over the same keys.
        rest: The rows after them, private ones among them; in common as well, if nearly all of those are late.
        joined: Of one call, where one step has calls and few rows are late: these over the step's keys and then so many
            own keys of theirs. None otherwise.
        whole: The same of all common rows and keys, where these are few beside private ones.
        asked: The rows of common over keys from the first to the last that other ranks see.
        inside: The same over the keys before and after them; none if half or more are asked for.
    """

    private: Share | None
    common: Share
    late: Share
    rest: Share
    joined: Share | None
    whole: Share | None
    asked: Share
    inside: tuple[Share, ...]


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
    own = _own(ring, rank, batch, steps)
    return Plan(world, rank, rows * batch, ring.keys(rank) * batch, tuple(steps), own)


class Ring:
    """Who holds what, and who needs which of whose keys; arguments as of ``make_plan``."""

    def __init__(
        self, lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], world: int, layout: Layout, band: Band,
        origins: bool = False, whole: bool = False, intervals: Kept | None = None,
    ) -> None:  # fmt: skip
        self._intervals = intervals
        self.world, self.band, self.origins, self._whole = world, band, origins, whole
        self.lengths_q, self.lengths_k = lengths_q, lengths_k
        self.shifts = [k - q for q, k in zip(lengths_q, lengths_k, strict=True)]
        self.rows = self.columns = functools.cache(functools.partial(_by_document, lengths_q, world, layout))
        if lengths_k != lengths_q:
            self.columns = functools.cache(functools.partial(_by_document, lengths_k, world, layout))
        self.seen = functools.cache(self._seen)
        self.keys = functools.cache(functools.partial(shard_length, sum(lengths_k), world))
        self.private = functools.cache(self._private)

    def rectangles(
        self, rank: int, source: int, rows: tuple[int, int] | None = None, keys: tuple[int, int] | None = None
    ) -> list[Rectangle]:
        """What a rank computes over a rank's keys, in the order of its documents; over some of them, from some rows."""
        of_rows, of_keys = _within(self.rows(rank), rows), _within(self.columns(source), keys)
        return [
            rectangle
            for document, pieces_q in of_rows.items()
            if document in of_keys
            for rectangle in rectangles(
                pieces_q, of_keys[document], self.band, self.shifts[document], self.origins
            )
        ]

    def _seen(self, rank: int, source: int) -> Spans:
        """Which of a rank's keys another one's rows see, of one entry; with small gaps between them."""
        parts = self.rectangles(rank, source)
        found = [(each.key, each.key + each.keys) for each in parts]
        if self._intervals is not None:
            found = [span for each in parts for span in self._intervals.spans(each)]
        if not found:
            return ()
        if self._whole:
            return ((0, self.keys(source)),)
        return merged(sorted(found), self.private(source)[0][1])

    def _private(self, rank: int) -> tuple[tuple[int, int], list[int]]:
        """How many rows and keys come before a rank's last documents that it holds in full, and which these are."""
        first = shard_length(sum(self.lengths_q), self.world, rank), self.keys(rank)
        found: list[int] = []
        for (document, of_q), (same, of_k) in zip(
            reversed(self.rows(rank).items()), reversed(self.columns(rank).items()), strict=False
        ):
            whole = [Piece(document, 0, 1, x[document], 0) for x in (self.lengths_q, self.lengths_k)]
            if document != same or [each._replace(at=0) for each in (*of_q, *of_k)] != whole:
                break
            found.insert(0, document)
            first = of_q[0].at, of_k[0].at
        return first, found

    def at(self, source: int, number: int) -> int | None:
        """The rank whose step of that number uses the source's keys, if there is such a step and it needs them."""
        rank = (source + number) % self.world
        return rank if 0 < number < self.world and self.seen(rank, source) else None

    def alike(self, source: int, number: int, other: int) -> int | None:
        """The same, if the rank of another step uses the same ones."""
        rank = self.at(source, number)
        return rank if rank is not None and self.seen(rank, source) == self.seen(other, source) else None


def merged(found: Iterable[tuple[int, int]], rows: int) -> Spans:
    """Spans in order as fewer ones that hold them, on multiples of ``_ALIGNED`` or at the end of the rows."""
    spans: list[tuple[int, int]] = []
    for first, last in found:
        start, stop = first // _ALIGNED * _ALIGNED, min(rows, -(-last // _ALIGNED) * _ALIGNED)
        if spans and start - spans[-1][1] < BLOCK:
            spans[-1] = spans[-1][0], max(spans[-1][1], stop)
        else:
            spans.append((start, stop))
    return tuple(spans)


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


# Rows that stand apart must be more than an eighth, keys more than half: each call takes time of its own, and the work
# over keys that others see comes last, beside the sums that return.
_FEW_ROWS, _FEW_KEYS = 8, 2


def _own(ring: Ring, rank: int, batch: int, steps: Sequence[Step]) -> Own:
    """Step 0 in parts.

    Rows of some of a document do not lie together where a batch has several entries: there they do not stand apart.
    """
    (rows_open, keys_open), documents = ring.private(rank)
    private = None
    if documents:
        lengths = [(ring.lengths_q[document], ring.lengths_k[document]) for document in documents]
        call = repeated(whole_documents(documents, lengths, ring.band, ring.origins), batch)
        ends = [shard_length(sum(x), ring.world, rank) * batch for x in (ring.lengths_q, ring.lengths_k)]
        private = Share((rows_open * batch, ends[0]), (keys_open * batch, ends[1]), (call,))

    def share(some_rows: tuple[int, int], some_keys: tuple[int, int]) -> Share:
        found = ring.rectangles(rank, rank, some_rows, some_keys)
        sizes = some_rows[1] - some_rows[0], some_keys[1] - some_keys[0]
        if some_keys != (0, keys_open):
            found = aligned(found, sizes[0])
        calls = tuple(repeated(call, batch) for call in calls_of(found, *sizes, ring.origins))
        (a, b), (c, d) = some_rows, some_keys
        return Share((a * batch, b * batch), (c * batch, d * batch), calls)

    rows, keys = (shard_length(sum(x), ring.world, rank) for x in (ring.lengths_q, ring.lengths_k))
    everything = (0, rows_open), (0, keys_open)
    common = late = asked = share(*everything)
    rest = private or Share((rows * batch,) * 2, (keys * batch,) * 2, ())
    inside: tuple[Share, ...] = ()
    last = max((_last_row(call) for step in steps[1:] for call in step.calls), default=0)
    shared = min(rows_open, -(-last // BLOCK) * BLOCK)
    if batch == 1 and rows_open - shared > rows_open // _FEW_ROWS:
        late, rest = share((0, shared), everything[1]), share((shared, rows), (0, keys))
    joined = whole = None
    if batch == 1 and 2 * late.rows[1] <= rows:
        joined = _joined(ring, rank, steps, late.rows, None)
    if private is not None and 2 * rows_open <= rows:
        whole = _joined(ring, rank, steps, *everything)
    seen = [span for other in range(ring.world) if other != rank for span in ring.seen(other, rank)]
    if not seen:
        asked, inside = share(everything[0], (0, 0)), (common,)
    elif batch == 1:
        first = min(start for start, _ in seen) // BLOCK * BLOCK
        stop = min(keys_open, -(-max(stop for _, stop in seen) // BLOCK) * BLOCK)
        if keys_open - (stop - first) > keys_open // _FEW_KEYS:
            asked = share(everything[0], (first, stop))
            around = ((start, end) for start, end in ((0, first), (stop, keys_open)) if start < end)
            inside = tuple(share(everything[0], each) for each in around)
    return Own(private, common, late, rest, joined, whole, asked, inside)


def _joined(
    ring: Ring, rank: int, steps: Sequence[Step], rows: tuple[int, int], keys: tuple[int, int] | None
) -> Share | None:
    """Rows over the keys of the one step that has calls, followed by own ones; by default those that the rows see."""
    busy = [step for step in steps if step.number and step.calls]
    if len(busy) != 1:
        return None
    if keys is None:
        ends = [(each.key, each.key + each.keys) for each in ring.rectangles(rank, rank, rows)]
        keys = min((a for a, _ in ends), default=0) // _ALIGNED * _ALIGNED, max((b for _, b in ends), default=0)
    total = busy[0].keys + keys[1] - keys[0]
    # No more than there is room for.
    if total > shard_length(sum(ring.lengths_k), ring.world, 0):
        return None
    held: dict[int, list[Piece]] = {}
    at = 0
    for source, spans in ((busy[0].source, busy[0].spans), (rank, (keys,))):
        for first, stop in spans:
            for document, found in _within(ring.columns(source), (first, stop)).items():
                here = held.setdefault(document, [])
                for piece in found:
                    piece = piece._replace(at=at + piece.at)
                    last = here[-1] if here else piece._replace(length=0)
                    if last.length and piece.stride == 1 and piece.start - last.start == piece.at - last.at == last.length:
                        here[-1] = last._replace(length=last.length + piece.length)
                    else:
                        here.append(piece)
            at += stop - first
    of_rows = _within(ring.rows(rank), rows)
    parts = [
        rectangle
        for document, pieces_q in of_rows.items()
        if document in held
        for rectangle in rectangles(pieces_q, held[document], ring.band, ring.shifts[document], ring.origins)
    ]
    calls = calls_of(parts, rows[1] - rows[0], total, ring.origins)
    return Share(rows, keys, tuple(calls)) if len(calls) == 1 else None


def _last_row(call: Call) -> int:
    """The end of a call's last row that has keys."""
    bounds = zip(*map(itertools.pairwise, (call.cu_seqlens_q, call.cu_seqlens_k)), strict=True)
    return max((stop for (_, stop), (key, key_stop) in bounds if key < key_stop), default=0)


def _by_document(lengths: Sequence[int], world: int, layout: Layout, rank: int) -> dict[int, list[Piece]]:
    """The pieces that a rank has of each document, in order."""
    found: dict[int, list[Piece]] = {}
    for piece in pieces(lengths, world, rank, layout):
        found.setdefault(piece.document, []).append(piece)
    return found


def _within(held: dict[int, list[Piece]], some: tuple[int, int] | None) -> dict[int, list[Piece]]:
    """What pieces hold of some of a rank's rows, counted from the first of these."""
    if some is None:
        return held
    found = ((document, list(cut(of_it, *some))) for document, of_it in held.items())
    return {document: of_it for document, of_it in found if of_it}
