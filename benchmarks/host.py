"""``python -m benchmarks.host``: what a call costs the host, and what the first call of a process costs.

Warm: a problem so small that the device is done before the next call is queued, so the time of a burst is the time the
host takes to queue it. First call: fresh processes, once with an empty Triton cache and once with the cache that left.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import flashtile
from benchmarks import results
from benchmarks.budget import hard_stop
from benchmarks.cases import Case, Inputs, make_inputs
from benchmarks.providers import OURS, PROVIDERS
from benchmarks.results import ROOT
from benchmarks.timing import Call, Timing, summarise

TINY = Case("forward", "bfloat16", 1, 128, 128, 4, 4, 64, causal=True)
# A real size: first-call time includes choosing tiles for it, but hardly running it.
FIRST = Case("forward", "bfloat16", 1, 2048, 2048, 16, 16, 128, causal=True)
_BURST = 100


def _forward(name: str, case: Case, inputs: Inputs) -> Call:
    """The public call of a provider: what a model's code would run."""
    if name == "sdpa":
        q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
    backend = name.removeprefix("flashtile-")
    return lambda: flashtile.attention(inputs.q, inputs.k, inputs.v, causal=case.causal, backend=backend)


def _training(name: str, case: Case, inputs: Inputs) -> Call:
    """Forward and backward through autograd."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    forward: Callable[[], Any] = _forward(name, case, Inputs(q, k, v, inputs.dout, inputs.cu_seqlens))
    dout = inputs.dout.transpose(1, 2) if name == "sdpa" else inputs.dout
    return lambda: torch.autograd.grad(forward(), leaves, dout)


CALLS: dict[str, Callable[[str, Case, Inputs], Call]] = {"forward": _forward, "forward and backward": _training}


def host_times(calls: dict[str, Call], device: torch.device, rounds: int, burst: int = _BURST) -> dict[str, Timing]:
    """Host time of a call, interleaved; the device is idle when a burst starts."""
    for call in calls.values():
        for _ in range(3):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            _wait(device)
            start_s = time.perf_counter()
            for _ in range(burst):
                call()
            samples[name].append((time.perf_counter() - start_s) * 1e3 / burst)
    _wait(device)
    return {name: summarise(values) for name, values in samples.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warm_rows(run: results.Run, names: Sequence[str], device: torch.device, rounds: int) -> Iterator[list[results.Row]]:
    """A row a provider, direction after direction."""
    inputs = make_inputs(TINY, device)
    for direction, build in CALLS.items():
        case = {"measure": "host time of a warm call", "direction": direction, **_shape(TINY)}
        calls, failed = {}, {}
        for name in names:
            try:
                calls[name] = build(name, TINY, inputs)
                calls[name]()
            except Exception as error:
                failed[name] = f"failed: {error}"[:600]
                calls.pop(name, None)
        timings = host_times(calls, device, rounds)
        rows = [run.row(case, name, median_ms=t.median_ms, spread=t.spread) for name, t in timings.items()]
        yield rows + [run.row(case, name, error=error) for name, error in failed.items()]


def _shape(case: Case) -> dict[str, Any]:
    return {name: value for name, value in case.to_dict().items() if name != "direction"}


def first_call_rows(
    run: results.Run, names: Sequence[str], device: torch.device, repeats: int
) -> Iterator[list[results.Row]]:
    """A row a state of the cache, provider and direction one after the other; each sample is a process of its own."""
    for name in names:
        for direction in CALLS:
            samples: dict[str, list[float]] = {"empty cache": [], "warm disk cache": []}
            error = None
            for _ in range(repeats):
                with tempfile.TemporaryDirectory() as cache:
                    for times in samples.values():
                        answer = _fresh_process(name, direction, device, cache)
                        error = answer.get("error", error)
                        if "ms" in answer:
                            times.append(answer["ms"])
            rows = []
            for state, times in samples.items():
                case = {"measure": f"first call, {state}", "direction": direction, **_shape(FIRST)}
                timing = summarise(times) if times else None
                measured: dict[str, Any] = {"error": error} if timing is None else vars(timing)
                rows.append(run.row(case, name, **measured))
            yield rows


def _fresh_process(name: str, direction: str, device: torch.device, cache: str) -> dict[str, Any]:
    """What ``--child`` prints, run with a Triton cache of its own."""
    command = [sys.executable, "-m", "benchmarks.host", "--child", name, direction, device.type]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return {"error": f"failed: {lines[-1]}"[:600]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _child(name: str, direction: str, device_type: str) -> None:
    """Times the first call of this process; the device itself is warmed up by other work."""
    device = torch.device(device_type)
    case = FIRST if device.type == "cuda" else TINY
    inputs = make_inputs(case, device)
    call = CALLS[direction](name, case, inputs)
    (inputs.q.reshape(-1, case.head_dim) @ inputs.k.reshape(-1, case.head_dim).T).sum().item()
    start_s = time.perf_counter()
    call()
    _wait(device)
    print(json.dumps({"ms": (time.perf_counter() - start_s) * 1e3}))


def _present(device: torch.device) -> list[str]:
    """Our providers that this machine has."""
    return [p.name for p in PROVIDERS.values() if p.name.startswith(OURS) and p.missing("forward", device) is None]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and appends rows; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--providers", metavar="A,B", help="flashtile-BACKEND or sdpa, separated by commas")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--first-calls", metavar="A,B", help="providers whose first call is timed; all of ours by default"
    )
    parser.add_argument("--repeats", type=int, default=1, help="fresh processes a first-call figure")
    parser.add_argument("--out", type=Path, metavar="FILE", help="rows are appended here")
    parser.add_argument("--budget-s", type=float, metavar="S", help="end within so many seconds, by force")
    parser.add_argument("--commit", help="of a copy of the sources that has no repository")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        _child(*args.child)
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device, or --device cpu", file=sys.stderr)
        return 2
    device = torch.device(args.device)
    ours = _present(device)
    names = args.providers.split(",") if args.providers else [*ours, "sdpa"]
    first_names = ours if args.first_calls is None else [name for name in args.first_calls.split(",") if name]
    run = results.new_run("host", device, args.commit)
    out = args.out or results.default_file("host", run.device)
    count = 0
    with hard_stop(args.budget_s):
        for rows in itertools.chain(
            warm_rows(run, names, device, args.rounds), first_call_rows(run, first_names, device, args.repeats)
        ):
            results.append(out, rows)
            count += len(rows)
            for row in rows:
                shown = f"{(row.median_ms or 0) * 1e3:12.1f} us  ±{100 * (row.spread or 0):.0f}%"
                shown = shown if row.median_ms is not None else str(row.error)
                print(f"{row.case['measure']:28} {row.case['direction']:22} {row.provider:20} {shown}", flush=True)
    print(f"\n{count} rows appended to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
