"""The quantized forward's host code: one launch, and the plan that repeats it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu.host import Step, like_floats, run
from flashtile.backends.gpu.launch import Launch, Pointer
from flashtile.backends.gpu.trial import on_trial
from flashtile.backends.portable.arguments import band_sizes, heads_at_once, num_programs, tile_arguments
from flashtile.backends.portable.config import Config, padded_dims
from flashtile.backends.portable.quantized.config import choose
from flashtile.backends.portable.quantized.kernel import attention_quantized
from flashtile.call.backend import Known
from flashtile.call.problem import Problem
from flashtile.call.quantized_arguments import QuantizedTensors
from flashtile.call.quantized_problem import scale_strides

_OPERANDS = (
    "q", "k", "v", "out", "lse", "q_scale", "k_scale", "v_scale", "shift", "sinks", "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip


class QuantizedPlan:
    """The forward of quantized calls with the same layouts and options; see ``call.backend.QuantizedForward``."""

    def __init__(self, problem: Problem, tensors: QuantizedTensors, known: Known | None = None) -> None:
        """As ``ForwardPlan``."""
        q = tensors.q
        self._problem, self._known = problem, known
        self._out_shape = (*q.shape[:-1], problem.head_dim_v)
        self._like_lse = like_floats(q, problem.lse_shape(q))
        self._steps: dict[object, tuple[Step]] = {}

    def __call__(self, tensors: QuantizedTensors) -> tuple[Tensor, Tensor]:
        """Attention's output and log-sum-exp."""
        t = tensors
        out = t.q.new_empty(self._out_shape, dtype=self._problem.out_dtype)
        lse = torch.empty_like(self._like_lse)
        steps = self._steps.get(on_trial())
        if steps is None:
            launch = quantized_launch(self._problem, t, choose(self._problem))
            steps = self._steps[on_trial()] = (Step(launch, _OPERANDS, t.q.device, self._known),)
        run(steps, (
            t.q, t.k, t.v, out, lse, t.q_scale, t.k_scale, t.v_scale, t.shift, t.sinks, t.cu_seqlens_q, t.cu_seqlens_k,
        ))  # fmt: skip
        return out, lse


def quantized_launch(problem: Problem, tensors: QuantizedTensors, config: Config) -> Launch:
    """The launch: what a plan repeats and what a build compiles."""
    t = tensors
    head, dim = t.v.stride()[-3:-1]
    sizes: dict[str, Any] = {
        **band_sizes(problem, t.q, t.k),
        "v_stride_b": t.v.stride(0) if t.v.dim() == 4 else 0,
        "v_stride_dim": dim,
        "v_stride_head": head,
        "heads_at_once": heads_at_once(problem, t.k, t.k),
    }
    for name in ("q_scale", "k_scale", "v_scale"):
        strides = zip(("b", "head", "block"), scale_strides(getattr(t, name)), strict=True)
        sizes |= {f"{name}_stride_{axis}": stride for axis, stride in strides}

    # 8-bit products are over 32 numbers at least.
    block_d, block_dv = padded_dims(max(problem.head_dim, 32), max(problem.head_dim_v, 32))

    def others() -> dict[str, Any]:
        return {
            **{f"{name}_ptr": getattr(t, name) for name in _OPERANDS if name not in ("out", "lse")},
            "out_ptr": Pointer(problem.out_dtype),
            "lse_ptr": Pointer(torch.float32),
            **tile_arguments(problem, config),
            "ONE_LOOP": config.one_loop,
            "MASK_ALL": config.mask_all,
            "BLOCK_D": block_d,
            "BLOCK_DV": block_dv,
        }

    programs, key = num_programs(problem, t, config.block_m), (config, problem.out_dtype)
    return Launch(attention_quantized, programs, sizes, config.options(), others, key)
