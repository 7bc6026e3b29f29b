"""The keys that each rank of a ring sees, and a rank's work over its own keys in parts. Pure integers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashtile.core.masks import Band
from flashtile.distributed.calls import (
    RingCall,
    RingRectangle,
    aligned,
    calls_of,
    rectangles,
    repeated,
    whole_documents,
)
from flashtile.distributed.intervals import Kept
from flashtile.distributed.layouts import Layout, Piece, cut, pieces, shard_length

# Rows that travel begin on a multiple of this many rows, so that 16-bit elements begin on 16 bytes for every width.
ALIGNED = 8
# Rows of a block. A gap of fewer rows travels too: together, the blocks on its two sides hold all of it.
BLOCK = 128

# Half-open ranges of rows of a shard, with all entries of the batch, in order.
Spans = tuple[tuple[int, int], ...]


def count(spans: Spans) -> int:
    """Number of rows in spans."""
    return sum(stop - start for start, stop in spans)


class RankRing:
    """The rows and keys that each rank holds, and the keys that it needs. Arguments: see ``make_plan``."""

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
    ) -> list[RingRectangle]:
        """What ``rank`` computes over the keys of ``source``, by document; for some rows and keys if these are set."""
        of_rows, of_keys = within(self.rows(rank), rows), within(self.columns(source), keys)
        return [
            rectangle
            for document, pieces_q in of_rows.items()
            if document in of_keys
            for rectangle in rectangles(pieces_q, of_keys[document], self.band, self.shifts[document], self.origins)
        ]

    def _seen(self, rank: int, source: int) -> Spans:
        """The keys of ``source`` that rows of ``rank`` see, in one entry of the batch. Small gaps are included."""
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
        """The rows and keys before the last documents that a rank holds in full, and the numbers of these documents."""
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
        """The rank that uses the keys of ``source`` in step ``number``; None if no rank needs them in that step."""
        rank = (source + number) % self.world
        return rank if 0 < number < self.world and self.seen(rank, source) else None

    def alike(self, source: int, number: int, other: int) -> int | None:
        """``at(source, number)``, if that rank sees the same keys as rank ``other``; else None."""
        rank = self.at(source, number)
        return rank if rank is not None and self.seen(rank, source) == self.seen(other, source) else None


def merged(found: Iterable[tuple[int, int]], rows: int) -> Spans:
    """Fewer spans that hold the given ones; they begin and end on multiples of ``ALIGNED``, or end at the last row."""
    spans: list[tuple[int, int]] = []
    for first, last in found:
        start, stop = first // ALIGNED * ALIGNED, min(rows, -(-last // ALIGNED) * ALIGNED)
        if spans and start - spans[-1][1] < BLOCK:
            spans[-1] = spans[-1][0], max(spans[-1][1], stop)
        else:
            spans.append((start, stop))
    return tuple(spans)


def _by_document(lengths: Sequence[int], world: int, layout: Layout, rank: int) -> dict[int, list[Piece]]:
    """The pieces of each document that a rank holds, in order."""
    found: dict[int, list[Piece]] = {}
    for piece in pieces(lengths, world, rank, layout):
        found.setdefault(piece.document, []).append(piece)
    return found


def within(held: dict[int, list[Piece]], some: tuple[int, int] | None) -> dict[int, list[Piece]]:
    """The parts of pieces inside a range of the rank's rows, counted from the range's first row."""
    if some is None:
        return held
    found = ((document, list(cut(of_it, *some))) for document, of_it in held.items())
    return {document: of_it for document, of_it in found if of_it}


class Send(NamedTuple):
    """Keys and values of one shard that leave for the rank that uses them in the step.

    Attributes:
        to: The rank that receives them.
        source: The owner of the keys: the sender, or the source of the sender's step before.
        spans: Rows of the shard. If the sender is not the owner, these are all rows that it received.
    """

    to: int
    source: int
    spans: Spans

    @property
    def keys(self) -> int:
        """Number of keys."""
        return count(self.spans)


@dataclass(frozen=True)
class RingStep:
    """What a rank does in one step. Keys are transferred before its calls, and sums after them.

    Attributes:
        number: s, from 0 to N - 1. A plan has no step in which the rank does nothing.
        source: The owner of the keys used, ``rank - number`` around the ring.
        spans: The rows of the owner's shard that the rank receives; in step 0 all rows.
        calls: What is computed. Empty if the rank only sends or only receives sums.
        receive_from: The sender of the shard: the rank before, which used it in the step before, or the owner. None in
            step 0 and in steps without calls.
        sends: The shards that leave for other ranks' steps of this number.
        sums_from: The sender of float32 sums of dk and dv, to which this step adds. None if the sums start from zero.
        sums_to: The receiver of the sums: the next user of the shard in the chain, or its owner. None in step 0 and in
            steps without calls.
        sums_back: The rank that, after this step, sends home the final sums of dk and dv for some keys of this rank.
        back: The rows of this rank's shard that those sums are for.
    """

    number: int
    source: int
    spans: Spans
    calls: tuple[RingCall, ...]
    receive_from: int | None = None
    sends: tuple[Send, ...] = ()
    sums_from: int | None = None
    sums_to: int | None = None
    sums_back: int | None = None
    back: Spans = ()

    @functools.cached_property
    def keys(self) -> int:
        """Number of rows of the shard that the rank receives."""
        return count(self.spans)


class OwnShare(NamedTuple):
    """Calls of a range of a rank's rows over a range of its own keys.

    Attributes:
        rows: The first row, and the end of the range.
        keys: The first key, and the end of the range.
        calls: The calls, with indices counted from the first row and the first key.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    calls: tuple[RingCall, ...]

    @property
    def is_empty(self) -> bool:
        """Whether it has neither rows nor keys."""
        return self.rows[0] == self.rows[1] and self.keys[0] == self.keys[1]


@dataclass(frozen=True)
class Own:
    """What a rank computes over its own keys, divided by whether other ranks take part.

    Attributes:
        private: Documents that this rank holds in full; they are its last ones. None if there are none.
        common: All other rows of the rank over all its other keys.
        remote_rows: The first rows of ``common``, up to the last row that sees keys of other ranks, over the keys of
            ``common``.
        local_rows: The rows after ``remote_rows``, private ones included. If nearly all rows of ``common`` are remote,
            ``remote_rows`` is all of ``common``, and only private rows are local.
        joined: If exactly one remote step has calls and few rows need it, one fused call: those rows over the step's
            keys, then over their own keys. Otherwise None.
        shared_keys: The rows of ``common`` over the keys from the first to the last that other ranks see.
        private_keys: The rows of ``common`` over the keys before and after ``shared_keys``. Empty if ``shared_keys``
            has half of the keys or more.
    """

    private: OwnShare | None
    common: OwnShare
    remote_rows: OwnShare
    local_rows: OwnShare
    joined: OwnShare | None
    shared_keys: OwnShare
    private_keys: tuple[OwnShare, ...]


# Local rows must be more than an eighth of the rows, and private keys more than half of the keys: each call has a cost
# of its own, and the work over shared keys comes last, while the sums return.
_FEW_ROWS, _FEW_KEYS = 8, 2


def own_of(ring: RankRing, rank: int, batch: int, steps: Sequence[RingStep]) -> Own:
    """Divides step 0 into parts.

    In a batch of several entries, a range of one entry's rows is not contiguous: rows and keys are not divided there.
    """
    (rows_open, keys_open), documents = ring.private(rank)
    private = None
    if documents:
        lengths = [(ring.lengths_q[document], ring.lengths_k[document]) for document in documents]
        call = repeated(whole_documents(documents, lengths, ring.band, ring.origins), batch)
        ends = [shard_length(sum(x), ring.world, rank) * batch for x in (ring.lengths_q, ring.lengths_k)]
        private = OwnShare((rows_open * batch, ends[0]), (keys_open * batch, ends[1]), (call,))

    def share(some_rows: tuple[int, int], some_keys: tuple[int, int]) -> OwnShare:
        found = ring.rectangles(rank, rank, some_rows, some_keys)
        sizes = some_rows[1] - some_rows[0], some_keys[1] - some_keys[0]
        if some_keys != (0, keys_open):
            found = aligned(found, sizes[0])
        calls = tuple(repeated(call, batch) for call in calls_of(found, *sizes, ring.origins))
        (a, b), (c, d) = some_rows, some_keys
        return OwnShare((a * batch, b * batch), (c * batch, d * batch), calls)

    rows, keys = (shard_length(sum(x), ring.world, rank) for x in (ring.lengths_q, ring.lengths_k))
    everything = (0, rows_open), (0, keys_open)
    common = remote_rows = shared_keys = share(*everything)
    local_rows = private or OwnShare((rows * batch,) * 2, (keys * batch,) * 2, ())
    private_keys: tuple[OwnShare, ...] = ()
    last = max((_last_row(call) for step in steps[1:] for call in step.calls), default=0)
    shared = min(rows_open, -(-last // BLOCK) * BLOCK)
    if batch == 1 and rows_open - shared > rows_open // _FEW_ROWS:
        remote_rows, local_rows = share((0, shared), everything[1]), share((shared, rows), (0, keys))
    joined = None
    if batch == 1 and 2 * remote_rows.rows[1] <= rows:
        joined = _joined(ring, rank, steps, remote_rows.rows)
    seen = [span for other in range(ring.world) if other != rank for span in ring.seen(other, rank)]
    if not seen:
        shared_keys, private_keys = share(everything[0], (0, 0)), (common,)
    elif batch == 1:
        first = min(start for start, _ in seen) // BLOCK * BLOCK
        stop = min(keys_open, -(-max(stop for _, stop in seen) // BLOCK) * BLOCK)
        if keys_open - (stop - first) > keys_open // _FEW_KEYS:
            shared_keys = share(everything[0], (first, stop))
            around = ((start, end) for start, end in ((0, first), (stop, keys_open)) if start < end)
            private_keys = tuple(share(everything[0], each) for each in around)
    return Own(private, common, remote_rows, local_rows, joined, shared_keys, private_keys)


def _joined(ring: RankRing, rank: int, steps: Sequence[RingStep], rows: tuple[int, int]) -> OwnShare | None:
    """Rows over the keys of the one step with calls, then over the own keys that they see."""
    busy = [step for step in steps if step.number and step.calls]
    if len(busy) != 1:
        return None
    ends = [(each.key, each.key + each.keys) for each in ring.rectangles(rank, rank, rows)]
    keys = min((a for a, _ in ends), default=0) // ALIGNED * ALIGNED, max((b for _, b in ends), default=0)
    total = busy[0].keys + keys[1] - keys[0]
    # Buffers have room for one shard.
    if total > shard_length(sum(ring.lengths_k), ring.world, 0):
        return None
    held: dict[int, list[Piece]] = {}
    at = 0
    for source, spans in ((busy[0].source, busy[0].spans), (rank, (keys,))):
        for first, stop in spans:
            for document, found in within(ring.columns(source), (first, stop)).items():
                here = held.setdefault(document, [])
                for piece in found:
                    piece = piece._replace(at=at + piece.at)
                    last = here[-1] if here else piece._replace(length=0)
                    apart = piece.start - last.start, piece.at - last.at
                    if last.length and piece.stride == 1 and apart == (last.length, last.length):
                        here[-1] = last._replace(length=last.length + piece.length)
                    else:
                        here.append(piece)
            at += stop - first
    of_rows = within(ring.rows(rank), rows)
    parts = [
        rectangle
        for document, pieces_q in of_rows.items()
        if document in held
        for rectangle in rectangles(pieces_q, held[document], ring.band, ring.shifts[document], ring.origins)
    ]
    calls = calls_of(parts, rows[1] - rows[0], total, ring.origins)
    return OwnShare(rows, keys, tuple(calls)) if len(calls) == 1 else None


def _last_row(call: RingCall) -> int:
    """The index after a call's last row that has keys."""
    bounds = zip(*map(itertools.pairwise, (call.cu_seqlens_q, call.cu_seqlens_k)), strict=True)
    return max((stop for (_, stop), (key, key_stop) in bounds if key < key_stop), default=0)
