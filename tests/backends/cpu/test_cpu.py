"""The CPU backend against the oracle: every case, every dtype, outputs poisoned."""

from __future__ import annotations

import pytest
import torch

from tests.cases import CASES, Case, build, judge

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, dtype: torch.dtype) -> None:
    judge(build(case, dtype), "cpu")
