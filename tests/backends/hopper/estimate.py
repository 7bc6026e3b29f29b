"""About how fast the Hopper kernels are, with no GPU: ``python -m tests.backends.hopper.estimate 128:2048:causal ...``.

The cells are those of the benchmarks: 16k tokens, hidden size 2048, bf16; ``192/128:2048:full`` has a head_dim_v of
128, forward alone. One program of an H200 runs in the emulator against ``tests.emulator.clock``, which says how much to
believe.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from flashtile.backends.base import Gradients
from flashtile.backends.hopper import backward_tiles, gradients, launch, tiles
from flashtile.backends.hopper.gluon_compat import thread_barrier
from flashtile.masks import Band
from flashtile.problem import Problem, Tensors
from tests.backends.hopper.emulated import REPLACEMENTS
from tests.emulator import clock

NUM_SMS = 132
# An H200 under load, and what a launch takes before the first and behind the last instruction.
CLOCK_HZ = 1.65e9
LAUNCH_S = 8e-6
TOKENS, HIDDEN = 16384, 2048

_CELLS = [
    f"{dim}:{length}:{mask}" for dim in (64, 128, 256) for mask in ("full", "causal") for length in (512, 1024, 2048)
]


class _Caught:
    """Stands for a kernel and keeps what it would be launched with."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., _Caught]:
        def catch(*arguments: Any, **options: Any) -> _Caught:
            self.grid, self.arguments = grid, arguments
            return self

        return catch


def forward(
    head_dim: int, seqlen: int, causal: bool, config: tiles.Config | None = None, head_dim_v: int | None = None
) -> tuple[clock.Timing, float]:
    """The timing of the first program of a cell, and the cell's FLOPs.

    Programs take tiles in an order fixed beforehand: of a counter, the only one that runs would draw them all.
    """
    heads, batch = HIDDEN // head_dim, TOKENS // seqlen
    dims = (head_dim, head_dim, head_dim_v or head_dim)
    tensors = Tensors(*(torch.randn(batch, seqlen, heads, dim).bfloat16() for dim in dims))
    problem = Problem.build(tensors, Band(None, 0) if causal else Band())
    caught, kernel = _Caught(), launch.attention_forward
    launch._plan.cache_clear()
    with ExitStack() as patches:
        device = SimpleNamespace(multi_processor_count=NUM_SMS)
        for place, name, value in (
            (torch.cuda, "current_device", lambda: None),
            (torch.cuda, "get_device_properties", lambda _: device),
            (launch, "_Address", lambda tensor: tensor),
            (launch, "attention_forward", caught),
        ):
            patches.enter_context(mock.patch.object(place, name, value))
        launch.forward(problem, tensors, dataclasses.replace(config or tiles.choose(problem), dynamic=False))
    launch._plan.cache_clear()
    timing = clock.measure(kernel, caught.grid, caught.arguments, replacements=REPLACEMENTS)
    return timing, 2 * batch * heads * seqlen**2 * (dims[0] + dims[2]) * (0.5 if causal else 1.0)


def backward(
    head_dim: int, seqlen: int, causal: bool, config: backward_tiles.Config | None = None
) -> tuple[clock.Timing, float]:
    """The timing of the main kernel, for as many tiles as a program would get of a cell, and the cell's FLOPs.

    Programs draw their tiles from a counter, so a problem of one program's share stands for the cell.
    """
    share = TOKENS * HIDDEN / head_dim / seqlen / NUM_SMS
    batch = max(1, round(share))
    tensors = Tensors(*(torch.randn(batch, seqlen, 1, head_dim).bfloat16() for _ in range(3)))
    problem = Problem.build(tensors, Band(None, 0) if causal else Band())
    plan = gradients.Plan(problem, config or backward_tiles.choose(problem), NUM_SMS)
    work = plan.workspace(tensors.q)
    for each in (work.rows, work.dq, work.counter):
        each.zero_()
    grads = Gradients(*(torch.empty_like(x) for x in (tensors.q, tensors.k, tensors.v)))
    lse = torch.zeros(batch, 1, seqlen)
    with mock.patch.object(launch, "_Address", lambda tensor: tensor):
        launch._descriptors.clear()
        main_launch = plan.launches(tensors, tensors.q, lse, tensors.q, None, grads, work)[1]
        launch._descriptors.clear()
    timing = clock.measure(
        main_launch.kernel, main_launch.grid, main_launch.arguments, replacements={thread_barrier: lambda: None}
    )
    return timing, 10 * batch * seqlen**2 * head_dim * (0.5 if causal else 1.0) * NUM_SMS


def main(cells: list[str]) -> None:
    """Prints a line a cell and direction, and what its computing roles wait for."""
    for cell in cells or _CELLS:
        dims, seqlen, mask = cell.split(":")
        head_dim, _, head_dim_v = dims.partition("/")
        shape = int(head_dim), int(seqlen), mask == "causal"
        estimates = [(functools.partial(forward, head_dim_v=int(head_dim_v or head_dim)), "forward", "consumer")]
        if not head_dim_v:
            estimates.append((backward, "backward", "scorer"))
        for direction, name, roles in estimates:
            timing, flops = direction(*shape)
            rate = flops / (timing.cycles / CLOCK_HZ + LAUNCH_S)
            busy = ", ".join(f"{what} {share:.0%}" for what, share in timing.busy.items())
            print(f"{cell:16} {name:8} {rate / 1e12:5.0f} TFLOPS; {busy}", flush=True)
            for role, spent in timing.roles.items():
                most = sorted(spent.items(), key=lambda item: -item[1])[:5]
                if role.startswith(roles):
                    print("    " + ", ".join(f"{what} {share:.0%}" for what, share in most))


if __name__ == "__main__":
    main(sys.argv[1:])
