"""Checks and times the Hopper forward on this machine's GPU: ``python -m benchmarks.tune_hopper --out DIR``.

Stages, each in processes of their own under a time limit, so that a kernel that hangs costs its stage alone:

    smoke   the smallest calls of every head_dim, then larger ones
    check   every feature against the float64 reference with NaN-filled outputs; repetitions bit for bit
    time    candidates, FlashAttention-3 (FA3_SO) and cuDNN, interleaved, on the 36 cells
    host    host time of a warm call

Every stage prints a short table; rows go to DIR as JSON lines.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.timing import Call, measure
from flashtile import reference
from flashtile.backends.hopper import tiles
from flashtile.masks import Band
from flashtile.problem import Problem, Tensors

DEVICE = "cuda"
TOKENS, HIDDEN = 16384, 2048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
WRONG = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call. ``lengths`` holds (seqlen_q, seqlen_k) of each sequence; dense calls repeat one pair."""

    head_dim: int
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (2, 2)
    band: Band = field(default_factory=Band)
    varlen: bool = False
    dtype: torch.dtype = torch.bfloat16
    softmax_scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    layout: str = "contiguous"
    outliers: bool = False


def _tensor(case: Case, side: int, seed: int) -> Tensor:
    """Query (side 0), key or value (side 1), in the case's layout; NaN behind the last packed sequence."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    heads, dim = case.heads[side], case.head_dim
    lengths = [pair[side] for pair in case.lengths]
    shape = (sum(lengths) + 37, heads, dim) if case.varlen else (len(lengths), lengths[0], heads, dim)
    if case.layout == "heads_first" and not case.varlen:
        x = (
            torch.randn(shape[0], heads, shape[1], dim, device=DEVICE, generator=generator)
            .to(case.dtype)
            .transpose(1, 2)
        )
    elif case.layout == "padded":
        x = torch.randn(*shape[:-1], dim + 24, device=DEVICE, generator=generator).to(case.dtype)[..., 8 : 8 + dim]
    elif case.layout == "expanded" and side == 1:
        x = torch.randn(*shape[:-2], 1, dim, device=DEVICE, generator=generator).to(case.dtype).expand(shape)
    else:
        x = torch.randn(shape, device=DEVICE, generator=generator).to(case.dtype)
    if case.outliers:
        far = torch.rand(shape, device=DEVICE, generator=generator) < 1e-3
        x = (x.float() + far * 10 * torch.randn(shape, device=DEVICE, generator=generator)).to(case.dtype)
    if case.varlen and case.layout != "expanded":
        x[sum(lengths) :] = math.nan
    return x


def build(case: Case, seed: int = 0) -> tuple[Problem, Tensors]:
    """The record and the tensors of a case."""
    sinks = torch.randn(case.heads[0], device=DEVICE).to(case.dtype) if case.sinks else None
    bounds: list[Tensor | None] = [None, None]
    if case.varlen:
        for side in (0, 1):
            ends = itertools.accumulate((pair[side] for pair in case.lengths), initial=0)
            bounds[side] = torch.tensor(list(ends), dtype=torch.int32, device=DEVICE)
    t = Tensors(
        _tensor(case, 0, seed),
        _tensor(case, 1, seed + 1),
        _tensor(case, 1, seed + 2),
        sinks=sinks,
        cu_seqlens_q=bounds[0],
        cu_seqlens_k=bounds[1],
    )
    longest = {f"max_seqlen_{s}": max(p[i] for p in case.lengths) if case.varlen else None for i, s in enumerate("qk")}
    return Problem.build(t, case.band, softmax_scale=case.softmax_scale, softcap=case.softcap, **longest), t  # type: ignore[arg-type]


def wrong(case: Case, config: tiles.Config | None = None, seed: int = 0) -> str | None:
    """What is wrong with a case's numbers, or None: at most twice plain PyTorch's error in the dtype, and a floor."""
    from flashtile.backends.hopper import launch

    problem, tensors = build(case, seed)
    out, lse = launch.forward(problem, tensors, config)
    torch.cuda.synchronize()
    exact, exact_lse = reference.attention(problem, tensors)
    plain, _ = reference.attention(problem, tensors, case.dtype)
    error = (out.double() - exact).abs().max().item() if out.numel() else 0.0
    bar = 2 * (plain.double() - exact).abs().max().item() + 1e-4 if out.numel() else 1.0
    same_empty = torch.equal(lse == -math.inf, exact_lse == -math.inf)
    finite = exact_lse != -math.inf
    lse_error = (lse.double() - exact_lse)[finite].abs().max().item() if finite.any() else 0.0
    if error <= bar and same_empty and lse_error <= 2e-3:
        return None
    return f"error {error:.1e} (bar {bar:.1e}), lse error {lse_error:.1e}, empty rows agree: {same_empty}"


def smoke_cases(dim: int) -> Iterator[Case]:
    """From the least that can run to many tiles a program."""
    for n, band in itertools.product((64, 128, 256, 1000), (Band(), Band(None, 0))):
        yield Case(head_dim=dim, lengths=((n, n),), band=band)
    for band in (Band(), Band(None, 0)):
        yield Case(head_dim=dim, lengths=((777, 1234),) * 9, heads=(16, 4), band=band)
        yield Case(head_dim=dim, lengths=((1000, 300),) * 5, heads=(8, 8), band=band)


def check_cases(dim: int, count: int, shards: Iterable[int] = range(4)) -> Iterator[Case]:
    """Every feature on its own and in the mixtures that share a build, over awkward lengths; a shard has its builds."""
    pick = random.Random(dim)
    lengths = (1, 2, 17, 63, 64, 65, 127, 128, 129, 191, 193, 255, 257, 383, 511, 640, 777, 1025)
    bands = (
        Band(),
        Band(None, 0),
        Band(100, 0),
        Band(70, 30),
        Band(0, 0),
        Band(None, 20),
        Band(513, None),
        Band(-3, 9),
    )
    narrow = {64: (8, 40, 64), 128: (72, 96, 128), 256: (136, 192, 256)}[dim]
    for index in range(count):
        band = bands[index % len(bands)]
        varlen = index // len(bands) % 2 == 1
        extra = index // (2 * len(bands)) % 4
        batch = pick.choice((1, 2, 3, 5))
        pair = (pick.choice(lengths), pick.choice(lengths))
        many = tuple((pick.choice((0, *lengths)), pick.choice((0, *lengths))) for _ in range(batch))
        some = all(sum(pair[side] for pair in many) for side in (0, 1))
        case = Case(
            head_dim=pick.choice(narrow) if extra in (0, 1) else dim,
            lengths=many if varlen and some else (pair,) * batch,
            heads=pick.choice(((2, 2), (4, 2), (6, 1), (3, 3))),
            band=band,
            varlen=varlen,
            dtype=torch.float16 if extra == 1 else torch.bfloat16,
            softmax_scale=(None, 0.3, -0.2)[pick.randrange(3)] if extra == 3 else None,
            softcap=15.0 if extra == 2 else 0.0,
            sinks=extra == 1,
            layout=pick.choice(("contiguous", "contiguous", "heads_first", "padded", "expanded")),
            outliers=extra == 0 and index % 3 == 0,
        )
        if extra in shards:
            yield case


def run_checks(cases: Iterator[Case], config: tiles.Config | None, limit_s: float) -> bool:
    """Checks until the cases or the time run out; prints failures."""
    # NaN in whatever the kernel does not write.
    allocate = torch.Tensor.new_empty
    torch.Tensor.new_empty = lambda *a, **k: allocate(*a, **k).fill_(math.nan)  # type: ignore[assignment,method-assign]
    start_s = time.perf_counter()
    good = bad = 0
    for case in cases:
        if time.perf_counter() - start_s > limit_s:
            print("  out of time", flush=True)
            break
        try:
            verdict = wrong(case, config, good)
        except Exception as error:
            verdict = f"{type(error).__name__}: {str(error)[:300]}"
        if verdict:
            bad += 1
            print(f"  WRONG {case}: {verdict}", flush=True)
            if "CUDA" in verdict:
                break
        else:
            good += 1
    print(f"  {good} right, {bad} wrong, {time.perf_counter() - start_s:.0f} s", flush=True)
    return bad == 0


def check_bits(dim: int, repetitions: int) -> None:
    """One bit pattern over repetitions, and for a sequence alone, in a batch, and packed."""
    from flashtile.backends.hopper import launch

    for band in (Band(), Band(None, 0)):
        case = Case(head_dim=dim, lengths=((1500, 1500),) * 7, heads=(8, 2), band=band)
        problem, t = build(case)
        first = launch.forward(problem, t)
        same = True
        for _ in range(repetitions):
            again = launch.forward(problem, t)
            same = same and torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
        alone = Tensors(t.q[3:4], t.k[3:4], t.v[3:4])
        one = launch.forward(Problem.build(alone, band), alone)
        in_batch = torch.equal(one[0], first[0][3:4]) and torch.equal(one[1], first[1][3:4])
        ends = torch.arange(0, 8 * 1500, 1500, dtype=torch.int32, device=DEVICE)
        q, k, v = (x.flatten(0, 1) for x in (t.q, t.k, t.v))
        packed = Tensors(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends)
        out, _ = launch.forward(Problem.build(packed, band, max_seqlen_q=1500, max_seqlen_k=1500), packed)
        print(f"  {band}: repetitions {same}, alone {in_batch}, packed {torch.equal(out, first[0].flatten(0, 1))}")


def check_poison(dim: int) -> None:
    """A sequence of NaN between two others changes neither."""
    from flashtile.backends.hopper import launch

    case = Case(head_dim=dim, lengths=((200, 333), (150, 150), (77, 500)), varlen=True, band=Band(None, 0))
    problem, t = build(case)
    clean, _ = launch.forward(problem, t)
    for x in (t.q, t.k, t.v):
        start, length = (200, 150) if x is t.q else (333, 150)
        x[start : start + length] = math.nan
    out, _ = launch.forward(problem, t)
    kept = torch.equal(out[:200], clean[:200]) and torch.equal(out[350:427], clean[350:427])
    print(f"  NaN stays in its sequence: {kept}; and fills it: {bool(out[200:350].isnan().all())}")


def candidates(dim: int) -> dict[str, tiles.Config | None]:
    """By name; None is what the table chooses."""
    if dim == 64:
        three, two = tiles.THREE_GROUPS_64, tiles.TWO_GROUPS_64
        return {
            "table": None,
            "2 groups": two,
            "3g 3 stages": replace(three, stages=3),
            "2g 4 st": replace(two, stages=4),
        }
    if dim == 128:
        return {"table": None, "no overlap": replace(tiles.TWO_GROUPS_128, overlap=False)}
    return {"table": None}


def cell_calls(dim: int, causal: bool, seqlen: int, dtype: torch.dtype, every: bool) -> dict[str, Call]:
    """What is timed in a cell."""
    from flashtile.backends.hopper import launch

    shape = (max(1, TOKENS // seqlen), seqlen, HIDDEN // dim, dim)
    q, k, v = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(3))
    t = Tensors(q, k, v)
    problem = Problem.build(t, Band(None, 0) if causal else Band())
    calls: dict[str, Call] = {}
    for name, config in candidates(dim).items():
        if every or config is None:
            calls[name] = functools.partial(launch.forward, problem, t, config)
    if "FA3_SO" in os.environ:
        calls["fa3"] = lambda: torch.ops.flash_attn_3.fwd(
            q, k, v, softmax_scale=dim**-0.5, is_causal=causal, num_splits=1
        )
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(qt, kt, vt, is_causal=causal)

    calls["cudnn"] = cudnn
    return calls


def time_cells(dims: list[int], dtype: torch.dtype, rounds: int, every: bool, out: Path) -> None:
    """Times the cells; prints TFLOPS, and the ratio of the table's choice to the better peer."""
    if "FA3_SO" in os.environ:
        from benchmarks.providers import _load_fa3

        _load_fa3(os.environ["FA3_SO"])
    ratios = []
    for dim, causal, seqlen in itertools.product(dims, (False, True), SEQLENS):
        calls = cell_calls(dim, causal, seqlen, dtype, every)
        timings = measure(calls, torch.device(DEVICE), rounds=rounds, burst_ms=5.0)
        flops = 4 * TOKENS * HIDDEN * seqlen * (0.5 if causal else 1.0)
        tera = {name: flops / t.median_ms / 1e9 for name, t in timings.items()}
        best = max(tera.get("fa3", 0.0), tera["cudnn"])
        ratios.append(tera["table"] / best)
        shown = "  ".join(f"{name} {value:.0f}" for name, value in tera.items())
        print(f"d{dim} {'causal' if causal else 'full  '} {seqlen:5}: {ratios[-1]:.3f}   {shown}", flush=True)
        with out.open("a") as file:
            for name, t in timings.items():
                row = {"head_dim": dim, "causal": causal, "seqlen": seqlen, "dtype": str(dtype), "name": name}
                file.write(
                    json.dumps(row | {"median_ms": t.median_ms, "spread": t.spread, "tflops": tera[name]}) + "\n"
                )
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"geomean to the better peer {mean:.3f}, least {min(ratios):.3f}", flush=True)


def time_host() -> None:
    """Host time of a warm call, in microseconds, beside SDPA's."""
    import flashtile
    from flashtile.backends.hopper import launch

    q, k, v = (torch.randn(1, 128, 2, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    t = Tensors(q, k, v)
    problem = Problem.build(t, Band())
    calls: dict[str, Any] = {
        "sdpa": lambda: F.scaled_dot_product_attention(qt, kt, vt),
        "launch.forward": lambda: launch.forward(problem, t),
        "Problem.build": lambda: Problem.build(t, Band()),
        "flashtile.attention": lambda: flashtile.attention(q, k, v, backend="hopper"),
    }
    for name, call in calls.items():
        for _ in range(50):
            call()
        torch.cuda.synchronize()
        best = math.inf
        for _ in range(5):
            start_s = time.perf_counter()
            for _ in range(100):
                call()
            best = min(best, time.perf_counter() - start_s)
            torch.cuda.synchronize()
        print(f"  {name}: {best * 1e4:.1f} us", flush=True)


def stage(arguments: list[str], limit_s: float) -> subprocess.Popen[bytes]:
    command = ["timeout", "-k", "5", str(limit_s), sys.executable, "-m", "benchmarks.tune_hopper", *arguments]
    return subprocess.Popen(command)


def main() -> None:
    """Runs one stage here, or all in processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=("all", "smoke", "check", "time", "host"), default="all")
    parser.add_argument("--head-dims", nargs="+", type=int, default=list(HEAD_DIMS))
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--cases", type=int, default=64)
    parser.add_argument("--shards", nargs="+", type=int, default=[0, 1, 2, 3], help="of the checks")
    parser.add_argument("--limit-s", type=float, default=110.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only-table", action="store_true", help="time the table's choice and the peers alone")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    args = parser.parse_args()
    if args.stage == "all":
        run_all(args)
        return
    right = True
    for dim in args.head_dims if args.stage in ("smoke", "check") else ():
        print(f"{args.stage} head_dim {dim}", flush=True)
        if args.stage == "smoke":
            right &= run_checks(smoke_cases(dim), None, args.limit_s)
        else:
            right &= run_checks(check_cases(dim, args.cases, args.shards), None, args.limit_s)
            if 0 in args.shards:
                check_bits(dim, 20)
                check_poison(dim)
    if args.stage == "time":
        rows = args.out / "tune_hopper.jsonl"
        time_cells(args.head_dims, getattr(torch, args.dtype), args.rounds, not args.only_table, rows)
    if args.stage == "host":
        time_host()
    if not right:
        sys.exit(WRONG)


def run_all(args: argparse.Namespace) -> None:
    """Smoke, checks and times; a head_dim that hangs or breaks in its smoke stage goes no further."""
    start_s = time.perf_counter()

    def report(name: str, codes: dict[str, int]) -> None:
        print(f"{name}: exit codes {codes} after {time.perf_counter() - start_s:.0f} s", flush=True)

    smoke = {dim: stage(["--stage", "smoke", "--head-dims", str(dim)], 60.0) for dim in args.head_dims}
    codes = {dim: process.wait() for dim, process in smoke.items()}
    report("smoke", {f"d{dim}": code for dim, code in codes.items()})
    alive = [dim for dim, code in codes.items() if code in (0, WRONG)]
    if args.cases:
        options = ["--cases", str(args.cases), "--limit-s", str(args.limit_s)]
        checks = {
            f"d{dim}/{shard}": stage(
                ["--stage", "check", "--head-dims", str(dim), "--shards", str(shard), *options], args.limit_s + 30.0
            )
            for dim, shard in itertools.product(alive, range(4))
        }
        report("check", {name: process.wait() for name, process in checks.items()})
    options = ["--dtype", args.dtype, "--rounds", str(args.rounds), "--out", str(args.out)]
    options += ["--only-table"] if args.only_table else []
    for dim in alive:
        code = stage(["--stage", "time", "--head-dims", str(dim), *options], 80.0).wait()
        report("time", {f"d{dim}": code})
    report("host", {"host": stage(["--stage", "host"], 60.0).wait()})


if __name__ == "__main__":
    main()
