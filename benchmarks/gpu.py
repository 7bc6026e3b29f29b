"""``python -m benchmarks.gpu --out DIR``: everything that needs a GPU, one after the other, each under a time limit.

The tests, compute-sanitizer over small calls of every kernel, then the suites. A step's output goes to DIR/STEP.log,
which gets that name only if the step succeeded; rows go to DIR/rows.jsonl. Run again on the same DIR with the same
sources, steps with a log are skipped, and interrupted suites resume.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import sanitizer
from benchmarks.results import ROOT, git_commit
from benchmarks.session import OUT_OF_TIME, words

# Step -> (seconds, arguments of python -m benchmarks.NAME); rows and the time limit are added.
_SUITES = {
    "warm": (300, "warm"),
    "forward": (240, "run forward --resume"),
    "backward": (240, "run backward --resume"),
    "forward-fp16": (240, "run forward --dtype float16 --resume"),
    "host": (150, "host"),
    "new-lengths": (60, "host --new-lengths"),
    "loop": (120, "loop"),
    "memory": (100, "memory"),
    "accuracy": (200, "accuracy"),
    "varlen": (100, "varlen"),
    "mods": (600, "mods"),
    "selected": (900, "selected"),
    "ablations": (150, "run ablations --resume"),
    "fp8": (120, "run fp8 --resume"),
    "train": (400, "train"),
    "decode": (400, "decode --providers flashtile-hopper,flashtile-portable,fa3,sdpa --resume"),
    "decode-cold": (100, "decode --measures cold --cells *h32x8*,*h64x8* --resume"),
    "serving": (240, "serving --resume"),
    "mla": (120, "mla --resume"),
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
    for name, (limit_s, arguments) in _SUITES.items():
        module, *rest = arguments.split()
        rows = [] if name == "warm" else ["--out", str(out / "rows.jsonl"), "--commit", commit]
        command = [sys.executable, "-m", f"benchmarks.{module}", *rest, *rows, "--budget-s", str(limit_s - 15)]
        found[name] = limit_s, command
    return found


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


def judge(name: str, code: int | None, log: str) -> str:
    """``ok`` or ``FAILED`` with a reason, from how a step ended and what it printed."""
    said = [line.strip() for line in log.splitlines() if line.strip()]
    last = said[-1][:160] if said else "nothing printed"
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
