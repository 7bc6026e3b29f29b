"""What the compiler makes of the Hopper forward, on a machine without a GPU."""

from __future__ import annotations

import dataclasses

import pytest

from flashtile_lab.kernels import report as builds
from flashtile_lab.kernels.build import KernelBuild

pytest.importorskip("triton.experimental.gluon")

from flashtile.backends.hopper.forward import config as tiles
from flashtile_lab.kernels import hopper as hopper_builds
from tests.slow import slow_but

BUILDS = hopper_builds.builds("sm_90a")
USUAL = 16
# Of the usual ones, a configuration of each head_dim that has one of its own.
QUICK = {
    min(i for i, b in enumerate(BUILDS[:USUAL]) if b.constexprs["call.q.BLOCK_DIM"] == dim) for dim in (64, 128, 256)
}


def test_only_for_hopper() -> None:
    assert [hopper_builds.builds(arch) for arch in ("sm_80", "sm_100", "gfx942")] == [[], [], []]
    assert len(BUILDS) > 15


def test_kernels_take_few_records() -> None:
    for build in BUILDS:
        assert list(build.tree) == build.kernel.arg_names and len(build.tree) <= 8, build.name


@pytest.mark.long
@pytest.mark.parametrize(
    "build",
    slow_but(BUILDS[:USUAL], lambda b: BUILDS.index(b) in QUICK),
    ids=lambda b: f"{b.config['mask']}-{b.config['tiles']}",
)
def test_no_spill_and_the_instructions_of_the_chip(build: KernelBuild) -> None:
    report = builds.compile_build(build, "sm_90a")
    assert report.problems == []
    assert report.spill_bytes == 0
    # Each warpgroup has the products with keys at the start, in the loop and between tiles, those with values in the
    # loop and after it, for each part.
    groups, width, width_v = (
        build.constexprs[name] for name in ("schedule.NUM_WARPGROUPS", "call.q.BLOCK_DIM", "call.v.BLOCK_DIM")
    )
    steps = 3 * width // 16 + 2 * width_v.bit_count() * build.constexprs["schedule.BLOCK_N"] // 16
    assert report.instructions["wgmma"] == groups * steps
    # A load moves 64 columns, or those of a narrower part: queries of each warpgroup; keys of the first block and of
    # others; values of others, of a tile's last, and under OVERLAP of the last tile's last. A store's columns are
    # spread over warps.
    moves, moves_v = (each // min(tiles.narrowest(each), 64) for each in (width, width_v))
    values = 3 if build.constexprs["schedule.OVERLAP"] else 2
    assert report.instructions["tma_load"] == (groups + 2) * moves + values * moves_v
    assert report.instructions["tma_store"] == groups * width_v // tiles.TWO_WARPGROUPS[width, width_v].out_cols
    assert report.instructions["setmaxnreg"] > 0


@pytest.mark.slow
def test_spills_would_be_seen() -> None:
    starved = dataclasses.replace(BUILDS[1], constexprs={**BUILDS[1].constexprs, "schedule.REGISTERS": 152})
    report = builds.compile_build(starved, "sm_90a")
    assert any("spills" in problem for problem in report.problems)
