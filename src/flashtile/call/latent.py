"""Cached calls with the first columns of their keys as values: a latent row a key, which is read once.

Scores of such a call are products of the queries' first columns, ``qv``, with the values, plus products of the other
columns with the keys' others. So the call becomes one with these other columns as keys; tensors are views, nothing is
copied. FlashAttention-3 takes this too, as qv; there keys and values may be apart.

A row of 656 bytes is FlashMLA's: 512 e4m3 numbers, a float32 scale of each 128 of them, and 64 bfloat16 numbers, which
are the keys' other columns.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flashtile.call.arguments import FLOAT8, check_tensor
from flashtile.call.cached_arguments import CacheTensors
from flashtile.core.errors import InvalidInputError

# A row in 8 bits, in FlashMLA's form: its bytes, and its columns of values and of others.
ROW_BYTES, _VALUES, _OTHERS = 656, 512, 64


def has_eight_bit_rows(t: CacheTensors) -> bool:
    """Whether keys of 656 columns are rows of so many bytes."""
    if t.k_cache.dtype not in (FLOAT8, torch.uint8):
        return False
    return not isinstance(t.q, Tensor) or t.q.shape[-1:] != (ROW_BYTES,)


def of_eight_bit_rows(t: CacheTensors) -> CacheTensors:
    """The call of rows of 656 bytes; their parts are views.

    Raises:
        InvalidInputError: Naming the argument that does not go with such rows.
    """
    q, rows, v = t.q, t.k_cache, t.v_cache
    parts = (q[..., :_VALUES], q[..., _VALUES:]) if isinstance(q, Tensor) and q.dim() else q
    if not isinstance(parts, tuple) or len(parts) != 2 or not all(isinstance(x, Tensor) for x in parts):
        raise InvalidInputError("q", f"is of type {type(q).__name__}, must be a tensor or (q_nope, q_pe)")
    if tuple(x.shape[-1] for x in parts) != (_VALUES, _OTHERS) or parts[1].dtype != torch.bfloat16:
        found = " and ".join(str(x.shape[-1]) for x in parts)
        must = f"must have {_VALUES} and {_OTHERS} in torch.bfloat16 where k_cache has rows of {ROW_BYTES} bytes"
        raise InvalidInputError("q", f"has {found} columns in {parts[1].dtype}, {must}")
    if not isinstance(v, Tensor) or v.shape[-1:] != (_VALUES,) or not are_first_columns(v, rows):
        raise InvalidInputError("v_cache", f"must be k_cache[..., :{_VALUES}] where that has rows of {ROW_BYTES} bytes")
    if t.qv is not None:
        raise InvalidInputError("qv", f"is given, but queries of rows of {ROW_BYTES} bytes are q or (q_nope, q_pe)")
    # Dynamo knows no addresses.
    first = () if torch.compiler.is_compiling() else (rows.storage_offset(), rows.data_ptr())
    if rows.stride(-1) != 1 or any(start % 4 for start in (*first, *rows.stride()[:-1])):
        raise InvalidInputError("k_cache", f"has rows of {ROW_BYTES} bytes: they must begin on multiples of 4 bytes")
    scales, others = (
        rows[..., _VALUES : _VALUES + 16].view(torch.float32),
        rows[..., _VALUES + 16 :].view(torch.bfloat16),
    )
    return dataclasses.replace(t, q=parts[1], qv=parts[0], k_cache=others, v_cache=v.view(FLOAT8), row_scale=scales)


def split_queries(t: CacheTensors, parts: object) -> CacheTensors:
    """The call of queries given as (q_nope, q_pe); q_nope goes with the values.

    Raises:
        InvalidInputError: Naming the argument that does not fit.
    """
    if not isinstance(parts, tuple) or len(parts) != 2:
        raise InvalidInputError("q", f"is of type {type(parts).__name__}, must be a tensor or (q_nope, q_pe)")
    for x in (*parts, t.k_cache, t.v_cache):
        check_tensor("q", x)
    if t.qv is not None:
        raise InvalidInputError("qv", "is given, but q is (q_nope, q_pe) and has it")
    (q_nope, q_pe), (dim, dim_v) = parts, (t.k_cache.shape[-1], t.v_cache.shape[-1])
    if not are_first_columns(t.v_cache, t.k_cache):
        raise InvalidInputError("v_cache", "must be k_cache's first columns, a view of it, where q is (q_nope, q_pe)")
    if (q_nope.shape[-1], q_pe.shape[-1]) != (dim_v, dim - dim_v):
        found = f"{q_nope.shape[-1]} and {q_pe.shape[-1]} columns, must have {dim_v} and {dim - dim_v}"
        raise InvalidInputError("q", f"as (q_nope, q_pe) has {found} to match v_cache and the rest of k_cache")
    return dataclasses.replace(_other_keys(t, dim_v), q=q_pe, qv=q_nope)


def split(t: CacheTensors) -> CacheTensors:
    """The same call with ``qv``, if values are the keys' first columns; else ``t``."""
    q, k, v = t.q, t.k_cache, t.v_cache
    if not q.dim() or not k.dim():
        return t
    if t.qv is not None or q.shape[-1] != k.shape[-1] or not are_first_columns(v, k):
        return t
    # An 8-bit cache may have scales of keys and of values, for the same numbers: that is no product with the values.
    if k.dtype != q.dtype and not _are_one(t.k_scale, t.v_scale):
        return t
    if t.rotary_cos is not None:
        turned = "is given, but v_cache is a view of k_cache, of whose columns it would turn the first: give q as"
        raise InvalidInputError("rotary_cos", f"{turned} (q_nope, q_pe), of which it turns the second")
    dim_v = v.shape[-1]
    return dataclasses.replace(_other_keys(t, dim_v), q=q[..., dim_v:], qv=q[..., :dim_v])


def complete_values(t: CacheTensors) -> None:
    """Takes new values from the new keys where values are the keys' first columns: each number is written once.

    Raises:
        InvalidInputError: v is given and is no view of k.
    """
    if t.k is None or t.v_cache.shape[-1:] >= t.k_cache.shape[-1:] or not are_first_columns(t.v_cache, t.k_cache):
        return
    if t.v is None:
        t.v = t.k[..., : t.v_cache.shape[-1]]
    elif not are_first_columns(t.v, t.k):
        must = "is given, but v_cache is a view of k_cache: leave it out, new values are k's first columns"
        raise InvalidInputError("v", must)


def are_first_columns(v: Tensor, k: Tensor) -> bool:
    """Whether v is ``k[..., :n]`` for an n less than all, by address and strides."""
    if v.shape[:-1] != k.shape[:-1] or not v.shape[-1:] < k.shape[-1:] or v.stride() != k.stride():
        return False
    # Dynamo knows no addresses; the operator looks again when it runs.
    return torch.compiler.is_compiling() or v.data_ptr() == k.data_ptr()


def _are_one(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether both are None, or one tensor."""
    if x is None or y is None:
        return x is y
    return x is y or (x.data_ptr(), x.shape, x.stride()) == (y.data_ptr(), y.shape, y.stride())


def _other_keys(t: CacheTensors, dim_v: int) -> CacheTensors:
    """The call with the columns of keys that are no values alone."""
    k = None if t.k is None else t.k[..., dim_v:]
    v = t.v if t.k is None else t.k[..., :dim_v]
    return dataclasses.replace(t, k_cache=t.k_cache[..., dim_v:], k=k, v=v)
