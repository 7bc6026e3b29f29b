"""The operators of regular calls, dense or packed, and the autograd of eager ones; the operator of quantized calls."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from flashtile.call import quantized_call
from flashtile.call.arguments import (
    GRADIENTS,
    TENSORS,
    Options,
    Tensors,
    differentiable,
    fields_of,
    is_plain,
    other_tensors,
    single_tensors,
)
from flashtile.call.backend import Given, Plan
from flashtile.call.problem import Problem, check_values
from flashtile.call.quantized_call import QuantizedOptions, QuantizedTensors
from flashtile.core import settings
from flashtile.core.sizes import is_dense
from flashtile.core.states import in_one, without_max_scores
from flashtile.ops import flops, plans
from flashtile.ops.operation import Operation, PlannedCall, is_watched
from flashtile.ops.plans import layout


def attention(tensors: Tensors, options: Options, with_lse: bool = True) -> tuple[Tensor, Any]:
    """Calls the forward operator, or its implementation directly where the dispatcher is not needed.

    Args:
        tensors: The call's tensors.
        options: The call's options.
        with_lse: Whether the caller uses lse; if not, autograd does not track it.

    Returns:
        out and lse, as in ``call.backend.Forward``; ``states.asked_for`` makes what the caller returns of them. Without
        ``with_lse`` lse may be None.
    """
    found: Any
    if is_watched(tensors.q, tensors.k, tensors.v):
        found = FORWARD.overload(*REGULAR.flatten(REGULAR.readable(tensors), options))
        return found
    tensors, call = REGULAR.planned(tensors, options)
    if not any(options.grads):
        found = call.run(tensors)
        return found
    inputs = (tensors.q, tensors.k, tensors.v) if is_plain(tensors) else leaves_of(tensors)
    found = _apply((call, tensors, with_lse), *inputs)
    return found if with_lse else (found, None)


def flat_tensors(t: Tensors) -> tuple[Tensor | None, ...]:
    """All tensors of a call, its operands last."""
    return single_tensors(t) if t.operands is None else (*single_tensors(t), *t.operands)


def of_flat(flat: Sequence[Any], numbers: tuple[float, ...] | None) -> Tensors:
    """The inverse of ``flat_tensors``."""
    count = len(TENSORS) - 2
    has_mods = len(flat) > count or numbers is not None
    return cast(Any, Tensors)(*flat[:count], tuple(flat[count:]) if has_mods else None, numbers)


def leaves_of(t: Tensors) -> tuple[Tensor | None, ...]:
    """The tensors that may have gradients, in the order of ``Grads``."""
    return differentiable(t) if t.operands is None else (*differentiable(t), *t.operands)


def attention_again(options: Options, t: Tensors) -> Tensor:
    """``attention`` where only q, k and v are given, lse is not used, and nothing watches."""
    try:
        key = options, _layouts(t.q, t.k, t.v)
    except RuntimeError:
        return attention(t, options, False)[0]  # names what has no layout
    call = plans.kept.get(key)
    if call is None:
        t, call = REGULAR.planned(t, options, key)
    found: Tensor = _apply((call, t, False), t.q, t.k, t.v) if any(options.grads) else call.run(t)[0]
    return found


# By names of this module: torch has a ``__getattr__``, so Python looks for its names anew at each use; and each object
# more that another thread has used too costs the backward's thread.
_is_batch, _has_grads, _FLOAT32 = torch._C._functorch.is_legacy_batchedtensor, torch.is_grad_enabled, torch.float32


def _is_special(dout: Tensor | None) -> bool:
    """Whether a gradient that arrives is of a subclass, or a batch of gradients (``is_grads_batched``)."""
    return dout is not None and (type(dout) is not Tensor or _is_batch(dout))


def _key(t: Tensors, options: Options) -> tuple[Any, ...]:
    layouts = _layouts(t.q, t.k, t.v)
    return (options, layouts) if is_plain(t) else (options, layouts, *_other_layouts(t))


def _layouts(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    # Written out for speed: every call runs this. Most addresses are on 16 bytes.
    dtype = q.dtype
    return (
        settings.BACKEND.raw(), dtype is _FLOAT32 and torch.backends.cuda.matmul.fp32_precision,
        q.shape, q.stride(), dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 and tuple(x.data_ptr() % 16 for x in (q, k, v)),
    )  # fmt: skip


def _other_layouts(t: Tensors) -> tuple[Any, ...]:
    bounds_q, bounds_k = t.cu_seqlens_q, t.cu_seqlens_k
    # Kernels specialise on packed sequences that attend to themselves.
    is_self = bounds_q is not None and bounds_k is not None and bounds_q.data_ptr() == bounds_k.data_ptr()
    own = *[None if x is None else layout(x) for x in other_tensors(t)], is_self
    return own if t.operands is None else (*own, *map(layout, t.operands), len(t.numbers or ()))


class _Regular(Operation[Tensors, Options]):
    def readable(self, t: Tensors) -> Tensors:
        """As ``Operation.readable``; most calls need no copy."""
        dense = is_plain(t) and is_dense(t.q) and is_dense(t.k) and is_dense(t.v)
        return t if dense else Operation.readable(self, t)  # torch.compile 2.11 cannot trace super() here

    def prepare(self, t: Tensors, o: Options, **but: Any) -> tuple[Problem, plans.ShapeClass]:
        """As ``Operation.prepare``; a call of a known shape class needs no checks."""
        common, others = plans.class_key(t, o), (settings.BACKEND.raw(), plans.products(t.q), *but.items())
        shape_class = plans.ShapeClass() if common is None else plans.shape_class((*common, *others))
        return shape_class.problem_of(t, o, **but), shape_class


REGULAR = _Regular(
    "a regular call", "forward", Tensors, Options, Problem.of, check_values, _key, lambda problem: problem.varlen
)


def _gradients(
    call: PlannedCall, t: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients in the order of ``leaves_of``, computed without the dispatcher.

    Saved-tensor hooks may return tensors with other strides; shapes and dtypes are unchanged.
    """
    q, k, v = t.q, t.k, t.v
    given = q.data_ptr() | k.data_ptr() | v.data_ptr() | dout.data_ptr()
    key: Any = dout.dtype
    is_dense = q.is_contiguous() and k.is_contiguous() and v.is_contiguous() and dout.is_contiguous()
    has_others = call.key[2:]  # beside q, k and v: see ``_key``
    if not is_dense or dlse is not None or given % 16 or has_others:
        layouts = ((*x.stride(), x.data_ptr() % 16) for x in (q, k, v, dout))
        key = key, *layouts, None if dlse is None else layout(dlse), *_other_layouts(t)
    run = call.backwards.get(key)
    if run is None:
        run = call.backwards[key] = _plan_backward(call, t, (dout, dlse))
    found = run(t, out, lse, dout, dlse)
    if t.operands is None:
        return _gradient_values(found)
    return (*_gradient_values(found), *(found.doperands or [None] * len(t.operands)))


_gradient_values = fields_of(GRADIENTS.values())


def _plan_backward(call: PlannedCall, t: Tensors, given: Given) -> Plan:
    """A plan of the backward for tensors that saved-tensor hooks may have laid out anew."""
    if _key(t, call.options) == call.key:
        return call.shape_class.plan("backward", call.problem, t, given, call.options.backend)
    return REGULAR.plan("backward", t, call.options, given)


def watched_gradients(options: Options, t: Tensors, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients in the order of ``leaves_of``, through the operator."""
    out, lse, dout, dlse = others
    *found, flat = BACKWARD.overload(dout, dlse, out, lse, *REGULAR.flatten(t, options))
    named = tuple(x if wanted else None for x, wanted in zip(found, options.grads.named, strict=True))
    if t.operands is None:
        return named
    asked = _operands_wanted(t, options)
    shares = iter(flat.split([x.numel() for x in asked if x is not None]))
    return *named, *(None if x is None else next(shares).view(x.shape).to(x.dtype) for x in asked)


def plain_gradient(dlse: Tensor, out: Tensor, options: Options) -> Tensor:
    """The gradient of lse alone: its other parts and the largest scores have none."""
    return in_one(without_max_scores(dlse) if options.return_max_scores else dlse, out)


def _operands_wanted(t: Tensors, options: Options) -> list[Tensor | None]:
    """The operands that need a gradient; None in the place of others."""
    operands = t.operands or ()
    wanted = options.grads.operands or (False,) * len(operands)
    return [x if is_wanted else None for x, is_wanted in zip(operands, wanted, strict=True)]


def _backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    tensors, options = REGULAR.unflatten(args)
    tensors, call = REGULAR.planned(tensors, options)
    found = _gradients(call, tensors, out, lse, dout, dlse)
    named = (
        x if wanted and x is not None else out.new_empty(0)
        for x, wanted in zip(found, options.grads.named, strict=False)
    )
    # One tensor for all operands: PyTorch's batches of gradients know no lists.
    of_operands = zip(found[len(GRADIENTS) :], _operands_wanted(tensors, options), strict=True)
    flat = [x.reshape(-1) for x, like in of_operands if like is not None and x is not None]
    dtype = _flat_dtype(tensors, lse)
    return *named, torch.cat([x.to(dtype) for x in flat]) if flat else lse.new_empty(0, dtype=dtype)


def _flat_dtype(t: Tensors, lse: Tensor) -> torch.dtype:
    """The dtype of the gradients of all operands together."""
    return functools.reduce(torch.promote_types, (x.dtype for x in t.operands or ()), lse.dtype)


def _backward_fake(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    tensors, options = REGULAR.unflatten(args)
    inputs = zip(differentiable(tensors), options.grads.named, strict=True)
    named = (x.new_empty(x.shape) if wanted and x is not None else out.new_empty(0) for x, wanted in inputs)
    count = sum(x.numel() for x in _operands_wanted(tensors, options) if x is not None)
    return *named, lse.new_empty(count, dtype=_flat_dtype(tensors, lse))


def _jvp(*args: Any) -> tuple[Tensor, Tensor]:
    from flashtile.backends.cpu import jvp as forward_mode  # what few programs need is not loaded by all

    tensors, options = REGULAR.unflatten(args[7:])
    return forward_mode.jvp(args[:5], args[5], args[6], tensors, options)


def _jvp_fake(*args: Any) -> tuple[Tensor, Tensor]:
    out, lse = args[5:7]
    return out.new_empty(out.shape), lse.new_empty(lse.shape[: out.dim() - 1])


def _second(*args: Any) -> tuple[Tensor, ...]:
    from flashtile.ops import second  # what few programs need is not loaded by all

    dout, dlse, out, lse = args[5:9]
    tensors, call = REGULAR.planned(*REGULAR.unflatten(args[9:]))
    found = second.run(call, tensors, args[:5], out, lse, dout, dlse)
    return tuple(out.new_empty(0) if x is None else x for x in found)


def _second_fake(*args: Any) -> tuple[Tensor, ...]:
    tensors, _ = REGULAR.unflatten(args[9:])
    dout, dlse, out, _ = args[5:9]
    return tuple(
        out.new_empty(0) if x is None else x.new_empty(x.shape) for x in (*differentiable(tensors), dout, dlse)
    )


class _Attention(torch.autograd.Function):
    """Equivalent to the operators under autograd (``transforms``), but without the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, given: tuple[PlannedCall, Tensors, bool], *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor] | Tensor:
        call, t, with_lse = given
        out, lse = call.run(t)
        saved = without_max_scores(lse) if call.options.return_max_scores else lse
        is_alone = len(inputs) == 3  # ``attend`` hands on q, k and v of a call without others, else all leaves
        ctx.save_for_backward(*(inputs if is_alone else flat_tensors(t)), out, saved)
        ctx.planned = call, t.numbers
        ctx.set_materialize_grads(False)
        return (out, lse) if with_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:  # a second derivative reaches this node by out and lse, and hands it nothing
            return (None,) * len(ctx.needs_input_grad)
        # Once: under torch.utils.checkpoint a second access is an error.
        q, k, v, *others, out, lse = ctx.saved_tensors
        call, numbers = ctx.planned
        tensors = of_flat((q, k, v, *others), numbers) if others else Tensors(q, k, v)
        watched = _has_grads() or is_watched(q, k, v) or _is_special(dout) or _is_special(dlse)
        dout = torch.zeros_like(out) if dout is None else dout
        dlse = None if dlse is None else plain_gradient(dlse, out, call.options)
        if watched:
            grads = watched_gradients(call.options, tensors, out, lse, dout, dlse)
        else:
            grads = _gradients(call, tensors, out, lse, dout, dlse)
        return None, *(grads if others else grads[:3])


# Skips the wrapper of Function.apply, which handles functorch: calls under functorch go through the dispatcher.
_apply = super(torch.autograd.Function, _Attention).apply
# Past a wrapper that asks which method of two the class has.
_Attention._backward_cls.apply = _Attention.backward  # type: ignore[attr-defined]


# ``transforms`` registers their derivatives.
FORWARD = REGULAR.define("attention_forward", REGULAR.run, REGULAR.fake, flops=flops.forward_flops, has_derivative=True)
BACKWARD = REGULAR.define(
    "attention_backward",
    _backward,
    _backward_fake,
    leading={"dout": "Tensor", "dlse": "Tensor?", "out": "Tensor", "lse": "Tensor"},
    results=(*GRADIENTS.values(), "doperands"),
    flops=flops.backward_flops,
    has_derivative=True,
)
JVP = REGULAR.define(
    "attention_jvp",
    _jvp,
    _jvp_fake,
    leading={**dict.fromkeys(GRADIENTS.values(), "Tensor?"), "out": "Tensor", "lse": "Tensor"},
    results=("dout", "dlse"),
    flops=flops.jvp_flops,
    has_derivative=True,
)

# The gradients of the backward's results: directions are what arrives for them.
SECOND = REGULAR.define(
    "attention_second",
    _second,
    _second_fake,
    leading={f"d{name}": "Tensor?" for name in GRADIENTS.values()}
    | {"dout": "Tensor", "dlse": "Tensor?", "out": "Tensor", "lse": "Tensor"},
    results=("q", "k", "v", "attn_bias", "sinks", "dout", "dlse"),
    flops=flops.second_flops,
    has_derivative=True,
)


def attend_quantized(t: QuantizedTensors, options: QuantizedOptions) -> tuple[Tensor, Tensor]:
    """A quantized call, through its operator or directly: out and lse, as in ``call.backend.QuantizedForward``."""
    found: tuple[Tensor, Tensor]
    if is_watched(t.q, t.k, t.v):
        found = QUANTIZED_FORWARD.overload(*QUANTIZED.flatten(t, options))
        return found
    QUANTIZED.check_types(t)
    t, call = QUANTIZED.planned(t, options)
    found = call.run(t)
    return found


QUANTIZED = Operation(
    "a quantized call", "quantized", QuantizedTensors, QuantizedOptions, quantized_call.problem_of,
    quantized_call.check_values,
)  # fmt: skip
QUANTIZED_FORWARD = QUANTIZED.define("attention_quantized", QUANTIZED.run, QUANTIZED.fake, flops=flops.quantized_flops)
