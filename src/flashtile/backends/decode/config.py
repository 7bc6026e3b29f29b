"""Tiles of attention over a cache, and the rule that cuts a sequence's keys into splits.

Both look at the layer and at a sequence's own lengths, never at the batch, so that a sequence's result is bitwise the
same whatever else is in the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashtile.problem import Problem


@dataclass(frozen=True)
class Splitting:
    """The rule that cuts keys into splits.

    A split's state travels through memory, head_dim_v + 2 floats for each row; so splits are as many as fill a device
    with this one sequence, and long enough for that traffic to be small beside their keys.

    Attributes:
        programs: Work items that fill a device.
        fewest_keys: Of a split, unless the sequence has fewer.
        most_keys: Of a split, unless most_splits forbids it: many sequences of different lengths balance better.
        most_splits: Of a tile.
        most_rows: Packed rows times splits that a key head of a sequence may have. It bounds the workspace.
    """

    programs: int = 132
    fewest_keys: int = 64
    most_keys: int = 2048
    most_splits: int = 64
    most_rows: int = 512

    def most(self, rows: int) -> int:
        """The most splits of a sequence with so many packed rows."""
        return min(max(self.most_rows // max(rows, 1), 1), self.most_splits)

    def cut(self, keys: int, rows: int, num_tiles: int, num_heads_kv: int, block_n: int) -> tuple[int, int]:
        """Splits of a tile and keys of each, as ``kernel.cut``."""
        most, wanted = self.most(rows), max(self.programs // max(num_tiles * num_heads_kv, 1), 1)
        chunk = min(max(-(-keys // wanted), self.fewest_keys), self.most_keys)
        chunk = -(-max(chunk, -(-keys // most)) // block_n) * block_n
        return max(-(-keys // chunk), 1), chunk

    def bound(self, capacity: int, rows: int, num_tiles: int, num_heads_kv: int) -> int:
        """The most splits that a tile may have with at most ``capacity`` keys."""
        wanted = max(self.programs // max(num_tiles * num_heads_kv, 1), 1)
        by_keys = max(wanted, -(-capacity // self.most_keys))
        return max(1, min(self.most(rows), by_keys, -(-capacity // self.fewest_keys)))


@dataclass(frozen=True)
class Config:
    """Tiles of one kernel.

    Attributes:
        block_m: Packed rows of a tile: queries times group size.
        block_n: Keys of a block.
        num_warps: Warps per program.
        num_stages: Blocks in flight of the pipelined loads.
        programs_per_sm: Programs for each multiprocessor, where there is work for so many.
        splitting: The rule that cuts keys into splits.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 2
    splitting: Splitting = Splitting()

    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}, {self.num_warps} warps, {self.num_stages} stages"


_override: list[Config] = []


@contextlib.contextmanager
def override(config: Config) -> Iterator[None]:
    """Runs every call with these tiles, for tests and tuning."""
    _override.append(config)
    try:
        yield
    finally:
        _override.pop()


def overridden() -> Config | None:
    """The tiles in force instead of the chosen ones."""
    return _override[-1] if _override else None


def choose(problem: Problem) -> Config:
    """The tiles of a call."""
    if _override:
        return _override[-1]
    if problem.device_type == "cpu":
        return Config(16, 16, 4, 1, 1, Splitting(programs=8, fewest_keys=16, most_keys=64, most_splits=8))
    dim = max(problem.head_dim, problem.head_dim_v)
    block_m = rows_of_tile(problem)
    if problem.dtype == torch.float32:
        return Config(min(block_m, 32), 32 if dim <= 128 else 16, 4, 2)
    eight_bit = problem.precision.kv.itemsize == 1
    # As many bytes in flight whatever the width.
    block_n = 128 if dim <= 64 else 64 if dim <= 128 else 32
    if block_m <= 16 and eight_bit:
        block_n *= 2
    return Config(block_m, block_n, 4, 3)


def rows_of_tile(problem: Problem) -> int:
    """Packed rows of a tile: 16, 32 or 64, by a dense sequence's own rows; 64 for packed ones.

    A packed sequence's tile must not depend on the longest of the batch.
    """
    if problem.varlen:
        return 64
    rows = problem.seqlen_q * problem.group_size
    return 16 if rows <= 16 else 32 if rows <= 32 else 64
