"""The portable backend: Triton kernels for every GPU that Triton reaches, and for its interpreter on a CPU."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu import build
from flashtile.backends.gpu.decode import config as decode
from flashtile.backends.gpu.launch import Launch
from flashtile.backends.portable.backward import config as backward
from flashtile.backends.portable.forward import config as forward
from flashtile.backends.portable.quantized import config as quantized
from flashtile.call.arguments import FLOAT8
from flashtile.call.backend import Build, Capabilities, Direction, Given, Gradients, Plan
from flashtile.call.problem import Problem, Tensors
from flashtile.core import settings
from flashtile.core.states import Partial

# What every direction has.
_COMMON = frozenset({"causal", "window", "grouped_heads", "varlen", "head_dim_v", "softcap", "sinks", "unaligned"})
_OF_REGULAR = {
    "alibi", "chunk", "mask", "bias", "bias_grad", "dropout", "rare_dropout", "origins", "deterministic", "intervals",
    "row_intervals", "key_intervals", "head_intervals", "ordered_intervals", "block_lists", "fine_block_lists",
    "big_block_lists", "score_mod", "mask_mod", "big_functions", "operand_grad",
}  # fmt: skip
_CAPABILITIES = Capabilities(
    device_types=("cuda",),
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    max_head_dim=512,
    min_compute_capability=(8, 0),
    features=_COMMON | _OF_REGULAR,
)
_OF_DECODE = {
    "alibi", "chunk", "pages", "float8_cache", "tree_mask", "causal_each", "intervals", "row_intervals",
    "key_intervals", "head_intervals", "score_mod", "mask_mod", "qv", "float8_rows",
}  # fmt: skip
_DECODE = dataclasses.replace(_CAPABILITIES, features=_COMMON | _OF_DECODE)
# Products of e4m3 numbers.
_QUANTIZED = dataclasses.replace(
    _CAPABILITIES,
    max_head_dim=256,
    dtypes=(FLOAT8,),
    head_dim_multiple=16,
    min_compute_capability=(8, 9),
    nvidia=True,
    features=_COMMON,
)


# Direction -> the package whose launch module has ``plan``.
_PLANS: dict[Direction, str] = {
    "forward": "portable.forward", "backward": "portable.backward", "decode": "gpu.decode",
    "quantized": "portable.quantized",
}  # fmt: skip


class PortableBackend:
    """Triton kernels; see ``Backend`` for the methods."""

    name = "portable"
    summary = "NVIDIA GPUs from sm_80, AMD gfx942 and gfx950 (Triton)"

    def capabilities(self, direction: Direction) -> Capabilities | None:
        """The same in both directions of regular calls; CPU tensors too where Triton's interpreter is on."""
        able = {"decode": _DECODE, "quantized": _QUANTIZED}.get(direction, _CAPABILITIES)
        if not settings.TRITON_INTERPRET.enabled():
            return able
        able = dataclasses.replace(able, device_types=("cuda", "cpu"))
        # The interpreter multiplies bfloat16 numbers as integers; a cache cannot be widened.
        return able if direction != "decode" else dataclasses.replace(able, dtypes=(torch.float16, torch.float32))

    def missing(self) -> str | None:
        """Triton, where it is not installed."""
        return build.missing()

    def describe(self, problem: Problem, direction: Direction) -> str:
        """The tiles of the direction's kernels."""
        is_split = direction == "forward" and decode.splits_keys(problem)
        if direction == "decode" or is_split:
            tiles = decode.choose(decode.as_cached(problem) if is_split else problem)
            return f"Triton, tiles {tiles}; splits merged in the same launch"
        if direction in ("forward", "quantized"):
            return f"Triton, tiles {(forward if direction == 'forward' else quantized).choose(problem)}"
        grads = problem.grads
        kernels: list[backward.Kernel] = list(backward.key_kernels(problem)) if grads.k or grads.v else []
        if grads.q:
            kernels.append("dq")
        if grads.bias or any(grads.operands):
            kernels.append("dbias")
        parts = [f"{'dk and dv' if name == 'dkdv' else name} {backward.choose(problem, name)}" for name in kernels]
        atomics = "atomic adds to dbias of up to 24 MB, with dq" if backward.may_add_bias(problem) else "no atomics"
        return f"Triton, tiles {'; '.join(parts)}; {atomics}"

    def plan(self, direction: Direction, problem: Problem, like: Any, given: Given = ()) -> Plan:
        """See ``Backend.plan``.

        A forward is one kernel; a cached call one that appends, if there are new keys, and one that attends; a backward
        row sums, then one kernel for dk with dv (or one each) and one for dq with dbias (or one each), as needed.
        """
        if problem.device_type == "cuda":
            build.expect_compiling()
        if direction == "decode" or not _needs_widening(problem):
            return _planned(direction, problem, like, given)
        if direction == "quantized":
            return _widened_forward(problem, _planned(direction, problem.but(out_dtype=torch.float32), like, ()))
        plan = _planned(direction, problem.but(dtype=torch.float32), like, given)
        return (_widened_forward if direction == "forward" else _widened_backward)(problem, plan)

    def builds(self, problem: Problem, tensors: Tensors, direction: Direction) -> list[Build]:
        """The builds of the direction's launches."""
        return build.builds(launches(problem, tensors, direction))


def launches(problem: Problem, tensors: Any, direction: Direction) -> dict[str, Launch]:
    """The kernels of a direction of a call, by name, in the order in which they run."""
    from flashtile.backends.gpu.plan import plan_launches

    return plan_launches(_planned, direction, problem, tensors)


def _planned(direction: Direction, problem: Problem, like: Any, given: Given) -> Plan:
    make = importlib.import_module(f"flashtile.backends.{_PLANS[direction]}.launch").plan
    if direction == "forward" and decode.splits_keys(problem):
        from flashtile.backends.gpu.decode.launch import plan
        from flashtile.backends.gpu.decode.split_forward import SplitForwardPlan

        return SplitForwardPlan(problem, like, plan, make)
    made: Plan = make(problem, like, *given)
    return made


def _needs_widening(problem: Problem) -> bool:
    # Triton's interpreter stores bfloat16 as integers and multiplies those integers; it has no NaN of 8 bits, and cuts
    # digits off where numbers lose some.
    return problem.device_type == "cpu" and problem.dtype in (torch.bfloat16, FLOAT8)


def _widened_forward(problem: Problem, plan: Plan) -> Plan:
    def widened(tensors: Any, partial: Partial | None = None, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        # Not into a narrower tensor, to which whoever gave it copies what is returned.
        out, lse = plan(_widened(tensors), *(() if partial is None else (partial,)))
        return out.to(problem.out_dtype), lse

    return widened


def _widened_backward(problem: Problem, plan: Plan) -> Plan:
    def widened(
        tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, sums: Gradients | None = None
    ) -> Gradients:
        grads = plan(_widened(tensors), out.float(), lse, dout.float(), dlse, sums)
        made = {n: x for n, x in vars(grads).items() if n in ("dq", "dk", "dv") and x is not None}
        return dataclasses.replace(grads, **{n: x.to(problem.grad_dtype) for n, x in made.items()})

    return widened


def _widened(tensors: Any) -> Any:
    wide = {name: getattr(tensors, name).float() for name in ("q", "k", "v")}
    return dataclasses.replace(tensors, **wide)


BACKEND = PortableBackend()
