"""Quantized calls on the CPU: values in float32 go through the forward, with exact probabilities.

The output belongs to the quantised tensors, without the rounding of probabilities to 8 bits that kernels do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.backends.cpu import forward
from flashtile.call.blocks import LARGEST
from flashtile.call.problem import Problem, Tensors
from flashtile.call.quantized import Quantized
from flashtile.call.quantized_call import QuantizedTensors


def describe(problem: Problem) -> str:
    """The path in one line."""
    return f"values in float32, {forward.describe(_wide(problem))}"


def quantized(problem: Problem, t: QuantizedTensors) -> tuple[Tensor, Tensor]:
    """See ``call.backend.QuantizedForward``."""
    scales = t.q_scale, t.k_scale, t.v_scale
    record = Quantized(t.q, t.k, t.v, *scales, cu_seqlens_q=t.cu_seqlens_q, cu_seqlens_k=t.cu_seqlens_k)
    q, k, v = record.dequantized()
    call = Tensors(q, k, v, cu_seqlens_q=t.cu_seqlens_q, cu_seqlens_k=t.cu_seqlens_k)
    out, lse = forward.forward(_wide(problem), call)
    if t.shift is not None:
        lse = torch.where(lse == -torch.inf, lse, lse + t.shift * problem.softmax_scale)
    if t.sinks is not None:
        # Rows past the last bound belong to no sequence.
        rows = slice(None) if t.cu_seqlens_q is None else slice(0, int(t.cu_seqlens_q[-1]))
        forward.add_sinks(out[..., rows, :, :].transpose(-2, -3), lse[..., rows], t.sinks)
    if t.out_scale is not None:
        out = (out / t.out_scale).clamp(-LARGEST, LARGEST)
    return out.to(problem.out_dtype), lse


def _wide(problem: Problem) -> Problem:
    """The regular call without sinks, which are added after lse contains the mean of the keys again."""
    return problem.but(dtype=torch.float32, sinks=False)
