"""Checks and times the Hopper forward on this machine's GPU: ``python -m benchmarks.tune_hopper --out DIR``.

Stages, each in processes of their own under a time limit, so that a kernel that hangs costs its stage alone:

    smoke   the smallest calls of every head_dim and variant, then larger ones
    check   every feature against the float64 reference with NaN-filled outputs; repetitions and variants bit for bit
    time    variants, FlashAttention-3 (FA3_SO) and cuDNN, interleaved, on the 36 cells; those of other head dims, which
            ``--head-dims`` names (96, 192, 192/128 for a head_dim_v of 128), up to 4096 tokens
    host    host time of a warm call
    choose  the best variant of each cell and of each class of lengths, and what choosing it would be worth

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
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.hopper_checks import (
    DEVICE,
    check_bits,
    check_cases,
    check_leaks,
    check_poison,
    check_variants,
    run_checks,
    smoke_cases,
)
from benchmarks.timing import Call, measure
from flashtile.backends.hopper import tiles
from flashtile.masks import Band
from flashtile.problem import Problem, Tensors

TOKENS, HIDDEN = 16384, 2048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
CLASSES = ((512,), (1024,), (2048, 4096), (8192, 16384))
PEERS = ("fa3", "cudnn")
HEAD_DIMS = ((64, 64), (128, 128), (256, 256))
# Of head dims whose tiles consist of parts, each with the tiles of one part that hold it.
IN_PARTS = {(96, 96): (128, 128), (160, 160): (256, 256), (192, 192): (256, 256), (192, 128): (256, 128)}
WRONG = 3
ROWS = "tune_hopper.jsonl"


def dims_of(text: str) -> tuple[int, int]:
    """(head_dim, head_dim_v) of ``192/128`` or ``64``."""
    dim, _, dim_v = text.partition("/")
    return int(dim), int(dim_v or dim)


def label(dims: tuple[int, int]) -> str:
    """What ``dims_of`` reads."""
    return f"{dims[0]}" if dims[0] == dims[1] else f"{dims[0]}/{dims[1]}"


def variants(dims: tuple[int, int], skip: Sequence[str] = ()) -> dict[str, tiles.Config]:
    """Configurations by name.

    They say warpgroups, whether tiles overlap ("lap") and whether a counter deals them out ("dyn"); of tiles in parts
    also the tiles of one part ("pad"), values without a part of 32 columns, whose products may not run at the full rate
    ("pad v"), and twice the keys a block ("128 keys").
    """
    shapes = {"2g": tiles.TWO_GROUPS[dims]}
    if dims == (64, 64):
        shapes["3g"] = tiles.THREE_GROUPS_64
    found = {}
    for name, config in shapes.items():
        for overlap in {config.overlap, False}:
            at_end = replace(config, overlap=overlap)
            found[name + " lap" * overlap] = at_end
            found[name + " lap" * overlap + " dyn"] = replace(at_end, dynamic=True, tile_stages=2)
    if dims in IN_PARTS:
        found["pad"] = tiles.TWO_GROUPS[IN_PARTS[dims]]
    if tiles.narrowest(dims[1]) == 32:
        found["pad v"] = tiles.TWO_GROUPS[dims[0], dims[1] + 32]
    if dims == (192, 128):
        found["128 keys"] = replace(tiles.TWO_GROUPS[dims], block_n=128, q_stages=1, overlap=False, out_cols=64)
    return {name: found[name] for name in sorted(found) if name not in skip}


def seqlens(dims: tuple[int, int]) -> tuple[int, ...]:
    """Lengths at which head dims are timed."""
    return SEQLENS if dims in HEAD_DIMS else SEQLENS[:4]


def cell_calls(
    dims: tuple[int, int], causal: bool, seqlen: int, dtype: torch.dtype, some: dict[str, tiles.Config]
) -> dict[str, Call]:
    """What is timed in a cell."""
    from flashtile.backends.hopper import launch

    dim, dim_v = dims
    shape = (max(1, TOKENS // seqlen), seqlen, HIDDEN // dim)
    q, k, v = (torch.randn(*shape, n, device=DEVICE).to(dtype) for n in (dim, dim, dim_v))
    t = Tensors(q, k, v)
    problem = Problem.build(t, Band(None, 0) if causal else Band())
    calls: dict[str, Call] = {"table": functools.partial(launch.forward, problem, t)}
    for name, config in some.items():
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
    return {name: call for name, call in calls.items() if name not in PEERS or _runs(name, call)}


def _runs(name: str, call: Call) -> bool:
    """Whether a peer takes a cell."""
    try:
        call()
    except RuntimeError as error:
        print(f"  no {name}: {str(error).splitlines()[0][:120]}", flush=True)
        return False
    return True


def time_cells(
    some_dims: list[tuple[int, int]],
    masks: Iterable[bool],
    dtype: torch.dtype,
    rounds: int,
    skip: Sequence[str] | None,
    out: Path,
) -> None:
    """Times the cells; prints TFLOPS, and the ratios of the table's and of the best choice to the better peer.

    ``skip`` names variants to leave out; None leaves out all.
    """
    if "FA3_SO" in os.environ:
        from benchmarks.providers import _load_fa3

        _load_fa3(os.environ["FA3_SO"])
    ratios = []
    for dims, causal, seqlen in ((d, c, n) for d in some_dims for c in masks for n in seqlens(d)):
        calls = cell_calls(dims, causal, seqlen, dtype, {} if skip is None else variants(dims, skip))
        timings = measure(calls, torch.device(DEVICE), rounds=rounds, burst_ms=5.0)
        flops = 2 * TOKENS * (HIDDEN // dims[0]) * sum(dims) * seqlen * (0.5 if causal else 1.0)
        tera = {name: flops / t.median_ms / 1e9 for name, t in timings.items()}
        # Without a peer, the tiles of one part.
        best = max(tera.get(name, 0.0) for name in PEERS) or tera.get("pad", tera["table"])
        ratios.append(tera["table"] / best)
        most = max(value for name, value in tera.items() if name not in PEERS) / best
        shown = "  ".join(f"{name} {value:.0f}" for name, value in tera.items())
        mask = "causal" if causal else "full  "
        print(f"d{label(dims)} {mask} {seqlen:5}: {ratios[-1]:.3f} {most:.3f}   {shown}", flush=True)
        with out.open("a") as file:
            for name, t in timings.items():
                row = {
                    "head_dim": dims[0],
                    "head_dim_v": dims[1],
                    "causal": causal,
                    "seqlen": seqlen,
                    "dtype": str(dtype),
                    "name": name,
                }
                file.write(
                    json.dumps(row | {"median_ms": t.median_ms, "spread": t.spread, "tflops": tera[name]}) + "\n"
                )
    print(f"geomean to the better peer {geomean(ratios):.3f}, least {min(ratios):.3f}", flush=True)


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def print_choice(path: Path) -> None:
    """Prints the best variants, as ratios to the better peer, from the last row of each name and cell."""
    cells: dict[tuple[tuple[int, int], bool, int], dict[str, float]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        dims = row["head_dim"], row.get("head_dim_v", row["head_dim"])
        cells.setdefault((dims, row["causal"], row["seqlen"]), {})[row["name"]] = row["tflops"]
    ratios = {
        cell: {
            name: value / (max(tera.get(peer, 0.0) for peer in PEERS) or tera["table"]) for name, value in tera.items()
        }
        for cell, tera in cells.items()
    }
    chosen: dict[tuple[tuple[int, int], bool, int], float] = {}
    for dims, causal, lengths in itertools.product(sorted({dims for dims, _, _ in cells}), (False, True), CLASSES):
        some = [ratios[dims, causal, seqlen] for seqlen in lengths if (dims, causal, seqlen) in ratios]
        names = set.intersection(*(set(each) for each in some)) - {"table", *PEERS} if some else set()
        if not names:
            continue
        worth = {name: geomean(each[name] for each in some) for name in names}
        best = max(worth, key=lambda name: worth[name])
        chosen |= {(dims, causal, n): ratios[dims, causal, n][best] for n in lengths if (dims, causal, n) in ratios}
        others = "  ".join(f"{name} {worth[name]:.3f}" for name in sorted(worth, key=lambda name: -worth[name]))
        print(f"choose d{label(dims)} {'causal' if causal else 'full'} {lengths}: {best}   {others}", flush=True)
    of = {
        "the table as it is": [each["table"] for each in ratios.values() if "table" in each],
        "the best of each class": list(chosen.values()),
        "the best of each cell": [max(v for n, v in each.items() if n not in PEERS) for each in ratios.values()],
    }
    for what, values in of.items():
        if values:
            print(f"{what}: geomean {geomean(values):.3f}, least {min(values):.3f}, {len(values)} cells", flush=True)


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
    parser.add_argument("--stage", choices=("all", "smoke", "check", "time", "host", "choose"), default="all")
    parser.add_argument("--head-dims", nargs="+", type=dims_of, default=list(HEAD_DIMS))
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--cases", type=int, default=64)
    parser.add_argument("--shards", nargs="+", type=int, default=[0, 1, 2, 3], help="of the checks")
    parser.add_argument("--limit-s", type=float, default=60.0, help="of the checks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variant", help="check this one instead of the table's choice")
    parser.add_argument("--skip", nargs="*", default=[], help="variants to leave out")
    parser.add_argument("--only-causal", action="store_true", help="time causal cells alone")
    parser.add_argument("--only-table", action="store_true", help="time the table's choice and the peers alone")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    args = parser.parse_args()
    if args.stage == "all":
        run_all(args)
        return
    right = True
    for dims in args.head_dims if args.stage in ("smoke", "check") else ():
        dim, dim_v = dims
        print(f"{args.stage} head_dim {label(dims)} {args.variant or ''}", flush=True)
        if args.stage == "smoke":
            variant = variants(dims)[args.variant] if args.variant else None
            right &= run_checks(smoke_cases(dim, dim_v), variant, args.limit_s)
        else:
            right &= run_checks(check_cases(dim, args.cases, args.shards, dim_v), None, args.limit_s)
            if 0 in args.shards:
                check_bits(dim, dim_v, 1000)
                check_poison(dim, dim_v)
                right &= check_leaks(dim, dim_v)
                right &= check_variants(dim, dim_v, variants(dims, args.skip))
    if args.stage == "time":
        rows = args.out / ROWS
        masks = (True,) if args.only_causal else (False, True)
        skip = None if args.only_table else args.skip
        time_cells(args.head_dims, masks, getattr(torch, args.dtype), args.rounds, skip, rows)
    if args.stage == "host":
        time_host()
    if args.stage == "choose":
        print_choice(args.out / ROWS)
    if not right:
        sys.exit(WRONG)


def run_all(args: argparse.Namespace) -> None:
    """Smoke, checks and times; a head_dim that hangs or breaks in its smoke stage goes no further."""
    start_s = time.perf_counter()

    def report(name: str, codes: dict[str, int]) -> None:
        print(f"{name}: exit codes {codes} after {time.perf_counter() - start_s:.0f} s", flush=True)

    # Compiles every build that is timed later, side by side.
    smoke = {
        (dims, name): stage(["--stage", "smoke", "--head-dims", label(dims), "--variant", name], 60.0)
        for dims in args.head_dims
        for name in (() if args.only_table else variants(dims, args.skip))
    }
    smoke |= {(dims, ""): stage(["--stage", "smoke", "--head-dims", label(dims)], 60.0) for dims in args.head_dims}
    codes = {key: process.wait() for key, process in smoke.items()}
    report("smoke", {f"d{label(dims)} {name}": code for (dims, name), code in codes.items() if code} or {"all": 0})
    alive = [dims for dims in args.head_dims if codes[dims, ""] in (0, WRONG)]
    skip = ["--skip", *args.skip, *(name for (_, name), code in codes.items() if name and code not in (0, WRONG))]
    if args.cases:
        options = ["--cases", str(args.cases), "--limit-s", str(args.limit_s), *skip]
        checks = {
            f"d{label(dims)} {shard}": stage(
                ["--stage", "check", "--head-dims", label(dims), "--shards", str(shard), *options], args.limit_s + 15.0
            )
            for dims, shard in itertools.product(alive, range(4))
        }
        report("check", {name: process.wait() for name, process in checks.items()})
    options = ["--dtype", args.dtype, "--rounds", str(args.rounds), "--out", str(args.out), *skip]
    options += ["--only-table"] if args.only_table else []
    options += ["--only-causal"] if args.only_causal else []
    for dims in alive:
        code = stage(["--stage", "time", "--head-dims", label(dims), *options], 45.0).wait()
        report("time", {f"d{label(dims)}": code})
    report("host", {"host": stage(["--stage", "host"], 30.0).wait()})
    if (args.out / ROWS).exists():
        print_choice(args.out / ROWS)


if __name__ == "__main__":
    main()
