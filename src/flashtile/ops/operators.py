"""The torch.library operators: schemas and fakes, the autograd of eager calls, and the cache of plans.

One pair of operators serves every call, dense or packed. ``torch.compile``, ``FakeTensor``, ``torch.export`` and CUDA
graphs see opaque operators whose shapes they can infer; neither operator synchronises with a device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.call.arguments import (
    GRADIENTS,
    SCHEMA,
    differentiable,
    fields_of,
    flatten,
    is_plain,
    other_tensors,
    tensor_values,
    unflatten,
)
from flashtile.call.arguments import Options as Options
from flashtile.call.backend import Backward, Forward
from flashtile.call.problem import Problem, Tensors, check_values
from flashtile.core import settings
from flashtile.ops import dispatch, plans
from flashtile.ops.plans import Family, family_of, layout, plan, products
from flashtile.ops.watched import is_watched as is_watched

FORWARD, BACKWARD, JVP = (f"flashtile::attention_{name}" for name in ("forward", "backward", "jvp"))
torch.library.define(FORWARD, f"({SCHEMA}) -> (Tensor, Tensor)")
torch.library.define(
    BACKWARD,
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {SCHEMA}) -> ({', '.join(['Tensor'] * len(GRADIENTS))})",
)
torch.library.define(
    JVP,
    f"({', '.join(f'Tensor? {name}' for name in GRADIENTS.values())}, Tensor out, Tensor lse, {SCHEMA})"
    " -> (Tensor, Tensor)",
)
# The tensors before those of ``Tensors`` in each operator's schema.
LEADING = {
    FORWARD: (),
    BACKWARD: ("dout", "dlse", "out", "lse"),
    JVP: (*GRADIENTS.values(), "out", "lse"),
}


def overload(name: str) -> Any:
    """The operator of that name, as PyTorch's registrations take it."""
    return getattr(torch.ops.flashtile, name.removeprefix("flashtile::")).default


def attention(tensors: Tensors, options: Options, with_lse: bool = True) -> tuple[Tensor, Any]:
    """Calls the forward operator, or its implementation directly where the dispatcher is not needed.

    Args:
        tensors: The call's tensors.
        options: The call's options.
        with_lse: Whether the caller uses lse; if not, autograd does not track it.

    Returns:
        out and lse, as in ``call.backend.Forward``; without ``with_lse`` lse may be None.
    """
    if is_watched(tensors.q, tensors.k, tensors.v):
        return torch.ops.flashtile.attention_forward(*flatten(_readable(tensors), options))
    tensors, kind = _kind(tensors, options)
    if not any(options.grads):
        return kind.run(tensors)
    inputs = (tensors.q, tensors.k, tensors.v) if is_plain(tensors) else differentiable(tensors)
    found = _apply((kind, tensors, with_lse), *inputs)
    return found if with_lse else (found, None)


def attention_again(options: Options, t: Tensors) -> Tensor:
    """``attention`` where only q, k and v are given, lse is not used, and nothing watches."""
    try:
        layouts = _layouts(t.q, t.k, t.v)
    except RuntimeError:
        return attention(t, options, False)[0]  # names what has no layout
    kind = options.kinds.get(layouts)
    if kind is None or kind.home is not plans.kinds:
        t, kind = _kind(t, options, (options, layouts))
        if len(options.kinds) == _MOST_AGAIN:
            options.kinds.clear()
        if kind.key[1] == layouts:  # t was not copied
            options.kinds[layouts] = kind
    found: Tensor = _apply((kind, t, False), t.q, t.k, t.v) if any(options.grads) else kind.run(t)[0]
    return found


# By a name of this module: each object more that another thread has used too costs the backward's thread.
_is_batch = torch._C._functorch.is_legacy_batchedtensor


def _is_special(dout: Tensor | None) -> bool:
    """Whether a gradient that arrives is of a subclass, or a batch of gradients (``is_grads_batched``)."""
    return dout is not None and (type(dout) is not Tensor or _is_batch(dout))


def _readable(t: Tensors) -> Tensors:
    """The tensors, copied where kernels need other strides.

    q, k and v must be contiguous in their last dimension, slopes, sinks, cu_seqlens and origins in all.
    Called before autograd saves the tensors, so that a training step copies once.
    """
    if is_plain(t) and t.q.is_contiguous() and t.k.is_contiguous() and t.v.is_contiguous():
        return t
    qkv = {"q": t.q, "k": t.k, "v": t.v}
    copies = {name: x.contiguous() for name, x in qkv.items() if x.dim() and x.stride(-1) != 1 and x.shape[-1] != 1}
    rows = {
        "alibi_slopes": t.alibi_slopes,
        "sinks": t.sinks,
        "cu_seqlens_q": t.cu_seqlens_q,
        "cu_seqlens_k": t.cu_seqlens_k,
        "origins": t.origins,
    }
    copies |= {name: x.contiguous() for name, x in rows.items() if x is not None and not x.is_contiguous()}
    return dataclasses.replace(t, **copies) if copies else t


class _Kind:
    """The cached plans of calls with the same layouts and options.

    Attributes:
        key: What ``_key`` says of them.
        options: The calls' options.
        family: What they share with calls of other lengths.
        home: The dictionary that it is kept in.
        problem: Their problem, made by the first forward.
        run: The forward's plan, made by the first forward.
        backwards: The backward's plans, by the layouts that ``_gradients`` gets.
    """

    __slots__ = ("backwards", "family", "home", "key", "options", "problem", "run")

    def __init__(self, key: tuple[Any, ...], options: Options, family: Family) -> None:
        self.key, self.options, self.family, self.home = key, options, family, plans.kinds
        self.problem: Problem | None = None
        self.run: Callable[[Tensors], tuple[Tensor, Tensor]] = self._plan
        self.backwards: dict[Any, Backward] = {}

    def _plan(self, t: Tensors) -> tuple[Tensor, Tensor]:
        family = self.family
        problem = self.problem = family.problem_of(t, self.options)
        run = family.backends["forward"].plan("forward", problem, t, known=family.known["forward"])
        self.run = functools.partial(_checked_forward, problem, run) if problem.varlen else run
        return self.run(t)

    def plan_backward(self, t: Tensors, dout: Tensor, dlse: Tensor | None) -> Backward:
        """A plan of the backward for tensors that saved-tensor hooks may have laid out anew."""
        family, problem = self.family, self.problem
        if problem is None or "backward" not in family.backends or _key(t, self.options) != self.key:
            problem = Problem.of(t, self.options)
            family, backend = Family(), dispatch.select(problem, "backward", self.options.backend)
        else:
            backend = family.backends["backward"]
        return plan(backend, "backward", problem, t, (dout, dlse), family.known["backward"])


# Beside one ``Options``.
_MOST_AGAIN = 256


def _kind(t: Tensors, options: Options, key: tuple[Any, ...] | None = None) -> tuple[Tensors, _Kind]:
    """The tensors with readable strides, and the cached ``_Kind`` of the call, whose key may be known."""
    try:
        key = key or _key(t, options)
    except RuntimeError:
        Problem.of(t, options)  # names the nested or sparse tensor, which has no strides or no address
        raise
    kind = plans.kinds.get(key)
    if kind is None:
        readable = _readable(t)
        if readable is not t:
            return _kind(readable, options)
        kind = _Kind(key, options, _family(t, options))
        plans.keep(key, kind)
    return t, kind


def _family(t: Tensors, options: Options) -> Family:
    common = family_of(t, options)
    if common is None:
        return Family()
    return plans.family((*common, settings.BACKEND.raw(), products(t.q)))


def _key(t: Tensors, options: Options) -> tuple[Any, ...]:
    layouts = _layouts(t.q, t.k, t.v)
    return (options, layouts) if is_plain(t) else (options, layouts, *_other_layouts(t))


def _layouts(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    # Written out for speed: every call runs this. Most addresses are on 16 bytes.
    return (
        settings.BACKEND.raw(), q.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision,
        q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 and tuple(x.data_ptr() % 16 for x in (q, k, v)),
    )  # fmt: skip


def _other_layouts(t: Tensors) -> tuple[Any, ...]:
    bounds_q, bounds_k = t.cu_seqlens_q, t.cu_seqlens_k
    # Kernels specialise on packed sequences that attend to themselves.
    is_self = bounds_q is not None and bounds_k is not None and bounds_q.data_ptr() == bounds_k.data_ptr()
    return *(None if x is None else layout(x) for x in other_tensors(t)), is_self


def _checked_forward(problem: Problem, run: Forward, t: Tensors) -> tuple[Tensor, Tensor]:
    if problem.device_type == "cpu" or settings.CHECK.enabled():
        check_values(problem, t)
    return run(t)


def _gradients(
    kind: _Kind, t: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients in the order of Grads, computed without the dispatcher.

    Saved-tensor hooks may return tensors with other strides; shapes and dtypes are unchanged.
    """
    q, k, v = t.q, t.k, t.v
    results, given = out.data_ptr() | lse.data_ptr(), q.data_ptr() | k.data_ptr() | v.data_ptr() | dout.data_ptr()
    key: Any = dout.dtype
    is_dense = q.is_contiguous() and k.is_contiguous() and v.is_contiguous() and dout.is_contiguous()
    if not is_dense or dlse is not None or (results | given) % 16 or not is_plain(t):
        layouts = ((*x.stride(), x.data_ptr() % 16) for x in (q, k, v, dout))
        key = key, results % 16, *layouts, None if dlse is None else layout(dlse), *_other_layouts(t)
    run = kind.backwards.get(key)
    if run is None:
        run = kind.backwards[key] = kind.plan_backward(t, dout, dlse)
    return _gradient_values(run(t, out, lse, dout, dlse))


_gradient_values = fields_of(GRADIENTS.values())


def watched_gradients(options: Options, t: Tensors, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients in the order of Grads, through the operator."""
    out, lse, dout, dlse = others
    found = torch.ops.flashtile.attention_backward(dout, dlse, out, lse, *flatten(t, options))
    return tuple(x if wanted else None for x, wanted in zip(found, options.grads, strict=True))


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    tensors, kind = _kind(*unflatten(args))
    return kind.run(tensors)


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    tensors, options = unflatten(args)
    problem = Problem.of(tensors, options)
    q, v = tensors.q, tensors.v
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(problem.lse_shape(q), dtype=problem.lse_dtype)


def _backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    tensors, options = unflatten(args)
    tensors, kind = _kind(tensors, options)
    found = _gradients(kind, tensors, out, lse, dout, dlse)
    return tuple(
        x if wanted and x is not None else out.new_empty(0) for x, wanted in zip(found, options.grads, strict=True)
    )


def _backward_fake(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    tensors, options = unflatten(args)
    inputs = zip(differentiable(tensors), options.grads, strict=True)
    return tuple(x.new_empty(x.shape) if wanted and x is not None else out.new_empty(0) for x, wanted in inputs)


def _jvp(*args: Any) -> tuple[Tensor, Tensor]:
    from flashtile.backends.cpu import jvp as forward_mode  # what few programs need is not loaded by all

    return forward_mode.jvp(*args)


def _jvp_fake(*args: Any) -> tuple[Tensor, Tensor]:
    out, lse = args[5:7]
    return out.new_empty(out.shape), lse.new_empty(lse.shape)


class _Attention(torch.autograd.Function):
    """Equivalent to the operators under autograd (``transforms``), but without the dispatcher.

    Its lookup of each argument takes 0.1 ms per call, more than all host work of this library.
    """

    @staticmethod
    def forward(ctx: Any, call: tuple[_Kind, Tensors, bool], *inputs: Tensor | None) -> tuple[Tensor, Tensor] | Tensor:
        kind, t, with_lse = call
        out, lse = kind.run(t)
        ctx.save_for_backward(*(inputs if is_plain(t) else tensor_values(t)), out, lse)
        ctx.kind = kind
        ctx.set_materialize_grads(False)
        return (out, lse) if with_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        # Once: under torch.utils.checkpoint a second access is an error.
        q, k, v, *others, out, lse = ctx.saved_tensors
        tensors, kind = Tensors(q, k, v, *others), ctx.kind
        watched = torch.is_grad_enabled() or is_watched(q, k, v) or _is_special(dout) or _is_special(dlse)
        dout = torch.zeros_like(out) if dout is None else dout
        if watched:
            grads = watched_gradients(kind.options, tensors, out, lse, dout, dlse)
        else:
            grads = _gradients(kind, tensors, out, lse, dout, dlse)
        return None, *(grads if others else grads[:3])


# Skips the wrapper of Function.apply, which handles functorch: calls under functorch go through the dispatcher.
_apply = super(torch.autograd.Function, _Attention).apply
# Past a wrapper that asks which method of two the class has.
_Attention._backward_cls.apply = _Attention.backward  # type: ignore[attr-defined]


torch.library.impl(FORWARD, ("cpu", "cuda"))(_forward)
torch.library.impl(BACKWARD, ("cpu", "cuda"))(_backward)
torch.library.register_fake(FORWARD)(_forward_fake)
torch.library.register_fake(BACKWARD)(_backward_fake)
torch.library.impl(JVP, ("cpu", "cuda"))(_jvp)
torch.library.register_fake(JVP)(_jvp_fake)
