"""Which calls the kernel over latent rows computes, and its tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashtile.backends.gpu.trial import tried
from flashtile.backends.hopper import tensor_maps
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Problem

ROWS = 64
# How often a program looks whether the others of its tile have stored their states; once they run one after another.
PATIENCE = 256


@dataclass(frozen=True)
class Config:
    """Tiles: 64 rows, blocks of 64 keys, whose buffers with the queries' fill shared memory.

    Attributes:
        fixed_cost: See ``records.Latent``, like all of them.
        fewest_blocks: 2 at least, so that no share is without a block.
        stages: Blocks of keys in flight.
        piece: Columns of values that are loaded and released at once.
        registers: Of a summer's threads; a scorer's get what is left.
        few: Of the other warps' threads.
        wide: Of the threads that make 16 bits of 8, if values are of 8.
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


def choose(problem: Problem) -> Config:
    """The tiles of a call: states of two blocks if there are few rows to fold, or many programs that fold them."""
    held = tried("hopper_latent")
    rows = (1 if problem.varlen else problem.seqlen_q) * problem.group_size
    fewest = 2 if rows <= 16 or problem.batch == 1 else 4
    of_8_bits = {"registers": 160, "few": 24} if problem.row_scale else {}
    return Config(fewest_blocks=fewest, **of_8_bits) if held is None else held


def against(problem: Problem) -> list[str]:
    """What keeps a call with ``qv`` from the kernel, but for strides; none if nothing does."""
    p = problem
    size = p.keys.page_size
    reasons = {
        f"columns {p.head_dim} and {p.head_dim_v}, not 64 and 512": (p.head_dim, p.head_dim_v) != (64, 512),
        "caches in 8 bits but of rows of 656 bytes": p.precision.kv.itemsize == 1,
        "dtype": p.dtype not in (torch.float16, torch.bfloat16),
        f"pages of {size}": size not in (8, 16, 32) and size % ROWS > 0,
        "window": p.band.left is not None,
        "softcap": p.softcap > 0,
        "ALiBi": p.alibi,
        "tree_mask": p.tree,
        "softmax_scale": p.softmax_scale <= 0,
        "strides": not p.aligned,
    }
    return [reason for reason, is_against in reasons.items() if is_against]


def runs(problem: Problem, tensors: CacheTensors | None = None) -> bool:
    """Whether the kernel computes a call with ``qv``; of tensors None those that TMA and 16-byte copies can read."""
    # Tiles on trial for the Triton kernel are for it alone.
    if tried("decode") is not None or against(problem):
        return False
    return tensors is None or _can_read(tensors)


def _can_read(tensors: CacheTensors) -> bool:
    """Whether TMA can read the caches, the rows of all entries as if they were one tensor's, and copies the queries."""
    t = tensors
    assert t.qv is not None
    caches = [x for x in (t.k_cache, t.v_cache, t.row_scale) if x is not None]
    strides = [(cache.shape[0], *cache.stride()[:2]) for cache in (t.k_cache, t.v_cache)]
    rows = all(row > 0 and entry % row == 0 and count * entry // row < 2**30 for count, entry, row in strides)
    queries = (t.qv,) if t.rotary_cos is not None else (t.q, t.qv)
    is_copied = all(stride % 16 == 0 for q in queries for stride in q.stride()[:-1])
    return rows and is_copied and t.cache_leftpad is None and all(map(tensor_maps.is_readable, caches))
