"""The hopper backend; its kernels are not in place yet, so it declares that it can do nothing."""

from __future__ import annotations

from torch import Tensor

from flashtile.backends.base import Capabilities, Direction, Gradients
from flashtile.errors import UnsupportedError
from flashtile.problem import Problem, Tensors


class _Backend:
    name = "hopper"
    summary = "nothing yet"

    def capabilities(self, direction: Direction) -> Capabilities | None:
        return None

    def missing(self) -> str | None:
        return None

    def describe(self, problem: Problem, direction: Direction) -> str:
        return "nothing"

    def forward(self, problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
        raise UnsupportedError("hopper has no forward")

    def backward(
        self, problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Gradients:
        raise UnsupportedError("hopper has no backward")


BACKEND = _Backend()
