"""The demo's pictures. Each draws what was measured and nothing else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from flashtile.cli.demo.exactness import Row
from flashtile.cli.demo.scaling import Point
from flashtile.cli.demo.training import Run

COLORS = {"standard": "#d1603d", "flashtile": "#1f6feb"}
_GREY = "#57606a"
_STYLE: dict[str, Any] = {"linewidth": 2.0, "markersize": 6}


def _figure(width: float, height: float, title: str, subtitle: str) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    # The empty lines keep room for the subtitle and some air under it.
    figure.suptitle(f"{title}\n\n", fontsize=14, fontweight="bold", x=0.01, ha="left")
    figure.text(0.01, 0.985 - 0.32 / height, subtitle, fontsize=10, color=_GREY, ha="left", va="top")
    return figure


def _tidy(axes: Axes) -> None:
    axes.grid(True, which="major", color="#d8dee4", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw_exactness(rows: Sequence[Row], path: Path) -> None:
    """A panel for each dtype: the errors of every case, flashtile's and PyTorch's, for the output and the gradients."""
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    cases = list(dict.fromkeys(row.case for row in rows))
    figure = _figure(
        4.0 + 3.1 * len(dtypes),
        2.0 + 0.36 * len(cases),
        "Exactness: distance from attention computed in float64",
        "Largest error, relative to the largest element of the exact result. Further left is better.",
    )
    panels = figure.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
    for panel, dtype in zip(panels, dtypes, strict=True):
        here = [row for row in rows if row.dtype == dtype]
        places = np.array([cases.index(row.case) for row in here])
        for method, shift in (("flashtile", -0.13), ("pytorch", 0.13)):
            color = COLORS["flashtile" if method == "flashtile" else "standard"]
            name = "flashtile" if method == "flashtile" else "PyTorch"
            out, grad = ([getattr(row, f"{method}_{what}") for row in here] for what in ("out", "grad"))
            panel.scatter(out, places + shift, s=42, color=color, label=f"{name}, output", zorder=3)
            panel.scatter(
                grad, places + shift, s=38, marker="D", facecolor="white", edgecolor=color, label=f"{name}, gradients"
            )
        panel.set_xscale("log")
        panel.set_xlim(*_decades([e for row in here for e in dataclasses.astuple(row)[2:6]]))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_title(dtype, fontsize=11)
        panel.set_xlabel("relative error")
        _tidy(panel)
    panels[0].set_yticks(range(len(cases)), cases)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Powers of ten around the positive values among some."""
    logs = [math.log10(value) for value in values if value > 0] or [-8.0, 0.0]
    return 10 ** math.floor(min(logs) - 0.1), 10 ** math.ceil(max(logs) + 0.1)


def draw_scaling(points: Sequence[Point], budget_bytes: int, setting: str, path: Path) -> None:
    """Peak memory and time over length, forward above and with the backward below."""
    figure = _figure(
        10.5,
        8.0,
        "Memory and time for growing lengths",
        f"Attention: {setting}. Peak memory is what a call takes beyond its inputs.",
    )
    panels = figure.subplots(2, 2, sharex=True)
    for (memory, clock), backward in zip(panels, (False, True), strict=True):
        what = "forward and backward" if backward else "forward"
        here = [p for p in points if p.backward == backward]
        _memory_panel(memory, here, budget_bytes)
        for method in COLORS:
            done = [p for p in here if p.method == method and p.fits]
            clock.plot(
                [p.seqlen for p in done],
                [p.time_s * 1e3 for p in done],
                "o-",
                color=COLORS[method],
                label=method,
                **_STYLE,
            )
        memory.set_ylabel("peak memory, MB")
        clock.set_ylabel("time, ms")
        for panel, quantity in ((memory, "peak memory"), (clock, "time")):
            panel.set_title(f"{quantity}, {what}", fontsize=11, loc="left")
            _length_axis(panel, sorted({p.seqlen for p in points}))
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
            _tidy(panel)
    for panel in panels[1]:
        panel.set_xlabel("sequence length, tokens")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)


def _memory_panel(panel: Axes, points: Sequence[Point], budget_bytes: int) -> None:
    budget_mb = budget_bytes / 1e6
    for method in COLORS:
        done = [p for p in points if p.method == method and p.fits]
        # A call may take less than the system can tell: draw it at the smallest step of its counter, 4 kB.
        memory = [max(p.peak_bytes, 4096) / 1e6 for p in done]
        panel.plot([p.seqlen for p in done], memory, "o-", color=COLORS[method], label=method, **_STYLE)
        for failed in (p for p in points if p.method == method and not p.fits):
            panel.plot(failed.seqlen, budget_mb, "x", color=COLORS[method], markersize=11, markeredgewidth=3)
            panel.annotate(
                f"{failed.seqlen:,} tokens\ndo not fit",
                (failed.seqlen, budget_mb),
                xytext=(6, -10),
                textcoords="offset points",
                fontsize=8.5,
                color=COLORS[method],
                va="top",
            )
    panel.axhline(budget_mb, color=_GREY, linestyle="--", linewidth=1.2, label=f"budget, {budget_mb:,.0f} MB")
    panel.margins(y=0.12)


def _length_axis(panel: Axes, lengths: Sequence[int]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xlim(lengths[0] / 1.25, lengths[-1] * 1.45)
    panel.set_xticks(lengths, [f"{n:,}" for n in lengths])
    panel.xaxis.set_minor_formatter(NullFormatter())


def draw_training(runs: Sequence[Run], unknowing_loss: float, path: Path) -> None:
    """The loss curves over each other, their difference below them, and the speed of both beside them."""
    figure = _figure(
        10.5,
        6.4,
        "One small GPT trained twice from the same seed",
        f"{runs[0].parameters:,} parameters, {len(runs[0].losses)} steps on Shakespeare; only the attention differs.",
    )
    grid = figure.add_gridspec(2, 2, width_ratios=(3.2, 1), height_ratios=(3, 1))
    curves, apart = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0])
    speed = figure.add_subplot(grid[:, 1])
    styles: dict[str, dict[str, Any]] = {
        "standard": {"linewidth": 5.0, "alpha": 0.45},
        "flashtile": {"linewidth": 1.4},
    }
    for run in runs:
        steps = range(1, len(run.losses) + 1)
        curves.plot(steps, run.losses, color=COLORS[run.method], label=run.method, **styles[run.method])
    curves.axhline(unknowing_loss, color=_GREY, linestyle=":", linewidth=1.2, label="knowing nothing: ln(characters)")
    curves.set_ylabel("training loss, nats a character")
    curves.legend(frameon=False)
    difference = np.abs(np.subtract(runs[0].losses, runs[1].losses))
    # Where the two losses are the same number there is no dot.
    apart.semilogy(range(1, len(difference) + 1), np.where(difference > 0, difference, np.nan), ".", color=_GREY)
    apart.set_ylim(1e-8, 10)
    apart.set_xlim(curves.get_xlim())
    apart.set_ylabel("|difference|, nats")
    apart.set_xlabel("step")
    bars = speed.bar(
        [run.method for run in runs],
        [run.tokens_per_s for run in runs],
        color=[COLORS[r.method] for r in runs],
        width=0.6,
    )
    speed.bar_label(bars, [f"{run.tokens_per_s:,.0f}" for run in runs], padding=3)
    speed.set_ylabel("training speed, tokens a second")
    speed.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
    speed.margins(y=0.12)
    for panel in (curves, apart, speed):
        _tidy(panel)
    speed.grid(False, axis="x")
    figure.savefig(path, dpi=130)
