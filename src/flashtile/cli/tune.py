"""``flashtile tune``: measures tiles of the portable kernels on this machine's GPU, and saves those that are faster."""

from __future__ import annotations

import time
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from flashtile import dispatch, settings, tuning
from flashtile.arguments import band_of
from flashtile.backends.base import Direction
from flashtile.backends.portable import tuned
from flashtile.cli.choices import DtypeName
from flashtile.cli.options import AsJson, integers, show
from flashtile.errors import InvalidInputError
from flashtile.masks import Band
from flashtile.problem import Problem, compute_capability, described, gpu_name

_COLUMNS = ("calls", "table", "tiles", "gain")


def tune(
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="B,N,H[,HKV],D", help="Batch, length, heads, key heads, head_dim (192/128: v has 128)."),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Query i sees keys up to its own.")] = False,
    window: Annotated[int | None, typer.Option(min=0, help="Keys before and after the query's own.")] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Of q, k and v.")] = DtypeName.bfloat16,
    forward: Annotated[bool, typer.Option("--forward", help="The forward alone.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="The backward alone.")] = False,
    seconds: Annotated[float, typer.Option(min=0.0, help="For all of it; what has begun then is ended.")] = 300.0,
    list_: Annotated[bool, typer.Option("--list", help="What is saved, and which of it calls do not take.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Remove what is saved.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure tiles of the portable kernels on this GPU, and save what is faster where every later call finds it.

    --shape may be given several times; shapes whose calls share tiles are tuned together. Ctrl-C keeps what is known.
    """
    place = tuned.path()
    if place is None:
        raise InvalidInputError(settings.TILES.name, "is off, so there is no file")
    if clear:
        tuned.write(place, ())
        typer.echo(f"{place}: nothing is saved any more")
        return
    entries = tuned.read(place)
    if list_:
        records = [{**each._asdict(), "why_not": each.why_not()} for each in entries]
        cells = [_cells(each.key, each.tiles, each.gain, each.gpu, each.why_not() or "yes") for each in entries]
        columns, note = (*_COLUMNS, "GPU", "used here"), "Calls for which the table has these tiles have those beside."
        show(as_json, f"Tiles in {place}", note, columns, cells, records)
        return
    band = band_of(causal, None if window is None else (window, window))
    problems = [_problem(text, getattr(torch, dtype.value), band) for text in shape or ()]
    if not problems:
        raise InvalidInputError("--shape", "is missing: --shape 1,4096,32,8,128, or --list, or --clear")
    tuned.write(place, entries)  # or this is refused now, not in the end
    wanted: dict[Direction, bool] = {"forward": forward or not backward, "backward": backward or not forward}
    directions = [direction for direction, is_wanted in wanted.items() if is_wanted]
    results, interrupted = _tune(tuning.tasks(problems, directions), seconds)
    cells = [_cells(x.task.key, x.tiles.name, x.gain, x.timed, len(x.left_out)) for x in results]
    records = [
        {**dict(zip(tuned.Entry._fields, (*x.task.key, x.tiles.name, x.gain), strict=False)), "timed": x.timed,
         "left_out": x.left_out} for x in results
    ]  # fmt: skip
    others = {dispatch.select(problems[0], direction).name for direction in directions} - {"portable"}
    note = f" Without backend='portable' such calls run on {' and '.join(others)}, which has its own." if others else ""
    columns = (*_COLUMNS, "timed", "left out")
    show(as_json, results[0].task.key[0], f"Saved in {place}, where faster.{note}", columns, cells, records)
    if interrupted:
        raise typer.Exit(130)


def _cells(key: tuned.Key, tiles: str, gain: object, *more: object) -> list[str]:
    return [" ".join(key[1:5]), key[5], tiles, *(f"{x:.2f}" if isinstance(x, float) else str(x) for x in (gain, *more))]


def _tune(todo: list[tuning.Task], seconds: float) -> tuple[list[tuning.Result], bool]:
    """Each task with a bar of the time, saved when it is done; whether Ctrl-C ended them."""
    results, console, end_s = [], Console(stderr=True), time.monotonic() + seconds
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("building", total=seconds)

        def report(text: str) -> None:
            progress.update(bar, description=text, completed=seconds - max(0.0, end_s - time.monotonic()))

        for done, task in enumerate(todo):
            now_s = time.monotonic()
            result, interrupted = tuning.tune(task, now_s + (end_s - now_s) / (len(todo) - done), report)
            if not interrupted or result.tiles != task.table:
                tuning.save(result)
            results.append(result)
            if interrupted:
                return results, True
    return results, False


def _problem(text: str, dtype: torch.dtype, band: Band) -> Problem:
    """A call of a shape as it was written, with all gradients, on the GPU if there is one."""
    sizes, _, dim_v = text.partition("/")
    batch, seqlen, heads, *rest = integers([sizes], "--shape")
    if len(rest) not in (1, 2):
        raise InvalidInputError(
            "--shape", f"is {text}, must be batch,seqlen,heads,head_dim or have key heads before it"
        )
    heads_kv, head_dim = rest if len(rest) == 2 else (heads, *rest)
    if heads % heads_kv:
        raise InvalidInputError("--shape", f"has {heads} heads, must be a multiple of its {heads_kv} key heads")
    dims = head_dim, integers([dim_v], "--shape")[0] if dim_v else head_dim
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return described(
        device_type=device.type, compute_capability=compute_capability(device), gpu=gpu_name(device), dtype=dtype,
        batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=heads, num_heads_kv=heads_kv, head_dim=dims[0],
        head_dim_v=dims[1], band=band, softmax_scale=head_dim**-0.5, needs_grad=True,
        aligned=all(dim * dtype.itemsize % 16 == 0 for dim in dims),
    )  # fmt: skip
