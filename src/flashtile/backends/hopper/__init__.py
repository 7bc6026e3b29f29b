"""The Hopper backend: Gluon kernels with TMA, WGMMA, mbarriers and warp specialisation, for compute capability 9.0."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import torch

from flashtile.backends.gpu import build
from flashtile.backends.gpu.decode.config import as_cached, splits_keys
from flashtile.backends.gpu.launch import Launch
from flashtile.call.arguments import FLOAT8
from flashtile.call.backend import Build, Capabilities, Direction, Given, Plan
from flashtile.call.problem import Problem, Tensors

# What every direction has.
_COMMON = frozenset({"causal", "window", "grouped_heads", "varlen", "head_dim_v", "softcap", "sinks"})
_FUNCTIONS = {"score_mod", "mask_mod", "big_functions"}
_BUT_BIAS_GRAD = _COMMON | _FUNCTIONS | {"alibi", "chunk", "mask", "bias", "dropout", "deterministic"}
_INTERVALS = {"intervals", "row_intervals", "key_intervals", "block_lists"}
_FORWARD = Capabilities(
    device_types=("cuda",),
    dtypes=(torch.float16, torch.bfloat16),
    max_head_dim=512,
    head_dim_multiple=8,
    nvidia=True,
    slow_if_tiny=True,
    min_compute_capability=(9, 0),
    max_compute_capability=(9, 0),
    features=_BUT_BIAS_GRAD
    | _INTERVALS
    | {"bias_grad", "rare_dropout", "operand_grad", "head_intervals", "ordered_intervals"},
)
_BACKWARD = dataclasses.replace(_FORWARD, chain_rows=128, chain_head_dim=256, features=_BUT_BIAS_GRAD | _INTERVALS)
_DECODE = dataclasses.replace(
    _BACKWARD, max_head_dim=512, chain_rows=0, head_dim_multiple=1, slow_if_tiny=False,
    features=_COMMON
    | {"alibi", "chunk", "unaligned", "pages", "float8_cache", "float8_rows", "tree_mask", "causal_each", "qv"},
)  # fmt: skip
_QUANTIZED = dataclasses.replace(
    _FORWARD, max_head_dim=256, dtypes=(FLOAT8,), head_dim_multiple=16, slow_if_tiny=False, features=_COMMON
)


# In place of the direction, the folder's name where head_dim is past 256.
_BIG: dict[Direction, str] = {"forward": "big_heads", "backward": "big_backward"}


@functools.cache
def _plan(folder: str) -> Any:
    """Kept, since an import statement takes longer, also where it finds the module loaded."""
    return importlib.import_module(f"flashtile.backends.hopper.{folder}.launch").plan


def _folder(problem: Problem, direction: Direction) -> str:
    is_big = max(problem.head_dim, problem.head_dim_v) > 256
    return _BIG.get(direction, direction) if is_big else direction


class _Backend:
    name = "hopper"
    summary = "NVIDIA Hopper (compute capability 9.0)"

    def capabilities(self, direction: Direction) -> Capabilities | None:
        return {"forward": _FORWARD, "backward": _BACKWARD, "decode": _DECODE, "quantized": _QUANTIZED}.get(direction)

    def missing(self) -> str | None:
        return build.missing(gluon=True)

    def describe(self, problem: Problem, direction: Direction) -> str:
        is_split = direction == "forward" and splits_keys(problem)
        if direction == "decode" or is_split:
            from flashtile.backends.hopper.decode import config as cached_tiles

            return cached_tiles.describe(as_cached(problem) if is_split else problem)
        from flashtile.backends.hopper.backward import config as backward_tiles
        from flashtile.backends.hopper.big_backward import config as big_backward_tiles
        from flashtile.backends.hopper.big_heads import config as big_tiles
        from flashtile.backends.hopper.forward import config as tiles
        from flashtile.backends.hopper.quantized import config as quantized_tiles

        modules: dict[str, Any] = {
            "forward": tiles, "big_heads": big_tiles, "backward": backward_tiles, "big_backward": big_backward_tiles,
            "quantized": quantized_tiles,
        }  # fmt: skip
        choose = modules[_folder(problem, direction)].choose
        config = choose(tiles.by_bits(problem))
        return f"TMA and WGMMA, warp-specialised and persistent, {config}"

    def plan(self, direction: Direction, problem: Problem, like: Any, given: Given = ()) -> Plan:
        if problem.device_type == "cuda":
            build.expect_compiling()
        return _planned(direction, problem, like, given)

    def builds(self, problem: Problem, tensors: Tensors, direction: Direction) -> list[Build]:
        return build.builds(launches(problem, tensors, direction))


def launches(problem: Problem, tensors: Any, direction: Direction) -> dict[str, Launch]:
    """The kernels of a direction of a call, by name, in the order in which they run."""
    from flashtile.backends.gpu.plan import plan_launches

    return plan_launches(_planned, direction, problem, tensors)


def _planned(direction: Direction, problem: Problem, like: Any, given: Given) -> Plan:
    make = _plan(_folder(problem, direction))
    if direction == "forward" and splits_keys(problem):
        from flashtile.backends.gpu.decode.split_forward import SplitForwardPlan

        return SplitForwardPlan(problem, like, _plan("decode"), make)
    plan: Plan = make(problem, like, *given)
    return plan


BACKEND = _Backend()
