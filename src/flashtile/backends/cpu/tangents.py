"""A tile of scores with its tangent along directions of the inputs: what derivatives of derivatives are made of.

Plain PyTorch, with every feature, on any device. Arithmetic is in float32, or float64 for float64 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.backends.cpu import plan, tiles
from flashtile.backends.cpu.plan import DenseSequences, Rectangle
from flashtile.call.functions import Function, score_function
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


class TransformStep(NamedTuple):
    """A transform of a tile's scores: the tangent before it, its slope, and the slope's derivative; None for 0."""

    before: Tensor | None
    slope: Tensor
    curve: Tensor | None


@dataclass(frozen=True, eq=False)
class TangentTile:
    """A tile's probabilities, and the tangent of its scores; each ``(batch or 1, num_heads_q, rows, keys)``.

    Attributes:
        operands: The tile's rows of q, k and v.
        keep: The pairs that are kept.
        probs: Probabilities, 0 for dropped pairs.
        dropout: Factor of each probability, 0 or 1/(1-p); None without dropout.
        tangent: Tangent of the scores, 0 for dropped pairs; None for 0.
        steps: The user's function of scores and the softcap, each 0 for dropped pairs; none with slope 1.
    """

    operands: tuple[Tensor, Tensor, Tensor]
    keep: Tensor
    probs: Tensor
    dropout: Tensor | None
    tangent: Tensor | None
    steps: tuple[TransformStep, ...]

    @property
    def weights(self) -> Tensor:
        """The probabilities with dropout's factors."""
        return self.probs if self.dropout is None else self.probs * self.dropout


def tangent_tile(
    p: Problem, t: Tensors, given: Directions, seq: DenseSequences, tile: Rectangle, lse: Tensor, curves: bool = False
) -> TangentTile:
    """A tile from its rows' lse, in parts and +inf for an empty row; ``curves``: whether to compute its steps'."""
    q, k, v = tiles.operands(p, seq, tile)
    dtype = q.dtype
    of_q, of_k, _ = given.of(seq, tile, dtype)
    scores, tangent, steps = product(p, q, k), None, list[TransformStep]()
    if of_q is not None:
        tangent = product(p, of_q, k)
    if of_k is not None:
        of_keys = product(p, q, of_k)
        tangent = of_keys if tangent is None else tangent + of_keys
    if (function := score_function(p, t)) is not None:
        at = {"score": scores, **plan.pairs(seq, tile)}
        scores, slope, curve = modified(function, at, dtype, curves)
        if slope is not None:
            steps.append(TransformStep(tangent, slope, curve))
            tangent = None if tangent is None else tangent * slope
    if p.softcap > 0:
        capped = torch.tanh(scores / p.softcap)
        scores, slope = capped * p.softcap, 1 - capped * capped
        steps.append(TransformStep(tangent, slope, -2 / p.softcap * capped * slope))
        tangent = None if tangent is None else tangent * slope
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
    if function is not None:
        keep = keep & (probs != 0)  # where a function makes -inf of a score, its slope may be anything
    factor = None
    if t.rng_state is not None:
        factor = tiles.kept(p, t.rng_state, seq, tile).to(dtype) / (1 - p.dropout_p)
    # A select instead of a product with 0 discards NaN of a masked pair.
    steps = [TransformStep(_kept(keep, x.before), torch.where(keep, x.slope, 0.0), _kept(keep, x.curve)) for x in steps]
    return TangentTile((q, k, v), keep, probs, factor, _kept(keep, tangent), tuple(steps))


def _kept(keep: Tensor, x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.where(keep, x, 0.0)


def modified(
    function: Function, at: dict[str, Tensor], dtype: torch.dtype, with_curve: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A user's function of scores, its slope (None for 1), and the slope's derivative (None for 0) if asked for."""
    if not with_curve or function.graph.is_const(function.graph.slope, 1.0):
        return *tiles.modified(function, at, dtype, True)[:2], None
    final, slope, curve = function.curve_values(at, dtype)
    return final.expand_as(at["score"]), slope, curve


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
