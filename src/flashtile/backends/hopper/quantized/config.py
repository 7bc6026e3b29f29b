"""Tiles of the Hopper forward of 8-bit tensors."""

from __future__ import annotations

import contextlib
import functools
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


_TWO = functools.partial(Config, out_cols=64, stages=4)
# On an H200, 16k tokens (2026-11-22): head_dim 128 full 829 TFLOPS, 788 if the next scores start late, 759 with three
# warpgroups; causal 762, 776 and 784. At 64 three warpgroups make 538 and two 476.
_FULL_128 = _TWO(block_d=128, block_dv=128, out_cols=128, width=128, early=True)
_BANDED_128 = replace(_FULL_128, early=False)
_64 = _TWO(block_d=64, block_dv=64, width=64, num_warpgroups=3, registers=160, max_registers=128)
_256 = _TWO(block_d=256, block_dv=256, width=64, stages=2)
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
    width, is_causal = forward.block_d(max(problem.head_dim, problem.head_dim_v)), problem.band.right is not None
    config = {64: _64, 128: _FULL_128 if problem.band.unbounded else _BANDED_128, 256: _256}[width]
    if is_causal and not problem.varlen and problem.seqlen_q > forward.SHORT and problem.band.left is None:
        return config
    return replace(config, dynamic=True, tile_stages=2)
