"""The forward of calls without a cache that ``table.is_split`` names: the kernel of cached calls computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu.launch import Launch
from flashtile.call.backend import Plan
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Problem, Tensors
from flashtile.core.states import Partial


class SplitForwardPlan:
    """The forward of calls of one kind, as ``call.backend.Forward`` says; keys are an entry of a full cache."""

    def __init__(
        self, problem: Problem, tensors: Tensors, cached: Callable[[CacheTensors], Any],
        regular: Callable[[Tensors], Plan],
    ) -> None:  # fmt: skip
        """Prepares the launch.

        Args:
            problem: A call that ``table.is_split`` names.
            tensors: Tensors of its layouts.
            cached: Makes the plan of the call over a cache.
            regular: Makes the plan of a regular forward, which merges a result over other keys.
        """
        self._regular = regular
        self._merging: Plan | None = None
        self._shape = *tensors.q.shape[:-1], problem.head_dim_v
        self._plan = cached(cached_tensors(tensors))

    def __call__(self, tensors: Tensors, partial: Partial | None = None) -> tuple[Tensor, Tensor]:
        """Attention's output and log-sum-exp, merged with ``partial``, those over other keys, if given."""
        if partial is not None:
            self._merging = self._merging or self._regular(tensors)
            merged: tuple[Tensor, Tensor] = self._merging(tensors, partial)
            return merged
        out = tensors.q.new_empty(self._shape)
        return out, self._plan(cached_tensors(tensors, out))

    def launches(self, tensors: Tensors, *_: Any) -> dict[str, Launch]:
        """As of ``gpu.plan.Plan``, without ``partial``."""
        made: dict[str, Launch] = self._plan.launches(cached_tensors(tensors))
        return made


def cached_tensors(tensors: Tensors, out: Tensor | None = None) -> CacheTensors:
    """Its tensors: without lengths, each sequence uses its whole entry."""
    t = tensors
    if out is None:
        out = torch.empty((*t.q.shape[:-1], t.v.shape[-1]), dtype=t.q.dtype, device="meta")
    full: Any = None
    return CacheTensors(out, t.q, t.k, t.v, full, alibi_slopes=t.alibi_slopes, sinks=t.sinks)
