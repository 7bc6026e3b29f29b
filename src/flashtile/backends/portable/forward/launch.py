"""The forward's host code: one launch, and the plan that repeats it."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.backends.host import Step
from flashtile.backends.launch import Launch, Pointer
from flashtile.backends.portable.arguments import (
    common_arguments,
    descriptors,
    heads_at_once,
    num_programs,
)
from flashtile.backends.portable.config import Config, overridden
from flashtile.backends.portable.forward.config import choose
from flashtile.backends.portable.forward.kernel import attention_forward
from flashtile.problem import Problem, Tensors
from flashtile.states import Partial

_OPERANDS = (
    "q", "k", "v", "out", "lse", "alibi", "mask", "bias", "sinks", "cu_seqlens_q", "cu_seqlens_k", "rng_state",
    "partial_out", "partial_lse",
)  # fmt: skip


class ForwardPlan:
    """The forward of calls with the same layouts and options; see ``Backend.plan_forward``."""

    def __init__(self, problem: Problem, tensors: Tensors) -> None:
        """Prepares the launch.

        Args:
            problem: A call that the backend's capabilities cover.
            tensors: Tensors with the call's layouts.
        """
        self._problem = problem
        self._out_dtype = problem.out_dtype
        self._out_shape = (*tensors.q.shape[:-1], problem.head_dim_v)
        self._lse_shape = problem.lse_shape(tensors.q)
        self._steps: dict[object, Step] = {}

    def __call__(self, tensors: Tensors, partial: Partial | None = None) -> tuple[Tensor, Tensor]:
        """Attention's output and log-sum-exp, merged with ``partial``, those over other keys, if given."""
        t = tensors
        out = t.q.new_empty(self._out_shape, dtype=self._out_dtype)
        lse = t.q.new_empty(self._lse_shape, dtype=torch.float32)
        key = (partial is None, overridden())
        step = self._steps.get(key)
        if step is None:
            config = choose(self._problem)
            launch = forward_launch(self._problem, t, config, is_joined=partial is not None)
            step = self._steps[key] = Step(launch, _OPERANDS, t.q.device)
        parts = (None, None) if partial is None else (partial.out, partial.lse)
        step.run((
            t.q, t.k, t.v, out, lse, t.alibi_slopes, t.attn_mask, t.attn_bias, t.sinks, t.cu_seqlens_q, t.cu_seqlens_k,
            t.rng_state, *parts,
        ))  # fmt: skip
        return out, lse


def forward_launch(problem: Problem, tensors: Tensors, config: Config, *, is_joined: bool = False) -> Launch:
    """The forward's launch: what a plan repeats and what a build compiles.

    Args:
        problem: The call.
        tensors: Its tensors.
        config: The tiles.
        is_joined: Whether to merge a result over other keys: partial_out and partial_lse, contiguous float32.
    """
    arguments = common_arguments(problem, tensors, config)
    sources = {"k": (tensors.k, arguments["BLOCK_D"]), "v": (tensors.v, arguments["BLOCK_DV"])}
    floats = Pointer(torch.float32)
    arguments |= descriptors(sources, config.block_n, config)
    arguments |= {
        "out_ptr": Pointer(problem.out_dtype),
        "lse_ptr": floats,
        "sinks_ptr": tensors.sinks,
        "partial_out_ptr": floats if is_joined else None,
        "partial_lse_ptr": floats if is_joined else None,
        "heads_at_once": heads_at_once(problem, tensors.k, tensors.v),
        "ONE_LOOP": config.one_loop,
        "MASK_ALL": config.mask_all,
    }
    return Launch(attention_forward, num_programs(problem, tensors, config.block_m), arguments, config.options())
