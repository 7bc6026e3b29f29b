"""A rank's calls over its own keys in two parts: the backward runs one first, and one while dk and dv return."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from flashtile.core.masks import Band
from flashtile.distributed.calls import Call, Origin

# Rows of a part are a multiple, so that it ends with a whole tile.
_TILE = 128


def in_two(calls: Sequence[Call], share: float = 0.5) -> tuple[list[Call], list[Call]]:
    """Calls that together keep what the given ones do, in two lists; the first has about ``share`` of the work."""
    if len(calls) == 1:
        calls = _cut(calls[0], share)
    first: list[Call] = []
    final: list[Call] = []
    missing = (2 * share - 1) * sum(each.pairs for each in calls)  # in the first, more than in the other
    for call in sorted(calls, key=lambda each: -each.pairs):
        (first if missing >= 0 else final).append(call)
        missing -= call.pairs if missing >= 0 else -call.pairs
    return first, final


def _cut(call: Call, share: float) -> list[Call]:
    """The first rows of each sequence, and the other ones; the call itself where they would have other bands."""
    left, right = call.band.left, call.band.right
    if (left is not None if right is None else right > 0) or not call.pairs:
        return [call]
    # Bounds of rows and of keys, and origins.
    early: tuple[list[int], list[int], list[Origin]] = [0], [0], []
    late: tuple[list[int], list[int], list[Origin]] = [0], [0], []
    rows, keys = (list(itertools.pairwise(x)) for x in (call.cu_seqlens_q, call.cu_seqlens_k))
    origins = call.origins or [Origin()] * len(rows)
    for (row, row_stop), (key, key_stop), origin in zip(rows, keys, origins, strict=True):
        count, shift = row_stop - row, key_stop - key - row_stop + row
        cut = _rows_of(share, call.band, count, key_stop - key)
        # With as many keys fewer as rows, the last row is still aligned with the last key.
        seen = key_stop if right is None else key + max(0, cut + shift)
        for bound, last, where in (
            (row + cut, seen, origin),
            (row_stop, seen, Origin()),
            (row_stop, key_stop, Origin()),
        ):
            _append(early, bound, last, where)
        _append(late, row + cut, key, Origin())
        _append(late, row_stop, key_stop, origin._replace(i0=origin.i0 + origin.i_stride * cut))
    return [Call(tuple(q), tuple(k), call.band, tuple(where) if call.origins else ()) for q, k, where in (early, late)]


def _append(part: tuple[list[int], list[int], list[Origin]], row: int, key: int, origin: Origin) -> None:
    """A sequence up to these bounds, unless it would be empty."""
    if (row, key) != (part[0][-1], part[1][-1]):
        part[0].append(row)
        part[1].append(key)
        part[2].append(origin)


def _rows_of(share: float, band: Band, rows: int, keys: int) -> int:
    """First rows of a sequence that have about a share of its pairs."""
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
