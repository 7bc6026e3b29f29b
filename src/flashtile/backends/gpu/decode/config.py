"""Tiles of attention over a cache, and the rule that cuts a sequence's keys into splits.

Both look at the layer and at a sequence's own lengths, never at the batch, so that a sequence's result is bitwise the
same whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flashtile.backends.gpu.trial import tried
from flashtile.call.arguments import STRICT
from flashtile.call.problem import Problem


@dataclass(frozen=True)
class SplitRule:
    """The rule that cuts keys into splits.

    A split's state goes through memory, head_dim_v + 2 floats for each row; so splits are as many as fill a device with
    this one sequence, and long enough for that traffic to be small beside their keys. Measured: docs/tuning-notes.md.

    Attributes:
        programs: Work items that fill a device.
        fewest_keys: Keys of a split, unless the sequence has fewer.
        most_keys: Keys of a split, unless most_splits forbids it: many sequences of different lengths balance better.
        most_splits: Splits of a tile; twice as many where key heads are so few that a device is not full otherwise.
        most_slots: Packed rows times splits that a sequence may have, over all key heads. It bounds the workspace.
        run: Splits of a run; their states are folded before the states of runs are.
        long_keys: Keys of a sequence that may have twice as many splits anyway.
        fewest_of_long: Keys of a split of a sequence of more than 16 * fewest_keys: so many, or an eighth of the
            sequence if that is less. Among many such sequences, shorter splits take more time than programs without
            work.
        fixed: Keys of every split, counted from key 0 on, in place of all of this but ``run``; 0 for the rule.
        most_states: Tiles of more fixed splits store the states of runs alone: ``launch.WorkLimits`` says how many.
    """

    programs: int = 132
    fewest_keys: int = 64
    most_keys: int = 1024
    most_splits: int = 32
    most_slots: int = 4096
    run: int = 4
    long_keys: int = 2**30
    fewest_of_long: int = 0
    fixed: int = 0
    most_states: int | None = None

    def most(self, keys: int, rows: int, num_heads_kv: int, wanted: int) -> int:
        """The most splits of a sequence with so many packed rows a key head; ``wanted`` of them fill a device."""
        wanted = wanted if keys < self.long_keys else 2 * self.most_splits
        most = min(max(self.most_splits, wanted), 2 * self.most_splits)
        return min(max(self.most_slots // max(rows * num_heads_kv, 1), 1), most)

    def bound(self, capacity: int, rows: int, num_tiles: int, num_heads_kv: int) -> int:
        """The most splits that a tile may have with at most ``capacity`` keys."""
        if self.fixed:
            return max(1, -(-capacity // self.fixed))
        wanted = max(self.programs // max(num_tiles * num_heads_kv, 1), 1)
        by_keys = max(wanted, -(-capacity // self.most_keys))
        return max(1, min(self.most(capacity, rows, num_heads_kv, wanted), by_keys, -(-capacity // self.fewest_keys)))


@dataclass(frozen=True)
class DecodeTiles:
    """Tiles of one kernel.

    Attributes:
        block_m: Packed rows of a tile: queries times group size.
        block_n: Keys of a block.
        num_warps: Warps per program.
        num_stages: Blocks in flight of the pipelined loads.
        programs_per_sm: Programs for each multiprocessor, where there is work for so many.
        splitting: The rule that cuts keys into splits.
        specialised: Whether warps have roles: ``backends/hopper/decode``.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 2
    splitting: SplitRule = SplitRule()
    specialised: bool = False

    def bound_of_fixed(self, problem: Problem) -> int:
        """The most fixed splits of a tile: a window's rows see but so many keys."""
        band, keys, unit = problem.band, problem.seqlen_k, self.splitting.run * self.splitting.fixed
        if band.left is not None:
            rows = min(problem.seqlen_q, max(most_few(problem) // problem.group_size, 1))
            seen = rows + max(band.left, band.chunk or 0) + unit
            keys = min(keys, seen)
        return self.splitting.bound(keys, 1, 1, 1)

    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}, {self.num_warps} warps, {self.num_stages} stages"


# Past all keys.
_FAR = 2**30


def bounded(problem: Problem) -> Problem:
    """The problem, with a bound to the right, past all keys, if it has none and sequences may be causal."""
    has_right = not problem.causal_each or problem.band.right is not None
    return problem if has_right else problem.but(band=replace(problem.band, right=_FAR))


# Where packed queries run on another kernel, sequences of so few packed rows and of more keys are left to one that
# splits keys: a program that took all of a sequence's keys would still be at work when all others have ended.
FEW_ROWS, LONG_KEYS = 16, 8192


# Keys of a split in batch-invariant calls, and in the interpreter. A key's split, and the run of that, follow from its
# number. With four splits a run they are what the rule has for sequences of 2 to 4 thousand keys.
FIXED_KEYS, FIXED_KEYS_INTERPRETED = 256, 64
# Packed rows of the longest sequences in such calls: what more rows would change is not to be chosen.
_MANY_ROWS = 2**16


def most_few(problem: Problem) -> int:
    """Packed rows a key head of the sequences that a batch-invariant call leaves to short tiles, which split keys.

    They are ``FEW_ROWS``, or one query; none in a strict call, as other tiles may round otherwise.
    """
    return 0 if problem.batch_invariant == STRICT else max(FEW_ROWS, problem.group_size)


def has_many(problem: Problem) -> bool:
    """Whether sequences may have more rows than ``most_few``."""
    return problem.seqlen_q * problem.group_size > most_few(problem)


def choose_for_kind(problem: Problem, *, few: bool) -> DecodeTiles:
    """The tiles of a batch-invariant call's sequences of few rows, or of more: the layer alone decides.

    The states of more rows would take too much memory, so their keys are not split.
    """
    rows = most_few(problem) if few else _MANY_ROWS
    tiles = choose(problem.but(seqlen_q=max(rows // problem.group_size, 1), varlen=True, batch_invariant=""))
    if not few:
        return replace(tiles, splitting=SplitRule(most_splits=1, most_slots=1, run=1))
    fixed = FIXED_KEYS_INTERPRETED if problem.device_type == "cpu" else FIXED_KEYS
    # A window's first key is anywhere in its run, the splits before it are computed in vain.
    run = tiles.splitting.run if problem.band.left is None else 1
    return replace(tiles, splitting=replace(tiles.splitting, fixed=fixed, run=run))


def choose(problem: Problem, *, few: bool = False) -> DecodeTiles:
    """The tiles of a call, or of its sequences with ``FEW_ROWS`` alone."""
    if (held := tried("decode")) is not None:
        return held
    if problem.batch_invariant:
        return choose_for_kind(problem, few=few or not has_many(problem))
    if problem.device_type == "cpu":
        return DecodeTiles(16, 16, 4, 1, 1, SplitRule(programs=8, fewest_keys=16, most_keys=64, most_splits=8))
    dim, block_m = max(problem.head_dim, problem.head_dim_v), FEW_ROWS if few else rows_of_tile(problem)
    if dim > 256:
        return _big(problem, few=few)
    if problem.dtype == torch.float32:
        return DecodeTiles(min(block_m, 32), 32 if dim <= 128 else 16, 4, 2)
    # As many bytes in flight whatever the width. Page ids are loaded ahead of keys, which takes two more stages.
    block_n = 128 if dim <= 64 else 64 if dim <= 128 else 32
    if block_m > 32:
        block_n = 64
    elif problem.kv_dtype.itemsize == 1:
        block_n *= 2
    is_gathered = problem.page_size > 0
    stages = 2 if dim > 128 and block_m > 16 else 3
    if _has_little_shared_memory(problem):
        # 128 rows of an 8-bit cache at head_dim 128 take 104 KB (Triton 3.7.1), and of any spill 500 bytes.
        return DecodeTiles(min(block_m, 64), block_n // 2, 4 if block_m <= 16 else 8, 2)
    if block_m <= 16:
        return DecodeTiles(block_m, block_n, 4, stages + 2 * is_gathered, 2, SplitRule(fewest_of_long=256))
    if block_m == 32 and dim <= 128:
        return DecodeTiles(block_m, block_n, 4, stages + 2 * is_gathered, 2, SplitRule(fewest_keys=128))
    if 32 < hopper_rows(problem) <= 64 < dim <= 128:
        # Two programs that spill 250 bytes take a third less time than one that does not: docs/tuning-notes.md.
        rule = SplitRule(fewest_keys=128, most_splits=16)
        return DecodeTiles(block_m, 32, 4, 4 + 2 * is_gathered, 2, rule)
    # Registers and shared memory hold one program, or two of 64 rows at head_dim 64, and runs of 2 splits.
    wide = dim <= 128 and 64 < hopper_rows(problem) <= 128
    rule = SplitRule(fewest_keys=256 if wide or block_m == 128 else 128, most_splits=16, run=2 if wide else 4)
    per_sm = 2 if wide and block_m == 64 else 1
    return DecodeTiles(block_m, block_n, 8 // per_sm, stages + 2 * is_gathered, per_sm, rule)


def _big(problem: Problem, *, few: bool) -> DecodeTiles:
    """The tiles of heads past 256: 32 rows of 512 columns, each run beside its split, take all registers of 8 warps."""
    # Values that are multiplied by scales of their rows take registers too.
    rows = FEW_ROWS if few or problem.row_scale or problem.seqlen_q * problem.group_size <= 16 else 32
    if problem.dtype == torch.float32 or _has_little_shared_memory(problem):
        return DecodeTiles(16, 16, 8, 1 if problem.dtype == torch.float32 else 2, 1)
    return DecodeTiles(rows, 32 * (2 if problem.kv_dtype.itemsize == 1 else 1), 8, 2, 1)


def _has_little_shared_memory(problem: Problem) -> bool:
    """AMD, with 64 KB, and NVIDIA's GPUs other than those for data centres, with 99 KB."""
    have = problem.compute_capability
    return have is None or have[0] >= 12 or (have[0] == 8 and have[1] > 0)


def rows_of_tile(problem: Problem) -> int:
    """Packed rows of a tile, by a sequence's rows; for packed queries by the rows of the longest there may be.

    A packed call may have sequences of one row beside long ones, for which tiles of 64 lose less than tiles of 128. At
    head_dim 256 the registers hold 32 rows; on Hopper, where products take 64 rows, that many.
    """
    dim, rows = max(problem.head_dim, problem.head_dim_v), problem.seqlen_q * problem.group_size
    if dim > 128:
        return 16 if rows <= 16 else 64 if hopper_rows(problem) > 32 else 32
    if dim <= 64 < hopper_rows(problem) <= 128:
        return 64
    return 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 or problem.varlen else 128


def hopper_rows(p: Problem) -> int:
    """Packed rows a key head of a call in 16 bits on Hopper; 0 for other calls."""
    is_16_bit, have = p.dtype.itemsize == p.kv_dtype.itemsize == 2, p.compute_capability
    return p.seqlen_q * p.group_size if is_16_bit and have is not None and have[0] == 9 else 0
