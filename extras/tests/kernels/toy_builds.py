"""Small kernels to hold the report against: what they cost can be said beforehand."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashtile_lab.kernels.build import KernelBuild


@triton.jit
def matmul(a_ptr, b_ptr, out_ptr, num_k, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    """One block of out = a @ b, both float16 of BLOCK columns."""
    at = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, num_k, BLOCK):
        a = tl.load(a_ptr + at[:, None] * num_k + k + at[None, :])
        b = tl.load(b_ptr + (k + at[:, None]) * BLOCK + at[None, :])
        acc = tl.dot(a, b, acc)
    if SCALE is not None:
        acc *= SCALE
    tl.store(out_ptr + at[:, None] * BLOCK + at[None, :], acc)


@triton.jit
def hold_all(x_ptr, out_ptr, N: tl.constexpr):
    """Keeps N values in registers across a loop whose trip count is data."""
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    for _ in range(tl.load(x_ptr + N).to(tl.int32)):
        x = x * x + tl.sum(x)
    tl.store(out_ptr + at, x)


# Triton 3.9 renamed them, and the old names raise there.
tma_load = gl.constexpr(getattr(tma, "async_load", None) or tma.async_copy_global_to_shared)
tma_store = gl.constexpr(getattr(tma, "async_store", None) or tma.async_copy_shared_to_global)


@gluon.jit
def copy_tile(x_desc, out_desc):
    """One tile from global memory to shared memory and back, all by TMA."""
    tile = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_shape, x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, x_desc.block_type.nbytes)
    tma_load(x_desc, [0, 0], full, tile)
    mbarrier.wait(full, 0)
    tma_store(out_desc, [0, 0], tile)
    tma.store_wait(0)


@triton.jit
def wrong(x_ptr, N: tl.constexpr):
    """Does not compile: the two shapes do not broadcast."""
    tl.store(x_ptr + tl.arange(0, N), tl.arange(0, 2 * N))


def _matmul(block: int, scale: float | None) -> KernelBuild:
    return KernelBuild(
        name="matmul",
        backend="toy",
        direction="forward",
        config={"block": block, "scale": scale},
        kernel=matmul,
        signature={"num_k": "i32", "out_ptr": "*fp32", "a_ptr": "*fp16", "b_ptr": "*fp16"},
        constexprs={"SCALE": scale, "BLOCK": block},
        divisible=("a_ptr", "b_ptr", "out_ptr", "num_k"),
        options={"num_warps": 4, "num_stages": 3},
        spill_limit=0,
    )


def _hold_all(limit: int | None) -> KernelBuild:
    return KernelBuild(
        name="hold_all",
        backend="toy",
        direction="backward",
        config={"n": 16384},
        kernel=hold_all,
        signature={"x_ptr": "*fp32", "out_ptr": "*fp32"},
        constexprs={"N": 16384},
        divisible=("x_ptr", "out_ptr"),
        options={"num_warps": 1},
        spill_limit=limit,
    )


def _copy_tile(rows: int) -> KernelBuild:
    layout = gl.NVMMASharedLayout.get_default_for([rows, 64], gl.float16)
    tile = f"tensordesc<fp16[{rows}, 64],{layout!r}>"
    return KernelBuild(
        name="copy_tile",
        backend="toy",
        direction="forward",
        config={"rows": rows},
        kernel=copy_tile,
        signature={"x_desc": tile, "out_desc": tile},
        constexprs={},
        options={"num_warps": 4},
    )


def builds(arch: str) -> list[KernelBuild]:
    """Kernels that build and keep their promises."""
    return [_matmul(64, None), _matmul(64, 0.5), *([_copy_tile(64)] if arch == "sm_90a" else [])]


def broken(arch: str) -> list[KernelBuild]:
    """One kernel that is fine, and one of each kind that is not: no code, too many registers, too much memory."""
    bad = KernelBuild(
        name="wrong",
        backend="toy",
        direction="forward",
        config={},
        kernel=wrong,
        signature={"x_ptr": "*i32"},
        constexprs={"N": 64},
    )
    return [_matmul(64, None), bad, _hold_all(64), _matmul(256, None)]
