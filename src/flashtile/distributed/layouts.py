"""Layouts: the rows of a sequence, or of packed documents, that each rank holds, as arithmetic on integers.

``lengths`` are the documents' lengths. Documents follow one another in one stream of rows; a dense call is one
document, the same for each entry of its batch. Under every layout rank r of N holds ``total // N`` rows, and one more
if ``r < total % N``: shards may be uneven, and empty. A rank's rows are in the order of their documents and positions.

- ``contiguous``: part r of N equal parts of the stream.
- ``striped``: every N-th row of the stream, starting with row r.
- ``zigzag``: parts r and 2N - 1 - r of each document's 2N parts, so that all ranks have equal work under a causal mask.
  Parts of a document differ by at most one row. The remaining rows are dealt to the ranks in turn, and the turn goes on
  from document to document.
- ``Dealt``: explicit spans, which ``dealing`` makes for a mask, in their own order.
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
    """A layout for documents of given lengths, made for a mask by ``deal``. It is the same on all ranks.

    Attributes:
        lengths: Rows of each document.
        spans: For each rank the rows that it holds, in order: document, first row and number of rows.
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
        document: The document's number.
        start: Position of the first row in the document.
        stride: Positions from a row to the next.
        length: Rows, at least 1.
        at: The index of the piece's first row among the holder's rows.
    """

    document: int
    start: int
    stride: int
    length: int
    at: int


def shard_length(total: int, world: int, rank: int) -> int:
    """The number of rows that a rank holds of ``total`` rows, under every layout."""
    return total // world + (rank < total % world)


def check_layout(layout: object) -> None:
    """Raises if an object is not a layout.

    Raises:
        InvalidInputError: The object is neither a known name nor ``Dealt``.
    """
    if not (isinstance(layout, Dealt) or (isinstance(layout, str) and layout in LAYOUTS)):
        known = f"must be one of {', '.join(LAYOUTS)}, or made by deal"
        raise InvalidInputError("layout", f"is {shown(layout)}, {known}")


def check(lengths: Sequence[int], world: int, rank: int, layout: Layout) -> None:
    """Raises if arguments describe no shard.

    Raises:
        InvalidInputError: The layout is unknown or made for other lengths or ranks, the rank is not in the world, or a
            length is negative.
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
    """A rank's rows as pieces, in the order in which it holds them. No piece is empty, and none continues another.

    Args:
        lengths: Rows of each document, zeros included.
        world: Number of ranks.
        rank: The rank.
        layout: See the module's docstring.
        part: The index of a part of the rank's rows, for ranks that share these rows by heads.
        parts: The number of such parts. Each has consecutive rows, and they are as even as shards.

    Raises:
        InvalidInputError: See ``check``.
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
    """The rows of ``pieces`` as ranges of rows of the stream: a shard is these rows of the whole tensor."""
    starts = _starts(tuple(lengths))
    first = [(starts[p.document] + p.start, p) for p in pieces(lengths, world, rank, layout, part, parts)]
    return tuple(range(at, at + p.stride * (p.length - 1) + 1, p.stride) for at, p in first)


def positions(
    lengths: Sequence[int], world: int, rank: int, layout: Layout, part: int = 0, parts: int = 1
) -> tuple[range, ...]:
    """The positions of the rows of ``pieces``, each in its own document, as rotary embeddings need them."""
    found = pieces(lengths, world, rank, layout, part, parts)
    return tuple(range(p.start, p.start + p.stride * (p.length - 1) + 1, p.stride) for p in found)


@functools.lru_cache(maxsize=64)
def _starts(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The first row of each document in the stream, and the end."""
    return (0, *itertools.accumulate(lengths))


def _span(total: int, parts: int, part: int) -> tuple[int, int]:
    """The half-open range of one part, if ``total`` rows are cut in order into parts of ``shard_length`` rows."""
    start = part * (total // parts) + min(part, total % parts)
    return start, start + shard_length(total, parts, part)


def cut(found: Sequence[Piece], start: int, stop: int) -> Iterator[Piece]:
    """The parts of pieces between rows ``start`` and ``stop`` of a rank."""
    for piece in found:
        first, last = max(start, piece.at), min(stop, piece.at + piece.length)
        if first < last:
            position = piece.start + piece.stride * (first - piece.at)
            yield Piece(piece.document, position, piece.stride, last - first, first - start)


# A rank's pieces without ``Piece.at``. The functions below make them from the documents' first rows and the stream's
# end.
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
    """How many of the stream's first ``rows`` rows go to the parts before ``part``, if rows are dealt to parts in turn.

    Turns 0 to N - 1 go to parts 0 to N - 1, and turns N to 2N - 1 go to parts 2N - 1 down to N: that is ranks 0 to N -
    1, twice. A part has as many rows of each document as it would be dealt, although the parts follow one another.
    """
    rounds, turn = divmod(rows, 2 * world)
    return rounds * part + min(turn, part, world) + max(0, turn - 3 * world + part)


_PIECES = {"contiguous": _contiguous, "striped": _striped, "zigzag": _zigzag}
