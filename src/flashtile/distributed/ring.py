"""Who sees which of whose keys in a ring, and a rank's work over its own keys in parts. Pure integers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from flashtile.core.masks import Band
from flashtile.distributed.calls import Call, Rectangle, aligned, calls_of, rectangles, repeated, whole_documents
from flashtile.distributed.intervals import Kept
from flashtile.distributed.layouts import Layout, Piece, cut, pieces, shard_length

if TYPE_CHECKING:
    from flashtile.distributed.plan import Step

# Rows that travel begin on a multiple, so that those of 16-bit elements begin on 16 bytes whatever their width.
ALIGNED = 8
# Rows of a block. Gaps of fewer rows travel too: the blocks on either side of one hold all of it.
BLOCK = 128

# Half-open ranges of rows of a shard, with all entries of the batch, in order.
Spans = tuple[tuple[int, int], ...]


def count(spans: Spans) -> int:
    """Rows of spans."""
    return sum(stop - start for start, stop in spans)


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
        of_rows, of_keys = within(self.rows(rank), rows), within(self.columns(source), keys)
        return [
            rectangle
            for document, pieces_q in of_rows.items()
            if document in of_keys
            for rectangle in rectangles(pieces_q, of_keys[document], self.band, self.shifts[document], self.origins)
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
    """Spans in order as fewer ones that hold them, on multiples of ``ALIGNED`` or at the end of the rows."""
    spans: list[tuple[int, int]] = []
    for first, last in found:
        start, stop = first // ALIGNED * ALIGNED, min(rows, -(-last // ALIGNED) * ALIGNED)
        if spans and start - spans[-1][1] < BLOCK:
            spans[-1] = spans[-1][0], max(spans[-1][1], stop)
        else:
            spans.append((start, stop))
    return tuple(spans)


def _by_document(lengths: Sequence[int], world: int, layout: Layout, rank: int) -> dict[int, list[Piece]]:
    """The pieces that a rank has of each document, in order."""
    found: dict[int, list[Piece]] = {}
    for piece in pieces(lengths, world, rank, layout):
        found.setdefault(piece.document, []).append(piece)
    return found


def within(held: dict[int, list[Piece]], some: tuple[int, int] | None) -> dict[int, list[Piece]]:
    """What pieces hold of some of a rank's rows, counted from the first of these."""
    if some is None:
        return held
    found = ((document, list(cut(of_it, *some))) for document, of_it in held.items())
    return {document: of_it for document, of_it in found if of_it}


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


# Rows that stand apart must be more than an eighth, keys more than half: each call takes time of its own, and the work
# over keys that others see comes last, beside the sums that return.
_FEW_ROWS, _FEW_KEYS = 8, 2


def own_of(ring: Ring, rank: int, batch: int, steps: Sequence[Step]) -> Own:
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
        keys = min((a for a, _ in ends), default=0) // ALIGNED * ALIGNED, max((b for _, b in ends), default=0)
    total = busy[0].keys + keys[1] - keys[0]
    # No more than there is room for.
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
    return Share(rows, keys, tuple(calls)) if len(calls) == 1 else None


def _last_row(call: Call) -> int:
    """The end of a call's last row that has keys."""
    bounds = zip(*map(itertools.pairwise, (call.cu_seqlens_q, call.cu_seqlens_k)), strict=True)
    return max((stop for (_, stop), (key, key_stop) in bounds if key < key_stop), default=0)
