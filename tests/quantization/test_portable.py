"""The portable kernel over 8-bit tensors as the compiler and the launcher see it: builds, tiles, launches."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

pytest.importorskip("triton")

from flashtile.backends.gpu.launch import Launch, lower, specialise
from flashtile.backends.portable import BACKEND
from flashtile.backends.portable.config import SHARED_BYTES, PortableTiles
from flashtile.backends.portable.quantized.config import choose
from flashtile.call.arguments import FLOAT8
from flashtile.call.prepared import without_data
from flashtile.core.masks import Band
from flashtile_lab.kernels import portable as portable_builds
from flashtile_lab.kernels import report as builds
from tests.quantization.cases import CASES, QuantizedCase, build
from tests.slow import slow_but

ARCHS = {"sm_89": "mma", "sm_90a": "wgmma", "sm_100": "tcgen05.mma"}
# Bytes of registers that a thread spills with the oldest of three releases of Triton, by head_dim.
MOST_SPILLED = {64: 24, 96: 48, 128: 16, 256: 136}


def quantized(arch: str) -> list[builds.Job]:
    return [job for job in builds.jobs(arch, "portable") if "attention_quantized" in job.label]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_mask_and_feature_is_listed(arch: str) -> None:
    labels = [job.label for job in quantized(arch)]
    assert len(labels) == len(set(labels)) == 9 and all("dtype=e4m3" in label for label in labels)
    for trait in ("mask=full", "mask=causal", "mask=window", "varlen", "softcap", "sinks", "head_dim_v=80"):
        assert any(trait in label for label in labels), trait


def test_there_are_none_where_products_of_8_bits_are_not() -> None:
    assert quantized("sm_80") == quantized("gfx942") == []


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("arch", "index"),
    slow_but(
        [(arch, n) for arch in ARCHS for n in range(9)],
        lambda pair: pair in (("sm_89", 3), ("sm_90a", 1), ("sm_90a", 2)),
    ),
)
def test_builds_multiply_8_bits_without_spills(arch: str, index: int) -> None:
    job = quantized(arch)[index]
    (outcome,) = builds.run([job], workers=1)
    report = outcome.report
    assert report is not None and outcome.problems == [], outcome.problems
    assert report.instructions.get(ARCHS[arch], 0) > 0
    # Blackwell has the tiles of Hopper, untuned.
    if arch != "sm_100" or report.config["head_dim"] != 256:
        assert report.spill_bytes <= MOST_SPILLED[int(str(report.config["head_dim"]))]


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_tiles_fit_a_block_that_shares_a_scale(arch: str) -> None:
    if arch in ("sm_80", "gfx942"):
        return
    for dim, band, varlen in itertools.product((16, 64, 80, 128, 256), (Band(), Band(None, 0)), (False, True)):
        problem = portable_builds._problem("sm_90a", dim, band, varlen=varlen).but(dtype=FLOAT8)
        config = choose(problem, arch)
        assert 128 % config.block_m == 128 % config.block_n == 0 and config.block_n >= 32
        loop = config.block_n * 2 * max(dim, 32) * max(config.num_stages, 1)
        assert loop + config.block_m * dim <= SHARED_BYTES[arch]


def _launch(case: QuantizedCase) -> Launch:
    call = build(case)
    problem = call.problem.but(device_type="cuda", compute_capability=(9, 0))
    return BACKEND.launches(problem, without_data(call.tensors), "quantized")["attention_quantized"]


@pytest.mark.parametrize("case", [case for case in CASES if case.lengths], ids=str)
def test_launches_of_a_family_with_the_same_constants_ask_for_one_build(case: QuantizedCase) -> None:
    longer = dataclasses.replace(case, lengths=tuple((q + 130, k + 260) for q, k in case.lengths))
    more = longer if case.packed else dataclasses.replace(longer, lengths=(*longer.lengths, longer.lengths[0]))
    a, b = _launch(case), _launch(more)
    # Tensors without rows have strides of their own.
    is_empty = any(0 in map(sum, zip(*each.lengths, strict=True)) for each in (case, more))
    if specialise(a).constexprs == specialise(b).constexprs and a.options == b.options and not is_empty:
        assert specialise(a) == specialise(b) and lower(a)[0] == lower(b)[0]


def test_a_tile_longer_than_a_block_is_no_config() -> None:
    """The loop takes one scale for a tile: no override may pass 128."""
    from flashtile.backends.gpu.trial import trial

    call = build(next(case for case in CASES if case.name == "blocks"))
    with trial(quantized=PortableTiles(64, 256, 4, 1)), pytest.raises(ValueError, match="at most 128"):
        choose(call.problem)
