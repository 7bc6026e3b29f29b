"""Copies of a call's records: in autocast's dtype, or without data for a call that is described and not run."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from flashtile.call.arguments import Grads, Options, Tensors, check_tensor, differentiable, grads_of
from flashtile.call.cached_arguments import CacheTensors

R = TypeVar("R")
T = TypeVar("T", Tensors, CacheTensors)

# Whether ``torch.autocast`` is on for any device: the one question that every call asks.
autocast_is_on = torch._C._is_any_autocast_enabled


def autocast(tensors: T, device_type: str) -> T:
    """A call's q, k, v and qv in the dtype of the autocast that is on for a device type; other tensors stay.

    As for ``scaled_dot_product_attention``, float64 is left alone. Any float dtype will do for attn_bias and sinks, so
    they are not rounded. Gradients flow back in the dtypes before the cast.
    """
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    given = {name: getattr(tensors, name, None) for name in ("q", "k", "v", "qv")}
    made: Any = {name: autocast_one(x, dtype) for name, x in given.items() if x is not None}
    return replace(tensors, **made)


def autocast_one(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as autocast has it: floats in its dtype, but for float64."""
    return x.to(dtype) if x.dtype.is_floating_point and x.dtype != torch.float64 else x


def wanting(tensors: Tensors, options: Options, backward: bool) -> Options:
    """The options of a call that is prepared: with the gradients that its tensors require, or all, or none."""
    grads = options.grads
    if not any(grads):
        operands = tuple(x.dtype.is_floating_point for x in tensors.operands or ())
        grads = grads_of("grads", (*(x is not None for x in differentiable(tensors)), *operands))
    return options._replace(grads=grads if backward else Grads())


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
