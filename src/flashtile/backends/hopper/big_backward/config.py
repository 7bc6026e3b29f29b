"""Tiles of the backward with head dimensions past 256: by counting and from compiler reports (docs/tuning-notes.md)."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.backends.hopper.big_backward.records import GradientTiles
from flashtile.backends.hopper.forward.config import OTHER_BYTES, SHARED_BYTES
from flashtile.call.problem import Problem

# Rows of a tile and of a step.
BLOCK = 64
# Bytes of a chunk of 64 columns.
_CHUNK_BYTES = 2 * BLOCK * BLOCK


@dataclass(frozen=True, kw_only=True)
class BigBackwardTiles:
    """One configuration: a tile is 64 rows, whatever the head dimensions.

    Attributes:
        block_d: Columns of queries and keys, padded to a multiple of 64.
        block_dv: The same of values and dout.
        block_m: Queries of a step, or of a tile of dq.
        registers: What setmaxnreg gives the follower's threads; the compiler gives the scorer's the rest.
    """

    block_d: int
    block_dv: int
    block_m: int = BLOCK
    registers: int = 216

    def __post_init__(self) -> None:
        for of in ("q", "k", "v"):
            if (need := self.shared_bytes(of)) > SHARED_BYTES or self.tiles(of).CHUNKS < 2:
                raise ValueError(f"more shared memory than there is, {need} bytes for d{of}: {self}")

    @property
    def max_registers(self) -> int:
        """What the compiler gives every thread at the start: all of them together fill the register file."""
        return 168

    def tiles(self, of: str) -> GradientTiles:
        """The tiles of the kernel of one gradient."""
        if of == "v":
            chunk, own = _widest(self.block_d), _widest(self.block_dv)
            count = self.block_dv // own
            sizes = chunk, self.block_d // chunk, None, None, own, _even(count), count
            return GradientTiles(of, BLOCK, BLOCK, *sizes, self.registers)
        # Chunks of 64 columns that there is room for: two of the widest that gradients are made of, then of the others.
        own = _widest(self.block_d)
        held = self.block_d + self.block_dv + 2 * BLOCK
        room = (SHARED_BYTES - 2 * BLOCK * held - _row_bytes(of) - OTHER_BYTES) // _CHUNK_BYTES
        room -= 2 * own // BLOCK
        chunks_v = min(room // 2, self.block_dv // BLOCK)
        chunks = min(room - chunks_v, self.block_d // BLOCK)
        room -= chunks + chunks_v
        owns = min(2 + room * BLOCK // own // 2 * 2, _even(self.block_d // own))
        count = self.block_d // own
        return GradientTiles(of, BLOCK, BLOCK, BLOCK, chunks, BLOCK, chunks_v, own, owns, count, self.registers)

    def shared_bytes(self, of: str) -> int:
        """Shared memory of a kernel's tiles and of what else needs any."""
        tiles = self.tiles(of)
        held = self.block_d + (0 if of == "v" else self.block_dv)
        passing = tiles.CHUNK * tiles.CHUNKS + tiles.CHUNK_OWN * tiles.CHUNKS_OWN
        passing += 0 if of == "v" else tiles.CHUNK_V * tiles.CHUNKS_V
        return 2 * BLOCK * (held + 2 * BLOCK + passing) + _row_bytes(of) + OTHER_BYTES

    def __str__(self) -> str:
        dims = f"{self.block_d}" if self.block_d == self.block_dv else f"{self.block_d} and {self.block_dv}"
        return f"a kernel each for dq, dk and dv, tiles {BLOCK} x {BLOCK}, head_dim {dims} in two warpgroups"


def _row_bytes(of: str) -> int:
    """What belongs to the rows of queries: of a tile of dq, or of two steps."""
    return 2 * BLOCK * 4 * (1 if of == "q" else 2)


def _even(count: int) -> int:
    """The number, or the next one if it is odd: buffers of a parity are a warpgroup's."""
    return count + count % 2


def _widest(block_d: int) -> int:
    """Columns of a chunk that both warpgroups share: a product of 128 columns reads its operands faster."""
    return 128 if block_d % 128 == 0 and block_d > 128 else 64


def choose(problem: Problem) -> BigBackwardTiles:
    """The configuration of a problem, from its head_dims."""
    block_d, block_dv = (max(-(-dim // BLOCK) * BLOCK, 2 * BLOCK) for dim in (problem.head_dim, problem.head_dim_v))
    return BigBackwardTiles(block_d=block_d, block_dv=block_dv)
