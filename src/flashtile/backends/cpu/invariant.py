"""The forward of batch-invariant calls: tiles of one shape, at places that a row's position and a key's number say.

A matrix product rounds by its shape, and may by the place of a row in it. Here all have ``ROWS`` rows of each head of a
group and ``KEYS`` keys, filled up with zeros, a row at position p is row ``p % ROWS``, and key j is key ``j % KEYS``.
Blocks of keys follow one another from the first on; one that a row masks adds exact zeros to it. So a row's bits are
the same whatever other rows and keys the call has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtile.backends.cpu import plan, tiles
from flashtile.backends.cpu.plan import DenseSequences, KeptPairs, Rectangle
from flashtile.call.functions import score_function
from flashtile.call.problem import Problem, Tensors
from flashtile.core import states

ROWS, KEYS = 32, 256
State = tuple[Tensor, Tensor]


def forward(problem: Problem, tensors: Tensors, state: State, first: int) -> State:
    """Out and lse of all rows that keep a key, written into ``state``, which has rows without keys.

    For a user's functions, sequences are numbered from ``first``.
    """
    for seq in plan.sequences(problem, tensors, lambda rows, keys: 1, first):
        out, lse = seq.view(state[0]), seq.lse_view(state[1])
        for row in range(-((seq.seqlen_k - seq.seqlen_q) % ROWS), seq.seqlen_q, ROWS):
            here = slice(max(row, 0), min(row + ROWS, seq.seqlen_q))
            of_tile = slice(here.start - row, here.stop - row)
            tile = _rows(problem, tensors, seq, row)
            for whole, part in zip((out, lse), tile, strict=True):
                whole[:, :, here] = part[:, :, of_tile].to(whole.dtype)
    return state


def _rows(problem: Problem, tensors: Tensors, seq: DenseSequences, row: int) -> State:
    """Out and lse of a tile that begins with ``row``, which may be before the first one."""
    dtype, lengths = problem.lse_dtype, (seq.seqlen_q, seq.seqlen_k)
    rows = (max(row, 0), min(row + ROWS, seq.seqlen_q))
    q = _placed(seq.q[:, :, slice(*rows)].to(dtype), rows[0] - row, ROWS)
    low, high = problem.band.any_keys(*rows, *lengths)
    full_low, full_high = problem.band.all_keys(*rows, *lengths)
    top = q.new_full(q.shape[:-1], -torch.inf)
    total, acc = torch.zeros_like(top), q.new_zeros(*q.shape[:-1], problem.head_dim_v)
    for key in range(low // KEYS * KEYS, high, KEYS):
        keys = (max(key, low), min(key + KEYS, high))
        kind = KeptPairs.FULL if full_low <= keys[0] and keys[1] <= full_high else KeptPairs.EDGE
        scores = _scores(problem, tensors, seq, q, (row, key), Rectangle(rows, keys, kind))
        new_top = torch.maximum(top, scores.amax(dim=-1))
        finite = torch.where(new_top == -torch.inf, 0.0, new_top)
        rescale, probs = torch.exp(top - finite), torch.exp(scores - finite[..., None])
        v = _placed(seq.v[:, :, slice(*keys)].to(dtype), keys[0] - key, KEYS)
        total = total * rescale + probs.sum(dim=-1)
        acc = acc * rescale[..., None] + tiles.weighted_sum(problem, probs, v)
        top = new_top
    if tensors.sinks is not None:
        sinks = tensors.sinks.to(dtype)[:, None].expand(top.shape)
        new_top = torch.maximum(top, sinks)
        finite = torch.where(new_top == -torch.inf, 0.0, new_top)
        rescale = torch.exp(top - finite)
        total, acc, top = total * rescale + torch.exp(sinks - finite), acc * rescale[..., None], new_top
    empty = total == 0
    out = torch.where(empty[..., None], 0.0, acc / torch.where(empty, 1.0, total)[..., None])
    log_sum = torch.log(total)
    lse = states.in_parts(top, log_sum) if problem.large_scores else torch.where(empty, -torch.inf, top + log_sum)
    return out, lse


def _scores(
    problem: Problem, tensors: Tensors, seq: DenseSequences, q: Tensor, first: tuple[int, int], there: Rectangle
) -> Tensor:
    """Scores ``(1, num_heads_q, ROWS, KEYS)`` from a row and a key on, -inf where a pair is dropped or is not there."""
    (row, key), dtype = first, problem.lse_dtype
    k = _placed(seq.k[:, :, slice(*there.keys)].to(dtype), there.keys[0] - key, KEYS)
    found = tiles.per_key_head(q, problem) @ k.transpose(-1, -2)
    found = tiles.per_query_head(found, problem).mul_(problem.softmax_scale)
    whole = Rectangle((row, row + ROWS), (key, key + KEYS), there.kind)
    # By vectors and by single elements some functions round differently, so they get whole tiles too.
    if (function := score_function(problem, tensors)) is not None:
        found, _, _ = tiles.modified(function, {"score": found, **plan.pairs(seq, whole)}, dtype, False)
    if problem.softcap > 0:
        found = torch.tanh(found / problem.softcap) * problem.softcap
    if problem.large_scores and seq.slopes is not None:
        found = found - seq.slopes.to(dtype) * plan.distances(seq, whole)
    of_rows, of_keys = slice(*(n - row for n in there.rows)), slice(*(n - key for n in there.keys))
    kept = found[:, :, of_rows, of_keys]
    bias = plan.tile_bias(problem, seq, there, dtype, alibi=not problem.large_scores)
    if bias is not None:
        kept = torch.where(bias == -torch.inf, -torch.inf, kept + bias)
    scores = torch.full_like(found, -torch.inf)
    scores[:, :, of_rows, of_keys] = kept
    return scores


def _placed(rows: Tensor, first: int, count: int) -> Tensor:
    """``(..., rows, dim)`` as rows from ``first`` on of ``count`` ones, the others 0; contiguous."""
    return F.pad(rows, (0, 0, first, count - first - rows.shape[-2])).contiguous()


def describe() -> str:
    """The path in one line."""
    return f"tiles of {ROWS} x {KEYS} scores through matrix products, at places that positions say"
