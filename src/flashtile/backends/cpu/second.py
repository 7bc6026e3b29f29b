"""The derivative of the backward, in reverse mode: second derivatives of attention.

Two passes over tiles of scores in plain PyTorch, on any device; memory is linear in the lengths. What arrives for dq,
dk, dv, dbias and dsinks are directions of the inputs: the sum of all these products is the change of
``sum(dout * out) + sum(dlse * lse)`` along them, which ``jvp`` would give. Computed are the gradients of that number;
docs/algorithm.md, "Second derivatives".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.backends.cpu import backward, jvp, plan, tiles
from flashtile.backends.cpu.plan import DenseSequences, Rectangle
from flashtile.backends.cpu.tangents import (
    Directions,
    TangentTile,
    height,
    in_parts,
    of_pairs,
    probabilities,
    tangent_tile,
)
from flashtile.call.backend import SecondGradients
from flashtile.call.problem import Problem, Tensors


class _RowNumbers(NamedTuple):
    """Numbers of each row of a sequence, heads first, in the dtype of the arithmetic.

    Attributes:
        lse: In parts, +inf for an empty row.
        dout: The gradient of out.
        total: ``rowsum(P)``, which is 1 but for lse's rounding: sums that cancel are divided by it.
        mu: ``rowsum(P * dS)``, the tangent of lse.
        delta: ``rowsum(P * dP)``, from ``_finish_rows`` on less dlse.
        rho: ``rowsum(P * (dS * dP + H))``, from ``_finish_rows`` on ``rowsum(P * R)``: see ``_add_gradients``.
        out: The tangent of out, until ``_finish_rows`` without ``-mu * out``.
    """

    lse: Tensor
    dout: Tensor
    total: Tensor
    mu: Tensor
    delta: Tensor
    rho: Tensor
    out: Tensor

    def of(self, tile: Rectangle) -> _RowNumbers:
        """The rows of a tile."""
        return _RowNumbers(*(x[:, :, slice(*tile.rows)] for x in self))


def second(
    directions: tuple[Tensor | None, ...], dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor,
    tensors: Tensors, problem: Problem,
) -> SecondGradients:  # fmt: skip
    """The gradients from what arrives for dq, dk, dv, dbias and dsinks; None for 0.

    Args:
        directions: Each like its gradient.
        dout: The gradient of out that the backward had.
        dlse: The same of lse, or None for 0.
        out: The forward's.
        lse: The forward's, with ``large_scores`` in parts.
        tensors: The call's tensors; what a user's function of scores reads is constant.
        problem: The call's problem.
    """
    with torch._C._DisableAutocast():
        return _tiled(Directions(*directions), dout, dlse, out, lse, tensors, problem)


def _tiled(
    given: Directions, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, t: Tensors, p: Problem
) -> SecondGradients:
    parts, made = in_parts(p, lse), [x.new_zeros(x.shape, dtype=p.lse_dtype) for x in (t.q, t.k, t.v, out)]
    bias, sinks = (None if x is None else x.new_zeros(x.shape, dtype=p.lse_dtype) for x in (t.attn_bias, t.sinks))
    total, mu, delta, rho = (torch.zeros_like(parts[..., 0]) for _ in range(4))
    if t.sinks is not None:
        total += probabilities(_of_heads(t.sinks, p), parts).squeeze(-1)
        if given.sinks is not None:
            mu += total * _of_heads(given.sinks, p).squeeze(-1)
    found = SecondGradients(made[0], made[1], made[2], bias, sinks, made[3], dlse)
    for seq in plan.sequences(p, t, lambda rows, keys: 1 if p.varlen else p.batch):
        rows = _RowNumbers(
            seq.lse_view(parts), seq.view(dout).to(p.lse_dtype), seq.lse_view(total), seq.lse_view(mu),
            seq.lse_view(delta), seq.lse_view(rho), seq.view(found.dout),
        )  # fmt: skip
        places = [place for block in plan.blocks_of(p.band, seq, tile_rows=height(p)) for place in block]
        for place in places:
            tile = tangent_tile(p, t, given, seq, place, rows.of(place).lse)
            jvp.add_tile(p, given, seq, place, tile, (rows.out, rows.mu))
            _add_to_rows(p, given, seq, place, tile, rows.of(place))
        _finish_rows(p, t, given, rows, seq.view(out), None if dlse is None else seq.lse_view(dlse), sinks)
        for place in places:
            tile = tangent_tile(p, t, given, seq, place, rows.of(place).lse, curves=True)
            _add_gradients(p, given, seq, place, tile, rows.of(place), found)
    return SecondGradients(
        found.q.to(t.q.dtype), found.k.to(t.k.dtype), found.v.to(t.v.dtype), _like(bias, t.attn_bias),
        _like(sinks, t.sinks), found.dout.to(dout.dtype), _like(mu, dlse),
    )  # fmt: skip


def _like(x: Tensor | None, given: Tensor | None) -> Tensor | None:
    """A gradient in the dtype of what it is the gradient of; None where that is not given."""
    return None if x is None or given is None else x.to(given.dtype)


def _of_values(
    p: Problem, given: Directions, seq: DenseSequences, place: Rectangle, tile: TangentTile, dout: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Products of dout with the values (dP) and with their direction (H; None for 0), with dropout's factors."""
    of_v = given.of(seq, place, dout.dtype)[2]
    dprobs, of_direction = (None if x is None else of_pairs(p, dout, x) for x in (tile.operands[2], of_v))
    if tile.dropout is not None:
        dprobs, of_direction = (None if x is None else x * tile.dropout for x in (dprobs, of_direction))
    dprobs, of_direction = (None if x is None else torch.where(tile.keep, x, 0.0) for x in (dprobs, of_direction))
    assert dprobs is not None
    return dprobs, of_direction


def _add_to_rows(
    p: Problem, given: Directions, seq: DenseSequences, place: Rectangle, tile: TangentTile, rows: _RowNumbers
) -> None:
    dprobs, of_direction = _of_values(p, given, seq, place, tile, rows.dout)
    rows.total.add_(tile.probs.sum(dim=-1))
    rows.delta.add_((tile.probs * dprobs).sum(dim=-1))
    if tile.tangent is not None:
        rows.rho.add_((tile.probs * tile.tangent * dprobs).sum(dim=-1))
    if of_direction is not None:
        rows.rho.add_((tile.probs * of_direction).sum(dim=-1))


def _finish_rows(
    p: Problem, t: Tensors, given: Directions, rows: _RowNumbers, out: Tensor, dlse: Tensor | None, sinks: Tensor | None
) -> None:
    """Completes the numbers of rows, and adds to the sinks' gradient. A sink is a key with value 0."""
    total = torch.where(rows.total > 0, rows.total, 1.0)
    for x in (rows.mu, rows.delta, rows.rho, rows.out):
        x.div_(total if x.dim() == total.dim() else total[..., None])
    whole = rows.delta.clone()
    if dlse is not None:
        rows.delta.sub_(dlse.to(p.lse_dtype))
    rows.rho.sub_(rows.mu * (rows.delta + whole))
    rows.out.sub_(rows.mu[..., None] * out.to(p.lse_dtype))
    if t.sinks is not None and sinks is not None:
        weight = rows.rho
        if given.sinks is not None:
            weight = weight + given.sinks.to(p.lse_dtype)[:, None] * rows.delta
        sinks.sub_((probabilities(_of_heads(t.sinks, p), rows.lse).squeeze(-1) * weight).sum(dim=(0, 2)))


def _of_heads(x: Tensor, p: Problem) -> Tensor:
    """A number for each head, to go with scores."""
    return x.to(p.lse_dtype)[:, None, None]


def _add_gradients(
    p: Problem,
    given: Directions,
    seq: DenseSequences,
    place: Rectangle,
    tile: TangentTile,
    rows: _RowNumbers,
    found: SecondGradients,
) -> None:
    """Adds a tile's share of the gradients of q, k, v and the bias.

    With T the tangent of the scores, the number is ``rowsum(P * (T * dP + H)) - mu * (rowsum(P * dP) - dlse)``, summed.
    Its gradient is ``dS = P * (dP - delta)`` with respect to T, and with respect to the scores ``P * (R - rho)`` where
    ``R = T * (dP - delta) + H - mu * dP``.
    """
    q, k, v = tile.operands
    of_q, of_k, _ = given.of(seq, place, v.dtype)
    keys, span = slice(*place.keys), slice(*place.rows)
    dprobs, of_direction = _of_values(p, given, seq, place, tile, rows.dout)
    mu, delta, rho = (x[..., None] for x in (rows.mu, rows.delta, rows.rho))
    tangent = torch.zeros_like(tile.probs) if tile.tangent is None else tile.tangent
    weight = tangent * (dprobs - delta) - mu * dprobs - rho
    if of_direction is not None:
        weight = weight + of_direction
    of_tangent, of_scores = tile.probs * (dprobs - delta), tile.probs * weight
    if found.bias is not None and seq.bias is not None:
        backward.add_reduced(plan.four_dimensional(found.bias)[seq.bias_place], of_scores, place)
    for before, slope, curve in reversed(tile.steps):
        of_scores = of_scores * slope
        if before is not None and curve is not None:
            of_scores = of_scores + of_tangent * before * curve
        of_tangent = of_tangent * slope
    of_rows, of_keys = tiles.weighted_sum(p, of_scores, k), backward.per_key(p, of_scores, q)
    if of_k is not None:
        of_rows = of_rows + tiles.weighted_sum(p, of_tangent, of_k)
    if of_q is not None:
        of_keys = of_keys + backward.per_key(p, of_tangent, of_q)
    seq.view(found.q)[:, :, span].add_(of_rows, alpha=p.softmax_scale)
    seq.key_view(found.k)[:, :, keys].add_(of_keys, alpha=p.softmax_scale)
    seq.key_view(found.v)[:, :, keys] += backward.per_key(p, tile.weights * (tangent - mu), rows.dout)
