"""The ``flashtile-lab demo`` command: runs the three parts, draws them, and says where the report lies."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from flashtile.cli.info import machine, why_unusable
from flashtile.cli.options import DeviceType
from flashtile.core import settings
from flashtile.core.errors import InvalidInputError, UnsupportedError
from flashtile.ops import dispatch
from flashtile_lab.commands.demo import exactness, scaling, training
from flashtile_lab.commands.demo.probe import Point, Setting
from flashtile_lab.examples.char_gpt import Text, shakespeare

T = TypeVar("T")


@dataclass(frozen=True)
class Size:
    """How much of everything the demo does."""

    seqlen: int  # of the exactness cases
    dtypes: tuple[torch.dtype, ...]  # of the exactness cases
    num_heads: int  # of the measured calls, as are the next two
    head_dim: int
    dtype: str
    first: int  # shortest measured length
    beyond: int  # lengths measured after standard attention has stopped fitting
    patience_s: float  # longest measured call
    recipe: training.Recipe
    sample_length: int  # characters that the trained model writes


_CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SIZES = {
    ("cpu", False): Size(
        seqlen=192, dtypes=_CPU_DTYPES, num_heads=4, head_dim=64, dtype="float32", first=512, beyond=1, patience_s=1.5,
        recipe=training.Recipe(128, 4, 4, 128, 8, 4e-3, max_steps=400, min_steps=50, budget_s=8.0), sample_length=320,
    ),
    ("cpu", True): Size(
        seqlen=64, dtypes=_CPU_DTYPES[:2], num_heads=4, head_dim=64, dtype="float32", first=512, beyond=1,
        patience_s=1.0, sample_length=80,
        recipe=training.Recipe(32, 2, 2, 64, 8, 8e-3, max_steps=60, min_steps=30, budget_s=2.0),
    ),
    ("cuda", False): Size(
        seqlen=512, dtypes=(torch.bfloat16, torch.float16), num_heads=16, head_dim=128, dtype="bfloat16", first=1024,
        beyond=3, patience_s=3.0,
        recipe=training.Recipe(256, 6, 6, 384, 64, 2e-3, max_steps=600, min_steps=60, budget_s=12.0), sample_length=320,
    ),
    ("cuda", True): Size(
        seqlen=128, dtypes=(torch.bfloat16,), num_heads=4, head_dim=64, dtype="bfloat16", first=1024, beyond=1,
        patience_s=1.0,
        recipe=training.Recipe(64, 2, 2, 128, 16, 4e-3, max_steps=60, min_steps=30, budget_s=3.0), sample_length=80,
    ),
}  # fmt: skip


Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder for the pictures and the report.")]
Quick = Annotated[bool, typer.Option("--quick", help="Everything smaller: some twenty seconds on two cores.")]
Device = Annotated[DeviceType, typer.Option(help="auto is the GPU where flashtile can use it.")]
MemoryBudget = Annotated[int | None, typer.Option(
    min=1, max=2**30, metavar="N", show_default="1024 on a CPU, 8192 on a GPU",
    help="Memory (MiB) that one measured call may take beyond its inputs.",
)]  # fmt: skip
Threads = Annotated[int | None, typer.Option(
    min=1, max=4096, metavar="N", show_default="PyTorch's choice, or fewer if faster", help="CPU threads to use.",
)]  # fmt: skip


def demo(
    out: Out = Path("flashtile-demo"),
    quick: Quick = False,
    device: Device = DeviceType.auto,
    memory_budget_mb: MemoryBudget = None,
    threads: Threads = None,
) -> None:
    """See flashtile at work on this machine, in a minute and a half on two CPU cores.

    Compares flashtile and PyTorch with attention in float64; measures memory and time of standard attention, PyTorch's
    scaled_dot_product_attention (SDPA) and flashtile for growing lengths; trains a small GPT on Shakespeare from one
    seed with each of them. Leaves three PNG plots, results.json, a self-contained report.html, and the explorer's page.
    """
    start = time.monotonic()
    # Here, because matplotlib takes long to load; and if it is missing, that is found before a minute's work.
    from flashtile_lab.commands.demo import report

    if threads is not None:
        torch.set_num_threads(threads)
    console = Console()
    where = _device(device, console)
    _claim_folder(out)
    size = _SIZES[where.type, quick]
    budget = scaling.budget_bytes(memory_budget_mb, where, quick)
    text = shakespeare()
    console.print(f"{'Twenty seconds' if quick else 'A minute and a half'} on two CPU cores.", style="dim")
    with _progress(console) as progress:
        warm_up, exact, scale, train = (
            _Bar(progress, name) for name in ("warm-up", "exactness", "scaling", "training")
        )
        steps = _warm_up(size, text, where, threads, warm_up)
        rows = _exactness(size, where, exact)
        points = _scaling(size, where, budget, scale)
        runs = _training(size, text, where, steps, train)
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
    report.show(results, console)
    console.print(f"Took {results.seconds:.0f} s. Report: {page.resolve()}", soft_wrap=True, highlight=False)
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
    note = TextColumn("{task.fields[note]}", style="dim")
    return Progress(TextColumn("{task.description:<10}"), BarColumn(14), TimeElapsedColumn(), note, console=console)


class _Bar:
    """The progress of one part; its clock starts with it."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress = progress
        self._task = progress.add_task(name, total=None, start=False, note="")

    def start(self, total: int | None = None) -> None:
        self._progress.start_task(self._task)
        self._progress.update(self._task, total=total)

    def step(self, note: str) -> None:
        self._progress.update(self._task, advance=1, note=note)

    def finish(self, note: str) -> None:
        self._progress.update(self._task, total=1, completed=1, note=note)

    def collect(self, items: Iterable[T], total: int | None, note: Callable[[T], str]) -> list[T]:
        """The items, each noted as it comes."""
        self.start(total)
        found = []
        for item in items:
            found.append(item)
            self.step(note(item))
        return found


def _warm_up(size: Size, text: Text, device: torch.device, threads: int | None, bar: _Bar) -> int:
    """Settles what depends on the machine: CPU threads, unless they were given, and the steps of the training."""
    bar.start()
    if device.type == "cpu" and threads is None:
        seconds = training.choose_threads(size.recipe, text)
    else:
        seconds = training.step_seconds(size.recipe, text, device)
    steps = training.choose_steps(size.recipe, seconds)
    bar.finish(f"CPU threads: {torch.get_num_threads()}, training steps: {steps}")
    return steps


def _exactness(size: Size, device: torch.device, bar: _Bar) -> list[exactness.Row]:
    rows = bar.collect(
        exactness.rows(device, size.dtypes, size.seqlen),
        len(exactness.CASES) * len(size.dtypes),
        lambda row: f"{row.case}, {row.dtype}: {row.flashtile_out:.0e}",
    )
    bar.finish(f"{sum(row.passed and not row.refused for row in rows)} of {len(rows)} cases exact")
    return rows


def _scaling(size: Size, device: torch.device, budget: int, bar: _Bar) -> list[Point]:
    room = f"no room in {budget / 1e6:,.0f} MB"

    def note(point: Point) -> str:
        seen = f"{point.peak_bytes / 1e6:,.0f} MB" if point.fits else room
        return f"{point.seqlen:,} tokens, {point.method}: {seen}"

    setting = Setting(size.num_heads, size.head_dim, size.dtype, device.type, budget, torch.get_num_threads())
    points = bar.collect(scaling.points(setting, size.first, size.beyond, size.patience_s), None, note)
    failed = [p.seqlen for p in points if p.method == "standard" and not p.fits and not p.backward]
    reached = f"{room} at {failed[0]:,} tokens" if failed else "too slow before it was too big"
    bar.finish(f"standard: {reached}")
    return points


def _training(size: Size, text: Text, device: torch.device, steps: int, bar: _Bar) -> list[training.Run]:
    def on_step(losses: dict[str, float]) -> None:
        bar.step("losses " + ", ".join(f"{loss:.3f}" for loss in losses.values()))

    bar.start(steps)
    return training.train(size.recipe, text, device, steps, size.sample_length, on_step)
