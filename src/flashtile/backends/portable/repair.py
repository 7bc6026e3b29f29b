"""Repairs of what another backend's kernels have lost: rows of huge scores.

Kernels that multiply scores with LOG2_E before they take maxima, and keep lse as one float32, lose rows with an lse
not below ``softmax.MOST`` in size: a product overflows, or beside 1e9 the log of a sum is rounded away. Such rows
show by what lse they store; their tiles alone are computed once more here, and of calls with ``Problem.large_scores``
alone. Where there are none, a program reads lse of its rows and ends.

In the forward lost rows get their output and both parts of lse, and all others 0 for the second part. In the backward
the other kernels take lost rows for empty and store the terms of rows (``RowTerms``, with flags), of all others with
lse +inf, in the operand "rows"; what lost rows add to dq, dk and dv is then added to what is there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.backends.gpu.device.records import MOST_LSE
from flashtile.backends.gpu.launch import Launch
from flashtile.backends.gpu.masks import Side, bounds_launch, most_bounds
from flashtile.backends.gpu.plan import Memory, empty
from flashtile.backends.portable.backward import launch as backward
from flashtile.backends.portable.backward.config import wanted_kernels
from flashtile.backends.portable.backward.workspace import Repair, num_rows, row_pitch, row_terms
from flashtile.backends.portable.config import for_repair
from flashtile.backends.portable.device.records import RowTerms
from flashtile.backends.portable.forward import launch as forward
from flashtile.backends.portable.forward.config import choose
from flashtile.call.problem import Problem, Tensors

# The operand with the bounds of intervals.
BOUNDS = "repair_bounds"


def forward_launches(problem: Problem, tensors: Tensors, *, is_joined: bool = False) -> dict[str, Launch]:
    """What follows a forward's launches, by name; is_joined: whether they merge a result over other keys."""
    if not problem.large_scores:
        return {}
    config = for_repair(choose(problem))
    side = Side(config.block_m, operand=BOUNDS)
    made = {"repair_bounds": bounds_launch(problem, tensors, side)} if problem.intervals else {}
    made["repair_forward"] = forward.forward_launch(problem, tensors, config, is_joined=is_joined, side=side)
    return made


def forward_memory(problem: Problem, t: Tensors) -> Memory:
    """The memory of the forward's repair."""
    if not (problem.large_scores and problem.intervals):
        return {}
    return {BOUNDS: empty(t.q.device, (most_bounds(problem, t),), torch.int32)}


def backward_launches(problem: Problem, tensors: Tensors, dout: Tensor, flag_rows: int) -> dict[str, Launch]:
    """What follows the launches of a backward, which flags blocks of so many rows; the others' products are apart."""
    if not problem.large_scores:
        return {}
    made, wanted, repair = dict[str, Launch](), problem.grads, Repair(flag_rows, BOUNDS)
    of_keys = wanted_kernels(problem)
    for name in (*of_keys, "dq") if wanted.q else of_keys:
        if problem.intervals:
            side = backward.side_of(problem, tensors, name)._replace(operand=BOUNDS)
            made[f"repair_bounds_{name}"] = bounds_launch(problem, tensors, side)
        made[f"repair_{name}"] = (
            backward.dq_launch(problem, tensors, dout, True, repair)
            if name == "dq"
            else backward.dkdv_launch(problem, tensors, dout, name, (*of_keys[name], True), repair)
        )
    return made


def terms_of(problem: Problem, tensors: Tensors, flag_rows: int) -> RowTerms | None:
    """Where the backward's first kernel stores terms and flags of rows for the repair; None without one."""
    return row_terms(problem, tensors, Repair(flag_rows, BOUNDS)) if problem.large_scores else None


def backward_memory(problem: Problem, t: Tensors, flags: int) -> Memory:
    """The memory of the backward's repair: that operand, with so many flags, and bounds of intervals."""
    if not problem.large_scores:
        return {}
    memory = {"rows": empty(t.q.device, (3 * num_rows(problem, t) + flags,))}
    if problem.intervals:
        memory[BOUNDS] = empty(t.q.device, (backward.bounds_places(problem, t)[-1],), torch.int32)
    return memory


def sinks_gradient(problem: Problem, tensors: Tensors, lse: Tensor, terms: Tensor) -> Tensor:
    """What lost rows add to the gradient of sinks, from lse in parts and that operand."""
    top, rest = lse.unbind(-1)
    lost = (top.abs() < MOST_LSE).logical_not() & (top != -torch.inf)
    pitch = row_pitch(top.shape[-1], problem.varlen)
    delta = terms[: num_rows(problem, tensors)].view(*top.shape[:-1], pitch)[..., : top.shape[-1]]
    lse = torch.stack([torch.where(lost, top, -torch.inf), torch.where(lost, rest, 0.0)], -1)
    assert tensors.sinks is not None
    return backward.sinks_gradient(problem, tensors.sinks, lse, torch.where(lost, delta, 0.0))
