"""Tiles of scores as PyTorch tensors: every feature, with a bounded number of elements at a time.

PyTorch's own kernel cannot handle softcap, dropout, the gradient of a bias or of lse, head_dim_v other than head_dim,
or a NaN in k that some rows mask. All arithmetic is in float32, or float64 for float64 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.backends.cpu import plan
from flashtile.backends.cpu.plan import DenseSequences, Rectangle
from flashtile.call.functions import Function, score_function
from flashtile.call.problem import Problem, Tensors
from flashtile.core import philox, states


@dataclass(frozen=True, eq=False)
class Scores:
    """A rectangle's scores, their derivative and dropout factors, each ``(1, num_heads_q, rows, keys)``.

    Attributes:
        final: The scores after all functions, bias and masks; -inf for dropped pairs.
        cap_slope: Derivative of the softcap, None without one.
        dropout: Factor of each probability, 0 or 1/(1-p), None without dropout.
        mod_slope: Derivative of the user's function; None if it is 1 or there is no function.
        operands: The rectangle's rows of q, k and v.
        partials: Derivatives of the function with respect to its loads, in the order of ``Graph.partials``.
    """

    final: Tensor
    cap_slope: Tensor | None
    dropout: Tensor | None
    operands: tuple[Tensor, Tensor, Tensor]
    mod_slope: Tensor | None = None
    partials: tuple[Tensor, ...] = ()


def scores(
    problem: Problem, tensors: Tensors, seq: DenseSequences, rectangle: Rectangle, *, derivative: bool = False
) -> Scores:
    """Rules 1 to 5 and 26, and the dropout of rule 7, for one rectangle of one sequence; with ``derivative`` slopes."""
    dtype = problem.lse_dtype
    q, k, v = (x.contiguous() for x in operands(problem, seq, rectangle))
    final = per_key_head(q, problem) @ k.transpose(-1, -2)
    final = per_query_head(final, problem).mul_(problem.softmax_scale)
    cap_slope, mod_slope = None, None
    partials: tuple[Tensor, ...] = ()
    if (function := score_function(problem, tensors)) is not None:
        at = {"score": final, **plan.pairs(seq, rectangle)}
        final, mod_slope, partials = modified(function, at, dtype, derivative)
    if problem.softcap > 0:
        capped = torch.tanh(final / problem.softcap)
        cap_slope = 1 - capped * capped
        final = capped * problem.softcap
    if problem.large_scores and seq.slopes is not None:
        # Slopes come before the bias, as in rule 4: a sum with a large number is rounded.
        final = final - seq.slopes.to(dtype) * plan.distances(seq, rectangle)
    bias = plan.tile_bias(problem, seq, rectangle, dtype, alibi=not problem.large_scores)
    if bias is not None:
        # Selecting -inf discards a NaN of a masked pair.
        final = torch.where(bias == -torch.inf, -torch.inf, final + bias)
    factor = None
    if tensors.rng_state is not None:
        factor = kept(problem, tensors.rng_state, seq, rectangle).to(dtype).div_(1 - problem.dropout_p)
    return Scores(final, cap_slope, factor, (q, k, v), mod_slope, partials)


def modified(
    function: Function, at: dict[str, Tensor], dtype: torch.dtype, derivative: bool
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """A user's function of scores; if ``derivative``, also its slope (None if it is 1) and its partial derivatives."""
    graph = function.graph
    ends, has_slope = [graph.result], derivative and not graph.is_const(graph.slope, 1.0)
    if has_slope and graph.slope is not None:
        ends.append(graph.slope)
    if derivative:
        ends += [p.slope for p in graph.partials]
    final, *others = function.values(ends, at, dtype)
    slope = others.pop(0) if has_slope else None
    return final.expand_as(at["score"]), slope, tuple(others)


def kept(problem: Problem, rng_state: Tensor, seq: DenseSequences, rectangle: Rectangle) -> Tensor:
    """The probabilities of a rectangle that dropout keeps."""
    rows, keys = rectangle.rows, rectangle.keys
    return philox.keep(rng_state, problem.dropout_p, seq.batch, problem.num_heads_q, rows, keys, seq.origin)


def forward(problem: Problem, tensors: Tensors, seq: DenseSequences, rectangle: Rectangle) -> tuple[Tensor, Tensor]:
    """Partial output ``(1, num_heads_q, rows, head_dim_v)`` and lse ``(1, num_heads_q, rows)`` of a rectangle.

    With ``large_scores`` lse is ``states.in_parts``.
    """
    s = scores(problem, tensors, seq, rectangle)
    v = s.operands[2]
    if problem.large_scores:
        top = s.final.amax(dim=-1)
        probs = torch.exp(s.final - torch.where(top == -torch.inf, 0.0, top)[..., None])
        total = probs.sum(dim=-1)
        probs, lse = probs / torch.where(total == 0, 1.0, total)[..., None], states.in_parts(top, torch.log(total))
    else:
        lse = torch.logsumexp(s.final, dim=-1)
        probs = torch.exp(s.final - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    if s.dropout is not None:
        probs = probs * s.dropout
    return weighted_sum(problem, probs, v), lse


def weighted_sum(problem: Problem, weights: Tensor, x: Tensor) -> Tensor:
    """``weights @ x``: ``(1, num_heads_q, rows, keys)`` by ``(1, num_heads_kv, keys, width)``."""
    return per_query_head(per_key_head(weights, problem) @ x, problem)


def operands(problem: Problem, seq: DenseSequences, rectangle: Rectangle) -> tuple[Tensor, Tensor, Tensor]:
    """The rectangle's rows of q, k and v in the dtype of the arithmetic."""
    rows, keys = slice(*rectangle.rows), slice(*rectangle.keys)
    dtype = problem.lse_dtype
    return seq.q[:, :, rows].to(dtype), seq.k[:, :, keys].to(dtype), seq.v[:, :, keys].to(dtype)


def per_key_head(x: Tensor, problem: Problem) -> Tensor:
    """``(b, num_heads_q, rows, n)`` to ``(b, num_heads_kv, group_size * rows, n)``: one product for a group."""
    if problem.group_size == 1:
        return x
    b, _, rows, n = x.shape
    return x.reshape(b, problem.num_heads_kv, problem.group_size * rows, n)


def per_query_head(x: Tensor, problem: Problem) -> Tensor:
    """The inverse of ``per_key_head``."""
    if problem.group_size == 1:
        return x
    b, _, rows, n = x.shape
    return x.reshape(b, problem.num_heads_q, rows // problem.group_size, n)
