"""The ``flashtile demo`` command: runs the three parts, draws them, and says where the report lies."""

from __future__ import annotations

import importlib
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text as RichText

from flashtile import dispatch, settings
from flashtile.cli.choices import DeviceType
from flashtile.cli.demo import exactness, scaling, training
from flashtile.cli.demo.probe import Request
from flashtile.cli.info import machine, why_unusable
from flashtile.errors import InvalidInputError, UnsupportedError
from flashtile.examples.char_gpt import Text, shakespeare


@dataclass(frozen=True)
class Size:
    """How much of everything the demo does.

    Attributes:
        seqlen: Tokens of the exactness cases.
        dtypes: Dtypes of the exactness cases.
        num_heads: Heads of the measured calls.
        head_dim: Their width.
        dtype: Their dtype.
        first: Shortest measured length.
        beyond: Lengths measured after standard attention has stopped fitting.
        patience_s: Longest measured call.
        recipe: The training.
        sample_length: Characters that the trained model writes.
    """

    seqlen: int
    dtypes: tuple[torch.dtype, ...]
    num_heads: int
    head_dim: int
    dtype: str
    first: int
    beyond: int
    patience_s: float
    recipe: training.Recipe
    sample_length: int


_CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SIZES = {
    ("cpu", False): Size(
        seqlen=192, dtypes=_CPU_DTYPES, num_heads=4, head_dim=64, dtype="float32", first=512, beyond=2, patience_s=3.0,
        recipe=training.Recipe(128, 4, 4, 128, 8, 4e-3, max_steps=400, min_steps=50, budget_s=20.0), sample_length=320,
    ),
    ("cpu", True): Size(
        seqlen=64, dtypes=_CPU_DTYPES[:2], num_heads=4, head_dim=64, dtype="float32", first=512, beyond=1,
        patience_s=1.0, sample_length=80,
        recipe=training.Recipe(32, 2, 2, 64, 8, 8e-3, max_steps=60, min_steps=30, budget_s=2.0),
    ),
    ("cuda", False): Size(
        seqlen=512, dtypes=(torch.bfloat16, torch.float16), num_heads=16, head_dim=128, dtype="bfloat16", first=1024,
        beyond=3, patience_s=3.0,
        recipe=training.Recipe(256, 6, 6, 384, 64, 2e-3, max_steps=600, min_steps=60, budget_s=20.0), sample_length=320,
    ),
    ("cuda", True): Size(
        seqlen=128, dtypes=(torch.bfloat16,), num_heads=4, head_dim=64, dtype="bfloat16", first=1024, beyond=1,
        patience_s=1.0,
        recipe=training.Recipe(64, 2, 2, 128, 16, 4e-3, max_steps=60, min_steps=30, budget_s=3.0), sample_length=80,
    ),
}  # fmt: skip


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the pictures and the report.")] = Path(
        "flashtile-demo"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="Everything smaller: some twenty seconds on two cores.")
    ] = False,
    device: Annotated[DeviceType, typer.Option(help="auto is the GPU where flashtile can use it.")] = DeviceType.auto,
    memory_budget_mb: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2**30,
            metavar="N",
            show_default="1024 on a CPU, 8192 on a GPU",
            help="Memory (MiB) that one measured call may take beyond its inputs.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            metavar="N",
            show_default="PyTorch's choice, or fewer if faster",
            help="CPU threads to use.",
        ),
    ] = None,
) -> None:
    """See flashtile at work on this machine, in under two minutes on two CPU cores.

    Compares flashtile and PyTorch with attention in float64; measures memory and time of standard attention and
    flashtile for growing lengths, until standard attention no longer fits the budget; trains a small GPT on Shakespeare
    twice from one seed, with either attention. Leaves three PNG plots, results.json and a self-contained report.html.
    """
    start = time.monotonic()
    # Found missing now rather than after a minute's work.
    report = importlib.import_module("flashtile.cli.demo.report")
    if threads is not None:
        torch.set_num_threads(threads)
    console = Console()
    where = _device(device, console)
    _claim_folder(out)
    size = _SIZES[where.type, quick]
    budget = scaling.budget_bytes(memory_budget_mb, where, quick)
    text = shakespeare()
    with _progress(console) as progress:
        bars = [
            progress.add_task(name, total=None, start=False, note="")
            for name in ("warm-up", "exactness", "scaling", "training")
        ]
        steps = _warm_up(size, text, where, threads, progress, bars[0])
        rows = _exactness(size, where, progress, bars[1])
        points = _scaling(size, where, budget, progress, bars[2])
        runs = _training(size, text, where, steps, progress, bars[3])
    results = report.Results(
        machine=machine(),
        setting=f"causal, {size.num_heads} heads, head_dim {size.head_dim}, {size.dtype} on {where.type}",
        budget_bytes=budget,
        rows=rows,
        points=points,
        runs=runs,
        unknowing_loss=math.log(len(text.alphabet)),
        seconds=time.monotonic() - start,
    )
    page = report.write(results, out)
    _print_results(console, results, report)
    console.print(f"Took {time.monotonic() - start:.0f} s. Report: {page.resolve()}", soft_wrap=True, highlight=False)
    if not results.passed:
        raise typer.Exit(1)


def _device(asked: DeviceType, console: Console) -> torch.device:
    """The device to show; auto leaves a GPU that no backend can use, and says so."""
    if asked == DeviceType.cuda and not torch.cuda.is_available():
        raise InvalidInputError("--device", "is cuda, but torch finds no GPU here")
    here = ["cuda"] if torch.cuda.is_available() and asked != DeviceType.cpu else []
    here += ["cpu"] if asked != DeviceType.cuda else []
    forced = settings.BACKEND.get()
    names = (forced,) if forced else dispatch.NAMES
    against = {device: {name: why_unusable(name, device) for name in names} for device in here}
    for device in here:
        if not all(against[device].values()):
            return torch.device(device)
        if device != here[-1]:
            console.print("No backend can use this machine's GPU (see flashtile info), so the CPU is shown.")
    raise UnsupportedError(f"no backend can run the demo on {here[-1]}", against[here[-1]])


def _claim_folder(out: Path) -> None:
    """Makes the folder and writes into it once, so that a path that cannot be used is refused at once."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise InvalidInputError("--out", f"cannot write to {out}: {error.strerror or error}") from None


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=14),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
    )
    return Progress(*columns, console=console)


def _warm_up(size: Size, text: Text, device: torch.device, threads: int | None, progress: Progress, bar: TaskID) -> int:
    """Settles what depends on the machine: CPU threads, unless they were given, and the steps of the training."""
    progress.start_task(bar)
    if device.type == "cpu" and threads is None:
        seconds = training.choose_threads(size.recipe, text)
    else:
        seconds = training.step_seconds(size.recipe, text, device)
    steps = training.choose_steps(size.recipe, seconds)
    note = f"CPU threads: {torch.get_num_threads()}, training steps: {steps}"
    progress.update(bar, total=1, completed=1, note=note)
    return steps


def _exactness(size: Size, device: torch.device, progress: Progress, bar: TaskID) -> list[exactness.Row]:
    progress.start_task(bar)
    progress.update(bar, total=len(exactness.CASES) * len(size.dtypes))
    rows = []
    for row in exactness.rows(device, size.dtypes, size.seqlen):
        rows.append(row)
        progress.update(bar, advance=1, note=f"{row.case}, {row.dtype}: {row.flashtile_out:.0e}")
    passed = sum(row.passed and not row.refused for row in rows)
    progress.update(bar, note=f"{passed} of {len(rows)} cases exact")
    return rows


def _scaling(size: Size, device: torch.device, budget: int, progress: Progress, bar: TaskID) -> list[scaling.Point]:
    progress.start_task(bar)
    template = Request(
        method="",
        seqlen=0,
        num_heads=size.num_heads,
        head_dim=size.head_dim,
        dtype=size.dtype,
        device=device.type,
        backward=False,
        budget_bytes=budget,
        threads=torch.get_num_threads(),
    )
    plan = scaling.Plan(template, size.first, size.beyond, size.patience_s)
    points = []
    for point in scaling.points(plan):
        points.append(point)
        seen = f"{point.peak_bytes / 1e6:,.0f} MB" if point.fits else f"no room in {budget / 1e6:,.0f} MB"
        progress.update(bar, note=f"{point.seqlen:,} tokens, {point.method}: {seen}")
    progress.update(bar, total=1, completed=1, note=_reach(points, budget))
    return points


def _reach(points: Sequence[scaling.Point], budget: int) -> str:
    failed = [p.seqlen for p in points if p.method == "standard" and not p.fits and not p.backward]
    if not failed:
        return "standard: too slow before it was too big"
    return f"standard: no room in {budget / 1e6:,.0f} MB at {failed[0]:,} tokens"


def _training(
    size: Size, text: Text, device: torch.device, steps: int, progress: Progress, bar: TaskID
) -> list[training.Run]:
    progress.start_task(bar)
    progress.update(bar, total=steps)

    def on_step(losses: dict[str, float]) -> None:
        note = ", ".join(f"{method}: loss {loss:.3f}" for method, loss in losses.items())
        progress.update(bar, advance=1, note=note)

    return training.train(size.recipe, text, device, steps, size.sample_length, on_step)


def _print_results(console: Console, results: Any, report: ModuleType) -> None:
    console.print()
    exact = _table("Exactness: largest relative error against attention in float64", report.EXACTNESS_COLUMNS)
    for row, cells in zip(results.rows, report.exactness_cells(results.rows), strict=True):
        exact.add_row(*cells, style=None if row.passed else "bold red")
    console.print(exact, "")
    for refused in dict.fromkeys(row.refused for row in results.rows if row.refused):
        console.print(f"not run: {refused}", style="dim", highlight=False)
    for backward in (False, True):
        what = "forward and backward" if backward else "forward"
        grown = _table(f"Peak memory and time, {what}: {results.setting}", report.SCALING_COLUMNS)
        for cells in report.scaling_cells(results.points, backward=backward):
            grown.add_row(*cells)
        console.print(grown, "")
    trained = _table("Training", ("attention", "first loss", "last loss", "held-out loss", "tokens/s"))
    for run in results.runs:
        losses = (run.losses[0], run.losses[-1], run.held_out_loss)
        trained.add_row(run.method, *(f"{loss:.3f}" for loss in losses), f"{run.tokens_per_s:,.0f}")
    console.print(trained)
    console.print(f"The two loss curves are at most {results.loss_gap:.1e} apart.", highlight=False)
    sample = RichText(results.runs[-1].sample)
    console.print(Panel(sample, title="What the model writes", title_align="left", border_style="dim"))


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE, show_edge=False, padding=(0, 1, 0, 0)
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    return table
