"""What the demo found: tables on the terminal, and a folder of pictures, numbers and one HTML page with everything."""

from __future__ import annotations

import base64
import dataclasses
import html
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from flashtile_lab import explore
from flashtile_lab.commands.demo import plots
from flashtile_lab.commands.demo.exactness import Row
from flashtile_lab.commands.demo.probe import Point
from flashtile_lab.commands.demo.training import Run
from flashtile_lab.commands.options import number_table

_SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Results:
    """Everything that the demo found."""

    machine: dict[str, Any]  # as ``flashtile info --json`` says it
    setting: str  # of the points, in a few words
    budget_bytes: int
    rows: Sequence[Row]
    points: Sequence[Point]
    runs: Sequence[Run]  # standard attention first
    unknowing_loss: float  # ln of the number of characters
    seconds: float  # that the demo took

    @property
    def passed(self) -> bool:
        """Whether every case was within its bound."""
        return all(row.passed for row in self.rows)

    @property
    def loss_gap(self) -> float:
        """The largest distance of standard's and flashtile's loss curves, nats."""
        return max(abs(a - b) for a, b in zip(self.runs[0].losses, self.runs[-1].losses, strict=True))


@dataclass(frozen=True)
class Figures:
    """A table, for the terminal and for the page: its title on either, its columns and cells."""

    title: str
    summary: str
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]


def exactness_figures(results: Results) -> Figures:
    """A line for each row: case, dtype, four errors, PyTorch's function, verdict."""
    cells = []
    for row in results.rows:
        errors = (row.flashtile_out, row.pytorch_out, row.flashtile_grad, row.pytorch_grad)
        shown = ["-" if math.isnan(error) else f"{error:.1e}" for error in errors]
        verdict = "not run" if row.refused else "yes" if row.passed else "NO"
        cells.append([row.case, _SHORT_DTYPES.get(row.dtype, row.dtype), *shown, row.pytorch, verdict])
    columns = ("case", "dtype", "out", "PyTorch", "grads", "PyTorch", "by", "exact")
    title = "Exactness: largest relative error against attention in float64"
    return Figures(title, "The numbers", columns, cells)


def scaling_figures(results: Results) -> Iterator[Figures]:
    """Memory, then time, of the forward, then of both directions: a line for each length, a column for each method."""
    for (backward, what), memory in itertools.product(plots.DIRECTIONS.items(), (True, False)):
        found = {(p.method, p.seqlen): p for p in results.points if p.backward == backward}

        def cell(p: Point | None, memory: bool = memory) -> str:
            number = p and (p.peak_bytes / 1e6 if memory else p.time_s * 1e3)
            return "-" if p is None else f"{number:,.1f}" if p.fits else "too big"

        lengths = sorted({n for _, n in found})
        cells = [[f"{n:,}", *(cell(found.get((method, n))) for method in plots.COLORS)] for n in lengths]
        title = f"{'Peak memory, MB' if memory else 'Time, ms'}, {what}"
        yield Figures(f"{title}: {results.setting}", title, ("tokens", *plots.COLORS), cells)


def training_figures(results: Results) -> Figures:
    """A line for each run: its losses and its speed."""
    cells = []
    for run in results.runs:
        losses = (run.losses[0], run.losses[-1], run.held_out_loss)
        cells.append([run.method, *(f"{loss:.3f}" for loss in losses), f"{run.tokens_per_s:,.0f}"])
    columns = ("attention", "first loss", "last loss", "held-out loss", "tokens/s")
    return Figures("Training", "The numbers", columns, cells)


def show(results: Results, console: Console) -> None:
    """Prints the tables and what the model writes."""

    def show_figures(figures: Figures) -> None:
        table = number_table(
            figures.title, figures.columns, figures.cells,
            title_style="bold", box=box.SIMPLE, show_edge=False, padding=(0, 1, 0, 0),
        )  # fmt: skip
        for line, cells in zip(table.rows, figures.cells, strict=True):
            line.style = "bold red" if "NO" in cells else None
        console.print(table, "")

    console.print()
    show_figures(exactness_figures(results))
    for refused in dict.fromkeys(row.refused for row in results.rows if row.refused):
        console.print(f"not run: {refused}", style="dim", highlight=False)
    console.print(f"{_exact_note(results)}\n", style="dim", highlight=False)
    for figures in (*scaling_figures(results), training_figures(results)):
        show_figures(figures)
    console.print(f"Standard's and flashtile's losses are at most {results.loss_gap:.1e} apart.", highlight=False)
    sample = Text(results.runs[-1].sample)
    console.print(Panel(sample, title="What the model writes", title_align="left", border_style="dim"))


def write(results: Results, folder: Path) -> Path:
    """Writes the pictures, ``results.json``, ``explore.html``, which is the explorer, and ``report.html``.

    Returns:
        The path of the HTML page.
    """
    pictures = {name: folder / f"{name}.png" for name in ("exactness", "scaling", "training")}
    plots.draw_exactness(results.rows, pictures["exactness"])
    plots.draw_scaling(results.points, results.budget_bytes, results.setting, pictures["scaling"])
    plots.draw_training(results.runs, results.unknowing_loss, pictures["training"])
    facts = {**dataclasses.asdict(results), "passed": results.passed, "loss_gap": results.loss_gap}
    (folder / "results.json").write_text(json.dumps(_finite(facts), indent=1) + "\n", encoding="utf-8")
    explore.write(folder / "explore.html")
    page = folder / "report.html"
    page.write_text(_page(results, pictures), encoding="utf-8")
    return page


def _finite(value: Any) -> Any:
    """The same with null for nan, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _page(results: Results, pictures: dict[str, Path]) -> str:
    standard, sdpa, tiled = results.runs
    worst = "All cases are as exact as their dtype allows." if results.passed else "Some cases are NOT exact."
    forward = [p for p in results.points if not p.backward]
    longest = {m: max((p.seqlen for p in forward if p.method == m and p.fits), default=0) for m in plots.COLORS}
    sections = [
        _section(
            "Exact",
            f"{worst} Every method gets the same rounded inputs and is compared with attention in float64. A result "
            "counts as exact if flashtile's error is at most twice that of standard attention in the same dtype, plus "
            f"one unit of rounding. {_exact_note(results)}",
            _image(pictures["exactness"], "errors of flashtile and PyTorch by case and dtype"),
            _table(exactness_figures(results)),
        ),
        _section(
            "Linear in memory",
            f"Attention ({results.setting}) in a budget of {results.budget_bytes / 1e6:,.0f} MB beyond its "
            f"inputs. In the forward, standard attention reached {longest['standard']:,} tokens, flashtile was still "
            f"measured at {longest['flashtile']:,}. SDPA has no window but a mask of all pairs, and so reached "
            f"{longest['SDPA, window']:,} with one, flashtile {longest['flashtile, window']:,}.",
            _image(pictures["scaling"], "peak memory and time over sequence length"),
            *map(_table, scaling_figures(results)),
        ),
        _section(
            "Same training",
            f"Loss on held-out text: {standard.held_out_loss:.3f} with standard attention, {tiled.held_out_loss:.3f} "
            f"with flashtile (nats a character). The curves are never further apart than {results.loss_gap:.1e}: both "
            "compute the same attention and round differently. Tokens a second: "
            f"{standard.tokens_per_s:,.0f}, SDPA's {sdpa.tokens_per_s:,.0f}, flashtile's {tiled.tokens_per_s:,.0f}.",
            _image(pictures["training"], "loss curves over each other"),
            _table(training_figures(results)),
            "<p>What the model trained with flashtile writes:</p>",
            f"<pre>{html.escape(tiled.sample)}</pre>",
        ),
    ]
    return _TEMPLATE.format(
        style=_STYLE,
        machine=html.escape(_machine_line(results.machine)),
        seconds=results.seconds,
        body="".join(sections),
    )


def _exact_note(results: Results) -> str:
    """What stands beside flashtile in the rows of exactness."""
    note = (
        "PyTorch is its scaled_dot_product_attention (SDPA), by a mask of all pairs where it has no window, and "
        "standard attention where SDPA has no such feature."
    )
    own = " On a CPU our forward calls SDPA's own kernel, block by block, so many errors are equal."
    return note + own * ("on cpu" in results.setting)


def _machine_line(machine: dict[str, Any]) -> str:
    gpus = ", ".join(gpu["name"] for gpu in machine["gpus"])
    return (
        f"flashtile {machine['flashtile']}, PyTorch {machine['torch']}, Python {machine['python']}, "
        f"{machine['system']}, CPU threads: {machine['cpu_threads']}" + (f", {gpus}" if gpus else "")
    )


def _section(title: str, text: str, *parts: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2><p>{html.escape(text)}</p>{''.join(parts)}</section>"


def _image(path: Path, description: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(description)}" src="data:image/png;base64,{data}">'


def _table(figures: Figures) -> str:
    """The table, folded away under its summary."""
    lines = [("th", figures.columns), *(("td", line) for line in figures.cells)]
    rows = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line) for tag, line in lines)
    content = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<details><summary>{html.escape(figures.summary)}</summary><table>{content}</table></details>"


_STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1f2328; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { margin-bottom: 0 } .machine { color: #57606a; margin-top: .3rem }
section { border-top: 1px solid #d8dee4; margin-top: 2rem }
img { max-width: 100%; height: auto }
table { border-collapse: collapse; font-size: .85rem; margin: .6rem 0 }
td, th { border: 1px solid #d8dee4; padding: .2rem .6rem; text-align: right }
td:first-child, th:first-child { text-align: left }
pre { background: #f6f8fa; padding: 1rem; border-radius: 6px; overflow-x: auto; line-height: 1.35 }
summary { cursor: pointer; color: #1f6feb }
"""

_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>flashtile-lab demo</title>
<style>{style}</style>
</head>
<body>
<h1>flashtile-lab demo</h1>
<p class="machine">{machine}. Took {seconds:.0f} s.</p>
<p><a href="explore.html">The explorer</a> shows how it works, step by step.</p>
{body}
</body>
</html>
"""
