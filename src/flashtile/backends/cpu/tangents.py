"""A tile of scores with its tangent along directions of the inputs: what derivatives of derivatives are made of.

Plain PyTorch, with every feature, on any device. Arithmetic is in float32, or float64 for float64 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.backends.cpu import plan, tiles
from flashtile.backends.cpu.plan import DenseSequences, Rectangle
from flashtile.call.functions import score_function
from flashtile.call.problem import Problem, Tensors


@dataclass(frozen=True, eq=False)
class Directions:
    """Directions of the inputs, each like its input; None for 0."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None

    def of(
        self, seq: DenseSequences, tile: Rectangle, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The directions of a tile: of its rows of q, of its keys and of their values; heads first."""
        rows, keys = slice(*tile.rows), slice(*tile.keys)
        q = None if self.q is None else seq.view(self.q)[:, :, rows].to(dtype)
        k, v = (None if x is None else seq.key_view(x)[:, :, keys].to(dtype) for x in (self.k, self.v))
        return q, k, v


@dataclass(frozen=True, eq=False)
class TangentTile:
    """A tile's probabilities, and the tangent of its scores; each ``(batch or 1, num_heads_q, rows, keys)``.

    Attributes:
        operands: The tile's rows of q, k and v.
        keep: The pairs that are kept.
        probs: Probabilities, 0 for dropped pairs.
        dropout: Factor of each probability, 0 or 1/(1-p); None without dropout.
        tangent: Tangent of the scores, 0 for dropped pairs; None for 0.
        before: The tangent before the softcap, likewise, without the bias's.
        capped: The scores before the softcap, by its ``tanh``; None without one.
    """

    operands: tuple[Tensor, Tensor, Tensor]
    keep: Tensor
    probs: Tensor
    dropout: Tensor | None
    tangent: Tensor | None
    before: Tensor | None
    capped: Tensor | None

    @property
    def weights(self) -> Tensor:
        """The probabilities with dropout's factors."""
        return self.probs if self.dropout is None else self.probs * self.dropout


def tangent_tile(
    p: Problem, t: Tensors, given: Directions, seq: DenseSequences, tile: Rectangle, lse: Tensor
) -> TangentTile:
    """A tile from its rows' lse, in parts and +inf for an empty row."""
    q, k, v = tiles.operands(p, seq, tile)
    dtype = q.dtype
    of_q, of_k, _ = given.of(seq, tile, dtype)
    scores, before = product(p, q, k), None
    if of_q is not None:
        before = product(p, of_q, k)
    if of_k is not None:
        of_keys = product(p, q, of_k)
        before = of_keys if before is None else before + of_keys
    if (function := score_function(p, t)) is not None:
        at = {"score": scores, **plan.pairs(seq, tile)}
        scores, slope, _ = tiles.modified(function, at, dtype, True)
        before = before if slope is None or before is None else before * slope
    tangent, capped = before, None
    if p.softcap > 0:
        capped = torch.tanh(scores / p.softcap)
        scores = capped * p.softcap
        tangent = None if before is None else before * (1 - capped * capped)
    if seq.slopes is not None:
        scores = scores - seq.slopes.to(dtype) * plan.distances(seq, tile)
    if seq.bias is not None:
        scores = scores + plan.part(seq.bias, tile).to(dtype)
    if given.bias is not None:
        of_bias = plan.part(plan.four_dimensional(given.bias)[seq.bias_place], tile).to(dtype)
        tangent = of_bias if tangent is None else tangent + of_bias
    keep = p.band.dense(seq.seqlen_q, seq.seqlen_k, rows=tile.rows, keys=tile.keys, device=q.device)
    for kept in plan.selections(seq, tile, dtype):
        keep = keep & kept
    probs = probabilities(torch.where(keep, scores, -torch.inf), lse)
    factor = None
    if t.rng_state is not None:
        factor = tiles.kept(p, t.rng_state, seq, tile).to(dtype) / (1 - p.dropout_p)
    # A select instead of a product with 0 discards NaN of a masked pair.
    before, tangent = (None if x is None else torch.where(keep, x, 0.0) for x in (before, tangent))
    return TangentTile((q, k, v), keep, probs, factor, tangent, before, capped)


def probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """The probabilities for rows' scores, from lse in parts."""
    return torch.exp(scores - lse[..., :1] - lse[..., 1:])


def product(p: Problem, q: Tensor, k: Tensor) -> Tensor:
    """``softmax_scale * q @ k^T`` of each query head with its key head."""
    return of_pairs(p, q, k) * p.softmax_scale


def of_pairs(p: Problem, rows: Tensor, keys: Tensor) -> Tensor:
    """``rows @ keys^T`` of each query head with its key head."""
    return tiles.per_query_head(tiles.per_key_head(rows, p) @ keys.transpose(-1, -2), p)


def in_parts(problem: Problem, lse: Tensor) -> Tensor:
    """The parts of lse, +inf for an empty row, which makes its probabilities 0."""
    parts = lse if problem.large_scores else torch.stack([lse, torch.zeros_like(lse)], dim=-1)
    return torch.where(parts == -torch.inf, torch.inf, parts)


def height(problem: Problem) -> int:
    """Rows of a tile."""
    return plan.tile_rows(problem.num_heads_q * (1 if problem.varlen else max(1, problem.batch)))
