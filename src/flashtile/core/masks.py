"""Band: causal, sliding-window and chunked masks as data, with the range arithmetic that backends need; and Origin.

Row i of a call with ``seqlen_q`` queries and ``seqlen_k`` keys is at key position ``i + shift`` where ``shift =
seqlen_k - seqlen_q``: the last query is aligned with the last key. The band keeps key j of row i if ``i + shift - left
<= j <= i + shift + right``, both ends inclusive; ``None`` leaves a side unbounded. With a chunk of c keys, j is also in
the row's chunk, ``floor((i + shift) / c) == floor(j / c)``. The first and the last kept key never decrease with the
row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Band:
    """The keys that a row keeps, counted from its diagonal.

    Attributes:
        left: Keys kept before the diagonal key, or None for all. May be negative.
        right: Keys kept after the diagonal key, or None for all. May be negative.
        chunk: Keys in a chunk, or None for no chunks. It bounds both sides: left and right are less than it.
    """

    left: int | None = None
    right: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None:
            for side in ("left", "right"):
                bound = getattr(self, side)
                object.__setattr__(self, side, self.chunk - 1 if bound is None else min(bound, self.chunk - 1))

    @property
    def unbounded(self) -> bool:
        """Whether every row keeps every key, for all lengths."""
        return self.left is None and self.right is None

    def row_keys(self, row: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """The half-open range of keys that one row keeps; empty when stop <= start."""
        start, stop = self._start(row + seqlen_k - seqlen_q), self._stop(row + seqlen_k - seqlen_q, seqlen_k)
        return start, max(start, stop)

    def _start(self, diagonal: int) -> int:
        """The first key that the row at key position ``diagonal`` keeps."""
        start = 0 if self.left is None else max(0, diagonal - self.left)
        return start if self.chunk is None else max(start, diagonal // self.chunk * self.chunk)

    def _stop(self, diagonal: int, seqlen_k: int) -> int:
        """The end of the keys that the row at key position ``diagonal`` keeps."""
        stop = seqlen_k if self.right is None else min(seqlen_k, diagonal + self.right + 1)
        return stop if self.chunk is None else min(stop, (diagonal // self.chunk + 1) * self.chunk)

    def any_keys(self, row_start: int, row_stop: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """The half-open range of keys that at least one of the rows keeps.

        Both ends of the band move right with the row, so the first row sets the start and the last row the stop.
        """
        start, _ = self.row_keys(row_start, seqlen_q, seqlen_k)
        _, stop = self.row_keys(row_stop - 1, seqlen_q, seqlen_k)
        return min(start, seqlen_k), max(min(start, seqlen_k), stop)

    def all_keys(self, row_start: int, row_stop: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """The half-open range of keys that all of the rows keep; empty when stop <= start."""
        shift = seqlen_k - seqlen_q
        start, stop = self._start(row_stop - 1 + shift), self._stop(row_start + shift, seqlen_k)
        return start, max(start, stop)

    def any_rows(self, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """The half-open range of rows that contains every row with a kept key; empty when stop <= start."""
        if seqlen_k == 0:
            return 0, 0
        shift = seqlen_k - seqlen_q
        start = 0 if self.right is None else max(0, -shift - self.right)
        stop = seqlen_q if self.left is None else min(seqlen_q, self.left + seqlen_k - shift)
        if self.chunk is not None:  # positions before the first key are in no chunk that has keys
            start = max(start, -shift)
        if self.left is not None and self.right is not None and self.left + self.right < 0:
            stop = start
        return start, max(start, stop)

    def count(self, seqlen_q: int, seqlen_k: int) -> int:
        """The number of (row, key) pairs that the band keeps, in O(1)."""
        if self.chunk is not None and (self.left is None or self.right is None or self.left + self.right >= 0):
            return self._count_chunks(self.chunk, seqlen_q, seqlen_k)
        return self.count_rows(0, seqlen_q, seqlen_q, seqlen_k)

    def count_rows(self, row_start: int, row_stop: int, seqlen_q: int, seqlen_k: int) -> int:
        """The number of pairs that the band keeps in some rows, in O(1) without chunks.

        A row keeps ``clip(d + right + 1, 0, seqlen_k) - clip(d - left, 0, seqlen_k)`` keys, where ``d = row + shift``,
        so the sum is a difference of two sums of clipped consecutive integers.
        """
        first, rows = row_start + seqlen_k - seqlen_q, row_stop - row_start
        if self.left is not None and self.right is not None and self.left + self.right < 0:
            return 0
        if self.chunk is not None:
            ends = (self.row_keys(row, seqlen_q, seqlen_k) for row in range(row_start, row_stop))
            return sum(stop - start for start, stop in ends)
        upper = rows * seqlen_k if self.right is None else _sum_clipped(first + self.right + 1, rows, seqlen_k)
        lower = 0 if self.left is None else _sum_clipped(first - self.left, rows, seqlen_k)
        return upper - lower

    def _count_chunks(self, chunk: int, seqlen_q: int, seqlen_k: int) -> int:
        """``count`` with chunks. Each chunk has its own band; all but the first and the last keep as many pairs."""
        band, shift = Band(self.left, self.right), seqlen_k - seqlen_q
        if seqlen_k == 0 or seqlen_q == 0:
            return 0
        first, last = max(shift, 0) // chunk, (seqlen_k - 1) // chunk

        def kept(n: int) -> int:
            stop = min((n + 1) * chunk, seqlen_k)
            return band.count(stop - max(n * chunk, shift), stop - n * chunk)

        between = max(0, last - first - 1) * band.count(chunk, chunk)
        return kept(first) + between + (kept(last) if last > first else 0)

    def dense(
        self,
        seqlen_q: int,
        seqlen_k: int,
        *,
        rows: tuple[int, int] | None = None,
        keys: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """The band as booleans, True where a key is kept, for a rectangle of the score matrix.

        Args:
            seqlen_q: Number of queries of the whole call.
            seqlen_k: Number of keys of the whole call.
            rows: Half-open range of rows, all by default.
            keys: Half-open range of keys, all by default.
            device: Device of the result.

        Returns:
            ``(rows, keys)`` bool.
        """
        row_start, row_stop = rows or (0, seqlen_q)
        key_start, key_stop = keys or (0, seqlen_k)
        i = torch.arange(row_start, row_stop, device=device)[:, None] + (seqlen_k - seqlen_q)
        j = torch.arange(key_start, key_stop, device=device)[None, :]
        keep = torch.ones(row_stop - row_start, key_stop - key_start, dtype=torch.bool, device=device)
        if self.left is not None:
            keep = keep & (j >= i - self.left)
        if self.right is not None:
            keep = keep & (j <= i + self.right)
        if self.chunk is not None:
            keep = keep & (i.div(self.chunk, rounding_mode="floor") == j // self.chunk)
        return keep

    def __str__(self) -> str:
        if self.unbounded:
            return "full"
        if self.left is None and self.right == 0:
            return "causal"
        window = "window({}, {})".format(*("inf" if x is None else x for x in (self.left, self.right)))
        return window if self.chunk is None else f"{window} in chunks of {self.chunk}"


class Origin(NamedTuple):
    """The place of a packed sequence that is part of a longer one: a row of ``Tensors.origins``.

    Row t of the part is row ``row + row_step * t`` of the whole sequence, and its key u is key ``key + key_step * u``.
    Dropout and ALiBi's distances are computed as in the whole sequence. Band, mask and bias are given for the part.

    Attributes:
        head: ``b * num_heads_q + h`` for the part's first query head, where b is the whole sequence's place in the
            batch and h the first head's number.
        row: The position of the part's first row.
        row_step: Positions from one row to the next.
        key: The position of the part's first key.
        key_step: Positions from one key to the next.
        shift: ``seqlen_k - seqlen_q`` of the whole sequence.
    """

    head: int
    row: int
    row_step: int
    key: int
    key_step: int
    shift: int


def _sum_clipped(first: int, count: int, high: int) -> int:
    """Sum of clip(x, 0, high) over the ``count`` consecutive integers from ``first``."""
    ramp_start = min(max(first, 0), first + count)
    ramp_stop = max(ramp_start, min(first + count, high))
    total = (ramp_start + ramp_stop - 1) * (ramp_stop - ramp_start) // 2
    return total + high * (first + count - max(ramp_stop, first))
