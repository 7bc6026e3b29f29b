"""The rotation M of q and k: random signs, then a Hadamard matrix, orthonormal, so that ``(q M)(k M)^T = q k^T``.

It spreads what is large in few features over all of them (incoherent processing; Shah et al. 2024, arXiv:2407.08608,
section 3.3). A head_dim that is no power of two is cut into parts that are, the largest first: 96 is 64 and 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 2**32 - 1


def parts(dim: int) -> list[int]:
    """The powers of two that a head_dim is the sum of, the largest first."""
    return [1 << bit for bit in reversed(range(dim.bit_length())) if dim >> bit & 1]


def signs(dim: int, seed: int, device: torch.device | None = None) -> Tensor:
    """The sign of each feature, 1 or -1: the top bits of hashes of its number, the same on every machine.

    Source: the finaliser of MurmurHash3 (Appleby 2011), of ``seed + i * 0x9E3779B9``.
    """
    x = seed % 2**32 + torch.arange(dim, device=device) * 0x9E3779B9 & _MASK
    x = (x ^ x >> 16) * 0x85EBCA6B & _MASK
    x = (x ^ x >> 13) * 0xC2B2AE35 & _MASK
    return 1 - 2 * (x >> 31)


def rotate(x: Tensor, seed: int = 0) -> Tensor:
    """Rows times M, for ``(..., head_dim)`` in float32 or float64, in head_dim times log(head_dim) additions a row."""
    x = x * signs(x.shape[-1], seed, x.device)
    return torch.cat([_hadamard(part) for part in x.split(parts(x.shape[-1]), dim=-1)], dim=-1)


def unrotate(x: Tensor, seed: int = 0) -> Tensor:
    """Rows times the inverse of M, its transpose, in one product."""
    return x @ rotate(torch.eye(x.shape[-1], dtype=x.dtype, device=x.device), seed).mT


def _hadamard(x: Tensor) -> Tensor:
    dim, half = x.shape[-1], 1
    while half < dim:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        half *= 2
    return x * dim**-0.5
