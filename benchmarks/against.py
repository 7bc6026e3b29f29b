"""Times two checkouts of this library cell by cell: ``python -m benchmarks.run forward|backward --against PATH``.

Each checkout runs in its own process, which prepares a cell with that checkout's sources and then times bursts on
request. The two alternate burst by burst, so that clock changes affect both; a waiting process does not use the device.
Rows go to suite ``against`` under the commit of the checkout that ran; ``@before`` marks the one at PATH.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import results, table
from benchmarks.cases import Case
from benchmarks.results import ROOT, Row
from benchmarks.session import Session
from benchmarks.timing import head_start_of, interleaved, reps_for, summarise

BEFORE = "@before"


class Worker:
    """A process that runs a checkout's own sources and answers each JSON line with one JSON line."""

    def __init__(self, root: Path, device: str) -> None:
        self.commit = results.git_commit(root)
        path = os.pathsep.join([str(root / "src"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        # -P: the script's folder must not precede the checkout's on the path.
        command = [sys.executable, "-P", str(ROOT / "benchmarks" / "worker.py"), device]
        environment = {**os.environ, "PYTHONPATH": path}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=root, env=environment, stdin=pipe, stdout=pipe, text=True)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends a request and returns the process's answer, with ``failed`` if it could not."""
        assert self._process.stdin and self._process.stdout
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(self._process.stdout.readline() or '{"failed": "the process ended"}')
        except BrokenPipeError:
            return {"failed": "the process ended"}
        return answer

    def time(self, reps: int, head_start_ms: float) -> float:
        """Mean milliseconds per call in a burst of the prepared cell."""
        return float(self.ask(do="time", reps=reps, head_start_ms=head_start_ms)["ms"])

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def race(
    session: Session, path: Path, cases: Sequence[Case], names: Sequence[str], rounds: int, burst_ms: float
) -> tuple[list[Row], int, str]:
    """Times our providers among the names on the cases; returns rows, exit code and report."""
    device = session.device.type
    workers = {"": Worker(ROOT, device), BEFORE: Worker(path.resolve(), device)}
    cell = functools.partial(_cell, session=session, workers=workers, rounds=rounds, burst_ms=burst_ms)
    work = [(case, name) for case in cases for name in names if name.startswith("flashtile-")]
    try:
        rows, code = session.each(work, lambda item: f"{item[0].name} {item[1]}", cell)
    finally:
        for worker in workers.values():
            worker.close()
    return rows, code, report(rows)


def _cell(
    item: tuple[Case, str], session: Session, workers: dict[str, Worker], rounds: int, burst_ms: float
) -> list[Row]:
    case, name = item
    answers = {mark: w.ask(do="prepare", case=case.to_dict(), provider=name) for mark, w in workers.items()}
    errors = {mark: answer.get("failed", answer.get("error")) for mark, answer in answers.items()}
    timings = {}
    if not any(isinstance(error, str) for error in errors.values()):
        reps = reps_for(max(answer["ms"] for answer in answers.values()), burst_ms)
        head_start_ms = head_start_of(reps * answer["host_ms"] for answer in answers.values())
        samples = {mark: functools.partial(worker.time, reps, head_start_ms) for mark, worker in workers.items()}
        timings = {mark: summarise(x) for mark, x in interleaved(samples, rounds, session.deadline).items()}
    rows = []
    for mark, worker in workers.items():
        measured: dict[str, Any] = {"error": errors[mark]}
        if mark in timings:
            t = timings[mark]
            measured |= {"median_ms": t.median_ms, "spread": t.spread, "tflops": case.flops() / (t.median_ms * 1e9)}
        row = session.run.row(case.to_dict(), name + mark, **measured)
        rows.append(replace(row, commit=worker.commit) if mark else row)
    return rows


def report(rows: Sequence[Row]) -> str:
    """A line per cell and provider with the time now over the time before, slowest last, and their mean."""
    times = {(str(row.case), row.provider): row for row in rows}
    lines, ratios = [], []
    for (case, name), now in times.items():
        before = times.get((case, name + BEFORE))
        if before is not None and now.median_ms and before.median_ms:
            ratios.append(now.median_ms / before.median_ms)
            spread = max(now.spread or 0, before.spread or 0)
            numbers = f"{before.median_ms:.4f}", f"{now.median_ms:.4f}", f"{100 * spread:.1f}%", f"{ratios[-1]:.4f}"
            lines.append([f"{Case.from_dict(now.case).name} {name}", *numbers])
    failed = [f"{row.provider} {Case.from_dict(row.case).name}: {row.error}" for row in rows if row.median_ms is None]
    if not lines:
        return "\n".join(["nothing was timed by both", *failed])
    text = table.to_text(
        [["cell", "before, ms", "now, ms", "spread", "now / before"], *sorted(lines, key=lambda x: x[-1])]
    )
    slower = sum(ratio > 1.01 for ratio in ratios)
    mean = f"geomean {table.geomean(ratios):.4f}, median {median(ratios):.4f}, most {max(ratios):.4f}"
    return "\n".join([text, f"now / before: {mean}; {slower} of {len(ratios)} over 1.01", *failed])
