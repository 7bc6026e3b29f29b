"""Tiles, and the row of ``tiles.json`` that a call takes: by architecture, kernel, dtype, columns and mask.

The batch size and the length of packed sequences play no part, so that a sequence's result is bitwise the same whatever
else is in the batch. The length of dense sequences matters: short ones may have their own tiles.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flashtile.call.problem import Problem

# Shared memory a program may take, in bytes, by architecture.
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


@dataclass(frozen=True)
class PortableTiles:
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
        source: The user's file that the tiles are from; empty for ``tiles.json``.
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
    def parse(cls, name: str, source: str = "") -> PortableTiles:
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


Key = tuple[str, ...]
# What rows of tiles.json need not say.
_NOT_MEASURED_HERE = dict(table="", gain=1.0, flashtile="", triton="")


class Entry(NamedTuple):
    """A row of a file: for which calls, ``PortableTiles.name`` of their tiles, how many times as fast, who measured.

    In a user's file ``gpu`` and ``dtype`` are full names, ``head_dims`` keys' and values', ``mask`` is full,
    causal or window, and ``table`` the name of the tables' tiles without descriptors. In ``tiles.json`` they are an
    architecture, a dtype or 16 bits, the most columns, and what ``mask_of`` says.
    """

    gpu: str
    kernel: str
    dtype: str
    head_dims: str
    mask: str
    table: str
    tiles: str
    gain: float
    flashtile: str
    triton: str

    @property
    def key(self) -> Key:
        """For which calls."""
        return self[:6]


def for_repair(config: PortableTiles) -> PortableTiles:
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
    """The architecture of a problem's device, as rows say it."""
    if problem.device_type == "cpu":
        return "interpreter"
    if problem.compute_capability is None:
        return "gfx942"
    major, minor = problem.compute_capability
    if major >= 12 or (major == 8 and minor > 0):
        return "sm_86"
    return {8: "sm_80", 9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


def readable(problem: Problem, config: PortableTiles) -> PortableTiles:
    """The tiles without descriptors where these cannot read a problem's tensors."""
    return config if has_descriptors(problem) or not config.tma else dataclasses.replace(config, tma=False)


def has_descriptors(problem: Problem) -> bool:
    """Whether descriptors can read a problem's tensors."""
    return problem.aligned and problem.head_dim % 8 == 0 and problem.head_dim_v % 8 == 0


def columns_of(problem: Problem) -> int:
    """The columns that a row must be enough for; 192 of keys and 128 of values, as in latent attention, are 160."""
    dims = tile_dims(problem)
    return 160 if dims == (192, 128) else max(dims)


def mask_of(problem: Problem) -> str:
    """What rows call a call's mask: it takes rows of all these words before rows of the first ones alone."""
    p = problem
    one_tile = not p.varlen and p.seqlen_k <= 64  # a packed call's length is the longest of the batch
    if has_functions(p):
        from flashtile.mods.places import reads_pairs  # what few programs need is not loaded by all

        score = p.score_function
        return f"featured functions{' pairs' * (score is not None and reads_pairs(score.graph))}"
    if is_featured(p):
        # Without gaps, rows of a bias or mask of aligned lengths begin on 16 bytes.
        aligned = not p.varlen and p.seqlen_k % 8 == 0
        return "featured tile" if one_tile else f"featured{' aligned' * aligned}"
    if p.band.unbounded:
        return "full packed" if p.varlen else f"full{' tile' * one_tile}"
    if p.varlen:
        return "banded packed"
    if p.seqlen_q <= 512:
        return "banded short"
    if p.band.left is not None:
        return "banded window"
    return "banded grouped" if p.group_size > 1 else "banded"


def has_functions(problem: Problem) -> bool:
    """Whether a function of the user's, or a list of blocks, says something about single pairs."""
    return problem.score_function is not None or problem.mask_function is not None or problem.listed != ()


def is_featured(problem: Problem) -> bool:
    """Whether score mods, masks or dropout need registers of their own."""
    transformed = problem.softcap > 0 or problem.alibi or problem.bias_dtype is not None or has_functions(problem)
    return transformed or problem.mask or problem.dropout_p > 0


def from_rows(problem: Problem, kernel: str, arch: str | None = None) -> PortableTiles | None:
    """The tables' tiles of a kernel; None where they have no row, as of dkdv for calls that run dk and dv instead."""
    arch = arch or arch_of(problem)
    if arch == "interpreter":
        return PortableTiles(16, 16, 4, 1)
    row, columns = row_of(problem, kernel, arch), columns_of(problem)
    if row is None and problem.dtype == torch.float32:
        # By compiler reports: what these tiles take of registers and of shared memory every GPU has.
        size = 32 if columns <= 128 else 16
        return PortableTiles(size, size, 4, 2 if columns <= 64 and arch != "gfx942" else 1)
    if row is None:
        return None
    # A tile of several parts loads as many boxes, which pays where it was measured to.
    has_boxes = columns & (columns - 1) > 0 and int(row.head_dims) != columns
    found = readable(problem, _config(row.tiles))
    return dataclasses.replace(found, tma=False) if has_boxes else found


def row_of(problem: Problem, kernel: str, arch: str) -> Entry | None:
    """The row of ``tiles.json`` that a call takes, if there is one."""
    columns, dtype = columns_of(problem), str(problem.dtype)[6:]
    if arch == "sm_100" and dtype != "float32":
        arch = "sm_90"
    if dtype in ("float16", "bfloat16"):
        dtype = "16 bits"
    found = None
    if arch == "sm_90" and not has_descriptors(problem):
        found = narrowest(columns, "sm_90 pointers", kernel, dtype, "")
    return found or narrowest(columns, arch, kernel, dtype, mask_of(problem))


def narrowest(columns: int, gpu: str, kernel: str, dtype: str, mask: str) -> Entry | None:
    """The row for the fewest columns that are enough, among the rows of a mask and of the masks that begin it."""
    rows = _rows(gpu, kernel, dtype, mask)
    return next((rows[each] for each in rows if each >= columns), None)


@functools.cache
def _rows(gpu: str, kernel: str, dtype: str, mask: str) -> dict[int, Entry]:
    """By columns, the fewest first. A row of ``banded window`` hides one of ``banded``, and this one of any mask."""
    words = mask.split()
    masks = (" ".join(words[:count]) for count in range(len(words) + 1))
    found = {n: row for each in masks for n, row in shipped().get((gpu, kernel, dtype, each), {}).items()}
    return dict(sorted(found.items()))


@functools.cache
def shipped() -> dict[Key, dict[int, Entry]]:
    """The rows of ``tiles.json``, read once: by GPU, kernel, dtype and mask, then by columns."""
    found: dict[Key, dict[int, Entry]] = {}
    for row in parsed(Path(__file__).with_name("tiles.json").read_bytes(), _NOT_MEASURED_HERE):
        found.setdefault((row.gpu, row.kernel, row.dtype, row.mask), {})[int(row.head_dims)] = row
    return found


_config = functools.cache(PortableTiles.parse)


def parsed(text: bytes, unsaid: Mapping[str, Any] | None = None) -> list[Entry]:
    """The entries of a file's text, whatever their values.

    Args:
        text: What the file has.
        unsaid: Fields that its rows leave out.

    Raises:
        ValueError: It is no JSON, or a row, which is named, is none. Other errors: it is JSON of something else.
    """
    rows = []
    for number, row in enumerate(json.loads(text)["tiles"], 1):
        try:
            rows.append(Entry(**(unsaid or {}), **row))
            hash(rows[-1])  # lists have none
        except TypeError as error:
            raise ValueError(f"row {number}: {error}") from None
    return rows
