"""Interval masks on the host: the keys that each row keeps, for plans and layouts.

Pure integers, which ``values`` reads from tensors. With several heads, or several entries of a batch, a row keeps the
range from the first key to the last that it keeps in any of them; kernels read the exact mask.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashtile.core.masks import Band
from flashtile.distributed.calls import RingRectangle

# For each row of a document its first key and the end of its keys; or for each key the same for its rows.
Ends = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Kept:
    """The pairs that an interval mask keeps.

    Attributes:
        rows: For each document the keys that its rows keep; None if rows are not bounded.
        keys: For each document the rows that keep its keys; None if keys are not bounded.
    """

    rows: tuple[Ends, ...] | None
    keys: tuple[Ends, ...] | None

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.rows, self.keys))

    def __hash__(self) -> int:
        return self._hash

    def spans(self, found: RingRectangle) -> list[tuple[int, int]]:
        """The keys of a rectangle that any of its rows keeps, as ordered separate spans in the rectangle's indices."""
        document, (first, last) = found.origin.head, found.kept
        spans: set[tuple[int, int]] = set()
        for t in range(found.rows) if self.rows is not None else ():
            low, high = max(0, t + first), min(found.keys, t + last + 1)
            start, stop = self.rows[document][found.origin.row + found.origin.row_step * t]  # type: ignore[index]
            low = max(low, -((found.origin.key - start) // found.origin.key_step))
            high = min(high, -((found.origin.key - stop) // found.origin.key_step))
            if low < high:
                spans.add((low, high))
        whole = sorted(spans) if self.rows is not None else [(0, found.keys)]
        return [
            (found.key + a, found.key + b)
            for a, b in _joined(whole if self.keys is None else self._of_keys(found, whole))
        ]

    def _of_keys(self, found: RingRectangle, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The keys in spans that some row of the rectangle keeps."""
        origin, (first, last) = found.origin, found.kept
        assert self.keys is not None
        for a, b in _joined(spans):
            for u in range(a, b):
                start, stop = self.keys[origin.head][origin.key + origin.key_step * u]
                low = max(0, u - last, -((origin.row - start) // origin.row_step))
                if low < min(found.rows, u - first + 1, -((origin.row - stop) // origin.row_step)):
                    yield u, u + 1

    def pairs(self, lengths: Sequence[int], band: Band) -> list[list[int]]:
        """For each document that attends to itself, the pairs that its first rows keep, for 0 rows up to all.

        If a mask bounds rows and keys, the bounds of rows alone are counted.
        """
        found = []
        for document, length in enumerate(lengths):
            counts = [0] * (length + 1)
            for i in range(length) if self.rows is not None else ():
                start, stop = band.row_keys(i, length, length)
                first, end = self.rows[document][i]  # type: ignore[index]
                counts[i + 1] = max(0, min(stop, end) - max(start, first))
            if self.rows is None and self.keys is not None:
                steps = [0] * (length + 2)
                for j in range(length):
                    first, end = self.keys[document][j]
                    low = max(0, first, 0 if band.right is None else j - band.right)
                    high = min(length, end, length if band.left is None else j + band.left + 1)
                    if low < high:
                        steps[low + 1] += 1
                        steps[high + 1] -= 1
                counts = list(itertools.accumulate(steps[:-1]))
            found.append(list(itertools.accumulate(counts)))
        return found


def _joined(spans: Sequence[tuple[int, int]] | Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ordered spans, with spans that touch or overlap joined."""
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found
