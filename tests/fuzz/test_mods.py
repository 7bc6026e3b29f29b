"""Random calls with random functions of the user's, judged like all calls; captured tensors' gradients too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cases import Case, judge
from tests.fuzz.drawn import FLOATS, SMALL, Draw, _plain, _within
from tests.fuzz.judged import cancels
from tests.mods.calls import with_functions
from tests.mods.functions import MASKS, SCORES


def drawn(seed: int) -> tuple[Case, str | None, str | None, torch.dtype, tuple[int, int] | None]:
    """Call number ``seed``: a case, a score mod, a mask mod, a dtype, and the size of blocks of the mask's lists."""
    d = Draw(("mods", seed), replace(SMALL, longest=90, most_pairs=2**17, most_dim=64))
    case = _within(_plain(d, f"mods_{seed}"), d.sizes)
    softcap = case.softcap if d.chance(0.5) else 0.0
    # Of scores of tens a probability from lse errs more than one from a softmax, which is what the rule's draws know.
    case = replace(case, softcap=softcap, wanted=None, out="", scale=None if case.scale == 1.0 else case.scale)
    score = d.pick(*SCORES) if d.chance(0.8) else None
    mask = d.pick(*MASKS) if score is None or d.chance(0.6) else None
    listed = (d.pick(16, 32, 48, 64, 7), d.pick(16, 32, 64, 128, 20)) if mask and d.chance(0.6) else None
    return case, score, mask, d.pick(*FLOATS), None if case.intervals else listed


@pytest.mark.one_in(20)
@pytest.mark.parametrize("seed", range(300))
def test_random_functions_on_the_cpu(seed: int) -> None:
    case, score, mask, dtype, listed = drawn(seed)
    call = with_functions(case, score, mask, dtype, seed, listed=listed)
    if cancels(call.problem) or mask == "nothing":
        call = call.wanting([name for name in call.leaves if name == "v"])  # type: ignore[assignment]
    judge(call, "cpu")


def test_all_functions_and_layouts_are_drawn() -> None:
    every = [drawn(seed) for seed in range(300)]
    assert {score for _, score, *_ in every} == {*SCORES, None}
    assert {mask for _, _, mask, *_ in every} == {*MASKS, None}
    assert {mask for _, _, mask, _, listed in every if listed} == {*MASKS}
    assert any(case.lengths and listed for case, *_, listed in every)
    assert any(case.lengths for case, *_ in every) and any(case.dropout for case, *_ in every)
