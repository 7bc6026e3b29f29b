"""A forward that starts from a result over other keys, in the emulator and as compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from flashtile.backends import hopper
from tests.backends.hopper.emulated import on_cpu
from tests.cases import Case
from tests.partials import CHAINS, judge_chain
from tests.poison import poisoned_memory


@pytest.mark.parametrize(("case", "cuts"), CHAINS, ids=str)
def test_a_chain_of_partial_results_is_the_whole(case: Case, cuts: tuple[int, ...]) -> None:
    with on_cpu(len(cuts), 2), poisoned_memory(), torch.no_grad():
        judge_chain(hopper.BACKEND.plan_forward, case, cuts, torch.bfloat16)
