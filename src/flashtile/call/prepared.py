"""The records of a call that is described or prepared, and not run."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

import torch

from flashtile.call.arguments import Grads, Options, Tensors, check_tensor, differentiable, grads_of

R = TypeVar("R")


def wanting(tensors: Tensors, options: Options, backward: bool) -> Options:
    """The options of a call that is prepared: with the gradients that its tensors require, or all, or none."""
    grads = options.grads
    if not any(grads):
        operands = tuple(x.dtype.is_floating_point for x in tensors.operands or ())
        grads = grads_of("grads", (*(x is not None for x in differentiable(tensors)), *operands))
    return replace(options, grads=grads if backward else Grads())


def without_data(record: R) -> R:
    """A record's tensors with the same layouts on the meta device; one that is given twice stays one."""
    assert is_dataclass(record) and not isinstance(record, type)
    given = {name: x for name, x in vars(record).items() if x is not None and not isinstance(x, tuple)}
    for name, x in given.items():
        check_tensor(name, x)
    operands = getattr(record, "operands", None)
    of_all = (*given.values(), *(operands or ()))
    copies = {id(x): torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in of_all}
    made: dict[str, Any] = {name: copies[id(x)] for name, x in given.items()}
    if operands is not None:
        made["operands"] = tuple(copies[id(x)] for x in operands)
    return replace(record, **made)
