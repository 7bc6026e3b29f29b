"""The quantized forward's tiles; a block of keys is at most the 128 that share a scale."""

from __future__ import annotations

from flashtile.backends.portable import tuned
from flashtile.backends.portable.config import PortableTiles
from flashtile.call.blocks import BLOCK
from flashtile.call.problem import Problem


def choose(problem: Problem, arch: str | None = None) -> PortableTiles:
    """The tiles for a problem, or for an architecture other than its device's.

    Raises:
        ValueError: Tiles on trial are longer than a block.
    """
    config = tuned.choose(problem, "quantized", arch)
    if max(config.block_m, config.block_n) > BLOCK:
        raise ValueError(f"tiles are {config.block_m}x{config.block_n}, at most {BLOCK} share a scale")
    return config
