"""What the compiler makes of the Hopper backward, on a machine without a GPU."""

from __future__ import annotations

import dataclasses
import subprocess
import tempfile
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from flashtile.call.problem import described
from flashtile.core.masks import Band
from flashtile_lab.kernels import report as builds
from flashtile_lab.kernels.build import KernelBuild
from tests.slow import slow_but

pytest.importorskip("triton.experimental.gluon")

from flashtile.backends.hopper.backward import config as backward_tiles
from flashtile_lab.kernels import hopper as hopper_builds
from tests.backends.hopper.emulated import BACKWARD_TILES

BUILDS = [build for build in hopper_builds.builds("sm_90a") if build.direction.startswith("backward")]
SWEEPS = [build for build in BUILDS if build.name == "attention_backward"]


def _name(build: KernelBuild) -> str:
    return build.label.replace(" ", "-")


def _dims(build: KernelBuild) -> tuple[int, int]:
    """Columns of tiles of queries and of values."""
    return build.constexprs["grid.call.q.BLOCK_DIM"], build.constexprs["grid.call.v.BLOCK_DIM"]


def _usual(dim: int, dim_v: int | None = None) -> KernelBuild:
    dims = (dim, dim_v or dim)
    found = (b for b in SWEEPS if _dims(b) == dims)
    return next(b for b in found if b.config["mask"] == "causal")


# Every gradient, then some: each at one head_dim, and slow at others.
SOME = [build for build in SWEEPS if "only" in str(build.config.get("features"))]
# To float32, and added to it: one of each. The semaphores of dq_order would be atomics too.
WIDE = [b for b in SWEEPS if "float32" in str(b.config.get("features")) and "grid.work.dq_order" in b.constexprs]
CHIEF = [
    *map(_usual, (64, 96, 128, 256)),
    _usual(192, 128),
    *slow_but(SOME, SOME[:3].__contains__),
    *slow_but(WIDE, WIDE[:2].__contains__),
]


# Past 256: the first call's three kernels, then other calls'.
BIG = [build for build in BUILDS if build.name.startswith("big_backward")]


def _parts(width: int, most: int) -> list[int]:
    """Powers of two that add up to a width, the widest first, none over ``most``."""
    widest = min(1 << width.bit_length() >> 1, most)
    return [widest, *_parts(width - widest, most)] if width else []


@pytest.mark.long
@pytest.mark.parametrize("build", CHIEF, ids=_name)
def test_few_spills_and_the_instructions_of_the_chip(build: KernelBuild) -> None:
    report = builds.compile_build(build, "sm_90a")
    assert report.problems == []
    has_dq, has_dk, has_dv = (
        name in build.signature for name in ("grid.work.dq", "grid.gradients.dk", "grid.gradients.dv")
    )
    has_dscores = has_dq or has_dk
    (dim, dim_v), parts, block_m = (
        _dims(build),
        build.constexprs["grid.tiles.PARTS"],
        build.constexprs["grid.tiles.BLOCK_M"],
    )
    by_gradient, has_third, adds_to = parts == 1, build.constant("DQ_REGISTERS") > 0, build.constant("ADDS")
    columns, columns_v = (_parts(width, 128) for width in (dim, dim_v))
    # Scores and their gradients go over head_dim, dk and dv over the rows, dq over the keys; 16 a product. Each
    # warpgroup has a tile's first step, where it differs, and its loop. It makes both gradients of 64 keys, or one. If
    # no third one makes dq, each does, and adds it a step later, in two places.
    share = dim if block_m == 128 or has_third else dim // 2
    pieces = _parts(share, build.constant("DQ_WIDTH"))
    dq = parts * 64 // 16 * len(pieces) * (1 if has_third else 4)
    steps = 2 if by_gradient or (has_dq and not has_third) else 1
    gradients = (has_dk * len(columns) + has_dv * len(columns_v)) * block_m
    products = steps * parts * (dim + has_dscores * dim_v + gradients) // 16
    assert report.instructions["wgmma"] == products + has_dq * dq
    # A load moves 64 columns, or a narrower part: queries, dout, a warpgroup's keys and values at a time; one moves
    # what belongs to rows. The compiler may write a tile's first loads twice.
    loads = dim // min(64, columns[-1]) * (1 + parts) + dim_v // min(64, columns_v[-1]) * (1 + has_dscores * parts)
    assert report.instructions["tma_load"] >= loads + 1
    # Four neighbours at once: dq of 64 rows is as many vectors as a thread has accumulators, by 4; by TMA, a piece.
    by_tma = "grid.work.dq_desc" in build.signature
    adds = (1 if has_third else 4) * share // 8
    assert report.instructions["atomic"] == (adds + 1 if has_dq and not by_tma else 1)
    # dk and dv leave at the end of a tile, dv in two places where it leaves under a last product.
    box = min(columns[-1], columns_v[-1], 64 if by_gradient else 128)
    stores, stores_v = (width // box * (1 if by_gradient else 2) for width in (dim, dim_v))
    stores = has_dk * stores + has_dv * stores_v * (1 if by_gradient else 2)
    # A box of float32 has half the columns.
    stores *= 2 if "fp32" in build.signature.get("grid.gradients.dk", "") else 1
    # By the third warpgroup in boxes of 32 columns, by the others piece by piece, in two places each.
    added = (dim // 32 if has_third else 2 * 2 * len(pieces)) if by_tma else 0
    assert report.instructions.get("tma_reduce", 0) == added + (stores if adds_to else 0)
    assert report.instructions.get("tma_store", 0) == (0 if adds_to else stores)
    assert report.instructions["setmaxnreg"] > 0
    assert "st.global" not in report.instructions


@pytest.mark.long
@pytest.mark.parametrize("build", slow_but(BIG, BIG[:3].__contains__), ids=_name)
def test_a_gradient_past_256_columns_is_its_programs_own(build: KernelBuild) -> None:
    report = builds.compile_build(build, "sm_90a")
    assert report.problems == []
    (dim, dim_v), chunks = _dims(build), build.constant("NUM_OWN")
    # Scores and dprobs take 16 columns a product, a chunk of the gradient 16 rows, of 64. The former are made a step
    # ahead, so in two places; what uses them in a loop and after it, but for the follower of dv.
    if build.name == "big_backward_dv":
        products = 2 * dim // 16 + 4 * (chunks // 2 + (chunks + 1) // 2 * 2)
    else:
        products = 2 * dim // 16 + 2 * dim_v // 16 + 8 * chunks
    assert report.instructions["wgmma"] == products
    # A box of float32 has half the columns.
    box = 32 if "fp32" in build.signature["grid.gradients.out"] else 64
    assert report.instructions["tma_store"] == (dim_v if build.name == "big_backward_dv" else dim) // box
    assert report.instructions["setmaxnreg"] > 0
    assert not {"st.global", "atomic", "tma_reduce"} & report.instructions.keys()


@pytest.mark.long
@pytest.mark.parametrize("build", [*CHIEF, *BIG[:3]], ids=_name)
def test_the_assembler_adds_no_wait_for_a_product(build: KernelBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serialises products whose registers it cannot follow, with no more than a warning."""
    programs: dict[str, str] = {}

    def keep_text(text: str, count: Callable[[str], dict[str, int]] = builds.count_ptx) -> dict[str, int]:
        programs["ptx"] = text
        return count(text)

    def disassemble(cubin: bytes, read: Callable[[bytes], dict[str, int]] = builds.nvidia_resources) -> dict[str, int]:
        from triton import knobs

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            tool = [knobs.nvidia.cuobjdump.path, "--dump-sass", file.name]
            programs["sass"] = subprocess.run(tool, check=True, capture_output=True, text=True).stdout
        return read(cubin)

    monkeypatch.setattr(builds, "count_ptx", keep_text)
    monkeypatch.setattr(builds, "nvidia_resources", disassemble)
    builds.compile_build(build, "sm_90a")
    for asked, made in (
        ("wgmma.mma_async", " HGMMA."),
        ("wgmma.wait_group", "WARPGROUP.DEPBAR"),
        ("wgmma.fence", "WARPGROUP.ARRIVE"),
    ):
        assert programs["sass"].count(made) == programs["ptx"].count(asked) > 0, asked


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKWARD_TILES)
def test_every_variant_builds(name: str) -> None:
    config = BACKWARD_TILES[name]
    problem = described(
        device_type="cuda", compute_capability=(9, 0), dtype=torch.bfloat16, batch=1, seqlen_q=512, seqlen_k=512,
        num_heads_q=2, num_heads_kv=1, head_dim=config.block_d, head_dim_v=config.block_dv, band=Band(None, 0),
        softmax_scale=0.1, needs_grad=True,
    )  # fmt: skip
    with mock.patch.object(backward_tiles, "choose", return_value=config):
        build = hopper_builds.builds_of(problem, "backward")[1]
    assert builds.compile_build(build, "sm_90a").problems == []


@pytest.mark.slow
def test_spills_would_be_seen() -> None:
    build = _usual(128)
    starved = dataclasses.replace(build, constexprs={**build.constexprs, "grid.tiles.REGISTERS": 208})
    assert any("spills" in problem for problem in builds.compile_build(starved, "sm_90a").problems)


@pytest.mark.parametrize(
    "change", [{"stages": 6}, {"registers": 248}, {"dq_width": 96}, {"block_m": 32}, {"ds_stages": 1}]
)
def test_what_does_not_fit_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        dataclasses.replace(backward_tiles.BASE_128, **change)


@pytest.mark.parametrize(
    "change", [{"block_m": 128}, {"dq_tma": True}, {"dq_registers": 0}, {"k_stages": 2}, {"dq_width": 48}]
)
def test_a_gradient_each_takes_a_third_warpgroup(change: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        dataclasses.replace(backward_tiles.BASE_256, **change)
