"""``python -m benchmarks.widening``: prompts over 8-bit caches, each way to widen them beside a 16-bit cache.

Cells are the ones of ``benchmarks/steps.py`` with prompts, and one long prompt; each is one public call, replayed as a
CUDA graph, all ways by turns. ``16 bits`` is a cache of the same numbers: every way must give its bits before it is
timed. ``decode`` is the kernel that took such calls before. Lines go to ``--out``; TFLOPS count kept pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import flashtile
from benchmarks import timing
from benchmarks.session import numbers, words
from benchmarks.steps import STEPS, StepCase
from flashtile.backends.hopper import BACKEND
from flashtile.backends.hopper.forward.paged import config
from flashtile.call.problem import Problem
from flashtile.ops import plans

HEADS = {64: (64, 8), 96: (32, 8), 128: (32, 8), 192: (16, 4), 256: (16, 4)}
CELLS = {name: STEPS[name] for name in ("chunks", "prompts", "decode-prompt")} | {"long": ((16384, 16384),)}
# What each way changes in the tiles that are chosen.
WAYS: dict[str, dict[str, Any]] = {"chosen": {}, "in turns": {"pingpong": True}}


@contextlib.contextmanager
def way_of(name: str) -> Iterator[None]:
    """Within, calls are planned as one of WAYS, or ``decode``, says."""
    choose = config.choose

    def chosen(*args: Any, **given: Any) -> config.PagedTiles:
        return dataclasses.replace(choose(*args, **given), **WAYS.get(name, {}))

    def takes(problem: Problem) -> bool:
        return prompts.takes(problem) and not (name == "decode" and config.widens(problem))

    prompts = next(row for row in BACKEND.kernels if row.name == "prompts")
    rows = tuple(dataclasses.replace(row, takes=takes) if row is prompts else row for row in BACKEND.kernels)
    changes = mock.patch.object(config, "choose", chosen), mock.patch.object(BACKEND, "kernels", rows)
    with changes[0], changes[1], plans.own_plans(OrderedDict()):
        yield


def inputs(
    case: StepCase, sequences: Sequence[tuple[int, int]], scales: str, device: str = "cuda"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The call over an 8-bit cache with scales of heads ("h"), pages ("eh") or none, and over a 16-bit one like it."""
    with mock.patch.dict(STEPS, {case.step: tuple(sequences)}):
        size = 2 * math.prod(case.cache_shape)
        (call,) = case.calls(torch.randn(size, device=device, dtype=torch.bfloat16))
    wide, eight = dict(call), dict(call)
    for name in ("k", "v"):
        cache = call[f"{name}_cache"]
        shape = {"h": cache.shape[2:3], "eh": (cache.shape[0], cache.shape[2]), "": ()}[scales]
        scale = 0.01 * (1 + torch.rand(shape, device=device)) if scales else torch.ones((), device=device)
        factor = scale if scales != "eh" else scale[:, None]
        codes = (cache.float() / factor[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        eight[f"{name}_cache"] = codes
        wide[f"{name}_cache"] = (codes.float() * factor[..., None]).bfloat16()
        if scales:
            eight[f"{name}_scale"] = scale
    return eight, wide


def captured(call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """(replay, result) of a call as a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, out


def flops(sequences: Sequence[tuple[int, int]], heads: int, head_dim: int) -> int:
    """The operations for the kept pairs of causal sequences (queries, keys)."""
    pairs = sum(rows * keys - rows * (rows - 1) // 2 for rows, keys in sequences)
    return 4 * pairs * heads * head_dim


def measure(
    case: StepCase, sequences: Sequence[tuple[int, int]], scales: str, args: argparse.Namespace
) -> dict[str, Any]:
    """A line of results."""
    eight, wide = inputs(case, sequences, scales)
    calls: dict[str, Callable[[], object]] = {}
    said: dict[str, str] = {}
    calls["16 bits"], want = captured(lambda: flashtile.attention_with_kvcache(**wide))
    for name in args.ways:
        try:
            with way_of(name):
                replay, out = captured(lambda: flashtile.attention_with_kvcache(**eight))
        except (ValueError, RuntimeError) as error:
            said[name] = str(error).splitlines()[0][:160]
            continue
        apart = float((out.float() - want.float()).norm() / want.float().norm())
        if name == "decode" or torch.equal(out, want):
            calls[name] = replay
        said[name] = "the same bits" if torch.equal(out, want) else f"{apart:.1e} apart"
    timed = timing.measure(calls, torch.device("cuda"), rounds=args.rounds, burst_ms=args.burst_ms)
    work = flops(sequences, case.num_heads_q, case.head_dim)
    return {
        "device": torch.cuda.get_device_name(), "cell": case.name, "scales": scales or "none",
        "us": {name: round(1e3 * each.median_ms, 2) for name, each in timed.items()},
        "tflops": {name: round(work / each.median_ms / 1e9, 1) for name, each in timed.items()},
        "spread": {name: round(each.spread, 4) for name, each in timed.items()}, "said": said,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measures all cells; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.widening", description=__doc__)
    parser.add_argument("--head-dims", type=numbers, default=[128, 64, 256], help="of %(default)s")
    parser.add_argument("--pages", type=numbers, default=[64], help="rows of a page, 0 for none; default %(default)s")
    parser.add_argument("--cells", type=words, default=list(CELLS), help="some of %(default)s")
    parser.add_argument("--scales", type=words, default=["none", "h"], help="none, h, eh; default %(default)s")
    parser.add_argument("--ways", type=words, default=[*WAYS, "decode"], help="some of %(default)s")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--burst-ms", type=float, default=3.0)
    parser.add_argument("--out", type=Path, default=Path("widening.jsonl"))
    args = parser.parse_args(argv)
    for dim, page, cell, scales in itertools.product(args.head_dims, args.pages, args.cells, args.scales):
        case = StepCase(cell, *HEADS[dim], dim, page)
        line = measure(case, CELLS[cell], scales.replace("none", ""), args)
        print(f"{line['cell']} {line['scales']}: TFLOPS {line['tflops']}; {line['said']}", flush=True)
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
