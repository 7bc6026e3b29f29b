"""The tables of the README, of the pages of performance and of docs/fp8.md, written from saved rows.

A generated table is between ``<!-- table: NAME -->`` and ``<!-- end -->``; text outside is unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from benchmarks import accuracy, decode, loop, serving, table, train, varlen
from benchmarks.results import ROOT, Row
from benchmarks.table import Cell

Block = Callable[[list[Row]], str]

DOCS_PAGES = tuple(ROOT / n for n in ("docs/performance.md", "docs/performance-tables.md", "docs/fp8.md", "README.md"))

_BLOCK = re.compile(r"(<!-- table: (?P<name>[a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def of_suite(rows: Sequence[Row], suite: str) -> list[Row]:
    """The rows of a suite on the device measured last, since rows of different devices are not comparable."""
    chosen = [row for row in rows if row.suite == suite]
    return [row for row in chosen if row.device == chosen[-1].device] if chosen else []


def latest(rows: Sequence[Row]) -> list[Row]:
    """The last row of each case and provider, which tables show."""
    return list({(str(row.case), row.provider): row for row in rows}.values())


def _with_source(rows: Sequence[Row], *tables: table.Table) -> str:
    """One line with the source of the numbers, then the tables."""
    last = rows[-1]
    versions = ", ".join(f"{name} {version}" for name, version in last.versions.items())
    commits = ", ".join(dict.fromkeys(row.commit for row in rows))
    return "\n\n".join([f"{last.device}; {versions}; commit {commits}.", *map(table.to_markdown, tables)])


def _losses_block(rows: Sequence[Row]) -> str:
    lost = table.losses_table(table.cells(rows))
    return table.to_markdown(lost) if len(lost) > 1 else "No cell was lost."


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
        return _with_source([row for cell in grid for row in cell.rows.values()], made(grid))

    return block


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
    ("Hopper, packed sequences, both", "varlen", "flashtile-hopper", table.BEST_PEER),
    ("Hopper, decode", "decode", "flashtile", decode.PEER),
    ("Hopper, a server's step", "serving", "flashtile-hopper", decode.PEER),
    ("portable, forward", "forward", "flashtile-portable", "fa2"),
    ("portable, backward", "backward", "flashtile-portable", "fa2"),
    ("portable, shapes of models, forward", "models-portable", "flashtile-portable", "fa2"),
    ("portable, shapes of models, backward", "models-portable", "flashtile-portable", "fa2"),
)


def _headline_block(rows: list[Row]) -> str:
    lines = [["kernels, bf16", *table.SUMMARY_HEAD[:-1], "GPU, last run"]]
    dated = r"NVIDIA (\w+).*@(....)(..)(..)T.*", r"\1, \2-\3-\4"
    for name, suite, *pair in _HEADLINE:
        runs = {row.run for row in rows if row.suite == suite and row.provider == pair[0]}
        timed = [row for row in of_suite(rows, suite) if row.run in runs]
        grid = [c for c in table.cells(timed) if c.case.dtype == "bfloat16"]
        if suite in ("decode", "serving"):
            grid = decode.plain(grid)
        elif suite == "varlen" or suite.startswith("models"):
            grid = [c for c in grid if (c.case.lengths if suite == "varlen" else name.endswith(c.case.direction))]
        chosen = [s for s in table.summaries(grid) if [s.provider, s.against] == pair]
        last = f"{timed[-1].device}@{timed[-1].run}" if chosen else ""
        lines += [[name, s.against, *s.line()[:-1], re.sub(*dated, last)] for s in chosen]
    return table.to_markdown(lines)


_NOTHING = "Not measured yet."
# Block name -> the suite it needs, empty for all, and the function that writes it.
_BLOCKS: dict[str, tuple[str, Block]] = {
    "headline": ("", _headline_block),
    "first-page": ("", lambda rows: re.sub(r"\n\| (?:Hopper, packed|portable).*", "", _headline_block(rows))),
    "forward": ("forward", _in("bfloat16", _of_cells(table.speed_table))),
    "forward-summary": ("forward", _in("bfloat16", _summary_block)),
    "forward-losses": ("forward", _in("bfloat16", _losses_block)),
    "forward-fp16": ("forward", _in("float16", _of_cells(table.speed_table))),
    "forward-fp16-summary": ("forward", _in("float16", _summary_block)),
    "backward": ("backward", _in("bfloat16", _of_cells(table.speed_table))),
    "backward-summary": ("backward", _in("bfloat16", _summary_block)),
    "backward-losses": ("backward", _in("bfloat16", _losses_block)),
    "models": ("models", _of_cells(table.speed_table)),
    "models-summary": ("models", _summary_block),
    "models-portable": ("models-portable", _of_cells(table.speed_table)),
    "uses": ("uses", _of_cells(table.speed_table)),
    "uses-summary": ("uses", _summary_block),
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
