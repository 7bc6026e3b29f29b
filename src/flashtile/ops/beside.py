"""A backward by two backends: one computes the gradient of the bias, another, faster one, all others."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from flashtile.call.arguments import Grads
from flashtile.call.backend import Backend, Backward, Build, Capabilities, Direction, Gradients, Known
from flashtile.call.problem import Problem, Tensors


def others(problem: Problem) -> Problem:
    """The same call without the gradient of its bias."""
    return problem.but(grads=problem.grads._replace(bias=False))


def bias_alone(problem: Problem) -> Problem:
    """The same call with no other gradient."""
    return problem.but(grads=Grads(bias=True))


def beside(main: Backend, bias: Backend) -> Backend:
    """A backend of backwards whose bias has a gradient: ``bias`` computes that one, ``main`` all others."""
    return _Beside(main, bias)


class _Beside:
    def __init__(self, main: Backend, bias: Backend) -> None:
        self.main, self.bias = main, bias
        self.name, self.summary = main.name, main.summary

    def capabilities(self, direction: Direction) -> Capabilities | None:
        return self.bias.capabilities(direction)

    def missing(self) -> str | None:
        return self.main.missing() or self.bias.missing()

    def describe(self, problem: Problem, direction: Direction) -> str:
        main, bias = self.main.describe(others(problem), direction), self.bias.describe(bias_alone(problem), direction)
        return f"{main}; gradient of attn_bias: {self.bias.name}: {bias}"

    def plan_backward(
        self, problem: Problem, tensors: Tensors, dout: Tensor, dlse: Tensor | None, known: Known | None = None
    ) -> Backward:
        """Both plans, one after the other. Calls with a bias are of no family, so there is nothing known."""
        main = self.main.plan_backward(others(problem), tensors, dout, dlse)
        bias = self.bias.plan_backward(bias_alone(problem), tensors, dout, dlse)

        def both(
            tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, sums: Gradients | None = None
        ) -> Gradients:
            grads = main(tensors, out, lse, dout, dlse, sums)
            return dataclasses.replace(grads, dbias=bias(tensors, out, lse, dout, dlse).dbias)

        return both

    def builds(self, problem: Problem, tensors: Tensors, direction: Direction) -> list[Build]:
        found = self.main.builds(others(problem), tensors, direction)
        return found + self.bias.builds(bias_alone(problem), tensors, direction)

    def _none(self, *args: Any) -> Any:
        raise NotImplementedError("it has a backward alone")

    plan_forward = plan_decode = plan_quantized = _none
