"""Quantized calls on the CPU: the values in float32, through the forward, with exact probabilities.

The output is that of the quantised tensors without the rounding of probabilities to 8 bits, which kernels add.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.backends.cpu import forward
from flashtile.problem import Problem, Tensors
from flashtile.quantization.arguments import QuantizedTensors
from flashtile.quantization.problem import BLOCK, ORDER


def describe(problem: Problem) -> str:
    """The path in one line."""
    return f"values in float32, {forward.describe(_wide(problem))}"


def quantized(problem: Problem, t: QuantizedTensors) -> tuple[Tensor, Tensor]:
    """See ``backends.base.QuantizedForward``."""
    q = _scaled(t.q, t.q_scale, t.cu_seqlens_q)
    k = _scaled(t.k, t.k_scale, t.cu_seqlens_k)
    v = _scaled(_rows_of_values(t), t.v_scale, t.cu_seqlens_k)
    call = Tensors(q, k, v, cu_seqlens_q=t.cu_seqlens_q, cu_seqlens_k=t.cu_seqlens_k)
    out, lse = forward.forward(_wide(problem), call)
    if t.shift is not None:
        lse = torch.where(lse == -torch.inf, lse, lse + t.shift * problem.softmax_scale)
    if t.sinks is not None:
        # Rows past the last bound belong to no sequence.
        rows = slice(None) if t.cu_seqlens_q is None else slice(0, int(t.cu_seqlens_q[-1]))
        forward.add_sinks(out[..., rows, :, :].transpose(-2, -3), lse[..., rows], t.sinks)
    return out.to(problem.out_dtype), lse


def _wide(problem: Problem) -> Problem:
    """The regular call; sinks join when the mean of the keys is back in lse."""
    return problem.but(dtype=torch.float32, sinks=False)


def _places(length: int, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of each row, the block whose scale it has, and its place in that block."""
    rows = torch.arange(length, device="cpu")
    if bounds is None:
        return rows // BLOCK, rows % BLOCK
    sequence = torch.searchsorted(bounds[1:].long(), rows, right=True)
    starts = bounds[sequence].long()
    return starts // BLOCK + sequence + (rows - starts) // BLOCK, (rows - starts) % BLOCK


def _scaled(x: Tensor, scale: Tensor, bounds: Tensor | None) -> Tensor:
    """8-bit rows ``(..., rows, heads, dim)`` times their blocks' scales, in float32."""
    blocks, _ = _places(x.shape[-3], bounds)
    # Rows past the last bound have no block.
    each = scale[..., blocks.clamp(max=scale.shape[-1] - 1) if scale.shape[-1] else blocks]
    return x.float() * each.transpose(-1, -2)[..., None]


def _rows_of_values(t: QuantizedTensors) -> Tensor:
    """v as rows in their order: ``(..., rows, heads, dim)``."""
    length = t.k.shape[-3]
    blocks, places = _places(length, t.cu_seqlens_k)
    position = torch.tensor(ORDER, device="cpu").argsort()
    columns = blocks * BLOCK + places // 16 * 16 + position[places % 16]
    columns = columns.clamp(max=t.v.shape[-1] - 1) if t.v.shape[-1] else columns
    bits = t.v.view(torch.uint8).index_select(-1, columns)
    return bits.view(t.v.dtype).movedim(-1, -3)
