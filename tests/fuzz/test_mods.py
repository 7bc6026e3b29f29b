"""Random calls with random functions of the user's, on the CPU backend and on Hopper's kernels in the emulator."""

from __future__ import annotations

import pytest

from tests.fuzz.functions import drawn, fuzz, judge_call
from tests.mods.functions import MASKS, SCORES


@pytest.mark.one_in(20)
@pytest.mark.parametrize("seed", range(300))
def test_random_functions_on_the_cpu(seed: int) -> None:
    judge_call(drawn(seed), "cpu", seed)


@pytest.mark.one_in(20)
@pytest.mark.parametrize("shard", range(40))
def test_random_functions_on_hopper(shard: int) -> None:
    pytest.importorskip("triton.experimental.gluon")
    assert not fuzz("hopper", 5 * shard, 5, print)


def test_all_functions_and_layouts_are_drawn() -> None:
    every = [drawn(seed) for seed in range(300)]
    assert {score for _, score, *_ in every} == {*SCORES, None}
    assert {mask for _, _, mask, *_ in every} == {*MASKS, None}
    assert {mask for _, _, mask, _, listed in every if listed} == {*MASKS}
    assert any(case.lengths and listed for case, *_, listed in every)
    assert any(case.lengths for case, *_ in every) and any(case.dropout for case, *_ in every)
