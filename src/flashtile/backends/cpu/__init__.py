"""The CPU backend: blocks of scores through PyTorch's CPU flash kernel where possible, else matrix products.

A call is split into rectangles of the score matrix that contain kept pairs (``plan``). Each rectangle gives a partial
output and log-sum-exp (``flash`` or ``tiles``), which are merged. Memory stays linear in the lengths.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from flashtile.backends.cpu import backward, decode, forward, quantized
from flashtile.call.arguments import FLOAT8
from flashtile.call.backend import BIG_FUNCTIONS, Build, Capabilities, Direction, Given, Plan
from flashtile.call.problem import DTYPES, Problem, Tensors

# Features of every direction.
_COMMON = frozenset({"causal", "window", "grouped_heads", "varlen", "head_dim_v", "softcap", "sinks", "unaligned"})
_OF_REGULAR = {
    "alibi", "chunk", "mask", "bias", "bias_grad", "dropout", "origins", "deterministic", "intervals", "block_lists",
    "score_mod", "mask_mod", "operand_grad", "max_scores", "batch_invariant",
}  # fmt: skip
_CAPABILITIES = Capabilities(device_types=("cpu",), dtypes=DTYPES, max_head_dim=None, features=_COMMON | _OF_REGULAR)
_OF_DECODE = {
    "alibi", "chunk", "pages", "float8_cache", "tree_mask", "causal_each", "intervals", "score_mod", "mask_mod", "qv",
    "float8_rows", "max_scores", "batch_invariant",
}  # fmt: skip
_DECODE = dataclasses.replace(_CAPABILITIES, features=_COMMON | _OF_DECODE, limits=(BIG_FUNCTIONS,))
_QUANTIZED = dataclasses.replace(
    _CAPABILITIES, dtypes=(FLOAT8,), max_head_dim=256, head_dim_multiple=16, features=_COMMON
)


def _uncast(run: Callable[..., Any], *args: Any) -> Any:
    """Runs with autocast off: under autocast, matrix products of float32 would take another dtype."""
    if not torch._C._is_any_autocast_enabled():
        return run(*args)
    with torch._C._DisableAutocast():
        return run(*args)


class CpuBackend:
    """Attention on the CPU, with every feature in every dtype."""

    name = "cpu"
    summary = "any CPU"

    def capabilities(self, direction: Direction) -> Capabilities | None:
        """The capabilities. Both directions of regular calls have the same ones."""
        return {"decode": _DECODE, "quantized": _QUANTIZED}.get(direction, _CAPABILITIES)

    def missing(self) -> str | None:
        """None: PyTorch is enough."""
        return None

    def describe(self, problem: Problem, direction: Direction) -> str:
        """The path and its blocks."""
        paths = {"forward": forward, "backward": backward, "decode": decode, "quantized": quantized}
        return paths[direction].describe(problem)

    def plan(self, direction: Direction, problem: Problem, like: Any, given: Given = ()) -> Plan:
        """See ``Backend.plan``. All layouts have the same plan."""
        if direction == "decode":
            return functools.partial(_uncast, decode.decode, problem, decode.single(problem))
        paths: Any = {"forward": forward.forward, "backward": backward.backward, "quantized": quantized.quantized}
        return functools.partial(_uncast, paths[direction], problem)

    def builds(self, problem: Problem, tensors: Tensors, direction: Direction) -> list[Build]:
        """An empty list: PyTorch comes built."""
        return []


BACKEND = CpuBackend()
