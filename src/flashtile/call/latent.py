"""Cached calls whose values are the first columns of their keys: a latent row a key, which is read once.

Scores of such a call are those of the queries' first columns, ``qv``, with the values, plus those of the other columns
with the keys' others. So the call becomes one whose keys are these other columns; tensors are views, nothing is copied.
That is also what FlashAttention-3 takes as qv, whose keys and values may be apart.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flashtile.call.arguments import check_tensor
from flashtile.call.cached_arguments import CacheTensors
from flashtile.core.errors import InvalidInputError


def split_queries(t: CacheTensors, parts: object) -> CacheTensors:
    """The call of queries given as (q_nope, q_pe), of which the first are those of the values.

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
    # An 8-bit cache may have scales of keys and of values, for the same numbers; what reads those is another kernel.
    if t.qv is not None or q.shape[-1] != k.shape[-1] or k.dtype != q.dtype or not are_first_columns(v, k):
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


def _other_keys(t: CacheTensors, dim_v: int) -> CacheTensors:
    """The call with the columns of keys that are no values alone."""
    k = None if t.k is None else t.k[..., dim_v:]
    v = t.v if t.k is None else t.k[..., :dim_v]
    return dataclasses.replace(t, k_cache=t.k_cache[..., dim_v:], k=k, v=v)
