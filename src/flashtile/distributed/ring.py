"""Who holds what of the rows and keys of a ring, and who sees which of whose keys. Pure integers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from flashtile.core.masks import Band
from flashtile.distributed.calls import Rectangle, rectangles
from flashtile.distributed.intervals import Kept
from flashtile.distributed.layouts import Layout, Piece, cut, pieces, shard_length

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
