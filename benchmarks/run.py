"""``python -m benchmarks.run SUITE``: times the providers in interleaved rounds and appends rows.

Every provider's results are checked before it is timed; one with wrong results is not timed. Rows are written as each
cell ends, and a table is printed at the end, also when the budget ends the run within a cell.

In suite fp8 all get the same normal numbers in 16 bits and round them in their own way: ours with a scale a block,
rotated and smoothed, before the timed call or, where the name ends in ``-call``, in it; cuDNN with a scale a tensor,
before. Outputs of what was rounded before have 8 bits, others 16. Its last cells are our rounding alone, and a copy of
as many bytes.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import flashtile
from benchmarks import against, results, table
from benchmarks.ablations import CHANGES
from benchmarks.cases import Case, Direction, Inputs, make_inputs, select, suite
from benchmarks.checks import Call, Outputs, Reference, judged, poison
from benchmarks.providers import Provider, choose_providers, prepared
from benchmarks.session import Session, new_parser, run_command
from benchmarks.timing import Timing, measure

GPU_PROVIDERS = ("flashtile-portable", "flashtile-hopper", "fa3", "cudnn", "fa2", "eager")
_SPEEDS = ("flashtile", "flashtile-portable", "fa3", "cudnn", "fa2", "eager")
DEFAULT_PROVIDERS = {
    "forward": _SPEEDS,
    "backward": _SPEEDS,
    "models": ("flashtile", "flashtile-portable", "fa3", "cudnn", "fa2", "flex"),
    "models-portable": ("flashtile-portable", "fa2"),
    "ablations": ("flashtile-hopper", *(f"flashtile-hopper-{name}" for name in CHANGES), "flashtile-portable", "fa3"),
    "uses": ("flashtile", "fa3", "cudnn", "fa2", "sdpa"),
    "big-heads": ("flashtile", "flashtile-portable", "sdpa"),
    "fp8": ("flashtile-hopper-fp8", "flashtile-hopper-fp8-call", "flashtile-hopper", "cudnn-fp8"),
    "cpu": ("flashtile-cpu", "sdpa"),
}


@torch.no_grad()
def run_cell(
    case: Case, chosen: Sequence[Provider], session: Session, *, rounds: int, burst_ms: float = 6.0
) -> list[results.Row]:
    """Checks and times one cell; returns one row per provider. What rounds is checked where attention follows."""
    if case.direction == "quantized":
        calls = rounding(case, session.device)
        errors: dict[str, Any] = dict.fromkeys(calls)
    else:
        calls, errors = checked(case, chosen, session.device)
    timings = measure(calls, session.device, rounds=rounds, burst_ms=burst_ms, deadline=session.deadline)
    return [timed_row(session.run, case, name, verdict, timings.get(name)) for name, verdict in errors.items()]


def checked(
    case: Case, chosen: Sequence[Provider], device: torch.device, what: str | None = None
) -> tuple[dict[str, Call], dict[str, float | str]]:
    """The calls of providers with correct results, and the error or failure reason of all, by name.

    ``what``: as for ``Provider.prepare``.
    """
    inputs = make_inputs(case, device)
    makers = {provider.name: functools.partial(second_call, provider, case, inputs, what) for provider in chosen}
    return judged(Reference(case, inputs), device, makers, {provider.name: provider.limit for provider in chosen})


def rounding(case: Case, device: torch.device) -> dict[str, Call]:
    """Calls that round q, k and v to 8 bits, and copy as many bytes."""
    x = make_inputs(case, device)
    source, target = torch.zeros(2, case.rounding_bytes // 2, dtype=torch.uint8, device=device)
    return {table.ROUNDING: lambda: (flashtile.quantize(x.q, x.k, x.v).q,), table.COPY: lambda: (target.copy_(source),)}


def timed_row(run: results.Run, case: Case, name: str, verdict: float | str, timing: Timing | None) -> results.Row:
    """A row of a provider that was checked and, if correct, timed."""
    measured: dict[str, object] = {"error": verdict}
    if timing is not None:
        tflops = case.flops() / (timing.median_ms * 1e9)
        measured |= {"median_ms": timing.median_ms, "spread": timing.spread, "tflops": tflops}
    return run.row(case.to_dict(), name, **measured)


def second_call(provider: Provider, case: Case, inputs: Inputs, what: str | None = None) -> tuple[Call, Outputs]:
    """A provider's call and its second result, in memory that was filled with NaN after the first."""
    call = prepared(provider, case, inputs, what)
    poison(call())
    return call, provider.native(call(), case)


def _measure_all(args: argparse.Namespace, session: Session) -> tuple[list[results.Row], int, str]:
    names = args.providers or DEFAULT_PROVIDERS[args.suite]
    cases = select(suite(args.suite, args.dtype), args.cells)
    if args.against:
        return against.race(session, args.against, cases, names, args.rounds, args.burst_ms)
    direction: Direction = "backward" if args.suite == "backward" else "forward"
    chosen = choose_providers(names, direction, session.device)
    if not chosen:
        raise ValueError("no provider is left")
    timed = functools.partial(run_cell, chosen=chosen, session=session, rounds=args.rounds, burst_ms=args.burst_ms)
    rows, code = session.each(cases, lambda case: case.name, timed, [provider.name for provider in chosen])
    return rows, code, table.report(rows, "ms" if args.suite == "cpu" else "TFLOPS")


def _last_words(session: Session) -> None:
    rows = session.saved()
    print(f"\nstopped in the middle of a cell, which is lost\n\n{table.report(rows)}\n")
    print(f"{len(rows)} rows appended to {session.out}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one suite; returns the process's exit code."""
    parser = new_parser("run", __doc__, {"dtype": "bfloat16", "rounds": 12, "burst_ms": 6.0})
    parser.add_argument("suite", choices=tuple(DEFAULT_PROVIDERS))
    parser.add_argument("--cells", metavar="PATTERN", help="globs or parts of cell names, separated by commas")
    parser.add_argument("--against", type=Path, metavar="PATH", help="race ours with ours of the checkout at PATH")
    parser.add_argument("--list", action="store_true", help="print the cells and stop")
    args = parser.parse_args(argv)
    cases = select(suite(args.suite, args.dtype), args.cells)
    if args.list or not cases:
        print("\n".join(case.name for case in cases) or f"no cell matches {args.cells!r}")
        return 0 if cases else 2
    args.device = "cpu" if args.suite == "cpu" else args.device
    return run_command(args, "against" if args.against else args.suite, _measure_all, _last_words)


if __name__ == "__main__":
    sys.exit(main())
