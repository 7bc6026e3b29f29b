"""``flashtile tune``: measures tiles of the portable kernels on this machine's GPU, and saves the faster ones."""

from __future__ import annotations

import json
import time
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from flashtile import tuning
from flashtile.backends.portable import tuned
from flashtile.backends.portable.config import Entry, Key
from flashtile.call.arguments import band_of
from flashtile.call.backend import Direction
from flashtile.call.problem import Problem, compute_capability, described, gpu_name
from flashtile.cli.options import AsJson, DtypeName, integers
from flashtile.core import settings
from flashtile.core.errors import InvalidInputError
from flashtile.core.masks import Band
from flashtile.ops import dispatch


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
    seconds: Annotated[float, typer.Option(min=0.0, help="Until no more tiles are begun with.")] = 300.0,
    list_: Annotated[bool, typer.Option("--list", help="What is saved, and which of it calls do not take.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Remove what is saved.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure tiles of the portable kernels on this GPU, and save what is faster where every later call finds it.

    --shape may be given several times; shapes that share tiles are tuned together. Ctrl-C keeps what is known.
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
        records = [{**each._asdict(), "why_not": tuned.why_not(each)} for each in entries]
        lines = [f"{len(entries)} in {place}"]
        for each in entries:
            why = f"not used: {tuned.why_not(each)}" if tuned.why_not(each) else "used"
            lines.append(f"{each.gpu}: {_line(each.key, each.tiles, each.gain)}; {why}")
        typer.echo(json.dumps(records, indent=2) if as_json else "\n".join(lines))
        return
    band = band_of(causal, None if window is None else (window, window))
    problems = [_problem(text, getattr(torch, dtype.value), band) for text in shape or ()]
    if not problems:
        raise InvalidInputError("--shape", "is missing: --shape 1,4096,32,8,128, or --list, or --clear")
    wanted: dict[Direction, bool] = {"forward": forward or not backward, "backward": backward or not forward}
    directions = [direction for direction, is_wanted in wanted.items() if is_wanted]
    todo = tuning.tasks(problems, directions)
    tuned.write(place, entries)  # a file that cannot be written is refused now, not in the end
    results, interrupted = _tune(todo, seconds)
    if as_json:
        found = [(*x.task.key, x.tiles.name, x.gain, x.timed, x.left_out) for x in results]
        names = (*Entry._fields[:8], "timed", "left_out")
        typer.echo(json.dumps([dict(zip(names, row, strict=True)) for row in found], indent=2))
    else:
        for x in results:
            line = _line(x.task.key, x.tiles.name, round(x.gain, 3))
            typer.echo(f"{line}; {x.timed} timed, {len(x.left_out)} left out")
        typer.echo(f"In {place}: what is faster than the tables by 3%")
    others = {dispatch.select(problems[0], direction).name for direction in directions} - {"portable"}
    if others:
        typer.echo(f"These calls run on {' and '.join(others)} here; the tiles are for backend='portable'", err=True)
    if interrupted:
        raise typer.Exit(130)


def _line(key: Key, tiles: str, gain: float) -> str:
    stays = f"the tables' {tiles}" if gain == 1.0 else f"{tiles} instead of {key[5]}, {gain} times as fast"
    return f"{' '.join(map(str, key[1:5]))}: {stays}"


def _tune(todo: list[tuning.Task], seconds: float) -> tuple[list[tuning.Result], bool]:
    """Runs each task, with a bar of the time, and saves its result. Returns also whether Ctrl-C ended them."""
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
    """A call of a shape given as text, with all gradients, on the GPU if there is one."""
    sizes, _, dim_v = text.partition("/")
    batch, seqlen, heads, *rest = [*integers([sizes], "--shape"), *[0] * 3][: max(3, sizes.count(",") + 1)]
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
