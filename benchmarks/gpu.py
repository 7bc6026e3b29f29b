"""``python -m benchmarks.gpu --out DIR``: everything that needs a GPU, one after the other, each under a time limit.

The tests, compute-sanitizer over small calls of every kernel, then the suites. A step's output goes to DIR/STEP.log,
which gets that name only if the step succeeded; rows go to DIR/rows.jsonl. Run again on the same DIR with the same
sources, steps with a log are skipped, and interrupted suites resume.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import sanitizer
from benchmarks.all import SUITES, command_of, last_line, run
from benchmarks.results import git_commit
from benchmarks.session import OUT_OF_TIME, words

# Suites of benchmarks.all, and what it leaves out: seconds and arguments of python -m benchmarks.NAME.
_SUITES = {
    **{name: SUITES[name] for name in ("forward", "backward", "host", "loop", "varlen", "mods", "selected", "fp8")},
    **{name: SUITES[name] for name in ("ablations", "decode", "serving", "mla")},
    "forward-fp16": (240, "run forward --dtype float16"),
    "varlen-short": (100, "varlen --shortest 16 --longest 128"),
    "new-lengths": (60, "host --new-lengths"),
    "memory": (100, "memory"),
    "accuracy": (200, "accuracy"),
    "train": (400, "train"),
    "decode-cold": (100, "decode --measures cold --cells *h32x8*,*h64x8*"),
    "decode-host": (60, "decode --measures host loop --cells *b1-k1k*"),
}
_TOOLS = ("memcheck", "racecheck", "initcheck")


def steps(out: Path, commit: str) -> dict[str, tuple[float, list[str]]]:
    """Seconds and command of every step by name, in order."""
    found: dict[str, tuple[float, list[str]]] = {}
    tests = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--tb=short", "-rfEs"]
    if importlib.util.find_spec("xdist"):
        tests += ["-n", str(max(2, min(12, (os.cpu_count() or 4) - 2)))]
    if importlib.util.find_spec("pytest_timeout"):
        # A call that waits for a hanging kernel can only be stopped by ending its process.
        tests += ["--timeout", "150", "--timeout-method", "thread"]
    alone = {f"pytest-{name}": f"tests/gpu/test_{name}.py" for name in ("kvcache", "quantized", "fuzz")}
    found["pytest"] = 420, [*tests, "tests/gpu", *(f"--ignore={path}" for path in alone.values())]
    found |= {name: (420, [*tests, path]) for name, path in alone.items()}
    for backend, tool in itertools.product(("hopper", "portable"), _TOOLS):
        # The judge can discount only printed reports. initcheck does not check copies to main memory, because it does
        # not see TMA stores.
        options = ["--print-limit", "400", *(["--check-api-memory-access", "no"] if tool == "initcheck" else [])]
        call = [sys.executable, "-m", "tests.gpu.sanitize", backend]
        found[f"{tool}-{backend}"] = 300, ["compute-sanitizer", "--tool", tool, *options, *call]
    found["warm"] = 300, [sys.executable, "-m", "benchmarks.warm", "--budget-s", "285"]
    for name, (limit_s, arguments) in _SUITES.items():
        command = command_of(arguments, out / "rows.jsonl", commit, limit_s - 15)
        found[name] = limit_s, [each for each in command if (name, each) != ("train", "--resume")]
    return found


def judge(name: str, code: int | None, log: str) -> str:
    """``ok`` or ``FAILED`` with a reason, from how a step ended and what it printed."""
    last = last_line(log)
    tool, _, backend = name.partition("-")
    if code is None or code == OUT_OF_TIME:
        return f"FAILED: out of time; {last}"
    if tool in _TOOLS:
        calls = re.search(rf"^{backend}: (\d+) calls right", log, re.MULTILINE)
        found = sanitizer.verdict(log)
        text = f"{found.errors} errors in {calls[1] if calls else 0} calls; {found.text}"
        return f"ok: {text}" if code == 0 and found.summed and calls and not found.errors else f"FAILED: {text}"
    return f"ok: {last}" if code == 0 else f"FAILED: exit code {code}; {last}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the steps; returns 0 only if every selected one succeeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), metavar="DIR")
    parser.add_argument("--budget-s", type=float, default=3600.0, metavar="S", help="for everything")
    parser.add_argument("--only", type=words, default=[], metavar="A,B", help="these steps")
    parser.add_argument("--skip", type=words, default=[], metavar="A,B", help="all but these")
    parser.add_argument("--again", action="store_true", help="also steps that ended well before")
    parser.add_argument("--commit", help="of a copy of the sources that has no repository")
    parser.add_argument("--list", action="store_true", help="print the steps and stop")
    args = parser.parse_args(argv)
    end_s, commit, out = time.monotonic() + args.budget_s, args.commit or git_commit(), args.out.resolve()
    known = steps(out, commit)
    unknown = {*args.only, *args.skip} - set(known)
    if unknown:
        parser.error(f"no such step: {', '.join(sorted(unknown))}; steps: {', '.join(known)}")
    chosen = [name for name in known if name not in args.skip and name in (args.only or known)]
    if args.list:
        print("\n".join(f"{name:20} {known[name][0]:4.0f} s  {' '.join(known[name][1])}" for name in chosen))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    head, verdicts = f"commit {commit}\n", {}
    for name in chosen:
        limit_s, command = known[name]
        log, unfinished = out / f"{name}.log", out / f"{name}.failed.log"
        start_s = time.monotonic()
        if log.exists() and log.read_text(encoding="utf-8").startswith(head) and not args.again:
            verdicts[name] = judge(name, 0, log.read_text(encoding="utf-8")) + " (earlier)"
        elif end_s - start_s < 30:
            verdicts[name] = "FAILED: not run, the budget is spent"
        elif shutil.which(command[0]) is None:
            verdicts[name] = f"FAILED: not run, there is no {command[0]}"
        else:
            unfinished.write_text(head, encoding="utf-8")
            code = run(command, min(limit_s, end_s - start_s), unfinished)
            verdicts[name] = judge(name, code, unfinished.read_text(encoding="utf-8", errors="replace"))
            if verdicts[name].startswith("ok"):
                unfinished.rename(log)
        print(f"{time.monotonic() - start_s:6.0f} s  {name:20} {verdicts[name]}", flush=True)
    good = sum(verdict.startswith("ok") for verdict in verdicts.values())
    last = f"{good} of {len(chosen)} steps ended well; logs and rows.jsonl in {out}\n"
    lines = [f"{name:20} {verdict}\n" for name, verdict in verdicts.items()]
    (out / "summary.txt").write_text("".join([head, *lines, last]), encoding="utf-8")
    print(f"\n{last}")
    return 0 if good == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
