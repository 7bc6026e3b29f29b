"""Layouts for masks: they assign rows to ranks so that all ranks have equal work and few keys travel.

Each rank holds as many rows as under every other layout; work is the number of pairs of a row and a key that a mask
keeps. Among layouts with even enough work, the one with the fewest travelling keys is taken. Candidates are contiguous
and zigzag shards, and documents dealt one by one, with long documents cut.

Pure integers, as plans are. Source: Zewei Tao and Yunpeng Huang 2025, MagiAttention, "dispatch".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from flashtile.core.masks import Band
from flashtile.distributed.intervals import Kept
from flashtile.distributed.layouts import Dealt, Layout, Name, pieces, shard_length
from flashtile.distributed.ring import BLOCK, RankRing, count

# The most pairs of a rank, over the mean of all ranks, of a layout that counts as even.
EVEN = 1.05
# Single blocks make many short calls: they are dealt only if all other layouts are over this.
UNEVEN = 1.15
# The number of limits that are tried for the length from which documents are cut.
_TRIED = 12

# Document, first row and rows.
_Span = tuple[int, int, int]


class Weight(NamedTuple):
    """The cost of a layout.

    Attributes:
        imbalance: The most pairs of a rank, over the mean of all ranks; 1 if no pairs are kept.
        moved: Keys that travel, counted once for each transfer.
    """

    imbalance: float
    moved: int


class Mask(NamedTuple):
    """The pairs that are kept in documents that attend to themselves.

    Attributes:
        band: The band between positions.
        intervals: Intervals that are kept as well, or None.
    """

    band: Band
    intervals: Kept | None = None

    def counter(self, lengths: tuple[int, ...]) -> Callable[[int, int, int], int]:
        """A function that counts the pairs of a document, from a first row and a number of rows."""
        if self.intervals is None:
            return lambda document, start, rows: self.band.count_rows(
                start, start + rows, lengths[document], lengths[document]
            )
        sums = self.intervals.pairs(lengths, self.band)
        return lambda document, start, rows: sums[document][start + rows] - sums[document][start]


def weigh(lengths: tuple[int, ...], world: int, layout: Layout, mask: Mask) -> Weight:
    """The weight of a layout of documents that attend to themselves, without planning their calls."""
    pairs, counted = [0] * world, mask.counter(lengths)
    for rank in range(world):
        for p in pieces(lengths, world, rank, layout):
            each = p.length if p.stride == 1 else 1
            pairs[rank] += sum(counted(p.document, p.start + n * p.stride, each) for n in range(p.length // each))
    is_exact = mask.intervals is not None  # pieces are then not joined
    ring = RankRing(lengths, lengths, world, layout, mask.band, is_exact, False, mask.intervals)
    moved = sum(count(ring.seen(rank, source)) for rank in range(world) for source in range(world) if rank != source)
    return Weight(max(pairs) * world / sum(pairs) if sum(pairs) else 1.0, moved)


@functools.lru_cache(maxsize=32)
def deal_rows(lengths: tuple[int, ...], world: int, mask: Mask) -> Layout:
    """The layout of documents that attend to themselves. It is cached: the same arguments give the same object."""
    named: tuple[Name, ...] = ("contiguous", "zigzag")
    found: list[tuple[Weight, Layout]] = [(weigh(lengths, world, name, mask), name) for name in named]
    for layout in _dealt(lengths, world, mask) if len(lengths) > 1 and any(each.moved for each, _ in found) else ():
        found.append((weigh(lengths, world, layout, mask), layout))
        # More cuts make more keys travel.
        if found[-1][0].imbalance <= EVEN:
            break
    if min(each.imbalance for each, _ in found) > UNEVEN:
        layout = _Deal(lengths, world, mask).blocks()
        found.append((weigh(lengths, world, layout, mask), layout))
    even = [each for each in found if each[0].imbalance <= EVEN]
    if even:
        return min(even, key=lambda each: each[0].moved)[1]
    return min(found, key=lambda each: each[0].imbalance)[1]


def _dealt(lengths: tuple[int, ...], world: int, mask: Mask) -> Iterator[Layout]:
    """Layouts of whole documents, with the documents longer than a limit cut, from the largest limit down."""
    rows = shard_length(sum(lengths), world, world - 1)
    limits = sorted({length for length in lengths if length <= rows}, reverse=True)
    step = -(-len(limits) // _TRIED) or 1
    for limit in limits[::step]:
        yield _Deal(lengths, world, mask).documents(limit)


class _Deal:
    """An assignment of rows to ranks in progress."""

    def __init__(self, lengths: tuple[int, ...], world: int, mask: Mask) -> None:
        self._lengths, self._world, self._band = lengths, world, mask.band
        self._counted = mask.counter(lengths)
        self._room = [shard_length(sum(lengths), world, rank) for rank in range(world)]
        self._pairs = [0] * world
        self._spans: list[list[_Span]] = [[] for _ in range(world)]

    def documents(self, limit: int) -> Layout:
        """Assigns documents of at most ``limit`` rows whole, as far as there is room, and the others in parts."""
        left: list[_Span] = []
        order = sorted(range(len(self._lengths)), key=lambda n: -self._lengths[n])
        for document in order:
            if self._lengths[document] > limit:
                for rank, span in self._parts(document):
                    left += self._give(rank, span)
        for document in order:
            length = self._lengths[document]
            if length <= limit:
                able = [rank for rank in range(self._world) if self._room[rank] >= length]
                if able:
                    self._give(min(able, key=self._pairs.__getitem__), (document, 0, length))
                else:
                    left.append((document, 0, length))
        return self._ended(left)

    def blocks(self) -> Layout:
        """Assigns single blocks, the blocks with the most pairs first, each to the rank with the fewest pairs."""
        blocks = [
            (document, start, min(BLOCK, length - start))
            for document, length in enumerate(self._lengths)
            for start in range(0, length, BLOCK)
        ]
        left: list[_Span] = []
        for span in sorted(blocks, key=lambda each: -self._counted(*each)):
            able = [rank for rank in range(self._world) if self._room[rank] >= span[2]]
            if able:
                self._give(min(able, key=self._pairs.__getitem__), span)
            else:
                left.append(span)
        return self._ended(left)

    def _parts(self, document: int) -> Iterator[tuple[int, _Span]]:
        """Parts of a document for all ranks: parts r and 2N - 1 - r of 2N if later rows keep more, else one of N."""
        length, world, band = self._lengths[document], self._world, self._band
        zigzag = band.right is not None and (band.left is None or band.left > length // (2 * world))
        parts = 2 * world if zigzag else world
        # Parts are whole blocks if blocks are small beside parts.
        chunk_rows = BLOCK if length >= 4 * BLOCK * parts else 1
        ends = [length * part // parts // chunk_rows * chunk_rows for part in range(parts)] + [length]
        for part in range(parts):
            if ends[part] < ends[part + 1]:
                rank, rows = min(part, parts - 1 - part) if zigzag else part, ends[part + 1] - ends[part]
                yield rank, (document, ends[part], rows)

    def _give(self, rank: int, span: _Span) -> list[_Span]:
        """Assigns to a rank as many rows as it has room for, and returns the rest."""
        document, start, length = span
        some = min(length, self._room[rank])
        if some:
            self._room[rank] -= some
            self._pairs[rank] += self._counted(document, start, some)
            self._spans[rank].append((document, start, some))
        return [(document, start + some, length - some)] if some < length else []

    def _ended(self, left: Sequence[_Span]) -> Layout:
        """The layout, after the rows that are left are assigned to ranks with room."""
        waiting = list(left)
        while waiting:
            able = [rank for rank in range(self._world) if self._room[rank]]
            waiting += self._give(min(able, key=self._pairs.__getitem__), waiting.pop())
        homes: dict[int, set[int]] = {}
        for rank, spans in enumerate(self._spans):
            for document, _, _ in spans:
                homes.setdefault(document, set()).add(rank)

        def ordered(spans: list[_Span]) -> tuple[_Span, ...]:
            # Documents that other ranks also hold rows of come first; see ``ring.Own``.
            found: list[_Span] = []
            for document, start, length in sorted(spans, key=lambda each: (len(homes[each[0]]) == 1, each)):
                last = found[-1] if found else (-1, 0, 0)
                if last[0] == document and last[1] + last[2] == start:
                    found[-1] = document, last[1], last[2] + length
                else:
                    found.append((document, start, length))
            return tuple(found)

        return Dealt(self._lengths, tuple(ordered(spans) for spans in self._spans))
