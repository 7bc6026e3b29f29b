"""The entries of ``published.toml``, how ours is judged, and the page of the docs."""

from __future__ import annotations

import inspect
import itertools
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path

import torch

import flashtile
from flashtile.compat import flash_attn_2, flash_attn_3
from flashtile.core import states
from flashtile.core.errors import InvalidInputError
from flashtile_lab import analysis
from flashtile_lab.reproduce import _api, _rings, _rounding, _softmax, costs

# What expressions may name.
_MODULES = (math, itertools, analysis, _softmax, _rounding, _rings, _api, costs)
_NAMES = {name: value for module in _MODULES for name, value in vars(module).items()}
_NAMES |= {"attention": flashtile.attention, "merge": states.merge, "softmax": torch.softmax, "inspect": inspect}
_NAMES |= {"flash_attn_2": flash_attn_2, "flash_attn_3": flash_attn_3}
# A rounded decimal lies up to half a unit of its last place away, and a little more in binary.
_HALF_UNIT = 0.5 + 1e-6


@dataclass(frozen=True)
class Entry:
    """One published figure, as the head of ``published.toml`` explains it."""

    name: str
    what: str
    check: str
    published: str = ""
    ours: str = ""
    right: str = ""
    unit: str = ""
    why: str = ""


@dataclass(frozen=True)
class Result:
    """An entry with ours; ``good`` is False if its check failed, and then the verdict says so."""

    entry: Entry
    ours: str
    verdict: str
    good: bool

    def cells(self) -> tuple[str, str, str, str, str]:
        """Name, what, published, ours, and the verdict with its reason, for a table."""
        e = self.entry
        what = f"{e.what} ({e.unit})" if e.unit else e.what
        return e.name, what, e.published or "-", self.ours, f"{self.verdict}: {e.why}" if e.why else self.verdict


@cache
def sections() -> dict[str, tuple[str, tuple[Entry, ...]]]:
    """Title and entries of every section."""
    table = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))
    return {
        name: (given.pop("title"), tuple(Entry(each, **facts) for each, facts in given.items()))
        for name, given in table.items()
    }


@cache
def run(entry: Entry) -> Result:
    """Computes an entry, once in a process, and judges it."""
    kind, _, bound = entry.check.partition(" ")
    if kind == "left":
        return Result(entry, "-", entry.check, True)
    stated = [] if kind in ("below", "holds", "fails", "ours") else [Decimal(word) for word in entry.published.split()]
    made = eval(entry.ours, _NAMES | {"p": [float(each) for each in stated] if kind == "implies" else None})
    if kind in ("holds", "fails"):
        holds, finding = made
        good, verdict = holds == (kind == "holds"), "holds" if holds else "does not hold"
        return Result(entry, finding, verdict if good else f"FAILS: {verdict}", good)
    if kind == "below":
        good = all(abs(x) < float(bound) for x in made)
        return Result(entry, f"under {bound}" if good else _text(made), "holds" if good else "FAILS", good)
    same = kind != "implies" and bool(stated) and _equal(stated, made)
    if kind in ("differs", "implies", "ours"):
        right = [Decimal(word) for word in entry.right.split()]
        good = not same and _equal(right, made)
        return Result(entry, _text(made, right if good else ()), entry.check if good else "FAILS", good)
    if same:
        return Result(entry, _text(made, stated), "equal", True)
    distance = max(abs(x / float(y) - 1) if y else math.inf for x, y in zip(made, stated, strict=True))
    good = kind == "within" and distance <= float(bound.rstrip("%")) / 100
    return Result(entry, _text(made), entry.check if good else f"FAILS: {distance:.1%} apart", good)


def _equal(stated: Sequence[Decimal], made: Sequence[float]) -> bool:
    pairs = zip(stated, made, strict=True)
    return all(abs(x - float(each)) <= _HALF_UNIT * float(_unit(each)) for each, x in pairs)


def _unit(stated: Decimal) -> Decimal:
    """One in the last place that a number is printed to."""
    return Decimal((0, (1,), int(stated.as_tuple().exponent)))


def _text(made: Sequence[float], like: Sequence[Decimal] = ()) -> str:
    """Numbers with the places of others, or with three digits."""
    if like:
        return " ".join(f"{Decimal(x).quantize(_unit(each))}" for x, each in zip(made, like, strict=True))
    return " ".join(f"{x:.0f}" if abs(x) >= 1000 else f"{x:.3g}" for x in made)


def reproduce(name: str | None = None) -> Iterator[tuple[str, list[Result]]]:
    """Titles of sections with their results; ``name`` is an entry or a section, in any case.

    Raises:
        InvalidInputError: There is neither.
    """
    wanted, every = (name or "").lower(), sections()
    known = {*every, *(entry.name.lower() for _, section in every.values() for entry in section)}
    if wanted and wanted not in known:
        raise InvalidInputError("NAME", f"{name!r} is neither an entry, such as A1, nor one of {', '.join(every)}")
    for each, (title, section) in every.items():
        if found := [entry for entry in section if wanted in ("", each, entry.name.lower())]:
            yield title, [run(entry) for entry in found]


def markdown() -> str:
    """The page of the docs."""
    parts = [Path(__file__).with_name("page.md").read_text(encoding="utf-8").format(rows=costs.rows_from())]
    for title, results in reproduce():
        rows = [f"| {' | '.join(result.cells())} |" for result in results]
        parts += [f"## {title}\n", "| | what | published | ours | verdict |", "| --- " * 5 + "|", *rows, ""]
    return "\n".join(parts).rstrip()
