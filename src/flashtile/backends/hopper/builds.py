"""The Hopper kernels in the configurations worth watching, for builds without a GPU."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.backends.build import KernelBuild
from flashtile.backends.hopper import tiles
from flashtile.masks import Band
from flashtile.problem import Problem

_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_FULL, _CAUSAL, _WINDOW = Band(), Band(None, 0), Band(128, 0)


def builds(arch: str) -> list[KernelBuild]:
    """The forward: both masks at the usual head dims, long and short, then each feature; bf16 if not said.

    Packed sequences under a causal mask attend to themselves. Of two lengths that differ by one, edges of the mask lie
    anywhere.
    Of the tiles that consist of parts, those of the head dims in use.
    """
    if arch != "sm_90a":
        return []
    usual = [_problem(dim, band) for dim in (128, 64, 256) for band in (_FULL, _CAUSAL)]
    usual += [_problem(dim, band, seqlen=512) for dim in (128, 64) for band in (_FULL, _CAUSAL)]
    in_parts = [
        _problem(dim, band, dim_v=dim_v)
        for dim, dim_v in ((96, 96), (192, 192), (192, 128))
        for band in (_FULL, _CAUSAL)
    ]
    others = [
        _problem(dim, band, **features)
        for dim in (64, 128, 256)
        for band, features in (
            (_CAUSAL, {"dtype": torch.float16}),
            (_CAUSAL, {"more_keys": 1}),
            (_WINDOW, {}),
            (_CAUSAL, {"varlen": True}),
            (_FULL, {"varlen": True}),
            (_WINDOW, {"varlen": True, "softcap": 30.0, "sinks": True}),
        )
    ]
    others += [
        _problem(dim, _WINDOW, dim_v=dim_v, varlen=True, softcap=30.0, sinks=True)
        for dim, dim_v in ((96, 96), (192, 192), (192, 128), (160, 160), (128, 256))
    ]
    return [_forward(problem) for problem in usual + in_parts + others] + _backward(usual)


def _backward(usual: list[Problem]) -> list[KernelBuild]:
    """The main kernel on the usual problems, then each feature, then the kernels for rows."""
    from flashtile.backends.hopper import backward_builds, backward_tiles

    others = [
        _problem(dim, band, **features)
        for dim in (128, 64, 256)
        for band, features in (
            (_CAUSAL, {"dtype": torch.float16}),
            (_WINDOW, {}),
            (_CAUSAL, {"varlen": True, "deterministic": True}),
            (_WINDOW, {"varlen": True, "softcap": 30.0}),
        )
    ]
    sweeps = [backward_builds.sweep(problem, backward_tiles.choose(problem)) for problem in usual + others]
    rows = [
        _problem(dim, band, **features)
        for dim in (128, 64, 256)
        for band, features in (
            (_FULL, {}),
            (_FULL, {"varlen": True}),
            (_CAUSAL, {}),
            (_WINDOW, {"varlen": True, "softcap": 30.0}),
        )
    ]
    return sweeps + [build for problem in rows for build in backward_builds.builds(problem)[1:]]


def _problem(
    dim: int, band: Band, seqlen: int = 8192, dim_v: int | None = None, more_keys: int = 0, **features: Any
) -> Problem:
    return Problem(
        device_type="cuda",
        compute_capability=(9, 0),
        dtype=features.pop("dtype", torch.bfloat16),
        batch=2,
        seqlen_q=seqlen,
        seqlen_k=seqlen + more_keys,
        num_heads_q=8,
        num_heads_kv=8,
        head_dim=dim,
        head_dim_v=dim_v or dim,
        band=band,
        softmax_scale=dim**-0.5,
        **features,
    )


def _forward(problem: Problem, config: tiles.Config | None = None) -> KernelBuild:
    """Types and values as a launch would find them."""
    from triton.experimental.gluon import language as gl

    from flashtile.backends.hopper import launch
    from flashtile.backends.hopper.forward import attention_forward

    config = config or tiles.choose(problem)
    dtype = _TYPES[problem.dtype]

    def descriptor(box: list[int]) -> str:
        layout = gl.NVMMASharedLayout.get_default_for(box, {"fp16": gl.float16, "bf16": gl.bfloat16}[dtype])
        return f"tensordesc<{dtype}{box},{layout!r}>"

    names = ("q_desc", "k_desc", "v_desc", "out_desc")
    boxes = launch.boxes(config, problem.varlen)
    signature = {name: descriptor(box) for name, box in zip(names, boxes, strict=True)} | {"lse_ptr": "*fp32"}
    signature |= dict.fromkeys(("scale_log2", "softcap", "prescale"), "fp32")
    sizes = ("seqlen_q", "seqlen_k", "batch", "num_heads_q", "group_size", "left", "right")
    signature |= dict.fromkeys(sizes, "i32")
    constexprs = launch.constants(problem, config, equal_lengths=problem.varlen)
    banded = f"*{dtype}" if problem.band.left is not None or problem.band.right is not None else None
    optional = {
        "q_ptr": banded,
        "k_ptr": banded,
        "v_ptr": banded,
        "out_ptr": banded,
        "sinks_ptr": f"*{dtype}" if problem.sinks else None,
        "cu_seqlens_q_ptr": "*i32" if problem.varlen else None,
        "cu_seqlens_k_ptr": "*i32" if problem.varlen else None,
        "counter_ptr": "*i32" if config.dynamic else None,
    }
    for name, kind in optional.items():
        if kind is None:
            constexprs[name] = None
        else:
            signature[name] = kind
    features = [name for name in ("softcap", "sinks", "varlen") if getattr(problem, name)]
    about: dict[str, object] = {"dtype": dtype, "head_dim": problem.head_dim, "mask": str(problem.band)}
    if problem.head_dim_v != problem.head_dim:
        about["head_dim_v"] = problem.head_dim_v
    if problem.seqlen_k != problem.seqlen_q:
        about["seqlen_k - seqlen_q"] = problem.seqlen_k - problem.seqlen_q
    if features:
        about["features"] = "+".join(features)
    return KernelBuild(
        name="attention_forward",
        backend="hopper",
        direction="forward",
        config=about | {"tiles": str(config)},
        kernel=attention_forward,
        signature={name: signature[name] for name in attention_forward.arg_names if name in signature},
        constexprs=constexprs,
        options={"num_warps": 4, "maxnreg": config.max_registers},
        spill_limit=_spill_limit(),
    )


def _spill_limit() -> int:
    """No spill; Triton 3.9 makes 32 to 64 bytes of it where a window meets every feature (measured 2026-11-20)."""
    import triton

    return 64 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 0
