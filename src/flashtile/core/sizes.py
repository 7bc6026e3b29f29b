"""Conditions on sizes and strides, which are symbols while ``torch.compile`` or ``torch.export`` traces a call.

If Python evaluates a condition on a symbol, the condition becomes a guard: the program then holds for such sizes alone,
and sizes that depend on data cannot be traced at all. The functions here never add a guard. So checks pass over unknown
conditions while a call is traced; operators check their tensors when they run, and sizes are numbers then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def holds(condition: Any) -> bool:
    """The value of a condition; for symbols, whether it is true for all values that they can have."""
    # Dynamo treats a condition on symbols as a bool.
    if not isinstance(condition, torch.SymBool) and not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes long to import

    return statically_known_true(condition)


def is_dense(x: Tensor) -> bool:
    """Whether a tensor is contiguous; for symbolic sizes, whether it is for all values that they can have."""
    if type(x) is Tensor and not torch.compiler.is_compiling():
        return x.is_contiguous()
    stride = 1
    for n in range(x.dim() - 1, -1, -1):
        if not holds(x.shape[n] == 1) and not holds(x.stride(n) == stride):
            return False
        stride = stride * x.shape[n]
    return True


def is_expanded(x: Tensor) -> bool:
    """Whether several elements of a tensor share one place in memory, as after ``expand``."""
    return any(holds(n > 1) and holds(s == 0) for n, s in zip(x.shape, x.stride(), strict=True))


def differ(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes are known to be different."""
    return len(shape) != len(other) or any(holds(n != m) for n, m in zip(shape, other, strict=True))


def number(size: Any) -> int | None:
    """The value of a size; None if the size is a symbol."""
    if type(size) is int and not torch.compiler.is_compiling():
        return size
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return int(size) if has_static_value(size) else None
