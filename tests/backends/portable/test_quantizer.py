"""The kernels that quantise, in Triton's interpreter, against PyTorch's arithmetic: the same numbers but for ties.

The interpreter's own conversion to e4m3 loses the carry into the exponent, so the kernels round by integer arithmetic
here, as on GPUs without an instruction for it. ``tests/ptx/test_quantizer.py`` runs the instruction.
"""

from __future__ import annotations

import pytest
import torch

from flashtile.backends.portable.rounding import launch
from tests.quantization.quantizer import CASES, Case, check, inputs


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(case: Case) -> None:
    check(case, inputs(case))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_of_float16(case: Case) -> None:
    # There is no bfloat16, whose products the interpreter takes for those of integers.
    check(case, inputs(case, torch.float16))


def test_more_sequences_than_are_searched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "search_of", lambda batch: 2)
    case = Case("five", 16, 16, ((1, 9), (0, 2), (128, 5), (3, 0), (2, 1)), True, rotate=False, smooth_k=False)
    check(case, inputs(case))
