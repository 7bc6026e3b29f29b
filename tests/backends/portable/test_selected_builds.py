"""The backward over selected single keys as compilers see it: tiles, registers, instructions."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from flashtile.backends.portable import selected_backward as selected
from flashtile.call.problem import Problem, described
from flashtile.call.selected import SelectedInputs
from flashtile.core.errors import UnsupportedError
from flashtile_lab.kernels import report
from flashtile_lab.kernels.portable import selected_builds

HOPPER = {"device_type": "cuda", "compute_capability": (9, 0), "dtype": torch.bfloat16}


def tensors(heads: int, dims: tuple[int, int], is_part: bool, dtype: torch.dtype) -> SelectedInputs:
    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    k = empty(64, 1, dims[0])
    v = k[..., : dims[1]] if is_part else empty(64, 1, dims[1])
    out, lse = empty(8, heads, dims[1]), empty(8, heads, of=torch.float32)
    lists = empty(8, 32, of=torch.int32), empty(8, of=torch.int32)
    return SelectedInputs(empty(8, heads, dims[0]), k, v, out, lse, out, None, *lists)


@pytest.mark.parametrize(("name", "added"), [("selected_backward", 68), ("selected_backward_shares", 0)])
def test_latent_rows_on_hopper(name: str, added: int) -> None:
    (build,) = (each for each in selected_builds("sm_90a") if each.name == name and "128 heads" in each.label)
    found = report.compile_build(build, "sm_90a")
    # Of four numbers that a thread adds at once: 64 keys of 576 + 512 columns, by 256 threads.
    assert found.instructions.get("atomic", 0) == added
    assert found.instructions["wgmma"] > 0 == found.instructions.get("mma", 0)
    assert found.problems == [] and found.spill_bytes <= 384


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "gfx942"])
def test_separate_values_spill_nothing(arch: str) -> None:
    (build,) = (each for each in selected_builds(arch)[-4:] if each.name == "selected_backward")
    found = report.compile_build(build, arch)
    assert found.problems == [] and found.spill_bytes == 0


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0), None])
def test_tiles_fit_shared_memory(capability: tuple[int, int] | None) -> None:
    arch = {(8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100", (12, 0): "sm_120", None: "gfx942"}
    room = report.ARCHS[arch.get(capability, "sm_80")]
    for heads, dims, is_part in itertools.product((1, 8, 32, 128), ((16, 16), (128, 128), (576, 512)), (False, True)):
        t = tensors(heads, dims, is_part, torch.bfloat16)
        where = described(device_type="cuda", compute_capability=capability, dtype=torch.bfloat16)
        tiles = selected.choose(t, where)
        assert 16 <= tiles.block_m <= max(16, heads)
        # What is held of q and dout, and the rows of keys that a loop loads.
        rows = dims[0] if is_part else sum(dims)
        if capability is not None:  # on AMD q and dout stay in registers
            assert 2 * (tiles.block_m * sum(dims) + tiles.block_n * dims[0]) <= room
            assert 2 * tiles.num_stages * tiles.block_n * rows <= room


def test_wide_rows_of_float32_are_refused_where_they_do_not_fit() -> None:
    t = tensors(16, (576, 512), True, torch.float32)

    def where(capability: tuple[int, int]) -> Problem:
        return described(device_type="cuda", compute_capability=capability, dtype=torch.float32)

    assert selected.choose(t, where((9, 0))).num_warps == 8
    with pytest.raises(UnsupportedError, match="float32 with head_dim 576 and 512 need 110592 bytes of shared memory"):
        selected.choose(t, where((8, 9)))


def test_many_heads_are_added_up_by_the_widest_tile() -> None:
    for heads, name in ((128, "64x64x8x1"), (64, "64x64x8x1"), (32, "32x64x8x1"), (16, "16x32x4x2"), (8, "16x32x4x2")):
        assert selected.choose(tensors(heads, (576, 512), True, torch.bfloat16), described(**HOPPER)).name == name
