"""Finds accesses to shared memory that nothing orders, whatever the order was in this run.

Every warp has a vector clock (as in FastTrack, Flanagan and Freund 2009): what it knows to have happened in each warp
and of each copy. Barriers hand that knowledge on. For every two bytes of shared memory it is kept who wrote them last
and who has read them since. A copy is an actor of its own: it knows what its issuer knew, and what it did is known to
who waits for it.

Besides, what ordinary stores wrote may be read by copies and products only if a ``fence.proxy.async`` stands between
(PTX ISA, "Causality Order": along the path): of the writer behind its write, or of the reader behind their barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptx.text import PtxError

Array = NDArray[Any]
_COPIES = 4096


class Watch:
    """What is known about the shared memory of one block."""

    def __init__(self, base: int, size: int, warps: int, where: Any) -> None:
        places = -(-size // 2)
        self._base, self._warps, self._where = base, warps, where
        self._writer = np.zeros(places, np.int32)
        self._written = np.zeros(places, np.int32)
        self._writer_pc = np.zeros(places, np.int32)
        self._reads = np.zeros((places, warps), np.int32)
        self._copier = np.zeros(places, np.int32)
        self._copied = np.zeros(places, np.int32)
        self._unfenced = np.zeros(places, bool)
        self._fenced_by = np.zeros(places, np.int32)
        self.seen = np.zeros((warps, warps + _COPIES), np.int32)
        self.seen[range(warps), range(warps)] = 1
        self._slots = np.zeros(warps + _COPIES, np.int32)
        self._next = 0

    def places(self, at: Array, size: int) -> Array:
        """Pairs of bytes from addresses on, in one row."""
        first = (at - self._base) >> 1
        if first.size and (first.min() < 0 or int(first.max()) * 2 + size > 2 * len(self._writer)):
            raise PtxError(f"access to shared memory outside it, {at.min() - self._base} .. {at.max() - self._base}")
        return (first[:, None] + np.arange(max(1, size >> 1))).ravel()

    def read(self, warp: Any, places: Array, through: str = "") -> None:
        """A warp reads; ``through`` names what reads for it behind the other proxy."""
        seen = self.seen[warp.index]
        known = seen[self._writer[places]] >= self._written[places]
        if not known.all():
            self._tell("reads", warp, places[~known])
        # A product may be issued on nothing and never looked at; its result is NaN.
        if through != "product" and (self._written[places] == 0).any():
            lost = places[self._written[places] == 0]
            raise PtxError(f"reads bytes of shared memory that nobody wrote, from {int(lost[0]) * 2} on")
        if through and (self._unfenced[places] & (self._fenced_by[places] >> warp.index & 1 == 0)).any():
            lost = places[self._unfenced[places] & (self._fenced_by[places] >> warp.index & 1 == 0)]
            raise PtxError(f"a {through} reads without a proxy fence what {self._writer_of(lost)}")
        self._reads[places, warp.index] = seen[warp.index]

    def write(self, warp: Any, places: Array, same: Callable[[], bool] | None = None, is_byte: bool = False) -> None:
        """A warp writes by ordinary stores; ``same`` says whether what it writes is there already.

        Several warps may write the same: whoever reads it behind one of them finds it. And each may write one byte of a
        pair, which are not told apart.
        """
        try:
            self._may_write(warp, places, is_byte)
        except PtxError:
            if same is None or not same():
                raise
        self._writer[places] = warp.index
        self._written[places] = self.seen[warp.index, warp.index]
        self._writer_pc[places] = warp.pc
        self._unfenced[places] = True
        self._fenced_by[places] = 0

    def fence(self, warp: Any) -> None:
        """What the warp wrote may be read by copies and products, what it knows to be written by its own."""
        places = np.flatnonzero(self._unfenced)
        writers = self._writer[places]
        known = self.seen[warp.index][writers] >= self._written[places]
        self._fenced_by[places[known]] |= 1 << warp.index
        self._unfenced[places[writers == warp.index]] = False

    def copy_in(self, warp: Any, places: Array) -> int:
        """A copy into shared memory starts; gives its number."""
        self._may_write(warp, places)
        number = self._new()
        self._writer[places] = number
        self._written[places] = self._slots[number]
        self._writer_pc[places] = warp.pc
        self._unfenced[places] = False
        return number

    def copy_out(self, warp: Any, places: Array) -> int:
        """A copy out of shared memory starts; gives its number."""
        self.read(warp, places, "copy")
        number = self._new()
        self._copier[places] = number
        self._copied[places] = self._slots[number]
        return number

    def learn_copy(self, warp: Any, number: int) -> None:
        """A warp knows that a copy is done."""
        self.seen[warp.index, number] = self._slots[number]

    def message(self, warp: Any) -> Array:
        """What others learn from an arrival of the warp; what it does from now on is new."""
        known = self.seen[warp.index].copy()
        self.seen[warp.index, warp.index] += 1
        return known

    def copy_message(self, known: Array, number: int) -> Array:
        """What others learn from the arrival of a copy, started by who knew ``known``."""
        known[number] = self._slots[number]
        return known

    def learn(self, warp: Any, message: Array | None) -> None:
        """A warp has passed a barrier."""
        if message is not None:
            mine = self.seen[warp.index]
            np.maximum(mine, message, out=mine)

    def _new(self) -> int:
        number = self._warps + self._next % _COPIES
        self._next += 1
        self._slots[number] += 1
        return number

    def _may_write(self, warp: Any, places: Array, is_byte: bool = False) -> None:
        seen = self.seen[warp.index]
        known = seen[self._writer[places]] >= self._written[places]
        if not is_byte and not known.all():
            self._tell("writes", warp, places[~known])
        reads = self._reads[places]
        if (reads > seen[None, : self._warps]).any():
            place, reader = np.argwhere(reads > seen[None, : self._warps])[0]
            byte = int(places[place]) * 2
            raise PtxError(f"race: writes byte {byte} of shared memory, which warp {reader} may still have to read")
        if (seen[self._copier[places]] < self._copied[places]).any():
            raise PtxError("race: writes shared memory that a copy may still have to read")

    def _tell(self, does: str, warp: Any, places: Array) -> None:
        raise PtxError(f"race: {does} byte {int(places[0]) * 2} of shared memory, which {self._writer_of(places)}")

    def _writer_of(self, places: Array) -> str:
        number = int(self._writer[places[0]])
        who = f"warp {number}" if number < self._warps else "a copy"
        return f"{who} wrote at {self._where(int(self._writer_pc[places[0]]))}"


def joined(old: Array | None, new: Array | None) -> Array | None:
    """Both messages in one."""
    if old is None or new is None:
        return new if old is None else old
    return np.maximum(old, new)
