"""What a loop forgets is found, and no kernel forgets anything."""

from __future__ import annotations

from types import ModuleType

import pytest
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile_lab.kernels import hopper as hopper
from flashtile_lab.kernels import portable as portable
from flashtile_lab.kernels import report as builds
from flashtile_lab.kernels.build import KernelBuild
from tests.ptx.carries import not_carried


@gluon.jit
def late(x_ptr, count, COPY: gl.constexpr):
    """Stores at each pass what the pass before had; with ``COPY`` the first value comes from the same variable."""
    value = gl.load(x_ptr)
    if COPY:  # noqa: SIM108 - the compiler looks at both sides of an expression
        before = value
    else:
        before = gl.to_tensor(-1)
    for i in range(count):
        gl.store(x_ptr + 1 + i, before)
        before = value
        value = value * 2 + i


@pytest.mark.parametrize("copied", [True, False])
def test_a_variable_that_starts_as_another_is_forgotten(copied: bool) -> None:
    build = KernelBuild(
        name="late", backend="toy", direction="forward", config={}, kernel=late,
        signature={"x_ptr": "*i32", "count": "i32"}, constexprs={"COPY": copied},
    )  # fmt: skip
    found = not_carried(build, "sm_90a")
    assert {(name, others) for _, _, name, others in found} == ({("before", ("value",))} if copied else set())


@pytest.mark.long
@pytest.mark.parametrize("module", [hopper, portable], ids=["hopper", "portable"])
def test_no_kernel_forgets(module: ModuleType) -> None:
    every = module.builds("sm_90a")
    ends = {build.name: build for build in reversed(every)} | {f"last {build.name}": build for build in every}
    for build in ends.values():
        assert not not_carried(build, "sm_90a"), build.label


@pytest.mark.slow
@pytest.mark.parametrize("module", [hopper, portable], ids=["hopper", "portable"])
def test_no_feature_makes_a_kernel_forget(module: ModuleType) -> None:
    every = module.builds("sm_90a")
    for job in builds.jobs_of(module.__name__, "sm_90a", quick=True):
        assert not not_carried(every[job.index], "sm_90a"), job.label
