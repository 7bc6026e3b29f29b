"""FLOP formulas of the operators, for ``torch.utils.flop_counter.FlopCounterMode``.

That module imports Triton and takes as long to import as all of flashtile, so the formulas are registered at calls that
it may count. Each takes an operator's arguments by name, with shapes in place of tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from flashtile.call.arguments import grads_of
from flashtile.core.masks import Band
from flashtile.ops.operation import OPERATORS, Operator


def kept_pairs(given: dict[str, Any]) -> int:
    """The kept score entries over all heads.

    The lengths of packed calls are in a tensor; each sequence counts with the longest length.
    """
    q, k, band = given["q"], given["k"], Band(given["window_left"], given["window_right"], given.get("attention_chunk"))
    if len(q) == 4:
        pairs = q[0] * band.count(q[1], k[1])
    else:
        longest_q, longest_k = given["max_seqlen_q"] or q[0], given["max_seqlen_k"] or k[0]
        pairs = max(1, q[0] // max(1, longest_q)) * band.count(longest_q, longest_k)
    return int(pairs * q[-2])


def forward_flops(given: dict[str, Any]) -> int:
    """Two products: 2 FLOPs per kept score entry and column of q and of v."""
    return 2 * kept_pairs(given) * (given["q"][-1] + given["v"][-1])


def quantized_flops(given: dict[str, Any]) -> int:
    """As ``forward_flops``; v is transposed."""
    return 2 * kept_pairs(given) * (given["q"][-1] + given["v"][-2])


def backward_flops(given: dict[str, Any]) -> int:
    """Up to five products: scores, and, if needed, dq and dk, over head_dim; dprobs and dv over head_dim_v."""
    grads = grads_of("grads", given["grads"])
    over_v = grads.v + (grads.q or grads.k or grads.bias or any(grads.operands))
    return 2 * kept_pairs(given) * ((1 + grads.q + grads.k) * given["q"][-1] + over_v * given["v"][-1])


def jvp_flops(given: dict[str, Any]) -> int:
    """Up to five products: the scores, and their tangents from q and k, over head_dim; two over head_dim_v."""
    dq, dk, dv, dbias = (given[name] is not None for name in ("dq", "dk", "dv", "dbias"))
    over_v = (dq or dk or dbias) + dv
    return 2 * kept_pairs(given) * ((1 + dq + dk) * given["q"][-1] + over_v * given["v"][-1])


def second_flops(given: dict[str, Any]) -> int:
    """Twice the scores, their tangents and the products with dout; then the tangent of out and the gradients."""
    q, k, v = (given[name] is not None for name in ("ddq", "ddk", "ddv"))
    over_q = 2 * (1 + q + k) + 2 + q + k
    return 2 * kept_pairs(given) * (over_q * given["q"][-1] + (2 * (1 + v) + 1 + v + 1) * given["v"][-1])


def register() -> None:
    """Registers the formulas where they are missing: for new counters, and with those that count now."""
    counter = sys.modules.get("torch.utils.flop_counter")
    mode = getattr(counter, "_FlopCounterMode", None)  # its last name: it may be half imported
    if counter is None or mode is None:
        return
    # Each counter has a copy of what was registered when it was made.
    counting = [each.counter.flop_registry for each in _get_current_dispatch_mode_stack() if isinstance(each, mode)]
    for each in OPERATORS:
        if each.flops is None:
            continue
        operator = getattr(torch.ops.flashtile, each.name)
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator)(_formula(each))
        for registry in counting:
            registry.setdefault(operator, counter.flop_registry[operator])


def _formula(operator: Operator) -> Callable[..., int]:
    def formula(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        assert operator.flops is not None
        return operator.flops(operator.named(args))

    return formula
