"""The quantized forward's tiles; a block of keys is at most the 128 that share a scale."""

from __future__ import annotations

from flashtile.backends.portable.config import Config, Tables, select
from flashtile.backends.portable.forward import config as forward
from flashtile.call.blocks import BLOCK
from flashtile.call.problem import Problem


def choose(problem: Problem, arch: str | None = None) -> Config:
    """The tiles for a problem, or for an architecture other than its device's.

    Raises:
        ValueError: Tiles on trial are longer than a block.
    """
    config = select(problem, "quantized", _TABLES, arch)
    if max(config.block_m, config.block_n) > BLOCK:
        raise ValueError(f"tiles are {config.block_m}x{config.block_n}, at most {BLOCK} share a scale")
    return config


# Chosen from compiler reports (Triton 3.7.1), not timings: large tiles whose registers do not spill, or by 16 bytes.
_SM_86 = dict.fromkeys((16, 32, 64), Config(64, 64, 4, 2)) | {128: Config(64, 64, 8, 2), 256: Config(32, 32, 8, 2)}
_SM_90 = {64: Config(64, 64, 4, 3), 128: Config(128, 128, 8, 2), 256: Config(64, 128, 8, 2)}
_KINDS = {kind: _SM_90 for kind in forward.TABLES if kind.startswith("sm_90 ")}
_KINDS |= dict.fromkeys(("sm_86", "sm_86 featured"), _SM_86)
_TABLES: Tables = {kind: {"quantized": tiles} for kind, tiles in _KINDS.items()}
