"""The decode kernel for wide groups as compiled, against the oracle: splits, runs, pages, appending, whole tiles."""

from __future__ import annotations

import pytest
import torch

from flashtile.backends.gpu.decode.config import Config, Splitting
from flashtile.backends.gpu.trial import trial
from tests.kvcache.alone import judge_alone
from tests.kvcache.cases import CacheCase, build, judge
from tests.ptx import hopper
from tests.ptx.machine import Options
from tests.slow import slow_but

# Small splits, which several programs share, and of a short sequence few.
RUNS = Splitting(programs=8, fewest_keys=64, most_keys=128, run=2)
SPLITS = Splitting(programs=8, fewest_keys=64, most_keys=64, run=1)
TWO = Config(128, 64, 4, 2, 4, RUNS, specialised=True)
ONE = Config(64, 64, 4, 2, 4, SPLITS, specialised=True)
LARGE_BLOCKS = Config(128, 128, 4, 2, 1, RUNS, specialised=True)
CASES = (
    (CacheCase("two", ((384, 2, 0), (70, 2, 0), (0, 2, 0)), heads=40, kv_heads=1, head_dim=64, sinks=True), TWO),
    (CacheCase("one", ((200, 4, 0), (3, 4, 0)), heads=16, kv_heads=2, head_dim=128, entries=True), ONE),
    (CacheCase("wide", ((130, 1, 0),), heads=20, kv_heads=1, head_dim=256, causal=False), ONE),
    (CacheCase("pages", ((300, 3, 0), (20, 3, 0)), heads=20, kv_heads=1, head_dim=64, page_size=64), TWO),
    (CacheCase("small_pages", ((170, 1, 0), (0, 1, 0), (64, 1, 0)), heads=20, kv_heads=1, head_dim=128, page_size=16),
     ONE),
    (CacheCase("append", ((100, 3, 3), (0, 3, 3)), heads=40, kv_heads=2, head_dim=64, appends=True, rotary=32,
               page_size=32), LARGE_BLOCKS),
    (CacheCase("one_split", ((40, 9, 0), (0, 9, 0)), heads=8, kv_heads=2, head_dim=64, page_size=16), ONE),
    (CacheCase("many_rows", ((150, 9, 0), (4, 9, 0)), heads=40, kv_heads=2, head_dim=64), TWO),
)  # fmt: skip


@pytest.mark.one_in(20)
@pytest.mark.parametrize("dtype", slow_but((torch.bfloat16, torch.float16), lambda dtype: dtype == torch.bfloat16))
@pytest.mark.parametrize(("case", "tiles"), CASES, ids=str)
def test_cases_under_the_rule(case: CacheCase, tiles: Config, dtype: torch.dtype) -> None:
    with hopper.on_cpu(Options(seed=len(case.name))), trial(decode=tiles):
        judge(build(case, dtype), "hopper")


@pytest.mark.slow
@pytest.mark.parametrize("tiles", slow_but((TWO, ONE), (ONE,).__contains__), ids=str)
def test_a_sequence_alone_and_among_others(tiles: Config) -> None:
    case = CacheCase("alone", ((500, 1, 0), (64, 1, 0), (0, 1, 0), (257, 1, 0)), heads=40, kv_heads=1, head_dim=64)
    with hopper.on_cpu(Options(seed=2)), trial(decode=tiles):
        judge_alone(case, torch.bfloat16, "hopper")


@pytest.mark.slow
def test_the_number_of_programs_changes_no_bit() -> None:
    case, results = CacheCase("programs", ((500, 1, 0), (130, 1, 0)), heads=40, kv_heads=1, head_dim=64), []
    for count in (1, 3, 8):
        with hopper.on_cpu(Options(seed=count)), trial(decode=Config(64, 64, 4, 3, count, RUNS, specialised=True)):
            results.append([x.clone() for x in build(case, torch.bfloat16).run("hopper")])
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))
