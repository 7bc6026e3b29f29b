"""gqa_splits: how many tiles share the query heads of one key head in the Hopper backward, so that few fill the GPU.

Without splits a tile visits all query heads of its key head. With them several tiles have the same keys, each visits
some of the heads, and all add to sums of dk and dv in float32, which a last kernel rounds. If the result must be
repeatable each split has sums of its own, and the last kernel adds them in order.
"""

from __future__ import annotations

import functools
import math

from flashtile.backends.hopper.backward.config import Config
from flashtile.call.problem import Problem
from flashtile.core.masks import Band

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


def choose(problem: Problem, config: Config, rows_k: int) -> int:
    """gqa_splits: 1 unless more are expected to take 5% less time.

    Args:
        problem: The call.
        config: Its tiles.
        rows_k: Keys of a sequence, or of all packed ones together.
    """
    p = problem
    if p.group_size == 1 or not (p.grads.k or p.grads.v):
        return 1
    sequences = max(1, -(-rows_k // max(p.seqlen_k, 1))) if p.varlen else p.batch
    heads = sequences * p.num_heads_kv
    return _choose(p.band, p.seqlen_q, p.seqlen_k, heads, p.group_size, config, p.deterministic)


@functools.lru_cache(maxsize=4096)
def _choose(
    band: Band, seqlen_q: int, seqlen_k: int, heads: int, group_size: int, config: Config, ordered: bool
) -> int:
    rows, keys = config.block_m, config.block_n
    tiles = -(-seqlen_k // keys) * heads
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
