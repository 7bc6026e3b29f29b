"""The tables of docs/performance.md, written from saved rows.

A generated table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; what is outside stays as written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import accuracy, table, train, varlen
from benchmarks.results import ROOT, Row

DOCS_PAGE = ROOT / "docs" / "performance.md"

_BLOCK = re.compile(r"(<!-- table: (?P<name>[a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def of_suite(rows: Sequence[Row], suite: str) -> list[Row]:
    """The rows of a suite on the device that was measured last, since devices do not compare."""
    chosen = [row for row in rows if row.suite == suite]
    return [row for row in chosen if row.device == chosen[-1].device] if chosen else []


def _latest(rows: Sequence[Row]) -> list[Row]:
    """Of each case and provider the last row, which is the one that tables show."""
    return list({(str(row.case), row.provider): row for row in rows}.values())


def _source(rows: Sequence[Row]) -> str:
    """Where numbers come from, in one line."""
    last = rows[-1]
    versions = ", ".join(f"{name} {version}" for name, version in last.versions.items())
    commits = ", ".join(dict.fromkeys(row.commit for row in rows))
    return f"{last.device}; {versions}; commit {commits}."


def _speed_block(rows: Sequence[Row], unit: str) -> str:
    grid = table.cells(rows)
    used = [row for cell in grid for row in cell.rows.values()]
    return f"{_source(used)}\n\n{table.to_markdown(table.speed_table(grid, unit))}"


def _summary_block(rows: Sequence[Row]) -> str:
    return table.to_markdown(table.summary_table(table.cells(rows)))


def _losses_block(rows: Sequence[Row]) -> str:
    lost = table.losses_table(table.cells(rows))
    return table.to_markdown(lost) if len(lost) > 1 else "No cell was lost."


def _work_block(rows: Sequence[Row]) -> str:
    """The cpu suite, with the share of the score matrix that the mask keeps."""
    grid = table.cells(rows)
    names = table.providers(grid)
    lines = [["cell", "kept pairs", "share kept", *(f"{name}, ms" for name in names), "ours / best peer"]]
    for cell in grid:
        c = cell.case
        kept = c.kept_pairs()
        whole = c.seqlen_q * c.seqlen_k if c.lengths is None else sum(c.lengths) ** 2
        times = ["-" if (t := cell.time(name)) is None else f"{t:.4g}" for name in names]
        ratios = [r for name in table.ours(names) if (r := cell.ratio(name, table.BEST_PEER)) is not None]
        share = kept / whole / (c.batch if c.lengths is None else 1)
        best = f"{max(ratios):.2f}" if ratios else ""
        lines.append([c.name, f"{kept / 1e6:.1f} M", f"{100 * share:.1f}%", *times, best])
    used = [row for cell in grid for row in cell.rows.values()]
    return f"{_source(used)}\n\n{table.to_markdown(lines)}"


def _host_block(rows: Sequence[Row]) -> str:
    last = _latest(rows)
    lines = [["what", "provider", "median", "spread"]]
    for row in last:
        shown = str(row.error)
        if row.median_ms is not None:
            shown = f"{row.median_ms * 1e3:.1f} us" if row.median_ms < 10 else f"{row.median_ms / 1e3:.2f} s"
        spread = "" if row.spread is None else f"{100 * row.spread:.0f}%"
        lines.append([_host_name(row.case), row.provider, shown, spread])
    return f"{_source(last)}\n\n{table.to_markdown(lines)}"


def _host_name(case: dict[str, Any]) -> str:
    return f"{case['measure']}, {case['direction']}"


def _memory_block(rows: Sequence[Row]) -> str:
    grid = table.cells(rows)
    names = table.providers(grid)
    lines = [["cell (MiB)", *names]]
    for cell in grid:
        values = [cell.rows[n].extra_bytes if n in cell.rows else None for n in names]
        lines.append([cell.case.name, *("-" if x is None else f"{x / 2**20:.1f}" for x in values)])
    used = [row for cell in grid for row in cell.rows.values()]
    return f"{_source(used)}\n\n{table.to_markdown(lines)}"


def _image(suite: str, what: str) -> tuple[str, Callable[[list[Row]], str]]:
    """A block that shows a plot, so that a page links no plot that has not been drawn."""
    return suite, lambda _: f"![{what} against sequence length](plots/{suite}.svg)"


def _accuracy_block(rows: Sequence[Row]) -> str:
    return f"{_source(_latest(rows))}\n\n{table.to_markdown(accuracy.error_table(rows))}"


def _varlen_block(rows: Sequence[Row]) -> str:
    return f"{_source(_latest(rows))}\n\n{table.to_markdown(varlen.varlen_table(rows))}"


def _train_block(rows: Sequence[Row]) -> str:
    return "\n\n".join([_source(_latest(rows)), *map(table.to_markdown, train.tables(train.training_of(rows)))])


def _in(dtype: str, write: Callable[[list[Row]], str]) -> Callable[[list[Row]], str]:
    """A block of the rows of one dtype."""

    def block(rows: list[Row]) -> str:
        chosen = [row for row in rows if row.case["dtype"] == dtype]
        return write(chosen) if chosen else _NOTHING

    return block


def _tflops_block(rows: Sequence[Row]) -> str:
    return _speed_block(rows, "TFLOPS")


_NOTHING = "Not measured yet."
# Block name -> the suite it needs and how it is written.
_BLOCKS: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "forward-plot": _image("forward", "Forward speed"),
    "backward-plot": _image("backward", "Backward speed"),
    "memory-plot": _image("memory", "Extra memory of a call"),
    "train-plot": ("train", lambda _: "![Loss against step, tokens a second against context](plots/train.svg)"),
    "forward": ("forward", _in("bfloat16", _tflops_block)),
    "forward-summary": ("forward", _in("bfloat16", _summary_block)),
    "forward-losses": ("forward", _in("bfloat16", _losses_block)),
    "forward-fp16": ("forward", _in("float16", _tflops_block)),
    "forward-fp16-summary": ("forward", _in("float16", _summary_block)),
    "backward": ("backward", _in("bfloat16", _tflops_block)),
    "backward-summary": ("backward", _in("bfloat16", _summary_block)),
    "backward-losses": ("backward", _in("bfloat16", _losses_block)),
    "cpu": ("cpu", _work_block),
    "host": ("host", _host_block),
    "memory": ("memory", _memory_block),
    "accuracy": ("accuracy", _accuracy_block),
    "varlen": ("varlen", _varlen_block),
    "train": ("train", _train_block),
}


def fill_tables(page: str, rows: Sequence[Row]) -> str:
    """The page with every marked block rewritten from the rows.

    Raises:
        ValueError: If the page names a table that nothing writes.
    """

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in _BLOCKS:
            raise ValueError(f"table is {name!r}, must be one of {', '.join(_BLOCKS)}")
        suite, write = _BLOCKS[name]
        chosen = of_suite(rows, suite)
        body = write(chosen) if chosen else _NOTHING
        return f"{match[1]}\n{body}\n\n{match[3]}"

    return _BLOCK.sub(fill, page)
