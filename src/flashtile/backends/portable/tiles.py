"""Which tiles each kernel runs with: a pure function of architecture, dtype, head dimensions and mask kind.

Never of the batch size or a length, so that a sequence comes out bitwise the same whatever else is in the batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from flashtile.problem import Problem

Kernel = Literal["forward", "dkdv", "dq", "dbias"]

# Shared memory a program may take, in bytes, by architecture.
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


@dataclass(frozen=True)
class Config:
    """Tiles of one kernel.

    Attributes:
        block_m: Query rows of a tile.
        block_n: Keys of a tile.
        num_warps: Warps a program, of 32 threads (64 on AMD).
        num_stages: Tiles in flight of the pipelined loads.
        tma: Load by tensor descriptors where the tensors allow it (sm_90 and later).
        maxnreg: Most registers a thread, None for the compiler's choice.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    maxnreg: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n"):
            size = getattr(self, name)
            if size < 16 or size > 256 or size & (size - 1):
                raise ValueError(f"{name} is {size}, must be a power of two from 16 to 256")
        if self.block_n > 128:
            raise ValueError(f"block_n is {self.block_n}, at most 128: the careful product counts keys in base 256")

    def options(self) -> dict[str, int]:
        """What Triton takes beside the kernel's arguments."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}

    def __str__(self) -> str:
        text = f"{self.block_m}x{self.block_n}, {self.num_warps} warps, {self.num_stages} stages"
        return text + (", TMA" if self.tma else "")


def padded(dim: int) -> int:
    """The power of two, at least 16, that holds a head dimension: what matrix instructions take."""
    return max(16, 1 << (dim - 1).bit_length())


def arch_of(problem: Problem) -> str:
    """The row of the table for a problem's device."""
    if problem.device_type == "cpu":
        return "interpreter"
    if problem.compute_capability is None:
        return "gfx942"
    major, minor = problem.compute_capability
    if major >= 12 or (major == 8 and minor > 0):
        return "sm_86"
    return {8: "sm_80", 9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


_override: dict[str, Config] = {}


@contextlib.contextmanager
def override(**configs: Config) -> Iterator[None]:
    """Runs the kernels of the given names with the given tiles, for tuning."""
    before = dict(_override)
    _override.update(configs)
    try:
        yield
    finally:
        _override.clear()
        _override.update(before)


def choose(problem: Problem, kernel: Kernel, arch: str | None = None) -> Config:
    """The tiles of a kernel for a problem.

    Args:
        problem: The call.
        kernel: Which kernel.
        arch: Instead of the problem's own device.
    """
    if kernel in _override:
        return _override[kernel]
    arch = arch or arch_of(problem)
    dim = max(padded(problem.head_dim), padded(problem.head_dim_v))
    if arch == "interpreter":
        return Config(16, 16, 4, 1)
    if problem.dtype == torch.float32:
        return _float32(arch, dim)
    table = {"sm_90": _SM_90, "sm_100": _SM_90, "sm_80": _SM_80, "sm_86": _SM_86, "gfx942": _GFX942}[arch]
    config = table[kernel][dim]
    if config.tma and not (problem.aligned and problem.head_dim % 8 == 0 and problem.head_dim_v % 8 == 0):
        config = dataclasses.replace(config, tma=False)
    return config


def _float32(arch: str, dim: int) -> Config:
    # True float32 products run on the plain FMA units from registers: small tiles keep their operands there.
    size = 32 if dim <= 128 else 16
    return Config(size, size, 4, 2 if dim <= 64 and arch != "gfx942" else 1)


_Table = dict[str, dict[int, Config]]

# Descriptors free the registers that addresses took: without them the forward's d 128 loop needs 255 of 255, with them
# 226. Chosen by registers and spills of builds for sm_90a (none in any loop but one reload in dkdv at d 128).
_SM_90: _Table = {
    "forward": {
        16: Config(128, 128, 8, 3, tma=True),
        32: Config(128, 128, 8, 3, tma=True),
        64: Config(128, 128, 8, 3, tma=True),
        128: Config(128, 128, 8, 2, tma=True),
        256: Config(128, 64, 8, 2, tma=True),
    },
    "dkdv": {
        16: Config(64, 128, 4, 3, tma=True),
        32: Config(64, 128, 4, 3, tma=True),
        64: Config(64, 128, 8, 3, tma=True),
        128: Config(64, 128, 8, 2, tma=True),
        256: Config(32, 64, 8, 2, tma=True),
    },
    "dq": {
        16: Config(128, 64, 4, 3, tma=True),
        32: Config(128, 64, 4, 3, tma=True),
        64: Config(128, 64, 8, 3, tma=True),
        128: Config(128, 64, 8, 2, tma=True),
        256: Config(64, 64, 8, 2, tma=True),
    },
    "dbias": {dim: Config(64, 64, 4, 2 if dim < 256 else 1) for dim in (16, 32, 64, 128, 256)},
}
_SM_80: _Table = {
    "forward": {
        16: Config(128, 64, 4, 3),
        32: Config(128, 64, 4, 3),
        64: Config(128, 64, 4, 3),
        128: Config(128, 64, 8, 2),
        256: Config(64, 32, 4, 2),
    },
    "dkdv": {
        16: Config(64, 128, 8, 2),
        32: Config(64, 128, 8, 2),
        64: Config(64, 128, 8, 2),
        128: Config(32, 64, 4, 2),
        256: Config(32, 64, 8, 1),
    },
    "dq": {
        16: Config(128, 32, 4, 2),
        32: Config(128, 32, 4, 2),
        64: Config(128, 32, 4, 2),
        128: Config(64, 32, 4, 2),
        256: Config(64, 32, 8, 1),
    },
    "dbias": {dim: Config(32, 32, 4, 1) for dim in (16, 32, 64, 128, 256)},
}
# 99 KB of shared memory: what fits sm_80 in 163 KB loses a stage or half a tile.
_SM_86: _Table = _SM_80 | {
    "forward": _SM_80["forward"] | {256: Config(64, 32, 4, 1)},
    "dkdv": _SM_80["dkdv"] | {256: Config(16, 32, 4, 1)},
    "dq": _SM_80["dq"] | {256: Config(32, 16, 4, 1)},
}
# 64 KB of LDS, and 64 threads a warp.
_GFX942: _Table = {
    "forward": {
        16: Config(128, 64, 4, 1),
        32: Config(128, 64, 4, 1),
        64: Config(128, 64, 4, 1),
        128: Config(128, 64, 4, 1),
        256: Config(64, 32, 4, 1),
    },
    "dkdv": {dim: Config(32, 64 if dim <= 128 else 32, 4, 1) for dim in (16, 32, 64, 128, 256)},
    "dq": {dim: Config(64 if dim <= 128 else 32, 32, 4, 1) for dim in (16, 32, 64, 128, 256)},
    "dbias": {dim: Config(32, 32, 4, 1) for dim in (16, 32, 64, 128, 256)},
}
