"""Cached calls of the portable backend in Triton's interpreter: the cases of all backends, and random ones."""

from __future__ import annotations

import pytest
import torch

from flashtile.backends.gpu.decode.config import Config, Splitting
from flashtile.backends.gpu.trial import trial
from tests.fuzz import mixed
from tests.fuzz.judged import judge as judge_random
from tests.fuzz.judged import on_cpu
from tests.kvcache.alone import invariance_cases, judge_alone
from tests.kvcache.cases import CASES, CacheCase, build, judge
from tests.kvcache.test_trees import CHAINS, assert_chains_are_causal
from tests.slow import named, slow_but


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: CacheCase) -> None:
    judge(build(case, torch.float16), "portable")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_in_float32(case: CacheCase) -> None:
    judge(build(case, torch.float32), "portable")


@pytest.mark.one_in(11)
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("case", [case for case in CASES if case.tree], ids=str)
def test_trees_in_tiles_of_many_rows(case: CacheCase, block_m: int) -> None:
    """Where masks are applied in a branch; of splits that cut trees."""
    splitting = Splitting(programs=40, fewest_keys=16, most_keys=32, most_splits=12, run=3)
    with trial(decode=Config(block_m, 16, 4, 1, 3, splitting)):
        judge(build(case, torch.float16), "portable")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_gives_the_bits_of_a_causal_call(name: str, block_m: int) -> None:
    with trial(decode=Config(block_m, 16, 4, 1, 2, Splitting(programs=8, fewest_keys=16, most_keys=64, most_splits=8))):
        assert_chains_are_causal(name, torch.float16, "portable")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", slow_but(range(160), lambda seed: seed < 10))
def test_random_calls(seed: int) -> None:
    judge_random(on_cpu(seed, "portable", "cached"), "portable")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", slow_but(range(60), lambda seed: seed < 6))
def test_random_steps_of_a_server(seed: int) -> None:
    assert not mixed.fuzz("portable", seed, 1, print)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", invariance_cases((15, 17, 65, 150)), ids=str)
def test_a_sequence_alone_and_among_others(case: CacheCase) -> None:
    judge_alone(case, torch.float16, "portable", "cpu")


@pytest.mark.long
@pytest.mark.parametrize(
    "case", slow_but(invariance_cases((0, 15, 17, 65, 150)), named("dense", "pages", "append", "window")), ids=str
)
def test_the_number_of_programs_changes_no_bit(case: CacheCase) -> None:
    """Few programs do whole tiles in registers, more do runs of splits, and many do splits, through memory."""
    splitting = Splitting(programs=40, fewest_keys=16, most_keys=32, most_splits=12, run=3)
    results = []
    for count in (1, 2, 7, 40):
        call = build(case, torch.float16)
        with trial(decode=Config(16, 16, 4, 1, count, splitting)):
            judge(call, "portable")
            results.append([x.clone() for x in build(case, torch.float16).run("portable")])
    for found in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found, results[0], strict=True))


def test_a_batch_that_fills_the_width() -> None:
    """Rows past the last of 256 packed sequences, for which the numbers that are summed at once have no place."""
    sequences = tuple((3, int(number in (0, 40, 255)), 0) for number in range(256))
    judge(build(CacheCase("full", sequences, packed=True, spare=20, heads=1, kv_heads=1), torch.float16), "portable")


def test_angles_that_turn_no_feature() -> None:
    """The queries are copied where they would be rotated."""
    case = CacheCase("none", ((20, 2, 2), (0, 2, 2)), head_dim=32, appends=True)
    angles = torch.empty(40, 0)
    found = build(case, torch.float16).run("portable", rotary_cos=angles, rotary_sin=angles)
    for x, y in zip(found, build(case, torch.float16).run("portable"), strict=True):
        assert torch.equal(x, y)


def test_splits_that_registers_fold_are_folded_in_runs() -> None:
    """One program has each tile whole, with splits too long for a run to be a state; seven share tiles."""
    case = CacheCase("long", ((5200, 1, 0), (40, 1, 0), (5100, 1, 0)), heads=2, kv_heads=1, head_dim=16)
    splitting, results = Splitting(programs=8, fewest_keys=512, most_keys=512, most_splits=12, run=3), []
    for count in (1, 7):
        with trial(decode=Config(16, 256, 4, 1, count, splitting)):
            results.append([x.clone() for x in build(case, torch.float32).run("portable")])
    assert all(map(torch.equal, *results))
