"""The Hopper backward's kernels in the configurations worth watching, for builds without a GPU."""

from __future__ import annotations

import torch

from flashtile.backends.build import KernelBuild
from flashtile.backends.hopper import backward_tiles
from flashtile.problem import Problem

_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
# What is spilled is what the compiler computes of a thread's index ahead of all loops: dk, dv and two blocks of scores
# take 192 of the 240 registers. Measured (2026-11-20): at head_dim 64 and 128 at most 16 bytes on Triton 3.6.0 and
# 3.7.1, in loops only two loads and a store of a window at 64, and 56 on 3.9.0, up to seven loads; with a softcap at
# 128 24, on 3.9.0 128; at 256 none.
_SPILL_LIMIT, _SOFTCAP_SPILL_LIMIT = 64, 128


def builds(problem: Problem) -> list[KernelBuild]:
    """The kernels of a problem's backward, the main one first."""
    needed = [sweep(problem, backward_tiles.choose(problem)), _prepare(problem), _finish(problem)]
    return needed if problem.band.unbounded else [*needed, _mend(problem)]


def _about(problem: Problem, tiles: str | None = None) -> dict[str, object]:
    about: dict[str, object] = {"dtype": _TYPES[problem.dtype], "head_dim": problem.head_dim, "mask": str(problem.band)}
    features = [name for name in ("softcap", "varlen", "deterministic") if getattr(problem, name)]
    if features:
        about["features"] = "+".join(features)
    return about | ({"tiles": tiles} if tiles else {})


def sweep(problem: Problem, config: backward_tiles.Config) -> KernelBuild:
    """The main kernel, with types and values as a launch would find them."""
    from triton.experimental.gluon import language as gl

    from flashtile.backends.hopper import gradients
    from flashtile.backends.hopper.backward import attention_backward

    dtype = _TYPES[problem.dtype]

    def descriptor(box: list[int]) -> str:
        layout = gl.NVMMASharedLayout.get_default_for(box, {"fp16": gl.float16, "bf16": gl.bfloat16}[dtype])
        return f"tensordesc<{dtype}{box},{layout!r}>"

    names = ("q_desc", "k_desc", "v_desc", "dout_desc", "dk_desc", "dv_desc")
    signature = dict(zip(names, map(descriptor, gradients.boxes(config, problem.varlen)), strict=True))
    signature["rows_desc"] = f"tensordesc<fp32{[2, config.block_m]},{gradients.floats_layout()!r}>"
    signature |= {"dq_ptr": "*fp32", "counter_ptr": "*i32"}
    signature |= dict.fromkeys(("scale_log2", "softmax_scale", "softcap", "prescale"), "fp32")
    sizes = ("seqlen_q", "seqlen_k", "batch", "num_heads_kv", "group_size", "left", "right", "heads_at_once")
    signature |= dict.fromkeys(sizes, "i32")
    constexprs = gradients.constants(problem, config)
    if gradients.adds_by_tma(problem, config):
        signature["dq_desc"] = f"tensordesc<fp32{gradients.dq_box(config)},{gradients.floats_layout()!r}>"
    else:
        constexprs["dq_desc"] = None
    for name, is_there in (
        ("turns_ptr", problem.deterministic),
        ("cu_seqlens_q_ptr", problem.varlen),
        ("cu_seqlens_k_ptr", problem.varlen),
    ):
        if is_there:
            signature[name] = "*i32"
        else:
            constexprs[name] = None
    return KernelBuild(
        name="attention_backward",
        backend="hopper",
        direction="backward",
        config=_about(problem, str(config)),
        kernel=attention_backward,
        signature={name: signature[name] for name in attention_backward.arg_names if name in signature},
        constexprs=constexprs,
        divisible=("dq_ptr",),
        options={"num_warps": 4, "maxnreg": config.max_registers},
        spill_limit=_SOFTCAP_SPILL_LIMIT if problem.softcap > 0 and config.block_d == 128 else _SPILL_LIMIT,
    )


def _prepare(problem: Problem) -> KernelBuild:
    from flashtile.backends.hopper.backward_rows import prepare_rows

    config, dtype = backward_tiles.choose(problem), f"*{_TYPES[problem.dtype]}"
    signature = {"out_ptr": dtype, "dout_ptr": dtype, "lse_ptr": "*fp32"}
    signature |= dict.fromkeys(("rows_ptr", "dq_ptr"), "*fp32") | {"counter_ptr": "*i32"}
    strides = _strides("q", "dout")
    divisible = [*signature, *strides]
    strides += ("dlse_stride_b", "dlse_stride_head", "dlse_stride_row")
    signature |= dict.fromkeys((*strides, "batch", "seqlen_q", "num_heads_q"), "i32")
    constexprs = _row_constants(problem, config) | {"dlse_ptr": None, "HAS_SOFTCAP": problem.softcap > 0}
    banded = not problem.band.unbounded
    if banded:
        signature["q_ptr"] = dtype
        divisible.append("q_ptr")
    else:
        constexprs["q_ptr"] = None
    pointers = {"turns_ptr": problem.deterministic, "flags_ptr": banded, "cu_seqlens_q_ptr": problem.varlen}
    _optional(signature, constexprs, pointers)
    return KernelBuild(
        name="prepare_rows",
        backend="hopper",
        direction="backward preprocess",
        config=_about(problem),
        kernel=prepare_rows,
        signature=signature,
        constexprs=constexprs,
        divisible=tuple(divisible),
        options={"num_warps": 8},
        spill_limit=0,
    )


def _finish(problem: Problem) -> KernelBuild:
    from flashtile.backends.hopper.backward_rows import finish_dq

    config = backward_tiles.choose(problem)
    signature = {"dq_ptr": "*fp32", "out_ptr": f"*{_TYPES[problem.dtype]}"}
    divisible = tuple(signature)
    signature |= dict.fromkeys(("batch", "seqlen_q", "num_heads_q"), "i32") | {"scale": "fp32"}
    constexprs = _row_constants(problem, config)
    _optional(signature, constexprs, {"flags_ptr": not problem.band.unbounded, "cu_seqlens_q_ptr": problem.varlen})
    return KernelBuild(
        name="finish_dq",
        backend="hopper",
        direction="backward postprocess",
        config=_about(problem),
        kernel=finish_dq,
        signature=signature,
        constexprs=constexprs,
        divisible=divisible,
        options={"num_warps": 4},
        spill_limit=0,
    )


def _mend(problem: Problem) -> KernelBuild:
    from flashtile.backends.hopper.backward_mend import mend_gradients

    config = backward_tiles.choose(problem)
    tensors = ("q_ptr", "k_ptr", "v_ptr", "dout_ptr", "dq_ptr", "dk_ptr", "dv_ptr")
    signature = dict.fromkeys(tensors, f"*{_TYPES[problem.dtype]}") | {"rows_ptr": "*fp32"}
    divisible = tuple(signature)
    signature["flags_ptr"] = "*i32"
    signature |= dict.fromkeys(("scale_log2", "softmax_scale", "softcap", "prescale"), "fp32")
    sizes = ("seqlen_q", "seqlen_k", "batch", "num_heads_kv", "group_size", "left", "right")
    signature |= dict.fromkeys((*_strides("q", "k", "v", "dout"), *sizes), "i32")
    constexprs: dict[str, object] = {
        "HEAD_DIM": problem.head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "HAS_LEFT": problem.band.left is not None,
        "HAS_RIGHT": problem.band.right is not None,
        "HAS_SOFTCAP": problem.softcap > 0,
        "VARLEN": problem.varlen,
    }
    _optional(signature, constexprs, dict.fromkeys(("cu_seqlens_q_ptr", "cu_seqlens_k_ptr"), problem.varlen))
    return KernelBuild(
        name="mend_gradients",
        backend="hopper",
        direction="backward postprocess",
        config=_about(problem, str(config)),
        kernel=mend_gradients,
        signature=signature,
        constexprs=constexprs,
        divisible=divisible,
        options={"num_warps": 8},
        spill_limit=0,
    )


def _strides(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}_stride_{of}" for name in names for of in ("b", "row", "head"))


def _row_constants(problem: Problem, config: backward_tiles.Config) -> dict[str, object]:
    return {
        "HEAD_DIM": problem.head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_D": config.block_d,
        "VARLEN": problem.varlen,
    }


def _optional(signature: dict[str, str], constexprs: dict[str, object], pointers: dict[str, bool]) -> None:
    """Pointers to int32 that a call may not have."""
    for name, is_there in pointers.items():
        if is_there:
            signature[name] = "*i32"
        else:
            constexprs[name] = None
