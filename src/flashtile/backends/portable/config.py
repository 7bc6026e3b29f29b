"""Tile sizes, chosen for each kernel by architecture, dtype, head dimensions and mask kind alone.

The batch size and the length of packed sequences play no part, so that a sequence's result is bitwise the same whatever
else is in the batch. The length of dense sequences matters: short ones may have their own tiles. The tables are in
``forward.config`` and ``backward.config``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from flashtile.backends.gpu.trial import tried
from flashtile.call.problem import Problem

# Shared memory a program may take, in bytes, by architecture.
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


@dataclass(frozen=True)
class Config:
    """Tiles of one kernel.

    Attributes:
        block_m: Query rows of a tile.
        block_n: Keys of a tile.
        num_warps: Warps per program, of 32 threads (64 on AMD).
        num_stages: Tiles in flight of the pipelined loads.
        tma: Load by tensor descriptors where the tensors allow it (sm_90 and later).
        one_loop: Visit every block in one loop with the mask under a branch, instead of one loop for the blocks that
            need it and one for those that do not: one pipeline to fill instead of two, and the registers of one loop
            alone. Bitwise the same result.
        mask_all: Without that branch: one loop that masks every block. Some branches make ptxas serialise WGMMA, with a
            wait after each; a comparison and a select per score may cost less. Bitwise the same result.
        maxnreg: Register limit per thread, for more programs on a multiprocessor; None for the compiler's choice.
        source: The file that the tiles are from, empty for a table's.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    one_loop: bool = False
    mask_all: bool = False
    maxnreg: int | None = None
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n"):
            size = getattr(self, name)
            if size < 16 or size > 256 or size & (size - 1):
                raise ValueError(f"{name} is {size}, must be a power of two from 16 to 256")
        if self.mask_all and not self.one_loop:
            raise ValueError("mask_all masks every block of one loop, so one_loop must be set too")
        for name, legal in (("num_warps", (1, 2, 4, 8, 16)), ("num_stages", range(1, 9))):
            if getattr(self, name) not in legal:
                raise ValueError(f"{name} is {getattr(self, name)}, must be one of {', '.join(map(str, legal))}")
        if self.maxnreg is not None and not 24 <= self.maxnreg <= 255:
            raise ValueError(f"maxnreg is {self.maxnreg}, must be from 24 to 255")

    @classmethod
    def parse(cls, name: str, source: str = "") -> Config:
        """Tiles from their ``name``.

        Raises:
            ValueError: It is none, or of tiles that are not legal.
        """
        found = re.fullmatch(r"(\d{1,3})x(\d{1,3})x(\d{1,3})x(\d{1,3})(?: (T?[OA]?))?(?: (\d{1,3}))?", name)
        if found is None:
            raise ValueError(f"{name!r} is not rows x keys x warps x stages, as 64x128x4x2 TA 168")
        flags, limit = found[5] or "", found[6]
        block_m, block_n, num_warps, num_stages = (int(number) for number in found.groups()[:4])
        loops = "O" in flags or "A" in flags, "A" in flags
        maxnreg = int(limit) if limit else None
        return cls(block_m, block_n, num_warps, num_stages, "T" in flags, *loops, maxnreg, source)

    @property
    def name(self) -> str:
        """Rows x keys x warps x stages; T for descriptors, O for one loop, A for one that masks all; maxnreg."""
        flags = "T" * self.tma + ("A" if self.mask_all else "O" * self.one_loop)
        sizes = f"{self.block_m}x{self.block_n}x{self.num_warps}x{self.num_stages}"
        return " ".join(filter(None, (sizes, flags, str(self.maxnreg or ""))))

    def options(self) -> dict[str, int]:
        """Triton's launch options, besides the kernel's arguments."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}

    def __str__(self) -> str:
        text = f"{self.block_m}x{self.block_n}, {self.num_warps} warps, {self.num_stages} stages"
        return (
            text
            + (", TMA" if self.tma else "")
            + (", one loop" if self.one_loop else "")
            + (", all masked" if self.mask_all else "")
            + (f", tuned ({self.source})" if self.source else "")
        )


def for_repair(config: Config) -> Config:
    """Tiles of a kernel that ``repair`` launches: nearly all of its programs end at once, so many run side by side."""
    return dataclasses.replace(config, num_stages=1, tma=False, one_loop=True, maxnreg=None, source="")


def padded(dim: int) -> int:
    """The power of two, at least 16, that holds a head dimension, as matrix instructions need."""
    return max(16, 1 << (dim - 1).bit_length())


def in_parts(dim: int, dtype: torch.dtype) -> int:
    """The columns of tiles that hold a head dimension: a power of two, or one and a half of one from 96 on.

    From 192 on of float32, which is multiplied as bfloat16: of tiles of 64 and of 32 columns, which differ in their
    swizzle, ptxas loses descriptors as ``padded_dims`` says. Addresses were then out of range, and dq wrong.
    """
    whole, least = padded(dim), 256 if dtype == torch.float32 else 128
    return whole * 3 // 4 if dim <= whole * 3 // 4 and whole >= least else whole


def tile_dims(problem: Problem) -> tuple[int, int]:
    """``in_parts`` of both head dimensions, the smaller one at least as large as the other up to 64."""
    dim, dim_v = (in_parts(each, problem.dtype) for each in (problem.head_dim, problem.head_dim_v))
    return max(dim, min(dim_v, 64)), max(dim_v, min(dim, 64))


def padded_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """``padded`` of both head dimensions, the smaller one at least as large as the other up to 64.

    Tiles of 16, 32 and from 64 columns differ in their swizzle, so in the upper half of their matrix descriptors. Where
    K and V alternate in the same shared memory, ptxas 12.8 loses the lower half when it makes the second descriptor
    (seen in the SASS for sm_90a: the addresses come from a register that is never written). Tiles with the same swizzle
    share their descriptors.
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


# By kind of call, as ``kind_of`` names it, and by kernel: tiles for some widths; what lies between takes the next.
Tables = Mapping[str, Mapping[str, Mapping[int, Config]]]


def select(problem: Problem, kernel: str, tables: Tables, arch: str | None) -> Config:
    """The tiles of a kernel, of a call with lists such that they divide listed blocks.

    Args:
        problem: The call.
        kernel: Which kernel.
        tables: The direction's.
        arch: Architecture to use instead of the problem's device.
    """
    found = _select(problem, kernel, tables, arch)
    if not problem.listed:
        return found
    # The largest powers of two that divide them.
    tiles, blocks = (found.block_m, found.block_n), problem.listed[:2]
    block_m, block_n = (min(n, of & -of) for n, of in zip(tiles, blocks, strict=True))
    return dataclasses.replace(found, block_m=block_m, block_n=block_n)


def _select(problem: Problem, kernel: str, tables: Tables, arch: str | None) -> Config:
    if (held := tried(kernel)) is not None:
        return held
    arch = arch or arch_of(problem)
    if arch == "interpreter":
        return Config(16, 16, 4, 1)
    if problem.dtype == torch.float32:
        return _float32(problem, kernel, arch)
    rows, columns = tables[kind_of(problem, arch)][kernel], dim_of(problem)
    found = row_of(rows, columns)
    assert found is not None
    if columns & (columns - 1) and columns not in rows:
        # A tile of several parts loads as many boxes, which pays where it was measured to.
        found = dataclasses.replace(found, tma=False)
    if arch in ("sm_90", "sm_100") and not has_descriptors(problem):
        found = row_of(_BY_POINTERS.get(kernel, {}), columns) or found
    return readable(problem, found)


def row_of(rows: Mapping[int, Config], columns: int) -> Config | None:
    """The tiles of a table for the fewest columns that are enough, if there are any."""
    return next((rows[each] for each in sorted(rows) if each >= columns), None)


def readable(problem: Problem, config: Config) -> Config:
    """The tiles without descriptors where these cannot read a problem's tensors."""
    return config if has_descriptors(problem) or not config.tma else dataclasses.replace(config, tma=False)


def has_descriptors(problem: Problem) -> bool:
    """Whether descriptors can read a problem's tensors."""
    return problem.aligned and problem.head_dim % 8 == 0 and problem.head_dim_v % 8 == 0


def dim_of(problem: Problem) -> int:
    """The columns that a table must have tiles for; 192 of keys and 128 of values, as in latent attention, are 160."""
    dims = tile_dims(problem)
    return 160 if dims == (192, 128) else max(dims)


def kind_of(problem: Problem, arch: str) -> str:
    """Which rows of the tables a call has: ``"sm_80"``, ``"sm_90 dense"``, ``"sm_90 featured"`` and so on."""
    featured = is_featured(problem)
    if arch in ("sm_90", "sm_100"):
        # Of packed sequences not by the longest, which is of the batch.
        tile = "" if problem.varlen or problem.seqlen_k > 64 else " tile"
        if problem.score_function is not None or problem.mask_function is not None or problem.listed:
            from flashtile.mods.places import reads_pairs  # what few programs need is not loaded by all

            score = problem.score_function
            return f"sm_90 {'pairs' if score is not None and reads_pairs(score.graph) else 'functions'}"
        if featured:
            # Rows of a bias or mask without gaps begin on 16 bytes then.
            return f"sm_90 featured{tile or ' aligned' * (not problem.varlen and problem.seqlen_k % 8 == 0)}"
        if problem.band.unbounded:
            return f"sm_90 dense{' packed' if problem.varlen else tile}"
        if problem.varlen:
            return "sm_90 banded packed"
        if problem.seqlen_q <= 512:
            return "sm_90 short"
        if problem.band.left is not None:
            return "sm_90 window"
        return "sm_90 grouped" if problem.group_size > 1 else "sm_90 banded"
    small = max(problem.head_dim, problem.head_dim_v) <= 128
    return f"{arch} featured" if featured and small and arch in ("sm_80", "sm_86") else arch


def is_featured(problem: Problem) -> bool:
    """Whether score mods, masks or dropout need registers of their own."""
    functions = problem.score_function is not None or problem.mask_function is not None or problem.listed != ()
    transformed = problem.softcap > 0 or problem.alibi or problem.bias_dtype is not None or functions
    return transformed or problem.mask or problem.dropout_p > 0


# Where descriptors cannot read a call's tensors: each number's address takes registers. By compiler reports (Triton
# 3.6.0, 3.7.1, 3.9.0): 72 bytes spilled at most up to 128 columns, where the tables' tiles spill up to 2.5 KB.
_BY_POINTERS = {
    "forward": {
        64: Config(64, 64, 4, 3),
        96: Config(64, 64, 4, 2),
        128: Config(128, 32, 8, 2),
        256: Config(64, 32, 8, 2),
    },
    "dkdv": {
        64: Config(64, 64, 4, 2, one_loop=True),
        96: Config(32, 64, 8, 2, one_loop=True),
        128: Config(64, 64, 8, 2, one_loop=True),
    },
    "dq": {64: Config(64, 64, 4, 3), 96: Config(64, 32, 4, 2), 128: Config(128, 32, 8, 2)},
}

# Past 256. Without the limit ptxas gives up on so many numbers: 32 registers a thread, and 9 KB spilled.
_FLOAT32_BIG = Config(16, 16, 4, 1, maxnreg=255)
_FLOAT32_BIG_DKDV = dataclasses.replace(_FLOAT32_BIG, num_warps=8)
# float32 on sm_90, with six products of bfloat16, a third to a tenth of IEEE's time: docs/tuning-notes.md. dbias is by
# compiler reports: no spill at 64, 240 bytes at 128.
_FLOAT32_SM_90 = {
    "forward": {128: Config(64, 64, 4, 1), 256: Config(64, 16, 4, 1), 512: _FLOAT32_BIG},
    "dkdv": {64: Config(64, 64, 4, 1), 128: Config(32, 32, 4, 2), 256: Config(16, 64, 4, 1), 512: _FLOAT32_BIG_DKDV},
    "dq": {64: Config(64, 64, 4, 1), 128: Config(128, 32, 8, 1), 256: Config(64, 16, 4, 1), 512: _FLOAT32_BIG},
    "dbias": {64: Config(64, 32, 4, 1), 256: Config(64, 16, 4, 1), 512: _FLOAT32_BIG},
}
_FLOAT32_SM_90["diagonals"] = _FLOAT32_SM_90["dbias"]


def _float32(problem: Problem, kernel: str, arch: str) -> Config:
    dim = max(padded(problem.head_dim), padded(problem.head_dim_v))
    if arch == "sm_90" and kernel in _FLOAT32_SM_90:
        found = row_of(_FLOAT32_SM_90[kernel], dim)
        assert found is not None
        return found
    # By compiler reports: what these tiles take of registers and of shared memory every GPU has.
    size = 32 if dim <= 128 else 16
    return Config(size, size, 4, 2 if dim <= 64 and arch != "gfx942" else 1)
