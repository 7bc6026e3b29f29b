"""Layouts: which rows of a sequence, or of packed documents, a rank holds, as arithmetic on integers.

Lengths are those of the documents, one after another in one stream of rows; a dense call is one document, the same for
each entry of its batch. Under every layout rank r of N holds ``total // N`` rows, and one more if ``r < total % N``:
shards may be uneven, and empty. A rank's rows are in the order of their documents and positions.

- ``contiguous``: the r-th of N parts of the stream.
- ``striped``: every N-th row of the stream, from row r on.
- ``zigzag``: of each document the parts r and 2N - 1 - r of 2N, so that all ranks have equal work under a causal mask.
  Parts of a document differ by one row at most; rows that do not divide are dealt to the ranks in turn, on from
  document to document.
- ``Dealt``: whatever it says, which ``dealing`` makes of a mask. Its rows are in its order.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from flashtile.core.errors import InvalidInputError, shown

Name = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[Name, ...] = get_args(Name)


@dataclass(frozen=True)
class Dealt:
    """A layout of documents of certain lengths, made for a mask by ``deal``; the same on all ranks.

    Attributes:
        lengths: Rows of each document.
        spans: Of each rank, which rows it holds, in order: document, first row and number of rows.
    """

    lengths: tuple[int, ...]
    spans: tuple[tuple[tuple[int, int, int], ...], ...]

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.lengths, self.spans))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Dealt({sum(self.lengths)} rows to {len(self.spans)} ranks)"


Layout = Name | Dealt


class Piece(NamedTuple):
    """Rows of one document: row t is at position ``start + stride * t``.

    Attributes:
        document: Its number.
        start: Position of the first row in the document.
        stride: Positions from a row to the next.
        length: Rows, at least 1.
        at: Which of the holder's rows is the first.
    """

    document: int
    start: int
    stride: int
    length: int
    at: int


def shard_length(total: int, world: int, rank: int) -> int:
    """Rows that a rank holds, of ``total`` in all, whatever the layout."""
    return total // world + (rank < total % world)


def check_layout(layout: object) -> None:
    """Raises for what is no layout.

    Raises:
        InvalidInputError: It is neither a known name nor ``Dealt``.
    """
    if not (isinstance(layout, Dealt) or (isinstance(layout, str) and layout in LAYOUTS)):
        known = f"must be one of {', '.join(LAYOUTS)}, or made by deal"
        raise InvalidInputError("layout", f"is {shown(layout)}, {known}")


def check(lengths: Sequence[int], world: int, rank: int, layout: Layout) -> None:
    """Raises for arguments that describe no shard.

    Raises:
        InvalidInputError: An unknown layout, one for other lengths or ranks, a rank that is not in the world, or a
            negative length.
    """
    check_layout(layout)
    if not 0 <= rank < world:
        raise InvalidInputError("rank", f"must be from 0 to {world - 1}, got {rank}")
    if min(lengths, default=0) < 0:
        raise InvalidInputError("lengths", f"must not be negative, got {min(lengths)}")
    if isinstance(layout, Dealt) and (layout.lengths != tuple(lengths) or len(layout.spans) != world):
        have = f"is of {len(layout.lengths)} documents, {sum(layout.lengths)} rows in all, on {len(layout.spans)} ranks"
        here = f"there are {len(lengths)} of {sum(lengths)} on {world}"
        raise InvalidInputError("layout", f"{have}, but {here}, or lengths differ")


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
    check((), parts, part, "contiguous")
    found = []
    at = 0
    if isinstance(layout, Dealt):
        spans: _Spans = ((document, start, 1, length) for document, start, length in layout.spans[rank])
    else:
        spans = _PIECES[layout](_starts(tuple(lengths)), world, rank)
    for document, start, stride, length in spans:
        found.append(Piece(document, start, stride, length, at))
        at += length
    return tuple(found if parts == 1 else cut(found, *_span(at, parts, part)))


def ranges(
    lengths: Sequence[int], world: int, rank: int, layout: Layout, part: int = 0, parts: int = 1
) -> tuple[range, ...]:
    """The same rows as ranges of rows of the stream: what a shard takes of the whole tensor, and gives back to it."""
    starts = _starts(tuple(lengths))
    first = [(starts[p.document] + p.start, p) for p in pieces(lengths, world, rank, layout, part, parts)]
    return tuple(range(at, at + p.stride * (p.length - 1) + 1, p.stride) for at, p in first)


def positions(
    lengths: Sequence[int], world: int, rank: int, layout: Layout, part: int = 0, parts: int = 1
) -> tuple[range, ...]:
    """The positions of the same rows, each in its own document, as rotary embeddings need them."""
    found = pieces(lengths, world, rank, layout, part, parts)
    return tuple(range(p.start, p.start + p.stride * (p.length - 1) + 1, p.stride) for p in found)


@functools.lru_cache(maxsize=64)
def _starts(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The first row of each document in the stream, and the end."""
    return (0, *itertools.accumulate(lengths))


def _span(total: int, parts: int, part: int) -> tuple[int, int]:
    """The half-open range of a part, of ``total`` rows cut in order into parts of shard_length."""
    start = part * (total // parts) + min(part, total % parts)
    return start, start + shard_length(total, parts, part)


def cut(found: Sequence[Piece], start: int, stop: int) -> Iterator[Piece]:
    """What pieces hold of a rank's rows from ``start`` to ``stop``."""
    for piece in found:
        first, last = max(start, piece.at), min(stop, piece.at + piece.length)
        if first < last:
            position = piece.start + piece.stride * (first - piece.at)
            yield Piece(piece.document, position, piece.stride, last - first, first - start)


# A rank's pieces, without the places they have among its rows, from the first rows of the documents and the end.
_Spans = Iterator[tuple[int, int, int, int]]


def _contiguous(starts: Sequence[int], world: int, rank: int) -> _Spans:
    start, stop = _span(starts[-1], world, rank)
    document = bisect.bisect_right(starts, start) - 1
    while start < stop:
        end = min(stop, starts[document + 1])
        if start < end:
            yield document, start - starts[document], 1, end - start
        start, document = end, document + 1


def _striped(starts: Sequence[int], world: int, rank: int) -> _Spans:
    for document, (at, end) in enumerate(itertools.pairwise(starts)):
        start = (rank - at) % world
        if start < end - at:
            yield document, start, world, (end - at - start - 1) // world + 1


def _zigzag(starts: Sequence[int], world: int, rank: int) -> _Spans:
    first, second = [(part, part + 1) for part in (rank, 2 * world - 1 - rank)]
    ends = first[:1] + second[1:] if rank == world - 1 else first + second
    bounds = [[_dealt(row, world, part) for row in starts] for part in ends]
    for document in range(len(starts) - 1):
        for low, high in zip(bounds[::2], bounds[1::2], strict=True):
            start = low[document + 1] - low[document]
            length = high[document + 1] - high[document] - start
            if length:
                yield document, start, 1, length


def _dealt(rows: int, world: int, part: int) -> int:
    """How many of the first rows of the stream would go to parts before this one, were rows dealt to parts in turn.

    Turns 0 to N - 1 are those of parts 0 to N - 1, and turns N to 2N - 1 of parts 2N - 1 down to N: ranks 0 to N - 1
    twice. Of each document a part has as many rows as it would be dealt, though the parts follow one another.
    """
    rounds, turn = divmod(rows, 2 * world)
    return rounds * part + min(turn, part, world) + max(0, turn - 3 * world + part)


_PIECES = {"contiguous": _contiguous, "striped": _striped, "zigzag": _zigzag}
