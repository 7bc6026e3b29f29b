"""Compiled kernels over caches, Triton's and Hopper's, and those that quantise, against the oracle."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from flashtile.backends.gpu.decode.config import DecodeTiles, SplitRule
from flashtile.backends.gpu.trial import trial
from flashtile.backends.hopper.forward.paged import config as tiles
from flashtile.backends.portable.rounding import launch
from tests.kvcache.alone import judge_alone
from tests.kvcache.cases import EIGHT_BIT_ROWS, CacheCase, build, judge
from tests.kvcache.functions import HUGE, huge_error
from tests.ptx import hopper, portable
from tests.ptx.launch import Kernels, edited
from tests.ptx.machine import Options
from tests.ptx.text import PtxError
from tests.quantization.quantizer import CASES as CASES_ROUNDING
from tests.quantization.quantizer import Case, check, inputs
from tests.slow import slow_but

CASES = (
    CacheCase("splits", ((150, 1, 0), (0, 1, 0), (33, 1, 0)), heads=8, kv_heads=2, head_dim=64, page_size=16),
    CacheCase("append", ((70, 2, 2), (0, 2, 2)), heads=2, kv_heads=1, head_dim=64, appends=True, rotary=32,
              window=(50, 0), sinks=True),
    CacheCase("float8", ((90, 1, 1), (31, 1, 1)), heads=4, kv_heads=1, head_dim=64, appends=True, float8="eh",
              page_size=16),
    CacheCase("e5m2", ((90, 1, 1), (31, 1, 1)), heads=4, kv_heads=1, head_dim=64, appends=True, float8="h", e5m2=True),
    CacheCase("slots", ((70, 2, 2), (0, 5, 5), (3, 0, 0)), heads=2, kv_heads=1, head_dim=64, packed=True, appends=True,
              page_size=16, slots="some"),
)  # fmt: skip


# Small ones, so that few keys are many splits, which several programs share.
TILES = DecodeTiles(16, 32, 4, 3, programs_per_sm=2, splitting=SplitRule(programs=8, fewest_keys=32, most_keys=64))
# Two groups of warps, whose products are WGMMA, and one.
WIDE_TILES = DecodeTiles(128, 64, 8, 3, 1, SplitRule(programs=8, fewest_keys=64, most_keys=128, run=2))
TALL_TILES = DecodeTiles(64, 64, 4, 3, 2, SplitRule(programs=8, fewest_keys=64, most_keys=128, run=2))
NEVER_SPLIT = CacheCase("never_split", ((40, 9, 0), (0, 9, 0)), heads=8, kv_heads=2, head_dim=64, page_size=16)
WIDE = CacheCase("wide", ((384, 2, 0), (64, 2, 0)), heads=40, kv_heads=1, head_dim=64, window=(300, 0))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("case", "arch"),
    slow_but(
        [(case, arch) for case in CASES for arch in ("sm_90", "sm_80")],
        lambda each: (each[0].name, each[1]) in (("splits", "sm_80"), ("append", "sm_90")),
    ),
    ids=str,
)
def test_compiled_kernels_under_the_rule(case: CacheCase, arch: str) -> None:
    with portable.on_cpu(Options(seed=len(case.name)), arch), trial(decode=TILES):
        judge(build(case, torch.bfloat16), "portable")


@pytest.mark.long
def test_compiled_kernels_of_rows_with_bits_of_their_own() -> None:
    """A launch for few rows, with splits at fixed keys in some runs, and one for the others."""
    case = CacheCase("own_bits", ((290, 1, 0), (70, 20, 0), (3, 2, 0)), heads=8, kv_heads=2, head_dim=64, packed=True,
                     page_size=16, spare=3, invariant=True)  # fmt: skip
    with portable.on_cpu(Options(seed=1), "sm_80"):
        judge(build(case, torch.bfloat16), "portable")


@pytest.mark.long
@pytest.mark.parametrize("case", slow_but(EIGHT_BIT_ROWS, lambda case: case.name == "rows_odd_pages"), ids=str)
def test_rows_of_656_bytes(case: CacheCase) -> None:
    with portable.on_cpu(Options(seed=3), "sm_80"), trial(decode=TILES):
        judge(build(case, torch.bfloat16), "portable")


@pytest.mark.long
@pytest.mark.parametrize("tiles", [WIDE_TILES, TALL_TILES], ids=str)
def test_tiles_of_many_rows(tiles: DecodeTiles) -> None:
    """Blocks with and without a mask, runs of splits, and a fold of states so large that programs wait to share it."""
    with portable.on_cpu(Options(seed=3), "sm_90"), trial(decode=tiles):
        judge(build(WIDE, torch.bfloat16), "portable")


@pytest.mark.parametrize("tiles", slow_but([TILES, TALL_TILES], lambda tiles: tiles == TILES), ids=str)
def test_calls_that_are_never_split(tiles: DecodeTiles) -> None:
    """Their kernel has no workspace."""
    whole = dataclasses.replace(tiles, splitting=SplitRule(programs=1, most_keys=128))
    with portable.on_cpu(Options(seed=1), "sm_90"), trial(decode=whole):
        judge(build(NEVER_SPLIT, torch.bfloat16), "portable")


@pytest.mark.long
def test_scores_as_huge_as_float32_has_them() -> None:
    with portable.on_cpu(Options(seed=2), "sm_80"), trial(decode=TILES):
        assert huge_error(HUGE[2], "portable", page_size=16, sinks=True, dtype=torch.bfloat16) < 1e-2


# Programs that run at once: some wait for the others to share a fold, and some of those give up at the last moment.
SHARED_TILES = DecodeTiles(16, 32, 4, 2, 8, SplitRule(programs=16, fewest_keys=32, most_keys=32, run=2))
SHARED = CacheCase("shared", ((512, 1, 0),), heads=16, kv_heads=1, head_dim=64)


@pytest.mark.long
@pytest.mark.parametrize("seed", slow_but(range(12), lambda seed: seed in (0, 5, 6)))
def test_programs_that_wait_share_a_fold(seed: int) -> None:
    with portable.on_cpu(Options(seed=seed), "sm_90"), trial(decode=SHARED_TILES):
        judge(build(SHARED, torch.bfloat16), "portable")


# What orders programs, and what it might be by mistake: of those that store, of those that wait, of the last.
FAULTS = {
    "nothing is released": (r"acq_rel(\.add\.u32)", r"relaxed\1"),
    "nothing is acquired": (r"acq_rel(\.add\.u32)", r"release\1"),
    "within a block": (r"gpu(\.acq_rel\.add\.u32)", r"cta\1"),
    "before other warps have stored": (r"bar\.sync\s+0;((?:(?!bar\.sync)[\s\S])*?acq_rel\.add)", r"\1"),
    "the last says nothing": (r"release(\.exch)", r"relaxed\1"),
    "who waits hears nothing": (r"(ld\.global\.gpu\.)acquire", r"\1relaxed"),
    "the count is no atomic": (r"atom\.global\.gpu\.relaxed\.exch\.b32 %r\d+,", "st.global.b32 "),
}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("fault", FAULTS)
def test_programs_that_do_not_tell_what_they_have_done(fault: str) -> None:
    with (
        portable.on_cpu(Options(seed=6), "sm_90"),
        trial(decode=SHARED_TILES),
        mock.patch.object(Kernels, "build", edited("cache_attention", *FAULTS[fault])),
        pytest.raises(PtxError, match=r"race: warp \d+ .*(reads|writes) byte \d+"),
    ):
        build(SHARED, torch.bfloat16).run("portable")


# Small splits, which several programs share, and of a short sequence few.
RUNS = SplitRule(programs=8, fewest_keys=64, most_keys=128, run=2)
SPLITS = SplitRule(programs=8, fewest_keys=64, most_keys=64, run=1)
TWO = DecodeTiles(128, 64, 4, 2, 4, RUNS, specialised=True)
ONE = DecodeTiles(64, 64, 4, 2, 4, SPLITS, specialised=True)
LARGE_BLOCKS = DecodeTiles(128, 128, 4, 2, 1, RUNS, specialised=True)
WIDE_CASES = (
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
@pytest.mark.parametrize(("case", "tiles"), WIDE_CASES, ids=str)
def test_cases_under_the_rule(case: CacheCase, tiles: DecodeTiles, dtype: torch.dtype) -> None:
    with hopper.on_cpu(Options(seed=len(case.name))), trial(decode=tiles):
        judge(build(case, dtype), "hopper")


@pytest.mark.slow
@pytest.mark.parametrize("tiles", slow_but((TWO, ONE), (ONE,).__contains__), ids=str)
def test_a_sequence_alone_and_among_others(tiles: DecodeTiles) -> None:
    case = CacheCase("alone", ((500, 1, 0), (64, 1, 0), (0, 1, 0), (257, 1, 0)), heads=40, kv_heads=1, head_dim=64)
    with hopper.on_cpu(Options(seed=2)), trial(decode=tiles):
        judge_alone(case, torch.bfloat16, "hopper")


@pytest.mark.slow
def test_the_number_of_programs_changes_no_bit() -> None:
    case, results = CacheCase("programs", ((500, 1, 0), (130, 1, 0)), heads=40, kv_heads=1, head_dim=64), []
    for count in (1, 3, 8):
        with hopper.on_cpu(Options(seed=count)), trial(decode=DecodeTiles(64, 64, 4, 3, count, RUNS, specialised=True)):
            results.append([x.clone() for x in build(case, torch.bfloat16).run("hopper")])
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))


ONES = CacheCase("pages_of_1", ((200, 70, 0), (5, 70, 0), (0, 70, 0)), heads=4, kv_heads=2, head_dim=64, page_size=1)
PROMPT_CASES = (
    ONES,
    CacheCase("pages_of_20", ((130, 90, 0), (60, 3, 0)), packed=True, heads=2, kv_heads=1, head_dim=128, page_size=20,
              window=(50, 3), layout="between"),
    CacheCase("pages_of_48", ((130, 65, 0),), heads=4, kv_heads=1, head_dim=88, page_size=48, softcap=5.0, sinks=True),
    CacheCase("wide", ((70, 140, 0),), heads=1, kv_heads=1, head_dim=256, page_size=3),
)  # fmt: skip
PROMPT_RUNS = slow_but([(case, warps) for case in PROMPT_CASES for warps in (2, 4)], lambda each: each == (ONES, 2))


@pytest.mark.long
@pytest.mark.parametrize(("case", "warps"), PROMPT_RUNS, ids=str)
def test_copied_pages_under_the_rule(case: CacheCase, warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_GATHERING", dict.fromkeys((2, 4), tiles._GATHERING[warps]))
    with hopper.on_cpu(Options(seed=warps, product_at_wait=True, strict_fences=True)):
        judge(build(case, torch.bfloat16), "hopper")


# A fence, where a product follows before the next wait; an arrival behind copies.
FENCE = r"fence\.proxy\.async\.shared::cta;(?=((?!try_wait|fence\.proxy)[\s\S])*wgmma\.mma_async)"
ARRIVAL = r"cp\.async\.mbarrier\.arrive\.noinc\.shared\.b64\s+(\[[^]]*\]);"
TAKEN_OUT = (
    (FENCE, "", "a product of .* reads .* without a proxy fence after the write of a copy"),
    (ARRIVAL, "", "deadlock"),
    (ARRIVAL, r"mbarrier.arrive.shared::cta.b64 _, \1;", "nothing orders that after the write of a copy"),
)


@pytest.mark.long
@pytest.mark.parametrize(("pattern", "replacement", "message"), slow_but(TAKEN_OUT, TAKEN_OUT[:1].__contains__))
def test_what_is_taken_out_is_missed(
    monkeypatch: pytest.MonkeyPatch, pattern: str, replacement: str, message: str
) -> None:
    monkeypatch.setattr(Kernels, "build", edited("paged_forward", pattern, replacement, 1))
    with hopper.on_cpu(Options(strict_fences=True)), pytest.raises((PtxError, RuntimeError), match=message):
        build(ONES, torch.bfloat16).run("hopper")


ARCHS = ("sm_80", "sm_90", "sm_89")
# Each on one architecture. Left out is the case whose angles PyTorch applies: its numbers are then float32, whose
# products the interpreter does not know.
COMPILED = [(case, ARCHS[i % 3]) for i, case in enumerate(CASES_ROUNDING) if case.name != "few pairs"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "arch"), slow_but(COMPILED, lambda each: each[0].name in ("packed", "some halves")), ids=str
)
def test_compiled_kernels(case: Case, arch: str) -> None:
    capability = {"sm_90": (9, 0), "sm_89": (8, 9), "sm_80": (8, 0)}[arch]
    with (
        portable.on_cpu(Options(seed=len(case.name)), arch),
        mock.patch.object(launch, "compute_capability", lambda device: capability),
    ):
        # Rotated numbers are rounded to 16 bits before, and on sm_89 Triton makes e4m3 numbers of float16 ones.
        check(case, inputs(case, torch.bfloat16), 0.02 if case.rotate else 0.0, 0.02 if arch == "sm_89" else 1e-3)
