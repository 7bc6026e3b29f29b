"""Layouts: which rows of a sequence, or of packed documents, a rank holds, as arithmetic on integers.

Lengths are those of the documents, one after another in one stream of rows; a dense call is one document, the same for
each entry of its batch. Under every layout rank r of N holds ``total // N`` rows, and one more if ``r < total % N``:
shards may be uneven, and empty. A rank's rows are in the order of their documents and positions.

- ``contiguous``: the r-th of N parts of the stream.
- ``striped``: every N-th row of the stream, from row r on.
- ``zigzag``: of each document the parts r and 2N - 1 - r of 2N, so that all ranks have equal work under a causal mask.
  Parts of a document differ by one row at most; rows that do not divide are dealt to the ranks in turn, on from
  document to document.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from flashtile.errors import InvalidInputError

Layout = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


class Piece(NamedTuple):
    """Rows of one document: row t is at position ``start + stride * t``.

    Attributes:
        document: Its number.
        start: Position of the first row in the document.
        stride: Positions from a row to the next.
        length: Rows, at least 1.
    """

    document: int
    start: int
    stride: int
    length: int


def shard_length(total: int, world: int, rank: int) -> int:
    """Rows that a rank holds, of ``total`` in all, whatever the layout."""
    return total // world + (rank < total % world)


def check(lengths: Sequence[int], world: int, rank: int, layout: str) -> None:
    """Raises for arguments that describe no shard.

    Raises:
        InvalidInputError: An unknown layout, a rank that is not in the world, or a negative length.
    """
    if layout not in LAYOUTS:
        raise InvalidInputError("layout", f"{layout!r} is not known, must be one of {', '.join(LAYOUTS)}")
    if not 0 <= rank < world:
        raise InvalidInputError("rank", f"must be from 0 to {world - 1}, got {rank}")
    if min(lengths, default=0) < 0:
        raise InvalidInputError("lengths", f"must not be negative, got {min(lengths)}")


def pieces(
    lengths: Sequence[int], world: int, rank: int, layout: Layout, part: int = 0, parts: int = 1
) -> tuple[Piece, ...]:
    """A rank's rows, as pieces in the order in which it holds them; none are empty, and none continues another.

    Args:
        lengths: Rows of each document, zeros included.
        world: Number of ranks.
        rank: One of them.
        layout: See the module.
        part: Which part of the rank's rows, for ranks that share them by heads.
        parts: The number of such parts, of consecutive rows, as even as shards are.

    Raises:
        InvalidInputError: As ``check``.
    """
    check(lengths, world, rank, layout)
    found = list(_PIECES[layout](lengths, world, rank))
    if parts > 1:
        check((), parts, part, layout)
        rows = sum(piece.length for piece in found)
        found = list(_cut(found, *_span(rows, parts, part)))
    return tuple(found)


def ranges(
    lengths: Sequence[int], world: int, rank: int, layout: Layout, part: int = 0, parts: int = 1
) -> tuple[range, ...]:
    """The same rows as ranges of rows of the stream: what a shard takes of the whole tensor, and gives back to it."""
    starts = [0, *itertools.accumulate(lengths)]
    first = [(starts[p.document] + p.start, p) for p in pieces(lengths, world, rank, layout, part, parts)]
    return tuple(range(at, at + p.stride * (p.length - 1) + 1, p.stride) for at, p in first)


def positions(
    lengths: Sequence[int], world: int, rank: int, layout: Layout, part: int = 0, parts: int = 1
) -> tuple[range, ...]:
    """The positions of the same rows, each in its own document, as rotary embeddings need them."""
    found = pieces(lengths, world, rank, layout, part, parts)
    return tuple(range(p.start, p.start + p.stride * (p.length - 1) + 1, p.stride) for p in found)


def _span(total: int, parts: int, part: int) -> tuple[int, int]:
    """The half-open range of a part, of ``total`` rows cut in order into parts of shard_length."""
    start = part * (total // parts) + min(part, total % parts)
    return start, start + shard_length(total, parts, part)


def _cut(found: Sequence[Piece], start: int, stop: int) -> Iterator[Piece]:
    """The pieces of the rows from ``start`` to ``stop`` of those that the given pieces hold in a row."""
    at = 0
    for piece in found:
        first, last = max(start - at, 0), min(stop - at, piece.length)
        if first < last:
            yield piece._replace(start=piece.start + piece.stride * first, length=last - first)
        at += piece.length


def _contiguous(lengths: Sequence[int], world: int, rank: int) -> Iterator[Piece]:
    documents = [Piece(document, 0, 1, length) for document, length in enumerate(lengths)]
    return _cut(documents, *_span(sum(lengths), world, rank))


def _striped(lengths: Sequence[int], world: int, rank: int) -> Iterator[Piece]:
    at = 0
    for document, length in enumerate(lengths):
        start = (rank - at) % world
        if start < length:
            yield Piece(document, start, world, (length - start - 1) // world + 1)
        at += length


def _zigzag(lengths: Sequence[int], world: int, rank: int) -> Iterator[Piece]:
    at = 0
    for document, length in enumerate(lengths):
        bounds = [_part_start(length, at, world, part) for part in (rank, rank + 1, 2 * world - 1 - rank)]
        bounds.append(_part_start(length, at, world, 2 * world - rank))
        if bounds[1] == bounds[2]:
            bounds[1:3] = []
        for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
            if start < stop:
                yield Piece(document, start, 1, stop - start)
        at += length


def _part_start(length: int, before: int, world: int, part: int) -> int:
    """First position of a part, 2N for the end, of a document that begins at row ``before`` of the stream.

    Its ``length % 2N`` rows that do not divide are dealt in turn from where the documents before it ended: turns 0 to
    N - 1 are those of parts 0 to N - 1, and turns N to 2N - 1 those of parts 2N - 1 down to N, ranks 0 to N - 1 again.
    """
    each, spare = divmod(length, 2 * world)
    first = before % (2 * world)
    more = 0
    for start, stop in ((first, min(first + spare, 2 * world)), (0, first + spare - 2 * world)):
        more += max(0, min(stop, world, part) - start)  # turns that are parts
        low, high = 3 * world - max(stop, world), 3 * world - max(start, world)  # turns that are parts from the end
        more += max(0, min(high, part) - low)
    return each * part + more


_PIECES = {"contiguous": _contiguous, "striped": _striped, "zigzag": _zigzag}
