"""The CPU forward: splits the call, computes partial states, merges them, and adds the sinks."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flashtile.backends.cpu import flash, invariant, plan, tiles
from flashtile.backends.cpu.order import order_of
from flashtile.backends.cpu.paths import Path, adds_tiles, are_large, kernel_fits, paths
from flashtile.backends.cpu.plan import DenseSequences, KeptPairs, Rectangle
from flashtile.call.problem import Problem, Tensors
from flashtile.core import states
from flashtile.core.states import Partial

State = tuple[Tensor, Tensor]


def forward(
    problem: Problem, tensors: Tensors, partial: Partial | None = None, into: Tensor | None = None, first: int = 0
) -> State:
    """See ``call.backend.Forward``. PyTorch's kernel allocates its own result, so ``into`` is not used.

    For a user's functions, sequences are numbered from ``first``.
    """
    if problem.max_scores:
        out, lse = forward(problem.but(max_scores=False), tensors, None, into, first)
        return out, states.with_max_scores(lse, max_scores(problem, tensors, first))
    if partial is None and problem.out_dtype == problem.dtype:
        return _forward(problem, tensors, first)
    # PyTorch's kernel rounds its results to the inputs' dtype.
    wide = {name: getattr(tensors, name).to(problem.lse_dtype) for name in ("q", "k", "v")}
    out, lse = _forward(problem.but(dtype=problem.lse_dtype), dataclasses.replace(tensors, **wide), first)
    if partial is not None:
        out, lse = states.joined(partial, out, lse)
    return out.to(problem.out_dtype), lse


def _forward(problem: Problem, tensors: Tensors, first: int) -> State:
    q = tensors.q
    if problem.batch_invariant:
        return invariant.forward(problem, tensors, _empty_state(problem, q), first)
    if (order := order_of(problem, tensors)) is not None:
        out, lse = _forward(problem, order.tensors, first)
        places = order.places()
        return out.index_select(0, places), lse.index_select(1, places)
    state: State | None = None
    for path in paths(problem, tensors, kernel_fits(problem), keep_local=True, first=first):
        whole = path.whole()
        if whole is not None:
            out, lse = _row_block(problem, tensors, path, [whole])
            out, lse = out.to(q.dtype).transpose(1, 2).contiguous(), lse.contiguous()
            if tensors.sinks is not None:
                add_sinks(out.transpose(1, 2), lse, tensors.sinks)
            return out, lse
        state = state or _empty_state(problem, q)
        out_rows, lse_rows = path.seq.view(state[0]), path.seq.lse_view(state[1])
        for block in path.blocks:
            span = slice(*block[0].rows)
            out_rows[:, :, span], lse_rows[:, :, span] = _row_block(problem, tensors, path, block)
        if tensors.sinks is not None:
            add_sinks(out_rows, lse_rows, tensors.sinks)
    return state or _empty_state(problem, q)


def max_scores(problem: Problem, tensors: Tensors, first: int = 0) -> Tensor:
    """The largest score that each row keeps: rule 31. PyTorch's kernel does not tell, so scores are computed again."""
    plain = problem.but(max_scores=False, bias_dtype=None, score_function=None)
    found = tensors.q.new_full(plain.lse_shape(tensors.q), -torch.inf, dtype=problem.lse_dtype)
    t = dataclasses.replace(tensors, rng_state=None)
    for path in paths(problem, t, False, keep_local=True, first=first):
        rows = path.seq.lse_view(found)
        for block in path.blocks:
            span = rows[:, :, slice(*block[0].rows)]
            for rectangle in block:
                span.copy_(torch.maximum(span, tiles.scores(problem, t, path.seq, rectangle).final.amax(dim=-1)))
    return found.masked_fill_(found == torch.inf, torch.nan)


def _empty_state(problem: Problem, q: Tensor) -> State:
    """The state of rows without keys: 0 and -inf."""
    out = q.new_zeros(*q.shape[:-1], problem.head_dim_v)
    lse = q.new_full(problem.lse_shape(q), -torch.inf, dtype=problem.lse_dtype)
    if problem.large_scores:
        lse[..., 1] = 0.0
    return out, lse


def _row_block(problem: Problem, tensors: Tensors, path: Path, block: list[Rectangle]) -> State:
    state: State | None = None
    for rectangle in block:
        if path.kernel:
            part = _kernel_state(problem, path.seq, rectangle)
            if problem.large_scores:
                part = part[0], torch.stack([part[1], torch.zeros_like(part[1])], dim=-1)
        else:
            part = tiles.forward(problem, tensors, path.seq, rectangle)
        state = part if state is None else states.merge(*state, *part)
    assert state is not None
    if not (path.kernel and path.seq.has_tile_bias):
        return state
    lse = state[1][..., 0] if problem.large_scores else state[1]
    is_wrong = lse.isnan() | are_large(lse) if problem.large_scores else lse.isnan()
    if not is_wrong.any():
        return state
    by_tiles = _row_block(problem, tensors, dataclasses.replace(path, kernel=False), block)
    # Each sequence is computed as it would be alone.
    each = is_wrong.flatten(1).any(dim=1)
    out, lse = (torch.where(each.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(by_tiles, state, strict=True))
    return out, lse


def _kernel_state(problem: Problem, seq: DenseSequences, rectangle: Rectangle) -> State:
    rows, keys = slice(*rectangle.rows), slice(*rectangle.keys)
    triangle = rectangle.kind is KeptPairs.TRIANGLE and not seq.has_tile_bias
    bias = None if triangle else plan.tile_bias(problem, seq, rectangle, flash.bias_dtype(problem.dtype))
    q, k, v = seq.q[:, :, rows], seq.k[:, :, keys], seq.v[:, :, keys]
    has_empty_rows = bias is not None and plan.has_empty_rows(problem, seq, rectangle)
    return flash.forward(q, k, v, bias, triangle, problem.softmax_scale, has_empty_rows)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Rule 6, in place and heads first: the sink is added to the denominator and has no value."""
    logits = sinks.to(lse.dtype)[:, None].expand(out.shape[:-1])
    if lse.dim() == out.dim():
        logits = states.in_parts(logits, torch.zeros_like(logits))
    # If a row's lse and its sink are both -inf, the row stays empty.
    merged, with_sink = states.merge(out, lse, torch.zeros_like(out), logits)
    out.copy_(merged)
    lse.copy_(with_sink)


def describe(problem: Problem) -> str:
    """The path in one line, for finite inputs."""
    if problem.batch_invariant:
        return invariant.describe()
    if not kernel_fits(problem):
        rows = plan.tile_rows(problem.num_heads_q)
        return f"tiles of {rows} x {plan.TILE_KEYS} scores through matrix products, merged by log-sum-exp"
    if adds_tiles(problem):
        rows = plan.tile_rows(problem.num_heads_q)
        return f"PyTorch's CPU flash kernel on blocks of {rows} x {plan.TILE_KEYS}, merged by log-sum-exp"
    if problem.band.left is not None:
        return "PyTorch's CPU flash kernel on blocks of rows, keys outside the window skipped"
    return "PyTorch's CPU flash kernel on the whole sequence"
