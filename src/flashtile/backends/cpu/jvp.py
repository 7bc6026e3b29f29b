"""The forward-mode derivative of attention: tangents of out and lse from the inputs' tangents.

A loop over tiles of scores in plain PyTorch, with every feature, on any device; memory is linear in the lengths. Since
lse is known, one pass suffices: with probabilities P and the tangent dS of the scores, ``dlse = rowsum(P * dS)`` and
``dout = (P * dS) @ v + P @ dv - dlse * out``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.backends.cpu import plan, tiles
from flashtile.backends.cpu.plan import DenseSequences, Rectangle
from flashtile.backends.cpu.tangents import (
    Directions,
    TangentTile,
    height,
    in_parts,
    probabilities,
    tangent_tile,
)
from flashtile.call.arguments import Options
from flashtile.call.problem import Problem, Tensors


def jvp(
    tangents: tuple[Tensor | None, ...], out: Tensor, lse: Tensor, tensors: Tensors, options: Options
) -> tuple[Tensor, Tensor]:
    """The tangents of out and lse, in their dtypes, from the tangents of q, k, v, attn_bias and sinks; None for 0."""
    with torch._C._DisableAutocast():  # or matrix products of float32 take autocast's dtype
        return _tiled(Directions(*tangents), out, lse, tensors, Problem.of(tensors, options))


def _tiled(given: Directions, out: Tensor, lse: Tensor, tensors: Tensors, problem: Problem) -> tuple[Tensor, Tensor]:
    dtype, parts = problem.lse_dtype, in_parts(problem, lse)
    dout, dlse = out.new_zeros(out.shape, dtype=dtype), torch.zeros_like(parts[..., 0])
    for seq in plan.sequences(problem, tensors, lambda rows, keys: 1 if problem.varlen else problem.batch):
        sums, of_rows = (seq.view(dout), seq.lse_view(dlse)), seq.lse_view(parts)
        for block in plan.blocks_of(problem.band, seq, tile_rows=height(problem)):
            for rectangle in block:
                tile = tangent_tile(problem, tensors, given, seq, rectangle, of_rows[:, :, slice(*rectangle.rows)])
                add_tile(problem, given, seq, rectangle, tile, sums)
    if given.sinks is not None and tensors.sinks is not None:
        sinks, dsinks = (x.to(dtype)[:, None] for x in (tensors.sinks, given.sinks))
        dlse += probabilities(sinks[..., None], parts).squeeze(-1) * dsinks
    dout -= dlse.transpose(-1, -2)[..., None] * out.to(dtype)
    return dout.to(out.dtype), dlse


def add_tile(
    p: Problem, given: Directions, seq: DenseSequences, place: Rectangle, tile: TangentTile, sums: tuple[Tensor, Tensor]
) -> None:
    """Adds a tile's share to dlse, and to dout, which lacks ``dlse * out`` then. All tensors have heads first."""
    rows, v = slice(*place.rows), tile.operands[2]
    dout, dlse = sums
    if tile.tangent is not None:
        dlse[:, :, rows] += (tile.probs * tile.tangent).sum(dim=-1)
        dout[:, :, rows] += tiles.weighted_sum(p, tile.weights * tile.tangent, v)
    of_v = given.of(seq, place, v.dtype)[2]
    if of_v is not None:
        dout[:, :, rows] += tiles.weighted_sum(p, tile.weights, of_v)
