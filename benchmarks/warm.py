"""``python -m benchmarks.warm``: compiles what the other benchmarks call, on all cores at once.

A kernel takes a second or two to compile, on one core, while a GPU waits; a measurement that meets a hundred of them
for the first time waits for minutes. Here every cell is called once by each of our backends, in many processes, and
what they compile stays in Triton's disk cache for whoever comes next. Nothing is timed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from benchmarks import accuracy, memory, varlen
from benchmarks.budget import hard_stop
from benchmarks.cases import Case, make_inputs, suite
from benchmarks.providers import PROVIDERS
from benchmarks.run import failure
from benchmarks.session import numbers, words

OURS = {"cuda": ["flashtile-hopper", "flashtile-portable"], "cpu": ["flashtile-cpu"]}
# Attention of the models that benchmarks.train builds: (batch, context, heads, head_dim).
_TRAINED = ((32, 512, 6, 64), (32, 512, 8, 128), (8, 2048, 8, 128), (2, 8192, 8, 128))


def all_cases() -> list[Case]:
    """Every cell of every suite that runs on a GPU, those that need different kernels far apart."""
    found = [
        *suite("forward"),
        *suite("backward"),
        *suite("forward", "float16"),
        *accuracy.cases(),
        *varlen.cases(varlen.draw_lengths()),
        *memory.memory_cases("backward"),
        *(Case("backward", "bfloat16", b, n, n, h, h, d, causal=True) for b, n, h, d in _TRAINED),
    ]
    return spread(list(dict.fromkeys(found)))


def spread(cases: Sequence[Case]) -> list[Case]:
    """The first of each kind, then the second of each, and so on: cells of one kind mostly share their kernels."""
    kinds: dict[tuple[object, ...], list[Case]] = defaultdict(list)
    for case in cases:
        # A size of 1 is a constant to Triton, so a batch of one has kernels of its own.
        kinds[case.direction, case.dtype, case.head_dim, case.mask, case.lengths is None, case.batch == 1].append(case)
    longest = max(map(len, kinds.values()), default=0)
    return [of[i] for i in range(longest) for of in kinds.values() if i < len(of)]


def call_once(case: Case, name: str, device: str) -> str | None:
    """Runs a cell by one provider; what went wrong, None if nothing did. A refusal is nothing wrong."""
    try:
        where = torch.device(device)
        inputs = make_inputs(case, where)
        if PROVIDERS[name].refusal(case, inputs) is None:
            with torch.no_grad():
                PROVIDERS[name].prepare(case, inputs)()
            if where.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
    except Exception as error:
        return failure(error).splitlines()[0]
    return None


def warm(cases: Sequence[Case], names: Sequence[str], device: str, workers: int) -> dict[tuple[str, str], str]:
    """Calls everything in processes of their own; what went wrong, by case and provider."""
    work = [(case, name) for case in cases for name in names]
    wrong = {}
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(call_once, case, name, device): (case.name, name) for case, name in work}
        for future in as_completed(futures):
            said = future.result()
            if said is not None:
                wrong[futures[future]] = said
                print(f"{': '.join(futures[future])}: {said}", flush=True)
    return wrong


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warm", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--providers", type=words, metavar="A,B", help="ours; by default all that run there")
    parser.add_argument("--head-dims", type=numbers, metavar="A,B", help="these alone")
    parser.add_argument("--longest", type=int, metavar="N", help="leave out longer sequences")
    parser.add_argument("--workers", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--budget-s", type=float, metavar="S", help="end within so many seconds, by force")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles; returns the process's exit code, 1 if any call went wrong."""
    start_s = time.monotonic()
    args = _parser().parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device, or --device cpu", file=sys.stderr)
        return 2
    cases = [
        case
        for case in all_cases()
        if case.head_dim in (args.head_dims or [case.head_dim]) and case.seqlen_k <= (args.longest or case.seqlen_k)
    ]
    names = args.providers or OURS[args.device]

    def end_workers() -> None:
        print(f"out of time after {args.budget_s:g} s; what was compiled stays compiled")
        for worker in multiprocessing.active_children():
            worker.kill()

    left_s = None if args.budget_s is None else args.budget_s - (time.monotonic() - start_s)
    with hard_stop(left_s, end_workers):
        wrong = warm(cases, names, args.device, args.workers)
    calls = len(cases) * len(names)
    print(f"{calls - len(wrong)} of {calls} calls went well, {time.monotonic() - start_s:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
