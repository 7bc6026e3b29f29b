"""Problems from what tests have: tensors, a band, and whether gradients are wanted."""

from __future__ import annotations

from typing import Any

from flashtile.call.arguments import Options, Tensors, differentiable, grads_of
from flashtile.call.problem import Problem
from flashtile.core.masks import Band


def banded_problem(
    tensors: Tensors, band: Band, *, needs_grad: bool = False, bias_grad: bool = False, **options: Any
) -> Problem:
    """``Problem.of``, with gradients of all inputs but the bias or of none; options: fields of ``Options``."""
    given = [needs_grad and x is not None for x in differentiable(tensors)]
    grads = grads_of("grads", given)._replace(bias=bias_grad)
    options |= {"window_left": band.left, "window_right": band.right, "attention_chunk": band.chunk}
    return Problem.of(tensors, Options(grads=grads, **options))
