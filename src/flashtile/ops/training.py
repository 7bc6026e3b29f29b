"""Training in 8 bits: the forward rounds q, k and v; the backward computes in 16 bits, from that forward's results.

A straight-through estimator: gradients are those of attention in 16 bits at the numbers to which q, k and v were
rounded, with probabilities ``exp(score - lse)`` from the 8-bit forward's lse. Scores of q and k themselves would not go
with that lse: the probabilities of a row would not add up to 1, and training diverges. It saves no time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.api.quantize import quantize
from flashtile.backends.cpu.rounding import restored
from flashtile.call.arguments import GRADIENTS, TENSORS, Options, Tensors, tensor_values
from flashtile.call.problem import Problem
from flashtile.call.quantized import Quantized
from flashtile.call.quantized_arguments import QuantizedTensors, options_of
from flashtile.ops import dispatch
from flashtile.ops import operators as regular
from flashtile.ops import quantized as ops


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
    out, lse, *_ = _StraightThrough.apply(options, *tensor_values(t))
    return out, lse


class _StraightThrough(torch.autograd.Function):
    """The quantized forward with the gradients of a regular call; also returns the rounded q, k and v, to save them."""

    @staticmethod
    def forward(options: Options, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        t = Tensors(*inputs)  # type: ignore[arg-type]
        record = rounded(t, options)
        return *ops.attend(of_record(record, t.sinks), options_of(options, record.dtype)), *restored(record, t.k)

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
        of = dict(zip(GRADIENTS, regular.watched_gradients(ctx.options, t, out, lse, dout, dlse), strict=True))
        return None, *(of.get(name) for name in TENSORS)
