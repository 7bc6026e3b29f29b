"""Plans: what each rank computes and sends, step by step, made once from lengths, mask and layout.

Step s of rank r is a packed call of its rows over the keys of rank ``r - s``, counted around the ring of N ranks. A
shard of keys goes from its owner to the next rank and on, as far as somebody needs it; where ranks in between do not
need it, its owner sends it past them. Each rank that needs a shard gets it once. In the backward the float32 sums of dk
and dv go after the keys: those of a shard's step s to its step ``s + lag``, and from the last ones home to the owner,
which adds them to what its own rows gave. With a lag of 2 they have a whole step to travel, in two chains.

Pure integers: nothing here needs torch, a device or a process group.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashtile.distributed.layouts import Layout, Piece, check, pieces, shard_length
from flashtile.errors import InvalidInputError
from flashtile.masks import Band

# A difference of local indices, key minus row: the first and the last that a mask keeps, both inclusive.
_Kept = tuple[int, int]


class Origin(NamedTuple):
    """Where a packed sequence of a call lies in the whole attention, for what depends on positions.

    Row t is query ``i0 + i_stride * t`` and key u is key ``j0 + j_stride * u`` of their document. Query i stands at key
    position ``i + shift``, where ``shift = seqlen_k - seqlen_q`` of the document. All are 0 where there are no pairs.

    Attributes:
        batch: The entry of the batch, or the document.
        i0: Query of the first row.
        i_stride: Queries from a row to the next.
        j0: Key of the first key row.
        j_stride: Keys from a key row to the next.
        shift: Key position of query 0.
    """

    batch: int = 0
    i0: int = 0
    i_stride: int = 0
    j0: int = 0
    j_stride: int = 0
    shift: int = 0


@dataclass(frozen=True)
class Call:
    """One packed call of all of a rank's rows over all keys of a shard; sequences with no rows or no keys fill gaps.

    Attributes:
        cu_seqlens_q: Bounds of the sequences among the rank's rows, from 0 to their number.
        cu_seqlens_k: Bounds of the same sequences among the rows of the shard.
        band: The mask of every sequence, aligned bottom-right as always.
        origins: One for each sequence; empty if they were not asked for.
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
        """Pairs of a row and a key that the call keeps, of one head."""
        sizes = zip(_lengths(self.cu_seqlens_q), _lengths(self.cu_seqlens_k), strict=True)
        return sum(self.band.count(q, k) for q, k in sizes if q and k)


class Send(NamedTuple):
    """A shard of keys and values that leaves for the rank that uses it in the step.

    Attributes:
        to: The rank that gets it.
        source: The rank whose keys they are: the sender, or the source of the step before.
    """

    to: int
    source: int


@dataclass(frozen=True)
class Step:
    """What a rank does in one step. Its transfers of keys happen before its calls, those of sums after them.

    Attributes:
        number: s, from 0 to N - 1. Steps in which a rank has nothing to do are not in its plan.
        source: The rank whose keys are used, ``rank - number`` around the ring.
        keys: Rows of its shard, with all entries of the batch.
        calls: What is computed; none where the rank only sends, or gets sums.
        receive_from: The rank that the shard comes from: the one before, which used it in the last step, or its owner;
            None if there are no calls, and in step 0.
        sends: The shards that leave for this step of others.
        sums_from: The rank whose float32 dk and dv of the shard this step adds to; None if it starts from zero.
        sums_to: The rank that gets them then: the shard's next user in the chain, or its owner; None if nobody does, in
            step 0 and without calls.
        sums_back: The rank whose dk and dv of this rank's own keys are at the end of their chain with this step.
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

    @property
    def pairs(self) -> int:
        """Pairs of a row and a key that are kept, of one head."""
        return sum(call.pairs for call in self.calls)


@dataclass(frozen=True)
class Plan:
    """All steps of a rank.

    Attributes:
        world: Number of ranks.
        rank: This one.
        rows: Its queries, with all entries of the batch.
        keys: Its own keys, likewise.
        steps: In the order of their numbers; the first is step 0, the rank's own keys.
    """

    world: int
    rank: int
    rows: int
    keys: int
    steps: tuple[Step, ...]

    @property
    def pairs(self) -> int:
        """Pairs of a row and a key that the rank computes, of one head."""
        return sum(step.pairs for step in self.steps)


@functools.lru_cache(maxsize=256)
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
    ring = _Ring(lengths_q, lengths_k, world, layout, band)
    rows = shard_length(sum(lengths_q), world, rank)
    steps = []
    for number in range(world):
        source = (rank - number) % world
        keys = shard_length(sum(lengths_k), world, source)
        found = ring.rectangles(rank, source, origins) if number == 0 or ring.needs(rank, source) else []
        calls = tuple(_repeated(call, batch) for call in _calls(found, rows, keys, origins))
        step = _step(ring, rank, number, lag, keys * batch, calls)
        if number == 0 or calls or step.sends or step.sums_back is not None:
            steps.append(step)
    return Plan(world, rank, rows * batch, shard_length(sum(lengths_k), world, rank) * batch, tuple(steps))


class _Ring:
    """Who holds what, and who needs whose keys."""

    def __init__(
        self, lengths_q: Sequence[int], lengths_k: Sequence[int], world: int, layout: Layout, band: Band
    ) -> None:
        self.world, self.band = world, band
        self.shifts = [k - q for q, k in zip(lengths_q, lengths_k, strict=True)]
        self._held = [functools.cache(functools.partial(_held, n, world, layout)) for n in (lengths_q, lengths_k)]
        self.needs = functools.cache(self._needs)

    def _shared(self, rank: int, source: int) -> Iterable[tuple[int, list[_Held], list[_Held]]]:
        """Of each document that both ranks have, its number, the rank's rows and the source's keys."""
        rows, keys = self._held[0](rank), self._held[1](source)
        return ((document, rows[document], keys[document]) for document in rows if document in keys)

    def _needs(self, rank: int, source: int) -> bool:
        """Whether a rank keeps any pair with a rank's keys."""
        return any(
            _kept(q, k, self.band, self.shifts[document])
            for document, rows, keys in self._shared(rank, source)
            for q in rows
            for k in keys
        )

    def at(self, source: int, number: int) -> int | None:
        """The rank whose step of that number uses the source's keys, if there is such a step and it needs them."""
        rank = (source + number) % self.world
        return rank if 0 < number < self.world and self.needs(rank, source) else None

    def rectangles(self, rank: int, source: int, even: bool) -> list[_Rectangle]:
        """What a rank computes over a rank's keys, in the order of documents."""
        return [
            rectangle
            for document, rows, keys in self._shared(rank, source)
            for rectangle in _rectangles(rows, keys, self.band, self.shifts[document], even)
        ]


def _step(ring: _Ring, rank: int, number: int, lag: int, keys: int, calls: tuple[Call, ...]) -> Step:
    """A step with what travels for it."""
    source, before = ((rank - number + back) % ring.world for back in (0, 1))
    if number == 0:
        return Step(number, source, keys, calls)
    # The shard of the step before goes on to the next rank; the rank's own to one that the rank before does not serve.
    sends = (before, ring.at(before, number - 1) is not None), (rank, ring.at(rank, number - 1) is None)
    used = ring.at(source, number) is not None
    last, following = ring.at(source, number - 1), ring.at(source, number + lag)
    return Step(
        number,
        source,
        keys,
        calls,
        receive_from=(source if last is None else last) if used else None,
        sends=tuple(Send(to, shard) for shard, mine in sends if mine and (to := ring.at(shard, number)) is not None),
        sums_from=ring.at(source, number - lag) if used else None,
        sums_to=(source if following is None else following) if used else None,
        sums_back=ring.at(rank, number) if ring.at(rank, number + lag) is None else None,
    )


class _Held(NamedTuple):
    """A piece and the first of the holder's rows that it has."""

    piece: Piece
    at: int


def _held(lengths: Sequence[int], world: int, layout: Layout, rank: int) -> dict[int, list[_Held]]:
    """The pieces that a rank has of each document."""
    held: dict[int, list[_Held]] = {}
    at = 0
    for piece in pieces(lengths, world, rank, layout):
        held.setdefault(piece.document, []).append(_Held(piece, at))
        at += piece.length
    return held


def _kept(q: _Held, k: _Held, band: Band, shift: int) -> _Kept | None:
    """The differences of local indices that are kept between two pieces, which have one stride; None for none."""
    rows, keys = q.piece, k.piece
    first, last = 1 - rows.length, keys.length - 1
    apart = keys.start - rows.start - shift
    if band.left is not None:
        first = max(first, -((band.left + apart) // rows.stride))
    if band.right is not None:
        last = min(last, (band.right - apart) // rows.stride)
    return (first, last) if first <= last else None


class _Rectangle(NamedTuple):
    """A packed sequence that is computed: rows and keys in a row, and which differences of their indices are kept."""

    row: int
    rows: int
    key: int
    keys: int
    kept: _Kept
    origin: Origin

    @property
    def band(self) -> Band:
        """The band that keeps these differences."""
        shift, (first, last) = self.keys - self.rows, self.kept
        return Band(shift - first if first > 1 - self.rows else None, last - shift if last < self.keys - 1 else None)

    def fits(self, band: Band) -> bool:
        """Whether another band keeps the same pairs."""
        shift = self.keys - self.rows
        first = 1 - self.rows if band.left is None else max(1 - self.rows, shift - band.left)
        last = self.keys - 1 if band.right is None else min(self.keys - 1, shift + band.right)
        return (first, last) == self.kept


def _rectangles(
    rows: Sequence[_Held], keys: Sequence[_Held], band: Band, shift: int, even: bool
) -> Iterable[_Rectangle]:
    """The fewest sequences for a rank's rows of a document over a shard's keys: one, one a piece, or one a pair."""
    kept = {(q, k): one for q in rows for k in keys if (one := _kept(q, k, band, shift))}

    def joined(rows: Sequence[_Held], keys: Sequence[_Held]) -> _Rectangle | None:
        rows = [q for q in rows if any((q, k) in kept for k in keys)]
        keys = [k for k in keys if any((q, k) in kept for q in rows)]
        if not rows or (even and len(rows) + len(keys) > 2):
            return None
        differences = _joined(rows, keys, kept)
        return None if differences is None else _trimmed(rows, keys, differences, shift)

    found = [joined(rows, keys)]
    if found == [None]:
        for q in rows:
            whole = joined([q], keys)
            found += [joined([q], [k]) for k in keys] if whole is None else [whole]
    return [rectangle for rectangle in found if rectangle is not None]


def _joined(rows: Sequence[_Held], keys: Sequence[_Held], kept: dict[tuple[_Held, _Held], _Kept]) -> _Kept | None:
    """The differences to keep between pieces taken as one, counted from their first rows, if any say the same."""
    # For each pair the differences that it has, and those of them that are kept, counted alike.
    pairs: list[tuple[_Kept, _Kept | None]] = []
    for q, k in itertools.product(rows, keys):
        apart, pair = k.at - keys[0].at - q.at + rows[0].at, kept.get((q, k))
        possible = 1 - q.piece.length + apart, k.piece.length - 1 + apart
        pairs.append((possible, None if pair is None else (pair[0] + apart, pair[1] + apart)))
    # The tightest that keeps all there is to keep: if this keeps too much, everything does.
    first = min(pair[0] for _, pair in pairs if pair)
    last = max(pair[1] for _, pair in pairs if pair)
    for (low, high), pair in pairs:
        now = max(first, low), min(last, high)
        if (now if now[0] <= now[1] else None) != pair:
            return None
    return first, last


def _trimmed(rows: Sequence[_Held], keys: Sequence[_Held], kept: _Kept, shift: int) -> _Rectangle:
    """The rectangle without rows and keys at its ends that keep nothing, so that equal masks are equal bands."""
    num_rows, num_keys = (sum(held.piece.length for held in side) for side in (rows, keys))
    first, last = kept
    row_start, row_stop = max(0, -last), min(num_rows, num_keys - first)
    key_start, key_stop = max(0, row_start + first), min(num_keys, row_stop + last)
    apart = key_start - row_start
    q, k = rows[0].piece, keys[0].piece
    return _Rectangle(
        rows[0].at + row_start,
        row_stop - row_start,
        keys[0].at + key_start,
        key_stop - key_start,
        (max(first - apart, 1 - row_stop + row_start), min(last - apart, key_stop - key_start - 1)),
        Origin(q.document, q.start + q.stride * row_start, q.stride, k.start + k.stride * key_start, k.stride, shift),
    )


def _calls(found: Sequence[_Rectangle], rows: int, keys: int, origins: bool) -> Iterable[Call]:
    """The fewest calls that hold the rectangles: one for each band, and more where they share rows or keys."""
    common = [band for band, _ in collections.Counter(r.band for r in found).most_common(3)]
    layers: dict[Band, list[list[_Rectangle]]] = {}
    for rectangle in found:
        band = next((band for band in common if rectangle.fits(band)), rectangle.band)
        calls = layers.setdefault(band, [])
        for call in calls:
            end = call[-1]
            if end.row + end.rows <= rectangle.row and end.key + end.keys <= rectangle.key:
                call.append(rectangle)
                break
        else:
            calls.append([rectangle])
    return (_call(call, band, rows, keys, origins) for band, calls in layers.items() for call in calls)


def _call(found: Sequence[_Rectangle], band: Band, rows: int, keys: int, origins: bool) -> Call:
    """The call of rectangles that follow one another, with sequences of no keys and of no rows between them."""
    cu_seqlens_q, cu_seqlens_k, where = [0], [0], []

    def add(row: int, key: int, origin: Origin) -> None:
        if (row, key) != (cu_seqlens_q[-1], cu_seqlens_k[-1]):
            cu_seqlens_q.append(row)
            cu_seqlens_k.append(key)
            where.append(origin)

    for each in found:
        add(each.row, cu_seqlens_k[-1], Origin())
        add(each.row, each.key, Origin())
        add(each.row + each.rows, each.key + each.keys, each.origin)
    add(rows, cu_seqlens_k[-1], Origin())
    add(rows, keys, Origin())
    return Call(tuple(cu_seqlens_q), tuple(cu_seqlens_k), band, tuple(where) if origins else ())


def _repeated(call: Call, batch: int) -> Call:
    """A call of one entry as the call of all entries of a batch."""
    if batch == 1:
        return call
    bounds = []
    for cu_seqlens in (call.cu_seqlens_q, call.cu_seqlens_k):
        bounds.append((0, *(entry * cu_seqlens[-1] + x for entry in range(batch) for x in cu_seqlens[1:])))
    where = tuple(origin._replace(batch=entry) for entry in range(batch) for origin in call.origins)
    return Call(bounds[0], bounds[1], call.band, where)


def _lengths(cu_seqlens: Sequence[int]) -> Iterable[int]:
    return (stop - start for start, stop in itertools.pairwise(cu_seqlens))
