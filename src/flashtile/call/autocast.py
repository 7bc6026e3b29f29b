"""``torch.autocast``: q, k and v in its dtype, as ``scaled_dot_product_attention`` has them."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
from torch import Tensor

from flashtile.call.arguments import Tensors
from flashtile.call.cached_arguments import CacheTensors

T = TypeVar("T", Tensors, CacheTensors)

# Whether autocast is on for any device: the one question that every call asks.
is_on = torch._C._is_any_autocast_enabled


def cast(tensors: T, device_type: str) -> T:
    """A call's q, k, v and qv in the dtype of the autocast that is on for a device type; other tensors stay.

    As for ``scaled_dot_product_attention``, float64 is left alone. Any float dtype will do for attn_bias and sinks, so
    they are not rounded. Gradients flow back in the dtypes before the cast.
    """
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    given = {name: getattr(tensors, name, None) for name in ("q", "k", "v", "qv")}
    made: Any = {name: cast_one(x, dtype) for name, x in given.items() if x is not None}
    return dataclasses.replace(tensors, **made)


def cast_one(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as autocast has it: floats in its dtype, but for float64."""
    return x.to(dtype) if x.dtype.is_floating_point and x.dtype != torch.float64 else x
