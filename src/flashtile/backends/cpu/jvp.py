"""The forward-mode derivative of attention: tangents of out and lse from the inputs' tangents.

A loop over tiles of scores in plain PyTorch, with every feature, on any device; memory is linear in the lengths. Since
lse is known, one pass suffices: with probabilities P and the tangent dS of the scores, ``dlse = rowsum(P * dS)`` and
``dout = (P * dS) @ v + P @ dv - dlse * out``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.backends.cpu import plan, tiles
from flashtile.backends.cpu.plan import DenseSequences, Rectangle
from flashtile.call.arguments import Options
from flashtile.call.functions import score_function
from flashtile.call.problem import Problem, Tensors


@dataclass(frozen=True, eq=False)
class _Tangents:
    """The inputs' tangents, each like its input; None for 0."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None
    dsinks: Tensor | None


def jvp(
    tangents: tuple[Tensor | None, ...], out: Tensor, lse: Tensor, tensors: Tensors, options: Options
) -> tuple[Tensor, Tensor]:
    """The tangents of out and lse, in their dtypes, from the tangents of q, k, v, attn_bias and sinks; None for 0."""
    with torch._C._DisableAutocast():  # or matrix products of float32 take autocast's dtype
        return _tiled(_Tangents(*tangents), out, lse, tensors, Problem.of(tensors, options))


def _tiled(given: _Tangents, out: Tensor, lse: Tensor, tensors: Tensors, problem: Problem) -> tuple[Tensor, Tensor]:
    dtype = problem.lse_dtype
    parts = lse if problem.large_scores else torch.stack([lse, torch.zeros_like(lse)], dim=-1)
    dout, dlse = out.new_zeros(out.shape, dtype=dtype), torch.zeros_like(parts[..., 0])
    parts = torch.where(parts == -torch.inf, torch.inf, parts)  # makes the probabilities of an empty row 0
    tile_rows = plan.tile_rows(problem.num_heads_q * (1 if problem.varlen else max(1, problem.batch)))
    for seq in plan.sequences(problem, tensors, lambda rows, keys: 1 if problem.varlen else problem.batch):
        sums = seq.view(dout), seq.lse_view(dlse)
        for block in plan.blocks_of(problem.band, seq, tile_rows=tile_rows):
            for rectangle in block:
                _add_tile(problem, tensors, given, seq, rectangle, seq.lse_view(parts), sums)
    if given.dsinks is not None and tensors.sinks is not None:
        sinks, dsinks = (x.to(dtype)[:, None] for x in (tensors.sinks, given.dsinks))
        dlse += _exp(sinks[..., None], parts).squeeze(-1) * dsinks
    dout -= dlse.transpose(-1, -2)[..., None] * out.to(dtype)
    return dout.to(out.dtype), dlse


def _add_tile(
    p: Problem,
    t: Tensors,
    given: _Tangents,
    seq: DenseSequences,
    tile: Rectangle,
    lse: Tensor,
    sums: tuple[Tensor, Tensor],
) -> None:
    """Adds a tile's share to dlse, and to dout, which ``_tiled`` completes. All tensors have heads first."""
    rows, keys = slice(*tile.rows), slice(*tile.keys)
    q, k, v = tiles.operands(p, seq, tile)
    dtype = q.dtype
    scores, dscores = _product(p, q, k), None
    if given.dq is not None:
        dscores = _product(p, seq.view(given.dq)[:, :, rows].to(dtype), k)
    if given.dk is not None:
        of_keys = _product(p, q, seq.key_view(given.dk)[:, :, keys].to(dtype))
        dscores = of_keys if dscores is None else dscores + of_keys
    if (function := score_function(p, t)) is not None:
        at = {"score": scores, **plan.pairs(seq, tile)}
        scores, slope, _ = tiles.modified(function, at, dtype, True)
        dscores = dscores if slope is None or dscores is None else dscores * slope
    if p.softcap > 0:
        capped = torch.tanh(scores / p.softcap)
        scores = capped * p.softcap
        dscores = None if dscores is None else dscores * (1 - capped * capped)
    if seq.slopes is not None:
        scores = scores - seq.slopes.to(dtype) * plan.distances(seq, tile)
    if seq.bias is not None:
        scores = scores + plan.part(seq.bias, tile).to(dtype)
    if given.dbias is not None:
        dbias = plan.part(plan.four_dimensional(given.dbias)[seq.bias_place], tile).to(dtype)
        dscores = dbias if dscores is None else dscores + dbias
    keep = p.band.dense(seq.seqlen_q, seq.seqlen_k, rows=tile.rows, keys=tile.keys, device=q.device)
    for kept in plan.selections(seq, tile, dtype):
        keep = keep & kept
    probs = _exp(torch.where(keep, scores, -torch.inf), lse[:, :, rows])
    kept = probs
    if t.rng_state is not None:
        kept = torch.where(tiles.kept(p, t.rng_state, seq, tile), probs / (1 - p.dropout_p), 0.0)
    dout, dlse = sums
    if dscores is not None:
        # A select instead of a product with 0 discards NaN of a masked pair.
        dscores = torch.where(keep, dscores, 0.0)
        dlse[:, :, rows] += (probs * dscores).sum(dim=-1)
        dout[:, :, rows] += tiles.weighted_sum(p, kept * dscores, v)
    if given.dv is not None:
        dout[:, :, rows] += tiles.weighted_sum(p, kept, seq.key_view(given.dv)[:, :, keys].to(dtype))


def _exp(scores: Tensor, lse: Tensor) -> Tensor:
    """The probabilities for rows' scores, from lse in parts."""
    return torch.exp(scores - lse[..., :1] - lse[..., 1:])


def _product(p: Problem, q: Tensor, k: Tensor) -> Tensor:
    """``softmax_scale * q @ k^T`` of each query head with its key head."""
    return tiles.per_query_head(tiles.per_key_head(q, p) @ k.transpose(-1, -2), p) * p.softmax_scale
