"""Cached calls of the CPU backend against the oracle: every case in every dtype, and random ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kvcache.cases import CASES, CacheCase, build, judge
from tests.kvcache.drawn import cases

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: CacheCase, dtype: torch.dtype) -> None:
    judge(build(case, dtype), "cpu")


@given(cases(), st.sampled_from(DTYPES), st.integers(0, 99))
@settings(max_examples=40)
def test_random_calls(case: CacheCase, dtype: torch.dtype, seed: int) -> None:
    judge(build(case, dtype, seed=seed), "cpu")


@pytest.mark.slow
@given(cases(), st.sampled_from(DTYPES), st.integers(0, 99))
@settings(max_examples=500)
def test_many_random_calls(case: CacheCase, dtype: torch.dtype, seed: int) -> None:
    judge(build(case, dtype, seed=seed), "cpu")
