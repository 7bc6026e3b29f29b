"""Makes packed calls from pieces of rows and of keys: the pairs that a mask keeps, in as few sequences as possible.

Two pieces have the same stride, so a band between their positions is a band between their local indices. The sequences
of a call follow one another in rows and in keys. Gaps between them become sequences without keys or without rows.
"""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flashtile.core.masks import Band, Origin
from flashtile.distributed.layouts import Piece

# Differences of local indices, key minus row: the first and the last, both inclusive.
Differences = tuple[int, int]
# The origin of a sequence without pairs.
NOWHERE = Origin(0, 0, 0, 0, 0, 0)
# The rows of a part of a call are a multiple of this, so that the part ends with a whole tile.
_TILE = 128


@dataclass(frozen=True)
class RingCall:
    """One packed call of all rows of a rank over all keys of a shard. Sequences without rows or without keys fill gaps.

    Attributes:
        cu_seqlens_q: Bounds of the sequences among the rank's rows, from 0 to their number.
        cu_seqlens_k: Bounds of the same sequences among the rows of the shard.
        band: The mask of every sequence, aligned bottom-right as always.
        origins: The origin of each sequence, as in a call of one head; empty if origins were not asked for.
    """

    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]
    band: Band
    origins: tuple[Origin, ...] = ()

    @functools.cached_property
    def max_seqlen_q(self) -> int:
        """Rows of the longest sequence, those without keys included."""
        return max(_lengths(self.cu_seqlens_q), default=0)

    @functools.cached_property
    def max_seqlen_k(self) -> int:
        """Keys of the longest sequence, those without rows included."""
        return max(_lengths(self.cu_seqlens_k), default=0)

    @functools.cached_property
    def pairs(self) -> int:
        """Pairs of a row and a key that the call keeps for one head."""
        sizes = zip(_lengths(self.cu_seqlens_q), _lengths(self.cu_seqlens_k), strict=True)
        return sum(self.band.count(q, k) for q, k in sizes if q and k)


def kept(q: Piece, k: Piece, band: Band, shift: int) -> Differences | None:
    """The differences of local indices that a mask keeps between rows and keys of one document; None if it keeps none.

    Args:
        q: A piece of rows.
        k: A piece of keys, of the same stride.
        band: The mask, between positions.
        shift: Key position of query 0.
    """
    first, last = 1 - q.length, k.length - 1
    apart = k.start - q.start - shift
    if band.left is not None:
        first = max(first, -((band.left + apart) // q.stride))
    if band.right is not None:
        last = min(last, (band.right - apart) // q.stride)
    return (first, last) if first <= last else None


class RingRectangle(NamedTuple):
    """A packed sequence to compute: consecutive rows, consecutive keys, and the differences of indices to keep."""

    row: int
    rows: int
    key: int
    keys: int
    kept: Differences
    origin: Origin

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """Left and right of the band that keeps exactly these differences."""
        shift, (first, last) = self.keys - self.rows, self.kept
        return shift - first if first > 1 - self.rows else None, last - shift if last < self.keys - 1 else None

    def fits(self, left: int | None, right: int | None) -> bool:
        """Whether another band keeps the same pairs."""
        shift, (first, last) = self.keys - self.rows, self.kept
        low, high = 1 - self.rows, self.keys - 1
        return first == (low if left is None else max(low, shift - left)) and last == (
            high if right is None else min(high, shift + right)
        )


def rectangles(rows: Sequence[Piece], keys: Sequence[Piece], band: Band, shift: int, even: bool) -> list[RingRectangle]:
    """The fewest sequences for rows of a document over keys of it: one, one for each piece, or one for each pair.

    Args:
        rows: The pieces of rows.
        keys: The pieces of keys, of the same stride.
        band: The mask, between positions.
        shift: Key position of query 0.
        even: Whether positions must be evenly spaced in a sequence. Pieces are then not joined.
    """
    grid = [[kept(q, k, band, shift) for k in keys] for q in rows]
    if (whole := _joined(rows, keys, grid, shift, even)) is not None:
        return [whole]
    found = []
    for q, over in zip(rows, grid, strict=True):
        if (joined := _joined([q], keys, [over], shift, even)) is not None:
            found.append(joined)
        else:
            found += [_trimmed([q], [k], one, shift) for k, one in zip(keys, over, strict=True) if one]
    return found


def _joined(
    rows: Sequence[Piece], keys: Sequence[Piece], grid: Sequence[Sequence[Differences | None]], shift: int, even: bool
) -> RingRectangle | None:
    """One sequence for all pieces that keep pairs, if some band of it keeps the same pairs; else None."""
    used_q = [q for q, over in enumerate(grid) if any(over)]
    used_k = [k for k in range(len(keys)) if any(over[k] for over in grid)]
    if not used_q or (even and len(used_q) + len(used_k) > 2):
        return None
    rows, keys = rows[used_q[0] : used_q[-1] + 1], keys[used_k[0] : used_k[-1] + 1]
    grid = [over[used_k[0] : used_k[-1] + 1] for over in grid[used_q[0] : used_q[-1] + 1]]
    if len(rows) == len(keys) == 1:
        return _trimmed(rows, keys, grid[0][0] or (0, 0), shift)
    # For each pair of pieces: its differences, and those that are kept, in indices of the joined sequence.
    pairs: list[tuple[Differences, Differences | None]] = []
    for (i, q), (j, k) in itertools.product(enumerate(rows), enumerate(keys)):
        apart, one = k.at - keys[0].at - q.at + rows[0].at, grid[i][j]
        pairs.append(((1 - q.length + apart, k.length - 1 + apart), one and (one[0] + apart, one[1] + apart)))
    # The tightest band that keeps all kept pairs. If it keeps too many, every band does.
    first, last = min(one[0] for _, one in pairs if one), max(one[1] for _, one in pairs if one)
    for (low, high), one in pairs:
        now = max(first, low), min(last, high)
        if (now if now[0] <= now[1] else None) != one:
            return None
    return _trimmed(rows, keys, (first, last), shift)


def _trimmed(rows: Sequence[Piece], keys: Sequence[Piece], differences: Differences, shift: int) -> RingRectangle:
    """The sequence of pieces, without the rows and keys at its ends that keep nothing: equal masks give equal bands."""
    q, k = rows[0], keys[0]
    first, last = differences
    num_rows, num_keys = rows[-1].at + rows[-1].length - q.at, keys[-1].at + keys[-1].length - k.at
    row_start, row_stop = max(0, -last), min(num_rows, num_keys - first)
    key_start, key_stop = max(0, row_start + first), min(num_keys, row_stop + last)
    num_rows, num_keys, apart = row_stop - row_start, key_stop - key_start, key_start - row_start
    origin = Origin(
        q.document, q.start + q.stride * row_start, q.stride, k.start + k.stride * key_start, k.stride, shift
    )
    left = max(first - apart, 1 - num_rows), min(last - apart, num_keys - 1)
    return RingRectangle(q.at + row_start, num_rows, k.at + key_start, num_keys, left, origin)


def moved(found: Sequence[RingRectangle], spans: Sequence[tuple[int, int]]) -> list[RingRectangle]:
    """Rectangles over a shard, as rectangles over some concatenated spans of it. Each rectangle lies in one span."""
    starts = [start for start, _ in spans]
    before = list(itertools.accumulate((stop - start for start, stop in spans), initial=0))
    places = [bisect.bisect_right(starts, each.key) - 1 for each in found]
    return [each._replace(key=each.key - starts[n] + before[n]) for each, n in zip(found, places, strict=True)]


def parts_in(found: Sequence[RingRectangle], spans: Sequence[tuple[int, int]]) -> list[RingRectangle]:
    """The parts of rectangles that lie in spans of a shard."""
    parts = []
    for each in found:
        for start, stop in spans:
            start, stop = max(start, each.key), min(stop, each.key + each.keys)
            if start < stop:
                past, (first, last) = start - each.key, each.kept
                origin = each.origin._replace(key=each.origin.key + each.origin.key_step * past)
                parts.append(
                    each._replace(key=start, keys=stop - start, kept=(first - past, last - past), origin=origin)
                )
    return parts


def aligned(found: list[RingRectangle], rows: int) -> list[RingRectangle]:
    """Rectangles widened by rows that keep nothing, so that all begin and end on multiples of a tile's rows.

    The rectangles are returned unchanged if there is no room for that, or if they would need more bands.
    """
    order = sorted(range(len(found)), key=lambda n: found[n].row)
    made, end = list(found), 0
    for place, n in enumerate(order):
        each = found[n]
        after = found[order[place + 1]].row if place + 1 < len(order) else rows
        start = each.row // _TILE * _TILE
        stop = min(rows, -(-(each.row + each.rows) // _TILE) * _TILE)
        first, last = each.kept
        more, less = each.row - start, stop - each.row - each.rows
        # The rows added before and after must keep nothing.
        can = (not more or last <= 0) and (not less or first >= each.keys - each.rows)
        if not can or start < end or stop > max(after, each.row + each.rows):
            return found
        end = max(end, stop)
        origin = each.origin._replace(row=each.origin.row - each.origin.row_step * more)
        made[n] = each._replace(row=start, rows=stop - start, kept=(first - more, last - more), origin=origin)
    return made if len({x.bounds for x in made}) <= len({x.bounds for x in found}) else found


def calls_of(found: Sequence[RingRectangle], rows: int, keys: int, origins: bool) -> list[RingCall]:
    """The fewest calls that hold the rectangles: one for each band, and more if rectangles share rows or keys.

    Args:
        found: The rectangles, in the order of documents.
        rows: Number of the rank's rows.
        keys: Number of the shard's keys.
        origins: Whether the calls have origins.
    """
    bounds = [rectangle.bounds for rectangle in found]
    common = [one for one, _ in collections.Counter(bounds).most_common(3)]
    layers: dict[tuple[int | None, int | None], list[list[RingRectangle]]] = {}
    for rectangle, own in zip(found, bounds, strict=True):
        band = own if own == common[0] else next((one for one in common if rectangle.fits(*one)), own)
        layer = layers.setdefault(band, [])
        for call in layer:
            end = call[-1]
            if end.row + end.rows <= rectangle.row and end.key + end.keys <= rectangle.key:
                call.append(rectangle)
                break
        else:
            layer.append([rectangle])
    return [_call(call, Band(*band), rows, keys, origins) for band, layer in layers.items() for call in layer]


def _call(found: Sequence[RingRectangle], band: Band, rows: int, keys: int, origins: bool) -> RingCall:
    """The call of rectangles that follow one another; sequences without keys or rows fill the gaps between them."""
    cu_seqlens_q, cu_seqlens_k = [0], [0]
    where: list[Origin] = []
    for each in found:
        _skip(cu_seqlens_q, cu_seqlens_k, each.row, each.key)
        where += [NOWHERE] * (len(cu_seqlens_q) - 1 - len(where))
        cu_seqlens_q.append(each.row + each.rows)
        cu_seqlens_k.append(each.key + each.keys)
        where.append(each.origin)
    _skip(cu_seqlens_q, cu_seqlens_k, rows, keys)
    where += [NOWHERE] * (len(cu_seqlens_q) - 1 - len(where))
    return RingCall(tuple(cu_seqlens_q), tuple(cu_seqlens_k), band, tuple(where) if origins else ())


def _skip(cu_seqlens_q: list[int], cu_seqlens_k: list[int], row: int, key: int) -> None:
    """Adds a sequence without keys up to the row, and one without rows up to the key, if there are gaps."""
    if cu_seqlens_q[-1] < row:
        cu_seqlens_q.append(row)
        cu_seqlens_k.append(cu_seqlens_k[-1])
    if cu_seqlens_k[-1] < key:
        cu_seqlens_q.append(row)
        cu_seqlens_k.append(key)


def whole_documents(
    documents: Sequence[int], lengths: Sequence[tuple[int, int]], band: Band, origins: bool
) -> RingCall:
    """The call of documents that a rank holds in full, one after another."""
    bounds = [tuple(itertools.accumulate(side, initial=0)) for side in zip(*lengths, strict=True)]
    where = (Origin(each, 0, 1, 0, 1, k - q) for each, (q, k) in zip(documents, lengths, strict=True))
    return RingCall(bounds[0], bounds[1], band, tuple(where) if origins else ())


def of_first_rows(call: RingCall, rows: int) -> RingCall:
    """A call of the first rows alone; the rows after them see no keys."""
    q = call.cu_seqlens_q
    return call if q[-1] == rows else replace(call, cu_seqlens_q=tuple(min(x, rows) for x in q))


def repeated(call: RingCall, batch: int) -> RingCall:
    """A call of one entry, repeated for all entries of a batch."""
    if batch == 1:
        return call
    bounds = []
    for cu_seqlens in (call.cu_seqlens_q, call.cu_seqlens_k):
        bounds.append((0, *(entry * cu_seqlens[-1] + x for entry in range(batch) for x in cu_seqlens[1:])))
    where = tuple(origin._replace(head=entry) for entry in range(batch) for origin in call.origins)
    return RingCall(bounds[0], bounds[1], call.band, where)


# The fewest keys with returning sums for which a rank holds back work: one in so many of its own. Two H200s, a step
# that holds back nothing: 1.05 of the time where one in four returned, .87 where one in sixteen did.
_FEWEST_OF = 8


def held_back(calls: Sequence[RingCall], share: float, returned: int) -> tuple[Sequence[RingCall], Sequence[RingCall]]:
    """What the backward over a rank's own keys runs first, and what it holds back until sums of dk and dv return.

    Two halves take longer than the whole: too long to wait for the sums of few keys.

    Args:
        calls: All of them.
        share: About which part of their work comes first.
        returned: Keys for which sums return.
    """
    keys = sum(call.cu_seqlens_k[-1] for call in calls)
    return in_two(calls, share) if returned and returned * _FEWEST_OF >= keys else (calls, ())


def in_two(calls: Sequence[RingCall], share: float = 0.5) -> tuple[list[RingCall], list[RingCall]]:
    """Divides calls into two lists that together keep the same pairs. The first list has about ``share`` of the work.

    The backward over a rank's own keys runs the first list first, and the second while dk and dv return.
    """
    if len(calls) == 1:
        calls = _cut(calls[0], share)
    first: list[RingCall] = []
    final: list[RingCall] = []
    missing = (2 * share - 1) * sum(each.pairs for each in calls)  # pairs that the first list lacks beside the second
    for call in sorted(calls, key=lambda each: -each.pairs):
        (first if missing >= 0 else final).append(call)
        missing -= call.pairs if missing >= 0 else -call.pairs
    return first, final


def _cut(call: RingCall, share: float) -> list[RingCall]:
    """The first rows of each sequence, and the other rows; the call itself if the parts would have other bands."""
    left, right = call.band.left, call.band.right
    if (left is not None if right is None else right > 0) or not call.pairs:
        return [call]
    # Bounds of rows and of keys, and origins.
    early: tuple[list[int], list[int], list[Origin]] = [0], [0], []
    late: tuple[list[int], list[int], list[Origin]] = [0], [0], []
    rows, keys = (list(itertools.pairwise(x)) for x in (call.cu_seqlens_q, call.cu_seqlens_k))
    origins = call.origins or [NOWHERE] * len(rows)
    for (row, row_stop), (key, key_stop), origin in zip(rows, keys, origins, strict=True):
        count, shift = row_stop - row, key_stop - key - row_stop + row
        cut = _first_rows(share, call.band, count, key_stop - key)
        # The keys are cut by as many as the rows, so the last row is still aligned with the last key.
        seen = key_stop if right is None else key + max(0, cut + shift)
        for bound, last, where in (
            (row + cut, seen, origin),
            (row_stop, seen, NOWHERE),
            (row_stop, key_stop, NOWHERE),
        ):
            _append(early, bound, last, where)
        _append(late, row + cut, key, NOWHERE)
        _append(late, row_stop, key_stop, origin._replace(row=origin.row + origin.row_step * cut))
    return [
        RingCall(tuple(q), tuple(k), call.band, tuple(where) if call.origins else ()) for q, k, where in (early, late)
    ]


def _append(part: tuple[list[int], list[int], list[Origin]], row: int, key: int, origin: Origin) -> None:
    """Appends a sequence up to these bounds, unless it would be empty."""
    if (row, key) != (part[0][-1], part[1][-1]):
        part[0].append(row)
        part[1].append(key)
        part[2].append(origin)


def _first_rows(share: float, band: Band, rows: int, keys: int) -> int:
    """The number of first rows of a sequence that have about ``share`` of its pairs."""
    if band.right is None or not keys:
        cut = int(rows * share)
    else:
        wanted, low, cut = int(band.count(rows, keys) * share), 0, rows
        while low < cut:
            middle = (low + cut) // 2
            if band.count(middle, max(0, middle + keys - rows)) < wanted:
                low = middle + 1
            else:
                cut = middle
    return cut if rows < 2 * _TILE else round(cut / _TILE) * _TILE


def _lengths(cu_seqlens: Sequence[int]) -> Iterable[int]:
    return (stop - start for start, stop in itertools.pairwise(cu_seqlens))
