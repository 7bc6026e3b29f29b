"""Checks and times the Hopper backward on this machine's GPU: ``python -m benchmarks.tune_hopper_backward --out DIR``.

Stages, each in processes of their own under a time limit, so that a kernel that hangs costs its stage alone:

    smoke   the smallest calls of every variant, then larger ones
    check   every feature against the float64 reference with NaN-filled memory; ordered sums bit for bit
    time    variants, FlashAttention-3 (FA3_SO) and cuDNN, interleaved, on the 24 cells
    parts   the kernels of a call one by one, and what ordered sums cost

Every stage prints a short table; rows go to DIR as JSON lines.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case as Cell
from benchmarks.cases import make_inputs
from benchmarks.hopper_checks import DEVICE, Case, all_right, build, check_cases, smoke_cases
from benchmarks.providers import PROVIDERS
from benchmarks.timing import Call, measure
from flashtile import reference
from flashtile.backends.base import Gradients
from flashtile.backends.hopper import backward_tiles, gradients, tiles
from flashtile.masks import Band
from flashtile.problem import Problem, Tensors

TOKENS, HIDDEN = 16384, 2048
SEQLENS = (512, 2048, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
WRONG = 3


def variants(dim: int, skip: Sequence[str] = ()) -> dict[str, backward_tiles.Config]:
    """The configurations of a head_dim by name, the table's own first."""
    width = tiles.block_d(dim)
    return {k: c for k, c in backward_tiles.VARIANTS.items() if c.block_d == width and k not in skip}


def differentiated(problem: Problem, tensors: Tensors, dout: Tensor, dlse: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The reference's out, lse and gradients of q, k, v and sinks, computed in a dtype."""
    names = [name for name in ("q", "k", "v", "sinks") if getattr(tensors, name) is not None]
    leaves = {name: getattr(tensors, name).detach().to(dtype).requires_grad_() for name in names}
    out, lse = reference.attention(problem, replace(tensors, **leaves), dtype)
    seed = torch.where(torch.isfinite(lse), dlse.to(lse.dtype), 0.0)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (dout.to(out.dtype), seed))
    return [out.detach(), lse.detach(), *grads]


def wrong(case: Case, config: backward_tiles.Config | None = None, seed: int = 0) -> str | None:
    """What is wrong with a case's gradients, or None: at most twice plain PyTorch's error in the dtype, and a floor."""
    problem, t = build(case, seed)
    generator = torch.Generator(DEVICE).manual_seed(seed + 7)
    dout = torch.randn(t.q.shape, generator=generator, device=DEVICE).to(case.dtype)
    dlse = torch.randn(problem.lse_shape(t.q), generator=generator, device=DEVICE)
    # The reference has no rows behind the last sequence to skip: what it is given there must be harmless.
    known = replace(t, **{name: getattr(t, name).nan_to_num() for name in "qkv"})
    out, lse, *exact = differentiated(problem, known, dout, dlse, torch.float64)
    plain = differentiated(problem, known, dout, dlse, case.dtype)[2:]
    out, lse = out.to(case.dtype).contiguous(), lse.float().contiguous()
    got = gradients.run(problem, t, out, lse, dout, dlse, config)
    torch.cuda.synchronize()
    values = [got.dq, got.dk, got.dv, *([] if got.dsinks is None else [got.dsinks])]
    for name, mine, want, low in zip(("dq", "dk", "dv", "dsinks"), values, exact, plain, strict=False):
        error = (mine.double() - want).abs().max().item() if mine.numel() else 0.0
        largest = want.abs().max().item() if mine.numel() else 0.0
        bar = 2 * (low.double() - want).abs().max().item() if mine.numel() else 0.0
        bar += largest * torch.finfo(case.dtype).eps / 2 + 32 * torch.finfo(torch.float32).eps * max(largest, 1.0)
        if not error <= bar:
            return f"{name}: error {error:.1e} (bar {bar:.1e}, largest {largest:.1e})"
    return None


def poison_memory() -> None:
    """From here on fresh memory is full of NaN and of numbers that nothing expects."""
    allocate = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        fresh = allocate(*args, **kwargs)
        return fresh.fill_(math.nan if fresh.dtype.is_floating_point else 1 << 20)

    torch.empty = poisoned


def run_checks(cases: Iterator[Case], config: backward_tiles.Config | None, limit_s: float) -> bool:
    """Checks until the cases or the time run out; prints failures."""
    return all_right(cases, lambda case, seed: wrong(case, config, seed), limit_s)


def _call(dim: int, causal: bool, seqlen: int, dtype: torch.dtype) -> tuple[Problem, tuple[Any, ...]]:
    """A cell's problem, and what ``gradients.run`` takes after it; out and lse from PyTorch's flash kernel."""
    shape = (max(1, TOKENS // seqlen), seqlen, HIDDEN // dim, dim)
    q, k, v, dout = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(4))
    problem = Problem.build(Tensors(q, k, v), Band(None, 0) if causal else Band(), needs_grad=True)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first, 0.0, causal)[:2]
    return problem, (Tensors(q, k, v), out.transpose(1, 2).contiguous(), lse.contiguous(), dout, None)


def _flat(grads: Gradients) -> tuple[Tensor, Tensor, Tensor]:
    return grads.dq, grads.dk, grads.dv


def check_bits(dim: int, repetitions: int) -> bool:
    """Ordered sums: one bit pattern over repetitions. Others: how far repetitions differ."""
    right = True
    for causal, seqlen in itertools.product((False, True), (512, 2048)):
        problem, call = _call(dim, causal, seqlen, torch.bfloat16)
        ordered = replace(problem, deterministic=True)
        first = _flat(gradients.run(ordered, *call))
        same = all(
            all(torch.equal(a, b) for a, b in zip(first, _flat(gradients.run(ordered, *call)), strict=True))
            for _ in range(repetitions)
        )
        free = _flat(gradients.run(problem, *call))
        off = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(free, first, strict=True))
        right &= same and off < 0.02
        print(f"  causal {causal}, {seqlen}: {repetitions} repetitions alike: {same}; free sums off by {off:.1e}")
    return right


def peers(dim: int, causal: bool, seqlen: int, dtype: torch.dtype) -> dict[str, Call]:
    """FlashAttention-3 and cuDNN on a cell, where they are."""
    cell = Cell(
        direction="backward", dtype=str(dtype).removeprefix("torch."), batch=max(1, TOKENS // seqlen), seqlen_q=seqlen,
        seqlen_k=seqlen, num_heads_q=HIDDEN // dim, num_heads_kv=HIDDEN // dim, head_dim=dim, causal=causal,
    )  # fmt: skip
    calls: dict[str, Call] = {}
    for name in ("fa3", "cudnn"):
        provider = PROVIDERS[name]
        if provider.missing("backward", torch.device(DEVICE)) is None:
            calls[name] = provider.prepare(cell, make_inputs(cell, torch.device(DEVICE)))
    return calls


def time_cells(dims: list[int], dtype: torch.dtype, rounds: int, skip: Sequence[str], out: Path) -> None:
    """Times the cells; prints TFLOPS, the table's ratio to the better peer, and that of each cell's best variant."""
    chosen, best = [], []
    for dim, causal, seqlen in itertools.product(dims, (False, True), SEQLENS):
        problem, call = _call(dim, causal, seqlen, dtype)
        calls: dict[str, Call] = {
            name: functools.partial(gradients.run, *(problem, *call, config))
            for name, config in variants(dim, skip).items()
        }
        ours = list(calls)
        calls |= peers(dim, causal, seqlen, dtype)
        timings = measure(calls, torch.device(DEVICE), rounds=rounds, burst_ms=5.0)
        flops = 2.5 * 4 * TOKENS * HIDDEN * seqlen * (0.5 if causal else 1.0)
        tera = {name: flops / t.median_ms / 1e9 for name, t in timings.items()}
        peer = max((tera[name] for name in ("fa3", "cudnn") if name in tera), default=math.nan)
        chosen.append(tera[ours[0]] / peer)
        best.append(max(tera[name] for name in ours) / peer)
        shown = "  ".join(f"{name} {value:.0f}" for name, value in tera.items())
        mask = "causal" if causal else "full  "
        print(f"d{dim} {mask} {seqlen:5}: table {chosen[-1]:.3f} best {best[-1]:.3f}   {shown}", flush=True)
        with out.open("a") as file:
            for name, t in timings.items():
                row = {"head_dim": dim, "causal": causal, "seqlen": seqlen, "dtype": str(dtype), "name": name}
                row |= {"median_ms": t.median_ms, "spread": t.spread, "tflops": tera[name]}
                file.write(json.dumps(row) + "\n")
    for what, ratios in (("table", chosen), ("best variant of each cell", best)):
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"{what}: geomean to the better peer {mean:.3f}, least {min(ratios):.3f}", flush=True)


def time_parts(dims: list[int]) -> None:
    """What each kernel adds to a call, the last one only with a band, and what ordered sums cost, in microseconds."""
    for dim, causal, seqlen in itertools.product(dims, (False, True), (512, 8192)):
        problem, (t, out, lse, dout, dlse) = _call(dim, causal, seqlen, torch.bfloat16)
        plan = gradients.Plan(
            problem, backward_tiles.choose(problem), torch.cuda.get_device_properties(DEVICE).multi_processor_count
        )
        work = plan.workspace(t.q)
        grads = Gradients(*(torch.empty_like(x) for x in (t.q, t.k, t.v)))
        launches = plan.launches(t, out, lse, dout, dlse, grads, work)

        def first(
            count: int, launches: list[gradients.Launch] = launches, plan: gradients.Plan = plan
        ) -> Callable[[], None]:
            def run() -> None:
                for each in launches[:count]:
                    plan.launch(each)

            return run

        ordered = replace(problem, deterministic=True)
        names = ("prepare", "and sweep", "and finish", "and mend")[: len(launches)]
        calls: dict[str, Call] = {name: first(count) for count, name in enumerate(names, 1)}
        calls["call"] = functools.partial(gradients.run, problem, t, out, lse, dout, dlse)
        calls["ordered"] = functools.partial(gradients.run, ordered, t, out, lse, dout, dlse)
        timings = measure(calls, torch.device(DEVICE), rounds=3, burst_ms=5.0)
        shown = "  ".join(f"{name} {timing.median_ms * 1e3:.0f}" for name, timing in timings.items())
        print(f"  d{dim} {'causal' if causal else 'full'} {seqlen}: {shown} us", flush=True)


def stage(arguments: list[str], limit_s: float) -> subprocess.Popen[bytes]:
    command = ["timeout", "-k", "5", str(limit_s), sys.executable, "-m", "benchmarks.tune_hopper_backward", *arguments]
    return subprocess.Popen(command)


def main() -> None:
    """Runs one stage here, or all in processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=("all", "smoke", "check", "time", "parts"), default="all")
    parser.add_argument("--head-dims", nargs="+", type=int, default=list(HEAD_DIMS))
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--cases", type=int, default=48)
    parser.add_argument("--shards", nargs="+", type=int, default=[0, 1, 2, 3], help="of the checks")
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--variant", help="check this one instead of the table's choice")
    parser.add_argument("--skip", nargs="*", default=[], help="variants to leave out")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    args = parser.parse_args()
    if args.stage == "all":
        run_all(args)
        return
    right = True
    if args.stage in ("smoke", "check"):
        poison_memory()
    for dim in args.head_dims if args.stage in ("smoke", "check") else ():
        print(f"{args.stage} head_dim {dim} {args.variant or ''}", flush=True)
        if args.stage == "smoke":
            config = backward_tiles.VARIANTS[args.variant] if args.variant else None
            right &= run_checks(smoke_cases(dim), config, args.limit_s)
        else:
            right &= run_checks(check_cases(dim, args.cases, args.shards), None, args.limit_s)
            if 0 in args.shards:
                right &= check_bits(dim, 20)
    if args.stage == "time":
        rows = args.out / "tune_hopper_backward.jsonl"
        time_cells(args.head_dims, getattr(torch, args.dtype), args.rounds, args.skip, rows)
    if args.stage == "parts":
        time_parts(args.head_dims)
    if not right:
        sys.exit(WRONG)


def run_all(args: argparse.Namespace) -> None:
    """Smoke, checks and times; a variant that hangs or breaks in its smoke stage goes no further."""
    start_s = time.perf_counter()

    def report(name: str, codes: dict[str, int]) -> None:
        print(f"{name}: exit codes {codes} after {time.perf_counter() - start_s:.0f} s", flush=True)

    smoke = {
        (dim, name): stage(["--stage", "smoke", "--head-dims", str(dim), "--variant", name, "--limit-s", "30"], 80.0)
        for dim in args.head_dims
        for name in variants(dim)
    }
    codes = {key: process.wait() for key, process in smoke.items()}
    report("smoke", {name: code for (_, name), code in codes.items()})
    skip = ["--skip", *args.skip, *(name for (_, name), code in codes.items() if code not in (0, WRONG))]
    alive = [dim for dim in args.head_dims if variants(dim, skip)]
    if args.cases:
        options = ["--cases", str(args.cases), "--limit-s", str(args.limit_s)]
        checks = {
            f"d{dim}/{shard}": stage(
                ["--stage", "check", "--head-dims", str(dim), "--shards", str(shard), *options], args.limit_s + 20.0
            )
            for dim, shard in itertools.product(alive, range(4))
        }
        report("check", {name: process.wait() for name, process in checks.items()})
    options = ["--dtype", args.dtype, "--rounds", str(args.rounds), "--out", str(args.out), *skip]
    for dim in alive:
        report("time", {f"d{dim}": stage(["--stage", "time", "--head-dims", str(dim), *options], 60.0).wait()})
    report("parts", {"parts": stage(["--stage", "parts", "--head-dims", *map(str, alive)], 40.0).wait()})


if __name__ == "__main__":
    main()
