"""The monoid of attention states, (out, lse) over a set of keys; docs/algorithm.md, "The monoid"."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Partial:
    """Attention over some of the keys, for a forward to start from; (0, -inf) for no keys.

    A forward that is planned with ``problem.but(out_dtype=torch.float32)`` returns out and lse of such a state. Every
    forward's plan, ``plan(tensors, partial)``, merges one over other keys, and rounds once if its out is not float32.
    Sinks count in each call that has them: give them to one call of a chain.

    Attributes:
        out: ``(batch, seqlen_q, num_heads_q, head_dim_v)``, or ``(total_q, num_heads_q, head_dim_v)``; float32 (float64
            for float64 inputs), contiguous, on 16 bytes, as new tensors are.
        lse: ``(batch, num_heads_q, seqlen_q)``, or ``(num_heads_q, total_q)``; the same, natural log.
    """

    out: Tensor
    lse: Tensor

    def __post_init__(self) -> None:
        """Raises ValueError for what kernels would misread."""
        if not (self.out.is_contiguous() and self.lse.is_contiguous()):
            raise ValueError("a partial result must be contiguous")


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges the states of two disjoint sets of keys; (0, -inf) is the empty state. Differentiable in all four.

    Args:
        out_a: ``(..., rows, head_dim_v)``.
        lse_a: ``(..., rows)``, natural log.
        out_b: Like out_a.
        lse_b: Like lse_a.

    Returns:
        out in the wider dtype of out_a and lse_a, and lse.
    """
    empty = torch.maximum(lse_a, lse_b) == -torch.inf
    # Where both are empty, both lse are set to 0 first: -inf - -inf is NaN, and so is its gradient.
    lse_a, lse_b = (torch.where(empty, 0.0, lse) for lse in (lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    out = _share(out_a, lse_a, lse, empty) + _share(out_b, lse_b, lse, empty)
    return out, torch.where(empty, -torch.inf, lse)


def joined(partial: Partial, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """A partial result and out and lse over other keys, of the same layouts, merged; out in lse's dtype."""
    out, lse = merge(partial.out.transpose(-2, -3), partial.lse, out.to(lse.dtype).transpose(-2, -3), lse)
    return out.transpose(-2, -3).contiguous(), lse


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """``-sum over rows of exp(sink - lse) * delta``: a sink is a key whose value, and so whose dprobs, is 0.

    Args:
        sinks: ``(num_heads_q,)``.
        lse: ``(batch, num_heads_q, rows)`` or ``(num_heads_q, rows)``, sinks included.
        delta: Of lse's shape and dtype, ``rowsum(dout * out) - dlse``.

    Returns:
        ``(num_heads_q,)`` in lse's dtype.
    """
    if lse.dim() == 2:
        lse, delta = lse[None], delta[None]
    probs = torch.exp(sinks.to(lse.dtype)[:, None] - torch.where(lse == -torch.inf, torch.inf, lse))
    return -(probs * delta).sum(dim=(0, 2))


def _share(part: Tensor, part_lse: Tensor, lse: Tensor, empty: Tensor) -> Tensor:
    """One state's term of the merged output; an empty state's is 0 whatever out contains, and so is its gradient."""
    weight = torch.where(empty, 0.0, torch.exp(part_lse - lse))[..., None]
    return torch.where(weight == 0, 0.0, part) * weight
