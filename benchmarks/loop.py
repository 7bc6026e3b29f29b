"""``python -m benchmarks.loop``: attention in a user's loop, where host and device overlap as they do in real use.

A sample is N calls of the public function back to back, then one wait for the device: wall time over N. The host gets
no head start, so a short kernel shows the call's host time, a long one its device time. Forward alone, and forward and
backward by autograd; samples of all implementations alternate in one process, after their results were checked.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Sequence

from benchmarks.calls import DIRECTIONS, as_row, checked_calls, timed_rows
from benchmarks.cases import Case
from benchmarks.providers import Provider, choose_providers
from benchmarks.results import Row
from benchmarks.session import Session, new_parser, run_command
from benchmarks.table import Table, in_order, to_text
from benchmarks.timing import loop_ms

PROVIDER_NAMES = ("flashtile", "sdpa", "fa3", "cudnn", "fa2")
CASES = {
    "cuda": [
        Case("forward", "bfloat16", batch, seqlen, seqlen, 16, 16, dim, causal=True)
        for batch, seqlen, dim in ((2, 512, 64), (8, 512, 128), (4, 1024, 128), (16, 1024, 128))
    ],
    "cpu": [Case("forward", "bfloat16", 1, 128, 128, 4, 4, 64, causal=True)],
}
_FEWEST, _MOST = 20, 500


def measure(
    item: tuple[Case, str], chosen: Sequence[Provider], session: Session, *, rounds: int, sample_ms: float
) -> list[Row]:
    """One row per provider, of one case, forward or forward and backward."""
    case, what = item
    calls, errors = checked_calls(case, what, chosen, session)
    samples = {}
    for name, call in calls.items():
        once_ms = loop_ms(call, session.device, 3)
        reps = max(_FEWEST, min(_MOST, math.ceil(sample_ms / once_ms))) if session.device.type == "cuda" else 3
        samples[name] = functools.partial(loop_ms, call, session.device, reps)
    return timed_rows(session, as_row(case, "user's loop", what), errors, samples, rounds)


def loop_table(rows: Sequence[Row]) -> Table:
    """A line per case and direction: microseconds of each, and ours over the fastest peer's; later rows win."""
    names = in_order(row.provider for row in rows)
    ours = [name for name in names if name.startswith("flashtile")]
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(str(row.case), {})[row.provider] = row
    lines = [["us a call", *names, *(f"{name} / fastest peer" for name in ours)]]
    for found in cells.values():
        c = next(iter(found.values())).case
        times = {name: row.median_ms for name, row in found.items() if row.median_ms is not None}
        fastest = min((t for name, t in times.items() if name not in ours), default=None)
        ratios = [f"{times[name] / fastest:.2f}" if fastest and name in times else "" for name in ours]
        shown = [f"{times[name] * 1e3:.1f}" if name in times else "-" for name in names]
        shape = f"b{c['batch']} s{c['seqlen_q']} h{c['num_heads_q']} d{c['head_dim']}"
        lines.append([f"{c['direction']}, {shape}", *shown, *ratios])
    return lines


def _measure_all(args: argparse.Namespace, session: Session) -> tuple[list[Row], int, str]:
    chosen = choose_providers(args.providers or PROVIDER_NAMES, "backward", session.device)
    timed = functools.partial(measure, chosen=chosen, session=session, rounds=args.rounds, sample_ms=args.sample_ms)
    work = [(case, direction) for direction in DIRECTIONS for case in CASES[args.device]]
    rows, code = session.each(work, lambda item: f"{item[1]}, batch {item[0].batch}, {item[0].name}", timed)
    failed = [f"{row.provider}: {row.error}" for row in rows if row.median_ms is None]
    return rows, code, "\n".join([to_text(loop_table(rows)), *dict.fromkeys(failed)])


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and appends rows; returns the process's exit code."""
    return run_command(
        new_parser("loop", __doc__, {"rounds": 60, "sample_ms": 10.0}).parse_args(argv), "loop", _measure_all
    )


if __name__ == "__main__":
    sys.exit(main())
