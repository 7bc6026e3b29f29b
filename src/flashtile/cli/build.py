"""``flashtile build``: compiles kernels ahead for an architecture, into an archive that calls load from."""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

import flashtile
from flashtile.backends.gpu import ahead
from flashtile.call.problem import gpu_of
from flashtile.cli.models import Call, LayerShape, Uses, calls, models
from flashtile.core.errors import InvalidInputError, UnsupportedError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
# These options belong to the whole command, not to a layer.
_OF_COMMAND = ("listed", "missed", "exact", "jobs")
# Seconds between writes of the kernels compiled so far, so that little is lost if the machine ends the process.
_EACH_S = 120


def build(
    context: typer.Context,
    out: Annotated[Path, typer.Option("-o", "--out", help="The archive; what it has already is kept.")],
    arch: Annotated[str, typer.Option(help="The architecture: sm_80, sm_86, sm_89, sm_90, sm_100, sm_120.")],
    model: Annotated[list[str] | None, typer.Option(help="A model by name; several times for several.")] = None,
    heads: Annotated[
        str | None, typer.Option(metavar="Q[/KV]", help="Heads of a layer, instead of --model; several with commas.")
    ] = None,
    head_dim: Annotated[int, typer.Option(min=8, max=512, help="With --heads: the width of q, k and v.")] = 128,
    causal: Annotated[bool, typer.Option("--causal", help="With --heads: query i sees keys up to its own.")] = False,
    window: Annotated[int | None, typer.Option(min=0, help="With --heads: keys before the query's own.")] = None,
    softcap: Annotated[float, typer.Option(help="With --heads: the cap, 0 for none.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, or both with a comma.")] = "bf16",
    packed: Annotated[bool, typer.Option("--packed", help="Packed sequences too.")] = False,
    forward: Annotated[bool, typer.Option("--forward", help="No backwards.")] = False,
    pages: Annotated[
        list[int] | None, typer.Option(min=0, help="Serving too, in pages of so many rows; 0 for a cache without.")
    ] = None,
    serving: Annotated[bool, typer.Option("--serving", help="With --pages: calls over a cache alone.")] = False,
    append: Annotated[
        bool | None,
        typer.Option("--append/--no-append", help="With --pages: calls that write keys, or others; both if left out."),
    ] = None,
    cache: Annotated[str | None, typer.Option(help="The cache's dtype, fp8 or as --dtype if left out.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp8: forwards that round q, k and v to 8 bits.")] = None,
    seqlen: Annotated[
        list[int] | None, typer.Option(min=1, help="Of such lengths alone; for a server of such chunks of prompts.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Of so many sequences alone.")] = None,
    listed: Annotated[
        Path | None, typer.Option("--list", help="A file with such options in each line, for many layers.")
    ] = None,
    missed: Annotated[
        Path | None, typer.Option(help="What a run compiled: a file that FLASHTILE_RECORD wrote.")
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Drop what the archive has and is not asked for.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Kernels compiled at once; one a core if left out.")] = None,
) -> None:
    """Compile kernels ahead, on a machine that need not have a GPU, into an archive.

    A process with FLASHTILE_KERNELS set to the archive's path loads them in milliseconds, without Triton.
    """
    if find_spec("triton") is None:
        raise UnsupportedError("building kernels needs Triton, which is not installed: pip install triton")
    from triton.backends.compiler import GPUTarget

    gpu = gpu_of(arch)
    if gpu.backend != "cuda":
        raise InvalidInputError("--arch", f"is {arch}, but archives hold code for NVIDIA GPUs alone")
    wanted = wanted_calls(context.params) + ([] if listed is None else list_calls(listed, context.command))
    lines = [] if missed is None else sorted(set(_read(missed, "--missed").splitlines()))
    if not wanted and not lines:
        raise InvalidInputError("--model", "is missing: --model llama3-8b, or --heads 32/8 --head-dim 128, or --list")
    start_s = time.perf_counter()
    with ahead.into(out, lists=True) as recorder:
        refused = list_launches(wanted, arch)
        for line in lines:
            try:
                recorder.build(ahead.from_json(line), GPUTarget("cuda", gpu.arch, 32))
            except ValueError as error:
                refused.append(f"a line of --missed {error}")
        if exact:
            recorder.builds = {key: found for key, found in recorder.builds.items() if key in recorder.asked}
        before = len(recorder.builds)
        typer.echo(f"{len(recorder.launches)} kernels to compile, {before} are there", err=True)
        try:
            _compile(recorder, out, int(gpu.arch), jobs or os.cpu_count() or 1)
        except KeyboardInterrupt:
            refused.append("what was not compiled when it was interrupted; the same command goes on")
    count, size, seconds = len(recorder.builds), out.stat().st_size, time.perf_counter() - start_s
    typer.echo(f"{out}: {count} kernels, {count - before} of them new, {size / 1e6:.2f} MB, {seconds:.0f} s")
    for text in dict.fromkeys((*refused, *recorder.left_out)):
        typer.echo(f"left out: {text}", err=True)
    if any(isinstance(each, ahead.Failed) for each in recorder.left_out):
        raise typer.Exit(1)


def wanted_calls(options: dict[str, Any]) -> list[Call]:
    """The calls that a command line's options name."""
    names = ("model", "heads", "head_dim", "causal", "window", "softcap")
    shapes = _shapes(*(options[name] for name in names))
    pages, appends = tuple(options["pages"] or ()), options["append"]
    over_cache = {"--serving": options["serving"], "--append": appends is not None, "--cache": options["cache"]}
    alone = {"--precision": options["precision"], "--packed": options["serving"] and options["packed"]}
    for name in () if pages else (name for name, given in over_cache.items() if given):
        raise InvalidInputError(name, "is given, but no --pages")
    for name in (name for name, given in alone.items() if given) if pages else ():
        raise InvalidInputError(name, "is given, but calls over a cache have none")
    if options["heads"] is None and (options["causal"] or options["window"] is not None or options["softcap"]):
        raise InvalidInputError("--heads", "is missing: --causal, --window and --softcap describe its layer")
    if options["precision"] not in (None, "fp8"):
        raise InvalidInputError("--precision", f"is {options['precision']!r}, must be fp8")
    trains = not options["serving"]
    uses = Uses(
        torch.float16, trains, trains and options["packed"], not options["forward"], pages,
        None if options["cache"] is None else _dtype(options["cache"], "--cache"),
        (False, True) if appends is None else (appends,), tuple(options["seqlen"] or ()), tuple(options["batch"] or ()),
        options["precision"],
    )  # fmt: skip
    kinds = [_dtype(name, "--dtype") for name in options["dtype"].split(",")]
    return [call for shape in shapes for kind in kinds for call in calls(shape, uses._replace(dtype=kind))]


def list_calls(file: Path, command: Any) -> list[Call]:
    """The calls of a list: each line has options of the command ``build`` that name layers."""
    found: list[Call] = []
    for number, line in enumerate(_read(file, "--list").splitlines(), 1):
        if not (words := shlex.split(line, comments=True)):
            continue
        # The command needs the last two options to be complete.
        options = command.make_context(f"line {number} of {file.name}", [*words, "--arch=", "--out="]).params
        if any(options[name] for name in _OF_COMMAND):
            raise InvalidInputError("--list", f"has in line {number} what is not an option of layers: {line.strip()}")
        found += wanted_calls(options)
    return found


def _read(file: Path, option: str) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(option, f"{str(file)!r} cannot be read: {error}") from None


def _shapes(
    names: list[str] | None, heads: str | None, head_dim: int, causal: bool, window: int | None, softcap: float
) -> list[LayerShape]:
    known = models()
    for name in names or ():
        if name not in known:
            raise InvalidInputError("--model", f"is {name!r}, must be one of {', '.join(known)}")
    found = [shape for name in names or () for shape in known[name]]
    for each in () if heads is None else heads.split(","):
        if not (match := re.fullmatch(r"(\d+)(?:/(\d+))?", each.strip())):
            raise InvalidInputError("--heads", f"is {each!r}, must be like 32/8, or 16")
        of_q, of_kv = int(match[1]), int(match[2] or match[1])
        if not of_kv or not of_q or of_q % of_kv:
            raise InvalidInputError("--heads", f"is {each}, the first must be a multiple of the second")
        found.append(LayerShape(of_q, of_kv, head_dim, causal, window, softcap))
    return found


def _dtype(name: str, option: str) -> torch.dtype:
    if name.strip() not in _DTYPES:
        raise InvalidInputError(option, f"is {name!r}, must be {' or '.join(_DTYPES)}")
    return _DTYPES[name.strip()]


def list_launches(wanted: list[Call], arch: str) -> list[str]:
    """Lists the kernels that calls need; returns the calls that no backend runs."""
    refused = []
    for what, tensors, options in wanted:
        try:
            flashtile.warm_up(*tensors, gpu=arch, **options)
        except UnsupportedError as error:
            refused.append(f"{what}: {error.what}")
    return refused


def _compile(recorder: ahead.Recorder, out: Path, arch: int, jobs: int) -> None:
    """Compiles the listed kernels, in separate processes."""
    lines = [ahead.as_json(launch) for launch in recorder.launches.values()]
    with (
        Progress(console=Console(stderr=True), transient=True) as progress,
        ProcessPoolExecutor(min(jobs, len(lines) or 1), mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        task = progress.add_task("", total=len(lines))
        started = [pool.submit(ahead.compiled_line, line, arch) for line in lines]
        written_s = time.perf_counter()
        try:
            for future in as_completed(started):
                key, found = future.result()
                recorder.add(key, found)
                progress.update(task, advance=1, description=found if isinstance(found, str) else found.about["name"])
                if time.perf_counter() - written_s > _EACH_S:
                    recorder.write(out)
                    written_s = time.perf_counter()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
