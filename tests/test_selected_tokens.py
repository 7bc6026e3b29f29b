"""Calls where each query names the keys that it sees: values against the definition, refusals, compiled calls."""

from __future__ import annotations

import pytest
import torch

from flashtile.call.selected import Reach
from flashtile.core import settings
from tests.kvcache.cases import build
from tests.poison import poisoned_memory
from tests.selections import SELECTED, judge_selected, lists_for


def _dtype(name: str) -> torch.dtype:
    return torch.bfloat16 if SELECTED[name].float8 == "rows" else torch.float32


@pytest.mark.parametrize("name", SELECTED)
def test_positions_are_those_of_the_definition(name: str) -> None:
    call = build(SELECTED[name], _dtype(name))
    with poisoned_memory():
        judge_selected(call, lists_for(call, 13))


@pytest.mark.parametrize("name", SELECTED)
def test_slots_are_those_of_the_definition(name: str) -> None:
    call = build(SELECTED[name], _dtype(name))
    # What no sequence has is NaN in a case's caches, and slots name all rows.
    for x in (call.tensors.k_cache, call.tensors.v_cache, call.tensors.row_scale):
        if x is not None:
            x.copy_(x.float().nan_to_num(0.5, 0.5, 0.5).to(x.dtype))
    judge_selected(call, lists_for(call, 13, slots=True), slots=True)


@pytest.mark.skipif(settings.TRITON_INTERPRET.enabled(), reason="kernels are built without the interpreter")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_the_kernels_build_for_every_target(arch: str) -> None:
    """With everything that may be absent, and with nothing of it."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from flashtile.backends.gpu.launch import Pointer, compile_kernel, specialise
    from flashtile.backends.portable.selected import Sizes, launch_of

    target = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)
    names = ("cu_seqlens", "lengths", "table", "indptr", "entries", "leftpad", "causal")
    for given in (names, ("lengths",), ("lengths", "cu_seqlens", "table"), ("cu_seqlens",), ()):
        kinds = {name: torch.int8 if name == "causal" else torch.int32 for name in given}
        of_slots = "lengths" not in given
        layouts = tuple(
            (name, Pointer(kinds[name], name) if name in given else None) for name in (names[:1] if of_slots else names)
        )
        bounds = (None, None) if len(given) < 2 else (7, 0)
        launch = launch_of((6, 2048), True, Reach(*bounds, 4096, 64, 64), layouts, Sizes(4096, 3, 2, 64))
        made = compile_kernel(launch.kernel, specialise(launch), launch.options, target)
        assert made.metadata.name == ("of_slots" if of_slots else "of_positions")
