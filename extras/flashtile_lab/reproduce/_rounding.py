"""Errors of 16 and 8 bits, on inputs with outliers."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from flashtile_lab.reproduce._softmax import draws

_FP8 = torch.float8_e4m3fn
_SEQLEN, _ROWS, _DIM = 8192, 512, 128


def rounded(x: Tensor, over: int | tuple[int, ...]) -> Tensor:
    """To e4m3 and back, with a scale for each slice along the dimensions ``over``."""
    scale = x.abs().amax(over, keepdim=True) / 448
    return (x / scale).to(_FP8).to(x.dtype) * scale


def by_block(x: Tensor) -> Tensor:
    """To e4m3 and back, with a scale for 128 rows of ``(rows, head_dim)``."""
    return rounded(x.unflatten(0, (-1, 128)), (1, 2)).flatten(0, 1)


def rotation(dim: int) -> Tensor:
    """Random signs, then the Hadamard matrix: an orthogonal matrix ``(dim, dim)``."""
    made, half = torch.ones(1, 1).double(), torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double()
    while made.shape[0] < dim:
        made = torch.kron(half, made)
    return draws(1, dim, 1)[0].sign() * made / dim**0.5


def _outliers(seed: int) -> list[Tensor]:
    """q, k, v from N(0, 1) + N(0, 100) Bernoulli(0.001)."""
    x, y = torch.randn(
        2, 3, _SEQLEN, _DIM, generator=(draw := torch.Generator().manual_seed(seed)), dtype=torch.float64
    )
    return list(x + 10 * y * (torch.rand(x.shape, generator=draw) < 0.001))


def first_rows(q: Tensor, k: Tensor, v: Tensor, *, probs_dtype: torch.dtype = torch.float64) -> Tensor:
    """Attention of the first rows of q, its undivided probabilities rounded to a dtype."""
    scores = q[:_ROWS] @ k.T * _DIM**-0.5
    probs = torch.exp(scores - scores.amax(-1, keepdim=True))
    return probs.to(probs_dtype).double() @ v / probs.sum(-1, keepdim=True)


def _standard_in_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention that keeps scores and probabilities in float16."""
    probs = torch.softmax((q[:_ROWS] @ k.T * _DIM**-0.5).half().double(), -1)
    return probs.half().double() @ v


@cache
def rms_errors(seeds: int = 3) -> dict[str, float]:
    """Root mean square errors against float64, averaged over draws."""
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        given = _outliers(seed)
        exact, (q, k, v) = first_rows(*given), (x.half().double() for x in given)
        turned = (q @ rotation(_DIM), k @ rotation(_DIM), v)
        for name, out in {
            "standard": _standard_in_half(q, k, v).half(),
            "tiled": first_rows(q, k, v, probs_dtype=torch.float16).half(),
            "tensor": first_rows(*(rounded(x, (0, 1)) for x in (q, k, v)), probs_dtype=_FP8),
            "both": first_rows(*map(by_block, turned), probs_dtype=_FP8),
            "rotation": first_rows(*(rounded(x, (0, 1)) for x in turned), probs_dtype=_FP8),
            "blocks": first_rows(*map(by_block, (q, k, v)), probs_dtype=_FP8),
        }.items():
            found.setdefault(name, []).append(float((out.double() - exact).square().mean().sqrt()))
    return {name: sum(errors) / seeds for name, errors in found.items()}
