"""Tiles of the forward with head dimensions past 256: by counting and from compiler reports, none of it timed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashtile.backends.hopper.forward import config as forward
from flashtile.backends.hopper.forward.config import OTHER_BYTES, SHARED_BYTES, strip_and_cost
from flashtile.call.problem import Problem


@dataclass(frozen=True, kw_only=True)
class BigHeadsTiles(forward.ForwardTiles):
    """One configuration: a tile is 64 rows, whatever the head dimensions.

    Attributes:
        block_d: Columns of queries and keys, padded to a multiple of 64.
        block_dv: The same of values and the output.
        chunk: Columns of keys that are loaded and released at once.
        key_chunks: Buffers for such chunks.
        prob_stages: Buffers in which the scorer leaves probabilities for the follower.
        stages: Buffers for values.
        registers: What setmaxnreg gives the follower's threads; the compiler gives the scorer's the rest.
    """

    chunk: int
    key_chunks: int
    prob_stages: int = 2
    out_cols: int = 64
    block_n: int = 64
    num_warpgroups: int = 1
    stages: int = 1
    q_stages: int = 1
    tile_stages: int = 2
    dynamic: bool = True
    overlap: bool = False
    registers: int = 216

    def __post_init__(self) -> None:
        if self.block_d % self.chunk or self.key_chunks < 2:
            raise ValueError(f"keys come in whole chunks, two at least: {self}")
        if self.shared_bytes > SHARED_BYTES:
            raise ValueError(f"more shared memory than there is, {self.shared_bytes} bytes: {self}")

    @property
    def left(self) -> int:
        """Columns of the output that the scorer computes; the follower has the others, as many or 64 more."""
        return self.block_dv // 128 * 64

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the tiles and of what else needs any."""
        keys = self.block_n * (self.key_chunks * self.chunk + self.stages * self.block_dv)
        return 2 * (keys + self.block_m * (self.block_d + self.prob_stages * self.block_n)) + OTHER_BYTES

    def __str__(self) -> str:
        columns = f"columns {self.left} and {self.block_dv - self.left}"
        return f"tiles {self.block_m} x {self.block_n}, head_dim {self.block_d}, {columns} in two warpgroups"


def choose(problem: Problem, score_bytes: tuple[int, int] | None = None, rows: int | None = None) -> BigHeadsTiles:
    """The configuration of a problem, from its head_dims; ``rows`` as in ``forward.config.choose``.

    score_bytes makes no difference: threads load biases and masks themselves.
    """
    block_d, block_dv = (max(-(-dim // 64) * 64, 128) for dim in (problem.head_dim, problem.head_dim_v))
    chunk = 128 if block_d % 128 == 0 and block_d > 128 else 64
    config = BigHeadsTiles(block_d=block_d, block_dv=block_dv, chunk=chunk, key_chunks=block_d // chunk)
    rows = problem.seqlen_q * (problem.batch if problem.varlen else 1) if rows is None else rows
    return replace(config, strip=strip_and_cost(problem, config, rows)[0])
