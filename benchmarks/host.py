"""``python -m benchmarks.host``: host time of a call: of a known length, of a new length, and first in a process.

A warm call: a burst of calls is timed from an idle device, without the wait at its end. Kernels are queued and the host
continues: it waits for the device only once about a thousand launches are queued, and a burst of 50 calls, of at most
six kernels each, queues fewer even if the device has run none of them. So only host time is measured, even if kernels
take longer than their launches.

``--new-lengths``: lengths that the process has not seen, each called once from an idle device, alternating with a known
length. The known ones cover every kind (short and long, multiples of 16 and others), so that no tiles are new; the
allocator has free memory cached.

First calls: fresh processes, once with an empty Triton cache and once with the cache that left.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.calls import DIRECTIONS, as_row, checked_calls, timed_rows
from benchmarks.cases import Case, make_inputs
from benchmarks.providers import PROVIDERS, Provider, choose_providers
from benchmarks.results import ROOT, Row
from benchmarks.session import Session, attempt, new_parser, run_command, words
from benchmarks.table import to_text
from benchmarks.timing import host_ms, summarise, wait

TINY = Case("forward", "bfloat16", 1, 128, 128, 4, 4, 64, causal=True)
SMALL = Case("forward", "bfloat16", 2, 512, 512, 16, 16, 64, causal=True)
# A realistic size: the first call's time includes choosing its tiles, but little run time.
FIRST = Case("forward", "bfloat16", 1, 2048, 2048, 16, 16, 128, causal=True)
DEFAULTS = ("flashtile", "flashtile-hopper", "flashtile-portable", "flashtile-cpu", "sdpa")
_BURST = 50
_KNOWN = (500, 512, 1000, 1024, 2000, 2048)
_NEW = 20


def warm_rows(
    case: Case, what: str, chosen: Sequence[Provider], session: Session, rounds: int, burst: int
) -> list[Row]:
    """One row per provider, interleaved in rounds."""
    calls, errors = checked_calls(case, what, chosen, session)
    samples = {name: functools.partial(host_ms, call, session.device, burst) for name, call in calls.items()}
    for sample in samples.values():
        sample()
    return timed_rows(session, as_row(case, "host time of a warm call", what), errors, samples, rounds)


def new_length_rows(what: str, chosen: Sequence[Provider], session: Session, count: int = _NEW) -> list[Row]:
    """Two rows per provider: one call for each new length, and as many of known lengths."""
    device = session.device
    draw = random.Random(what)
    lengths = draw.sample([n for n in range(_KNOWN[0] // 2, _KNOWN[-1]) if n not in _KNOWN], count)
    like = SMALL if device.type == "cuda" else TINY
    cases = {n: replace(like, seqlen_q=n, seqlen_k=n) for n in (*_KNOWN, *lengths)}

    def times(provider: Provider) -> dict[str, list[float]]:
        made = {n: provider.prepare(case, make_inputs(case, device), what) for n, case in cases.items()}
        if device.type == "cuda":
            # Freed at once: the calls then allocate from these cached blocks, not from the driver.
            blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in (1 << 30, *[1 << 19] * 64)]
            blocks.clear()
        for n in _KNOWN * 3:
            made[n]()
        found: dict[str, list[float]] = {"known": [], "new": []}
        for n, known in zip(lengths, itertools.cycle(_KNOWN), strict=False):
            found["known"].append(host_ms(made[known], device, 1))
            found["new"].append(host_ms(made[n], device, 1))
        return found

    rows = []
    for provider in chosen:
        found = attempt(device, provider.name, functools.partial(times, provider))
        for kind in ("known", "new"):
            measured: dict[str, Any] = {"error": found}
            if not isinstance(found, str):
                values = {"worst_ms": max(found[kind]), "calls": count}
                measured = {**vars(summarise(found[kind])), "values": values}
            rows.append(session.run.row(as_row(like, f"one call of a {kind} length", what), provider.name, **measured))
    return rows


def first_call_rows(name: str, what: str, session: Session, repeats: int) -> list[Row]:
    """One row per cache state; each sample is a new process, see ``_child``."""
    samples: dict[str, list[float]] = {"empty cache": [], "warm disk cache": []}
    error = None
    command = [sys.executable, "-m", "benchmarks.host", "--child", name, what, session.device.type]
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            for times in samples.values():
                done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    error = f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"[:600]
                else:
                    times.append(float(done.stdout.splitlines()[-1]))
    rows = []
    for state, times in samples.items():
        measured: dict[str, Any] = vars(summarise(times)) if times else {"error": error}
        rows.append(session.run.row(as_row(FIRST, f"first call, {state}", what), name, **measured))
    return rows


def _child(name: str, what: str, device_type: str) -> None:
    """Times the first call of this process; the device itself is warmed up by other work."""
    device = torch.device(device_type)
    case = FIRST if device.type == "cuda" else TINY
    inputs = make_inputs(case, device)
    call = PROVIDERS[name].prepare(case, inputs, what)
    (inputs.q.reshape(-1, case.head_dim) @ inputs.k.reshape(-1, case.head_dim).T).sum().item()
    start_s = time.perf_counter()
    call()
    wait(device)
    print((time.perf_counter() - start_s) * 1e3)


def report(rows: Sequence[Row]) -> str:
    """A line per row: microseconds, and their ratio to SDPA's in the same case."""
    sdpa = {str(row.case): row.median_ms for row in rows if row.provider == "sdpa"}
    lines = [["what", "shape", "provider", "median, us", "worst, us", "spread", "/ sdpa"]]
    for row in rows:
        c, peer = row.case, sdpa.get(str(row.case))
        shape = f"b{c['batch']} s{c['seqlen_q']} h{c['num_heads_q']}"
        line = [f"{c['measure']}, {c['direction']}", shape, row.provider]
        if row.median_ms is None:
            line += [str(row.error)[:40], "", "", ""]
        else:
            worst = f"{row.values['worst_ms'] * 1e3:.1f}" if row.values else ""
            ratio = f"{row.median_ms / peer:.2f}" if peer else ""
            line += [f"{row.median_ms * 1e3:.1f}", worst, f"{100 * (row.spread or 0):.0f}%", ratio]
        lines.append(line)
    return to_text(lines)


def _measure_all(args: argparse.Namespace, session: Session) -> tuple[list[Row], int, str]:
    chosen = choose_providers(args.providers or DEFAULTS, "backward", session.device)
    first = [provider.name for provider in chosen if provider.name.startswith("flashtile-")]
    work: list[tuple[str, Callable[[], list[Row]]]] = []
    for what in DIRECTIONS:
        if args.new_lengths:
            work.append((f"new lengths, {what}", functools.partial(new_length_rows, what, chosen, session)))
            continue
        for case in (TINY, SMALL):
            warm = functools.partial(warm_rows, case, what, chosen, session, args.rounds, args.burst)
            work.append((f"{case.seqlen_q} tokens, {what}", warm))
    # Last, since they take longest: a budget of time leaves out the end.
    for what in () if args.new_lengths else DIRECTIONS:
        for name in first if args.first_calls is None else args.first_calls:
            fresh = functools.partial(first_call_rows, name, what, session, args.repeats)
            work.append((f"first call, {what}", fresh))
    rows, code = session.each(work, lambda item: item[0], lambda item: item[1]())
    return rows, code, report(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and appends rows; returns the process's exit code."""
    parser = new_parser("host", __doc__, {"rounds": 30, "burst": _BURST, "repeats": 1})
    parser.add_argument("--new-lengths", action="store_true", help="measure that alone")
    parser.add_argument("--first-calls", type=words, metavar="A,B", help="whose; by default all of ours but flashtile")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        _child(*args.child)
        return 0
    return run_command(args, "host", _measure_all)


if __name__ == "__main__":
    sys.exit(main())
