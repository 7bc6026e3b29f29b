"""``python -m benchmarks.plot``: draws plots and rewrites the tables of docs/performance.md, from saved rows alone.

A generated table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; what is outside stays as written.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results, table
from benchmarks.results import ROOT, Row
from benchmarks.table import Cell

DOCS_PAGE = ROOT / "docs" / "performance.md"
PLOTS = ROOT / "docs" / "plots"

# Ours stand out; a peer keeps its colour in every plot (the palette of Okabe and Ito, safe for colour-blind readers).
_STYLES: dict[str, dict[str, Any]] = {
    "flashtile-portable": {"color": "#0072B2", "marker": "o", "linewidth": 2.2, "zorder": 5},
    "flashtile-hopper": {"color": "#D55E00", "marker": "D", "linewidth": 2.2, "zorder": 6},
    "flashtile-cpu": {"color": "#0072B2", "marker": "o", "linewidth": 2.2, "zorder": 5},
    "fa3": {"color": "#009E73", "marker": "s", "linestyle": "--"},
    "cudnn": {"color": "#CC79A7", "marker": "^", "linestyle": "--"},
    "fa2": {"color": "#E69F00", "marker": "v", "linestyle": "--"},
    "eager": {"color": "#7F7F7F", "marker": "x", "linestyle": ":"},
}
_BLOCK = re.compile(r"(<!-- table: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _of(rows: Sequence[Row], suite: str) -> list[Row]:
    """The rows of a suite on the device that was measured last, since devices do not compare."""
    chosen = [row for row in rows if row.suite == suite]
    return [row for row in chosen if row.device == chosen[-1].device] if chosen else []


def _series(cells: Sequence[Cell], value: Callable[[Row], float | None]) -> dict[str, list[tuple[int, float]]]:
    """``(seqlen, value)`` points by provider, in the order of the legend."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name in table.providers(cells):
        points = [
            (cell.case.seqlen_k, y) for cell in cells if (row := cell.rows.get(name)) and (y := value(row)) is not None
        ]
        if points:
            found[name] = sorted(points)
    return found


def _panel(ax: Any, series: dict[str, list[tuple[int, float]]], title: str) -> None:
    for name, points in series.items():
        ax.plot(*zip(*points, strict=True), label=name, markersize=5, **_STYLES.get(name, {}))
    lengths = sorted({x for points in series.values() for x, _ in points})
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    ax.minorticks_off()
    ax.set_title(title, fontsize=10)
    ax.grid(alpha=0.3, linewidth=0.6)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _save(figure: Any, axes: Any, title: str, path: Path) -> Path:
    """One legend for all panels, then the file, with nothing in it that changes from day to day."""
    handles = {label: h for ax in axes.flat for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "flashtile"
    from matplotlib import pyplot

    size = (4.0 * columns, 2.7 * rows + 0.7)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    return figure, axes


def speed_plot(rows: Sequence[Row], suite: str, path: Path) -> Path | None:
    """TFLOPS against sequence length, a panel for each mask and head dim.

    Args:
        rows: Saved rows.
        suite: ``forward`` or ``backward``.
        path: File to write; its suffix chooses the format.

    Returns:
        The path, or None if there is nothing to draw.
    """
    chosen = _of(rows, suite)
    grid = [c for c in table.cells(chosen) if c.case.dtype == "bfloat16" and c.case.lengths is None]
    if not grid:
        return None
    masks = list(dict.fromkeys(c.case.mask for c in grid))
    head_dims = sorted({c.case.head_dim for c in grid})
    figure, axes = _figure(len(masks), len(head_dims))
    for i, mask in enumerate(masks):
        for j, head_dim in enumerate(head_dims):
            panel = [c for c in grid if c.case.mask == mask and c.case.head_dim == head_dim]
            _panel(axes[i, j], _series(panel, lambda row: row.tflops), f"{mask}, head_dim {head_dim}")
            axes[i, j].set_ylim(bottom=0)
            if j == 0:
                axes[i, j].set_ylabel("TFLOPS")
            if i == len(masks) - 1:
                axes[i, j].set_xlabel("sequence length")
    return _save(figure, axes, f"{suite}, bf16, {chosen[-1].device}", path)


def memory_plot(rows: Sequence[Row], path: Path) -> Path | None:
    """Peak memory of a call beyond its inputs and outputs against sequence length, a panel a direction."""
    chosen = _of(rows, "memory")
    if not chosen:
        return None
    grid = table.cells(chosen)
    directions = list(dict.fromkeys(c.case.direction for c in grid))
    figure, axes = _figure(1, len(directions))
    for ax, direction in zip(axes[0], directions, strict=True):
        panel = [c for c in grid if c.case.direction == direction]
        # A logarithmic axis has no zero: a call that needs nothing extra is drawn at one KiB.
        _panel(ax, _series(panel, _mib), direction)
        ax.set_yscale("log")
        ax.set_xlabel("sequence length")
        ax.set_ylabel("extra memory, MiB")
    c = grid[0].case
    title = f"batch {c.batch}, {c.num_heads_q} heads, head_dim {c.head_dim}, {c.mask}, {chosen[-1].device}"
    return _save(figure, axes, title, path)


def _mib(row: Row) -> float | None:
    return None if row.extra_bytes is None else max(row.extra_bytes, 1024) / 2**20


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
    last = {(str(row.case), row.provider): row for row in rows}.values()
    lines = [["what", "provider", "median", "spread"]]
    for row in last:
        shown = str(row.error)
        if row.median_ms is not None:
            shown = f"{row.median_ms * 1e3:.1f} us" if row.median_ms < 10 else f"{row.median_ms / 1e3:.2f} s"
        spread = "" if row.spread is None else f"{100 * row.spread:.0f}%"
        lines.append([_host_name(row.case), row.provider, shown, spread])
    return f"{_source(list(last))}\n\n{table.to_markdown(lines)}"


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


# Block name -> the suite it needs and how it is written.
_BLOCKS: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "forward-plot": _image("forward", "Forward speed"),
    "backward-plot": _image("backward", "Backward speed"),
    "memory-plot": _image("memory", "Extra memory of a call"),
    "forward": ("forward", lambda rows: _speed_block(rows, "TFLOPS")),
    "forward-summary": ("forward", _summary_block),
    "forward-losses": ("forward", _losses_block),
    "backward": ("backward", lambda rows: _speed_block(rows, "TFLOPS")),
    "backward-summary": ("backward", _summary_block),
    "backward-losses": ("backward", _losses_block),
    "cpu": ("cpu", _work_block),
    "host": ("host", _host_block),
    "memory": ("memory", _memory_block),
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
        chosen = _of(rows, suite)
        body = write(chosen) if chosen else "Not measured yet."
        return f"{match[1]}\n{body}\n\n{match[3]}"

    return _BLOCK.sub(fill, page)


def draw(rows: Sequence[Row], folder: Path, suffix: str) -> list[Path]:
    """All plots that the rows allow."""
    drawn = [speed_plot(rows, suite, folder / f"{suite}.{suffix}") for suite in ("forward", "backward")]
    drawn.append(memory_plot(rows, folder / f"memory.{suffix}"))
    return [path for path in drawn if path is not None]


def main(argv: Sequence[str] | None = None) -> int:
    """Draws and writes; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="folder of saved rows")
    parser.add_argument("--plots", type=Path, default=PLOTS, help="folder to draw into")
    parser.add_argument("--format", default="svg", choices=("svg", "png"))
    parser.add_argument("--page", type=Path, default=DOCS_PAGE, help="Markdown page whose tables are rewritten")
    parser.add_argument("--no-plots", action="store_true", help="only rewrite the tables")
    args = parser.parse_args(argv)
    rows = results.saved(args.results)
    if not args.no_plots:
        try:
            for path in draw(rows, args.plots, args.format):
                print(path)
        except ImportError as error:
            print(f"{error}: plots need matplotlib; --no-plots writes the tables alone", file=sys.stderr)
            return 2
    page = args.page.read_text(encoding="utf-8")
    args.page.write_text(fill_tables(page, rows), encoding="utf-8")
    print(args.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
