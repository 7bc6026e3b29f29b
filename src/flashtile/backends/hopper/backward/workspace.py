"""The size of the Hopper backward's workspace, see ``rows``; how many tiles share the query heads of a key head."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from flashtile.backends.gpu.launch import Pointer
from flashtile.backends.gpu.records import num_packed_tiles
from flashtile.backends.hopper.backward.config import BackwardTiles
from flashtile.backends.hopper.backward.records import Work
from flashtile.call.problem import Problem, Tensors
from flashtile.core.masks import Band


class Workspace(NamedTuple):
    """What the kernels hand on to one another: one piece of memory, which takes the host one allocation.

    First come dq's sums in float32, padded to whole row blocks, if dq is wanted; then two float32 a row, then int32:
    the counter of tiles and, where those sums are ordered, dq_order, a semaphore for each row block; then the sums of
    dk and of dv in float32, with gqa_splits.

    Attributes:
        blocks: Row blocks.
        gqa_splits: Tiles that share the query heads of one key head.
        rows_at: Where the rows begin, in bytes; 0 without dq.
        counter_at: Where the counter is.
        dq_order_at: Where the semaphores begin, None where sums may be added in any order.
        sum_heads: Heads of the sums of dk and dv for each key head: one for each split where their order is fixed,
            else one to which all add.
        dk_at: Where the sums of dk begin, None without splits or if dk is not wanted.
        dv_at: The same for dv.
        floats: Its size, in float32.
    """

    blocks: int
    gqa_splits: int
    rows_at: int
    counter_at: int
    dq_order_at: int | None
    sum_heads: int
    dk_at: int | None
    dv_at: int | None
    floats: int

    @classmethod
    def of(cls, problem: Problem, config: BackwardTiles, tensors: Tensors) -> Workspace:
        """The workspace of a call with these queries, keys and values."""
        rows = tensors.q.shape[-3]
        if problem.varlen:
            blocks = num_packed_tiles(rows, problem.batch, config.block_m) * problem.num_heads_q
        else:
            blocks = -(-rows // config.block_m) * problem.batch * problem.num_heads_q
        has_sums = problem.grads.q and not config.alone
        rows_at = 4 * blocks * config.block_m * config.block_d if has_sums else 0
        counter_at = rows_at + 4 * blocks * 2 * config.block_m
        dq_order_at = counter_at + 16 if has_sums and problem.deterministic else None
        end = counter_at + 16 if dq_order_at is None else dq_order_at + 16 * -(-blocks // 4)
        count = gqa_splits(problem, config, tensors.k.shape[-3])
        sum_heads = count if problem.deterministic else 1
        keys = key_blocks(problem, config, tensors) * config.block_n * sum_heads
        dk_at = end if count > 1 and problem.grads.k else None
        end += 0 if dk_at is None else 4 * keys * config.block_d
        dv_at = end if count > 1 and problem.grads.v else None
        end += 0 if dv_at is None else 4 * keys * config.block_dv
        return cls(blocks, count, rows_at, counter_at, dq_order_at, sum_heads, dk_at, dv_at, end // 4)

    def record(self) -> Work:
        """The kernels' argument, as ``prepare_rows`` takes it."""
        sums_at = self.dv_at if self.dk_at is None else self.dk_at
        return Work(
            Pointer(torch.float32, "work", self.rows_at),
            Pointer(torch.float32, "work") if self.rows_at else None,
            None,
            None if self.dq_order_at is None else Pointer(torch.int32, "work", self.dq_order_at),
            Pointer(torch.int32, "work", self.counter_at),
            None if sums_at is None else Pointer(torch.float32, "work", sums_at),
            None if sums_at is None else self.floats - sums_at // 4,
        )


def key_blocks(problem: Problem, config: BackwardTiles, tensors: Tensors) -> int:
    """Tiles' blocks of keys of all key heads and sequences."""
    rows = tensors.k.shape[-3]
    if problem.varlen:
        return num_packed_tiles(rows, problem.batch, config.block_n) * problem.num_heads_kv
    return -(-rows // config.block_n) * problem.batch * problem.num_heads_kv


# Hopper's multiprocessors, not the device's own number: so all devices give the same bits.
_MULTIPROCESSORS = 132
# A step, one row block of one tile, takes about this long with 128 columns: 10 MFLOP at 690 TFLOPS over 132
# multiprocessors. What follows is fitted to measurements: docs/tuning-notes.md.
_STEP_US = 2.0
# Steps that a tile's beginning and end take.
_TILE_STEPS = 1.5
# A tile visits its heads one after another: tiles that differ in steps drift apart with each head, and find less of
# each other's rows in L2.
_DRIFT = 0.01
# The atomic adds of tiles; and the sums' traffic: zeroed, read and rounded.
_ADDED_BYTES_PER_US, _SUMS_BYTES_PER_US = 2.2e6, 2e6
_LAUNCHES_US = 20.0


def gqa_splits(problem: Problem, config: BackwardTiles, rows_k: int) -> int:
    """How many tiles share the query heads of one key head: 1 unless more are expected to take 5% less time.

    Without splits a tile visits all query heads of its key head. With them several tiles have the same keys, each
    visits some of the heads, and all add to sums of dk and dv in float32, which a last kernel rounds. If the result
    must be repeatable each split has sums of its own, and the last kernel adds them in order.

    Args:
        problem: The call.
        config: Its tiles.
        rows_k: Keys of a sequence, or of all packed ones together.
    """
    p = problem
    if p.group_size == 1 or not (p.grads.k or p.grads.v) or config.pairs is not None:
        return 1
    if p.by_head:
        return p.group_size  # A tile has one list.
    sequences = max(1, -(-rows_k // max(p.seqlen_k, 1))) if p.varlen else p.batch
    heads = sequences * p.num_heads_kv
    return _splits(p.band, p.seqlen_q, p.seqlen_k, heads, p.group_size, config, p.deterministic)


@functools.lru_cache(maxsize=4096)
def _splits(
    band: Band, seqlen_q: int, seqlen_k: int, heads: int, group_size: int, config: BackwardTiles, ordered: bool
) -> int:
    rows, keys = config.block_m, config.block_n
    tiles = max(1, -(-seqlen_k // keys)) * heads
    mean = band.count(seqlen_q, seqlen_k) / (rows * keys) * heads / tiles
    longest = -(-seqlen_q // rows)
    if band.left is not None and band.right is not None:
        longest = min(longest, -(-(band.left + band.right + keys) // rows) + 1)
    step_us = _STEP_US * rows * keys * config.block_d / (64 * 128 * 128)

    def time_us(size: int) -> float:
        count = -(-group_size // size)
        if band.unbounded:
            steps: float = math.ceil(tiles * count / _MULTIPROCESSORS) * (longest * size + _TILE_STEPS)
        else:
            # The longest tiles start first and the others fill what they leave, but for a part of a tile; where sums
            # are ordered the longest start last.
            all_steps = tiles * (mean * group_size + _TILE_STEPS * count)
            steps = longest * size + _TILE_STEPS
            if tiles * count > _MULTIPROCESSORS:
                steps = max(steps, all_steps / _MULTIPROCESSORS) + (0.5 if ordered else 0.3) * longest * size
            steps *= 1 + _DRIFT * (size - 1)
        time = steps * step_us
        if count == 1:
            return time
        added = 4 * heads * count * seqlen_k * (config.block_d + config.block_dv)
        sums = added if ordered else added / count
        return time + added / _ADDED_BYTES_PER_US + sums / _SUMS_BYTES_PER_US + _LAUNCHES_US

    sizes = sorted({-(-group_size // count) for count in range(1, group_size + 1)}, reverse=True)
    best = min(sizes, key=time_us)
    return -(-group_size // best) if time_us(best) < 0.95 * time_us(group_size) else 1
