"""The portable backend's plans, made and run once."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.backends.portable.backward.launch import BackwardPlan
from flashtile.backends.portable.forward.launch import ForwardPlan
from flashtile.call.backend import Gradients
from flashtile.call.problem import Problem, Tensors
from flashtile.core.states import Partial


def forward(
    problem: Problem, tensors: Tensors, partial: Partial | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    return ForwardPlan(problem.but(out_dtype=out_dtype or problem.dtype), tensors)(tensors, partial)


def backward(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
    return BackwardPlan(problem, tensors, dout, None)(tensors, out, lse, dout, None)
