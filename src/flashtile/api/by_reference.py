"""A call by the reference: by definition, over the whole score matrix, on any device and in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile import reference
from flashtile.api.keywords import asked_of, options_of
from flashtile.call.problem import Problem


def attention_by_reference(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **others: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` in q's dtype by ``flashtile.reference``, with autograd's gradients: slow, in quadratic memory.

    Args:
        q: See ``attention``, like all others; without dropout.
        k: See there.
        v: See there.
        return_lse: See there.
        **others: See there.

    Raises:
        InvalidInputError: A ValueError that names the argument.
    """
    tensors, asked, _ = asked_of("attention", (q, k, v), others)
    problem = Problem.of(tensors, options_of(tensors, asked))
    out, lse = reference.attention(problem, tensors, torch.promote_types(q.dtype, torch.float32))
    out = out.to(q.dtype)
    return (out, lse) if return_lse else out
