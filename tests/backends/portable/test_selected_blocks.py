"""Blocks and keys that queries name, by the portable kernels in Triton's interpreter: random calls."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz.selected import Kind, fuzz
from tests.selected import OF_PORTABLE, drawn, judge
from tests.slow import slow_but


@pytest.mark.one_in(6)
@pytest.mark.parametrize("seed", slow_but(range(60), lambda seed: seed < 6))
def test_random_calls(seed: int) -> None:
    judge(drawn(seed, OF_PORTABLE, (torch.float32, torch.float16), 130, (16, 32)), backend="portable")


@pytest.mark.one_in(20)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["cached", "dense"])
def test_random_keys(kind: Kind, seed: int) -> None:
    assert not fuzz("portable", seed, 1, print, kind)
