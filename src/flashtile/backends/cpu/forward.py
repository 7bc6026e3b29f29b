"""The CPU forward: cut, compute partial states, merge them, add the sinks."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.backends.cpu import flash, plan, tiles
from flashtile.backends.cpu.plan import Kind, Rectangle, Sequence
from flashtile.problem import Problem, Tensors

State = tuple[Tensor, Tensor]


def forward(problem: Problem, tensors: Tensors) -> State:
    """See ``Backend.forward``."""
    q = tensors.q
    out = torch.zeros(*q.shape[:-1], problem.head_dim_v, dtype=problem.dtype)
    lse_shape = (q.shape[1], q.shape[0]) if problem.varlen else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.full(lse_shape, -torch.inf, dtype=problem.lse_dtype)
    with_kernel = kernel_fits(problem)
    for seq in plan.sequences(problem, tensors, one_by_one=splits_batch(problem, with_kernel)):
        finite = is_finite(problem, seq.k, seq.v)
        rows = plan.tile_rows(problem.num_heads_q) if seq.has_tile_bias or not (with_kernel and finite) else None
        out_rows, lse_rows = seq.view(out), seq.lse_view(lse)
        for block in plan.row_blocks(problem.band, seq.seqlen_q, seq.seqlen_k, tile_rows=rows):
            span = slice(*block[0].rows)
            part, part_lse = _row_block(problem, tensors, seq, block, with_kernel and finite, finite)
            out_rows[:, :, span], lse_rows[:, :, span] = part, part_lse
        if tensors.sinks is not None:
            _add_sinks(out_rows, lse_rows, tensors.sinks)
    return out, lse


def kernel_fits(problem: Problem) -> bool:
    """Whether PyTorch's kernel knows the scores of this problem, tiles of biases given.

    It multiplies -inf by the scale, so that scale has to be positive.
    """
    plain = problem.softcap == 0 and problem.dropout_p == 0 and problem.softmax_scale > 0
    return plain and problem.head_dim == problem.head_dim_v


def splits_batch(problem: Problem, with_kernel: bool) -> bool:
    """Whether sequences of a dense batch go one by one: tiles of scores or biases are bounded for one sequence."""
    return not with_kernel or problem.mask or problem.alibi or problem.bias_dtype is not None


def is_finite(problem: Problem, *inputs: Tensor) -> bool:
    """Whether plain products are safe: nothing is masked, or no input holds an infinity or NaN.

    A masked pair has probability 0, and 0 times NaN is NaN: what a row does not attend to would reach it.
    """
    nothing_masked = problem.band.unbounded and not problem.mask and problem.bias_dtype is None
    return nothing_masked or plan.all_finite(*inputs)


def _row_block(
    problem: Problem, tensors: Tensors, seq: Sequence, block: list[Rectangle], with_kernel: bool, finite: bool
) -> State:
    state: State | None = None
    for rectangle in block:
        if with_kernel:
            part = _kernel_state(problem, seq, rectangle)
        else:
            part = tiles.forward(problem, tensors, seq, rectangle, finite)
        state = part if state is None else _merge(state, part)
    assert state is not None
    return state


def _kernel_state(problem: Problem, seq: Sequence, rectangle: Rectangle) -> State:
    rows, keys = slice(*rectangle.rows), slice(*rectangle.keys)
    triangle = rectangle.kind is Kind.TRIANGLE and not seq.has_tile_bias
    bias = None if triangle else plan.tile_bias(problem, seq, rectangle, flash.bias_dtype(problem.dtype))
    q, k, v = seq.q[:, :, rows], seq.k[:, :, keys], seq.v[:, :, keys]
    return flash.forward(q, k, v, bias, triangle, problem.softmax_scale)


def _merge(a: State, b: State) -> State:
    """Joins two states of the same rows, heads first; docs/algorithm.md, "The monoid"."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a, lse_b)
    safe = torch.where(lse == -torch.inf, 0.0, lse)
    weight_a, weight_b = torch.exp(lse_a - safe)[..., None], torch.exp(lse_b - safe)[..., None]
    return out_a * weight_a + out_b * weight_b, lse


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Rule 6, in place and heads first: the sink joins the denominator and brings no value."""
    logits = sinks.to(lse.dtype)[:, None]
    with_sink = torch.logaddexp(lse, logits)
    # A row may have an lse of -inf and its sink too: it stays empty.
    weight = torch.exp(lse - torch.where(with_sink == -torch.inf, 0.0, with_sink))
    out.copy_(out * weight[..., None])
    lse.copy_(with_sink)


def describe(problem: Problem) -> str:
    """The path in one line, for finite inputs."""
    if not kernel_fits(problem):
        rows = plan.tile_rows(problem.num_heads_q)
        return f"tiles of {rows} x {plan.TILE_KEYS} scores through matrix products, merged by log-sum-exp"
    if splits_batch(problem, True):
        rows = plan.tile_rows(problem.num_heads_q)
        return f"PyTorch's CPU flash kernel on blocks of {rows} x {plan.TILE_KEYS}, merged by log-sum-exp"
    if problem.band.left is not None:
        return "PyTorch's CPU flash kernel on blocks of rows, keys outside the window skipped"
    return "PyTorch's CPU flash kernel on the whole sequence"
