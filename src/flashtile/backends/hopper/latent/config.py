"""The tiles of the kernel over latent rows."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.backends.gpu.trial import tried
from flashtile.call.problem import Problem

ROWS = 64
# How often a program looks whether the others of its tile have stored their states; once they run one after another.
PATIENCE = 256


@dataclass(frozen=True)
class LatentTiles:
    """Tiles: 64 rows, blocks of 64 keys; their buffers and the queries' fill shared memory.

    Attributes:
        fixed_cost: See ``records.Latent``, like all of them.
        fewest_blocks: 2 at least, so that no share is without a block.
        stages: Blocks of keys in flight.
        piece: Columns of values that are loaded and released at once.
        registers: Registers of a summer's threads; a scorer's get what is left.
        few: Registers of the other warps' threads.
        wide: Registers of the threads that make 16 bits of 8, if values are of 8.
        most_lanes: Programs at most that have tiles of a sequence at the same time.
    """

    fixed_cost: int = 5
    fewest_blocks: int = 2
    stages: int = 2
    piece: int = 128
    registers: int = 168
    few: int = 40
    wide: int = 40
    most_lanes: int = 8

    def __post_init__(self) -> None:
        if self.fewest_blocks < 2:
            raise ValueError(f"a share without a block is possible: {self}")

    def __str__(self) -> str:
        return f"tiles {ROWS} x 64, a scorer and two summers, {self.stages} blocks in flight"


def lanes_of(problem: Problem, most: int) -> int:
    """As many programs as a sequence has tiles, or a divisor of that; of packed queries as many as one row has."""
    p = problem
    tiles = p.num_heads_kv * -(-(1 if p.varlen else p.seqlen_q) * p.group_size // ROWS)
    return max(n for n in range(1, max(most, 1) + 1) if tiles % n == 0)


def choose(problem: Problem) -> LatentTiles:
    """The tiles of a call: states of two blocks if there are few rows to fold, or many programs that fold them."""
    held = tried("hopper_latent")
    rows = (1 if problem.varlen else problem.seqlen_q) * problem.group_size
    fewest = 2 if rows <= 16 or problem.batch == 1 else 4
    of_8_bits = {"registers": 160, "few": 24} if problem.row_scale else {}
    return LatentTiles(fewest_blocks=fewest, **of_8_bits) if held is None else held
