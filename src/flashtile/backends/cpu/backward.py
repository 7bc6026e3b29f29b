"""The CPU backward: probabilities are recomputed from lse, rectangle by rectangle; docs/algorithm.md, "Backward"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flashtile.backends.cpu import flash, plan, tiles
from flashtile.backends.cpu import forward as cpu_forward
from flashtile.backends.cpu.order import order_of
from flashtile.backends.cpu.paths import Path, are_large, kernel_fits, paths
from flashtile.backends.cpu.plan import DenseSequences, KeptPairs, Rectangle
from flashtile.call.backend import Gradients
from flashtile.call.functions import score_function
from flashtile.call.problem import Problem, Tensors
from flashtile.core.states import sinks_gradient


@dataclass(frozen=True, eq=False)
class _Rows:
    """The backward's per-row inputs of a sequence, heads first.

    Attributes:
        out: ``(batch, num_heads_q, seqlen_q, head_dim_v)``.
        dout: Like out.
        dlse: Like lse, None for zero.
        lse: ``(batch, num_heads_q, seqlen_q)``, +inf for an empty row; with ``large_scores`` the first part.
        rest: Like lse: with ``large_scores`` the second part, else None.
    """

    out: Tensor
    dout: Tensor
    dlse: Tensor | None
    lse: Tensor
    rest: Tensor | None = None

    @classmethod
    def of(
        cls, problem: Problem, seq: DenseSequences, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> _Rows:
        """The rows of a sequence."""
        lse, rest = seq.lse_view(lse), None
        if problem.large_scores:
            lse, rest = lse.unbind(-1)
        lse = torch.where(lse == -torch.inf, torch.inf, lse)
        return cls(seq.view(out), seq.view(dout), None if dlse is None else seq.lse_view(dlse), lse, rest)

    def probs(self, scores: Tensor, span: slice) -> Tensor:
        """The probabilities of some rows' scores."""
        apart = scores - self.lse[:, :, span, None]
        return (apart if self.rest is None else apart.sub_(self.rest[:, :, span, None])).exp_()

    def are_large(self, rectangle: Rectangle) -> bool:
        """Whether some row's lse is too large for PyTorch's kernel, which takes lse as one number."""
        return self.rest is not None and bool(are_large(self.lse[:, :, slice(*rectangle.rows)]).any())

    @cached_property
    def delta(self) -> Tensor:
        """``rowsum(dout * out) - dlse``, 0 for an empty row; like lse."""
        dtype = self.lse.dtype
        delta = (self.dout.to(dtype) * self.out.to(dtype)).sum(dim=-1)
        if self.dlse is not None:
            delta = delta - self.dlse.to(dtype)
        return torch.where(self.lse == torch.inf, 0.0, delta)


@dataclass(frozen=True, eq=False)
class _Sums:
    """Gradients that are summed over rectangles, in the dtype of the arithmetic, shaped like their inputs.

    A gradient that is not needed is None. doperands are flat float64, each as long as its operand, and any number of
    pairs may add to an element; the tuple is empty if none is needed.
    """

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None
    doperands: tuple[Tensor | None, ...] = ()


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    sums: Gradients | None = None,
) -> Gradients:
    """See ``call.backend.Backward``."""
    t, grads = tensors, problem.grads
    if sums is None and (order := order_of(problem, t)) is not None:
        given = (lse[:, order.rows], dout[order.rows], None if dlse is None else dlse[:, order.rows])
        moved = backward(problem, order.tensors, out[order.rows], *given)
        for name, places in (("dq", order.rows), ("dk", order.keys), ("dv", order.keys)):
            if (x := getattr(moved, name)) is not None:
                setattr(moved, name, torch.empty_like(x).index_copy_(0, places, x))
        return moved
    dsinks = _zeros_like(problem, t.sinks) if grads.sinks else None
    totals = None if sums is None else _totals(problem, t, sums)
    kernel = kernel_fits(problem) and dlse is None and not grads.bias
    for path in paths(problem, t, kernel):
        seq = path.seq
        rows = _Rows.of(problem, seq, out, lse, dout, dlse)
        if dsinks is not None and t.sinks is not None:
            dsinks += sinks_gradient(t.sinks, seq.lse_view(lse), rows.delta)
        if not any(grads[:4]) and not grads.operands:
            continue
        whole = path.whole() if totals is None else None
        if whole is not None and path.kernel and not rows.are_large(whole):
            shares = _kernel_shares(problem, seq, rows, whole)
            found = (x.transpose(1, 2).to(problem.grad_dtype).contiguous() for x in shares)
            dq, dk, dv = (x if wanted else None for x, wanted in zip(found, grads, strict=False))
            return Gradients(dq, dk, dv, None, _stored(dsinks, t.sinks))
        totals = totals or _totals(problem, t)
        for block in path.blocks:
            # PyTorch's kernel takes lse as one number.
            by_tiles = not path.kernel or rows.are_large(block[0])
            for rectangle in block:
                if not by_tiles:
                    _add_kernel_shares(problem, seq, rows, rectangle, totals)
                else:
                    is_whole = sums is None and len(block) == 1
                    _add_tile_shares(problem, t, path, rows, rectangle, totals, whole_rows=is_whole)
    return _rounded(problem, t, totals or _totals(problem, t), dsinks)


def _totals(problem: Problem, t: Tensors, sums: Gradients | None = None) -> _Sums:
    """Sums to which the needed gradients are added: the given sums, or zeros; None for the other gradients."""
    bias = None if t.attn_bias is None else plan.four_dimensional(t.attn_bias)
    given = (None,) * 3 if sums is None else (sums.dq, sums.dk, sums.dv)
    wanted = problem.grads.operands or (False,) * len(t.operands or ())
    operands = (
        x.new_zeros(x.numel(), dtype=torch.float64) if is_wanted else None
        for x, is_wanted in zip(t.operands or (), wanted, strict=True)
    )
    inputs = zip((t.q, t.k, t.v, bias), (*given, None), problem.grads, strict=False)
    dq, dk, dv, dbias = (
        (_zeros_like(problem, x) if total is None else total) if needed else None for x, total, needed in inputs
    )
    return _Sums(dq, dk, dv, dbias, tuple(operands) if problem.grads.operands else ())


def _zeros_like(problem: Problem, x: Tensor | None) -> Tensor | None:
    """Contiguous zeros of a tensor's shape in the dtype of the arithmetic."""
    return None if x is None else x.new_zeros(x.shape, dtype=problem.lse_dtype)


def _rounded(problem: Problem, t: Tensors, sums: _Sums, dsinks: Tensor | None) -> Gradients:
    """The sums, in the dtypes of the results and the shapes of the inputs."""
    dq, dk, dv = (x if x is None else x.to(problem.grad_dtype) for x in (sums.dq, sums.dk, sums.dv))
    operands = tuple(map(_stored, sums.doperands, t.operands or ()))
    return Gradients(dq, dk, dv, _stored(sums.dbias, t.attn_bias), _stored(dsinks, t.sinks), operands)


def _stored(total: Tensor | None, like: Tensor | None) -> Tensor | None:
    """A gradient's sum in the shape and dtype of the input."""
    return None if total is None or like is None else total.view(like.shape).to(like.dtype)


def _kernel_shares(
    problem: Problem, seq: DenseSequences, rows: _Rows, rectangle: Rectangle
) -> tuple[Tensor, Tensor, Tensor]:
    """A rectangle's contribution to dq, dk and dv, heads first, from PyTorch's kernel.

    The kernel sums over blocks of rows, blocks of keys and the heads of a group in the inputs' dtype, so 16-bit floats
    are converted first. On a processor without matrix instructions for bfloat16 that is also faster.
    """
    span = slice(*rectangle.rows)
    triangle = rectangle.kind is KeptPairs.TRIANGLE and not seq.has_tile_bias
    bias = None if triangle else plan.tile_bias(problem, seq, rectangle, problem.lse_dtype)
    q, k, v = tiles.operands(problem, seq, rectangle)
    out, dout = (x[:, :, span].to(q.dtype) for x in (rows.out, rows.dout))
    return flash.backward(dout, q, k, v, out, rows.lse[:, :, span], bias, triangle, problem.softmax_scale)


def _add_kernel_shares(problem: Problem, seq: DenseSequences, rows: _Rows, rectangle: Rectangle, sums: _Sums) -> None:
    span, keys = slice(*rectangle.rows), slice(*rectangle.keys)
    # The kernel always computes all three gradients; unneeded ones are discarded.
    dq, dk, dv = _kernel_shares(problem, seq, rows, rectangle)
    if sums.dq is not None:
        seq.view(sums.dq)[:, :, span] += dq
    if sums.dk is not None:
        seq.key_view(sums.dk)[:, :, keys] += dk
    if sums.dv is not None:
        seq.key_view(sums.dv)[:, :, keys] += dv


def _add_tile_shares(
    problem: Problem,
    tensors: Tensors,
    path: Path,
    rows: _Rows,
    rectangle: Rectangle,
    sums: _Sums,
    *,
    whole_rows: bool,
) -> None:
    seq = path.seq
    span, keys = slice(*rectangle.rows), slice(*rectangle.keys)
    s = tiles.scores(problem, tensors, seq, rectangle, derivative=True)
    q, k, v = s.operands
    dout = rows.dout[:, :, span].to(q.dtype).contiguous()
    probs = rows.probs(s.final, span)
    if sums.dv is not None:
        kept = probs if s.dropout is None else probs * s.dropout
        seq.key_view(sums.dv)[:, :, keys] += per_key(problem, kept, dout)
    if sums.dq is None and sums.dk is None and sums.dbias is None and not sums.doperands:
        return
    dprobs = tiles.per_query_head(tiles.per_key_head(dout, problem) @ v.transpose(-1, -2), problem)
    if s.dropout is not None:
        dprobs = dprobs.mul_(s.dropout)
    delta = rows.delta[:, :, span]
    if whole_rows and (problem.grad_dtype != problem.lse_dtype or sums.doperands):
        # delta from the probabilities of the whole row is more accurate than from out, which was rounded. If gradients
        # are added to other calls' gradients, the row may have other keys. A tensor that is added to whole rows has a
        # gradient that cancels to 0.
        delta = (probs * dprobs).sum(dim=-1)
        delta = delta if rows.dlse is None else delta - rows.dlse[:, :, span]
    dscores = dprobs.sub_(delta[..., None]).mul_(probs)
    if sums.dbias is not None and seq.bias is not None:
        add_reduced(sums.dbias[seq.bias_place], dscores, rectangle)
    if s.cap_slope is not None:
        dscores = dscores * s.cap_slope
    if s.mod_slope is not None or s.partials:
        # A function's value for a dropped pair, and its slope, may be infinite.
        kept = probs != 0
        if sums.doperands:
            _add_partials(problem, tensors, seq, rectangle, torch.where(kept, dscores, 0.0), s, sums)
        if s.mod_slope is not None:
            dscores = torch.where(kept, dscores * s.mod_slope, 0.0)
    if sums.dq is not None:
        seq.view(sums.dq)[:, :, span].add_(tiles.weighted_sum(problem, dscores, k), alpha=problem.softmax_scale)
    if sums.dk is not None:
        seq.key_view(sums.dk)[:, :, keys].add_(per_key(problem, dscores, q), alpha=problem.softmax_scale)


def _add_partials(
    problem: Problem,
    t: Tensors,
    seq: DenseSequences,
    rectangle: Rectangle,
    dscores: Tensor,
    s: tiles.Scores,
    sums: _Sums,
) -> None:
    """Adds to the gradients of the elements that the user's function loads."""
    function = score_function(problem, t)
    assert function is not None
    at = plan.pairs(seq, rectangle)
    for partial, slope in zip(function.graph.partials, s.partials, strict=True):
        total = sums.doperands[function.first + function.graph.nodes[partial.load].args[0]]
        if total is not None:
            places = function.places(partial.load, {"score": dscores, **at}, dscores.dtype)
            places = places[(None,) * (4 - places.dim())]
            share = torch.where(dscores != 0, slope * dscores, 0.0).double().sum_to_size(places.shape)
            # index_add_ adds one after the other, so that the bits are the same every time.
            total.index_add_(0, places.reshape(-1), share.reshape(-1))


def per_key(problem: Problem, weights: Tensor, x: Tensor) -> Tensor:
    """``weights^T @ x`` summed over the group: ``(1, num_heads_kv, keys, width)``."""
    return tiles.per_key_head(weights, problem).transpose(-1, -2) @ tiles.per_key_head(x, problem)


def add_reduced(total: Tensor, dscores: Tensor, rectangle: Rectangle) -> None:
    """Adds dscores to the bias's gradient, summed over the dimensions in which the bias was broadcast."""
    broadcast = [d for d in range(4) if total.shape[d] == 1 and dscores.shape[d] != 1]
    rows = slice(None) if total.shape[2] == 1 else slice(*rectangle.rows)
    keys = slice(None) if total.shape[3] == 1 else slice(*rectangle.keys)
    total[:, :, rows, keys] += dscores.sum(dim=broadcast, keepdim=True) if broadcast else dscores


def describe(problem: Problem) -> str:
    """The path in one line, for finite inputs and no gradient of lse."""
    if problem.bias_grad or not kernel_fits(problem):
        rows = plan.tile_rows(problem.num_heads_q)
        return f"tiles of {rows} x {plan.TILE_KEYS} scores recomputed from lse through matrix products"
    widened = "" if problem.dtype == problem.lse_dtype else ", in float32"
    return cpu_forward.describe(problem) + widened
