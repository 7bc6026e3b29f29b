"""8-bit attention in plain PyTorch, with the roundings of the kernels: of probabilities, and of sums of products."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flashtile.call.blocks import BLOCK, as_blocks, scale_of_rows
from flashtile.call.quantized import E4M3, Quantized
from flashtile.core.errors import InvalidInputError

# What sums of products are kept in: float32; a matrix instruction's accumulator, added to float32 numbers after each
# block of keys, as the kernels do; or one such accumulator for all keys.
Sums = Literal["float32", "block", "one"]
# Of a matrix instruction: the products that it adds at once, and the bits below the largest number's that it keeps.
_STEP, _BITS = 32, 13


def emulated(
    given: Quantized, *, softmax_scale: float | None = None, causal: bool = False, sums: Sums = "float32"
) -> Tensor:
    """Attention block by block, with probabilities of up to 256 rounded to e4m3, and row sums of the rounded ones.

    Args:
        given: Dense tensors. With causal there are at least as many keys as queries.
        softmax_scale: Factor of the scores; ``head_dim ** -0.5`` by default.
        causal: As in ``attention``.
        sums: How the products of probabilities and values are added. ``"one"`` needs one scale a head, or a tensor.

    Returns:
        out ``(batch, seqlen_q, num_heads_q, head_dim_v)``, float32.

    Raises:
        InvalidInputError: The sequences are packed, or have more scales than ``sums`` takes.
    """
    if given.cu_seqlens_q is not None:
        raise InvalidInputError("given", "has packed sequences, must be dense")
    if sums == "one" and given.scales == "block":
        raise InvalidInputError("sums", "is 'one', but the values have scales of blocks")
    q, k = (x.float().movedim(-2, -3) for x in (given.q, given.k))
    seqlen_q, seqlen_k, group = q.shape[-2], k.shape[-2], q.shape[1] // k.shape[1]
    v = as_blocks(given.v.view(torch.uint8)).contiguous().view(E4M3).float().movedim(-2, -4).flatten(-3, -2)
    of_q = scale_of_rows(given.q_scale, None, seqlen_q).movedim(-2, -3)
    of_k, of_v = (scale_of_rows(x, None, seqlen_k).movedim(-2, -3) for x in (given.k_scale, given.v_scale))
    k, v, of_k, of_v = (x.repeat_interleave(group, dim=1) if x.shape[1] > 1 else x for x in (k, v, of_k, of_v))
    q = q * (of_q * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale))
    last = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
    row_max, row_sum = q.new_full((*q.shape[:-1], 1), -torch.inf), q.new_zeros((*q.shape[:-1], 1))
    acc = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for first in range(0, seqlen_k, BLOCK):
        keys = slice(first, min(first + BLOCK, seqlen_k))
        scores = q @ (k[..., keys, :] * (of_k[..., keys, :] if of_k.shape[-2] > 1 else of_k)).mT
        if causal:
            scores = scores.masked_fill(torch.arange(keys.start, keys.stop, device=q.device) > last, -torch.inf)
        highest = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        probs, alpha = ((scores - highest).exp() * 256.0).to(E4M3).float(), (row_max - highest).exp()
        row_max, row_sum = highest, row_sum * alpha + probs.sum(-1, keepdim=True)
        if sums == "one":
            acc = _added(acc * alpha, probs, v[..., keys, :])
        else:
            found = (
                probs @ v[..., keys, :] if sums == "float32" else _added(torch.zeros_like(acc), probs, v[..., keys, :])
            )
            acc = acc * alpha + found * (of_v[..., first : first + 1, :] if of_v.shape[-2] > 1 else of_v)
    return (acc / row_sum * (of_v if sums == "one" else 1.0)).movedim(-3, -2)


def _added(acc: Tensor, probs: Tensor, v: Tensor) -> Tensor:
    """An accumulator and the products of e4m3 numbers, as Hopper's matrix instructions add them.

    Of the accumulator and 32 products at a time, each loses the bits more than 13 below the largest one's first. This
    gives the errors that were measured on an H200, of one accumulator over 8k and 64k keys, within a tenth.
    """
    for first in range(0, v.shape[-2], _STEP):
        here = slice(first, first + _STEP)
        products = probs[..., here, None] * v[..., None, here, :]
        largest = torch.maximum(acc.abs(), products.abs().amax(-2))
        unit = torch.ldexp(torch.ones_like(acc), torch.frexp(largest).exponent - 1 - _BITS)
        acc = ((products / unit[..., None, :]).trunc().sum(-2) + (acc / unit).trunc()) * unit
    return acc
