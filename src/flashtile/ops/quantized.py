"""The operator of quantized calls, and the way past the dispatcher with plans by layout, as in ``operators``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from flashtile.call import arguments
from flashtile.call.backend import QuantizedForward
from flashtile.call.problem import Problem, SequenceLayout
from flashtile.call.quantized_arguments import (
    OPTIONS,
    TENSORS,
    QuantizedOptions,
    QuantizedTensors,
    flatten,
    option_values,
    tensor_values,
    unflatten,
)
from flashtile.call.quantized_problem import check_values, problem_of
from flashtile.core import settings
from flashtile.ops import dispatch, flops, plans, transforms
from flashtile.ops import operators as ops
from flashtile.ops.plans import Family

OPERATOR = "flashtile::attention_quantized"
torch.library.define(OPERATOR, f"({arguments.schema(TENSORS, OPTIONS)}) -> (Tensor, Tensor)")
_CALL = "a quantized call"


def attend(t: QuantizedTensors, options: QuantizedOptions) -> tuple[Tensor, Tensor]:
    """Runs a quantized call: through its operator, or directly where the dispatcher is not needed.

    Returns:
        out and lse, as in ``call.backend.QuantizedForward``.
    """
    if ops.is_watched(t.q, t.k, t.v):
        found: tuple[Tensor, Tensor] = ops.overload(OPERATOR)(*flatten(t, options))
        return found
    for x in tensor_values(t):
        if x is not None and (type(x) is not Tensor or x.requires_grad):
            arguments.given(t, TENSORS)  # names what is no tensor, and not of a subclass either
            if torch.is_grad_enabled():
                transforms.refuse_gradients(TENSORS, tensor_values(t), _CALL)
            break
    return _run(t, options)


def _readable(t: QuantizedTensors) -> QuantizedTensors:
    """The tensors, copied where they are not contiguous."""
    given = zip(TENSORS, tensor_values(t), strict=True)
    copies = {name: x.contiguous() for name, x in given if x is not None and not x.is_contiguous()}
    return dataclasses.replace(t, **copies) if copies else t


def _run(t: QuantizedTensors, options: QuantizedOptions) -> tuple[Tensor, Tensor]:
    try:
        layouts = [None if x is None else plans.layout(x) for x in tensor_values(t)]
    except (RuntimeError, AttributeError):
        problem_of(t, options)  # names what is no tensor, or the nested or sparse one, which has no strides
        raise
    key = (options, settings.BACKEND.raw(), *layouts)
    plan = plans.kinds.get(key)
    if plan is None:
        readable = _readable(t)
        if readable is not t:
            return _run(readable, options)
        plan = _plan(t, options)
        plans.keep(key, plan)
    found: tuple[Tensor, Tensor] = plan(t)
    return found


class _Plan:
    """The plan of quantized calls of one kind, with the check that every backend's needs before it."""

    __slots__ = ("checks", "problem", "run")

    def __init__(self, problem: Problem, run: QuantizedForward) -> None:
        self.problem, self.run, self.checks = problem, run, problem.device_type == "cpu"

    def __call__(self, t: QuantizedTensors) -> tuple[Tensor, Tensor]:
        # An unset variable is known without decoding it.
        if self.checks or (settings.CHECK.raw() and settings.CHECK.enabled()):
            check_values(self.problem, t)
        return self.run(t)


def _plan(t: QuantizedTensors, options: QuantizedOptions) -> _Plan:
    problem = problem_of(t, options)
    family = _family(problem, t, options)
    backend = family.backends.get("quantized")
    if backend is None:
        backend = family.backends["quantized"] = dispatch.select(problem, "quantized", options.backend)
    return _Plan(problem, backend.plan("quantized", problem, t, known=family.known["quantized"]))


def _family(problem: Problem, t: QuantizedTensors, options: QuantizedOptions) -> Family:
    """What calls that differ in lengths, batch and strides alone share."""
    packed = problem.varlen
    alike = problem.but(batch=0, queries=SequenceLayout(0, packed), keys=SequenceLayout(0, packed))
    others = (
        None if x is None else (x.dim(), x.dtype, x.device, x.data_ptr() % 16 if not x.is_meta else 0)
        for x in tensor_values(t)
    )
    without_longest = dataclasses.replace(options, max_seqlen_q=None, max_seqlen_k=None)
    return plans.family((alike, option_values(without_longest), *others, settings.BACKEND.raw()))


def _attend(*args: Any) -> tuple[Tensor, Tensor]:
    return _run(*unflatten(args))


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    tensors, options = unflatten(args)
    problem, q = problem_of(tensors, options), tensors.q
    out = q.new_empty((*q.shape[:-1], problem.head_dim_v), dtype=options.dtype)
    return out, q.new_empty(problem.lse_shape(q), dtype=problem.lse_dtype)


def flops_of(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """As ``flops.forward_flops``: two products; v is transposed."""
    shapes: Any
    shapes, options = unflatten(args)
    return 2 * flops.kept_pairs(shapes.q, shapes.k, options) * (shapes.q[-1] + shapes.v[-2])


flops.FORMULAS["attention_quantized"] = flops_of
torch.library.impl(OPERATOR, ("cpu", "cuda"))(_attend)
torch.library.register_fake(OPERATOR)(_fake)
transforms.register_without_derivative(OPERATOR, TENSORS, _CALL)
