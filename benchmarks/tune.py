"""``python -m benchmarks.tune BACKEND KERNEL``: times candidate tiles of a kernel against the tables' and peers.

BACKEND KERNEL is ``hopper forward``, ``hopper backward``, or ``portable`` with ``forward``, ``dkdv``, ``dk``, ``dv`` or
``dq``. Every candidate is compiled and checked against float64 first, on the cells and on small ragged, packed and
windowed ones, in its own process, so a hang or a crash does not affect others. The correct ones are then timed in
interleaved rounds, as whole forwards or backwards, so a kernel's effect on the whole call counts. Rows go to
``benchmarks/tuning``; each candidate's speed over the tables', a geometric mean over lengths, is printed last.

``--head-dims`` takes 64 or, for two widths, 192/128; ``--tiles`` more candidates, named as in PORTABLE; ``--only`` some
of the candidates by name; ``--check-s`` the seconds for all checks of a width.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from benchmarks import timing
from benchmarks.cases import HIDDEN_SIZE, TOTAL_TOKENS, Case, Direction, make_inputs
from benchmarks.checks import Call, Outputs
from benchmarks.providers import PROVIDERS, choose_providers, prepared
from benchmarks.results import Row
from benchmarks.run import checked, timed_row
from benchmarks.session import Session, attempt, new_parser, run_command
from benchmarks.table import Table, geomean, to_text
from benchmarks.warm import WORKERS, side_by_side
from flashtile.backends.gpu.trial import trial
from flashtile.backends.hopper.backward import config as hopper_backward
from flashtile.backends.hopper.forward import config as hopper_forward
from flashtile.backends.portable import config as portable
from flashtile.ops import plans

KERNELS = {"hopper": ("forward", "backward"), "portable": ("forward", "dkdv", "dk", "dv", "dq")}
HOPPER = {"forward": hopper_forward, "backward": hopper_backward}
PEERS = ("fa3", "cudnn", "fa2")
TABLE = "table"

# As ``PortableTiles.name`` has it. While dk is tuned the first of dv is used, and the reverse.
PORTABLE = {
    ("forward", 64): "128x128x8x3, 128x64x8x3, 128x64x4x3, 64x64x4x3, 64x64x4x3 A, 64x128x4x2, 64x128x4x2 TA",
    (
        "forward",
        128,
    ): "128x128x8x2, 128x64x8x3, 128x64x4x2, 64x128x4x2, 64x64x4x2, 64x64x4x3, 64x64x4x3 T, 64x64x4x3 TA",
    ("forward", 256): "128x64x8x2, 128x64x8x2 T, 128x64x8x2 TA, 128x32x8x3, 64x64x4x2, 64x32x4x2 T, 64x64x4x1 TO",
    ("dkdv", 64): "64x128x8x3, 64x128x8x2, 64x128x8x2 TO, 64x64x4x2 T, 64x64x4x2 TO, 64x64x4x3, 128x64x4x2 T",
    ("dkdv", 128): "64x128x8x2, 64x128x8x2 TO, 32x128x8x2, 64x64x4x2, 64x64x4x2 T, 64x64x4x2 TO, 32x64x4x2 TO",
    ("dkdv", 256): "32x64x8x2, 64x64x8x2 T, 64x64x8x2 TO, 32x64x8x3 TO, 32x32x4x2 T",
    ("dk", 128): "64x64x4x2 TO, 64x128x8x2 TO",
    ("dv", 128): "64x64x4x2 T, 64x128x8x2 TO",
    ("dk", 256): "32x128x8x2 TO, 32x128x8x2 T, 32x128x8x2, 32x128x8x2 O, 64x64x8x2 T",
    ("dv", 256): "64x128x8x2 TO, 64x128x8x2 T, 32x128x8x3 T, 32x64x4x2 T, 64x64x8x2 T",
    ("dq", 64): "128x64x8x3, 64x64x4x3, 64x64x4x3 168, 64x64x4x3 T 168, 64x64x4x3 A 168, 64x128x4x2, 128x32x4x3",
    ("dq", 128): "128x64x8x3, 128x64x8x3 A, 128x64x8x2, 64x64x4x2, 64x64x4x3, 64x32x4x3",
    ("dq", 256): "128x32x8x2, 128x32x8x2 T, 128x32x8x2 A, 128x64x8x1 TO, 64x32x4x1 TO, 64x64x8x1",
}


@dataclass(frozen=True)
class Candidate:
    """Tiles of one kernel by name; the name ``table`` means the backend's own choice."""

    backend: str
    kernel: str
    dims: tuple[int, int]
    name: str
    plans: OrderedDict[Any, Any] = field(default_factory=OrderedDict, compare=False)

    @property
    def provider(self) -> str:
        return f"flashtile-{self.backend}"

    def injected(self) -> AbstractContextManager[Any]:
        """Runs the kernel with these tiles; only this function knows how."""
        if self.name == TABLE:
            return contextlib.nullcontext()
        if self.backend == "portable":
            configs = {self.kernel: portable.PortableTiles.parse(self.name)}
            if self.kernel in ("dk", "dv"):
                other = {"dk": "dv", "dv": "dk"}[self.kernel]
                configs[other] = portable.PortableTiles.parse(PORTABLE[other, self.dims[0]].split(", ")[0])
            return trial(**configs)
        tiles = hopper_configs(self.kernel, self.dims)[self.name]
        return mock.patch.object(HOPPER[self.kernel], "choose", lambda *args, **given: tiles)

    def run(self, call: Call) -> Outputs:
        """Calls with these tiles."""
        with self.injected(), plans.own_plans(self.plans):
            return call()


def hopper_configs(kernel: str, dims: tuple[int, int]) -> dict[str, Any]:
    """Configurations by name: warpgroups, whether tiles overlap ("lap"), whether a counter assigns them ("dyn")."""
    if kernel == "backward":
        widths = hopper_forward.width(dims[0]), hopper_forward.width(dims[1])
        tiles = {
            n: each for n, each in vars(hopper_backward).items() if isinstance(each, hopper_backward.BackwardTiles)
        }
        return {n: each for n, each in tiles.items() if (each.block_d, each.block_dv) == widths}
    shapes = {"2g": hopper_forward.TWO_WARPGROUPS[dims]}
    if dims == (64, 64):
        shapes["3g"] = hopper_forward.THREE_WARPGROUPS_64
    found = {}
    for name, config in shapes.items():
        for overlap in {config.overlap, False}:
            at_end = replace(config, overlap=overlap)
            found[name + " lap" * overlap] = at_end
            found[name + " lap" * overlap + " dyn"] = replace(at_end, dynamic=True, tile_stages=2)
    if dims == (192, 128):
        found["128 keys"] = replace(shapes["2g"], block_n=128, q_stages=1, overlap=False, out_cols=64)
    return {name: found[name] for name in sorted(found)}


def candidates(backend: str, kernel: str, dims: tuple[int, int], extra: Sequence[str] = ()) -> list[Candidate]:
    """All candidates to time, the tables' choice first; ``extra`` names more tiles of a portable kernel."""
    if backend == "portable":
        names = [name for name in PORTABLE.get((kernel, dims[0]), "").split(", ") if name]
    else:
        names = list(hopper_configs(kernel, dims))
    return [Candidate(backend, kernel, dims, name) for name in dict.fromkeys([TABLE, *names, *extra])]


def cells(kernel: str, dims: tuple[int, int], masks: Sequence[str], seqlens: Sequence[int], dtype: str) -> list[Case]:
    """16k tokens of hidden size 2048 at each length under each mask."""
    direction: Direction = "forward" if kernel == "forward" else "backward"
    heads, dim_v = max(1, HIDDEN_SIZE // dims[0]), dims[1] if dims[1] != dims[0] else None
    like = Case(direction, dtype, 1, 1, 1, heads, heads, dims[0], head_dim_v=dim_v)
    return [
        replace(like, batch=max(1, TOTAL_TOKENS // n), seqlen_q=n, seqlen_k=n, causal=mask == "causal")
        for mask in masks
        for n in seqlens
    ]


def awkward(like: Case) -> list[Case]:
    """Small cases that reveal a wrong tile, mask or tail."""
    small = replace(like, batch=2, seqlen_q=333, seqlen_k=333, num_heads_q=4, num_heads_kv=2)
    packed = replace(small, causal=True, batch=4, lengths=(1, 130, 64, 333))
    return [small, replace(small, causal=True, seqlen_q=200), replace(small, window=(70, 20)), packed]


def wrong(candidate: Candidate, cases: Sequence[Case], device: str) -> str | None:
    """The error in a candidate's results on some cases, or None; refused cases are ignored."""
    provider = PROVIDERS[candidate.provider]
    for case in cases:
        with candidate.injected(), plans.own_plans(candidate.plans), torch.no_grad():
            _, errors = checked(case, [provider], torch.device(device))
        said = errors[provider.name]
        if isinstance(said, str) and not said.startswith("refused"):
            return f"{case.name}: {said}"
    return None


@torch.no_grad()
def measure(case: Case, chosen: Sequence[Candidate], peers: Sequence[str], session: Session, rounds: int) -> list[Row]:
    """One row per candidate and peer, fastest first, with ``kernel`` and ``config`` in its case."""
    inputs, device = make_inputs(case, session.device), session.device
    ours = PROVIDERS[chosen[0].provider].prepare(case, inputs)
    calls: dict[tuple[str, str], Call] = {(c.provider, c.name): functools.partial(c.run, ours) for c in chosen}
    for name in peers:
        call = attempt(device, name, functools.partial(prepared, PROVIDERS[name], case, inputs))
        if not isinstance(call, str):
            calls[name, ""] = call
    timings = timing.measure(calls, device, rounds=rounds, burst_ms=5.0, deadline=session.deadline)
    rows = []
    for (provider, name), t in sorted(timings.items(), key=lambda item: item[1].median_ms):
        row = timed_row(session.run, case, provider, 0.0, t)
        rows.append(replace(row, error=None, case={**row.case, "kernel": chosen[0].kernel, "config": name or None}))
    return rows


def summary(rows: Sequence[Row]) -> Table:
    """By kernel, head dims and mask: each candidate's speed over the tables' choice, best first."""
    times: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        c, name = row.case, row.case["config"] or row.provider
        group = f"{c['kernel']} d{c['head_dim']} {'causal' if c['causal'] else 'full'}"
        times.setdefault(group, {}).setdefault(name, {})[c["seqlen_k"]] = row.median_ms or 0.0
    lines = [["kernel", "tiles", "table's time over it", "least"]]
    for group, by_name in times.items():
        base = by_name.get(TABLE, {})
        ratios = {name: [base[n] / ms for n, ms in of.items() if n in base] for name, of in by_name.items()}
        for name in sorted(filter(ratios.get, ratios), key=lambda name: -geomean(ratios[name])):
            lines.append([group, name, f"{geomean(ratios[name]):.3f}", f"{min(ratios[name]):.3f}"])
    return lines


def _measure_all(args: argparse.Namespace, session: Session) -> tuple[list[Row], int, str]:
    names = PEERS if args.providers is None else args.providers
    direction: Direction = "forward" if args.kernel == "forward" else "backward"
    peers = [provider.name for provider in choose_providers(names, direction, session.device)]
    rows: list[Row] = []
    code = 0
    for dim, _, dim_v in (text.partition("/") for text in args.head_dims):
        dims = int(dim), int(dim_v or dim)
        grid = cells(args.kernel, dims, args.masks, args.seqlens, args.dtype)
        wanted = candidates(args.backend, args.kernel, dims, args.tiles)
        wanted = [c for c in wanted if not args.only or c.name in (TABLE, *args.only)]
        work = [(candidate, [*awkward(grid[0]), *grid], args.device) for candidate in wanted]
        right = []
        # One process each: after an illegal access the other calls in a process would fail too.
        for (candidate, *_), said in side_by_side(wrong, work, args.workers, args.check_s, max_tasks_per_child=1):
            right += [candidate] if said is None else []
            print(f"{args.kernel} d{dims[0]} {candidate.name}: {said or 'right'}", flush=True)
        if right:
            timed = functools.partial(measure, chosen=right, peers=peers, session=session, rounds=args.rounds)
            found, ended = session.each(grid, lambda case: case.name, timed)
            rows, code = rows + found, code or ended
        code = code or int(len(right) < len(wanted))
    return rows, code, to_text(summary(rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Checks, times, prints; returns the process's exit code, 1 if a candidate was wrong."""
    defaults = {
        "head_dims": ["64", "128", "256"], "masks": ["full", "causal"], "seqlens": [512, 2048, 8192],
        "dtype": "bfloat16", "tiles": [], "only": [], "rounds": 5, "workers": WORKERS, "check_s": 240.0,
    }  # fmt: skip
    parser = new_parser("tune", __doc__, defaults, resumes=False)
    parser.add_argument("backend", choices=tuple(KERNELS))
    parser.add_argument("kernel", help="; ".join(f"{name}: {', '.join(of)}" for name, of in KERNELS.items()))
    args = parser.parse_args(argv)
    if args.kernel not in KERNELS[args.backend]:
        parser.error(f"kernel is {args.kernel!r}, must be one of {', '.join(KERNELS[args.backend])}")
    return run_command(args, "tune", _measure_all)


if __name__ == "__main__":
    sys.exit(main())
