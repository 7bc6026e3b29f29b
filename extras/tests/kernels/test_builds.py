"""Every GPU kernel builds for every architecture without a GPU, and what the report says about a build is true."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import subprocess
import sys

import pytest

from flashtile.core.errors import InvalidInputError, UnsupportedError
from flashtile_lab.kernels import report as builds
from flashtile_lab.kernels.build import ARCHS, KernelBuild

pytest.importorskip("triton")

from extras.tests.kernels import toy_builds
from tests.slow import named, slow_but

TOY = "extras.tests.kernels.toy_builds"
BROKEN = "extras.tests.kernels.toy_builds_broken"


@pytest.fixture
def matmul() -> KernelBuild:
    return toy_builds.builds("sm_80")[0]


@pytest.mark.parametrize(
    ("arch", "counts"),
    [
        # A 64^3 product: 32 steps of m16n8k16 for each of 4 warps; wgmma and tcgen05 take m64n64k16, MFMA 32x32x8.
        ("sm_80", {"mma": 32}),
        ("sm_90a", {"wgmma": 4}),
        ("sm_100", {"tcgen05.mma": 4}),
        ("gfx942", {"mfma": 8}),
    ],
)
def test_matrix_instructions_of_one_block_product(matmul: KernelBuild, arch: str, counts: dict[str, int]) -> None:
    # A loop of one trip, so that no pass can copy its body.
    signature = {name: kind for name, kind in matmul.signature.items() if name != "num_k"}
    constexprs = {**matmul.constexprs, "num_k": 64}
    once = dataclasses.replace(matmul, signature=signature, constexprs=constexprs, divisible=tuple(signature))
    report = builds.compile_build(once, arch)
    assert {kind: n for kind, n in report.instructions.items() if kind in counts} == counts
    assert report.spill_bytes == 0
    assert 0 < report.registers <= 512
    assert report.problems == []


def test_pipelined_loads_go_through_shared_memory(matmul: KernelBuild) -> None:
    report = builds.compile_build(matmul, "sm_80")
    # Two buffers of the two 64x64 float16 blocks; 16 bytes a thread and copy, three times two blocks of 8 KiB.
    assert report.shared_bytes == 2 * 2 * 64 * 64 * 2
    assert report.instructions["cp.async"] == 3 * 2 * 64 * 64 * 2 // (16 * 128)
    assert "ld.global" not in report.instructions


def test_gluon_kernel_with_tma() -> None:
    report = builds.compile_build(toy_builds.builds("sm_90a")[-1], "sm_90a")
    assert (report.instructions["tma_load"], report.instructions["tma_store"]) == (1, 1)
    assert report.instructions["mbarrier.wait"] >= 1
    assert 64 * 64 * 2 <= report.shared_bytes < 64 * 64 * 2 + 1024


@pytest.mark.long
@pytest.mark.parametrize("arch", slow_but(["sm_80", "sm_90a", "sm_100"], named("sm_80")))
def test_spills_are_seen(arch: str) -> None:
    # 512 values a thread cannot stay in 255 registers: those beyond must be in local memory.
    report = builds.compile_build(toy_builds.broken(arch)[2], arch)
    assert report.registers <= 255
    assert report.spill_bytes >= (512 - 255) * 4
    assert report.problems == [f"spills {report.spill_bytes} bytes, at most 64 are promised"]


def test_accumulation_registers_count_on_amd() -> None:
    report = builds.compile_build(toy_builds.broken("gfx942")[2], "gfx942")
    # 16384 values over 64 lanes: 256 a lane, more than the 256 vector registers hold with anything else beside them.
    assert report.registers > 256


def test_too_much_shared_memory_is_a_problem(matmul: KernelBuild) -> None:
    report = dataclasses.replace(builds.compile_build(matmul, "gfx942"), shared_bytes=64 * 1024 + 1)
    assert report.problems == ["needs 65537 bytes of shared memory, gfx942 has 65536"]
    assert dataclasses.replace(report, shared_bytes=64 * 1024).problems == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"constexprs": {"SCALE": None}}, "arguments missing: BLOCK"),
        ({"constexprs": {"SCALE": None, "BLOCK": 64, "num_k": 64}}, "arguments twice: num_k"),
        ({"constexprs": {"SCALE": None, "BLOCK": 64, "SPLIT": 2}}, "arguments unknown: SPLIT"),
        ({"divisible": ("BLOCK",)}, "arguments unknown: BLOCK"),
    ],
)
def test_a_build_names_each_argument_once(matmul: KernelBuild, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        builds.compile_build(dataclasses.replace(matmul, **change), "sm_80")


def test_counts_read_mnemonics_and_nothing_else() -> None:
    ptx = """
        // mma.sync in a comment
        @%p1 bra $L__wgmma.mma_async;
        @%p2 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}], [%r4];
        cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%rd1, {%r1}], [%r2];
        cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%rd1, {%r1}], [%r2];
        cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
        cp.async.commit_group;
        { mbarrier.try_wait.parity.shared.b64 complete, [%r1], %r2; }
        @%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16384;
        atom.global.gpu.acq_rel.add.f32 %f1, [ %rd1 + 0 ], %f2;
        red.relaxed.gpu.global.add.f32 [%rd1], %f2;
        bar.sync 0; barrier.sync 1, 128;
        setmaxnreg.dec.sync.aligned.u32 24;
    """
    once = ["tma_load", "tma_store", "tma_reduce", "cp.async", "mbarrier.wait", "mbarrier.arrive", "setmaxnreg"]
    assert builds.count_ptx(ptx) == {**dict.fromkeys(once, 1), "atomic": 2, "bar": 2}
    gcn = "v_mfma_f32_32x32x8_f16 a[0:15], v[0:1] ; ds_read_b64\n ds_read_b64 v[0:1], v2\n ds_write_b64 v2, v[0:1]"
    assert builds.count_amdgcn(gcn) == {"mfma": 1, "ds_read": 1, "ds_write": 1}


@pytest.mark.long
def test_processes_build_what_one_process_builds() -> None:
    todo = builds.jobs_of(TOY, "sm_80")
    alone = {outcome.job: outcome.report for outcome in builds.run(todo, workers=1)}
    together = {outcome.job: outcome.report for outcome in builds.run(todo, workers=2)}
    assert together == alone
    assert [report.config["scale"] for report in alone.values() if report] == [None, 0.5]


@pytest.mark.long
def test_one_kernel_that_does_not_build_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)(BROKEN)
    module.builds = toy_builds.broken
    monkeypatch.setitem(sys.modules, BROKEN, module)
    fine, wrong, spills, huge = builds.run(builds.jobs_of(BROKEN, "sm_80"), workers=1)
    assert fine.problems == []
    assert wrong.report is None
    assert "toy/wrong" in wrong.job.label
    assert "incompatible dimensions" in wrong.problems[0]
    assert "spills" in spills.problems[0]
    assert "bytes of shared memory, sm_80 has 166912" in huge.problems[0]


def test_quick_takes_the_first_configuration_of_each_kernel() -> None:
    labels = [job.label for job in builds.jobs_of(TOY, "sm_90a", quick=True)]
    assert labels == ["toy/matmul block=64 scale=None", "toy/copy_tile rows=64"]


def test_quick_takes_every_mask_and_feature_of_a_gluon_kernel() -> None:
    def traits(quick: bool) -> set[tuple[str, str]]:
        chosen = [build for build, job in zip(hopper_builds, all_jobs, strict=True) if not quick or job in quick_jobs]
        masks = {(build.name, str(build.config["mask"]).partition("(")[0]) for build in chosen}
        features = {(b.name, f) for b in chosen for f in str(b.config.get("features", "")).split("+")}
        return masks | features

    module = "flashtile_lab.kernels.hopper"
    hopper_builds = importlib.import_module(module).builds("sm_90a")
    all_jobs, quick_jobs = (builds.jobs_of(module, "sm_90a", quick=quick) for quick in (False, True))
    gluon = {build.name for build in hopper_builds if build.kernel.is_gluon()}
    assert {trait for trait in traits(False) - traits(True) if trait[0] in gluon} == set()
    assert ("attention_backward", "window") in traits(True) and len(quick_jobs) < len(all_jobs) // 3


def test_refusals_name_the_argument() -> None:
    with pytest.raises(
        InvalidInputError, match="arch: is 'sm_75', must be one of sm_80, sm_89, sm_90a, sm_100, sm_120, gfx942, gfx950"
    ):
        builds.jobs("sm_75")
    with pytest.raises(InvalidInputError, match="backend: is 'metal', must be one of hopper, portable, cpu"):
        builds.jobs("sm_80", "metal")
    with pytest.raises(UnsupportedError, match="cpu has no GPU kernels for sm_80"):
        builds.jobs("sm_80", "cpu")


def test_no_triton_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    with pytest.raises(UnsupportedError, match="needs Triton, which is not installed: pip install triton"):
        builds.jobs("sm_80")


@pytest.mark.long
def test_builds_can_be_imported_without_triton() -> None:
    modules = [f"flashtile_lab.kernels.{name}" for name in ("hopper", "portable", "decode", "quantizer", "report")]
    modules = ["flashtile_lab.kernels.report", *(name for name in modules if importlib.util.find_spec(name))]
    code = f"import sys; sys.modules['triton'] = None; import {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_backend_multiplies_with_the_instructions_of_the_chip(arch: str) -> None:
    jobs = {job.module: job for job in reversed(builds.jobs(arch))}
    reports = [outcome.report for outcome in builds.run(list(jobs.values())) if outcome.report is not None]
    matrix = {"sm_90a": "wgmma", "sm_100": "tcgen05.mma", "gfx942": "mfma", "gfx950": "mfma"}.get(arch, "mma")
    assert len(reports) == len(jobs) and all(matrix in report.instructions for report in reports)
