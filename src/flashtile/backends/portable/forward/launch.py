"""The forward's host code: its launches and its plan."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.backends.gpu.device.records import Output
from flashtile.backends.gpu.launch import Launch, Pointer
from flashtile.backends.gpu.masks import Side, bounds_launch, masks_of
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.plan import ForwardPlan, Memory, forward_memory, max_scores_memory
from flashtile.backends.gpu.records import max_scores_of, multiprocessors, table_launches
from flashtile.backends.portable.config import PortableTiles
from flashtile.backends.portable.forward.config import choose
from flashtile.backends.portable.records import (
    call_of,
    heads_at_once,
    num_programs,
    tiles_of,
)
from flashtile.backends.portable.tuned import or_tables
from flashtile.call.problem import Problem, Tensors

_kernels = device_code("flashtile.backends.portable.forward.kernel")
attention_forward = _kernels.attention_forward
repair_forward = _kernels.repair_forward


def plan(problem: Problem, tensors: Tensors) -> ForwardPlan:
    """The forward of calls with the same layouts and options; see ``call.backend.Forward``."""

    def prepare(t: Tensors, _: Any, is_joined: bool) -> tuple[Memory, dict[str, Launch]]:
        return forward_memory(problem, t), launches(problem, t, choose(problem), is_joined=is_joined)

    return ForwardPlan(tensors.q.device, prepare, or_tables, max_scores=max_scores_memory(problem, tensors.q))


def launches(
    problem: Problem, tensors: Tensors, config: PortableTiles, *, is_joined: bool = False
) -> dict[str, Launch]:
    """The launches by kernel name, in order; arguments as of ``forward_launch``."""
    made = table_launches(problem, tensors)
    if problem.intervals:
        made["interval_bounds"] = bounds_launch(problem, tensors, Side(config.block_m))
    return {**made, "attention_forward": forward_launch(problem, tensors, config, is_joined=is_joined)}


def forward_launch(
    problem: Problem, tensors: Tensors, config: PortableTiles, *, is_joined: bool = False, side: Side | None = None
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
    output = Output(Pointer(problem.out_dtype, "out"), lse, more, more_lse, max_scores_of(problem))
    tiles = tiles_of(config, heads_at_once(problem, tensors.k, tensors.v))
    programs = num_programs(problem, tensors, config.block_m)
    arguments = {"call": call, "output": output, "tiles": tiles}
    if side is None:
        return Launch(attention_forward, programs, arguments, config.options())
    at_once = min(2 * multiprocessors(tensors.q.device), programs)
    return Launch(repair_forward, at_once, {**arguments, "count": programs}, config.options())
