"""Cached calls of the portable backend in Triton's interpreter: the cases of all backends, and random ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kvcache.alone import invariance_cases, judge_alone
from tests.kvcache.cases import CASES, CacheCase, build, judge
from tests.kvcache.drawn import cases

DTYPES = (torch.float16, torch.float32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: CacheCase) -> None:
    judge(build(case, torch.float16), "portable")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_in_float32(case: CacheCase) -> None:
    judge(build(case, torch.float32), "portable")


@given(cases(), st.sampled_from(DTYPES), st.integers(0, 99))
@settings(max_examples=10)
def test_random_calls(case: CacheCase, dtype: torch.dtype, seed: int) -> None:
    judge(build(case, dtype, seed=seed), "portable")


@pytest.mark.slow
@given(cases(), st.sampled_from(DTYPES), st.integers(0, 99))
@settings(max_examples=150)
def test_many_random_calls(case: CacheCase, dtype: torch.dtype, seed: int) -> None:
    judge(build(case, dtype, seed=seed), "portable")


@pytest.mark.parametrize("case", invariance_cases((15, 17, 65, 150)), ids=str)
def test_a_sequence_alone_and_among_others(case: CacheCase) -> None:
    judge_alone(case, torch.float16, "portable", "cpu")
