"""Which tiles each kernel runs with: a pure function of architecture, dtype, head dimensions and mask kind.

Never of the batch size, nor of the length of packed sequences, so that a sequence comes out bitwise the same whatever
else is in the batch. A dense batch's length is that of each sequence in it, and short ones may have tiles of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from flashtile.problem import Problem

# dkdv makes dk and dv; dk and dv, which a table may have in its place, one each.
Kernel = Literal["forward", "dkdv", "dk", "dv", "dq", "dbias"]

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
        one_loop: Visit every block in one loop with the mask under a branch, instead of one loop for the blocks that
            need it and one for those that do not: one pipeline to fill instead of two, and the registers of one loop
            alone; but packed sequences then load nothing by descriptors. Bitwise the same result.
        mask_all: Without that branch: one loop that masks every block. Beside some branches ptxas serialises the WGMMA,
            a wait behind each; a comparison and a select a score may cost less. Bitwise the same result.
        maxnreg: Most registers a thread, None for the compiler's choice. Where the repeat for NaN, which hardly ever
            runs, takes more than the loops before it, a limit keeps their occupancy; the repeat alone spills.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    one_loop: bool = False
    mask_all: bool = False
    maxnreg: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n"):
            size = getattr(self, name)
            if size < 16 or size > 256 or size & (size - 1):
                raise ValueError(f"{name} is {size}, must be a power of two from 16 to 256")
        if self.mask_all and not self.one_loop:
            raise ValueError("mask_all masks every block of one loop, so one_loop must be set too")

    def options(self) -> dict[str, int]:
        """What Triton takes beside the kernel's arguments."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}

    def __str__(self) -> str:
        text = f"{self.block_m}x{self.block_n}, {self.num_warps} warps, {self.num_stages} stages"
        return (
            text
            + (", TMA" if self.tma else "")
            + (", one loop" if self.one_loop else "")
            + (", all masked" if self.mask_all else "")
        )


def padded(dim: int) -> int:
    """The power of two, at least 16, that holds a head dimension: what matrix instructions take."""
    return max(16, 1 << (dim - 1).bit_length())


def padded_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """``padded`` of both head dimensions, the smaller one at least as large as the other up to 64.

    Tiles of 16, 32 and from 64 columns differ in their swizzle, so in the upper half of their matrix descriptors. Where
    K and V take turns in one place of shared memory, ptxas 12.8 loses the lower half when it makes the second
    descriptor (seen in the SASS for sm_90a: the addresses come from a register nothing has written). Tiles of one
    swizzle share their descriptors.
    """
    dim, dim_v = padded(head_dim), padded(head_dim_v)
    return max(dim, min(dim_v, 64)), max(dim_v, min(dim, 64))


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


def overridden() -> tuple[tuple[str, Config], ...]:
    """What ``override`` holds now: beside the problem, all that ``choose`` depends on."""
    return tuple(_override.items())


def choose(problem: Problem, kernel: Kernel, arch: str | None = None) -> Config:
    """The tiles of a kernel for a problem.

    Args:
        problem: The call.
        kernel: Which kernel; dk and dv only where ``key_kernels`` names them, dkdv only where not.
        arch: Instead of the problem's own device.
    """
    if kernel in _override:
        return _override[kernel]
    arch = arch or arch_of(problem)
    if arch == "interpreter":
        return Config(16, 16, 4, 1)
    if problem.dtype == torch.float32:
        return _float32(arch, max(padded(problem.head_dim), padded(problem.head_dim_v)), kernel)
    config = _rows(problem, kernel, arch)[kernel]
    if config.tma and not (problem.aligned and problem.head_dim % 8 == 0 and problem.head_dim_v % 8 == 0):
        config = dataclasses.replace(config, tma=False)
    return config


def key_kernels(problem: Problem, arch: str | None = None) -> tuple[Kernel, ...]:
    """The kernels that make dk and dv: one for both, or one each where the table has tiles for dv alone.

    Apart they make the scores twice, but each holds half the sums, so that its tiles may be larger.
    """
    arch = arch or arch_of(problem)
    if "dkdv" in _override or "dv" in _override:
        apart = "dkdv" not in _override
    else:
        plain = arch == "interpreter" or problem.dtype == torch.float32
        apart = not plain and "dv" in _rows(problem, "dv", arch)
    return ("dk", "dv") if apart else ("dkdv",)


def _rows(problem: Problem, kernel: Kernel, arch: str) -> dict[str, Config]:
    """By kernel: the rows of a problem's table for its head dimensions."""
    dim = max(padded(problem.head_dim), padded(problem.head_dim_v))
    if arch in ("sm_90", "sm_100"):
        table, dim = _hopper_table(problem, kernel), max(64, dim)
    else:
        table = {"sm_80": _SM_80, "sm_86": _SM_86, "gfx942": _GFX942}[arch]
    rows = {name: configs[dim] for name, configs in table.items() if dim in configs}
    if arch in ("sm_80", "sm_86") and dim <= 128 and _has_features(problem):
        rows |= _FEATURED_SM_80
    return rows


def _has_features(problem: Problem) -> bool:
    """Whether scores take registers of their own: by a transform, a mask, a bias or dropout."""
    transformed = problem.softcap > 0 or problem.alibi or problem.bias_dtype is not None
    return transformed or problem.mask or problem.dropout_p > 0


def _hopper_table(problem: Problem, kernel: Kernel) -> _Table:
    if kernel == "dbias" or _has_features(problem):
        return _FEATURED_SM_90
    if problem.varlen:
        return _PACKED_SM_90
    if problem.band.unbounded:
        return _DENSE_SM_90
    return _SHORT_SM_90 if problem.seqlen_q <= 512 else _BANDED_SM_90


def _float32(arch: str, dim: int, kernel: Kernel) -> Config:
    # True float32 products run on the plain FMA units from registers: small tiles keep their operands there.
    size = 32 if dim <= 128 else 16
    stages = 2 if dim <= 64 and arch != "gfx942" else 1
    return Config(size, size, 4, stages, maxnreg=128 if kernel == "dq" and arch != "gfx942" and dim <= 64 else None)


_Table = dict[str, dict[int, Config]]

# Measured on an H200 (sm_90, Triton 3.6.0, bf16, 16k tokens of hidden size 2048, lengths 512, 2048 and 8192; 2026-11),
# against the flash kernel of PyTorch's SDPA in the same rounds; a row is the best over the three lengths together.
# - Four warps over 64 rows beat eight over 128: two or three programs share a multiprocessor, so one computes
#   exponentials while another multiplies, which nothing inside a program does here.
# - Descriptors free the registers that addresses took, and lose where the tiles are small anyway.
# - dk and dv at d 256 stand apart by what was measured of their mirror images, not by their own times: dk is dq, and dv
#   the forward, with rows and keys exchanged (8192 keys: 3.8 and 2.1 ms, together 6.0, against 6.9 for both at once).
#   In one loop ptxas serialises the WGMMA of both at once, a wait behind each.
_DENSE_SM_90: _Table = {
    "forward": {
        64: Config(64, 128, 4, 2, tma=True),
        128: Config(64, 64, 4, 3, tma=True),
        256: Config(128, 64, 8, 2, tma=True),
    },
    "dkdv": {
        64: Config(128, 64, 4, 2, tma=True),
        128: Config(64, 64, 4, 2, tma=True),
    },
    "dk": {256: Config(32, 128, 8, 2, tma=True)},
    "dv": {256: Config(64, 128, 8, 2, tma=True)},
    "dq": {
        64: Config(64, 64, 4, 3, tma=True),
        128: Config(128, 64, 8, 3),
        256: Config(128, 32, 8, 2, tma=True),
    },
}
# Under a band, smaller query tiles waste less of the diagonal. One loop instead of three takes the spills out of dkdv's
# hot loop: 87 reloads at d 128 become 1. With 168 registers three programs of dq share a multiprocessor.
_BANDED_SM_90: _Table = {
    "forward": {
        64: Config(64, 64, 4, 3),
        128: Config(64, 64, 4, 3, tma=True),
        256: Config(128, 64, 8, 2, tma=True),
    },
    "dkdv": {
        64: Config(64, 64, 4, 2, tma=True, one_loop=True),
        128: Config(64, 64, 4, 2, tma=True, one_loop=True),
    },
    "dk": {256: Config(32, 128, 8, 2, tma=True, one_loop=True)},
    "dv": {256: Config(64, 128, 8, 2, tma=True, one_loop=True)},
    "dq": {
        64: Config(64, 64, 4, 3, maxnreg=168),
        128: Config(128, 64, 8, 3),
        256: Config(128, 32, 8, 2),
    },
}
# At head_dim 256 one program fills a multiprocessor, and its first loads wait for nothing that runs beside them: with
# so few blocks a tile, two smaller ones without a pipeline are faster (512 keys, causal: 150 against 153 us).
_SHORT_SM_90: _Table = _BANDED_SM_90 | {
    "forward": _BANDED_SM_90["forward"] | {256: Config(64, 64, 4, 1, tma=True)},
}
# Descriptors know the end of the whole packed tensor alone, so masked blocks load by pointers, which takes registers:
# of the rows above those that stay without spills (dkdv at d 128 would spill 1888 bytes), else the next best.
_PACKED_SM_90: _Table = {
    "forward": {
        64: Config(64, 64, 4, 3),
        128: Config(64, 64, 4, 3, tma=True),
        256: Config(128, 64, 8, 2, tma=True),
    },
    "dkdv": {
        64: Config(64, 64, 4, 2, one_loop=True),
        128: Config(32, 128, 8, 3, one_loop=True),
    },
    "dk": {256: Config(32, 128, 8, 2, one_loop=True)},
    "dv": {256: Config(32, 128, 8, 3, one_loop=True)},
    "dq": {
        64: Config(64, 64, 4, 3, maxnreg=168),
        128: Config(128, 64, 8, 3),
        256: Config(128, 32, 8, 2),
    },
}
# Transforms, masks, bias and dropout take registers of their own; chosen by builds, not by time: two programs share a
# multiprocessor where their registers allow it, and no loop is one where a branch around that much code makes ptxas
# serialise the WGMMA beside it.
_FEATURED_SM_90: _Table = {
    "forward": {
        64: Config(64, 64, 4, 2, tma=True),
        128: Config(64, 64, 4, 2, tma=True),
        256: Config(64, 32, 4, 2, tma=True),
    },
    "dkdv": {
        64: Config(64, 64, 4, 2, tma=True),
        128: Config(32, 64, 4, 2, tma=True),
        256: Config(32, 64, 8, 2, tma=True),
    },
    "dq": {
        64: Config(64, 64, 4, 2, tma=True),
        128: Config(64, 32, 4, 2, tma=True),
        256: Config(128, 32, 8, 2, tma=True),
    },
    "dbias": {dim: Config(64, 64, 4, 2 if dim < 256 else 1) for dim in (64, 128, 256)},
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
# As _FEATURED_SM_90, by builds, for every head dim up to 128: tiles of the table above would spill up to 1 KB in dkdv.
_FEATURED_SM_80 = {
    "forward": Config(64, 32, 4, 2),
    "dkdv": Config(32, 64, 8, 2),
    "dq": Config(64, 32, 4, 2),
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
