"""Cached calls of the portable backend in Triton's interpreter: all cases, random ones, functions, merged states."""

from __future__ import annotations

import pytest
import torch

from flashtile.backends.gpu.decode import merge
from flashtile.backends.gpu.decode.config import DecodeTiles, SplitRule
from flashtile.backends.gpu.trial import trial
from flashtile.core import states
from tests.fuzz import mixed
from tests.fuzz.judged import judge as judge_random
from tests.fuzz.judged import on_cpu
from tests.kvcache.alone import invariance_cases, judge_alone
from tests.kvcache.cases import CASES, CacheCase, build, judge
from tests.kvcache.functions import HUGE, KINDS, LENGTHS, error, huge_error
from tests.kvcache.test_trees import CHAINS, assert_chains_are_causal
from tests.maxima import judge_cached_maxima
from tests.slow import named, one_of_each, slow_but


@pytest.mark.parametrize("case", one_of_each(CASES), ids=str)
def test_case(case: CacheCase) -> None:
    judge(build(case, torch.float16), "portable")


@pytest.mark.one_in(32)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_largest_scores(case: CacheCase) -> None:
    judge_cached_maxima(build(case, torch.float16), build(case, torch.float16), "portable")


SPLIT = ("steps", "chunk", "sinks", "pages_of_16", "alibi", "packed_mixed", "tree_pages")


@pytest.mark.one_in(7)
@pytest.mark.parametrize("case", [case for case in CASES if case.name in SPLIT], ids=str)
def test_largest_scores_of_splits(case: CacheCase) -> None:
    splitting = SplitRule(programs=40, fewest_keys=16, most_keys=32, most_splits=12, run=3)
    with trial(decode=DecodeTiles(16, 16, 4, 1, 3, splitting)):
        judge_cached_maxima(build(case, torch.float32), build(case, torch.float32), "portable")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_in_float32(case: CacheCase) -> None:
    judge(build(case, torch.float32), "portable")


@pytest.mark.one_in(33)
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("case", [case for case in CASES if case.tree], ids=str)
def test_trees_in_tiles_of_many_rows(case: CacheCase, block_m: int) -> None:
    """Where masks are applied in a branch; of splits that cut trees."""
    splitting = SplitRule(programs=40, fewest_keys=16, most_keys=32, most_splits=12, run=3)
    with trial(decode=DecodeTiles(block_m, 16, 4, 1, 3, splitting)):
        judge(build(case, torch.float16), "portable")


@pytest.mark.one_in(10)
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_gives_the_bits_of_a_causal_call(name: str, block_m: int) -> None:
    with trial(
        decode=DecodeTiles(block_m, 16, 4, 1, 2, SplitRule(programs=8, fewest_keys=16, most_keys=64, most_splits=8))
    ):
        assert_chains_are_causal(name, torch.float16, "portable")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", slow_but(range(160), lambda seed: seed < 10))
def test_random_calls(seed: int) -> None:
    judge_random(on_cpu(seed, "portable", "cached"), "portable")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("seed", slow_but(range(60), lambda seed: seed < 6))
def test_random_steps_of_a_server(seed: int) -> None:
    assert not mixed.fuzz("portable", seed, 1, print)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", invariance_cases((15, 17, 65, 150)), ids=str)
def test_a_sequence_alone_and_among_others(case: CacheCase) -> None:
    judge_alone(case, torch.float16, "portable", "cpu")


@pytest.mark.long
@pytest.mark.parametrize(
    "case", slow_but(invariance_cases((0, 15, 17, 65, 150)), named("dense", "pages", "append", "window")), ids=str
)
def test_the_number_of_programs_changes_no_bit(case: CacheCase) -> None:
    """Few programs do whole tiles in registers, more do runs of splits, and many do splits, through memory."""
    splitting = SplitRule(programs=40, fewest_keys=16, most_keys=32, most_splits=12, run=3)
    results = []
    for count in (1, 2, 7, 40):
        call = build(case, torch.float16)
        with trial(decode=DecodeTiles(16, 16, 4, 1, count, splitting)):
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
    splitting, results = SplitRule(programs=8, fewest_keys=512, most_keys=512, most_splits=12, run=3), []
    for count in (1, 7):
        with trial(decode=DecodeTiles(16, 256, 4, 1, count, splitting)):
            results.append([x.clone() for x in build(case, torch.float32).run("portable")])
    assert all(map(torch.equal, *results))


@pytest.mark.one_in(12)
@pytest.mark.parametrize("kind", reversed(KINDS))
@pytest.mark.parametrize("name", LENGTHS)
def test_they_count_from_the_first_query_and_the_first_key(name: str, kind: str) -> None:
    assert error(LENGTHS[name], kind, "portable", packed=name == "window") < 1e-5


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("value", "sinks"), zip(HUGE, (True, False) * 2, strict=True))
def test_scores_as_huge_as_float32_has_them(value: float, sinks: bool) -> None:
    """In splits that go through memory, with and without pages and bounds."""
    assert huge_error(value, "portable", page_size=16 * sinks, packed=value == -1e9, sinks=sinks) < 1e-5


@pytest.mark.one_in(2)
@pytest.mark.parametrize("programs", [1, 7])
def test_such_scores_in_tiles_of_many_rows(programs: int) -> None:
    """Where the scale is applied before the mask; one program folds states in registers."""
    splitting = SplitRule(programs=8, fewest_keys=16, most_keys=32, most_splits=8, run=2)
    with trial(decode=DecodeTiles(64, 16, 4, 1, programs, splitting)):
        assert huge_error(HUGE[2], "portable", page_size=8) < 1e-5


@pytest.mark.parametrize("shape", [(2, 5, 3, 33), (7, 4, 16), (1, 1, 1, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_two_states(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    *lead, seqlen, heads, _ = shape
    out_a, out_b = torch.randn(shape).to(dtype), torch.randn(shape)
    lse_a, lse_b = torch.randn(*lead, heads, seqlen) * 9, torch.randn(*lead, heads, seqlen) * 9
    # Empty states, whose outputs may be anything.
    lse_a.view(-1)[0] = -torch.inf
    out_a.view(-1, shape[-1])[0] = torch.nan
    if lse_a.numel() > 3:
        lse_a[..., -1] = lse_b[..., -1] = -torch.inf
    assert merge.can_merge(out_a, lse_a, out_b, lse_b)
    out, lse = merge.merge(out_a, lse_a, out_b, lse_b)
    want, want_lse = states.merge(
        out_a.double().transpose(-2, -3), lse_a.double(), out_b.double().transpose(-2, -3), lse_b.double()
    )
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(out.double(), want.transpose(-2, -3), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("top", [torch.finfo(torch.float32).min, -1e9, torch.finfo(torch.float32).max])
def test_weights_add_up_to_one_however_large_lse_is(top: float) -> None:
    out, lse = torch.ones(2, 3, 2, 16), torch.full((2, 2, 3), top)
    lower = torch.where(torch.arange(3) == 2, -torch.inf, lse)
    for more_out, more_lse, want in ((3 * out, lse, 2.0), (3 * out, torch.zeros_like(lse), 1.0 + 2 * (top < 0))):
        merged, merged_lse = merge.merge(out, lse, more_out, more_lse)
        assert torch.equal(merged, want * out)
        assert torch.equal(merged_lse, torch.maximum(lse, more_lse))
    merged, _ = merge.merge(out, lower, 3 * out, lse)
    assert torch.equal(merged[:, :2], 2 * out[:, :2]) and torch.equal(merged[:, 2], 3 * out[:, 2])


def test_what_the_kernel_does_not_take() -> None:
    out, lse = torch.zeros(2, 4, 3, 16), torch.zeros(2, 3, 4)
    assert not merge.can_merge(out.double(), lse.double(), out.double(), lse.double())
    assert not merge.can_merge(out.transpose(1, 2), lse, out.transpose(1, 2), lse)
    assert not merge.can_merge(out[:0], lse[:0], out[:0], lse[:0])
