"""``python -m benchmarks.all --out DIR --budget-s S``: every suite in order, until the time is spent, and on later.

Rows go to DIR/rows.jsonl, what a suite prints to DIR/SUITE.log; here it is a line. Cells with rows of this commit and
device are not measured again, and ``--resume FILES`` brings rows of earlier runs, also of another machine with the same
card. A suite that fails is told, and the next one begins. How long one may take goes by what its cells took before,
where rows say so. A peer that is missing is no reason to stop: a suite's line names who was timed. Suites of several
GPUs are started apart: ``benchmarks/distributed.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import results
from benchmarks.results import ROOT, Row
from benchmarks.session import OUT_OF_TIME, complete, words

# Suite -> seconds that it may take, more if rows say that its cells do, and the arguments of python -m benchmarks.NAME.
SUITES = {
    "forward": (300, "run forward"),
    "backward": (300, "run backward"),
    "models": (500, "run models"),
    "models-portable": (240, "run models-portable"),
    "varlen": (100, "varlen"),
    "mods": (600, "mods"),
    "serving": (400, "serving"),
    "decode": (400, "decode --providers flashtile,fa3"),
    "mla": (120, "mla"),
    "big-heads": (300, "run big-heads"),
    "fp8": (150, "run fp8"),
    "uses": (400, "run uses"),
    "selected": (600, "selected"),
    "host": (150, "host"),
    "loop": (120, "loop"),
    "ablations": (150, "run ablations"),
    "first_call": (400, "first_call"),
}
# No suite is started with less left, and one has so long to start and to end beside its cells.
_LEAST_S, _APART_S = 40.0, 60.0


def command_of(arguments: str, out: Path, commit: str, budget_s: float) -> list[str]:
    """The process of a suite that adds its rows to a file, and leaves out those that are there."""
    module, *rest = arguments.split()
    more = ["--resume", "--out", str(out), "--commit", commit, "--budget-s", f"{budget_s:.0f}"]
    return [sys.executable, "-m", f"benchmarks.{module}", *rest, *more]


def run(command: list[str], limit_s: float, log: Path) -> int | None:
    """Runs a command from the sources' root with its output in a file; returns its exit code, None if killed."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    if command[0] == "compute-sanitizer":
        variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Also after it ended by itself: its children would run during the next step.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                time.sleep(1.0)
                os.killpg(process.pid, signal.SIGKILL)


def last_line(log: str) -> str:
    """The last thing that was printed."""
    said = [line.strip() for line in log.splitlines() if line.strip()]
    return said[-1][:160] if said else "nothing printed"


class Progress:
    """What rows say of a suite: which of its cells are there, how many it has, and what the others will take."""

    def __init__(self, suite: str, rows: Sequence[Row], commit: str, device: str) -> None:
        of_card = [row for row in rows if (row.suite, row.device) == (suite, device)]
        own = [row for row in of_card if row.commit == commit]
        # A cell's rows each have the seconds of all of them.
        took = {(row.run, row.cell): row.seconds for row in of_card if row.seconds is not None}
        self.done, self.cells = len(complete(own)), max((row.cells or 0 for row in own), default=0)
        most = self.cells or max((row.cells or 0 for row in of_card), default=0)
        self.left_s = (most - self.done) * sum(took.values()) / len(took) if took and most else None
        self.providers = list(dict.fromkeys(row.provider for row in own if row.median_ms is not None))

    @property
    def finished(self) -> bool:
        """Whether every cell is there."""
        return 0 < self.cells <= self.done

    def __str__(self) -> str:
        left = "" if self.finished or self.left_s is None else f", about {self.left_s:.0f} s left"
        return f"{self.done} of {self.cells or 'unknown'} cells{left}; {', '.join(self.providers) or 'nothing timed'}"


def gather(files: Sequence[Path], out: Path, commit: str, device: str) -> int:
    """Adds to a file the rows of others that it lacks, of this commit and device; returns how many."""
    there = {row.to_json() for row in results.read([out] if out.exists() else [])}
    own = {row.to_json(): row for row in results.read(files) if (row.commit, row.device) == (commit, device)}
    wanted = [row for line, row in own.items() if line not in there]
    results.append(out, wanted)
    return len(wanted)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the suites; returns 0 only if every cell of the chosen ones is there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), metavar="DIR")
    parser.add_argument("--budget-s", type=float, default=3600.0, metavar="S", help="for everything")
    parser.add_argument("--resume", type=Path, nargs="+", default=[], metavar="FILE", help="rows of earlier runs")
    parser.add_argument("--only", type=words, default=[], metavar="A,B", help="these suites")
    parser.add_argument("--skip", type=words, default=[], metavar="A,B", help="all but these")
    parser.add_argument("--commit", help="of a copy of the sources that has no repository")
    parser.add_argument("--list", action="store_true", help="print what rows say of each suite and stop")
    args = parser.parse_args(argv)
    end_s, commit, out = time.monotonic() + args.budget_s, args.commit or results.git_commit(), args.out.resolve()
    unknown = {*args.only, *args.skip} - set(SUITES)
    if unknown:
        parser.error(f"no such suite: {', '.join(sorted(unknown))}; suites: {', '.join(SUITES)}")
    chosen = [name for name in SUITES if name not in args.skip and name in (args.only or SUITES)]
    device = results.device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    out.mkdir(parents=True, exist_ok=True)
    path, unfinished = out / "rows.jsonl", 0
    print(f"commit {commit} on {device}; {gather(args.resume, path, commit, device)} rows taken over", flush=True)
    for name in chosen:
        start_s, (usual_s, arguments) = time.monotonic(), SUITES[name]
        before = Progress(name, results.read([path] if path.exists() else []), commit, device)
        if args.list or before.finished:
            verdict = "done, earlier" if before.finished else "to do"
        elif end_s - start_s < _LEAST_S:
            verdict = "not run, the time is spent"
        else:
            # Cells differ, so that the last ones may take far more than their share.
            limit_s = min(end_s - start_s, max(usual_s, 2 * (before.left_s or 0.0) + _APART_S))
            log = out / f"{name}.log"
            code = run(command_of(arguments, path, commit, limit_s - 15), limit_s, log)
            said = last_line(log.read_text(encoding="utf-8", errors="replace"))
            time_lacks = code is None or code == OUT_OF_TIME
            verdict = "out of time" if time_lacks else f"FAILED: exit code {code}; {said}" if code else "done"
        now = Progress(name, results.read([path] if path.exists() else []), commit, device)
        unfinished += not now.finished
        print(f"{time.monotonic() - start_s:6.0f} s  {name:16} {verdict}: {now}", flush=True)
    print(f"{len(chosen) - unfinished} of {len(chosen)} suites are whole; rows in {path}")
    return 1 if unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
