"""A CPU forward that starts from a result over other keys."""

from __future__ import annotations

import pytest
import torch

from flashtile.backends import cpu
from flashtile.states import Partial
from tests.cases import Case
from tests.partials import CHAINS, judge_chain
from tests.poison import poisoned_memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("case", "cuts"), CHAINS, ids=str)
def test_a_chain_of_partial_results_is_the_whole(case: Case, cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    with poisoned_memory(), torch.no_grad():
        judge_chain(cpu.BACKEND.plan_forward, case, cuts, dtype)


def test_a_result_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        Partial(torch.zeros(1, 2, 3, 4).transpose(1, 2), torch.zeros(1, 2, 3))
