"""The portable default: blocks through PyTorch's own CPU flash kernel where it can, through matrix products where not.

A call is cut into rectangles of the score matrix that the band does not leave empty (``plan``). Each yields a partial
output and log-sum-exp (``flash`` or ``tiles``), and partial states merge. Memory stays linear in the lengths.
"""

from __future__ import annotations

from torch import Tensor

from flashtile.backends.base import Capabilities, Direction, Gradients
from flashtile.backends.cpu import backward, forward
from flashtile.problem import DTYPES, Problem, Tensors

_CAPABILITIES = Capabilities(
    device_types=("cpu",),
    dtypes=DTYPES,
    max_head_dim=None,
    causal=True,
    window=True,
    grouped_heads=True,
    varlen=True,
    head_dim_v=True,
    softcap=True,
    alibi=True,
    mask=True,
    bias=True,
    bias_grad=True,
    sinks=True,
    dropout=True,
    deterministic=True,
    unaligned=True,
)


class CpuBackend:
    """Attention on the CPU, every rule in every dtype."""

    name = "cpu"
    summary = "any CPU"

    def capabilities(self, direction: Direction) -> Capabilities | None:
        """The same for both directions."""
        return _CAPABILITIES

    def missing(self) -> str | None:
        """Nothing: PyTorch is enough."""
        return None

    def describe(self, problem: Problem, direction: Direction) -> str:
        """The path and its blocks."""
        return forward.describe(problem) if direction == "forward" else backward.describe(problem)

    def forward(self, problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """See ``Backend.forward``."""
        return forward.forward(problem, tensors)

    def backward(
        self, problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Gradients:
        """See ``Backend.backward``."""
        return backward.backward(problem, tensors, out, lse, dout, dlse)


BACKEND = CpuBackend()
