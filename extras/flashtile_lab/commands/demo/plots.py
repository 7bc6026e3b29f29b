"""The demo's pictures. Each draws what was measured and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from flashtile_lab.commands.demo.exactness import Row
from flashtile_lab.commands.demo.probe import WINDOW, Point
from flashtile_lab.commands.demo.training import Run

COLORS = {"standard": "#8c959f", "SDPA": "#d1603d", "flashtile": "#1f6feb"}
COLORS |= {"SDPA, window": "#e3a008", "flashtile, window": "#1a7f64"}
DIRECTIONS = {False: "forward", True: "forward and backward"}
# Bytes: a call may take less than the system can tell, so it is shown at the smallest step of its counter.
SMALLEST_PEAK = 4096
_GREY = "#57606a"
_STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "grid.color": "#d8dee4",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "savefig.dpi": 130,
}
_THOUSANDS = FuncFormatter(lambda y, _: f"{y:,.10g}")


def _figure(width: float, height: float, title: str, subtitle: str) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    # The empty lines keep room for the subtitle and some air under it.
    figure.suptitle(f"{title}\n\n", fontsize=14, fontweight="bold", x=0.01, ha="left")
    figure.text(0.01, 0.985 - 0.32 / height, subtitle, fontsize=10, color=_GREY, ha="left", va="top")
    return figure


@mpl.rc_context({**_STYLE, "axes.autolimit_mode": "round_numbers"})
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
        for name, color, shift in (("flashtile", COLORS["flashtile"], -0.13), ("PyTorch", COLORS["SDPA"], 0.13)):
            out, grad = ([getattr(row, f"{name.lower()}_{what}") for row in here] for what in ("out", "grad"))
            panel.scatter(out, places + shift, s=42, color=color, label=f"{name}, output", zorder=3)
            panel.scatter(
                grad, places + shift, s=38, marker="D", facecolor="white", edgecolor=color, label=f"{name}, gradients"
            )
        panel.set(xscale="log", title=dtype, xlabel="relative error")
        panel.xaxis.set_minor_formatter(NullFormatter())
    panels[0].set_yticks(range(len(cases)), cases)
    panels[0].set_ylim(len(cases) - 0.5, -0.5)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path)


@mpl.rc_context(_STYLE)
def draw_scaling(points: Sequence[Point], budget_bytes: int, setting: str, path: Path) -> None:
    """Peak memory and time over length, forward above and with the backward below."""
    figure = _figure(
        10.5,
        8.0,
        "Memory and time for growing lengths",
        f"Attention: {setting}. Peak memory is what a call takes beyond its inputs; a window keeps {WINDOW} keys.",
    )
    lengths = sorted({p.seqlen for p in points})
    panels = figure.subplots(2, 2, sharex=True)
    for (memory, clock), (backward, what) in zip(panels, DIRECTIONS.items(), strict=True):
        here = [p for p in points if p.backward == backward]
        for method, color in COLORS.items():
            done = [p for p in here if p.method == method and p.fits]
            tokens, peaks = [p.seqlen for p in done], [max(p.peak_bytes, SMALLEST_PEAK) / 1e6 for p in done]
            memory.plot(tokens, peaks, "o-", color=color, label=method)
            clock.plot(tokens, [p.time_s * 1e3 for p in done], "o-", color=color, label=method)
        _draw_budget(memory, here, budget_bytes / 1e6)
        for panel, quantity, unit in ((memory, "peak memory", "MB"), (clock, "time", "ms")):
            panel.set_title(f"{quantity}, {what}", loc="left")
            panel.set(ylabel=f"{quantity}, {unit}", yscale="log", xlim=(lengths[0] / 1.25, lengths[-1] * 1.45))
            panel.set_xscale("log", base=2)
            panel.set_xticks(lengths, [f"{n:,}" for n in lengths])
            panel.xaxis.set_minor_formatter(NullFormatter())
            panel.yaxis.set_major_formatter(_THOUSANDS)
    for panel in panels[1]:
        panel.set_xlabel("sequence length, tokens")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLORS) + 1)
    figure.savefig(path)


def _draw_budget(panel: Axes, points: Sequence[Point], budget_mb: float) -> None:
    """A line, with a cross at each length that did not fit."""
    for failed in (p for p in points if not p.fits):
        color, place = COLORS[failed.method], (failed.seqlen, budget_mb)
        panel.plot(*place, "x", color=color, markersize=11, markeredgewidth=3)
        panel.annotate(
            "does\nnot fit", place, xytext=(6, -10), textcoords="offset points",
            fontsize=8.5, color=color, va="top",
        )  # fmt: skip
    panel.axhline(budget_mb, color=_GREY, linestyle="--", linewidth=1.2, label=f"budget, {budget_mb:,.0f} MB")
    panel.margins(y=0.12)


@mpl.rc_context(_STYLE)
def draw_training(runs: Sequence[Run], unknowing_loss: float, path: Path) -> None:
    """The loss curves over each other, standard's and flashtile's difference below, and their speeds beside them."""
    figure = _figure(
        10.5,
        6.4,
        "One small GPT trained from the same seed with each attention",
        f"{runs[0].parameters:,} parameters, {len(runs[0].losses)} steps on Shakespeare; only the attention differs.",
    )
    layout = [["curves", "speed"], ["apart", "speed"]]
    panels: dict[str, Axes] = figure.subplot_mosaic(layout, width_ratios=(3.2, 1), height_ratios=(3, 1))
    curves, apart, speed = panels["curves"], panels["apart"], panels["speed"]
    steps = range(1, len(runs[0].losses) + 1)
    for run, (width, alpha) in zip(runs, ((6.0, 0.4), (3.5, 0.6), (1.2, 1.0)), strict=True):
        curves.plot(steps, run.losses, color=COLORS[run.method], label=run.method, linewidth=width, alpha=alpha)
    curves.axhline(unknowing_loss, color=_GREY, linestyle=":", linewidth=1.2, label="knowing nothing: ln(characters)")
    curves.set_ylabel("training loss, nats a character")
    curves.legend()
    difference = np.abs(np.subtract(runs[0].losses, runs[-1].losses))
    # Where the two losses are the same number there is no dot.
    apart.semilogy(steps, np.where(difference > 0, difference, np.nan), ".", color=_GREY)
    apart.set(ylim=(1e-8, 10), xlim=curves.get_xlim(), ylabel="|difference|, nats", xlabel="step")
    methods, rates = [run.method for run in runs], [run.tokens_per_s for run in runs]
    bars = speed.bar(methods, rates, color=[COLORS[method] for method in methods], width=0.6)
    speed.bar_label(bars, [f"{rate:,.0f}" for rate in rates], padding=3)
    speed.set_ylabel("training speed, tokens a second")
    speed.yaxis.set_major_formatter(_THOUSANDS)
    speed.margins(y=0.12)
    speed.grid(False, axis="x")
    figure.savefig(path)
