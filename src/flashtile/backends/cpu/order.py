"""Packed sequences in another order, so that those which are equally long follow one another."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashtile.call.problem import Problem, Tensors

# Named wherever a tensor is made: torch.set_default_device may say something else.
_CPU = torch.device("cpu")
# Rows a sequence up to which a call of its own costs more than its arithmetic.
_SHORT = 256


@dataclass(frozen=True, eq=False)
class Order:
    """A call in another order.

    Attributes:
        tensors: Its tensors.
        rows: Where its rows of q are in the caller's.
        keys: The same of k.
    """

    tensors: Tensors
    rows: Tensor
    keys: Tensor

    def places(self) -> Tensor:
        """Where the caller's rows of q are in this order."""
        return torch.empty_like(self.rows).index_copy_(0, self.rows, torch.arange(len(self.rows), device=_CPU))


def order_of(problem: Problem, t: Tensors) -> Order | None:
    """The order of short sequences by their lengths, if far fewer runs of equal ones are in it, else None.

    A sequence's arithmetic is the same in every order; what has another part for each sequence is not moved.
    """
    if not problem.varlen or problem.batch < 4 or len(t.q) > _SHORT * problem.batch:
        return None
    if _differs(problem) or t.cu_seqlens_q is None or t.cu_seqlens_k is None:
        return None
    bounds = t.cu_seqlens_q.long(), t.cu_seqlens_k.long()
    lengths = list(zip(*(x.diff().tolist() for x in bounds), strict=True))
    runs = sum(a != b for a, b in itertools.pairwise(lengths)) + 1
    if 2 * len(set(lengths)) > runs:
        return None
    order = torch.tensor(sorted(range(problem.batch), key=lengths.__getitem__), device=_CPU)
    (rows, cu_q), (keys, cu_k) = (_moved(x, order, len(of)) for x, of in zip(bounds, (t.q, t.k), strict=True))
    q, k, v = (x.index_select(0, at) for x, at in ((t.q, rows), (t.k, keys), (t.v, keys)))
    moved = replace(t, q=q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    return Order(moved, rows, keys)


def _differs(p: Problem) -> bool:
    """Whether something is another for each sequence, but q, k and v."""
    has_tensor = p.mask or p.alibi or p.large_scores or p.intervals or p.listed != () or p.origins
    return has_tensor or p.mask_function is not None or p.dropout_p > 0


def _moved(bounds: Tensor, order: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Of sequences in another order where their rows are, then those of none, and their bounds."""
    lengths = bounds.diff()[order]
    ends = lengths.cumsum(0)
    first = bounds[:-1][order] - (ends - lengths)
    rows = torch.arange(total, device=_CPU)
    rows[: int(ends[-1])] += first.repeat_interleave(lengths)
    return rows, torch.cat([ends.new_zeros(1), ends]).int()
