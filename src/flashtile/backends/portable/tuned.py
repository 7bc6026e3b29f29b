"""Rows of tiles and the calls that take them: the tables' in ``tiles.json``, and what ``flashtile tune`` measured.

Neither the batch nor a length says which measured row, nor whether sequences are packed, but for what the tables make
of these: calls that have the same tiles there have the same measured tiles, so what is bitwise the same stays so.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from flashtile.backends.gpu.trial import on_trial, tried
from flashtile.backends.portable import config
from flashtile.backends.portable.config import Config
from flashtile.call.problem import Problem
from flashtile.core import settings, trusted
from flashtile.core.errors import InvalidInputError, shown

KERNELS = ("forward", "dkdv", "dk", "dv", "dq")
# The backward pads the rows of delta for tiles of no more.
MAX_TILE = 128
# What rows of tiles.json need not say.
_NOT_MEASURED_HERE = {"table": "", "gain": 1.0, "flashtile": "", "triton": ""}
Key = tuple[str, ...]
T = TypeVar("T")


class Entry(NamedTuple):
    """A row of a file: for which calls, ``Config.name`` of their tiles, how many times as fast, and who measured.

    In a user's file ``gpu`` and ``dtype`` are full names, ``head_dims`` those of keys and values, ``mask`` is full,
    causal or window, and ``table`` the name of the tables' tiles without descriptors. In ``tiles.json`` they are an
    architecture, a dtype or 16 bits, the most columns, and what ``config.mask_of`` says.
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

    def why_not(self) -> str:
        """Why calls do not take it here, empty if they do."""
        if self.kernel not in KERNELS:
            return f"kernel is {shown(self.kernel)}, must be one of {', '.join(KERNELS)}"
        try:
            tiles = Config.parse(self.tiles)
        except (ValueError, TypeError) as error:
            return f"tiles: {error}"
        if max(tiles.block_m, tiles.block_n) > MAX_TILE:
            return f"tiles: {self.tiles} has more than {MAX_TILE} rows or keys"
        return "" if self[8:] == versions() else f"measured with flashtile {self.flashtile}, Triton {self.triton}"


def key_of(problem: Problem, kernel: str, table: Config) -> Key:
    """The key of a call for which the tables have some tiles; empty where it takes no tuned ones.

    Those with features take registers of their own, results in another dtype shared memory; a GPU may not be here.
    """
    p = problem
    gpu = "Triton's interpreter" if p.device_type == "cpu" else p.gpu
    if not gpu or config.is_featured(p) or not p.dtype == p.out_dtype == p.grad_dtype:
        return ()
    mask = "full" if p.band.unbounded else "causal" if p.band.left is None else "window"
    return gpu, kernel, str(p.dtype)[6:], f"{p.head_dim}/{p.head_dim_v}", mask, _without_descriptors(table)


@functools.cache
def _without_descriptors(table: Config) -> str:
    return dataclasses.replace(table, tma=False).name


def choose(problem: Problem, kernel: str, arch: str | None = None) -> Config:
    """The tiles of a kernel: what is on trial, else what was measured here, else the tables'.

    Args:
        problem: The call.
        kernel: Which kernel.
        arch: Architecture to use instead of the problem's device; nothing is measured for one that is named.
    """
    held = tried(kernel)
    table = from_rows(problem, kernel, arch) if held is None else held
    assert table is not None, f"tiles.json has no row of {kernel} for {problem}"
    if problem.listed:
        # The largest powers of two that divide listed blocks.
        tiles, blocks = (table.block_m, table.block_n), problem.listed[:2]
        block_m, block_n = (min(n, of & -of) for n, of in zip(tiles, blocks, strict=True))
        table = dataclasses.replace(table, block_m=block_m, block_n=block_n)
    if arch is not None or not known() or held is not None:
        return table
    found = known().get(key_of(problem, kernel, table))
    return table if found is None else config.readable(problem, found)


def from_rows(problem: Problem, kernel: str, arch: str | None = None) -> Config | None:
    """The tables' tiles of a kernel; None where they have no row, as of dkdv for calls that run dk and dv instead."""
    arch = arch or config.arch_of(problem)
    if arch == "interpreter":
        return Config(16, 16, 4, 1)
    row, columns = row_of(problem, kernel, arch), config.columns_of(problem)
    if row is None and problem.dtype == torch.float32:
        # By compiler reports: what these tiles take of registers and of shared memory every GPU has.
        size = 32 if columns <= 128 else 16
        return Config(size, size, 4, 2 if columns <= 64 and arch != "gfx942" else 1)
    if row is None:
        return None
    # A tile of several parts loads as many boxes, which pays where it was measured to.
    has_boxes = columns & (columns - 1) > 0 and int(row.head_dims) != columns
    found = config.readable(problem, _config(row.tiles))
    return dataclasses.replace(found, tma=False) if has_boxes else found


def row_of(problem: Problem, kernel: str, arch: str) -> Entry | None:
    """The row of ``tiles.json`` that a call takes, if there is one."""
    columns, dtype = config.columns_of(problem), str(problem.dtype)[6:]
    if arch == "sm_100" and dtype != "float32":
        arch = "sm_90"
    if dtype in ("float16", "bfloat16"):
        dtype = "16 bits"
    found = None
    if arch == "sm_90" and not config.has_descriptors(problem):
        found = narrowest(columns, "sm_90 pointers", kernel, dtype, "")
    return found or narrowest(columns, arch, kernel, dtype, config.mask_of(problem))


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


_config = functools.cache(Config.parse)


def or_tables(make: Callable[[], T]) -> T:
    """What ``make`` makes; where a build fails with tuned tiles, what it makes without any from then on."""
    try:
        return make()
    except Exception as error:
        if on_trial() or not known():
            raise
        _warn(f"tuned tiles are not used any more, a kernel was not built: {error}")
        known().clear()
        return make()


@functools.cache
def known() -> dict[Key, Config]:
    """The tiles that calls of this process take, read once."""
    place = path()
    try:
        entries = [] if place is None else read(place)
    except InvalidInputError as error:
        _warn(f"tuned tiles are not used: {error}")
        return {}
    for number, entry in enumerate(entries, 1):
        if entry.why_not() and not entry.why_not().startswith("measured"):
            _warn(f"{place}: row {number} is not used: {entry.why_not()}")
    return {entry.key: Config.parse(entry.tiles, str(place)) for entry in entries if not entry.why_not()}


def path() -> Path | None:
    """Where entries are; None where calls are to take none."""
    named = settings.TILES.text() or Path(settings.CONFIG_HOME.text(), "flashtile", "tiles.json")
    return None if settings.TILES.get() == "off" else Path(os.path.expanduser(named))


def versions() -> tuple[str, ...]:
    """The versions of flashtile and of Triton, this one read from its source: planning a call does not import it."""
    spec = find_spec("triton")
    text = "" if spec is None or spec.origin is None else Path(spec.origin).read_text(encoding="utf-8")
    found = re.search(r"^__version__ = ['\"](.+?)['\"]", text, re.MULTILINE)
    # To import flashtile from below its layers is not allowed.
    return sys.modules["flashtile"].__version__, found[1] if found else "none"


def read(place: Path) -> list[Entry]:
    """The file's entries, whatever their values; none if there is no file.

    Raises:
        InvalidInputError: Naming the file, which somebody else may write or ``flashtile tune`` did not.
    """
    why, rows = "", list[Entry]()
    try:
        with trusted.opened(place) as file:
            rows = parsed(file.read())
    except FileNotFoundError:
        pass
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except trusted.UntrustedError as error:
        why = str(error)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        why = f"is not of flashtile tune: {type(error).__name__}: {shown(str(error))}"
    if why:
        raise InvalidInputError(str(place), why)
    return rows


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


def write(place: Path, entries: Iterable[Entry]) -> None:
    """Replaces the file at once; its owner alone may read and write it.

    Raises:
        InvalidInputError: Naming the file, if it cannot be written.
    """
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = json.dumps({"tiles": [entry._asdict() for entry in entries]}, indent=1)
        trusted.replace(place, [text.encode()], 0o600)
    except OSError as error:
        raise InvalidInputError(str(place), f"cannot be written: {error.strerror}") from None
    known.cache_clear()


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
