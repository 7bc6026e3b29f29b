"""Tiles that ``flashtile tune`` measured on a GPU: the file they are saved in, who may write it, which calls take them.

Neither the batch nor a length says which, nor whether sequences are packed, but for what the tables make of these:
calls that have the same tiles there have the same tuned tiles, so results that are bitwise the same stay so.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from flashtile.backends.gpu.trial import on_trial, tried
from flashtile.backends.portable import config
from flashtile.backends.portable.config import Entry, Key, PortableTiles
from flashtile.call.problem import Problem
from flashtile.core import settings, trusted
from flashtile.core.errors import InvalidInputError, shown

KERNELS = ("forward", "dkdv", "dk", "dv", "dq")
# The backward pads the rows of delta for tiles of no more.
MAX_TILE = 128
T = TypeVar("T")


def why_not(entry: Entry) -> str:
    """Why calls do not take an entry of a user's file here, empty if they do."""
    if entry.kernel not in KERNELS:
        return f"kernel is {shown(entry.kernel)}, must be one of {', '.join(KERNELS)}"
    try:
        tiles = PortableTiles.parse(entry.tiles)
    except (ValueError, TypeError) as error:
        return f"tiles: {error}"
    if max(tiles.block_m, tiles.block_n) > MAX_TILE:
        return f"tiles: {entry.tiles} has more than {MAX_TILE} rows or keys"
    return "" if entry[8:] == versions() else f"measured with flashtile {entry.flashtile}, Triton {entry.triton}"


def key_of(problem: Problem, kernel: str, table: PortableTiles) -> Key:
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
def _without_descriptors(table: PortableTiles) -> str:
    return dataclasses.replace(table, tma=False).name


def choose(problem: Problem, kernel: str, arch: str | None = None) -> PortableTiles:
    """The tiles of a kernel: what is on trial, else what was measured here, else the tables'.

    Args:
        problem: The call.
        kernel: Which kernel.
        arch: Architecture to use instead of the problem's device; nothing is measured for one that is named.
    """
    held = tried(kernel)
    table = config.from_rows(problem, kernel, arch) if held is None else held
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
def known() -> dict[Key, PortableTiles]:
    """The tiles that calls of this process take, read once."""
    place = path()
    try:
        entries = [] if place is None else read(place)
    except InvalidInputError as error:
        _warn(f"tuned tiles are not used: {error}")
        return {}
    for number, entry in enumerate(entries, 1):
        if why_not(entry) and not why_not(entry).startswith("measured"):
            _warn(f"{place}: row {number} is not used: {why_not(entry)}")
    return {entry.key: PortableTiles.parse(entry.tiles, str(place)) for entry in entries if not why_not(entry)}


def path() -> Path | None:
    """Where entries are; None where calls are to take none."""
    named = settings.TILES.text() or Path(settings.CONFIG_HOME.text(), "flashtile/tiles.json")
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
            rows = config.parsed(file.read())
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
