"""The rotation M of q and k: random signs, then a Hadamard matrix, orthonormal, so that ``(q M)(k M)^T = q k^T``.

It spreads what is large in few features over all of them (incoherent processing; Shah et al. 2024, arXiv:2407.08608,
section 3.3). A head_dim that is no power of two is cut into parts that are, the largest first: 96 is 64 and 32.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_MASK = 2**64 - 1


def parts(dim: int) -> list[int]:
    """The powers of two that a head_dim is the sum of, the largest first."""
    return [1 << bit for bit in reversed(range(dim.bit_length())) if dim >> bit & 1]


@functools.lru_cache(maxsize=256)
def signs(dim: int, seed: int) -> tuple[int, ...]:
    """The sign of each feature, 1 or -1: the top bits of splitmix64's numbers, the same on every machine.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators".
    """
    found, state = [], seed & _MASK
    for _ in range(dim):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
        found.append(1 - 2 * ((z ^ z >> 31) >> 63))
    return tuple(found)


def rotate(x: Tensor, seed: int = 0) -> Tensor:
    """Rows times M, for ``(..., head_dim)`` in float32 or float64, in head_dim times log(head_dim) additions a row."""
    x = x * torch.tensor(signs(x.shape[-1], seed), dtype=x.dtype, device=x.device)
    return torch.cat([_hadamard(part) for part in x.split(parts(x.shape[-1]), dim=-1)], dim=-1)


def _hadamard(x: Tensor) -> Tensor:
    dim, half = x.shape[-1], 1
    while half < dim:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        half *= 2
    return x * dim**-0.5
