"""Bytes that attention moves to and from HBM, by loop order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from flashtile_lab.analysis.shape import STATE_BYTES, AttentionShape, Blocks


class LoopOrder(StrEnum):
    """Which operand the outer loop walks over."""

    KV_OUTSIDE = "kv-outside"
    Q_OUTSIDE = "q-outside"


@dataclass(frozen=True)
class StandardTraffic:
    """HBM bytes of attention that stores S and P."""

    inputs_read_bytes: int
    scores_probs_bytes: int
    out_write_bytes: int
    out_read_back_bytes: int

    @property
    def total_bytes(self) -> int:
        """All bytes, including the next layer's read of the output."""
        return self.own_bytes + self.out_read_back_bytes

    @property
    def own_bytes(self) -> int:
        """Bytes that attention itself moves: reads of the inputs, writes and reads of S and P, writes of the output."""
        return self.inputs_read_bytes + self.scores_probs_bytes + self.out_write_bytes


def standard_traffic(shape: AttentionShape) -> StandardTraffic:
    """HBM traffic of standard attention, forward.

    Convention: Q, K and V are read once; every matrix that attention makes (S, P and the output) is written once and
    read once. S and P so cost `4 * n * m * e` and the output `2 * n * d * e`, of which the read, by the next layer,
    counts in `total_bytes` but not in `own_bytes`. A causal mask saves nothing, because the whole matrix is stored.

    Source: FlashAttention (arXiv 2205.14135), section 2.2, Algorithm 0, and section 3.2, Theorem 2: Theta(N d + N^2).
    """
    return StandardTraffic(
        inputs_read_bytes=shape.q_bytes + 2 * shape.k_bytes,
        scores_probs_bytes=4 * shape.scores_bytes,
        out_write_bytes=shape.q_bytes,
        out_read_back_bytes=shape.q_bytes,
    )


@dataclass(frozen=True)
class TiledTraffic:
    """HBM bytes and normalisations of tiled attention under one loop order."""

    order: LoopOrder
    tile_visits: int
    rescales: int
    inputs_read_bytes: int
    state_read_bytes: int
    write_bytes: int

    @property
    def total_bytes(self) -> int:
        """Inputs, carried state and writes."""
        return self.inputs_read_bytes + self.state_read_bytes + self.write_bytes


def tiled_traffic(shape: AttentionShape, blocks: Blocks, order: LoopOrder) -> TiledTraffic:
    """HBM traffic of tiled attention, forward; nothing is assumed to stay in a cache.

    Convention, for n queries and m keys cut into Tq and Tk blocks, no mask:

    - K/V outside (FlashAttention, Algorithm 1): K and V are read once, Q once for each block of K: `(2m + Tk * n) * d`
      elements read. The output and two float32 statistics per row are kept in HBM: initialised once, then read and
      written for each tile; these are `state_read_bytes` and part of `write_bytes`, not of `inputs_read_bytes`. Each
      tile stores a normalised output, so an output block is divided by its row sums once per tile: `Tq * Tk` rescales.
    - Q outside (FlashAttention-2, Algorithm 1): Q is read once, K and V once for each block of Q:
      `(n + 2 * Tq * m) * d`. The output stays on chip and is divided once at the end: `Tq` rescales; output and
      log-sum-exp are written once.

    A rescale is a division of one output block by its row sums. Both orders still multiply by `exp(old max - new max)`
    where a maximum grows. With a causal mask only tiles that hold a kept score are visited.

    Source: arXiv 2205.14135, Algorithm 1 and section 3.2, Theorem 2; arXiv 2307.08691, sections 3.1 and 3.2.
    """
    num_q, num_k = shape.num_blocks(blocks)
    visits = shape.tile_visits(blocks)
    row_bytes = shape.head_dim * shape.element_bytes
    problems = shape.num_problems
    if order is LoopOrder.KV_OUTSIDE:
        # The last block of Q, which may be short, sees every key, so it has exactly num_k visits.
        rows = visits * blocks.block_q - num_k * (num_q * blocks.block_q - shape.seqlen_q)
        state_row_bytes = row_bytes + 2 * STATE_BYTES
        return TiledTraffic(
            order=order,
            tile_visits=problems * visits,
            rescales=problems * visits,
            inputs_read_bytes=2 * shape.k_bytes + problems * rows * row_bytes,
            state_read_bytes=problems * rows * state_row_bytes,
            write_bytes=problems * (rows + shape.seqlen_q) * state_row_bytes,
        )
    last_k_visits = _visits_of_last_k_block(shape, blocks)
    rows = visits * blocks.block_k - last_k_visits * (num_k * blocks.block_k - shape.seqlen_k)
    return TiledTraffic(
        order=order,
        tile_visits=problems * visits,
        rescales=problems * num_q,
        inputs_read_bytes=shape.q_bytes + 2 * problems * rows * row_bytes,
        state_read_bytes=0,
        write_bytes=shape.q_bytes + problems * shape.seqlen_q * STATE_BYTES,
    )


def compulsory_traffic_bytes(shape: AttentionShape) -> int:
    """The fewest bytes any exact forward moves: Q, K, V read once, output and float32 log-sum-exp written once.

    A kernel comes close to it if the keys that blocks of Q share stay in the L2 cache.
    """
    return 2 * shape.q_bytes + 2 * shape.k_bytes + shape.num_problems * shape.seqlen_q * STATE_BYTES


def _visits_of_last_k_block(shape: AttentionShape, blocks: Blocks) -> int:
    num_q, num_k = shape.num_blocks(blocks)
    if not shape.causal:
        return num_q
    # Block i of Q reaches the last block of K when (i + 1) * block_q + offset passes its first key.
    keys_before = (num_k - 1) * blocks.block_k - (shape.seqlen_k - shape.seqlen_q)
    return max(1, num_q - max(0, keys_before // blocks.block_q))
