"""Blocks that data select by the portable kernels, in Triton's interpreter: random calls against the formula."""

from __future__ import annotations

import pytest
import torch

from tests.selected import OF_PORTABLE, drawn, judge
from tests.slow import slow_but


@pytest.mark.parametrize("seed", slow_but(range(60), lambda seed: seed < 6))
def test_random_calls(seed: int) -> None:
    judge(drawn(seed, OF_PORTABLE, (torch.float32, torch.float16), 130, (16, 32)), backend="portable")
