"""Tile sizes of the Hopper kernels: what they must fit into, which are chosen, and why."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.problem import Problem

SHARED_BYTES = 227 * 1024
REGISTERS_PER_LANE = 64 * 1024 // 128
PRODUCER_REGISTERS = 32


@dataclass(frozen=True, kw_only=True)
class Config:
    """One configuration of the forward.

    Attributes:
        block_d: Columns of a tile: head_dim, padded to 64, 128 or 256; TMA fills the difference with zeros.
        block_m: Rows a warpgroup.
        block_n: Keys a block.
        groups: Warpgroups that compute, so a tile has ``groups * block_m`` rows.
        stages: Buffers each for keys and values.
        q_stages: Buffers for queries.
        tile_stages: How many tiles a program finds ahead of working on them.
        dynamic: Whether programs take tiles from a shared counter, not from an order fixed beforehand.
        overlap: Whether the next tile's first scores are started before a tile's end; takes two buffers for queries.
        staged: Whether the output leaves in two halves through a buffer of half its size.
        registers: What setmaxnreg gives a computing warpgroup's threads.
        max_registers: What the compiler gives every thread at the start: all of them together fill the register file.
    """

    block_d: int
    block_m: int = 64
    block_n: int = 128
    groups: int = 2
    stages: int = 2
    q_stages: int = 2
    tile_stages: int = 4
    dynamic: bool = False
    overlap: bool = True
    staged: bool = False
    registers: int = 240
    max_registers: int = 168

    def __post_init__(self) -> None:
        if self.overlap and self.q_stages < 2:
            raise ValueError(f"overlap needs two buffers for queries: {self}")
        if (self.groups - 1) * self.block_m > self.block_n:
            raise ValueError(f"a warpgroup may leave out one key block of a tile, no more: {self}")
        if self.groups * self.registers + PRODUCER_REGISTERS > REGISTERS_PER_LANE:
            raise ValueError(f"more registers than there are: {self}")
        if self.shared_bytes > SHARED_BYTES:
            raise ValueError(f"more shared memory than there is, {self.shared_bytes} bytes: {self}")

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the tiles, and 1 KiB for barriers, tile records and what the compiler needs."""
        keys = 2 * self.stages * self.block_n * self.block_d
        rows = self.groups * self.block_m * self.block_d
        out = rows // 2 if self.staged else rows
        return 2 * (keys + self.q_stages * rows + out) + 1024

    def __str__(self) -> str:
        rows = f"{self.groups} x {self.block_m}"
        overlap = "" if self.overlap else ", one after the other"
        return f"tiles {rows} x {self.block_n}, head_dim {self.block_d}, {self.stages} stages{overlap}"


# Two warpgroups of 64 rows; registers allow three only where a row is short. All of a head_dim agree in block_m and
# block_n, see choose.
THREE_GROUPS_64 = Config(block_d=64, groups=3, stages=3, registers=160, max_registers=128)
TWO_GROUPS_64 = Config(block_d=64, stages=4)
TWO_GROUPS_128 = Config(block_d=128)
# 64 keys a block: 128 rows of queries, two stages of keys and of values and half an output fill the shared memory.
TWO_GROUPS_256 = Config(block_d=256, block_n=64, q_stages=1, overlap=False, staged=True)


def block_d(head_dim: int) -> int:
    """The narrowest tile that holds a row."""
    return next(width for width in (64, 128, 256) if head_dim <= width)


def choose(problem: Problem) -> Config:
    """The configuration of a problem, from head_dim, the kind of mask and the length: never from the batch.

    A row's result depends on ``block_d``, ``block_m`` and ``block_n`` alone, which are the same for all configurations
    of a head_dim: each row meets the same blocks of keys in the same order and does the same arithmetic with them, and
    a block that is masked for all of a row adds exact zeros. So the choice may differ between a sequence alone and in
    a batch, packed or dense, and the bits do not.

    Lengths at which the choice changes: H200, bf16, 2026-11-20, of a kernel whose loading warp found the tiles too. It
    was faster without ``overlap`` up to 2048 keys at head_dim 128 and with two warpgroups at 2048 causal at 64; since
    then loads come in the order in which they are needed, and by the emulator's clock both have turned round.
    """
    width = block_d(problem.head_dim)
    is_causal = problem.band.right is not None
    if width == 64:
        # The third warpgroup leaves 160 registers a thread, too few for the wider loop bodies: they would spill.
        wide = problem.varlen or problem.softcap > 0 or problem.band.left is not None
        # Tiles of 192 rows do not fit blocks of 128 keys: under a causal mask that costs short sequences most.
        short = problem.seqlen_q <= (1024 if is_causal else 512)
        return TWO_GROUPS_64 if wide or short else THREE_GROUPS_64
    return TWO_GROUPS_128 if width == 128 else TWO_GROUPS_256
