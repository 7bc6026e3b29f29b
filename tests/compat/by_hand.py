"""Attention with every score in memory, and what the tests of other packages' functions share."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def shown(function: Callable[..., Any]) -> str:
    """A function's parameters and defaults, without annotations; fails for any that is not positional or keyword."""
    parameters = inspect.signature(function).parameters.values()
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return str(inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters]))


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One batch of equal lengths, every score in memory."""
    seqlen_q, seqlen_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(seqlen_k) - (torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(q.dtype).expand(q.shape[0], q.shape[2])
        scores = scores - slopes[:, :, None, None] * distance.abs()
    left, right = window_size
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    empty = hidden.all(dim=-1)[:, None]
    probs = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    return torch.einsum("bhij,bjhd->bihd", probs, v), lse


def spun(x: Tensor, angle: Tensor, interleaved: bool, scale: Tensor | float = 1.0) -> Tensor:
    """Pairs of features of x (..., rows, heads, dim), turned by angles (..., rows, pairs); others stay."""
    width = 2 * angle.shape[-1]
    pairs = x[..., :width].unflatten(-1, (-1, 2)) if interleaved else x[..., :width].unflatten(-1, (2, -1)).mT
    turned = torch.view_as_complex(pairs.contiguous()) * (torch.exp(1j * angle) * scale)[..., None, :]
    pairs = torch.view_as_real(turned)
    return torch.cat([(pairs if interleaved else pairs.mT).flatten(-2), x[..., width:]], dim=-1)


def inputs(
    seqlen_q: int = 37,
    seqlen_k: int = 37,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    batch: int = 2,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q * 1000 + seqlen_k + head_dim)

    def draw(seqlen: int, num_heads: int) -> Tensor:
        x = torch.randn(batch, seqlen, num_heads, head_dim, generator=generator, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    return draw(seqlen_q, heads[0]), draw(seqlen_k, heads[1]), draw(seqlen_k, heads[1])


def with_gradients(out: Tensor, leaves: tuple[Tensor, ...], dout: Tensor) -> dict[str, Tensor]:
    """An output and the gradients of q, k and v, by name."""
    grads = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    return {"out": out} | dict(zip(("dq", "dk", "dv"), grads, strict=True))


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Equal up to float64 rounding over sums of some hundred terms."""
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def cumulated(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
