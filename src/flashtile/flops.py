"""FLOP formulas of the operators, for ``torch.utils.flop_counter.FlopCounterMode``.

That module imports Triton and takes as long to import as all of flashtile, so the formulas are registered when the
program itself imports it: at once if it has, else by a finder that waits for that one name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

from flashtile.masks import Band

_COUNTER = "torch.utils.flop_counter"
# Where a schema keeps what the formulas read: shapes of q, k, v first, then these, counted from the end.
_MAX_SEQLEN_Q, _MAX_SEQLEN_K, _WINDOW_LEFT, _WINDOW_RIGHT = -11, -10, -9, -8


def _kept_pairs(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """(kept score entries over all heads, head_dim, head_dim_v) from shapes alone.

    Packed calls hide their lengths in a tensor; they count as sequences of the longest length.
    """
    q_shape, k_shape, v_shape = args[:3]
    band = Band(args[_WINDOW_LEFT], args[_WINDOW_RIGHT])
    if len(q_shape) == 4:
        pairs = q_shape[0] * band.count(q_shape[1], k_shape[1])
    else:
        longest_q = args[_MAX_SEQLEN_Q] or q_shape[0]
        longest_k = args[_MAX_SEQLEN_K] or k_shape[0]
        pairs = max(1, q_shape[0] // max(1, longest_q)) * band.count(longest_q, longest_k)
    return pairs * q_shape[-2], q_shape[-1], v_shape[-1]


def forward_flops(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Two products: 2 FLOPs a kept score entry and column of q and of v."""
    pairs, head_dim, head_dim_v = _kept_pairs(args)
    return 2 * pairs * (head_dim + head_dim_v)


def backward_flops(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Five products: scores, dq and dk over head_dim; dprobs and dv over head_dim_v."""
    pairs, head_dim, head_dim_v = _kept_pairs(args[4:])
    return 2 * pairs * (3 * head_dim + 2 * head_dim_v)


def _register(counter: ModuleType) -> None:
    counter.register_flop_formula(torch.ops.flashtile.attention_forward)(forward_flops)
    counter.register_flop_formula(torch.ops.flashtile.attention_backward)(backward_flops)


class _Finder(MetaPathFinder):
    """Finds the counter as usual, once, and has the formulas registered when it has been executed."""

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
