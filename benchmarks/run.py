"""``python -m benchmarks.run forward|backward|cpu``: times the providers side by side and appends rows.

Every provider's numbers are checked before its time is taken; one that is wrong gets no time. Rows are written as each
cell ends, and a table is printed last, also when the budget ends the run in the middle of a cell.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import results, table
from benchmarks.budget import OUT_OF_TIME, hard_stop
from benchmarks.cases import Case, Direction, Inputs, make_inputs, select, suite
from benchmarks.checks import Outputs, Reference, poison
from benchmarks.plain import Call
from benchmarks.progress import Progress
from benchmarks.providers import PROVIDERS, Provider
from benchmarks.timing import OutOfTimeError, Timing, measure

DEFAULT_PROVIDERS = {
    "forward": ("flashtile-portable", "flashtile-hopper", "fa3", "cudnn", "fa2", "eager"),
    "backward": ("flashtile-portable", "flashtile-hopper", "fa3", "cudnn", "fa2", "eager"),
    "cpu": ("flashtile-cpu", "sdpa"),
}
_ERROR_CHARACTERS = 600
# Rounds end so long before the budget does, and the process need not be stopped.
_RESERVE_S = 3.0


class DeviceLostError(RuntimeError):
    """The device answers no more: every later number of this process would be meaningless."""


def run_cell(
    case: Case,
    chosen: Sequence[Provider],
    run: results.Run,
    device: torch.device,
    *,
    rounds: int,
    burst_ms: float,
    on_round: Callable[[int], None] = lambda _: None,
    deadline_s: float | None = None,
) -> list[results.Row]:
    """Checks and times one cell.

    Returns:
        A row a provider.

    Raises:
        DeviceLostError: If a provider broke the device.
        OutOfTimeError: If the deadline, an instant of ``time.monotonic()``, left no time for three rounds.
    """
    calls, errors = checked(case, chosen, device)
    timings = measure(calls, device, rounds=rounds, burst_ms=burst_ms, on_round=on_round, deadline_s=deadline_s)
    return [timed_row(run, case, name, verdict, timings.get(name)) for name, verdict in errors.items()]


def checked(
    case: Case, chosen: Sequence[Provider], device: torch.device
) -> tuple[dict[str, Call], dict[str, float | str]]:
    """The calls of the providers whose numbers are right, and of all the error or the reason, by name.

    Raises:
        DeviceLostError: If a provider broke the device.
    """
    inputs = make_inputs(case, device)
    reference = Reference(case, inputs)
    calls: dict[str, Call] = {}
    errors: dict[str, float | str] = {}
    for provider in chosen:
        try:
            refusal = provider.refusal(case, inputs)
            if refusal is not None:
                errors[provider.name] = f"refused: {refusal}"
                continue
            call, outputs = second_call(provider, case, inputs)
            error = reference.error(outputs)
            del outputs
            if error <= reference.limit:
                calls[provider.name], errors[provider.name] = call, error
            else:
                errors[provider.name] = f"wrong: relative error {error:.3g}, limit {reference.limit:.3g}"
        except Exception as error:  # one provider's failure must not cost the others their row
            synchronize(device, provider.name)
            errors[provider.name] = failure(error)
    return calls, errors


def timed_row(run: results.Run, case: Case, name: str, verdict: float | str, timing: Timing | None) -> results.Row:
    """A row of a provider that was checked and, if it was right, timed."""
    measured: dict[str, object] = {"error": verdict}
    if timing is not None:
        tflops = case.flops() / (timing.median_ms * 1e9)
        measured |= {"median_ms": timing.median_ms, "spread": timing.spread, "tflops": tflops}
    return run.row(case.to_dict(), name, **measured)


def second_call(provider: Provider, case: Case, inputs: Inputs) -> tuple[Call, Outputs]:
    """A provider's call and what it returns the second time, in memory that the first one left poisoned."""
    call = provider.prepare(case, inputs)
    poison(call())
    return call, call()


def failure(error: Exception) -> str:
    """What a row says instead of a time when a provider raised."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return f"failed: {text}"[:_ERROR_CHARACTERS]


def synchronize(device: torch.device, culprit: str) -> None:
    """Waits for the device.

    Raises:
        DeviceLostError: If it answers no more, with the name of whoever was last.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceLostError(f"{culprit} broke the device: {error}") from error


def run_suite(
    cases: Sequence[Case],
    chosen: Sequence[Provider],
    run: results.Run,
    device: torch.device,
    *,
    out: Path,
    rounds: int,
    burst_ms: float = 6.0,
    budget_s: float | None = None,
) -> list[results.Row]:
    """Runs the cells one after the other and saves rows as it goes.

    Args:
        cases: The cells.
        chosen: The providers.
        run: This process.
        device: Where.
        out: File the rows are appended to.
        rounds: Samples a provider and cell.
        burst_ms: About how long one sample takes.
        budget_s: No cell is started that might end after so many seconds, judged by the longest so far, and no round
            within a cell; a cell without three whole rounds gives no rows.

    Returns:
        All rows of this run.

    Raises:
        DeviceLostError: If a provider broke the device; the rows of the cells before are saved.
    """
    rows: list[results.Row] = []
    deadline_s = None if budget_s is None else time.monotonic() + budget_s
    longest_s = 0.0
    with Progress(len(cases)) as progress, torch.no_grad():
        for case in cases:
            cell_start_s = time.monotonic()
            if deadline_s is not None and cell_start_s + longest_s > deadline_s:
                progress.note(f"budget of {budget_s:g} s: stopped after {progress.done} of {len(cases)} cells")
                break
            progress.begin(case.name)

            def on_round(done: int) -> None:
                progress.part(done / rounds)

            try:
                cell = run_cell(
                    case,
                    chosen,
                    run,
                    device,
                    rounds=rounds,
                    burst_ms=burst_ms,
                    on_round=on_round,
                    deadline_s=deadline_s,
                )
            except DeviceLostError as error:
                progress.note(f"{case.name}: {error}\nstopped: the device is lost")
                raise
            except OutOfTimeError as error:
                progress.note(f"{case.name}: {error}; budget of {budget_s:g} s: stopped after {progress.done} cells")
                break
            results.append(out, cell)
            rows += cell
            longest_s = max(longest_s, time.monotonic() - cell_start_s)
            progress.end(_line(case, cell))
    return rows


def _line(case: Case, rows: Sequence[results.Row]) -> str:
    parts = []
    for row in rows:
        name = row.provider.removeprefix("flashtile-")
        shown = f"{row.median_ms:.3f} ms ±{100 * (row.spread or 0):.1f}%" if row.median_ms is not None else row.error
        parts.append(f"{name} {shown}")
    return f"{case.name}  " + " | ".join(parts)


def choose_providers(names: Sequence[str], direction: str, device: torch.device) -> list[Provider]:
    """The providers that this machine has; what is missing is printed with its reason.

    Raises:
        ValueError: If a name is unknown.
    """
    found = []
    for name in names:
        if name not in PROVIDERS:
            raise ValueError(f"provider is {name!r}, must be one of {', '.join(PROVIDERS)}")
        why = PROVIDERS[name].missing("backward" if direction == "backward" else "forward", device)
        if why is None:
            found.append(PROVIDERS[name])
        else:
            print(f"without {name}: {why}", flush=True)
    return found


def done_before(path: Path, run: results.Run, names: Sequence[str], cases: Sequence[Case]) -> list[results.Row]:
    """Rows of cells that a file already holds from the same sources and device, in which no provider failed.

    Args:
        path: The file; it need not exist.
        run: This process, which says what the same is. Sources that no commit names are never the same.
        names: Providers that must each have a row, all of one run.
        cases: The cells that count.

    Returns:
        The rows of the cells that need not be measured again.
    """
    if not path.exists() or run.commit == "unknown" or run.commit.endswith("-dirty"):
        return []
    same = [
        row
        for row in results.read([path])
        if (row.suite, row.commit, row.device) == (run.suite, run.commit, run.device) and row.provider in names
    ]
    found = []
    for cell in table.cells(same):
        failed = any(str(row.error).startswith("failed") for row in cell.rows.values())
        if cell.case in cases and set(cell.rows) == set(names) and not failed:
            found += list(cell.rows.values())
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("suite", choices=("forward", "backward", "cpu"))
    parser.add_argument("--cells", metavar="PATTERN", help="globs or parts of cell names, separated by commas")
    parser.add_argument("--providers", metavar="A,B", help="names separated by commas")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"), help="of the GPU suites")
    parser.add_argument("--rounds", type=int, default=12, help="samples a provider and cell")
    parser.add_argument("--burst-ms", type=float, default=6.0, help="about how long one sample takes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="rows are appended here")
    parser.add_argument("--budget-s", type=float, metavar="S", help="end within so many seconds, by force if need be")
    parser.add_argument("--resume", action="store_true", help="leave out cells that FILE has from these sources")
    parser.add_argument("--commit", help="of a copy of the sources that has no repository")
    parser.add_argument("--list", action="store_true", help="print the cells and stop")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one suite; returns the process's exit code."""
    start_s = time.monotonic()
    args = _parser().parse_args(argv)
    cases = select(suite(args.suite, args.dtype), args.cells)
    if args.list or not cases:
        print("\n".join(case.name for case in cases) or f"no cell matches {args.cells!r}")
        return 0 if cases else 2
    if args.suite != "cpu" and not torch.cuda.is_available():
        print(f"suite {args.suite} needs a CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cpu" if args.suite == "cpu" else "cuda")
    names = args.providers.split(",") if args.providers else DEFAULT_PROVIDERS[args.suite]
    try:
        chosen = choose_providers(names, args.suite, device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not chosen:
        print("no provider is left", file=sys.stderr)
        return 2
    run = results.new_run(args.suite, device, args.commit)
    out = args.out or results.default_file(args.suite, run.device)
    direction: Direction = "backward" if args.suite == "backward" else "forward"
    print(f"{run.suite} on {run.device}, {run.versions}, commit {run.commit}, run {run.run}", flush=True)
    print("\n".join(f"{provider.name}: {provider.runs(direction)}" for provider in chosen), flush=True)
    before = done_before(out, run, [p.name for p in chosen], cases) if args.resume else []
    left = [case for case in cases if case not in {Case.from_dict(row.case) for row in before}]

    def say(rows: Sequence[results.Row]) -> None:
        report = table.report([*before, *rows], "ms" if args.suite == "cpu" else "TFLOPS")
        print(f"\n{report}\n\n{len(rows)} rows appended to {out}", flush=True)

    def say_what_is_saved() -> None:
        print("\nstopped in the middle of a cell, which is lost")
        say([row for row in results.read([out] if out.exists() else []) if row.run == run.run])

    left_s = None if args.budget_s is None else args.budget_s - (time.monotonic() - start_s)
    budget_s = None if left_s is None else left_s - min(_RESERVE_S, 0.1 * left_s)
    with hard_stop(left_s, say_what_is_saved):
        try:
            rows = run_suite(
                left, chosen, run, device, out=out, rounds=args.rounds, burst_ms=args.burst_ms, budget_s=budget_s
            )
        except DeviceLostError:
            say_what_is_saved()
            return 1
    say(rows)
    if budget_s is not None and len({json.dumps(row.case) for row in rows}) < len(left):
        return OUT_OF_TIME
    return 0 if rows or before else 1


if __name__ == "__main__":
    sys.exit(main())
