"""``python -m benchmarks.run forward|backward|cpu``: times the providers side by side and appends rows.

Every provider's numbers are checked before its time is taken; one that is wrong gets no time. Rows are written as each
cell ends, and a table is printed last.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import results, table
from benchmarks.cases import Case, Inputs, make_inputs, select, suite
from benchmarks.checks import Reference, poison
from benchmarks.progress import Progress
from benchmarks.providers import PROVIDERS, Call, Provider
from benchmarks.timing import measure

DEFAULT_PROVIDERS = {
    "forward": ("flashtile-portable", "flashtile-hopper", "fa3", "cudnn", "fa2", "eager"),
    "backward": ("flashtile-portable", "flashtile-hopper", "fa3", "cudnn", "fa2", "eager"),
    "cpu": ("flashtile-cpu", "sdpa"),
}
_ERROR_CHARACTERS = 600


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
) -> list[results.Row]:
    """Checks and times one cell.

    Returns:
        A row a provider.

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
            call, error = _checked(provider, case, inputs, reference)
            if error <= reference.limit:
                calls[provider.name], errors[provider.name] = call, error
            else:
                errors[provider.name] = f"wrong: relative error {error:.3g}, limit {reference.limit:.3g}"
        except Exception as error:  # one provider's failure must not cost the others their row
            _synchronize(device, provider.name)
            errors[provider.name] = _failure(error)
    timings = measure(calls, device, rounds=rounds, burst_ms=burst_ms, on_round=on_round)
    rows = []
    for name, verdict in errors.items():
        measured: dict[str, object] = {"error": verdict}
        if name in timings:
            t = timings[name]
            tflops = case.flops() / (t.median_ms * 1e9)
            measured |= {"median_ms": t.median_ms, "spread": t.spread, "tflops": tflops}
        rows.append(run.row(case.to_dict(), name, **measured))
    return rows


def _checked(provider: Provider, case: Case, inputs: Inputs, reference: Reference) -> tuple[Call, float]:
    """The call and its error, taken on the second call, into memory that the first one left poisoned."""
    call = provider.prepare(case, inputs)
    poison(call())
    return call, reference.error(call())


def _failure(error: Exception) -> str:
    text = "".join(traceback.format_exception_only(error)).strip()
    return f"failed: {text}"[:_ERROR_CHARACTERS]


def _synchronize(device: torch.device, culprit: str) -> None:
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
        budget_s: No cell is started that might end after so many seconds, judged by the longest so far.

    Returns:
        All rows of this run.
    """
    rows: list[results.Row] = []
    start_s = time.monotonic()
    longest_s = 0.0
    with Progress(len(cases)) as progress, torch.no_grad():
        for case in cases:
            cell_start_s = time.monotonic()
            if budget_s is not None and cell_start_s - start_s + longest_s > budget_s:
                progress.note(f"budget of {budget_s:g} s: stopped after {progress.done} of {len(cases)} cells")
                break
            progress.begin(case.name)

            def on_round(done: int) -> None:
                progress.part(done / rounds)

            try:
                cell = run_cell(case, chosen, run, device, rounds=rounds, burst_ms=burst_ms, on_round=on_round)
            except DeviceLostError as error:
                progress.note(f"{case.name}: {error}\nstopped: the device is lost")
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("suite", choices=("forward", "backward", "cpu"))
    parser.add_argument("--cells", metavar="PATTERN", help="globs or parts of cell names, separated by commas")
    parser.add_argument("--providers", metavar="A,B", help="names separated by commas")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"), help="of the GPU suites")
    parser.add_argument("--rounds", type=int, default=12, help="samples a provider and cell")
    parser.add_argument("--burst-ms", type=float, default=6.0, help="about how long one sample takes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="rows are appended here")
    parser.add_argument("--budget-s", type=float, metavar="S", help="start no cell that might end later")
    parser.add_argument("--commit", help="of a copy of the sources that has no repository")
    parser.add_argument("--list", action="store_true", help="print the cells and stop")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one suite; returns the process's exit code."""
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
    print(f"{run.suite} on {run.device}, {run.versions}, commit {run.commit}, run {run.run}", flush=True)
    rows = run_suite(
        cases, chosen, run, device, out=out, rounds=args.rounds, burst_ms=args.burst_ms, budget_s=args.budget_s
    )
    print(f"\n{table.report(rows, 'ms' if args.suite == 'cpu' else 'TFLOPS')}\n\n{len(rows)} rows appended to {out}")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
