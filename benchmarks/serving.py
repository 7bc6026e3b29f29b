"""``python -m benchmarks.serving``: steps of a server, packed queries over pages, beside FlashAttention-3.

Prompts, chunks of them and decodes in one call, as ``benchmarks/steps.py`` lists them. With ``--providers
flashtile,flashtile-invariant,flashtile-strict`` it says what batch-invariant calls cost. Kernels are compiled in many
processes before anything is timed.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import random
import sys
import time
from collections.abc import Sequence
from itertools import chain

from benchmarks import bounds, decode, results, table
from benchmarks.decode import PEER, Group
from benchmarks.providers import OURS, PROVIDERS, OwnBits, Provider
from benchmarks.session import Session, new_parser
from benchmarks.steps import MEASURES, groups
from benchmarks.table import Cell, Table
from benchmarks.warm import WORKERS, call_once, side_by_side

PROVIDER_NAMES = (OURS, PEER)
# The share of the budget that compiling may take.
_AHEAD = 0.5


def steps_table(grid: Sequence[Cell]) -> Table:
    """A line per heads and cache, a column per step: our microseconds, speed over the peer, share of the bound."""
    cells = decode.plain(grid)
    steps = list(dict.fromkeys(cell.case.step for cell in cells))
    lines: dict[str, dict[str, str]] = {}
    for cell in cells:
        line = lines.setdefault(f"{cell.case.heads} {cell.case.cache}", {})
        # The first of ours, if there are several.
        for name in table.ours(cell.rows)[:1]:
            time_ms, ratio = cell.time(name), cell.ratio(name, PEER)
            line[cell.case.step] = str(cell.rows[name].error).split(":")[0]
            if time_ms is not None:
                more = ["" if ratio is None else f"{ratio:.2f}", bounds.shown(cell.rows[name], cell.case)]
                line[cell.case.step] = f"{1e3 * time_ms:.1f} ({', '.join(filter(None, more))})".removesuffix(" ()")
    shown = ([name, *(of.get(x, "") for x in steps)] for name, of in lines.items())
    return [[f"us (speed over {PEER}, {table.BOUND})", *steps], *shown]


def cost_table(grid: Sequence[Cell]) -> Table:
    """A line per way to be batch-invariant: its time over that of a call that is not, by step, geometric means."""
    lines: Table = []
    for name in (each.name for each in PROVIDERS.values() if isinstance(each, OwnBits)):
        ratios: dict[str, list[float]] = {}
        for cell in grid:
            if (ratio := cell.ratio(OURS, name)) is not None:
                for step in (cell.case.step, "all"):
                    ratios.setdefault(step, []).append(ratio)
        if ratios:
            lines = lines or [[f"time over {OURS}", *sorted(ratios)]]
            lines.append([name, *(f"{table.geomean(ratios[step]):.3f}" for step in sorted(ratios))])
    return lines


def report(rows: Sequence[results.Row]) -> str:
    """What a run prints at its end."""
    grid = table.cells(rows)
    tables = [steps_table(grid), cost_table(grid)]
    return "\n\n".join([decode.report(rows, "us"), *(table.to_text(each) for each in tables if each)])


def compile_ahead(args: argparse.Namespace, left: Sequence[Group], chosen: Sequence[Provider]) -> None:
    """Calls every cell once by ours, in processes; not at the same time neighbours, which need the same kernels."""
    own = [each.name for each in chosen if each.name.startswith(OURS)]
    work = [(case, name, args.device) for case in chain(*left) for name in own]
    limit_s = None if args.budget_s is None else _AHEAD * args.budget_s
    start_s, mixed = time.monotonic(), random.Random(0).sample(work, len(work))
    for (case, name, _), said in side_by_side(call_once, mixed, args.workers, limit_s) if work and args.workers else ():
        if said is not None:
            print(f"ahead: {case.name}: {name}: {said}", flush=True)
    for process in multiprocessing.active_children():
        process.join(10.0)  # its end takes time of the device
    print(f"compiled ahead in {time.monotonic() - start_s:.0f} s", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and appends rows; returns the process's exit code."""
    defaults = {"rounds": 10, "burst_ms": 3.0, "workers": WORKERS}
    args = decode.add_options(new_parser("serving", __doc__, defaults), MEASURES).parse_args(argv)
    wanted = decode.selected(args, lambda measure: groups(measure, args.device))
    more = [functools.partial(compile_ahead, args)] if args.device == "cuda" else []

    def body(args: argparse.Namespace, session: Session) -> tuple[list[results.Row], int, str]:
        return decode.measure_groups(args, session, wanted, PROVIDER_NAMES, report, *more)

    return decode.run_suite(args, "serving", wanted, body)


if __name__ == "__main__":
    sys.exit(main())
