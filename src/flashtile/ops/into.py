"""The operator of packed calls that write their output into a given tensor; like PyTorch's, it has no derivative."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from flashtile.call.arguments import Argument, Options, Tensors
from flashtile.call.backend import Plan
from flashtile.call.problem import Problem, check_values
from flashtile.core.errors import InvalidInputError
from flashtile.core.sizes import differ, is_expanded
from flashtile.ops import flops
from flashtile.ops.operation import Operation, is_watched


@dataclass(eq=False)
class IntoTensors(Tensors):
    """The tensors of a regular call, and the one that it writes."""

    out: Annotated[Tensor | None, Argument("Written.", "batch seqlen_q num_heads_q head_dim_v", layout="any")] = None


def attend(t: IntoTensors, options: Options) -> Tensor:
    """Writes ``t.out``, and returns lse; through the operator, or directly where the dispatcher is not needed."""
    if is_watched(t.q, t.k, t.v):
        watched: Tensor = OPERATOR.overload(*INTO.flatten(INTO.readable(t), options))
        return watched
    t, call = INTO.planned(t, options)
    lse: Tensor = call.run(t)
    return lse


def _problem_of(t: IntoTensors, options: Options) -> Problem:
    """As ``Problem.of``; also checks out.

    Raises:
        InvalidInputError: Naming the argument that does not match.
    """
    problem, out = Problem.of(t, options), t.out
    assert out is not None
    shape = (*t.q.shape[:-1], problem.head_dim_v)
    if differ(out.shape, shape):
        raise InvalidInputError("out", f"has shape {tuple(out.shape)}, must be {shape}")
    for what, got, must in (("dtype", out.dtype, t.q.dtype), ("device", out.device, t.q.device)):
        if got != must:
            raise InvalidInputError("out", f"{what} is {got}, but q has {must}")
    if is_expanded(out):
        raise InvalidInputError("out", f"has strides {out.stride()}, but is written: it must not be expanded")
    return problem


class _Into(Operation[IntoTensors, Options]):
    def guarded(self, problem: Problem, run: Plan) -> Plan:
        """As ``Operation.guarded``, of the plan of a forward."""

        def into(t: IntoTensors) -> Tensor:
            assert t.out is not None
            fits = t.out.is_contiguous() and not t.out.data_ptr() % 16
            out, lse = run(t, None, t.out if fits else None)
            if out is not t.out:
                t.out.copy_(out)
            found: Tensor = lse
            return found

        return super().guarded(problem, into)


def _written(t: IntoTensors) -> tuple[Tensor, ...]:
    return () if t.out is None else (t.out,)


INTO = _Into("a call with out", "forward", IntoTensors, Options, _problem_of, check_values, written=_written)


def _fake(*args: Any) -> Tensor:
    return INTO.fake(*args)[1]


OPERATOR = INTO.define(
    "attention_into", INTO.run, _fake, results=("lse",), writes=("out",), flops=flops.forward_flops,
    tags=(torch.Tag.needs_fixed_stride_order,),
)  # fmt: skip
