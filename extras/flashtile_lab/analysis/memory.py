"""Bytes that attention needs beyond its inputs."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile_lab.analysis.shape import STATE_BYTES, AttentionShape, Blocks


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes beyond Q, K and V, of the two ways to compute attention."""

    standard_scores_bytes: int
    tiled_out_bytes: int
    tiled_lse_bytes: int
    tiled_tiles_bytes: int

    @property
    def standard_bytes(self) -> int:
        """The score matrix; the softmax is taken in place."""
        return self.standard_scores_bytes

    @property
    def tiled_bytes(self) -> int:
        """Output, log-sum-exp and the tiles of one block."""
        return self.tiled_out_bytes + self.tiled_lse_bytes + self.tiled_tiles_bytes

    @property
    def ratio(self) -> float:
        """Standard over tiled."""
        return self.standard_bytes / self.tiled_bytes


def attention_memory(shape: AttentionShape, blocks: Blocks) -> AttentionMemory:
    """Memory of standard and of tiled attention, forward.

    Convention, for n queries, m keys, width d, element size e, over batch * heads problems:

    - standard: the score matrix alone, `n * m * e`, as if the softmax overwrote it and the output cost nothing;
    - tiled: the output `n * d * e`, the float32 log-sum-exp `4 * n` that a backward needs, and the tiles Q, K, V and P
      of one block, `(Bq * d + 2 * Bk * d + Bq * Bk) * e`, once, since a block is freed before the next. Its accumulator
      and row statistics are rows of the output and of the log-sum-exp, so they are not counted again.

    Counting the output only on the tiled side favours standard attention, so the ratio is a lower bound.

    Source: FlashAttention (arXiv 2205.14135), section 3.1, Theorem 1: O(N) memory beyond inputs and output.
    """
    tile_elements = (blocks.block_q + 2 * blocks.block_k) * shape.head_dim + blocks.block_q * blocks.block_k
    return AttentionMemory(
        standard_scores_bytes=shape.scores_bytes,
        tiled_out_bytes=shape.q_bytes,
        tiled_lse_bytes=shape.num_problems * shape.seqlen_q * STATE_BYTES,
        tiled_tiles_bytes=tile_elements * shape.element_bytes,
    )
