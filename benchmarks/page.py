"""The tables of the README, of the pages of performance and of docs/fp8.md, written from saved rows.

A generated table is between ``<!-- table: NAME -->`` and ``<!-- end -->``; text outside is unchanged.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks import (
    accuracy,
    bounds,
    decode,
    first_call,
    loop,
    measured,
    mla,
    selected,
    serving,
    table,
    train,
    varlen,
)
from benchmarks.providers import OURS
from benchmarks.results import ROOT, Row, latest, of_suite
from benchmarks.table import Cell

Block = Callable[[list[Row]], str]

DOCS_PAGES = tuple(ROOT / n for n in ("docs/performance.md", "docs/performance-tables.md", "docs/fp8.md", "README.md"))

_BLOCK = re.compile(r"(<!-- table: (?P<name>[a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _with_source(rows: Sequence[Row], *tables: table.Table) -> str:
    """One line with the source of the numbers, then the tables."""
    last = rows[-1]
    versions = ", ".join(f"{name} {version}" for name, version in last.versions.items())
    commits = ", ".join(dict.fromkeys(row.commit for row in rows))
    return "\n\n".join([f"{last.device}; {versions}; commit {commits}.", *map(table.to_markdown, tables)])


# Suite -> what its lost cells are listed under. Ours is what a user gets: of ``fp8`` after rounding, of ``mods`` with
# lists of a mask's blocks, which FlexAttention has too.
_PLACES: dict[str, Callable[[Any], str]] = {
    "forward": lambda c: f"forward, {c.mask}, head_dim {c.head_dim}",
    "backward": lambda c: f"backward, {c.mask}, head_dim {c.head_dim}",
    "models": lambda c: f"{c.direction}, {c.model}",
    "uses": lambda c: f"{c.direction}, {c.model}",
    "varlen": lambda c: f"packed {c.direction}, {c.mask}, head_dim {c.head_dim}",
    "big-heads": lambda c: f"{c.direction}, {c.mask}, head_dim {c.head_dim}",
    "mods": lambda c: f"{c.direction}, a function: {c.mod}, head_dim {c.head_dim}",
    "fp8": lambda c: f"8 bits, {c.mask}, head_dim {c.head_dim}",
    "decode": lambda c: f"decode, {c.num_heads_q} heads over {c.num_heads_kv} of {c.head_dim}",
    "serving": lambda c: f"a server's step, {c.step}, {c.num_heads_q} heads over {c.num_heads_kv} of {c.head_dim}",
    "mla": lambda c: f"latent rows, {c.num_heads_q} heads, queries of {c.seqlen_q}",
}
REASONS = ROOT / "benchmarks" / "reasons.json"
UNKNOWN = "not profiled"


@functools.cache
def reasons() -> dict[str, dict[str, str]]:
    """Why cells are lost, from profiles, by suite and by a pattern of cells' names; kept by hand."""
    found: dict[str, dict[str, str]] = json.loads(REASONS.read_text(encoding="utf-8"))
    return found


def _with_ours(rows: Sequence[Row], ours: str) -> list[Row]:
    """The rows of runs that timed a provider, but for those of first calls."""
    runs = {row.run for row in rows if row.provider == ours and "cache" not in row.case}
    return [row for row in rows if row.run in runs]


def compared(rows: Sequence[Row], suite: str) -> tuple[str, list[Cell]]:
    """What a user gets in a suite, by its provider's name, and the cells in which it and a peer were timed."""
    ours, lists = f"{OURS}-hopper-fp8" if suite == "fp8" else OURS, f"{OURS}-lists"
    grid = table.cells(_with_ours(of_suite(rows, suite), ours))
    if suite == "mods":
        grid = [replace(cell, rows=cell.rows | {OURS: cell.rows[lists]}) if cell.time(lists) else cell for cell in grid]
    if suite in ("decode", "serving", "mla"):
        grid = decode.plain(grid)
    grid = [cell for cell in grid if suite != "varlen" or cell.case.lengths is not None]
    return ours, [cell for cell in grid if cell.ratio(ours, table.BEST_PEER) is not None]


def lost_cells(rows: Sequence[Row], suite: str) -> list[tuple[float, Cell, str]]:
    """The lost cells of a suite, worst first: our speed over the fastest peer's, the cell and the peer."""
    ours, grid = compared(rows, suite)
    found = []
    for cell in grid:
        ratio, best = cell.ratio(ours, table.BEST_PEER), cell.time(table.BEST_PEER)
        if ratio is not None and ratio < table.LOST:
            peers = [name for name in table.in_order(cell.rows) if not name.startswith(OURS)]
            found.append((ratio, cell, next(name for name in peers if cell.time(name) == best)))
    return sorted(found, key=lambda each: each[0])


def _reason(suite: str, cell: Cell) -> str:
    of_suite = reasons().get(suite, {})
    return next((why for name, why in of_suite.items() if fnmatch.fnmatchcase(cell.case.name, name)), UNKNOWN)


def _lost_block(rows: Sequence[Row]) -> str:
    lines, total, unknown, absent = [["where", "lost", "of", "worst", "to", table.BOUND, "why"]], 0, 0, []
    for suite, place in _PLACES.items():
        ours, grid = compared(rows, suite)
        total += len(grid)
        absent += [] if grid else [suite]
        groups: dict[tuple[str, str], list[tuple[float, Cell, str]]] = {}
        for each in lost_cells(rows, suite):
            groups.setdefault((place(each[1].case), _reason(suite, each[1])), []).append(each)
        for (where, why), found in groups.items():
            of = sum(place(cell.case) == where for cell in grid)
            ratio, worst, peer = found[0]
            unknown += len(found) * (why == UNKNOWN)
            share = bounds.shown(worst.rows[ours], worst.case)
            lines.append([where, str(len(found)), str(of), f"{ratio:.3f}", peer, share, why])
    count = sum(int(line[1]) for line in lines[1:])
    said = f"{count} of {total} cells are lost, and {unknown} of them are {UNKNOWN}."
    said += f" Not measured through `{OURS}`: {', '.join(absent)}." if absent else ""
    return f"{table.to_markdown(lines)}\n\n{said}" if count else said


def _measured_block(rows: Sequence[Row]) -> str:
    found = measured.measured(rows)
    stale = sum(each.stale for each in found)
    called = ", ".join(measured.CURRENT) or "none"
    said = f"{stale} of {len(found)} suites are stale. Called current: {called}."
    return f"{table.to_markdown(measured.measured_table(found))}\n\n{said}"


def _work_lines(grid: list[Cell]) -> table.Table:
    """The cpu suite, with the share of the score matrix that the mask keeps."""
    names = table.providers(grid)
    lines = [["cell", "kept pairs", "share kept", *(f"{name}, ms" for name in names), "ours / best peer"]]
    for cell in grid:
        c = cell.case
        kept = c.kept_pairs()
        whole = c.seqlen_q * c.seqlen_k * c.batch if c.lengths is None else sum(c.lengths) ** 2
        times = ["-" if (t := cell.time(name)) is None else f"{t:.4g}" for name in names]
        ratios = [r for name in table.ours(names) if (r := cell.ratio(name, table.BEST_PEER)) is not None]
        best = f"{max(ratios):.2f}" if ratios else ""
        lines.append([c.name, f"{kept / 1e6:.1f} M", f"{100 * kept / whole:.1f}%", *times, best])
    return lines


def _host_lines(rows: list[Row]) -> table.Table:
    lines = [["what", "provider", "median", "spread"]]
    for row in latest(rows):
        shown = str(row.error)
        if row.median_ms is not None:
            shown = f"{row.median_ms * 1e3:.1f} us" if row.median_ms < 10 else f"{row.median_ms / 1e3:.2f} s"
        shape = f", {row.case['seqlen_q']} tokens" if row.case["seqlen_q"] == 512 else ""
        name = f"{row.case['measure']}, {row.case['direction']}{shape}"
        lines.append([name, row.provider, shown, "" if row.spread is None else f"{100 * row.spread:.0f}%"])
    return lines


def _memory_lines(grid: list[Cell]) -> table.Table:
    names = table.providers(grid)
    lines = [["cell (MiB)", *names]]
    for cell in grid:
        values = [cell.rows[n].extra_bytes if n in cell.rows else None for n in names]
        lines.append([cell.case.name, *("-" if x is None else f"{x / 2**20:.1f}" for x in values)])
    return lines


def _of(made: Callable[[list[Row]], table.Table]) -> Block:
    """A block of a table of the latest rows."""
    return lambda rows: _with_source(latest(rows), made(rows))


def _of_cells(made: Callable[[list[Cell]], table.Table]) -> Block:
    """A block of a table made from ``table.cells``."""

    def block(rows: list[Row]) -> str:
        grid = table.cells(rows)
        return _with_source(_rows_of(grid), made(grid))

    return block


def _rows_of(grid: Sequence[Cell]) -> list[Row]:
    return [row for cell in grid for row in cell.rows.values()]


def _train_block(rows: Sequence[Row]) -> str:
    return _with_source(latest(rows), *train.tables(train.training_of(rows)))


def _in(dtype: str, write: Block) -> Block:
    """A block of the rows of one dtype."""

    def block(rows: list[Row]) -> str:
        chosen = [row for row in rows if row.case["dtype"] == dtype]
        return write(chosen) if chosen else _NOTHING

    return block


def _summary_block(rows: Sequence[Row]) -> str:
    return table.to_markdown(table.summary_table(table.cells(rows)))


# The first page's rows: a name, the suite, our provider, and the peer that it is for. If a suite has both directions,
# the one that the name ends with.
_HEADLINE = (
    ("Hopper, forward", "forward", "flashtile", table.BEST_PEER),
    ("Hopper, backward", "backward", "flashtile", table.BEST_PEER),
    ("shapes of models, forward", "models", "flashtile", table.BEST_PEER),
    ("shapes of models, backward", "models", "flashtile", table.BEST_PEER),
    ("Hopper, packed sequences, both", "varlen", "flashtile", table.BEST_PEER),
    ("Hopper, decode", "decode", "flashtile", decode.PEER),
    ("Hopper, a server's step", "serving", "flashtile", decode.PEER),
    ("portable, forward", "forward", "flashtile-portable", "fa2"),
    ("portable, backward", "backward", "flashtile-portable", "fa2"),
    ("portable, shapes of models, forward", "models-portable", "flashtile-portable", "fa2"),
    ("portable, shapes of models, backward", "models-portable", "flashtile-portable", "fa2"),
)


def _headline_block(rows: list[Row]) -> str:
    lines = [["kernels, bf16", *table.SUMMARY_HEAD[:-1], table.BOUND, "GPU, last run"]]
    dated = r"NVIDIA (\w+).*@(....)(..)(..)T.*", r"\1, \2-\3-\4"
    for name, suite, ours, peer in _HEADLINE:
        timed = _with_ours(of_suite(rows, suite), ours)
        grid = [c for c in table.cells(timed) if c.case.dtype == "bfloat16"]
        if suite in ("decode", "serving"):
            grid = decode.plain(grid)
        elif suite == "varlen" or suite.startswith("models"):
            grid = [c for c in grid if (c.case.lengths if suite == "varlen" else name.endswith(c.case.direction))]
        of_pair = [s for s in table.summaries(grid) if (s.provider, s.against) == (ours, peer)]
        if not of_pair:
            lines.append([name, peer, *["-"] * (len(lines[0]) - 3), "not measured"])
            continue
        shares = [found[0] for c in grid if ours in c.rows and (found := bounds.bound(c.rows[ours], c.case))]
        share = f"{100 * statistics.median(shares):.0f}%" if shares else ""
        last = re.sub(*dated, f"{timed[-1].device}@{timed[-1].run}")
        lines.append([name, peer, *of_pair[0].line()[:-1], share, last])
    said = f"*Lost*: under {table.LOST:.2f} of the other's speed. *{table.BOUND.capitalize()}*: how near a cell is to "
    said += "what the card can do, products or reading, whichever takes longer; the median."
    return f"{table.to_markdown(lines)}\n\n{said}"


_NOTHING = "Not measured yet."
# Block name -> the suite it needs, empty for all, and the function that writes it.
_BLOCKS: dict[str, tuple[str, Block]] = {
    "headline": ("", _headline_block),
    "first-page": ("", lambda rows: re.sub(r"\n\| (?:Hopper, packed|portable).*", "", _headline_block(rows))),
    "lost": ("", _lost_block),
    "measured": ("", _measured_block),
    "forward": ("forward", _in("bfloat16", _of_cells(table.speed_table))),
    "forward-summary": ("forward", _in("bfloat16", _summary_block)),
    "forward-fp16": ("forward", _in("float16", _of_cells(table.speed_table))),
    "forward-fp16-summary": ("forward", _in("float16", _summary_block)),
    "backward": ("backward", _in("bfloat16", _of_cells(table.speed_table))),
    "backward-summary": ("backward", _in("bfloat16", _summary_block)),
    "models": ("models", _of_cells(table.speed_table)),
    "models-summary": ("models", _summary_block),
    "models-portable": ("models-portable", _of_cells(table.speed_table)),
    "uses": ("uses", _of_cells(table.speed_table)),
    "uses-summary": ("uses", _summary_block),
    "big-heads": ("big-heads", _of_cells(table.speed_table)),
    "big-heads-summary": ("big-heads", _summary_block),
    "mla": ("mla", _of_cells(mla.latent_table)),
    "mla-variants": ("mla", _of_cells(decode.variants_table)),
    "mods": ("mods", lambda rows: _of_cells(table.speed_table)(_with_ours(rows, OURS))),
    "selected": ("selected", _of_cells(lambda grid: selected.selected_table(_rows_of(grid)))),
    "first-call": ("first_call", _of(first_call.first_table)),
    "ablations": ("ablations", _of_cells(table.changes_table)),
    "cpu": ("cpu", _of_cells(_work_lines)),
    "host": ("host", _of(_host_lines)),
    "loop": ("loop", _of(loop.loop_table)),
    "memory": ("memory", _of_cells(_memory_lines)),
    "accuracy": ("accuracy", _of(accuracy.error_table)),
    "varlen": ("varlen", _of(varlen.varlen_table)),
    "train": ("train", _train_block),
    "train-fp8": ("train-fp8", _train_block),
    "fp8": ("fp8", _of_cells(table.fp8_table)),
    "fp8-summary": ("fp8", _of_cells(table.fp8_summary)),
    "fp8-rounding": ("fp8", _of_cells(table.rounding_table)),
    "decode": ("decode", _of_cells(decode.decode_table)),
    "decode-summary": ("decode", _of_cells(lambda grid: table.summary_table(decode.plain(grid)))),
    "decode-variants": ("decode", _of_cells(decode.variants_table)),
    "serving": ("serving", _of_cells(serving.steps_table)),
    "serving-summary": ("serving", _of_cells(lambda grid: table.summary_table(decode.plain(grid)))),
    "serving-dense": ("serving", _of_cells(decode.variants_table)),
}


def fill_tables(page: str, rows: Sequence[Row]) -> str:
    """The page with every marked block rewritten from the rows.

    Raises:
        ValueError: If the page names an unknown table.
    """

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in _BLOCKS:
            raise ValueError(f"table is {name!r}, must be one of {', '.join(_BLOCKS)}")
        suite, write = _BLOCKS[name]
        chosen = of_suite(rows, suite) if suite else list(rows)
        body = write(chosen) if chosen else _NOTHING
        return f"{match[1]}\n{body}\n\n{match[3]}"

    return _BLOCK.sub(fill, page)
