"""What a loop forgets is found, and no kernel forgets anything."""

from __future__ import annotations

from types import ModuleType

import pytest
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.build import KernelBuild
from flashtile.backends.hopper import builds as hopper
from flashtile.backends.portable import builds as portable
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


@pytest.mark.parametrize(
    "quick", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["each kernel", "all builds"]
)
@pytest.mark.parametrize("module", [hopper, portable], ids=["hopper", "portable"])
def test_no_kernel_forgets(module: ModuleType, quick: bool) -> None:
    every = module.builds("sm_90a")
    last = {build.name: build for build in reversed(every)} | {f"last {build.name}": build for build in every}
    for build in last.values() if quick else every:
        assert not not_carried(build, "sm_90a"), build.label
