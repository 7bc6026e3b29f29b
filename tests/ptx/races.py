"""The shared memory of one block as ``tests.machine`` watches it: two bytes a place, a warp an actor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.machine import Names, Watch
from tests.machine.clocks import Array
from tests.ptx.text import PtxError


class _Names(Names):
    def __init__(self, where: Callable[[int], str], who: Callable[[int], str], whose: str) -> None:
        self.line, self.actor = where, who  # type: ignore[method-assign]
        self._whose = whose

    def place(self, place: int) -> str:
        return f"byte {2 * place} of shared memory{self._whose}"


class BlockWatch(Watch):
    """A ``Watch`` that takes addresses.

    Args:
        base: Where shared memory starts.
        size: Its bytes.
        warps: Warps of the block, or of its cluster.
        where: What stands at a place in the program.
        who: What to call a warp.
        whose: What to say of the memory, behind its name.
        first: Warps of the blocks or clusters before it.
        total: Those of all blocks.
        mate: The watch of another block of its cluster.
    """

    def __init__(
        self, base: int, size: int, warps: int, where: Callable[[int], str], who: Callable[[int], str], whose: str,
        first: int, total: int, mate: BlockWatch | None,
    ) -> None:  # fmt: skip
        self._base, self._size = base, -(-size // 2) * 2
        super().__init__(self._size // 2, warps, _Names(where, who, whose), first, total, mate)

    def places(self, at: Array, size: int) -> Array:
        """Pairs of bytes from addresses on, in one row."""
        first = (at - self._base) >> 1
        if first.size and (first.min() < 0 or int(first.max()) * 2 + size > self._size):
            raise PtxError(f"access to shared memory outside it, {at.min() - self._base} .. {at.max() - self._base}")
        return (first[:, None] + np.arange(max(1, size >> 1))).ravel()
