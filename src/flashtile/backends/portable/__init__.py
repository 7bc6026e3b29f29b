"""The portable backend: Triton kernels for every GPU that Triton reaches, and for its interpreter on a CPU."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

import torch
from torch import Tensor

from flashtile import settings
from flashtile.backends.base import Capabilities, Direction, Gradients
from flashtile.backends.portable import tiles
from flashtile.problem import Problem, Tensors

_CAPABILITIES = Capabilities(
    device_types=("cuda",),
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    max_head_dim=256,
    min_compute_capability=(8, 0),
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


class PortableBackend:
    """Triton kernels; see ``Backend`` for the methods."""

    name = "portable"
    summary = "NVIDIA GPUs from sm_80, AMD gfx942 (Triton)"

    def capabilities(self, direction: Direction) -> Capabilities | None:
        """The same in both directions; CPU tensors too where Triton's interpreter is on."""
        if settings.TRITON_INTERPRET.enabled():
            return dataclasses.replace(_CAPABILITIES, device_types=("cuda", "cpu"))
        return _CAPABILITIES

    def missing(self) -> str | None:
        """Triton, where it is not installed."""
        return None if find_spec("triton") else "needs Triton, which is not installed"

    def describe(self, problem: Problem, direction: Direction) -> str:
        """The tiles of the direction's kernels."""
        if direction == "forward":
            return f"Triton, tiles {tiles.choose(problem, 'forward')}"
        kernels: list[tiles.Kernel] = [*tiles.key_kernels(problem), "dq"]
        if problem.bias_grad:
            kernels.append("dbias")
        parts = [f"{'dk and dv' if name == 'dkdv' else name} {tiles.choose(problem, name)}" for name in kernels]
        return f"Triton, tiles {'; '.join(parts)}; no atomics"

    def forward(self, problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """One kernel."""
        from flashtile.backends.portable import forward

        if _needs_widening(problem):
            out, lse = forward.run(*_widened(problem, tensors))
            return out.to(problem.dtype), lse
        return forward.run(problem, tensors)

    def backward(
        self, problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Gradients:
        """Row sums, dk and dv, dq, and dbias if asked for: a kernel each, dk and dv one or two."""
        from flashtile.backends.portable import gradients

        if _needs_widening(problem):
            grads = gradients.run(*_widened(problem, tensors), out.float(), lse, dout.float(), dlse)
            return dataclasses.replace(grads, **{n: getattr(grads, n).to(problem.dtype) for n in ("dq", "dk", "dv")})
        return gradients.run(problem, tensors, out, lse, dout, dlse)


def _needs_widening(problem: Problem) -> bool:
    # Triton's interpreter keeps bfloat16 as bare integers and multiplies them as such.
    return problem.device_type == "cpu" and problem.dtype == torch.bfloat16


def _widened(problem: Problem, tensors: Tensors) -> tuple[Problem, Tensors]:
    wide = {name: getattr(tensors, name).float() for name in ("q", "k", "v")}
    return dataclasses.replace(problem, dtype=torch.float32), dataclasses.replace(tensors, **wide)


BACKEND = PortableBackend()
