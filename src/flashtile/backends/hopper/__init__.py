"""The Hopper backend: Gluon kernels with TMA, WGMMA, mbarriers and warp specialisation, for compute capability 9.0."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util

import torch
from torch import Tensor

from flashtile.backends.base import Capabilities, Direction, Gradients
from flashtile.problem import Problem, Tensors

_FORWARD = Capabilities(
    device_types=("cuda",),
    dtypes=(torch.float16, torch.bfloat16),
    max_head_dim=256,
    head_dim_multiple=8,
    min_compute_capability=(9, 0),
    max_compute_capability=(9, 0),
    causal=True,
    window=True,
    grouped_heads=True,
    varlen=True,
    head_dim_v=True,
    softcap=True,
    sinks=True,
    deterministic=True,
)

_BACKWARD = dataclasses.replace(_FORWARD, head_dim_v=False)


@functools.cache
def _missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed"
    if importlib.util.find_spec("triton.experimental.gluon") is None:
        return "needs Triton 3.6 or later, which brings Gluon"
    return None


class _Backend:
    name = "hopper"
    summary = "NVIDIA Hopper (compute capability 9.0)"

    def capabilities(self, direction: Direction) -> Capabilities:
        return _FORWARD if direction == "forward" else _BACKWARD

    def missing(self) -> str | None:
        return _missing()

    def describe(self, problem: Problem, direction: Direction) -> str:
        from flashtile.backends.hopper import backward_tiles, tiles

        config = tiles.choose(problem) if direction == "forward" else backward_tiles.choose(problem)
        return f"TMA and WGMMA, warp-specialised and persistent, {config}"

    def forward(self, problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
        from flashtile.backends.hopper import launch

        return launch.forward(problem, tensors)

    def backward(
        self, problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Gradients:
        from flashtile.backends.hopper import gradients

        return gradients.run(problem, tensors, out, lse, dout, dlse)


BACKEND = _Backend()
