"""``python -m benchmarks.plot``: draws plots and rewrites the tables of the docs, from saved rows alone."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import decode, results, table
from benchmarks.page import DOCS_PAGES, fill_tables
from benchmarks.results import ROOT, Row, latest, of_suite
from benchmarks.table import Cell
from benchmarks.train import smooth, training_of

PLOTS = ROOT / "docs" / "plots"

# Ours are emphasised; peers have fixed colours (the palette of Okabe and Ito, safe for colour-blind readers).
_STYLES: dict[str, dict[str, Any]] = {
    "flashtile-portable": {"color": "#0072B2", "marker": "o", "linewidth": 2.2, "zorder": 5},
    "flashtile-hopper": {"color": "#D55E00", "marker": "D", "linewidth": 2.2, "zorder": 6},
    "flashtile": {"color": "#D55E00", "marker": "D", "linewidth": 2.2, "zorder": 6},
    "flashtile-hopper-fp8": {"color": "#0072B2", "marker": "o", "linewidth": 2.2, "zorder": 7},
    "flashtile-hopper-fp8-call": {"color": "#56B4E9", "marker": "o", "linewidth": 1.4},
    "flashtile-cpu-fp8-call": {"color": "#D55E00", "marker": "D", "linewidth": 1.4, "zorder": 6},
    "flashtile-cpu": {"color": "#0072B2", "marker": "o", "linewidth": 2.2, "zorder": 5},
    "fa3": {"color": "#009E73", "marker": "s", "linestyle": "--"},
    "cudnn-fp8": {"color": "#CC79A7", "marker": "^", "linestyle": "--"},
    "cudnn": {"color": "#CC79A7", "marker": "^", "linestyle": "--"},
    "fa2": {"color": "#E69F00", "marker": "v", "linestyle": "--"},
    "eager": {"color": "#7F7F7F", "marker": "x", "linestyle": ":"},
}
_SMOOTHED_STEPS = 50
# The columns of the plot of decoding: too many to draw them all.
_DECODED = ("d64-h64x8-", "d128-h32x8-", "d256-h16x8-")


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


def _panel(
    ax: Any, series: dict[str, list[tuple[int, float]]], *labels: str, ticks: Sequence[str] = (), log: bool = False
) -> None:
    """Curves over lengths, or over the places of what ``ticks`` names; labels are a title, x's and y's."""
    for name, points in series.items():
        ax.plot(*zip(*points, strict=True), label=name, markersize=5, **_STYLES.get(name, {}))
    lengths = sorted({x for points in series.values() for x, _ in points})
    if ticks:
        ax.set_xticks(range(len(ticks)), ticks, rotation=30, ha="right")
    else:
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        ax.minorticks_off()
    _labels(ax, *labels)
    if log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _labels(ax: Any, title: str, x: str = "", y: str = "") -> None:
    ax.set_title(title, fontsize=10)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.grid(alpha=0.3, linewidth=0.6)


def _save(figure: Any, axes: Any, title: str, path: Path) -> Path:
    """Adds one legend for all panels and saves the file, without dates, so that equal plots are equal files."""
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


def speed_cells(rows: Sequence[Row], suite: str) -> dict[tuple[str, str], list[Cell]]:
    """The cells of each panel of a suite's speeds: by mask and head dim, of ``decode`` by batch and heads."""
    chosen = of_suite(rows, suite)
    # A curve is a provider's last run, whichever others it timed; ours by choice of a backend is Hopper's here.
    hidden = "flashtile-hopper" if any(row.provider == "flashtile" for row in chosen) else ""
    grid = table.cells([replace(row, run="") for row in latest(chosen) if row.provider != hidden])
    places: dict[tuple[str, str], list[Cell]] = {}
    for cell in decode.plain(grid) if suite == "decode" else sorted(grid, key=lambda cell: cell.case.head_dim):
        c = cell.case
        if suite != "decode" and c.dtype == "bfloat16" and c.lengths is None and c.flops():
            places.setdefault((c.mask, f"head_dim {c.head_dim}"), []).append(cell)
        elif suite == "decode" and not c.mixed and c.name.startswith(_DECODED):
            place = f"batch {c.batch}", f"heads {c.num_heads_q}/{c.num_heads_kv} of {c.head_dim}"
            places.setdefault(place, []).append(cell)
    return places


def _speed_panel(ax: Any, cells: Sequence[Cell], unit: str, *labels: str) -> None:
    _panel(ax, _series(cells, table.UNITS[unit]), *labels)
    ax.set_ylim(0, 1.06 * ax.get_ylim()[1])


def overview_plot(rows: Sequence[Row], path: Path) -> Path | None:
    """The README's picture: causal forward, backward and decoding at head_dim 128, or None."""
    panels = {suite: speed_cells(rows, suite).get(("causal", "head_dim 128"), []) for suite in ("forward", "backward")}
    panels["decode"] = speed_cells(rows, "decode").get(("batch 8", "heads 32/8 of 128"), [])
    if not all(panels.values()):
        return None
    figure, axes = _figure(1, 3)
    for ax, (suite, cells), unit in zip(axes[0], panels.items(), ("TFLOPS", "TFLOPS", "GB/s"), strict=True):
        what = "8 sequences" if suite == "decode" else "causal"
        _speed_panel(ax, cells, unit, f"{suite}, {what}, {unit}", "sequence length", "")
    return _save(figure, axes, f"bf16, head_dim 128, {of_suite(rows, 'forward')[-1].device}: higher is faster", path)


def speed_plot(rows: Sequence[Row], suite: str, path: Path) -> Path | None:
    """Speed against sequence length, one panel per mask and head dim, of ``decode`` per batch and heads, or None."""
    unit, places = "TFLOPS" if suite != "decode" else "GB/s", speed_cells(rows, suite)
    if not places:
        return None
    down, across = (list(dict.fromkeys(names)) for names in zip(*places, strict=True))
    figure, axes = _figure(len(down), len(across))
    for (row, column), cells in places.items():
        i, j = down.index(row), across.index(column)
        x, y = "sequence length" if i == len(down) - 1 else "", unit if j == 0 else ""
        _speed_panel(axes[i, j], cells, unit, f"{row}, {column}", x, y)
    for row, column in {(row, column) for row in down for column in across} - places.keys():
        axes[down.index(row), across.index(column)].axis("off")
    what = "forward in 8 bits" if suite == "fp8" else f"{suite}, bf16"
    return _save(figure, axes, f"{what}, {of_suite(rows, suite)[-1].device}", path)


def serving_plot(rows: Sequence[Row], path: Path) -> Path | None:
    """Speed over the peer's by step, one panel per heads and kind of cache, or None."""
    chosen = of_suite(rows, "serving")
    grid = decode.plain(table.cells(chosen))
    if not grid:
        return None
    down, across, steps = (
        list(dict.fromkeys(getattr(cell.case, name) for cell in grid)) for name in ("heads", "cache", "step")
    )
    figure, axes = _figure(len(down), len(across))
    for (i, heads), (j, cache) in itertools.product(enumerate(down), enumerate(across)):
        series: dict[str, list[tuple[int, float]]] = {}
        for cell in grid:
            for name in cell.rows if (cell.case.heads, cell.case.cache) == (heads, cache) else ():
                if ratio := cell.ratio(name, decode.PEER):
                    series.setdefault(name, []).append((steps.index(cell.case.step), ratio))
        points = {name: sorted(series[name]) for name in table.in_order(series)}
        y = f"speed over {decode.PEER}" if j == 0 else ""
        _panel(axes[i, j], points, f"{heads}, {cache}", "", y, ticks=steps)
    return _save(figure, axes, f"a server's step, bf16, {chosen[-1].device}", path)


def memory_plot(rows: Sequence[Row], path: Path) -> Path | None:
    """Peak memory of a call beyond its inputs and outputs against sequence length, one panel per direction."""
    chosen = of_suite(rows, "memory")
    if not chosen:
        return None
    grid = table.cells(chosen)
    directions = list(dict.fromkeys(c.case.direction for c in grid))
    figure, axes = _figure(1, len(directions))

    def mib(row: Row) -> float | None:
        # A logarithmic axis has no zero: a call without extra memory is drawn at one KiB.
        return None if row.extra_bytes is None else max(row.extra_bytes, 1024) / 2**20

    for ax, direction in zip(axes[0], directions, strict=True):
        panel = [c for c in grid if c.case.direction == direction]
        _panel(ax, _series(panel, mib), direction, "sequence length", "extra memory, MiB", log=True)
    c = grid[0].case
    title = f"batch {c.batch}, {c.num_heads_q} heads, head_dim {c.head_dim}, {c.mask}, {chosen[-1].device}"
    return _save(figure, axes, title, path)


def training_plot(rows: Sequence[Row], suite: str, path: Path) -> Path | None:
    """Loss against step, and beside it tokens per second against context length, or if none the loss over eager's."""
    chosen = of_suite(rows, suite)
    training = training_of(chosen)
    if not training.losses:
        return None
    figure, axes = _figure(1, 2)
    left, right = axes[0]
    base = smooth(training.losses.get("eager", []), _SMOOTHED_STEPS)
    for name in table.in_order(training.losses):
        curve = smooth(training.losses[name], _SMOOTHED_STEPS)
        steps = [_SMOOTHED_STEPS * (i + 0.5) for i in range(len(curve))]
        style = {**_STYLES.get(name, {}), "marker": ""}
        left.plot(steps, curve, label=name, **style)
        if not training.tokens_per_s:
            right.plot(steps[: len(base)], [a - b for a, b in zip(curve, base, strict=False)], **style)
    _labels(left, f"loss, means of {_SMOOTHED_STEPS} steps", "step", "nats a character")
    series: dict[str, list[tuple[int, float]]] = {}
    for seqlen, by_name in sorted(training.tokens_per_s.items()):
        for name in table.in_order(by_name):
            series.setdefault(name, []).append((seqlen, by_name[name] / 1e3))
    if series:
        _panel(right, series, "training speed", "context", "thousand tokens/s")
    else:
        _labels(right, "over eager's", "step")
    return _save(figure, axes, f"a character GPT in bf16, {chosen[-1].device}", path)


def draw(rows: Sequence[Row], folder: Path, suffix: str) -> list[Path]:
    """All plots that the rows allow."""
    speeds = ("forward", "backward", "decode", "fp8")
    drawn = [speed_plot(rows, suite, folder / f"{suite}.{suffix}") for suite in speeds]
    drawn.append(overview_plot(rows, folder / f"overview.{suffix}"))
    drawn.append(serving_plot(rows, folder / f"serving.{suffix}"))
    drawn.append(memory_plot(rows, folder / f"memory.{suffix}"))
    drawn += [training_plot(rows, suite, folder / f"{suite}.{suffix}") for suite in ("train", "train-fp8")]
    return [path for path in drawn if path is not None]


def main(argv: Sequence[str] | None = None) -> int:
    """Draws and writes; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="folder of saved rows")
    parser.add_argument("--plots", type=Path, default=PLOTS, help="folder to draw into")
    parser.add_argument("--format", default="svg", choices=("svg", "png"))
    parser.add_argument("--pages", type=Path, nargs="+", default=DOCS_PAGES, help="pages whose tables are rewritten")
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
    for page in args.pages:
        page.write_text(fill_tables(page.read_text(encoding="utf-8"), rows), encoding="utf-8")
        print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
