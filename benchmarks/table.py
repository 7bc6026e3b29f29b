"""Makes tables from rows: which rows count, ratios to peers, geometric means, Markdown and plain text.

Clocks move between processes, so a ratio is taken within one run only. A cell shows the last run that timed both one of
our providers and a peer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import bounds
from benchmarks.caches import DecodeCase
from benchmarks.cases import Case
from benchmarks.latent import LatentCase
from benchmarks.providers import OURS, PROVIDERS
from benchmarks.results import Row
from benchmarks.selections import BlockCell, TokenCell
from benchmarks.steps import StepCase

BEST_PEER = "best peer"
# A cell is lost, on every page, if ours has less than this share of another's speed.
LOST = 0.95
# Providers of the cells of rounding to 8 bits; a copy counts as the peer.
ROUNDING, COPY = f"{OURS}-quantize", "copy"
# The column with ``Cell.bound``.
BOUND = "share of bound"
UNITS: dict[str, Callable[[Row], float | None]] = {
    "TFLOPS": lambda r: r.tflops,
    "ms": lambda r: r.median_ms,
    "us": lambda r: None if r.median_ms is None else 1e3 * r.median_ms,
    "GB/s": lambda r: None if r.median_ms is None else case_of(r).gb_per_s(r.median_ms),
}


@dataclass(frozen=True)
class Cell:
    """One case, a ``Case``, ``DecodeCase`` or ``StepCase``, in one run: its rows by provider."""

    case: Any
    rows: dict[str, Row]

    def time(self, provider: str) -> float | None:
        """Median milliseconds of a provider or of the best peer, None if it was not timed."""
        if provider == BEST_PEER:
            peers = [t for name in self.rows if not name.startswith(OURS) if (t := self.time(name)) is not None]
            return min(peers, default=None)
        row = self.rows.get(provider)
        return row.median_ms if row else None

    def ratio(self, provider: str, against: str) -> float | None:
        """How many times faster a provider is than another, None if either was not timed."""
        ours, theirs = self.time(provider), self.time(against)
        return theirs / ours if ours is not None and theirs is not None else None

    def bound(self) -> str:
        """The share that our fastest time is of the rate that bounds the cell, as text."""
        timed = [(t, name) for name in ours(self.rows) if (t := self.time(name)) is not None]
        return bounds.shown(self.rows[min(timed)[1]], self.case) if timed else ""


def case_of(row: Row) -> Any:
    """The cell that a row is about."""
    kinds: dict[str, Callable[..., Any]] = {"decode": DecodeCase, "serving": StepCase, "mla": LatentCase}
    kinds["selected"] = BlockCell if "rows" in row.case else TokenCell
    if row.suite == "mods":
        from benchmarks.mods import Cell as ModCell  # which prints by this module

        kinds["mods"] = ModCell
    return kinds[row.suite](**row.case) if row.suite in kinds else Case.from_dict(row.case)


def cells(rows: Iterable[Row]) -> list[Cell]:
    """One cell per case, from the last run that timed ours and a peer; cases in the order of first appearance."""
    runs: dict[Any, dict[str, dict[str, Row]]] = {}
    for row in rows:
        runs.setdefault(case_of(row), {}).setdefault(row.run, {})[row.provider] = row
    found = []
    for case, by_run in runs.items():
        candidates = [Cell(case, by_run[run]) for run in sorted(by_run)]
        compared = [c for c in candidates if any(c.ratio(name, BEST_PEER) for name in ours(c.rows))]
        found.append((compared or candidates)[-1])
    return found


def ours(names: Iterable[str]) -> list[str]:
    """The names that are this library's providers."""
    return [name for name in in_order(names) if name.startswith(OURS)]


def geomean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers, at least one."""
    if not values:
        raise ValueError("geomean of nothing")
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def in_order(names: Iterable[str]) -> list[str]:
    """Names of providers in the order of tables and legends, ours first."""
    known = list(PROVIDERS)
    place = {name: known.index(name) if name in known else len(known) for name in names}
    return sorted(place, key=lambda name: (not name.startswith(OURS), place[name], name))


def providers(grid: Sequence[Cell]) -> list[str]:
    """Every provider with a row in some cell."""
    return in_order(name for cell in grid for name in cell.rows)


@dataclass(frozen=True)
class Summary:
    """Speed of one of our providers over a peer, or over each cell's best peer, in all cells; over 1 is faster."""

    provider: str
    against: str
    ratios: dict[str, float]  # by cell

    def line(self) -> list[str]:
        """Number of cells, how many were lost, geometric mean, best and worst ratio, worst cell."""
        values = list(self.ratios.values())
        lost = sum(r < LOST for r in values)
        numbers = [f"{x:.3f}" for x in (geomean(values), max(values), min(values))]
        return [str(len(values)), str(lost), *numbers, min(self.ratios, key=self.ratios.__getitem__)]


def summaries(grid: Sequence[Cell]) -> list[Summary]:
    """One for each of our providers against each peer and the best."""
    names = providers(grid)
    found = []
    for provider in ours(names):
        for against in (*names[len(ours(names)) :], BEST_PEER):
            ratios = {c.case.name: r for c in grid if (r := c.ratio(provider, against)) is not None}
            if ratios:
                found.append(Summary(provider, against, ratios))
    return found


Table = list[list[str]]


def speed_table(grid: Sequence[Cell], unit: str = "TFLOPS", against: str = BEST_PEER) -> Table:
    """A row per cell: every provider's speed, ours over the best peer's or a certain one's, its share of the bound."""
    names = providers(grid)
    columns = [(name, against) for name in ours(names)]
    short = {name: name.removeprefix("flashtile-") for name in names}
    table = [[f"cell ({unit})", *short.values(), *(f"{short[name]} / {p}" for name, p in columns), BOUND]]
    for cell in grid:
        ratios = ["" if (ratio := cell.ratio(*pair)) is None else f"{ratio:.2f}" for pair in columns]
        speeds = [_speed(cell.rows.get(name), unit) for name in names]
        table.append([cell.case.name, *speeds, *ratios, cell.bound()])
    return table


def changes_table(grid: Sequence[Cell]) -> Table:
    """The Hopper forward's TFLOPS, and how fast the others are beside it: what a change of its design costs."""
    design = f"{OURS}-hopper"
    names = [name for name in providers(grid) if name != design]
    table = [["cell", f"{design}, TFLOPS", *(name.removeprefix(f"{design}-") for name in names), BOUND]]
    for cell in grid:
        ratios = ["-" if (ratio := cell.ratio(name, design)) is None else f"{ratio:.3f}" for name in names]
        share = bounds.shown(cell.rows.get(design), cell.case)
        table.append([cell.case.name, _speed(cell.rows.get(design), "TFLOPS"), *ratios, share])
    return table


def fp8_table(grid: Sequence[Cell]) -> Table:
    """The cells of attention in 8 bits: TFLOPS, and ours over cuDNN's."""
    return speed_table([cell for cell in grid if COPY not in cell.rows], against="cudnn-fp8")


def fp8_summary(grid: Sequence[Cell]) -> Table:
    """Ours in 8 bits over cuDNN's and over ours in 16 bits, by head_dim."""
    lines = [["head_dim", "provider", *SUMMARY_HEAD]]
    own = f"{OURS}-hopper"
    for dim in sorted({cell.case.head_dim for cell in grid}):
        for pair in ((f"{own}-fp8", "cudnn-fp8"), (f"{own}-fp8", own), (f"{own}-fp8-call", own)):
            ratios = {c.case.name: r for c in grid if c.case.head_dim == dim and (r := c.ratio(*pair)) is not None}
            lines += [[str(dim), *pair, *Summary(*pair, ratios).line()]] if ratios else []
    return lines


def rounding_table(grid: Sequence[Cell]) -> Table:
    """The time of rounding q, k and v to 8 bits, and its rate over a copy's of as many bytes."""
    lines = [["rounding q, k and v", "us", "share of a copy's rate"]]
    for cell in grid:
        own, share = cell.time(ROUNDING), cell.ratio(ROUNDING, COPY)
        if own and share:
            c = cell.case
            name = f"{c.batch} x {c.seqlen_k} rows, {c.num_heads_kv} heads of {c.head_dim}"
            lines.append([name, f"{own * 1e3:.1f}", f"{share:.2f}"])
    return lines


SUMMARY_HEAD = ["against", "cells", "lost", "geomean", "best", "worst", "worst cell"]


def summary_table(grid: Sequence[Cell]) -> Table:
    """The summaries as a table."""
    return [["provider", *SUMMARY_HEAD], *([s.provider, s.against, *s.line()] for s in summaries(grid))]


def problems(grid: Sequence[Cell]) -> list[str]:
    """Failures and refusals, one line each."""
    failed = [(c.case.name, name, r.error) for c in grid for name, r in c.rows.items() if isinstance(r.error, str)]
    return [f"{case}: {name}: {error.strip().splitlines()[0]}" for case, name, error in failed]


def _speed(row: Row | None, unit: str) -> str:
    if row is None:
        return ""
    value = UNITS[unit](row)
    if value is None:
        kind = str(row.error).split(":")[0]
        return kind if kind in ("wrong", "failed") else "-"
    if unit == "GB/s":
        return f"{value:.0f} ({1e3 * (row.median_ms or 0):.1f} us)"
    if unit == "us":
        return f"{value:.1f}"
    return f"{value:.0f}" if unit == "TFLOPS" and value >= 10 else f"{value:.3g}"


def to_text(table: Table) -> str:
    """Columns aligned with spaces: the first to the left, the rest to the right."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]

    def line(row: list[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(table[0]), "  ".join("-" * w for w in widths), *map(line, table[1:])])


def to_markdown(table: Table) -> str:
    """A Markdown table."""
    rule = ["---", *("---:" for _ in table[0][1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (table[0], rule, *table[1:]))


def report(rows: Iterable[Row], unit: str = "TFLOPS") -> str:
    """The text that a run prints at the end: speeds, ratios and failures."""
    grid = cells(rows)
    if not grid:
        return "no cells"
    parts = [to_text(speed_table(grid, unit))]
    if summaries(grid):
        parts.append("speed over peers (over 1 is faster)\n" + to_text(summary_table(grid)))
    if problems(grid):
        parts.append("not timed\n" + "\n".join(problems(grid)))
    return "\n\n".join(parts)
