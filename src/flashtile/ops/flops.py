"""FLOP formulas of the operators, for ``torch.utils.flop_counter.FlopCounterMode``.

That module imports Triton and takes as long to import as all of flashtile, so the formulas are registered at calls that
it may count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from flashtile.call.arguments import Options, unflatten
from flashtile.core.masks import Band


def kept_pairs(q_shape: Any, k_shape: Any, options: Any) -> int:
    """The kept score entries over all heads, from shapes and options that have a window and longest lengths.

    The lengths of packed calls are in a tensor; each sequence counts with the longest length.
    """
    band = Band(options.window_left, options.window_right)
    if len(q_shape) == 4:
        pairs = q_shape[0] * band.count(q_shape[1], k_shape[1])
    else:
        longest_q = options.max_seqlen_q or q_shape[0]
        longest_k = options.max_seqlen_k or k_shape[0]
        pairs = max(1, q_shape[0] // max(1, longest_q)) * band.count(longest_q, longest_k)
    return pairs * q_shape[-2]


def _by_name(args: tuple[Any, ...]) -> tuple[Any, Options, int]:
    """The shapes where tensors were, the options, and the kept score entries over all heads."""
    shapes: Any
    shapes, options = unflatten(args)
    return shapes, options, kept_pairs(shapes.q, shapes.k, options)


def forward_flops(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Two products: 2 FLOPs per kept score entry and column of q and of v."""
    shapes, _, pairs = _by_name(args)
    return 2 * pairs * (shapes.q[-1] + shapes.v[-1])


def backward_flops(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Up to five products: scores, and, if needed, dq and dk, over head_dim; dprobs and dv over head_dim_v."""
    shapes, options, pairs = _by_name(args[4:])
    grads = options.grads
    over_v = grads.v + (grads.q or grads.k or grads.bias)
    return 2 * pairs * ((1 + grads.q + grads.k) * shapes.q[-1] + over_v * shapes.v[-1])


def jvp_flops(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Up to five products: the scores, and their tangents from q and k, over head_dim; two over head_dim_v."""
    shapes, _, pairs = _by_name(args[7:])
    dq, dk, dv, dbias = (x is not None for x in args[:4])
    return 2 * pairs * ((1 + dq + dk) * shapes.q[-1] + ((dq or dk or dbias) + dv) * shapes.v[-1])


# By the operators' names.
FORMULAS: dict[str, Callable[..., int]] = {
    "attention_forward": forward_flops,
    "attention_backward": backward_flops,
    "attention_jvp": jvp_flops,
}


def register() -> None:
    """Registers the formulas where they are missing: for new counters, and with those that count now."""
    counter = sys.modules.get("torch.utils.flop_counter")
    mode = getattr(counter, "_FlopCounterMode", None)  # its last name: it may be half imported
    if counter is None or mode is None:
        return
    # Each counter has a copy of what was registered when it was made.
    counting = [each.counter.flop_registry for each in _get_current_dispatch_mode_stack() if isinstance(each, mode)]
    for name, formula in FORMULAS.items():
        operator = getattr(torch.ops.flashtile, name)
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator)(formula)
        for registry in counting:
            registry.setdefault(operator, counter.flop_registry[operator])
