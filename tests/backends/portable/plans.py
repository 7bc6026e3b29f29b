"""The portable backend's plans, made and run once."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.backends.portable.backward import launch as backward_launch
from flashtile.backends.portable.forward import launch as forward_launch
from flashtile.call.backend import Gradients
from flashtile.call.problem import Problem, Tensors
from flashtile.core.states import Partial


def forward(
    problem: Problem, tensors: Tensors, partial: Partial | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    return forward_launch.plan(problem.but(out_dtype=out_dtype or problem.dtype), tensors)(tensors, partial)


def backward(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
    return backward_launch.plan(problem, tensors, dout, None)(tensors, out, lse, dout, None)
