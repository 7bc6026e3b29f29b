"""Operators in PyTorch's own, for exported programs that run where flashtile is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile import reference
from flashtile.call.problem import Problem
from flashtile.core.errors import UnsupportedError
from flashtile.core.states import with_max_scores
from flashtile.ops.operators import FORWARD, REGULAR


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What ``program.run_decompositions(...)`` of ``torch.export`` needs to make attention plain PyTorch.

    The program then runs where there is no Python: from C++, packaged by AOTInductor. It computes attention by its
    definition, in float32 at least, and holds the whole score matrix; flashtile's kernels are not in it. Calls over a
    cache, in 8 bits or with out stay as they are; packed calls, lists of blocks and dropout are refused.

    Returns:
        The operator, and a function of PyTorch's own operators. It raises UnsupportedError for what it does not have.
    """
    return {FORWARD.overload: _forward}


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    t, options = REGULAR.unflatten(args)
    problem = Problem.of(t, options)
    missing = {"packed sequences": problem.varlen, "lists of blocks": t.row_blocks, "dropout": t.rng_state}
    for what, given in missing.items():
        if given is not None and given is not False:
            raise UnsupportedError(f"{what}: not among the calls that are decomposed into PyTorch's operators")
    out, lse, largest = reference.with_max_scores(problem, t, problem.lse_dtype)
    lse = torch.stack([lse, torch.zeros_like(lse)], dim=-1) if problem.large_scores else lse
    return out.to(problem.out_dtype), with_max_scores(lse, largest) if problem.max_scores else lse
