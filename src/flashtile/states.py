"""The monoid of attention states, (out, lse) over a set of keys; docs/algorithm.md, "The monoid"."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Partial:
    """Attention over some of the keys, for a kernel to merge into its result; (0, -inf) for no keys.

    Attributes:
        out: ``(batch, seqlen_q, num_heads_q, head_dim_v)``, or ``(total_q, num_heads_q, head_dim_v)``; float32,
            contiguous.
        lse: ``(batch, num_heads_q, seqlen_q)``, or ``(num_heads_q, total_q)``; float32, contiguous, natural log.
    """

    out: Tensor
    lse: Tensor


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


def _share(part: Tensor, part_lse: Tensor, lse: Tensor, empty: Tensor) -> Tensor:
    """One state's term of the merged output; an empty state's is 0 whatever out contains, and so is its gradient."""
    weight = torch.where(empty, 0.0, torch.exp(part_lse - lse))[..., None]
    return torch.where(weight == 0, 0.0, part) * weight
