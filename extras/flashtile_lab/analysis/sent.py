"""Bytes that ranks send: those of a plan's steps, of gathering, and of exchanging heads for rows."""

from __future__ import annotations

from typing import NamedTuple

from flashtile.distributed.plan import RingPlan
from flashtile.distributed.ring import BLOCK, RankRing


class Sizes(NamedTuple):
    """The sizes of a call that bytes follow from; under Ulysses, of a whole call and not of a rank's heads.

    Attributes:
        num_heads_q: Query heads.
        num_heads_kv: Key heads.
        head_dim: Width of q and k.
        head_dim_v: Width of v and out.
        element_bytes: Bytes of an element of q, k, v and out.
    """

    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    element_bytes: int = 2

    @property
    def key_bytes(self) -> int:
        """Bytes of one key row with its value, all heads."""
        return self.num_heads_kv * (self.head_dim + self.head_dim_v) * self.element_bytes

    @property
    def sums_bytes(self) -> int:
        """Bytes of the float32 dk and dv of one key row, all heads."""
        return self.num_heads_kv * (self.head_dim + self.head_dim_v) * 4

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of q and of out, all heads."""
        return self.num_heads_q * (self.head_dim + self.head_dim_v) * self.element_bytes


def bytes_sent(plan: RingPlan, sizes: Sizes, backward: bool = False) -> int:
    """Bytes that a rank sends in a forward, or in a backward, where float32 sums go after the keys."""
    sent = sum(send.keys for step in plan.steps for send in step.sends) * sizes.key_bytes
    if backward:
        sent += sum(step.keys for step in plan.steps if step.sums_to is not None) * sizes.sums_bytes
    return sent


def least_keys(ring: RankRing, rank: int) -> int:
    """Keys that a rank must get where shards are exchanged in blocks of 128 rows: those of blocks that its rows see."""
    blocks = {
        (source, block)
        for source in range(ring.world)
        if source != rank
        for each in ring.rectangles(rank, source)
        for block in range(each.key // BLOCK, -(-(each.key + each.keys) // BLOCK))
    }
    return sum(min(BLOCK, ring.keys(source) - block * BLOCK) for source, block in blocks)


def gathered_bytes(keys: int, world: int, sizes: Sizes, backward: bool = False) -> int:
    """Bytes that a rank with so many keys sends where all keys go to all ranks: all_gather, and a full ring.

    Forward: its keys and values to N - 1 others. Backward: again, and the float32 dk and dv of their keys back.
    """
    return (world - 1) * keys * (sizes.key_bytes + (sizes.sums_bytes if backward else 0))


def exchanged_bytes(rows: int, world: int, sizes: Sizes) -> int:
    """Bytes that a rank sends where rows become heads and heads rows again, in an all-to-all of N ranks (Ulysses).

    Forward: q, k and v there, out back. Backward: dout there, and dq, dk and dv back, as many. Of each a rank keeps the
    N-th part. Key heads that are fewer than ranks are sent to all ranks whose query heads use them.

    Args:
        rows: Rows of the rank, which are as many keys.
        world: Ranks that exchange.
        sizes: Of the whole call.
    """
    copies = max(1, world // sizes.num_heads_kv)
    return rows * (world - 1) * (sizes.row_bytes + copies * sizes.key_bytes) // world
