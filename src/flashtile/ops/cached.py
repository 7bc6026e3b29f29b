"""The operators of cached calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile.call import latent
from flashtile.call.arguments import fields_of
from flashtile.call.cached_arguments import CacheOptions, CacheTensors
from flashtile.call.cached_problem import check_values, problem_of
from flashtile.core import settings
from flashtile.core.errors import InvalidInputError
from flashtile.ops.operation import Operation, is_watched
from flashtile.ops.plans import layout


def attend(t: CacheTensors, options: CacheOptions) -> Tensor:
    """Runs a cached call: through its operator, or directly where the dispatcher is not needed.

    Args:
        t: The call's tensors. ``out`` is written, and the caches if there are new keys.
        options: The call's options.

    Returns:
        lse, as in ``call.backend.Decode``.
    """
    if is_watched(t.q, t.k_cache, t.v_cache):
        operator = ATTEND if t.k is None else APPEND
        watched: Tensor = operator.overload(*CACHED.flatten(CACHED.readable(t), options))
        return watched
    t, call = CACHED.planned(split(t), options)
    found: Tensor = call.run(t)
    return found


def split(t: CacheTensors) -> CacheTensors:
    """As ``latent.split``, of any call."""
    k, v = t.k_cache, t.v_cache
    # None is refused further on, by name.
    return latent.split(t) if k is not None and v is not None and v.shape[-1:] < k.shape[-1:] else t


def _key(t: CacheTensors, options: CacheOptions) -> tuple[Any, ...]:
    out, q, k, v, lengths = t.out, t.q, t.k_cache, t.v_cache, t.cache_seqlens
    # Written out for speed, as in ``flashtile.ops.operators``.
    pointers = out.data_ptr() | q.data_ptr() | k.data_ptr() | v.data_ptr() | lengths.data_ptr()
    return (
        options, settings.BACKEND.raw(), q.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision,
        out.shape, out.stride(), out.dtype, out.device, q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype, v.device,
        lengths.shape, lengths.stride(), lengths.dtype, lengths.device,
        pointers % 16 and tuple(x.data_ptr() % 16 for x in (out, q, k, v, lengths)),
        *[None if x is None else layout(x) for x in _others(t)],
        None if t.operands is None else tuple(map(layout, t.operands)),
    )  # fmt: skip


def _rotary_width(t: CacheTensors) -> int | None:
    return None if t.rotary_cos is None else t.rotary_cos.shape[-1]


def _written(t: CacheTensors) -> tuple[Tensor, ...]:
    return (t.out,) if t.k is None else (t.out, t.k_cache, t.v_cache)


CACHED = Operation(
    "a cached call", "decode", CacheTensors, CacheOptions, problem_of, check_values, _key, besides=_rotary_width,
    written=_written,
)  # fmt: skip
_others = fields_of(list(CACHED.rows)[5:-2])


def _run(appends: bool, *args: Any) -> Tensor:
    t, options = CACHED.unflatten(args)
    if appends != (t.k is not None):
        other = "append_attention_with_kvcache" if t.k is not None else "attention_with_kvcache"
        raise InvalidInputError("k", f"is {'given' if t.k is not None else 'None'}: the operator is {other}")
    t, call = CACHED.planned(split(t), options)
    lse: Tensor = call.run(t)
    return lse


def _fake(*args: Any) -> Tensor:
    return CACHED.fake(*args)[1]


# Kernels take any strides of caches, and Inductor of PyTorch 2.11 fails on a mutating operator that needs exact ones.
_ABOUT: Any = {"results": ("lse",), "tags": (torch.Tag.needs_fixed_stride_order,)}
ATTEND = CACHED.define("attention_with_kvcache", partial(_run, False), _fake, writes=("out",), **_ABOUT)
APPEND = CACHED.define(
    "append_attention_with_kvcache", partial(_run, True), _fake, writes=("out", "k_cache", "v_cache"), **_ABOUT
)
