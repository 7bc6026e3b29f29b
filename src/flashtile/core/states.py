"""The monoid of attention states, which are (out, lse) over a set of keys; docs/algorithm.md, "The monoid"."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Partial:
    """Attention over some of the keys, which a forward can start from; (0, -inf) for no keys.

    A forward planned with ``problem.but(out_dtype=torch.float32)`` returns the out and lse of such a state. Every
    forward's plan, ``plan(tensors, partial)``, merges a state over other keys; if its out is not float32, it rounds
    once. Sinks count in every call that has them: give them to one call of a chain.

    Attributes:
        out: ``(batch, seqlen_q, num_heads_q, head_dim_v)``, or ``(total_q, num_heads_q, head_dim_v)``; float32 (float64
            for float64 inputs), contiguous, on 16 bytes, as new tensors are.
        lse: ``(batch, num_heads_q, seqlen_q)``, or ``(num_heads_q, total_q)``; of the same dtype, contiguous, natural
            log. If the problem has ``large_scores``, lse is ``in_parts``.
    """

    out: Tensor
    lse: Tensor

    def __post_init__(self) -> None:
        """Raises ValueError for tensors that kernels would misread."""
        if not (self.out.is_contiguous() and self.lse.is_contiguous()):
            raise ValueError("a partial result must be contiguous")


def in_parts(top: Tensor, log_sum: Tensor) -> Tensor:
    """``top + log_sum`` as two numbers of the same dtype, in a new last dimension: the rounded sum, and its error.

    A float32 near 1e9 cannot hold the log of a count, so rows with only such large scores need both numbers: a
        probability
    is ``exp((score - lse[..., 0]) - lse[..., 1])``, and the first difference is exact for scores near the maximum.

    Args:
        top: ``(..., rows)``, the largest score of each row, -inf for a row without keys.
        log_sum: ``(..., rows)``, natural log of the sum of ``exp(score - top)``; any number for a row without keys.

    Returns:
        ``(..., rows, 2)``; (-inf, 0) for a row without keys.
    """
    empty = top == -torch.inf
    log_sum = torch.where(empty, 0.0, log_sum)
    lse = top + log_sum
    return torch.stack([lse, torch.where(empty, 0.0, log_sum - (lse - top))], dim=-1)


def in_one(lse: Tensor, out: Tensor) -> Tensor:
    """The lse of out's rows, or its gradient, in one part: of two parts the first, made contiguous."""
    return lse[..., 0].contiguous() if lse.dim() == out.dim() else lse


def with_max_scores(lse: Tensor, max_scores: Tensor) -> Tensor:
    """Lse and the largest scores of its rows as one tensor, with a last dimension of 2: what operators return.

    Each of the two lies in memory as it would alone, so kernels know neither of the other.

    Args:
        lse: ``(..., rows)``, or ``(..., rows, 2)``, ``in_parts``.
        max_scores: ``(..., rows)`` in lse's dtype, -inf for a row without keys. Each part of lse gets them.
    """
    if max_scores.dim() < lse.dim():
        max_scores = max_scores[..., None].expand(lse.shape)
    return torch.stack([lse, max_scores]).movedim(0, -1)


def without_max_scores(lse: Tensor) -> Tensor:
    """Lse, or its gradient, out of ``with_max_scores``; contiguous."""
    return lse[..., 0].contiguous()


def asked_for(out: Tensor, lse: Tensor, with_lse: bool, with_max_scores: bool) -> Tensor | tuple[Tensor, ...]:
    """What a public function returns, of an operator's out and lse."""
    if not with_max_scores:
        return (out, in_one(lse, out)) if with_lse else out
    # An element of several parts: the first.
    max_scores = in_one(lse[..., 1].detach(), out).contiguous()
    return (out, in_one(without_max_scores(lse), out), max_scores) if with_lse else (out, max_scores)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges the states of two disjoint sets of keys; (0, -inf) is the empty state. Differentiable in all four.

    Args:
        out_a: ``(..., rows, head_dim_v)``.
        lse_a: ``(..., rows)``, natural log, or ``(..., rows, 2)``, ``in_parts``.
        out_b: Like out_a.
        lse_b: Like lse_a.

    Returns:
        out in the wider dtype of out_a and lse_a, and lse.
    """
    has_parts = lse_a.dim() == out_a.dim()
    (lse_a, rest_a), (lse_b, rest_b) = (x.unbind(-1) if has_parts else (x, 0.0) for x in (lse_a, lse_b))
    top = torch.maximum(lse_a, lse_b)
    empty = top == -torch.inf
    # If both are empty, -inf - -inf would be NaN, and so would its gradient.
    top, lse_a, lse_b = (torch.where(empty, 0.0, x) for x in (top, lse_a, lse_b))
    top = top.detach()
    weight_a, weight_b = torch.exp(lse_a - top + rest_a), torch.exp(lse_b - top + rest_b)
    total = weight_a + weight_b
    # The weights add up to 1, also if both lse have lost the log of their counts.
    out = _share(out_a, weight_a / total, empty) + _share(out_b, weight_b / total, empty)
    if has_parts:
        return out, in_parts(torch.where(empty, -torch.inf, top), torch.log(total))
    return out, torch.where(empty, -torch.inf, top + torch.log(total))


def joined(partial: Partial, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """A partial result merged with out and lse over other keys, in the same layouts; out in lse's dtype."""
    out, lse = merge(partial.out.transpose(-2, -3), partial.lse, out.to(lse.dtype).transpose(-2, -3), lse)
    return out.transpose(-2, -3).contiguous(), lse


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """``-sum over rows of exp(sink - lse) * delta``: a sink is a key with value 0, so its dprobs are 0.

    Args:
        sinks: ``(num_heads_q,)``.
        lse: ``(batch, num_heads_q, rows)`` or ``(num_heads_q, rows)``, sinks included; or the same ``in_parts``.
        delta: ``(batch, num_heads_q, rows)`` or ``(num_heads_q, rows)`` in lse's dtype, ``rowsum(dout * out) - dlse``.

    Returns:
        ``(num_heads_q,)`` in lse's dtype.
    """
    lse, rest = lse.unbind(-1) if lse.dim() > delta.dim() else (lse, 0.0)
    probs = torch.exp(sinks.to(lse.dtype)[:, None] - torch.where(lse == -torch.inf, torch.inf, lse) - rest)
    found = -(probs * delta).sum(dim=-1)
    return found if found.dim() == 1 else found.sum(dim=0)


def _share(part: Tensor, weight: Tensor, empty: Tensor) -> Tensor:
    """One state's term of the merged output. An empty state's term and gradient are 0, whatever out contains."""
    weight = torch.where(empty, 0.0, weight)[..., None]
    return torch.where(weight == 0, 0.0, part) * weight
