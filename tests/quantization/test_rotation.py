"""The rotation: orthonormal, the Hadamard matrix that it says it is, with signs that are the same everywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashtile.call.rotation import parts, rotate, signs, unrotate

DIMS = [16, 48, 64, 80, 96, 112, 128, 192, 240, 256]


def matrix(dim: int, seed: int) -> Tensor:
    """The matrix by its definition: element (i, j) of a part is -1 to the number of bits that i and j share."""
    blocks = []
    for side in parts(dim):
        shared = [[(i & j).bit_count() for j in range(side)] for i in range(side)]
        blocks.append((-1.0) ** torch.tensor(shared, dtype=torch.float64) * side**-0.5)
    return signs(dim, seed).double()[:, None] * torch.block_diag(*blocks)


@pytest.mark.parametrize("dim", DIMS)
def test_is_the_signed_hadamard_matrix(dim: int) -> None:
    assert sum(parts(dim)) == dim
    x = torch.randn(5, 3, dim, dtype=torch.float64)
    torch.testing.assert_close(rotate(x, 7), x @ matrix(dim, 7), rtol=0, atol=1e-12)
    torch.testing.assert_close(unrotate(rotate(x, 7), 7), x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dim", DIMS)
def test_leaves_scores_as_they_are(dim: int) -> None:
    q, k = torch.randn(2, 40, dim, dtype=torch.float64).unbind()
    torch.testing.assert_close(rotate(q, 3) @ rotate(k, 3).T, q @ k.T, rtol=0, atol=1e-11)
    # Not so with other signs: the test above would see a seed that is not used.
    assert (rotate(q, 3) @ rotate(k, 4).T - q @ k.T).abs().max() > 1


def test_spreads_one_large_feature_over_its_part() -> None:
    x = torch.zeros(96, dtype=torch.float64)
    x[5], x[70] = 1000.0, 8.0
    y = rotate(x)
    torch.testing.assert_close(y[:64].abs(), torch.full((64,), 125.0, dtype=torch.float64))
    torch.testing.assert_close(y[64:].abs(), torch.full((32,), 2**0.5, dtype=torch.float64))


def test_signs_are_fixed_and_balanced() -> None:
    assert signs(16, 0).tolist() == [1, -1, 1, 1, 1, 1, -1, 1, -1, 1, 1, -1, 1, 1, -1, 1]
    assert torch.equal(signs(64, 0), signs(256, 0)[:64]) and not torch.equal(signs(64, 0), signs(64, 1))
    assert torch.equal(signs(64, 2**32 + 5), signs(64, 5))
    total = sum(signs(256, seed).sum().item() for seed in range(100))
    assert abs(total) < 5 * 25600**0.5
