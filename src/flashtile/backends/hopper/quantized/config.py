"""Tiles of the Hopper forward of 8-bit tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashtile.backends.hopper.forward import config as forward
from flashtile.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Config(forward.Config):
    """``forward.Config``, for operands of one byte and an output of two.

    Attributes:
        width: Columns of values of one product.
        early: Whether the next block's scores start before a block's last product ends; takes registers.
    """

    width: int
    early: bool = False

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the tiles and of what else needs any."""
        keys = self.stages * self.block_n * (self.block_d + self.block_dv)
        rows = self.num_warpgroups * self.block_m
        return keys + rows * (self.q_stages * self.block_d + 2 * self.out_stages * self.out_cols) + forward.OTHER_BYTES


_TILES = {  # fmt: skip
    64: Config(
        block_d=64, block_dv=64, out_cols=64, stages=4, num_warpgroups=3, registers=160, max_registers=128, width=64
    ),
    128: Config(block_d=128, block_dv=128, out_cols=128, stages=4, width=128, early=True),
    256: Config(block_d=256, block_dv=256, out_cols=64, width=64),
}
_trial: list[Config] = []


@contextlib.contextmanager
def override(config: Config) -> Iterator[None]:
    """Plans made within use this configuration, for tuning."""
    _trial.append(config)
    try:
        yield
    finally:
        _trial.pop()


def choose(problem: Problem) -> Config:
    """The configuration of a problem: by its head_dims, mask and length, never by the batch."""
    if _trial:
        return _trial[-1]
    config = _TILES[forward.block_d(max(problem.head_dim, problem.head_dim_v))]
    is_causal = problem.band.right is not None
    if is_causal and not problem.varlen and problem.seqlen_q > forward.SHORT and problem.band.left is None:
        return config
    return replace(config, dynamic=True, tile_stages=2)
