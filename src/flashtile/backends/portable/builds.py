"""The portable kernels in the configurations worth watching, for builds without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.base import Gradients
from flashtile.backends.build import KernelBuild
from flashtile.backends.portable import tiles
from flashtile.masks import Band
from flashtile.problem import Problem, Tensors

_ARCHS = {"sm_80": "sm_80", "sm_90a": "sm_90", "sm_100": "sm_100", "gfx942": "gfx942"}
_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
_FULL, _CAUSAL, _WINDOW = Band(), Band(None, 0), Band(128, 0)


def builds(arch: str) -> list[KernelBuild]:
    """Every kernel: both masks at the three usual head dims, then each feature once; bf16 unless said otherwise."""
    if arch not in _ARCHS:
        return []
    usual = [_case(arch, dim, band) for dim in (128, 64, 256) for band in (_FULL, _CAUSAL)]
    others = [
        _case(arch, 128, _CAUSAL, dtype=torch.float16),
        _case(arch, 64, _CAUSAL, dtype=torch.float32),
        _case(arch, 96, _WINDOW, head_dim_v=80),
        _case(arch, 128, _CAUSAL, varlen=True, group=4),
        _case(arch, 64, _FULL, features=("mask", "bias", "sinks")),
        _case(arch, 64, _CAUSAL, features=("softcap", "alibi", "dropout")),
        _case(arch, 256, _CAUSAL, seqlen=512)[:1],
    ]
    return [build for case in usual + others for build in case]


def _case(
    arch: str,
    dim: int,
    band: Band,
    *,
    dtype: torch.dtype = torch.bfloat16,
    head_dim_v: int | None = None,
    varlen: bool = False,
    group: int = 1,
    features: tuple[str, ...] = (),
    seqlen: int = 1024,
) -> list[KernelBuild]:
    """All kernels of one problem, forward first. Tensors are on the meta device: only their types matter."""
    tensors, lse = _tensors(dim, head_dim_v or dim, dtype, varlen, group, features, seqlen)
    problem = Problem.build(
        tensors,
        band,
        softcap=30.0 if "softcap" in features else 0.0,
        dropout_p=0.1 if "dropout" in features else 0.0,
        needs_grad=True,
        bias_grad="bias" in features,
    )
    config = {"dtype": _TYPES[dtype], "head_dim": dim, "mask": str(band)}
    if problem.head_dim_v != dim:
        config["head_dim_v"] = problem.head_dim_v
    if varlen:
        config["packed"] = True
    if features:
        config["features"] = "+".join(features)
    return list(_kernels(arch, problem, tensors, lse, config))


def _tensors(
    dim: int, dim_v: int, dtype: torch.dtype, varlen: bool, group: int, features: tuple[str, ...], seqlen: int
) -> tuple[Tensors, Tensor]:
    batch, heads = 2, 8

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = (batch * seqlen,) if varlen else (batch, seqlen)
    bounds = empty(batch + 1, dtype=torch.int32) if varlen else None
    scores = (batch, heads, seqlen, seqlen)
    tensors = Tensors(
        q=empty(*rows, heads * group, dim),
        k=empty(*rows, heads, dim),
        v=empty(*rows, heads, dim_v),
        alibi_slopes=empty(heads, dtype=torch.float32) if "alibi" in features else None,
        attn_mask=empty(*scores, dtype=torch.bool) if "mask" in features else None,
        attn_bias=empty(1, *scores[1:]) if "bias" in features else None,
        sinks=empty(heads, dtype=torch.float32) if "sinks" in features else None,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        rng_state=empty(2, dtype=torch.int64) if "dropout" in features else None,
    )
    lse_shape = (heads * group, *rows) if varlen else (batch, heads * group, seqlen)
    return tensors, empty(*lse_shape, dtype=torch.float32)


def _kernels(
    arch: str, problem: Problem, tensors: Tensors, lse: Tensor, config: dict[str, Any]
) -> Iterator[KernelBuild]:
    from flashtile.backends.portable import forward, gradients

    def chosen(kernel: tiles.Kernel) -> tiles.Config:
        return tiles.choose(problem, kernel, _ARCHS[arch])

    out = torch.empty((*tensors.q.shape[:-1], problem.head_dim_v), dtype=problem.dtype, device="meta")
    grads = Gradients(*(torch.empty_like(t) for t in (tensors.q, tensors.k, tensors.v)))
    rows = gradients.row_workspace(lse)
    launch = forward.forward_launch(problem, tensors, out, lse, chosen("forward"))
    yield _build("attention_forward", "forward", launch, config | {"tiles": str(chosen("forward"))})
    launch = gradients.prepare_launch(problem, out, lse, out, None, *rows)
    yield _build("prepare_rows", "backward preprocess", launch, config)
    for name in tiles.key_kernels(problem, _ARCHS[arch]):
        results = None if name == "dv" else grads.dk, None if name == "dk" else grads.dv
        launch = gradients.dkdv_launch(problem, tensors, out, rows, *results, chosen(name))
        yield _build(f"attention_backward_{name}", "backward", launch, config | {"tiles": str(chosen(name))})
    launch = gradients.dq_launch(problem, tensors, out, rows, grads.dq, chosen("dq"))
    yield _build("attention_backward_dq", "backward", launch, config | {"tiles": str(chosen("dq"))})
    if tensors.attn_bias is not None:
        dbias = torch.empty_like(tensors.attn_bias)
        launch = gradients.dbias_launch(problem, tensors, out, rows, dbias, chosen("dbias"))
        yield _build("attention_backward_dbias", "backward", launch, config | {"tiles": str(chosen("dbias"))})


def _build(name: str, direction: str, launch: Any, config: dict[str, Any]) -> KernelBuild:
    """Types and values as a launch would find them: None and integers of 1 are values, multiples of 16 are marked."""
    signature, constexprs, divisible = {}, {}, []
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        plain = parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and not plain):
            constexprs[parameter.name] = value
        elif isinstance(value, Tensor):
            signature[parameter.name] = f"*{_TYPES[value.dtype]}"
            divisible.append(parameter.name)
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif isinstance(value, int):
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not plain:
                divisible.append(parameter.name)
        else:
            shape = ", ".join(map(str, value.block_shape))
            signature[parameter.name] = f"tensordesc<{_TYPES[value.base.dtype]}[{shape}]>"
    return KernelBuild(
        name=name,
        backend="portable",
        direction=direction,
        config=config,
        kernel=launch.kernel,
        signature=signature,
        constexprs=constexprs,
        divisible=tuple(divisible),
        options=launch.options,
    )
