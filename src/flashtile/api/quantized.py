"""Calls of the public functions in 8 bits: calls of a ``Quantized``, and calls with ``precision="fp8"``.

The gradients of the latter are a straight-through estimator's: attention's in 16 bits at the numbers to which q, k and
v were rounded, with probabilities ``exp(score - lse)`` from the 8-bit forward's lse. Scores of q and k themselves
would not go with that lse: the probabilities of a row would not add up to 1, and training diverges. It saves no time.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashtile.api.keywords import Asked
from flashtile.api.quantize import quantize
from flashtile.backends.cpu.rounding import restored
from flashtile.call import arguments
from flashtile.call.arguments import Options, Tensors
from flashtile.call.backend import Build, Direction
from flashtile.call.prepared import autocast, autocast_is_on, wanting, without_data
from flashtile.call.problem import Problem, compute_capability
from flashtile.call.quantized import Quantized
from flashtile.call.quantized_call import OUT_DTYPES, QuantizedOptions, QuantizedTensors, options_of, problem_of
from flashtile.core.errors import InvalidInputError, shown
from flashtile.ops import operators as ops
from flashtile.ops.operation import refuse_tangents
from flashtile.ops.transforms import once


def attend(given: Tensors, asked: Asked) -> Tensor | tuple[Tensor, Tensor]:
    """The call of a ``Quantized`` in place of q, or in the precision "fp8".

    Args:
        given: The call's tensors; q may be a ``Quantized``.
        asked: The rest of the call.

    Returns:
        out, or ``(out, lse)``, as the public functions do.

    Raises:
        InvalidInputError: Naming the argument.
        UnsupportedError: No backend can run the call.
    """
    tensors, options = read(given, asked)
    if any(options.grads) and not isinstance(given.q, Quantized):
        if not torch.compiler.is_compiling():
            ops.REGULAR.prepare(tensors, options)  # a call is refused now if its backward cannot run
        out, lse, *_ = _StraightThrough.apply(options, *arguments.tensor_values(tensors))
    else:
        out, lse = ops.attend_quantized(*quantized_call(given, tensors, options))
    return (out, lse) if asked.return_lse else out


def read(given: Tensors, asked: Asked) -> tuple[Tensors, Options]:
    """Checks a call; returns its tensors, a ``Quantized``'s as they lie in it, and its options."""
    if asked.precision not in (None, "fp8"):
        raise InvalidInputError("precision", f"is {shown(asked.precision)}, must be 'fp8' or None")
    tensors, lengths = given, asked.lengths
    if isinstance(given.q, Quantized):
        tensors, lengths = _of_record(given, asked)
    options = asked.read(tensors, lengths)
    for name in ("alibi_slopes", "attn_mask", "attn_bias"):
        if getattr(given, name) is not None:
            raise InvalidInputError(name, "is given, but does not go with 8 bits")
    if any(x is not None for x in (given.row_keys, given.key_rows, given.row_blocks)):
        raise InvalidInputError("block_mask", "is given, but does not go with 8 bits")
    if options.batch_invariant:
        raise InvalidInputError("batch_invariant", "is True, but does not go with 8 bits, which blocks of rows share")
    if options.dropout_p > 0:
        raise InvalidInputError("dropout_p", f"is {options.dropout_p}, must be 0 in 8 bits")
    if options.return_max_scores:
        raise InvalidInputError("return_max_scores", "is True, but does not go with 8 bits")
    if options.attention_chunk is not None:
        raise InvalidInputError("attention_chunk", f"is {options.attention_chunk}, but does not go with 8 bits")
    if tensors is given:
        if forward_ad._current_level >= 0:
            refuse_tangents(arguments.TENSORS, arguments.tensor_values(tensors), "a call in 8 bits")
        if autocast_is_on():
            tensors = autocast(tensors, tensors.q.device.type)
        if tensors.q.dtype not in OUT_DTYPES:
            raise InvalidInputError("q", f"dtype is {tensors.q.dtype}, must be bfloat16 or float16 for precision='fp8'")
    return tensors, options


def _of_record(given: Tensors, asked: Asked) -> tuple[Tensors, tuple[Any, Any]]:
    record: Any = given.q
    if asked.precision is not None:
        raise InvalidInputError("precision", "is given, but q is a Quantized: it has 8 bits already")
    for name in ("k", "v", "cu_seqlens_q", "cu_seqlens_k"):
        if getattr(given, name) is not None:
            raise InvalidInputError(name, "is given, but q is a Quantized, which has its own")
    for name, length in zip(("max_seqlen_q", "max_seqlen_k"), asked.lengths, strict=True):
        if length is not None:
            raise InvalidInputError(name, "is given, but q is a Quantized, which has its own")
    packed = record.cu_seqlens_q is not None
    if asked.packed not in (None, packed):
        other, what = ("_varlen", "packed sequences") if packed else ("", "sequences of one length")
        raise InvalidInputError("q", f"is a Quantized of {what}: flashtile.attention{other} takes it")
    # Written out: dataclasses.replace takes as long as all checks.
    tensors = Tensors(record.q, record.k, record.v, given.alibi_slopes, given.attn_mask, given.attn_bias, given.sinks)
    return tensors, (record.max_seqlen_q, record.max_seqlen_k)


def calls(
    given: Tensors, asked: Asked, device: torch.device | None, backward: bool | None = None
) -> list[tuple[Problem, Any, Direction]]:
    """What a call runs, without running it: problems, their tensors on the meta device, and directions.

    Args:
        given: As for ``attend``.
        asked: As for ``attend``.
        device: Where the call would run; None is where its tensors are.
        backward: As for ``warm_up``; None takes the gradients that the tensors require.
    """
    tensors, options = read(given, asked)
    device, shapes = device or tensors.q.device, without_data(tensors)
    if isinstance(given.q, Quantized):
        t, o = quantized_call(given, tensors, options)
        t = without_data(t)
    else:
        options = options if backward is None else wanting(tensors, options, backward)
        t, o = quantized_call(shapes, shapes, options)
    place = {"device_type": device.type, "compute_capability": compute_capability(device)}
    found: list[tuple[Problem, Any, Direction]] = [(problem_of(t, o).but(**place), t, "quantized")]
    if any(options.grads):
        found.append((Problem.of(shapes, options).but(**place), shapes, "backward"))
    return found


def rounding_builds(given: Tensors, asked: Asked, device: torch.device) -> list[Build]:
    """The kernels that round the tensors of a call on the current GPU; none for a ``Quantized``, and off GPUs."""
    if isinstance(given.q, Quantized) or device.type != "cuda" or not find_spec("triton"):
        return []
    from flashtile.backends.gpu import build
    from flashtile.backends.portable.rounding import launch
    from flashtile.call.quantized import Choices, Inputs

    tensors, options = read(given, asked)
    t = without_data(tensors)
    inputs = Inputs(t.q, t.k, t.v, t.cu_seqlens_q, t.cu_seqlens_k)
    choices = Choices(smooth_k=options.softcap == 0)
    return build.builds(launch.launches(inputs, choices, compute_capability(device)))


def quantized_call(given: Tensors, tensors: Tensors, options: Options) -> tuple[QuantizedTensors, QuantizedOptions]:
    """The operator's arguments for a call that ``read`` has read; rounds q, k and v if they are not yet of 8 bits."""
    record: Any = given.q if isinstance(given.q, Quantized) else _rounded(tensors, options)
    return of_record(record, given.sinks), options_of(options, record.dtype)


def of_record(record: Quantized, sinks: Tensor | None) -> QuantizedTensors:
    """The operator's tensors of a call."""
    r = record
    return QuantizedTensors(
        r.q, r.k, r.v, r.q_scale, r.k_scale, r.v_scale, r.shift, sinks, r.cu_seqlens_q, r.cu_seqlens_k, r.out_scale
    )


def _rounded(t: Tensors, o: Options) -> Quantized:
    """q, k and v in 8 bits as ``precision="fp8"`` has them: keys keep their mean if there is a softcap."""
    return quantize(
        t.q, t.k, t.v, smooth_k=o.softcap == 0, cu_seqlens_q=t.cu_seqlens_q, cu_seqlens_k=t.cu_seqlens_k,
        max_seqlen_q=o.max_seqlen_q, max_seqlen_k=o.max_seqlen_k,
    )  # fmt: skip


class _StraightThrough(torch.autograd.Function):
    """The quantized forward with the gradients of a regular call; also returns the rounded q, k and v, to save them."""

    @staticmethod
    def forward(options: Options, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        t = Tensors(*inputs)  # type: ignore[arg-type]
        record = _rounded(t, options)
        return *ops.attend_quantized(of_record(record, t.sinks), options_of(options, record.dtype)), *restored(
            record, t.k
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options = inputs[0]
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*output[2:], *inputs[4:], *output[:2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        t = Tensors(*inputs)
        dout = torch.zeros_like(out) if dout is None else dout
        run = functools.partial(ops.watched_gradients, ctx.options, t)
        # Its derivative would be of a forward that was not rounded.
        found = once(run, "second derivative: its backward with 8 bits", out, lse, dout, dlse)
        of = dict(zip(arguments.GRADIENTS, found, strict=True))
        return None, *(of.get(name) for name in arguments.TENSORS)
