"""On-chip memory of a tile, the tiles that fit, and the most elements of the score matrix alive at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashtile_lab.analysis.shape import STATE_BYTES, AttentionShape, Blocks, dtype_bytes, require_positive

TILE_SIDES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class TileMemory:
    """On-chip bytes of one step of the inner loop."""

    blocks: Blocks
    q_bytes: int
    k_bytes: int
    v_bytes: int
    probs_bytes: int
    acc_bytes: int
    row_stats_bytes: int

    @property
    def tiles_bytes(self) -> int:
        """The five matrices, without the row statistics."""
        return self.q_bytes + self.k_bytes + self.v_bytes + self.probs_bytes + self.acc_bytes

    @property
    def total_bytes(self) -> int:
        """The five matrices and the row statistics."""
        return self.tiles_bytes + self.row_stats_bytes


def tile_memory(blocks: Blocks, head_dim: int, dtype: str = "float16") -> TileMemory:
    """On-chip memory of one tile, in bytes, with one copy of each operand (no pipeline stages).

    Convention: Q, K, V and P tiles in the input dtype, the output accumulator in float32, and a float32 maximum and sum
    for each row. Scores turn into P in place. A kernel may hold part of this in registers rather than in shared memory.

    Source: FlashAttention (arXiv 2205.14135), Algorithm 1, whose block sizes come from the same budget.
    """
    require_positive(head_dim=head_dim)
    size = dtype_bytes(dtype)
    # float64 inputs accumulate in float64.
    state = max(STATE_BYTES, size)
    return TileMemory(
        blocks=blocks,
        q_bytes=blocks.block_q * head_dim * size,
        k_bytes=blocks.block_k * head_dim * size,
        v_bytes=blocks.block_k * head_dim * size,
        probs_bytes=blocks.block_q * blocks.block_k * size,
        acc_bytes=blocks.block_q * head_dim * state,
        row_stats_bytes=2 * blocks.block_q * state,
    )


def fitting_tiles(
    on_chip_bytes: float, head_dim: int, dtype: str = "float16", sides: Sequence[int] = TILE_SIDES
) -> list[TileMemory]:
    """Every pair of sides whose tile fits, those that move the fewest HBM bytes first.

    With Q outside, K and V are read once for each block of Q, so a taller tile (block_q) moves fewer bytes; at equal
    height a wider one has fewer steps. An empty list means that no tile fits.
    """
    require_positive(on_chip_bytes=on_chip_bytes)
    tiles = [tile_memory(Blocks(block_q, block_k), head_dim, dtype) for block_q in sides for block_k in sides]
    fitting = [tile for tile in tiles if tile.total_bytes <= on_chip_bytes]
    return sorted(fitting, key=lambda tile: (tile.blocks.block_q, tile.blocks.block_k), reverse=True)


@dataclass(frozen=True)
class PeakIntermediates:
    """The most elements between inputs and output that are alive at once, for one (batch, head) pair."""

    standard_numbers: int
    tiled_numbers: int

    @property
    def ratio(self) -> float:
        """Standard over tiled."""
        return self.standard_numbers / self.tiled_numbers


def peak_intermediates(shape: AttentionShape, blocks: Blocks) -> PeakIntermediates:
    """The number of intermediate elements alive at once, for one (batch, head) pair.

    Standard: the score matrix, `n * m`, overwritten by its softmax. Tiled: one tile of scores `Bq * Bk`, the output
    accumulator `Bq * d`, and a maximum and a sum for each row, `2 * Bq`; tiles at the end of a sequence have full size
    too.

    Source: FlashAttention-2 (arXiv 2307.08691), Algorithm 1: the on-chip state between two steps, and one tile S.
    """
    return PeakIntermediates(
        standard_numbers=shape.seqlen_q * shape.seqlen_k,
        tiled_numbers=blocks.block_q * (blocks.block_k + shape.head_dim + 2),
    )
