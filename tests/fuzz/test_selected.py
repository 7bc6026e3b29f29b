"""Random calls whose queries name keys or blocks, and that what is wrong in them is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashtile.call import selected
from tests.fuzz.selected import KINDS, Kind, draw, fuzz, on_cpu, with_blocks
from tests.slow import slow_but


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard", slow_but(range(50), lambda shard: shard < 1))
def test_random_calls(shard: int, kind: Kind) -> None:
    assert not fuzz("cpu", 4 * shard, 4, print, kind)


@pytest.mark.one_in(20)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["cached", "blocks"])
def test_random_calls_on_hopper(seed: int, kind: Kind) -> None:
    pytest.importorskip("triton.experimental.gluon")
    assert not fuzz("hopper", seed, 1, print, kind)


def test_everything_is_drawn() -> None:
    over_cache = [draw(n, kind="cached") for n in range(300)]
    assert {call.case.heads for call in over_cache} >= {1, 3, 16, 64, 128}
    assert {call.case.page_size for call in over_cache} >= {0, 1, 3, 16, 64}
    assert {call.case.float8 for call in over_cache} == {"", "none", "h", "rows"}
    for feature in (
        "packed",
        "entries",
        "leftpad",
        "sinks",
        "softcap",
        "window",
        "causal",
        "causal_each",
        "ragged",
        "qv",
    ):
        assert sum(bool(getattr(call.case, feature)) for call in over_cache) > 10, feature
    with_gradients = [draw(n, kind="dense") for n in range(300)]
    for feature in ("sinks", "softcap", "window", "causal", "lse_grad", "deterministic", "wanted"):
        assert sum(bool(getattr(call.case, feature)) for call in with_gradients) > 10, feature
    assert any((call.case.head_dim, call.case.head_dim_v) == (576, 512) for call in with_gradients)
    for calls in (over_cache, with_gradients):
        assert {call.dtype for call in calls} == {torch.bfloat16, torch.float16, torch.float32}
        assert {call.most for call in calls} >= {0, 1, 2} and {call.twice for call in calls} == {True, False}
    assert {call.slots for call in over_cache} == {call.joined for call in with_gradients} == {True, False}
    blocks = [draw(n, kind="blocks") for n in range(300)]
    assert any(call.case.lengths for call in blocks) and len({call.block for call in blocks}) == 5


def test_a_seed_is_a_call() -> None:
    assert [draw(n) for n in range(40)] == [draw(n) for n in range(40)]
    assert {call.kind for call in (on_cpu(n, "hopper") for n in range(20))} == {"cached", "blocks"}


@pytest.mark.parametrize("kind", ["cached", "dense"])
def test_a_key_that_is_lost_is_a_fault(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    compacted = selected.compacted

    def off(*given: Any) -> Any:
        rows, counts = compacted(*given)
        return rows, (counts - 1).clamp(min=0)

    monkeypatch.setattr(selected, "compacted", off)
    said: list[str] = []
    wrong = fuzz("cpu", 0, 4, said.append, kind)
    assert len(wrong) >= 2 and said == [f"FAILED {each}" for each in wrong]
    assert any("error" in each for each in wrong) and all("Drawn(seed=" in each for each in wrong)


def test_a_key_twice_that_nobody_tells_of_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected, "check_values", lambda *_: None)
    seeds = [n for n in range(60) if (call := on_cpu(n, "cpu", "cached")).twice and call.most > 1]
    wrong = [each for seed in seeds[:3] for each in fuzz("cpu", seed, 1, print, "cached")]
    assert any("DID NOT RAISE" in each for each in wrong)


def test_lists_of_blocks_are_those_of_the_call() -> None:
    made = with_blocks(draw(3, kind="blocks"))
    lists, p = made.keywords["block_mask"], made.problem
    assert p.listed[:2] == lists.block_size and made.tensors.row_blocks is lists.row_blocks
    assert lists.lengths == (p.seqlen_q, p.seqlen_k)
