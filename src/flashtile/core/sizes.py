"""Conditions on sizes and strides, which are symbols where ``torch.compile`` or ``torch.export`` traces a call.

A condition on a symbol that Python asks for becomes a guard: the program then holds for such sizes alone, and sizes
that depend on data cannot be traced at all. What is asked here never becomes one. So checks pass over what nobody knows
while a call is traced; the operators check their tensors when they run, whose sizes are numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def holds(condition: Any) -> bool:
    """A condition; of symbols, whether it is true for all that they can be."""
    # To Dynamo a condition on symbols is a bool.
    if not isinstance(condition, torch.SymBool) and not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes long to import

    return statically_known_true(condition)


def is_dense(x: Tensor) -> bool:
    """Whether a tensor is contiguous; of symbolic sizes, whether it is for all that they can be."""
    if type(x) is Tensor and not torch.compiler.is_compiling():
        return x.is_contiguous()
    stride = 1
    for n in range(x.dim() - 1, -1, -1):
        if not holds(x.shape[n] == 1) and not holds(x.stride(n) == stride):
            return False
        stride = stride * x.shape[n]
    return True


def is_expanded(x: Tensor) -> bool:
    """Whether elements of a tensor are one in memory, as after ``expand``."""
    return any(holds(n > 1) and holds(s == 0) for n, s in zip(x.shape, x.stride(), strict=True))


def differ(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes are not the same."""
    return len(shape) != len(other) or any(holds(n != m) for n, m in zip(shape, other, strict=True))


def number(size: Any) -> int | None:
    """The value of a size, None where it is a symbol."""
    if type(size) is int and not torch.compiler.is_compiling():
        return size
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return int(size) if has_static_value(size) else None
