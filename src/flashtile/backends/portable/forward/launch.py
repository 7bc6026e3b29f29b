"""The forward's host code: one launch, and the plan that repeats it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu.host import Step, like_floats, run
from flashtile.backends.gpu.launch import Launch, Pointer
from flashtile.backends.gpu.trial import on_trial
from flashtile.backends.portable.arguments import (
    common_arguments,
    common_sizes,
    descriptors,
    heads_at_once,
    num_programs,
)
from flashtile.backends.portable.config import Config, tile_dims
from flashtile.backends.portable.forward.config import choose
from flashtile.backends.portable.forward.kernel import attention_forward
from flashtile.backends.portable.tuned import or_tables
from flashtile.call.backend import Known
from flashtile.call.problem import Problem, Tensors
from flashtile.core.states import Partial

_OPERANDS = (
    "q", "k", "v", "out", "lse", "alibi", "mask", "bias", "sinks", "cu_seqlens_q", "cu_seqlens_k", "rng_state",
    "origins", "partial_out", "partial_lse",
)  # fmt: skip


class ForwardPlan:
    """The forward of calls with the same layouts and options; see ``call.backend.Forward``."""

    def __init__(self, problem: Problem, tensors: Tensors, known: Known | None = None) -> None:
        """Prepares the launch.

        Args:
            problem: A call that the backend's capabilities cover.
            tensors: Tensors with the call's layouts.
            known: See ``Backend``.
        """
        q = tensors.q
        self._problem, self._known = problem, known
        self._out_shape = (*q.shape[:-1], problem.head_dim_v)
        self._out_is_like_q = q.is_contiguous() and self._out_shape == q.shape and problem.out_dtype == q.dtype
        self._like_lse = like_floats(q, problem.lse_shape(q))
        self._steps: dict[object, tuple[Step]] = {}

    def __call__(self, tensors: Tensors, partial: Partial | None = None) -> tuple[Tensor, Tensor]:
        """Attention's output and log-sum-exp, merged with ``partial``, those over other keys, if given."""
        t = tensors
        like_q = self._out_is_like_q
        out = torch.empty_like(t.q) if like_q else t.q.new_empty(self._out_shape, dtype=self._problem.out_dtype)
        lse = torch.empty_like(self._like_lse)
        key = (partial is None, on_trial())
        steps = self._steps.get(key)
        if steps is None:
            steps = self._steps[key] = (or_tables(lambda: self._step(t, partial is not None)),)
        parts = (None, None) if partial is None else (partial.out, partial.lse)
        run(steps, (
            t.q, t.k, t.v, out, lse, t.alibi_slopes, t.attn_mask, t.attn_bias, t.sinks, t.cu_seqlens_q, t.cu_seqlens_k,
            t.rng_state, t.origins, *parts,
        ))  # fmt: skip
        return out, lse

    def _step(self, t: Tensors, is_joined: bool) -> Step:
        launch = forward_launch(self._problem, t, choose(self._problem), is_joined=is_joined)
        return Step(launch, _OPERANDS, t.q.device, self._known)


def forward_launch(problem: Problem, tensors: Tensors, config: Config, *, is_joined: bool = False) -> Launch:
    """The forward's launch: what a plan repeats and what a build compiles.

    Args:
        problem: The call.
        tensors: Its tensors.
        config: The tiles.
        is_joined: Whether to merge a result over other keys: partial_out and partial_lse, contiguous float32.
    """
    block_d, block_dv = tile_dims(problem.head_dim, problem.head_dim_v)
    sizes = {
        **common_sizes(problem, tensors),
        **descriptors({"k": (tensors.k, config.block_n, block_d), "v": (tensors.v, config.block_n, block_dv)}, config),
        "heads_at_once": heads_at_once(problem, tensors.k, tensors.v),
    }

    def others() -> dict[str, Any]:
        floats = Pointer(torch.float32)
        return {
            **common_arguments(problem, tensors, config),
            "out_ptr": Pointer(problem.out_dtype),
            "lse_ptr": floats,
            "sinks_ptr": tensors.sinks,
            "partial_out_ptr": floats if is_joined else None,
            "partial_lse_ptr": floats if is_joined else None,
            "ONE_LOOP": config.one_loop,
            "MASK_ALL": config.mask_all,
        }

    programs, key = num_programs(problem, tensors, config.block_m), (config, problem.out_dtype, is_joined)
    return Launch(attention_forward, programs, sizes, config.options(), others, key)
