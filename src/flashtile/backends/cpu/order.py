"""Reorders packed sequences, so that equally long ones follow one another."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashtile.call.problem import Problem, Tensors

# Passed wherever a tensor is made, because torch.set_default_device may name another device.
_CPU = torch.device("cpu")
# The most rows of a sequence for which a separate call costs more than its arithmetic.
_SHORT = 256


@dataclass(frozen=True, eq=False)
class Order:
    """A call in another order.

    Attributes:
        tensors: The tensors in the new order.
        rows: The places of its rows of q in the caller's q.
        keys: The same for k.
    """

    tensors: Tensors
    rows: Tensor
    keys: Tensor

    def places(self) -> Tensor:
        """The places of the caller's rows of q in this order."""
        return torch.empty_like(self.rows).index_copy_(0, self.rows, torch.arange(len(self.rows), device=_CPU))


def order_of(problem: Problem, t: Tensors) -> Order | None:
    """The order of short sequences by their lengths, if it has far fewer runs of equal lengths, else None.

    A sequence's arithmetic is the same in every order. Calls with other tensors by sequence are not reordered.
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
    """Whether anything besides q, k and v differs between sequences."""
    has_tensor = p.mask or p.alibi or p.large_scores or p.intervals or p.listed != () or p.origins
    return has_tensor or p.mask_function is not None or p.dropout_p > 0


def _moved(bounds: Tensor, order: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For reordered sequences: the places of their rows, then of rows without a sequence; and their bounds."""
    lengths = bounds.diff()[order]
    ends = lengths.cumsum(0)
    first = bounds[:-1][order] - (ends - lengths)
    rows = torch.arange(total, device=_CPU)
    rows[: int(ends[-1])] += first.repeat_interleave(lengths)
    return rows, torch.cat([ends.new_zeros(1), ends]).int()
