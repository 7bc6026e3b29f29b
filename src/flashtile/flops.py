"""FLOP formulas of the operators, for ``torch.utils.flop_counter.FlopCounterMode``.

That module imports Triton and takes as long to import as all of flashtile, so the formulas are registered when the
program itself imports it: at once if it already has, else by an import hook for that module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

from flashtile.arguments import Options, unflatten
from flashtile.masks import Band

_COUNTER = "torch.utils.flop_counter"


def _by_name(args: tuple[Any, ...]) -> tuple[Any, Options, int]:
    """The shapes where tensors were, the options, and the kept score entries over all heads.

    The lengths of packed calls are in a tensor; each sequence counts with the longest length.
    """
    shapes: Any
    shapes, options = unflatten(args)
    q_shape, k_shape = shapes.q, shapes.k
    band = Band(options.window_left, options.window_right)
    if len(q_shape) == 4:
        pairs = q_shape[0] * band.count(q_shape[1], k_shape[1])
    else:
        longest_q = options.max_seqlen_q or q_shape[0]
        longest_k = options.max_seqlen_k or k_shape[0]
        pairs = max(1, q_shape[0] // max(1, longest_q)) * band.count(longest_q, longest_k)
    return shapes, options, pairs * q_shape[-2]


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


def _register(counter: ModuleType) -> None:
    counter.register_flop_formula(torch.ops.flashtile.attention_forward)(forward_flops)
    counter.register_flop_formula(torch.ops.flashtile.attention_backward)(backward_flops)


class _Finder(MetaPathFinder):
    """Finds the counter as usual, once, and registers the formulas after it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Registers the formulas now, or as soon as the counter is imported."""
    counter = sys.modules.get(_COUNTER)
    if counter is not None:
        _register(counter)
    else:
        sys.meta_path.insert(0, _Finder())
