"""The forward's host code: one launch, and the plan that repeats it."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.backends.gpu.device.records import Output
from flashtile.backends.gpu.host import Step, like_floats, run
from flashtile.backends.gpu.intervals import Side, bounds_launch, empty_bounds, most_bounds
from flashtile.backends.gpu.launch import Launch, Pointer
from flashtile.backends.gpu.lists import masks_of
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.records import multiprocessors, operand_names, read_by_mods, table_launches
from flashtile.backends.gpu.trial import on_trial
from flashtile.backends.portable.config import Config
from flashtile.backends.portable.forward.config import choose
from flashtile.backends.portable.records import (
    call_of,
    heads_at_once,
    num_programs,
    tiles_of,
)
from flashtile.backends.portable.tuned import or_tables
from flashtile.call.problem import Problem, Tensors
from flashtile.core.states import Partial

_kernels = device_code("flashtile.backends.portable.forward.kernel")
attention_forward = _kernels.attention_forward
repair_forward = _kernels.repair_forward


_OPERANDS = (
    "q", "k", "v", "out", "lse", "alibi", "mask", "bias", "sinks", "cu_seqlens_q", "cu_seqlens_k", "rng_state",
    "origins", "partial_out", "partial_lse", "row_keys", "key_rows",
    "row_blocks", "row_items", "bounds",
)  # fmt: skip


class ForwardPlan:
    """The forward of calls with the same layouts and options; see ``call.backend.Forward``."""

    def __init__(self, problem: Problem, tensors: Tensors) -> None:
        """Prepares the launch.

        Args:
            problem: A call that the backend's capabilities cover.
            tensors: Tensors with the call's layouts.
        """
        q = tensors.q
        self._problem = problem
        self._out_shape = (*q.shape[:-1], problem.head_dim_v)
        self._out_is_like_q = q.is_contiguous() and self._out_shape == q.shape and problem.out_dtype == q.dtype
        self._like_lse = like_floats(q, problem.lse_shape(q))
        self._steps: dict[object, tuple[Step, ...]] = {}
        self._bounds = most_bounds(problem, tensors) if problem.intervals else None

    def __call__(
        self, tensors: Tensors, partial: Partial | None = None, into: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention's output and log-sum-exp, merged with ``partial``, those over other keys, if given."""
        t = tensors
        if into is not None:
            out = into
        elif self._out_is_like_q:
            out = torch.empty_like(t.q)
        else:
            out = t.q.new_empty(self._out_shape, dtype=self._problem.out_dtype)
        lse = torch.empty_like(self._like_lse)
        key = (partial is None, on_trial())
        steps = self._steps.get(key)
        if steps is None:
            steps = self._steps[key] = or_tables(lambda: self._make(t, partial is not None))
        parts = (None, None) if partial is None else (partial.out, partial.lse)
        run(steps, (
            t.q, t.k, t.v, out, lse, t.alibi_slopes, t.attn_mask, t.attn_bias, t.sinks, t.cu_seqlens_q, t.cu_seqlens_k,
            t.rng_state, t.origins, *parts, t.row_keys, t.key_rows, t.row_blocks, t.row_items,
            None if self._bounds is None else empty_bounds(self._bounds, t.q), *read_by_mods(t, self._problem),
        ))  # fmt: skip
        return out, lse

    def _make(self, t: Tensors, is_joined: bool) -> tuple[Step, ...]:
        made = launches(self._problem, t, choose(self._problem), is_joined=is_joined).values()
        return tuple(Step(each, (*_OPERANDS, *operand_names(t)), t.q.device) for each in made)


def launches(problem: Problem, tensors: Tensors, config: Config, *, is_joined: bool = False) -> dict[str, Launch]:
    """The launches by kernel name, in order; arguments as of ``forward_launch``."""
    made = table_launches(problem, tensors)
    if problem.intervals:
        made["interval_bounds"] = bounds_launch(problem, tensors, Side(config.block_m))
    return {**made, "attention_forward": forward_launch(problem, tensors, config, is_joined=is_joined)}


def forward_launch(
    problem: Problem, tensors: Tensors, config: Config, *, is_joined: bool = False, side: Side | None = None
) -> Launch:
    """The forward's launch: what a plan repeats and what a build compiles.

    Args:
        problem: The call.
        tensors: Its tensors.
        config: The tiles.
        is_joined: Whether to merge a result over other keys: partial_out and partial_lse, contiguous float32.
        side: Given to repair rows, by ``repair_forward``: the tiles, with the operand of their bounds.
    """
    masks = masks_of(problem, tensors, side or Side(config.block_m))
    call, _ = call_of(problem, tensors, config, ("k", "v"), masks=masks)
    more, more_lse = (Pointer(torch.float32, name) if is_joined else None for name in ("partial_out", "partial_lse"))
    lse = Pointer(torch.float32, "lse")
    output = Output(Pointer(problem.out_dtype, "out"), lse, more, more_lse)
    tiles = tiles_of(config, heads_at_once(problem, tensors.k, tensors.v))
    programs = num_programs(problem, tensors, config.block_m)
    arguments = {"call": call, "output": output, "tiles": tiles}
    if side is None:
        return Launch(attention_forward, programs, arguments, config.options())
    at_once = min(2 * multiprocessors(tensors.q.device), programs)
    return Launch(repair_forward, at_once, {**arguments, "count": programs}, config.options())
