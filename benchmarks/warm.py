"""``python -m benchmarks.warm``: compiles the kernels that the other benchmarks call, on all cores in parallel.

A kernel takes a second or two to compile, on one core, while a GPU waits; a measurement that needs a hundred new ones
waits for minutes. Here every cell is called once by each of our backends, in many processes, and the compiled kernels
stay in Triton's disk cache for later processes. Nothing is timed.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import chain
from typing import Any

import torch

from benchmarks import accuracy, caches, decode, loop, memory, varlen
from benchmarks.ablations import CHANGES
from benchmarks.caches import DecodeCase
from benchmarks.cases import Case, make_inputs, suite
from benchmarks.providers import PROVIDERS, prepared
from benchmarks.session import attempt, numbers, words
from benchmarks.steps import StepCase
from benchmarks.timing import wait

OURS = {"cuda": ["flashtile-hopper", "flashtile-portable"], "cpu": ["flashtile-cpu"]}
WORKERS = max(1, min(16, (os.cpu_count() or 2) // 2))
# Attention of the models that benchmarks.train builds: (batch, context, heads, head_dim).
_TRAINED = ((32, 512, 6, 64), (32, 512, 8, 128), (8, 2048, 8, 128), (2, 8192, 8, 128))


def all_cases() -> list[Case | DecodeCase]:
    """Every cell of every suite that runs on a GPU, shuffled."""
    found: list[Case | DecodeCase] = [
        *suite("forward"),
        *suite("backward"),
        *suite("forward", "float16"),
        *accuracy.cases(),
        *varlen.cases(varlen.draw_lengths()),
        *memory.memory_cases("backward"),
        *loop.CASES["cuda"],
        *(Case("backward", "bfloat16", b, n, n, h, h, d, causal=True) for b, n, h, d in _TRAINED),
        *chain(*caches.groups("host", math.inf)),
    ]
    # Neighbouring cells mostly need the same kernels, which are compiled twice if called at the same time.
    return random.Random(0).sample(list(dict.fromkeys(found)), len(set(found)))


def call_once(case: Case | DecodeCase | StepCase, name: str, device: str) -> str | None:
    """Runs a cell by one provider; returns the error, None if there was none or the case was refused."""
    where = torch.device(device)

    def call() -> None:
        with torch.no_grad():
            if not isinstance(case, Case):
                tensors = case.calls(caches.draw_pool([case], where))[0]
                decode.call_of(PROVIDERS[name], case, tensors)()
            else:
                prepared(PROVIDERS[name], case, make_inputs(case, where))()
        wait(where)

    said = attempt(where, name, call)
    return None if said is None or said.startswith("refused") else said.splitlines()[0]


def side_by_side(
    function: Callable[..., str | None],
    work: Sequence[tuple[Any, ...]],
    workers: int,
    limit_s: float | None,
    **pool: Any,
) -> Iterator[tuple[tuple[Any, ...], str | None]]:
    """Calls a function in many processes; yields each item with what it returned, as they end.

    Items that have not ended after ``limit_s`` seconds are killed and reported as out of time.
    """
    executor = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), **pool)
    futures = {executor.submit(function, *item): item for item in work}
    try:
        for future in as_completed(list(futures), limit_s):
            error = future.exception()
            yield futures.pop(future), future.result() if error is None else f"failed: {error or type(error).__name__}"
    except TimeoutError:
        for process in multiprocessing.active_children():
            process.kill()
        yield from ((item, f"no answer within {limit_s:.0f} s") for item in futures.values())
    executor.shutdown(wait=False, cancel_futures=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles; returns the process's exit code, 1 if any call failed."""
    start_s = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warm", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--providers", type=words, metavar="A,B", help="ours; by default all that run there")
    parser.add_argument("--head-dims", type=numbers, metavar="A,B", help="these alone")
    parser.add_argument("--longest", type=int, metavar="N", help="leave out longer sequences")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--budget-s", type=float, metavar="S", help="end within so many seconds, by force")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device, or --device cpu", file=sys.stderr)
        return 2
    dims, longest = args.head_dims, args.longest or sys.maxsize
    cases = [case for case in all_cases() if case.head_dim in (dims or [case.head_dim]) and case.seqlen_k <= longest]
    work = [(case, name, args.device) for case in cases for name in args.providers or OURS[args.device]]
    if args.device == "cuda":
        # Two lengths: short causal sequences have tiles of their own.
        work += [(case, "flashtile-hopper-fp8-call", "cuda") for case in suite("fp8") if case.seqlen_q < 16384]
        work += [(case, f"flashtile-hopper-{name}", "cuda") for case in suite("ablations") for name in CHANGES]
    wrong = 0
    for (case, name, _), said in side_by_side(call_once, work, args.workers, args.budget_s):
        if said is not None:
            wrong += 1
            print(f"{case.name}: {name}: {said}", flush=True)
    print(f"{len(work) - wrong} of {len(work)} calls went well, {time.monotonic() - start_s:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
