"""The portable backend's kernels, in the order in which they are asked, and what they compute together."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from flashtile.backends.gpu.table import (
    INVARIANT_SCALES,
    INVARIANT_SCORES,
    ODD_FLOAT8_CACHE,
    SPLIT_FORWARD,
    CachedKernel,
    GpuBackend,
    Kernel,
    module,
)
from flashtile.call.arguments import FLOAT8
from flashtile.call.backend import BIG_FUNCTIONS, Capabilities, Direction, Given, Limit, Plan
from flashtile.call.problem import Problem
from flashtile.core import settings


class _Backward(Kernel):
    """Row sums, then one kernel for dk with dv, or one each, and one for dq with dbias, or one each, as needed."""

    def describe(self, table: GpuBackend, problem: Problem) -> str:
        """The tiles of each kernel."""
        config, grads = module("portable.backward.config"), problem.grads
        kernels = list(config.key_kernels(problem)) if grads.k or grads.v else []
        if grads.q:
            kernels.append("dq")
        if grads.bias or any(grads.operands):
            kernels.append("dbias")
        tiles = ((name, config.choose(problem, name)) for name in kernels)
        parts = "; ".join(f"{'dk and dv' if name == 'dkdv' else name} {each}" for name, each in tiles)
        atomics = "atomic adds to dbias of up to 24 MB, with dq" if config.may_add_bias(problem) else "no atomics"
        return f"{self.text.format(parts)}; {atomics}"


_TILES = "Triton, tiles {}"
KERNELS = (
    SPLIT_FORWARD,
    Kernel("forward", "forward", "portable.forward", _TILES),
    _Backward("backward", "backward", "portable.backward", _TILES),
    CachedKernel("decode", "decode", "gpu.decode", f"{_TILES}; splits merged in the same launch"),
    Kernel("quantized", "quantized", "portable.quantized", _TILES),
)

# What every direction has.
_COMMON = frozenset({"causal", "window", "grouped_heads", "varlen", "head_dim_v", "softcap", "sinks", "unaligned"})
_OF_REGULAR = {
    "alibi", "chunk", "mask", "bias", "bias_grad", "dropout", "origins", "deterministic", "intervals", "block_lists",
    "score_mod", "mask_mod", "operand_grad", "max_scores", "batch_invariant",
}  # fmt: skip
_OF_DECODE = {
    "alibi", "chunk", "pages", "float8_cache", "tree_mask", "causal_each", "intervals", "score_mod", "mask_mod", "qv",
    "float8_rows", "max_scores", "batch_invariant",
}  # fmt: skip
_REGULAR = Capabilities(
    device_types=("cuda",),
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    max_head_dim=512,
    min_compute_capability=(8, 0),
    always_invariant=True,
    features=_COMMON | _OF_REGULAR,
    limits=(
        Limit("block lists of blocks that are no multiples of 16", lambda p: any(n % 16 for n in p.listed[:2])),
        INVARIANT_SCORES,
    ),
)  # fmt: skip
ABLE: dict[Direction, Capabilities] = {
    "forward": _REGULAR,
    "backward": _REGULAR,
    "decode": dataclasses.replace(
        _REGULAR, features=_COMMON | _OF_DECODE,
        limits=(BIG_FUNCTIONS, ODD_FLOAT8_CACHE, INVARIANT_SCALES, INVARIANT_SCORES),
    ),
    # Products of e4m3 numbers.
    "quantized": dataclasses.replace(
        _REGULAR, max_head_dim=256, dtypes=(FLOAT8,), head_dim_multiple=16, min_compute_capability=(8, 9),
        nvidia=True, features=_COMMON, limits=(),
    ),
}  # fmt: skip


def needs_widening(problem: Problem) -> bool:
    """Whether Triton's interpreter computes a call, and cannot multiply its numbers: see ``widened``."""
    return problem.device_type == "cpu" and problem.dtype in (torch.bfloat16, FLOAT8)


class _Portable(GpuBackend):
    """Triton kernels for GPUs, and on a CPU where Triton's interpreter is on."""

    def capabilities(self, direction: Direction) -> Capabilities | None:
        able = super().capabilities(direction)
        if able is None or not settings.TRITON_INTERPRET.enabled():
            return able
        able = dataclasses.replace(able, device_types=("cuda", "cpu"))
        # The interpreter multiplies bfloat16 numbers as integers; a cache cannot be widened.
        return able if direction != "decode" else dataclasses.replace(able, dtypes=(torch.float16, torch.float32))

    def plan(self, direction: Direction, problem: Problem, like: Any, given: Given = ()) -> Plan:
        if direction != "decode" and needs_widening(problem):
            made: Plan = module("portable.widened").plan(self, direction, problem, like, given)
            return made
        return super().plan(direction, problem, like, given)


BACKEND = _Portable(
    name="portable", summary="NVIDIA GPUs from sm_80, AMD gfx942 and gfx950 (Triton)", able=ABLE, kernels=KERNELS,
)  # fmt: skip
