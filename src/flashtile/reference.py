"""The oracle: the definition of a call, in plain PyTorch over the whole score matrix.

It takes O(N^2) memory and is written for readability. Every rule of docs/semantics.md appears here once, with its
number; every backend is tested against it in float64, with gradients from PyTorch's autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile import philox
from flashtile.problem import Problem, Tensors


def attention(problem: Problem, tensors: Tensors, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Attention by definition.

    Args:
        problem: The call.
        tensors: Its tensors; gradients flow to q, k, v, attn_bias and sinks.
        dtype: The dtype of all arithmetic. float64 is the oracle; the input dtype gives plain PyTorch's rounding error.

    Returns:
        out ``(batch, seqlen_q, num_heads_q, head_dim_v)`` and lse ``(batch, num_heads_q, seqlen_q)``, or for packed
        sequences ``(total_q, num_heads_q, head_dim_v)`` and ``(num_heads_q, total_q)``, both in ``dtype``.
    """
    if not problem.varlen:
        return _dense(problem, tensors, dtype, range(problem.batch))
    assert tensors.cu_seqlens_q is not None and tensors.cu_seqlens_k is not None
    bounds_q, bounds_k = tensors.cu_seqlens_q.tolist(), tensors.cu_seqlens_k.tolist()
    outs, lses = [], []
    for b in range(problem.batch):
        rows, keys = slice(bounds_q[b], bounds_q[b + 1]), slice(bounds_k[b], bounds_k[b + 1])
        out, lse = _dense(problem, _sequence(tensors, b, rows, keys), dtype, range(b, b + 1))
        outs.append(out[0])
        lses.append(lse[0])
    # Rows past the last bound belong to no sequence: rules 8 and 9.
    rest = tensors.q.shape[0] - bounds_q[-1]
    outs.append(torch.zeros(rest, problem.num_heads_q, problem.head_dim_v, dtype=dtype, device=tensors.q.device))
    lses.append(torch.full((problem.num_heads_q, rest), -torch.inf, dtype=dtype, device=tensors.q.device))
    return torch.cat(outs), torch.cat(lses, dim=1)


def _sequence(t: Tensors, b: int, rows: slice, keys: slice) -> Tensors:
    """Sequence b of a packed call as a dense call of batch 1."""
    num_rows, num_keys = rows.stop - rows.start, keys.stop - keys.start

    def corner(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x[(None,) * (4 - x.dim())]
        x = x[b : b + 1] if x.shape[0] > 1 else x
        x = x[:, :, :num_rows] if x.shape[2] > 1 else x
        return x[..., :num_keys] if x.shape[3] > 1 else x

    slopes = t.alibi_slopes
    return Tensors(
        t.q[None, rows],
        t.k[None, keys],
        t.v[None, keys],
        slopes[b : b + 1] if slopes is not None and slopes.dim() == 2 else slopes,
        corner(t.attn_mask),
        corner(t.attn_bias),
        t.sinks,
        rng_state=t.rng_state,
    )


def _dense(p: Problem, t: Tensors, dtype: torch.dtype, batch: range) -> tuple[Tensor, Tensor]:
    q = t.q.to(dtype).transpose(1, 2)
    k, v = (x.to(dtype).transpose(1, 2).repeat_interleave(p.group_size, dim=1) for x in (t.k, t.v))
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    device = q.device

    scores = q @ k.transpose(-1, -2) * p.softmax_scale  # rule 1
    if p.softcap > 0:  # rule 2
        scores = p.softcap * torch.tanh(scores / p.softcap)
    if t.alibi_slopes is not None:  # rule 3
        i = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
        distance = (i - torch.arange(seqlen_k, device=device)).abs()
        scores = scores - t.alibi_slopes.to(dtype)[..., None, None] * distance
    if t.attn_bias is not None:  # rule 4
        scores = scores + t.attn_bias.to(dtype)

    keep = p.band.dense(seqlen_q, seqlen_k, device=device).expand(scores.shape)  # rule 5
    if t.attn_mask is not None:
        keep = keep & t.attn_mask
    scores = torch.where(keep, scores, -torch.inf)  # rule 10: select, so that NaN from q or k affects kept pairs only

    lse = _logsumexp(scores, t.sinks)  # rule 6
    probs = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])  # rule 8: a row without keys is 0
    if t.rng_state is not None:  # rule 7
        kept = philox.keep(t.rng_state, p.dropout_p, batch, p.num_heads_q, (0, seqlen_q), (0, seqlen_k))
        probs = torch.where(kept, probs / (1 - p.dropout_p), 0.0)
    return (probs @ v).transpose(1, 2), lse  # rule 10: a NaN of v reaches rows that mask its key too


def _logsumexp(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Natural log of each row's sum of exponentials, the sink's included; -inf for a row without any."""
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], -torch.inf)
    top = scores.detach().amax(dim=-1)
    top = torch.where(top == -torch.inf, 0.0, top)
    total = torch.exp(scores - top[..., None]).sum(dim=-1)
    empty = total == 0
    return torch.where(empty, -torch.inf, torch.log(torch.where(empty, 1.0, total)) + top)
