"""The torch.library operators: schemas, fakes, autograd and FLOP formulas.

One pair of operators carries every call, dense or packed. ``torch.compile``, ``FakeTensor``, ``torch.export`` and CUDA
graphs see opaque operators whose shapes they can infer; neither operator synchronises with a device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from flashtile import dispatch, flops, settings
from flashtile.backends.base import Backend, Direction
from flashtile.errors import UnsupportedError
from flashtile.masks import Band
from flashtile.problem import Problem, Tensors, check_values

# The arguments that both operators share, in schema order: the fields of ``Tensors``, then those of ``Options``.
_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, Tensor? attn_mask, Tensor? attn_bias, Tensor? sinks, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? rng_state"
)
_OPTIONS = (
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, int? window_left, int? window_right, float? softmax_scale, "
    "float softcap, float dropout_p, bool deterministic, bool needs_grad, bool bias_grad, str backend"
)
_NUM_TENSORS = len(dataclasses.fields(Tensors))

torch.library.define("flashtile::attention_forward", f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)")
torch.library.define(
    "flashtile::attention_backward",
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_TENSORS}, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """The plain arguments of the operators, in schema order.

    Attributes:
        max_seqlen_q: Longest query sequence of a packed call, None if unknown.
        max_seqlen_k: Longest key sequence of a packed call, None if unknown.
        window_left: Left bound of the Band.
        window_right: Right bound of the Band.
        softmax_scale: None for ``head_dim ** -0.5``.
        softcap: 0 for none.
        dropout_p: 0 for none.
        deterministic: Bitwise repeatable backward.
        needs_grad: Whether a backward will follow.
        bias_grad: Whether attn_bias needs a gradient.
        backend: Explicit choice, empty for none.
    """

    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    window_left: int | None = None
    window_right: int | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    needs_grad: bool = False
    bias_grad: bool = False
    backend: str = ""

    def problem(self, tensors: Tensors) -> Problem:
        """The checked record of the call."""
        return Problem.build(
            tensors,
            Band(self.window_left, self.window_right),
            softmax_scale=self.softmax_scale,
            softcap=self.softcap,
            dropout_p=self.dropout_p,
            deterministic=self.deterministic,
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_k=self.max_seqlen_k,
            needs_grad=self.needs_grad,
            bias_grad=self.bias_grad,
        )


_OPTION_NAMES = tuple(f.name for f in dataclasses.fields(Options))


def attention(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Calls the forward operator, or, where nothing would notice, its implementation.

    Returns:
        out and lse, as ``Backend.forward`` says.
    """
    t, o = tensors, options
    if _nobody_watches(t):
        if not o.needs_grad:
            return _run_forward(t, o)
        return _Attention.apply(
            o,
            t.q,
            t.k,
            t.v,
            t.alibi_slopes,
            t.attn_mask,
            t.attn_bias,
            t.sinks,
            t.cu_seqlens_q,
            t.cu_seqlens_k,
            t.rng_state,
        )
    return torch.ops.flashtile.attention_forward(
        t.q,
        t.k,
        t.v,
        t.alibi_slopes,
        t.attn_mask,
        t.attn_bias,
        t.sinks,
        t.cu_seqlens_q,
        t.cu_seqlens_k,
        t.rng_state,
        *(getattr(o, name) for name in _OPTION_NAMES),
    )


def _nobody_watches(t: Tensors) -> bool:
    """Whether the dispatcher would do nothing but call the implementation, which takes it as long as a kernel's launch.

    Someone watches while a program is traced, under a dispatch mode (FakeTensor, FLOP counter), a functorch transform
    or the profiler, and where a tensor is of a subclass or has no data.
    """
    return (
        type(t.q) is type(t.k) is type(t.v) is Tensor
        and not t.q.is_meta
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.autograd.profiler._is_profiler_enabled
    )


def _unflatten(args: tuple[Any, ...]) -> tuple[Tensors, Options]:
    return Tensors(*args[:_NUM_TENSORS]), Options(*args[_NUM_TENSORS:])


def _readable(tensors: Tensors) -> Tensors:
    """The tensors with the strides that kernels rely on: q, k and v contiguous in their last dimension."""
    t = tensors
    if _is_readable(t.q) and _is_readable(t.k) and _is_readable(t.v):
        return t
    copies = {n: getattr(t, n).contiguous() for n in ("q", "k", "v") if not _is_readable(getattr(t, n))}
    return dataclasses.replace(t, **copies)


def _is_readable(x: Tensor) -> bool:
    return x.dim() == 0 or x.stride(-1) == 1 or x.shape[-1] == 1


# Calls that passed every check, by all that the checks look at: a training loop asks the same few over and over.
_KNOWN: dict[tuple[Any, ...], tuple[Problem, Backend]] = {}
_MOST_KNOWN = 4096


def _resolve(tensors: Tensors, options: Options, direction: Direction) -> tuple[Problem, Backend]:
    """The checked record of a call and who runs it, looked up if a call like it has been resolved before."""
    t = tensors
    key = (
        direction,
        settings.BACKEND.get(),
        options,
        _layout(t.q),
        _layout(t.k),
        _layout(t.v),
        *(_kind(x) for x in (t.alibi_slopes, t.attn_mask, t.attn_bias, t.sinks, t.cu_seqlens_q, t.cu_seqlens_k)),
    )
    known = _KNOWN.get(key)
    if known is None:
        problem = options.problem(tensors)
        chosen = dispatch.select(problem, direction, options.backend or None)
        if problem.needs_grad:
            dispatch.select(problem, "backward", options.backend or None)
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        known = _KNOWN[key] = problem, chosen
    return known


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16


def _kind(x: Tensor | None) -> tuple[Any, ...] | None:
    return None if x is None else (x.shape, x.dtype, x.device)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    return _run_forward(*_unflatten(args))


def _run_forward(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    tensors = _readable(tensors)
    problem, chosen = _resolve(tensors, options, "forward")
    if problem.varlen and (problem.device_type == "cpu" or settings.CHECK.enabled()):
        check_values(problem, tensors)
    return chosen.forward(problem, tensors)


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    tensors, options = _unflatten(args)
    problem = options.problem(tensors)
    q, v = tensors.q, tensors.v
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(problem.lse_shape(q), dtype=problem.lse_dtype)


def _backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors, options = _unflatten(args)
    tensors = _readable(tensors)
    problem, chosen = _resolve(tensors, options, "backward")
    grads = chosen.backward(problem, tensors, out, lse, dout, dlse)
    nothing = (tensors.q.new_empty(0) for _ in range(2))
    dbias, dsinks = (g if g is not None else next(nothing) for g in (grads.dbias, grads.dsinks))
    return grads.dq, grads.dk, grads.dv, dbias, dsinks


def _backward_fake(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors, options = _unflatten(args)
    q, k, v = (t.new_empty(t.shape) for t in (tensors.q, tensors.k, tensors.v))
    bias, sinks = tensors.attn_bias, tensors.sinks
    dbias = bias.new_empty(bias.shape) if bias is not None and options.bias_grad else q.new_empty(0)
    return q, k, v, dbias, sinks.new_empty(sinks.shape) if sinks is not None else q.new_empty(0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *output)
    ctx.options = inputs[_NUM_TENSORS:]
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    run = torch.ops.flashtile.attention_backward
    grads = _input_gradients(ctx, dout, dlse, ctx.options, ctx.needs_input_grad, run)
    return *grads, *((None,) * len(ctx.options))


def _input_gradients(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, options: tuple[Any, ...], needed: tuple[bool, ...], run: Any
) -> tuple[Tensor | None, ...]:
    """Gradients of the fields of ``Tensors``, by a function with the backward operator's arguments."""
    nones: tuple[None, ...] = (None,) * _NUM_TENSORS
    if dout is None and dlse is None:
        return nones
    *inputs, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dbias, dsinks = run(dout, dlse, out, lse, *inputs, *options)
    return dq, dk, dv, None, None, dbias if needed[5] else None, dsinks if needed[6] else None, *nones[7:]


class _Attention(torch.autograd.Function):
    """What ``register_autograd`` makes of the operators, without looking up the schema's 21 arguments one by one.

    That takes 0.1 ms a call, more than all that this library does on the host.
    """

    @staticmethod
    def forward(ctx: Any, options: Options, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = _run_forward(Tensors(*tensors), options)  # type: ignore[arg-type]
        ctx.save_for_backward(*tensors, out, lse)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        is_watched = torch.is_grad_enabled() or not _nobody_watches(Tensors(*ctx.saved_tensors[:_NUM_TENSORS]))
        is_watched |= dout is not None and type(dout) is not Tensor
        run = torch.ops.flashtile.attention_backward if is_watched else _backward
        options = tuple(getattr(ctx.options, name) for name in _OPTION_NAMES)
        return None, *_input_gradients(ctx, dout, dlse, options, ctx.needs_input_grad[1:], run)


def _setup_no_second_derivative(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Nothing to keep."""


def _no_second_derivative(ctx: Any, *grads: Tensor | None) -> None:
    raise UnsupportedError("attention has no second derivative: its backward cannot be differentiated")


_FORWARD = "flashtile::attention_forward"
_BACKWARD = "flashtile::attention_backward"
torch.library.impl(_FORWARD, ("cpu", "cuda"))(_forward)
torch.library.impl(_BACKWARD, ("cpu", "cuda"))(_backward)
torch.library.register_fake(_FORWARD)(_forward_fake)
torch.library.register_fake(_BACKWARD)(_backward_fake)
torch.library.register_autograd(_FORWARD, _autograd, setup_context=_setup_context)
torch.library.register_autograd(_BACKWARD, _no_second_derivative, setup_context=_setup_no_second_derivative)
flops.install()
