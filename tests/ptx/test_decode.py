"""The kernels of cached calls as compiled for two architectures, against the oracle: splits, pages and appending."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from flashtile.backends.gpu.decode.config import Config, Splitting
from flashtile.backends.gpu.trial import trial
from tests.kvcache.cases import EIGHT_BIT_ROWS, CacheCase, build, judge
from tests.kvcache.functions import HUGE, huge_error
from tests.ptx import portable
from tests.ptx.launch import Kernels, edited
from tests.ptx.machine import Options
from tests.ptx.text import PtxError
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
TILES = Config(16, 32, 4, 3, programs_per_sm=2, splitting=Splitting(programs=8, fewest_keys=32, most_keys=64))
# Two groups of warps, whose products are WGMMA, and one.
WIDE_TILES = Config(128, 64, 8, 3, 1, Splitting(programs=8, fewest_keys=64, most_keys=128, run=2))
TALL_TILES = Config(64, 64, 4, 3, 2, Splitting(programs=8, fewest_keys=64, most_keys=128, run=2))
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


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", slow_but(EIGHT_BIT_ROWS, lambda case: case.name == "rows_odd_pages"), ids=str)
def test_rows_of_656_bytes(case: CacheCase) -> None:
    with portable.on_cpu(Options(seed=3), "sm_80"), trial(decode=TILES):
        judge(build(case, torch.bfloat16), "portable")


@pytest.mark.long
@pytest.mark.parametrize("tiles", [WIDE_TILES, TALL_TILES], ids=str)
def test_tiles_of_many_rows(tiles: Config) -> None:
    """Blocks with and without a mask, runs of splits, and a fold of states so large that programs wait to share it."""
    with portable.on_cpu(Options(seed=3), "sm_90"), trial(decode=tiles):
        judge(build(WIDE, torch.bfloat16), "portable")


@pytest.mark.parametrize("tiles", slow_but([TILES, TALL_TILES], lambda tiles: tiles == TILES), ids=str)
def test_calls_that_are_never_split(tiles: Config) -> None:
    """Their kernel has no workspace."""
    whole = dataclasses.replace(tiles, splitting=Splitting(programs=1, most_keys=128))
    with portable.on_cpu(Options(seed=1), "sm_90"), trial(decode=whole):
        judge(build(NEVER_SPLIT, torch.bfloat16), "portable")


@pytest.mark.long
def test_scores_as_huge_as_float32_has_them() -> None:
    with portable.on_cpu(Options(seed=2), "sm_80"), trial(decode=TILES):
        assert huge_error(HUGE[2], "portable", page_size=16, sinks=True, dtype=torch.bfloat16) < 1e-2


# Programs that run at once: some wait for the others to share a fold, and some of those give up at the last moment.
SHARED_TILES = Config(16, 32, 4, 2, 8, Splitting(programs=16, fewest_keys=32, most_keys=32, run=2))
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
