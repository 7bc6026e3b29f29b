"""Plans in Triton's interpreter of tensors that it cannot multiply: bfloat16 and 8 bits, widened to float32.

It stores bfloat16 as integers and multiplies those integers; it has no NaN of 8 bits, and cuts digits off where numbers
lose some.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu.table import GpuBackend
from flashtile.call.backend import Direction, Given, Gradients, Plan
from flashtile.call.problem import Problem, Tensors
from flashtile.core.states import Partial


def plan(table: GpuBackend, direction: Direction, problem: Problem, like: Any, given: Given) -> Plan:
    """The plan of a regular or quantized call by the kernel that it would run."""
    kernel = table.kernel(direction, problem)
    if direction == "quantized":
        return _forward(problem, kernel.make(table, problem.but(out_dtype=torch.float32), like))
    made = kernel.make(table, problem.but(dtype=torch.float32), like, *given)
    return (_forward if direction == "forward" else _backward)(problem, made)


def _forward(problem: Problem, plan: Plan) -> Plan:
    def widened(tensors: Any, partial: Partial | None = None, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        # Not into a narrower tensor, to which whoever gave it copies what is returned.
        out, lse = plan(_widened(tensors), *(() if partial is None else (partial,)))
        return out.to(problem.out_dtype), lse

    return widened


def _backward(problem: Problem, plan: Plan) -> Plan:
    def widened(
        tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, sums: Gradients | None = None
    ) -> Gradients:
        grads = plan(_widened(tensors), out.float(), lse, dout.float(), dlse, sums)
        made = {n: x for n, x in vars(grads).items() if n in ("dq", "dk", "dv") and x is not None}
        return dataclasses.replace(grads, **{n: x.to(problem.grad_dtype) for n, x in made.items()})

    return widened


def _widened(tensors: Any) -> Any:
    wide = {name: getattr(tensors, name).float() for name in ("q", "k", "v")}
    return dataclasses.replace(tensors, **wide)
