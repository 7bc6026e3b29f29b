"""The exchange of heads for rows. Before it a rank holds some rows of all heads, after it all rows of some heads.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashtile.distributed.exchange import RankLine, all_to_all

_WHAT = "the exchange of heads"


class HeadExchange:
    """The exchange among the ranks of a line, in both directions, for tensors with the same rows.

    Args:
        line: The ranks. The i-th rank receives the i-th part of the heads.
        shards: For each rank the rows that it holds, in order, among the rows that all of them hold together.
        batch: Entries of the batch; each has these rows.
        device: The device of the tensors.
    """

    def __init__(self, line: RankLine, shards: Sequence[Sequence[range]], batch: int, device: torch.device) -> None:
        self._line = line
        self._rows = [batch * sum(map(len, ranges)) for ranges in shards]
        total = sum(self._rows) // max(batch, 1)
        parts = [
            torch.arange(each.start + entry * total, each.stop + entry * total, each.step)
            for ranges in shards
            for entry in range(batch)
            for each in ranges
        ]
        places = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        self._places: Tensor | None = None
        if not torch.equal(places, torch.arange(len(places))):
            with torch.inference_mode(False):
                self._places, self._order = places.to(device), places.argsort().to(device)

    def split(self, *given: Tensor) -> list[Tensor]:
        """All rows of this rank's heads, ``(total, heads / ranks, width)`` each, from ``(rows, heads, width)``.

        All tensors are sent in one exchange and received as one tensor, in which each has some columns.
        """
        n, rows = self._line.size, given[0].shape[0]
        parts = [x.unflatten(1, (n, x.shape[1] // n)).flatten(2).transpose(0, 1) for x in given]
        widths = [part.shape[2] for part in parts]
        sent = given[0].new_empty((n, rows, sum(widths)))
        for place, part in zip(sent.split(widths, 2), parts, strict=True):
            place.copy_(part)
        received = all_to_all(self._line, _WHAT, sent.flatten(0, 1), [rows] * n, self._rows)
        if self._places is not None:
            received = received.index_select(0, self._order)
        columns = received.split(widths, 1)
        return [x.unflatten(1, (like.shape[1] // n, like.shape[2])) for x, like in zip(columns, given, strict=True)]

    def join(self, x: Tensor) -> Tensor:
        """This rank's rows of all heads, ``(rows, heads, width)``, from ``(total, heads / ranks, width)``."""
        n, rows = self._line.size, self._rows[self._line.rank]
        x = x.contiguous() if self._places is None else x.index_select(0, self._places)
        received = all_to_all(self._line, _WHAT, x, self._rows, [rows] * n)
        return received.unflatten(0, (n, rows)).transpose(0, 1).flatten(1, 2)
