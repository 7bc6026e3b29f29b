"""Tiles of the Hopper forward of 8-bit tensors. Measured: docs/tuning-notes.md."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from flashtile.backends.hopper.forward import config as forward
from flashtile.call.problem import Problem


@dataclass(frozen=True, kw_only=True)
class QuantizedTiles(forward.ForwardTiles):
    """``ForwardTiles``, for operands of one byte and an output of two.

    Attributes:
        width: Columns of values of one product.
        behind: Whether a product with values is issued after the next block's scores; takes registers.
    """

    width: int
    behind: bool = False

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the tiles and of what else needs any."""
        keys = self.stages * self.block_n * (self.block_d + self.block_dv)
        rows = self.num_warpgroups * self.block_m
        return keys + rows * (self.q_stages * self.block_d + 2 * self.out_stages * self.out_cols) + forward.OTHER_BYTES


_TWO = functools.partial(QuantizedTiles, stages=4)
# Ping-pong pays at 128 and 256, not at 64, where three warpgroups are faster than two.
_128 = _TWO(block_d=128, block_dv=128, out_cols=128, width=128, behind=True, pingpong=True)
_64 = _TWO(block_d=64, block_dv=64, out_cols=64, width=64, num_warpgroups=3, registers=160, max_registers=128)
_256 = _TWO(block_d=256, block_dv=256, out_cols=32, out_stages=4, width=32, stages=2, pingpong=True)


def choose(problem: Problem) -> QuantizedTiles:
    """The configuration of a problem: by its head_dims, mask and length, never by the batch."""
    width, is_causal = forward.block_d(max(problem.head_dim, problem.head_dim_v)), problem.band.right is not None
    config = {64: _64, 128: _128, 256: _256}[width]
    if is_causal and not problem.varlen and problem.seqlen_q > forward.SHORT and problem.band.left is None:
        return config
    return replace(config, dynamic=True, tile_stages=2)
