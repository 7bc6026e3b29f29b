"""Memory that 32 lanes read and write at once, bounds and alignment checked."""

from __future__ import annotations

import bisect
import ctypes

import numpy as np
from numpy.typing import NDArray

from tests.ptx.text import PtxError

Lanes = NDArray[np.int64]
_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Region:
    """Bytes at consecutive addresses."""

    def __init__(self, name: str, base: int, data: NDArray[np.uint8]) -> None:
        self.name = name
        self.base = base
        self.data = data
        self.size = len(data)
        if base % 16:
            raise PtxError(f"{name} starts at {base:#x}, not on 16 bytes")
        self._views = {n: data[: len(data) // n * n].view(kind) for n, kind in _TYPES.items()}

    def load(self, at: Lanes, size: int, count: int) -> list[NDArray[np.generic]]:
        """``count`` values of ``size`` bytes a lane, from ``at`` on."""
        index = self._index(at, size, count)
        view = self._views[size]
        return [view[index + i] for i in range(count)]

    def store(self, at: Lanes, size: int, values: list[NDArray[np.generic]]) -> None:
        """One value after the other for each lane, from ``at`` on."""
        index = self._index(at, size, len(values))
        view = self._views[size]
        for i, value in enumerate(values):
            view[index + i] = value

    def view(self, size: int) -> NDArray[np.generic]:
        """All of it as unsigned integers of ``size`` bytes."""
        return self._views[size]

    def _index(self, at: Lanes, size: int, count: int) -> Lanes:
        total = size * count
        if at.size and (int(at.min()) < self.base or int(at.max()) + total > self.base + self.size):
            raise PtxError(f"access to {self.name} outside it: {at.min():#x} .. {at.max() + total:#x}, "
                           f"it has {self.base:#x} .. {self.base + self.size:#x}")  # fmt: skip
        if (at & (total - 1)).any():
            raise PtxError(f"misaligned access of {total} bytes to {self.name}: {at}")
        return (at - self.base) // size


class SharedMemory(Region):
    """A block's shared memory, which knows where mbarriers are."""

    def __init__(self, base: int, size: int) -> None:
        # All ones is NaN in every float type: memory that nobody wrote must not look like zeros.
        super().__init__("shared memory", base, np.full(size, 0xFF, np.uint8))
        self._is_barrier = np.zeros(size, np.bool_)

    def mark(self, address: int, is_barrier: bool) -> None:
        """From now on an mbarrier lies at an address, or none any more."""
        first = address - self.base
        self._is_barrier[first : first + 8] = is_barrier

    def touch(self, at: Lanes, size: int) -> None:
        """``size`` bytes from each address on, which lie inside, are used by what is no mbarrier operation.

        Raises:
            PtxError: One of them belongs to an mbarrier. What PTX calls undefined (PTX ISA, "mbarrier.inval": its
                memory may be repurposed only behind that) put NaN into a row of a tile on an H200.
        """
        if not at.size:
            return
        first = np.asarray(at, np.int64).ravel() - self.base
        low, high = int(first.min()), int(first.max()) + size
        if not self._is_barrier[low:high].any():
            return
        places = first[:, None] + np.arange(size)
        wrong = places[self._is_barrier[places]]
        if wrong.size:
            raise PtxError(f"byte {int(wrong[0])} of shared memory belongs to an mbarrier that was not invalidated")

    def _index(self, at: Lanes, size: int, count: int) -> Lanes:
        index = super()._index(at, size, count)
        self.touch(at, size * count)
        return index


class GlobalMemory:
    """The memory of the tensors of a launch, at the addresses that they have."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._regions: list[Region] = []

    def add(self, name: str, base: int, size: int) -> None:
        """Makes memory of this process known; known memory is left as it is."""
        if size == 0 or base in self._bases:
            return
        data = np.frombuffer((ctypes.c_ubyte * size).from_address(base), np.uint8)
        place = bisect.bisect(self._bases, base)
        self._bases.insert(place, base)
        self._regions.insert(place, Region(name, base, data))

    def find(self, address: int) -> Region:
        """What an address belongs to."""
        place = bisect.bisect(self._bases, address) - 1
        if place < 0 or address >= self._bases[place] + self._regions[place].size:
            raise PtxError(f"no tensor has memory at {address:#x}")
        return self._regions[place]

    def groups(self, at: Lanes) -> list[tuple[Region, NDArray[np.bool_] | None]]:
        """The regions that lanes' addresses fall into and which lanes do; None for all."""
        region = self.find(int(at[0]))
        inside = (at >= region.base) & (at < region.base + region.size)
        if inside.all():
            return [(region, None)]
        found: list[tuple[Region, NDArray[np.bool_] | None]] = [(region, inside)]
        left = ~inside
        while left.any():
            region = self.find(int(at[left][0]))
            inside = (at >= region.base) & (at < region.base + region.size)
            found.append((region, inside))
            left &= ~inside
        return found
