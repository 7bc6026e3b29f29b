"""Softmax by hand, the tiled forward, its gradients, and merging, in float64 unless an entry says otherwise."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

import flashtile


def published_draws(*shape: int) -> Tensor:
    """Numbers as ``numpy.random.RandomState(42).randn`` draws them: Mersenne Twister, polar method."""
    state = [42]
    for i in range(1, 624):
        state.append((1812433253 * (state[-1] ^ (state[-1] >> 30)) + i) & 0xFFFFFFFF)
    draw, made = random.Random(), list[float]()
    draw.setstate((3, (*state, 624), None))
    while len(made) < math.prod(shape):
        x, y = 2 * draw.random() - 1, 2 * draw.random() - 1
        if 0 < (square := x * x + y * y) < 1:
            factor = math.sqrt(-2 * math.log(square) / square)
            made += [factor * y, factor * x]
    return torch.tensor(made[: math.prod(shape)], dtype=torch.float64).reshape(shape)


def draws(count: int, *shape: int) -> tuple[Tensor, ...]:
    """That many tensors of normal numbers of our own."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, *shape, generator=generator, dtype=torch.float64).unbind()


def online(scores: Tensor, v: Tensor, block: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The maximum, correction, sum and undivided output of each row after each block of keys.

    All rows take a block before the next one, as with K and V in the outer loop.
    """
    top, total = scores.new_full(scores.shape[:-1], -math.inf), scores.new_zeros(scores.shape[:-1])
    out, steps = scores.new_zeros(*scores.shape[:-1], v.shape[-1]), []
    for tile, values in zip(scores.split(block, -1), v.split(block), strict=True):
        new = torch.maximum(top, tile.amax(-1))
        correction, probs = torch.exp(top - new), torch.exp(tile - new[..., None])
        total, out = total * correction + probs.sum(-1), out * correction[..., None] + probs @ values
        top = new
        steps.append((top, correction, total, out))
    return steps


def tiled(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
    """Attention without a scale by ``online``; q, k and v are ``(rows, head_dim)``."""
    _, _, total, out = online(q @ k.T, v, block)[-1]
    return out / total[..., None]


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with the whole matrix of scores."""
    return torch.softmax(q @ k.T, -1) @ v


def apart(x: Tensor, y: Tensor) -> float:
    """The distance of x from y, over y's norm."""
    return float((x - y).norm() / y.norm())


def approximations() -> tuple[bool, str]:
    q, k, v = (x / 8**0.5 for x in draws(3, 1024, 64))
    exact, distance = standard(q, k, v), torch.arange(1024)[:, None] - torch.arange(1024)
    weights = (torch.relu(q) + 0.1) @ (torch.relu(k) + 0.1).T
    made = {"a feature map": weights / weights.sum(-1, keepdim=True) @ v}
    sampled = (torch.arange(1024) * 619 % 1024 < 256).expand(1024, 1024)
    for name, keep in (("window", distance.abs() <= 128), ("stride", distance % 64 == 0), ("samples", sampled)):
        made[name] = torch.softmax((q @ k.T).masked_fill(~keep, -math.inf), -1) @ v
    errors = {name: apart(out, exact) for name, out in made.items()}
    return min(errors.values()) > 0.01, ", ".join(f"{name} off by {error:.0%}" for name, error in errors.items())


def in_order(values: Tensor) -> Tensor:
    """Sums of the last dimension, one addition after another in the values' dtype."""
    return reduce(torch.add, values.unbind(-1))


def orders_of_a_sum() -> list[float]:
    values = published_draws(100).float()
    sums = []
    for x in (values, values.flip(0), values.sort().values):
        # As numpy.sum has it: eight sums side by side, then the rest.
        a, b, c, d, e, f, g, h = in_order(x[:96].reshape(-1, 8).T)
        sums.append(in_order(torch.stack([((a + b) + (c + d)) + ((e + f) + (g + h)), *x[96:]])).item())
    return [*sums, max(sums) - min(sums)]


def gradients_of_one_tile() -> tuple[bool, str]:
    q, k, v, dout = draws(4, 256, 64)
    probs, dprobs = torch.softmax(q @ k.T / 8, -1), dout @ v.T
    right = probs * (dprobs - (dout * (probs @ v)).sum(-1, keepdim=True))
    pairs = zip(probs.split(64, -1), dprobs.split(64, -1), strict=True)
    seen = torch.cat([p * (d - (p * d).sum(-1, keepdim=True)) for p, d in pairs], -1)
    dq, dk = apart(seen @ k, right @ k), apart(seen.T @ q, right.T @ q)
    return max(dq, dk) < 1e-12, f"dQ is off by {dq:.0%}, dK by {dk:.0%}"


def gradient_formulas() -> list[float]:
    q, k, v, dout = draws(4, 128, 32)
    probs = torch.softmax(q @ k.T, -1)
    dscores = probs * (dout @ v.T - (dout * (probs @ v)).sum(-1, keepdim=True))
    _, expected = torch.autograd.functional.vjp(standard, (q, k, v), dout)
    made = (dscores @ k, dscores.T @ q, probs.T @ dout)
    return [apart(x, y) for x, y in zip(made, expected, strict=True)]


def merged_apart(parts: int, order: Sequence[int] = ()) -> float:
    """How far one query's output over 1024 keys is from that of parts of them, merged in an order."""
    q, k, v = draws(3, 1, 1024, 1, 64)
    whole: Any = flashtile.attention(q[:, :1], k, v)
    cut = list(zip(k.chunk(parts, 1), v.chunk(parts, 1), strict=True))
    made: list[Any] = [flashtile.attention(q[:, :1], *cut[i], return_lse=True) for i in order or range(parts)]
    return apart(reduce(lambda x, y: flashtile.merge_states(*x, *y), made)[0], whole)
