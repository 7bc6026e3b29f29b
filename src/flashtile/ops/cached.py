"""The operators of cached calls, and the way past the dispatcher with plans kept by layout, as in ``operators``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flashtile.call import arguments
from flashtile.call.arguments import fields_of
from flashtile.call.backend import Decode
from flashtile.call.cached_arguments import (
    OPTIONS,
    TENSORS,
    CacheOptions,
    CacheTensors,
    flatten,
    option_values,
    tensor_values,
    unflatten,
)
from flashtile.call.cached_problem import check_values, problem_of
from flashtile.call.problem import Problem, SequenceLayout
from flashtile.core import settings
from flashtile.core.errors import InvalidInputError
from flashtile.ops import dispatch, plans, transforms
from flashtile.ops import operators as ops
from flashtile.ops.plans import Family

ATTEND, APPEND = "flashtile::attention_with_kvcache", "flashtile::append_attention_with_kvcache"
_MUTABLE = {
    **TENSORS,
    "k_cache": dataclasses.replace(TENSORS["k_cache"], schema="Tensor(b!)"),
    "v_cache": dataclasses.replace(TENSORS["v_cache"], schema="Tensor(c!)"),
}
_CALL = "a cached call"
# Kernels take any strides of caches, and Inductor of PyTorch 2.11 fails on a mutating operator that needs exact ones.
_TAGS = (torch.Tag.needs_fixed_stride_order,)
torch.library.define(ATTEND, f"({arguments.schema(TENSORS, OPTIONS)}) -> Tensor", tags=_TAGS)
torch.library.define(APPEND, f"({arguments.schema(_MUTABLE, OPTIONS)}) -> Tensor", tags=_TAGS)


def attend(t: CacheTensors, options: CacheOptions) -> Tensor:
    """Runs a cached call: through its operator, or directly where the dispatcher is not needed.

    Args:
        t: The call's tensors. ``out`` is written, and the caches if there are new keys.
        options: The call's options.

    Returns:
        lse, as in ``call.backend.Decode``.
    """
    if ops.is_watched(t.q, t.k_cache, t.v_cache):
        name = ATTEND if t.k is None else APPEND
        found: Tensor = ops.overload(name)(*flatten(_readable(t), options))
        return found
    return _run(t, options)


def refuse_gradients(given: Iterable[Any]) -> None:
    """Raises for the first of a call's tensors that requires grad; for calls where gradients are enabled."""
    transforms.refuse_gradients(TENSORS, given, _CALL)


# Tensors that kernels read as contiguous, and those of which only the last dimension must be.
_CONTIGUOUS = (
    "cache_seqlens", "cache_batch_idx", "cache_leftpad", "rotary_seqlens", "k_scale", "v_scale", "cu_seqlens_q",
    "cu_seqlens_k_new", "alibi_slopes", "sinks",
)  # fmt: skip
_LAST_CONTIGUOUS = ("q", "k", "v", "page_table", "rotary_cos", "rotary_sin")


def _readable(t: CacheTensors) -> CacheTensors:
    """The tensors, small ones copied where kernels need other strides; caches and out never are."""
    copies = {}
    for name in _CONTIGUOUS:
        x = getattr(t, name)
        if x is not None and not x.is_contiguous():
            copies[name] = x.contiguous()
    for name in _LAST_CONTIGUOUS:
        x = getattr(t, name)
        if x is not None and x.dim() and x.stride(-1) != 1 and x.shape[-1] != 1:
            copies[name] = x.contiguous()
    return dataclasses.replace(t, **copies) if copies else t


def _run(t: CacheTensors, options: CacheOptions) -> Tensor:
    try:
        key = _key(t, options)
    except (RuntimeError, AttributeError):
        problem_of(t, options)  # names what is no tensor, or the nested or sparse one, which has no strides
        raise
    plan = plans.kinds.get(key)
    if plan is None:
        readable = _readable(t)
        if readable is not t:
            return _run(readable, options)
        plan = _plan(t, options)
        plans.keep(key, plan)
    lse: Tensor = plan(t)
    return lse


_others = fields_of(list(TENSORS)[5:])


def _key(t: CacheTensors, options: CacheOptions) -> tuple[Any, ...]:
    out, q, k, v, lengths = t.out, t.q, t.k_cache, t.v_cache, t.cache_seqlens
    # Written out for speed, as in ``flashtile.ops.operators``.
    pointers = out.data_ptr() | q.data_ptr() | k.data_ptr() | v.data_ptr() | lengths.data_ptr()
    return (
        options, settings.BACKEND.raw(), plans.products(q),
        out.shape, out.stride(), out.dtype, out.device, q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype, v.device,
        lengths.shape, lengths.stride(), lengths.dtype, lengths.device,
        pointers % 16 and tuple(x.data_ptr() % 16 for x in (out, q, k, v, lengths)),
        *[None if x is None else plans.layout(x) for x in _others(t)],
    )  # fmt: skip


class _Plan:
    """The plan of cached calls of one kind, with what every backend's needs around it.

    Attributes:
        problem: The calls'.
        run: The backend's plan.
    """

    __slots__ = ("checks", "problem", "run")

    def __init__(self, problem: Problem, run: Decode) -> None:
        self.problem, self.run, self.checks = problem, run, problem.device_type == "cpu"

    def __call__(self, t: CacheTensors) -> Tensor:
        # An unset variable is known without decoding it.
        if self.checks or (settings.CHECK.raw() and settings.CHECK.enabled()):
            check_values(self.problem, t)
        lse = self.run(t)
        # Autograd finds by versions that a tensor which it saved was written; kernels do not raise them.
        torch.autograd.graph.increment_version((t.out,) if t.k is None else (t.out, t.k_cache, t.v_cache))
        return lse


def _plan(t: CacheTensors, options: CacheOptions) -> _Plan:
    problem = problem_of(t, options)
    family = _family(problem, t, options)
    backend = family.backends.get("decode")
    if backend is None:
        backend = family.backends["decode"] = dispatch.select(problem, "decode", options.backend)
    return _Plan(problem, backend.plan("decode", problem, t, known=family.known["decode"]))


def _family(problem: Problem, t: CacheTensors, options: CacheOptions) -> Family:
    """What calls that differ in lengths, batch and strides alone share; lengths are also those of page_table."""
    alike = problem.but(batch=0, queries=SequenceLayout(0, problem.queries.packed), seqlen_k=0)
    others = (
        None if x is None else (x.dim(), x.dtype, x.device, x.data_ptr() % 16 if not x.is_meta else 0)
        for x in tensor_values(t)
    )
    width = None if t.rotary_cos is None else t.rotary_cos.shape[-1]
    without_longest = dataclasses.replace(options, max_seqlen_q=None)
    return plans.family(
        (alike, option_values(without_longest), width, *others, settings.BACKEND.raw(), plans.products(t.q))
    )


def _check_operator(appends: bool, t: CacheTensors) -> None:
    if appends != (t.k is not None):
        other = "append_attention_with_kvcache" if t.k is not None else "attention_with_kvcache"
        raise InvalidInputError("k", f"is {'given' if t.k is not None else 'None'}: the operator is {other}")


def _attend(*args: Any) -> Tensor:
    tensors, options = unflatten(args)
    _check_operator(False, tensors)
    return _run(tensors, options)


def _append(*args: Any) -> Tensor:
    tensors, options = unflatten(args)
    _check_operator(True, tensors)
    return _run(tensors, options)


def _fake(*args: Any) -> Tensor:
    tensors, options = unflatten(args)
    problem = problem_of(tensors, options)
    return tensors.q.new_empty(problem.lse_shape(tensors.q), dtype=problem.lse_dtype)


for _name, _kernel in ((ATTEND, _attend), (APPEND, _append)):
    torch.library.impl(_name, ("cpu", "cuda"))(_kernel)
    torch.library.register_fake(_name)(_fake)
    transforms.register_without_derivative(_name, TENSORS, _CALL)
