"""The tiles of the kernel over latent rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashtile.backends.gpu.trial import tried
from flashtile.call.problem import Problem

ROWS = 64
# Rows of pages smaller than a block that TMA loads, a box each.
_BOX_ROWS = (8, 16, 32)
# Two are in the scheduler's warpgroup, so that the others have the registers that they have beside TMA.
_COPIERS = 2
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
        copiers: Warps that copy rows, 2 or 4; 0 where TMA loads them.
        copying: Registers of these warps' threads.
        most_lanes: Programs at most that have tiles of a sequence at the same time.
    """

    fixed_cost: int = 5
    fewest_blocks: int = 2
    stages: int = 2
    piece: int = 128
    registers: int = 168
    few: int = 40
    wide: int = 40
    copiers: int = 0
    copying: int = 56
    most_lanes: int = 8

    def __post_init__(self) -> None:
        if self.fewest_blocks < 2:
            raise ValueError(f"a share without a block is possible: {self}")
        if self.copiers not in (0, 2, 4):
            raise ValueError(f"copiers are {self.copiers} warps, they must be 0, 2 or 4")

    def registers_of_all(self, *, widens: bool) -> int:
        """What a multiprocessor has for each thread of all roles' warps, which come by fours.

        Args:
            widens: Whether four more warps make 16 bits of 8.
        """
        warps = 12 + 4 * widens + max(self.copiers, 1) + 1
        return 65536 // 32 // (-(-warps // 4) * 4) // 8 * 8

    def __str__(self) -> str:
        return f"tiles {ROWS} x 64, a scorer and two summers, {self.stages} blocks in flight" + (
            f", rows copied by {self.copiers} warps" * (self.copiers > 0)
        )


def copies(problem: Problem) -> bool:
    """Whether threads copy rows, from pages that TMA has no boxes for or too many of.

    One thread starts all boxes of a block, 9 for each page in it: 72 for pages of 8 rows, and twice as many for pages
    of 4, which is about as many cycles as the block's products take.
    """
    return problem.page_size % ROWS > 0 and problem.page_size not in _BOX_ROWS


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
    own = {"registers": 160, "few": 24, "copying": 40} if problem.row_scale else {}
    made = LatentTiles(fewest_blocks=fewest, **own) if held is None else held
    # TMA has no boxes for such pages, whatever tiles are on trial; and nothing copies a cache without pages.
    if problem.page_size == 0:
        return replace(made, copiers=0) if made.copiers else made
    return replace(made, copiers=_COPIERS) if copies(problem) and made.copiers == 0 else made
