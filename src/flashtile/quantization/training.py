"""Training in 8 bits: the forward rounds q, k and v; the backward does not, and starts from that forward's results.

A straight-through estimator: gradients are those of attention in the inputs' 16 bits, with probabilities
``exp(score - lse)`` from the 8-bit forward's lse. It saves no time in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile import dispatch
from flashtile import ops as regular
from flashtile.arguments import GRADIENTS, TENSORS, Options, Tensors, tensor_values
from flashtile.problem import Problem
from flashtile.quantization import ops
from flashtile.quantization.arguments import QuantizedTensors, options_of
from flashtile.quantization.quantize import quantize
from flashtile.quantization.record import Quantized


def rounded(t: Tensors, o: Options) -> Quantized:
    """q, k and v in 8 bits as ``precision="fp8"`` has them: keys keep their mean if there is a softcap."""
    return quantize(
        t.q, t.k, t.v, smooth_k=o.softcap == 0, cu_seqlens_q=t.cu_seqlens_q, cu_seqlens_k=t.cu_seqlens_k,
        max_seqlen_q=o.max_seqlen_q, max_seqlen_k=o.max_seqlen_k,
    )  # fmt: skip


def of_record(record: Quantized, sinks: Tensor | None) -> QuantizedTensors:
    """The operator's tensors of a call."""
    r = record
    return QuantizedTensors(
        r.q, r.k, r.v, r.q_scale, r.k_scale, r.v_scale, r.shift, sinks, r.cu_seqlens_q, r.cu_seqlens_k
    )


def attend(t: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Out and lse of a call that needs gradients."""
    if not torch.compiler.is_compiling():
        # A call whose backward cannot run is refused now.
        dispatch.select(Problem.of(t, options), "backward", options.backend)
    found: tuple[Tensor, Tensor] = _StraightThrough.apply(options, *tensor_values(t))
    return found


class _StraightThrough(torch.autograd.Function):
    """The quantized forward with the gradients of a regular call."""

    @staticmethod
    def forward(options: Options, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        t = Tensors(*inputs)  # type: ignore[arg-type]
        record = rounded(t, options)
        return ops.attend(of_record(record, t.sinks), options_of(options, record.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.options = inputs[0]
        ctx.save_for_backward(*inputs[1:], *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        t = Tensors(*inputs)
        dout = torch.zeros_like(out) if dout is None else dout
        of = dict(zip(GRADIENTS, regular.watched_gradients(ctx.options, t, out, lse, dout, dlse), strict=True))
        return None, *(of.get(name) for name in TENSORS)
