"""`flashtile-lab kernels`: compiles every GPU kernel, without a GPU, and reports on the code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flashtile.core.errors import InvalidInputError, UnsupportedError
from flashtile_lab.kernels import report as builds
from flashtile_lab.kernels.build import ARCHS
from flashtile_lab.kernels.report import Job, KernelReport, Outcome

_COLUMNS = ("kernel", "direction", "config", "registers", "spill B", "shared B", "instructions")


def kernels(
    arch: Annotated[str, typer.Option(help=f"What to build for: {', '.join(ARCHS)}.")],
    backend: Annotated[str | None, typer.Option(help="One backend alone.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few configurations of each kernel.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone, a row a line.")] = False,
) -> None:
    """Build every GPU kernel for an architecture: registers, spills, shared memory, instructions. Needs no GPU.

    Exits with 1 if a kernel does not build, could not be launched, or spills more than its backend promises.
    """
    try:
        todo = builds.jobs(arch, backend, quick=quick)
    except (InvalidInputError, UnsupportedError) as error:
        typer.echo(f"flashtile-lab kernels: {error}", err=True)
        raise typer.Exit(2) from None
    outcomes = _build(todo)
    reports = [outcome.report for outcome in outcomes if outcome.report is not None]
    if as_json:
        typer.echo(_as_json(reports))
    else:
        _print_table(reports, arch)
    wrong = [f"{arch}: {outcome.job.label}: {problem}" for outcome in outcomes for problem in outcome.problems]
    if wrong:
        typer.echo("\n".join(wrong), err=True)
        raise typer.Exit(1)


def _build(todo: Sequence[Job]) -> list[Outcome]:
    """Compiles with a progress bar on a terminal; the outcomes come back in the order of the jobs."""
    place = {job: position for position, job in enumerate(todo)}
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        outcomes = list(progress.track(builds.run(todo), total=len(todo), description="building"))
    return sorted(outcomes, key=lambda outcome: place[outcome.job])


def _record(report: KernelReport) -> dict[str, Any]:
    record = asdict(report)
    # A promise is the tests' affair; a row says what was seen.
    del record["spill_limit"], record["unknown_launch"]
    return record


def _as_json(reports: Sequence[KernelReport]) -> str:
    rows = ",\n".join(f"  {json.dumps(_record(report))}" for report in reports)
    return f"[\n{rows}\n]"


def _print_table(reports: Sequence[KernelReport], arch: str) -> None:
    triton = f", Triton {reports[0].triton}" if reports else ""
    table = Table(title=f"GPU kernels for {arch}{triton}", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column in _COLUMNS[3:6] else "left", overflow="fold")
    for report in reports:
        numbers = (report.registers, report.spill_bytes, report.shared_bytes)
        table.add_row(
            f"{report.backend}/{report.name}",
            report.direction,
            " ".join(f"{key}={value}" for key, value in report.config.items()),
            *(f"{number:,}" for number in numbers),
            ", ".join(f"{count} {kind}" for kind, count in report.instructions.items()),
        )
    Console().print(table)
