"""The portable kernels in a fixed list of configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashtile.backends.gpu.described import described_quantized, described_tensors
from flashtile.backends.gpu.launch import Pointer
from flashtile.backends.portable import BACKEND
from flashtile.backends.portable import selected_backward as selected
from flashtile.call.arguments import FLOAT8
from flashtile.call.backend import Direction
from flashtile.call.problem import Problem, described, gpu_of
from flashtile.core.masks import Band
from flashtile_lab.kernels.build import ARCHS, KernelBuild, build_of, kernel_builds

_FULL, _CAUSAL, _WINDOW = Band(), Band(None, 0), Band(128, 0)
_WAYS: tuple[Direction, ...] = ("forward", "backward")
# By kernel, of rows that no descriptor can read, in bytes: see ``portable.config``.
_MOST_SPILLED = dict.fromkeys(("attention_forward", "attention_backward_dkdv", "attention_backward_dq"), 72)


def builds(arch: str) -> list[KernelBuild]:
    """Every kernel: both masks at the three usual head dims, then each feature once; bf16 unless said otherwise.

    sm_89 differs from sm_80 where numbers have 8 bits.
    """
    if arch not in ARCHS:
        return []
    from flashtile_lab.kernels import decode, quantizer

    capability = gpu_of(arch).capability
    rounding = quantizer.builds("portable", capability)
    if arch == "sm_89":
        return _quantized(arch) + rounding

    usual = [_problem(arch, dim, band) for dim in (128, 64, 256) for band in (_FULL, _CAUSAL)]
    others = [
        _problem(arch, 128, _CAUSAL, dtype=torch.float16),
        _problem(arch, 64, _CAUSAL, dtype=torch.float32),
        _problem(arch, 96, _WINDOW, head_dim_v=80),
        _problem(arch, 128, _CAUSAL, varlen=True, num_heads_q=32),
        _problem(arch, 64, _FULL, mask=True, bias_dtype=torch.bfloat16, bias_grad=True, sinks=True),
        _problem(arch, 64, _CAUSAL, softcap=30.0, alibi=True, dropout_p=0.1),
        _problem(arch, 128, _CAUSAL, max_scores=True),
        _problem(arch, 64, _CAUSAL, varlen=True, alibi=True, dropout_p=0.1, origins=True),
        _problem(arch, 128, Band(None, 0, 512), varlen=True),
        _problem(arch, 128, _CAUSAL, row_keys=True, key_rows=True, mirrored=True),
        _problem(arch, 64, _FULL, row_keys=True, key_rows=True, varlen=True),
        _problem(arch, 128, _FULL, listed=(128, 128)),
    ]
    others.append(_problem(arch, 512, _CAUSAL))
    short = _problem(arch, 256, _CAUSAL, seqlen_q=512, seqlen_k=512)
    small_bias = _problem(arch, 32, _FULL, bias_dtype=torch.bfloat16, bias_grad=True, seqlen_q=384, seqlen_k=384)
    made = [build for problem in usual + others for direction in _WAYS for build in builds_of(problem, direction)]
    made += builds_of(small_bias, "backward")[-1:]  # dq, which adds to dbias
    made += _second_builds(arch) + _adding_builds(arch) + selected_builds(arch)
    made += builds_of(short, "forward") + decode.builds("portable", capability)
    if arch == "sm_90a":  # rows that no descriptor can read
        for problem in (_problem(arch, dim, _CAUSAL) for dim in (90, 60, 124)):
            made += [build for way in _WAYS for build in builds_of(problem, way, _MOST_SPILLED)]
    made += rounding + _lists()
    return made + _quantized(arch) if (capability or (0, 0)) >= (8, 9) else made


def _lists() -> list[KernelBuild]:
    """The lists of chosen blocks: by VSA's sizes and by NSA's, with counts; and of more numbers than a tile has."""
    from flashtile.backends.portable.selected_lists import span_launches

    made = []
    for sizes, keys, dtype in (
        ((7, 1713, 64), 1713, torch.int32), ((4, 65536, 16), 1024, torch.int64), ((1, 2048, 2048), 2048, torch.int32)
    ):  # fmt: skip
        counts = Pointer(torch.int32, "counts") if dtype == torch.int64 else None
        _, (launches,) = span_launches(sizes, keys, Pointer(dtype, "indices"), counts)
        about = {"groups x rows x most": "x".join(map(str, sizes)), "keys": keys, "dtype": str(dtype)[6:]}
        made += [
            build_of(launch, name=name, backend="portable", direction="lists", config=about)
            for name, launch in launches.items()
        ]
    return made


def _quantized(arch: str) -> list[KernelBuild]:
    precision = {"dtype": FLOAT8, "out_dtype": torch.bfloat16, "needs_grad": False}
    problems = [_problem(arch, dim, band, **precision) for dim in (128, 64, 256) for band in (_FULL, _CAUSAL)]
    problems += [
        _problem(arch, 96, _WINDOW, head_dim_v=80, sinks=True, **precision),
        _problem(arch, 128, _CAUSAL, varlen=True, num_heads_q=32, **precision),
        _problem(arch, 64, _CAUSAL, softcap=30.0, **precision),
    ]
    return [build for problem in problems for build in builds_of(problem, "quantized")]


def _adding_builds(arch: str) -> list[KernelBuild]:
    """The backward of packed sequences to sums in float32."""
    from flashtile.backends.portable.backward import launch

    made = []
    for dim in (128, 64):
        problem = _problem(arch, dim, _CAUSAL, varlen=True).but(grad_dtype=torch.float32)
        tensors = described_tensors(problem)
        sums = launch.launches(problem, tensors, tensors.q, None, adds=True)
        del sums["prepare_rows"]
        made += kernel_builds("portable", "backward", problem, sums, more=("sums",))
    return made


def _second_builds(arch: str) -> list[KernelBuild]:
    """Second derivatives: with all directions, and with some of them beside other features."""
    from flashtile.backends.portable.second import launch

    some: dict[str, Any] = {"bias_dtype": torch.bfloat16, "mask": True, "sinks": True, "softcap": 30.0, "varlen": True}
    made = []
    for problem in (_problem(arch, 64, _CAUSAL), _problem(arch, 128, _FULL), _problem(arch, 64, _WINDOW, **some)):
        t = described_tensors(problem)
        of_k = None if problem.sinks else t.k
        given = {"dout": t.q, "dlse": None, "of_q": t.q, "of_k": of_k, "of_v": t.v, "of_bias": t.attn_bias}
        found = launch.launches(problem, t, {**given, "of_sinks": t.sinks})
        del found["prepare_rows"]  # the first backward's
        made += kernel_builds("portable", "backward", problem, found, more=("second derivatives",))
    return made


def selected_builds(arch: str) -> list[KernelBuild]:
    """The gradients over selected keys: of latent rows, of 8 heads, and of separate values; added up or by shares."""
    made = []
    for name, heads, dims in (("latent", 128, (576, 512)), ("few", 8, (576, 512)), ("separate", 32, (128, 128))):
        problem = _problem(arch, dims[0], _FULL, head_dim_v=dims[1], num_heads_q=heads, num_heads_kv=1)
        found = selected.described_launches(problem, is_part=name != "separate")
        made += kernel_builds("portable", "backward", problem, found, more=(f"selected keys, {heads} heads",))
    return made


def builds_of(
    problem: Problem, direction: Direction, spill_limits: Mapping[str, int] | None = None
) -> list[KernelBuild]:
    """The builds of a direction of one problem."""
    tensors = described_quantized(problem) if direction == "quantized" else described_tensors(problem)
    return kernel_builds("portable", direction, problem, BACKEND.launches(problem, tensors, direction), spill_limits)


def _problem(arch: str, head_dim: int, band: Band, **values: Any) -> Problem:
    usual: dict[str, Any] = {
        "device_type": "cuda",
        "compute_capability": gpu_of(arch).capability,
        "dtype": torch.bfloat16,
        "batch": 2,
        "seqlen_q": 1024,
        "seqlen_k": 1024,
        "num_heads_q": 8,
        "num_heads_kv": 8,
        "head_dim": head_dim,
        "head_dim_v": head_dim,
        "band": band,
        "softmax_scale": head_dim**-0.5,
        "needs_grad": True,
    }
    return described(**usual | values)
