"""The demo's folder: pictures, the numbers behind them, and one HTML page that holds everything."""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashtile.cli.demo import plots
from flashtile.cli.demo.exactness import Row
from flashtile.cli.demo.scaling import Point
from flashtile.cli.demo.training import Run


@dataclass(frozen=True)
class Results:
    """Everything that the demo found.

    Attributes:
        machine: As ``flashtile info --json`` says it.
        setting: The calls of ``points`` in a few words: dtype, heads, device.
        budget_bytes: The memory they had.
        rows: Exactness.
        points: Memory and time.
        runs: Training, standard attention first.
        unknowing_loss: ``ln`` of the number of characters.
        seconds: How long the demo took.
    """

    machine: dict[str, Any]
    setting: str
    budget_bytes: int
    rows: Sequence[Row]
    points: Sequence[Point]
    runs: Sequence[Run]
    unknowing_loss: float
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every case was within its bound."""
        return all(row.passed for row in self.rows)

    @property
    def loss_gap(self) -> float:
        """The largest distance of the two loss curves, nats."""
        return max(abs(a - b) for a, b in zip(self.runs[0].losses, self.runs[1].losses, strict=True))


def write(results: Results, folder: Path) -> Path:
    """Writes the pictures, ``results.json`` and ``report.html``.

    Returns:
        The path of the HTML page.
    """
    pictures = {name: folder / f"{name}.png" for name in ("exactness", "scaling", "training")}
    plots.draw_exactness(results.rows, pictures["exactness"])
    plots.draw_scaling(results.points, results.budget_bytes, results.setting, pictures["scaling"])
    plots.draw_training(results.runs, results.unknowing_loss, pictures["training"])
    facts = {**dataclasses.asdict(results), "passed": results.passed, "loss_gap": results.loss_gap}
    (folder / "results.json").write_text(json.dumps(_finite(facts), indent=1) + "\n", encoding="utf-8")
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


def exactness_cells(rows: Iterable[Row]) -> list[list[str]]:
    """A line for each row: case, dtype, four errors, PyTorch's function, verdict."""
    return [
        [
            row.case,
            SHORT_DTYPES.get(row.dtype, row.dtype),
            *(error_text(e) for e in (row.flashtile_out, row.pytorch_out, row.flashtile_grad, row.pytorch_grad)),
            row.pytorch,
            "not run" if row.refused else "yes" if row.passed else "NO",
        ]
        for row in rows
    ]


SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
EXACTNESS_COLUMNS = ("case", "dtype", "out", "PyTorch", "grads", "PyTorch", "by", "exact")


def scaling_cells(points: Sequence[Point], backward: bool) -> list[list[str]]:
    """A line for each length: memory of both methods and their ratio, time of both and their ratio."""
    found = {(p.method, p.seqlen): p for p in points if p.backward == backward}
    cells = []
    for seqlen in sorted({n for _, n in found}):
        standard, tiled = found.get(("standard", seqlen)), found.get(("flashtile", seqlen))
        memory = [_memory_text(p) for p in (standard, tiled)]
        times = [f"{p.time_s * 1e3:,.1f}" if p and p.fits else "-" for p in (standard, tiled)]
        ratios = ["-", "-"]
        if standard and tiled and standard.fits and tiled.fits:
            ratios = [
                f"{standard.peak_bytes / max(tiled.peak_bytes, 4096):,.0f}x",
                f"{standard.time_s / tiled.time_s:,.1f}x",
            ]
        cells.append([f"{seqlen:,}", *memory, ratios[0], *times, ratios[1]])
    return cells


SCALING_COLUMNS = (
    "tokens", "standard MB", "flashtile MB", "less", "standard ms", "flashtile ms", "faster",
)  # fmt: skip


def error_text(error: float) -> str:
    """A relative error in a few characters."""
    return "-" if math.isnan(error) else f"{error:.1e}"


def _memory_text(point: Point | None) -> str:
    if point is None:
        return "-"
    return f"{point.peak_bytes / 1e6:,.1f}" if point.fits else "too big"


def _page(results: Results, pictures: dict[str, Path]) -> str:
    standard, tiled = results.runs
    worst = "All cases are as exact as their dtype allows." if results.passed else "Some cases are NOT exact."
    forward = [p for p in results.points if not p.backward]
    longest = {m: max((p.seqlen for p in forward if p.method == m and p.fits), default=0) for m in plots.COLORS}
    sections = [
        _section(
            "Exact",
            f"{worst} Every method gets the same rounded inputs and is compared with attention in float64. A result "
            "counts as exact if flashtile's error is at most twice that of standard attention in the same dtype, plus "
            "one unit of rounding. Where PyTorch's scaled_dot_product_attention (SDPA) cannot express a case, standard "
            "attention in PyTorch stands beside it.",
            _image(pictures["exactness"], "errors of flashtile and PyTorch by case and dtype"),
            _details("The numbers", _table(EXACTNESS_COLUMNS, exactness_cells(results.rows))),
        ),
        _section(
            "Linear in memory",
            f"Attention ({results.setting}) in a budget of {results.budget_bytes / 1e6:,.0f} MB beyond its "
            f"inputs. In the forward, standard attention reached {longest['standard']:,} tokens, flashtile was still "
            f"measured at {longest['flashtile']:,}.",
            _image(pictures["scaling"], "peak memory and time over sequence length"),
            _details("Forward, numbers", _table(SCALING_COLUMNS, scaling_cells(results.points, backward=False))),
            _details("Forward and backward", _table(SCALING_COLUMNS, scaling_cells(results.points, backward=True))),
        ),
        _section(
            "Same training",
            f"Loss on held-out text: {standard.held_out_loss:.3f} with standard attention, {tiled.held_out_loss:.3f} "
            f"with flashtile (nats a character). The curves are never further apart than {results.loss_gap:.1e}: both "
            "compute the same attention and round differently. "
            f"Speed: {standard.tokens_per_s:,.0f} and {tiled.tokens_per_s:,.0f} tokens a second.",
            _image(pictures["training"], "two loss curves over each other"),
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


def _details(title: str, content: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{content}</details>"


def _table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in cells)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


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
<title>flashtile demo</title>
<style>{style}</style>
</head>
<body>
<h1>flashtile demo</h1>
<p class="machine">{machine}. Took {seconds:.0f} s.</p>
{body}
</body>
</html>
"""
