"""Rules of cached calls that a comparison of numbers alone would not show."""

from __future__ import annotations

import pytest
import torch

from tests.kvcache.alone import invariance_cases, judge_alone
from tests.kvcache.cases import CacheCase


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", invariance_cases(), ids=str)
def test_a_sequence_gives_the_same_bits_in_any_batch(case: CacheCase, dtype: torch.dtype) -> None:
    judge_alone(case, dtype, "cpu")
