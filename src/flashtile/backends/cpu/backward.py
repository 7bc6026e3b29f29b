"""The CPU backward: probabilities are recomputed from lse, rectangle by rectangle; docs/algorithm.md, "Backward"."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.backends.base import Gradients
from flashtile.backends.cpu import flash, plan, tiles
from flashtile.backends.cpu import forward as cpu_forward
from flashtile.backends.cpu.plan import Kind, Rectangle, Sequence
from flashtile.problem import Problem, Tensors


@dataclass(frozen=True, eq=False)
class _Rows:
    """What the backward knows of a sequence's rows, heads first.

    Attributes:
        out: ``(batch, num_heads_q, seqlen_q, head_dim_v)``.
        dout: Like out.
        lse: ``(batch, num_heads_q, seqlen_q)``, +inf for an empty row.
        delta: ``rowsum(dout * out) - dlse``, like lse.
    """

    out: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor


@dataclass(frozen=True, eq=False)
class _Sums:
    """Gradients being summed over rectangles, in the dtype of the arithmetic, shaped like their inputs."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None


def backward(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """See ``Backend.backward``."""
    dtype = problem.lse_dtype
    t = tensors
    delta = (dout.to(dtype) * out.to(dtype)).sum(dim=-1).transpose(-1, -2)
    if dlse is not None:
        delta = delta - dlse.to(dtype)
    lse_or_inf = torch.where(lse == -torch.inf, torch.inf, lse)
    empty = lse == -torch.inf
    delta = torch.where(empty, 0.0, delta)
    bias = None if t.attn_bias is None or not problem.bias_grad else plan.four_dimensional(t.attn_bias)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (t.q, t.k, t.v))
    sums = _Sums(dq, dk, dv, None if bias is None else torch.zeros(bias.shape, dtype=dtype))
    with_kernel = cpu_forward.kernel_fits(problem) and dlse is None and not problem.bias_grad
    for seq in plan.sequences(problem, t, one_by_one=cpu_forward.splits_batch(problem, with_kernel)):
        rows = _Rows(seq.view(out), seq.view(dout), seq.lse_view(lse_or_inf), seq.lse_view(delta))
        finite = cpu_forward.is_finite(problem, seq.q, seq.k, seq.v, rows.dout)
        in_tiles = seq.has_tile_bias or not (with_kernel and finite)
        tile_rows = plan.tile_rows(problem.num_heads_q) if in_tiles else None
        for block in plan.row_blocks(problem.band, seq.seqlen_q, seq.seqlen_k, tile_rows=tile_rows):
            for rectangle in block:
                if with_kernel and finite:
                    _kernel_share(problem, seq, rows, rectangle, sums)
                else:
                    _tile_share(problem, t, seq, rows, rectangle, sums, finite)
    dbias = None if sums.dbias is None or t.attn_bias is None else sums.dbias.view(t.attn_bias.shape)
    return Gradients(
        sums.dq.to(problem.dtype),
        sums.dk.to(problem.dtype),
        sums.dv.to(problem.dtype),
        None if dbias is None or t.attn_bias is None else dbias.to(t.attn_bias.dtype),
        None if t.sinks is None else _sinks_gradient(t.sinks, lse, delta),
    )


def _kernel_share(problem: Problem, seq: Sequence, rows: _Rows, rectangle: Rectangle, sums: _Sums) -> None:
    span, keys = slice(*rectangle.rows), slice(*rectangle.keys)
    triangle = rectangle.kind is Kind.TRIANGLE and not seq.has_tile_bias
    bias = None if triangle else plan.tile_bias(problem, seq, rectangle, flash.bias_dtype(problem.dtype))
    dq, dk, dv = flash.backward(
        rows.dout[:, :, span],
        seq.q[:, :, span],
        seq.k[:, :, keys],
        seq.v[:, :, keys],
        rows.out[:, :, span],
        rows.lse[:, :, span],
        bias,
        triangle,
        problem.softmax_scale,
    )
    seq.view(sums.dq)[:, :, span] += dq
    seq.key_view(sums.dk)[:, :, keys] += dk
    seq.key_view(sums.dv)[:, :, keys] += dv


def _tile_share(
    problem: Problem,
    tensors: Tensors,
    seq: Sequence,
    rows: _Rows,
    rectangle: Rectangle,
    sums: _Sums,
    finite: bool,
) -> None:
    span, keys = slice(*rectangle.rows), slice(*rectangle.keys)
    s = tiles.scores(problem, tensors, seq, rectangle)
    q, k, v = tiles.operands(problem, seq, rectangle)
    dout = rows.dout[:, :, span].to(q.dtype)
    probs = torch.exp(s.final - rows.lse[:, :, span, None])
    kept = probs if s.dropout is None else probs * s.dropout
    dprobs = tiles.per_query_head(tiles.per_key_head(dout, problem) @ v.transpose(-1, -2), problem)
    if s.dropout is not None:
        dprobs = dprobs * s.dropout
    dscores = probs * (dprobs - rows.delta[:, :, span, None])
    pairs = None
    if not finite:
        pairs = s.final != -torch.inf
        dscores = torch.where(pairs, dscores, 0.0)
    if sums.dbias is not None and seq.bias is not None:
        _add_reduced(sums.dbias[seq.bias_place], dscores, rectangle)
    if s.cap_slope is not None:
        dscores = dscores * s.cap_slope
        if pairs is not None:
            dscores = torch.where(pairs, dscores, 0.0)
    seq.view(sums.dq)[:, :, span] += tiles.weighted_sum(problem, dscores, k, pairs) * problem.softmax_scale
    seq.key_view(sums.dk)[:, :, keys] += _per_key(problem, dscores, q, pairs) * problem.softmax_scale
    seq.key_view(sums.dv)[:, :, keys] += _per_key(problem, kept, dout, pairs)


def _per_key(problem: Problem, weights: Tensor, x: Tensor, pairs: Tensor | None) -> Tensor:
    """``weights^T @ x`` summed over the group: ``(1, num_heads_kv, keys, width)``."""
    if pairs is None:
        return tiles.per_key_head(weights, problem).transpose(-1, -2) @ tiles.per_key_head(x, problem)
    # Each query head by itself, then the sum over its group: selects need the heads apart.
    out = _select_per_key(weights, x, pairs)
    return out.unflatten(1, (problem.num_heads_kv, problem.group_size)).sum(dim=2)


def _select_per_key(weights: Tensor, x: Tensor, pairs: Tensor) -> Tensor:
    columns = pairs.transpose(-1, -2).to(x.dtype)
    out = weights.transpose(-1, -2) @ torch.where(torch.isfinite(x), x, 0.0)
    bad = columns @ (~torch.isfinite(x)).to(x.dtype) > 0
    return torch.where(bad, torch.nan, out)


def _add_reduced(total: Tensor, dscores: Tensor, rectangle: Rectangle) -> None:
    """Adds dscores to the bias's gradient, summed over the dimensions in which the bias was broadcast."""
    broadcast = [d for d in range(4) if total.shape[d] == 1 and dscores.shape[d] != 1]
    rows = slice(None) if total.shape[2] == 1 else slice(*rectangle.rows)
    keys = slice(None) if total.shape[3] == 1 else slice(*rectangle.keys)
    total[:, :, rows, keys] += dscores.sum(dim=broadcast, keepdim=True) if broadcast else dscores


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """``-sum over rows of P_sink * delta``: a sink is a score whose value is 0."""
    logits = sinks.to(lse.dtype)[:, None]
    probs = torch.where(lse == -torch.inf, 0.0, torch.exp(logits - lse))
    share = -(probs * delta).sum(dim=-1)
    return (share if share.dim() == 1 else share.sum(dim=0)).to(sinks.dtype)


def describe(problem: Problem) -> str:
    """The path in one line, for finite inputs and no gradient of lse."""
    if problem.bias_grad or not cpu_forward.kernel_fits(problem):
        rows = plan.tile_rows(problem.num_heads_q)
        return f"tiles of {rows} x {plan.TILE_KEYS} scores recomputed from lse through matrix products"
    return cpu_forward.describe(problem).replace("flash kernel", "flash backward kernel")
