"""Tiles of the forward over a cache: the plain forward's, with helpers that copy or widen keys and values."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any

from flashtile.backends.hopper.forward import config as plain
from flashtile.backends.hopper.forward.config import PRODUCER_REGISTERS, ForwardTiles
from flashtile.call.problem import Problem


@dataclass(frozen=True, kw_only=True)
class PagedTiles(ForwardTiles):
    """``ForwardTiles``, and what helpers do.

    Attributes:
        widens: Whether helpers widen the keys and values of an 8-bit cache: in place with two warpgroups; with three
            a block of 8 bits lands in a buffer of its own.
        gathers: Whether helpers are the producer, and copy keys and values row by row, which TMA loads otherwise.
        helper_warps: Warps of the helpers, 2 or 4; 0 without.
        helper_registers: What setmaxnreg gives the helpers' threads.
    """

    widens: bool = False
    gathers: bool = False
    helper_warps: int = 0
    helper_registers: int = 0

    @property
    def other_registers(self) -> int:
        """As there. Four helpers are a warpgroup of their own; two are in the producer's."""
        if self.helper_warps == 4:
            return PRODUCER_REGISTERS + self.helper_registers
        return max(PRODUCER_REGISTERS, self.helper_registers)

    @property
    def shared_bytes(self) -> int:
        """As there, and the buffer where a block of 8 bits lands."""
        landing = self.block_n * (self.block_d + self.block_dv) * (self.widens and self.num_warpgroups == 3)
        return super().shared_bytes + landing

    def __str__(self) -> str:
        widens = f", 8 bits widened by {self.helper_warps} warps" * self.widens
        copied = f", keys copied by {self.helper_warps} warps" * self.gathers
        return f"{super().__str__()}{widens}{copied}"


# What helpers that widen change, by warpgroups. Beside two, four more warps leave consumers 216 registers a thread.
# Beside three, two share the producer's warpgroup, with so few registers that a pass in place would not fit.
_WIDENING: dict[int, dict[str, int]] = {
    2: {"helper_warps": 4, "helper_registers": 48, "registers": 216, "max_registers": 128},
    3: {"helper_warps": 2, "helper_registers": 32},
}
# What helpers that gather change, by their warps. Beside four, the compiler may give a thread 128 registers: fewer than
# a product of 256 columns takes, and more parts would spill. Measured: docs/tuning-notes.md.
_GATHERING: dict[int, dict[str, int]] = {
    2: {"helper_warps": 2, "helper_registers": 40, "registers": 232},
    4: {"helper_warps": 4, "helper_registers": 32, "registers": 224, "max_registers": 128},
}
# TMA has a box for a page of so many rows or more, if they are a power of two.
_FEWEST_BOX_ROWS = 16


def widens(problem: Problem) -> bool:
    """Whether a call's keys and values are in a cache of 8 bits."""
    return problem.cached and problem.kv_dtype.itemsize == 1


def gathers(problem: Problem) -> bool:
    """Whether keys and values are in pages that TMA has no boxes for."""
    size = problem.page_size
    return 0 < size < _FEWEST_BOX_ROWS or size & (size - 1) != 0


def choose(problem: Problem, rows: int | None = None) -> PagedTiles:
    """The tiles of a call over a cache; rows: as for the plain forward."""
    # Four warps that gather leave too few registers for three warpgroups.
    most = 2 if gathers(problem) else 3
    return with_helpers(problem, plain.choose(problem, rows=rows, most_warpgroups=most))


def with_helpers(problem: Problem, config: ForwardTiles) -> PagedTiles:
    """The configuration with the helpers that a problem needs."""
    if widens(problem):
        return _paged(config, widens=True, **_WIDENING[config.num_warpgroups])
    if gathers(problem):
        warps = 4 if (config.block_d, config.block_dv) in ((64, 64), (128, 128)) else 2
        return _paged(config, gathers=True, **_GATHERING[warps])
    return _paged(config)


@functools.cache
def _paged(config: ForwardTiles, **changes: Any) -> PagedTiles:
    """Cached, since its checks take longer than all else that a new length costs here."""
    return PagedTiles(**(asdict(config) | changes))
