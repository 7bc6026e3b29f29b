"""Random calls with sizes that are symbols, against eager ones."""

from __future__ import annotations

import pytest

from tests.fuzz.traced import WAYS, drawn, judge_call


@pytest.mark.one_in(25)
@pytest.mark.parametrize("seed", range(100))
def test_random_calls_with_symbolic_sizes(seed: int) -> None:
    judge_call(seed)


def test_all_ways_and_features_are_drawn() -> None:
    every = [drawn(seed) for seed in range(100)]
    assert {way for *_, way in every} == set(WAYS)
    for feature in ("lengths", "mask", "bias", "sinks", "alibi", "intervals", "dropout", "softcap"):
        assert any(getattr(case, feature) for case, *_ in every), feature
