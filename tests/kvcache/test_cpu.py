"""Cached calls of the CPU backend against the oracle: every case in every dtype; ``tests.fuzz`` has random ones."""

from __future__ import annotations

import pytest
import torch

from tests.kvcache.cases import CASES, CacheCase, build, judge

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: CacheCase, dtype: torch.dtype) -> None:
    judge(build(case, dtype), "cpu")
