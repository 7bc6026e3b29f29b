"""The record that describes how to build one kernel ahead of a launch, on a machine that may have no GPU.

Each GPU backend has a module ``builds`` with one function, ``builds(arch: str) -> list[KernelBuild]``: every kernel of
the backend in the configurations checked on that architecture, each kernel's most common configuration first, and an
empty list for an architecture the backend does not run on. It imports the kernels, and with them Triton, when it is
called, never when its module is imported. ``report`` compiles the records and reports on the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flashtile.backends.gpu.launch import Launch, Specialisation, leaf_names, specialise
from flashtile.call.problem import Problem

# What to build for, and the most shared memory (AMD: LDS) of one block there; with more, kernels compile but fail to
# launch. NVIDIA: CUDA programming guide, "Compute Capabilities", shared memory per thread block; sm_86 and sm_121 have
# that of sm_89 and sm_120. AMD: CDNA 3 and CDNA 4 ISA, LDS.
# Triton builds sm_90a for capability 90: the "a" allows the instructions that only Hopper has (wgmma).
ARCHS = {
    "sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90a": 227 * 1024, "sm_100": 227 * 1024, "sm_120": 99 * 1024,
    "gfx942": 64 * 1024, "gfx950": 160 * 1024,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelBuild:
    """One kernel in one configuration: the arguments' types, the compile-time values, the compiler's options.

    Attributes:
        name: Its name in the report, e.g. ``"attention_forward"``; one name per kernel.
        backend: Folder name of the backend.
        direction: ``"forward"``, ``"backward"``, or another purpose, e.g. ``"backward preprocess"``.
        config: Values that identify this row among the kernel's, ready for JSON: dtype, head_dim, mask, tiles, warps.
        kernel: The ``@triton.jit`` or ``@gluon.jit`` function.
        signature: Type of each run-time leaf by name, ``"call.q.ptr"``, as Triton spells it: ``"*bf16"``, ``"i32"``,
            ``"fp32"``, ``"tensordesc<bf16[64, 128],NVMMASharedLayout(...)>"``.
        constexprs: Value of each constant leaf by name. None is a value too: an absent pointer. With ``signature`` it
            covers the leaves of the kernel's arguments, each once.
        divisible: Names of run-time leaves to compile as divisible by 16: pointers and strides. On AMD such a pointer
            is also compiled as reaching less than 2 GiB, which is so for most tensors.
        tree: As in ``Specialisation``; without it each argument is a leaf.
        options: Compiler options: ``num_warps``, ``num_stages``, ``maxnreg``, ``waves_per_eu``.
        spill_limit: Most bytes of registers a thread may spill, enforced by the tests; None for no limit.
    """

    name: str
    backend: str
    direction: str
    config: Mapping[str, object]
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible: tuple[str, ...] = ()
    tree: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    spill_limit: int | None = None

    @property
    def label(self) -> str:
        """Name and configuration in one line, e.g. ``portable/attention_forward dtype=bf16 head_dim=64``."""
        return " ".join([f"{self.backend}/{self.name}", *(f"{key}={value}" for key, value in self.config.items())])

    @property
    def what(self) -> Specialisation:
        """What it is compiled for; leaves in the order of the kernel's arguments, whatever theirs here is."""
        tree = dict(self.tree) or {name: name for name in self.kernel.arg_names}
        signature = {name: self.signature[name] for name in leaf_names(tree) if name in self.signature}
        return Specialisation(signature, dict(self.constexprs), self.divisible, tree)

    def constant(self, field: str) -> Any:
        """The constant in a field of the arguments, None if there is no such constant."""
        return constant_in(self.constexprs, field)


def constant_in(constexprs: Mapping[str, Any], field: str) -> Any:
    """The first constant in a field of this name, None if there is none."""
    found = (value for name, value in constexprs.items() if name.rpartition(".")[2] == field)
    return next(found, None)


def build_of(launch: Launch, **about: Any) -> KernelBuild:
    """The build of a launch; ``about``: fields that do not follow from it, of config only what the tiles are not."""
    what = specialise(launch)
    sides = (constant_in(what.constexprs, name) for name in ("BLOCK_M", "BLOCK_N", "STAGES"))
    tiles = "x".join(str(side) for side in sides if side is not None)
    about["config"] = {**about["config"], **({"tiles": tiles} if tiles else {}), **launch.options}
    return KernelBuild(
        kernel=launch.kernel, signature=what.signature, constexprs=what.constexprs, divisible=what.divisible,
        tree=what.tree, options=launch.options, **about,
    )  # fmt: skip


def kernel_builds(
    backend: str,
    direction: str,
    problem: Problem,
    launches: Mapping[str, Launch],
    spill_limits: Mapping[str, int] | None = None,
    more: tuple[str, ...] = (),
) -> list[KernelBuild]:
    """The builds of a problem's launches.

    Args:
        backend: Its name.
        direction: ``"forward"`` or ``"backward"``.
        problem: The call that is launched.
        launches: The launches by kernel name.
        spill_limits: By kernel name; None for no limits.
        more: Features of the launches that the problem does not name.
    """
    return [
        build_of(
            launch, name=name, backend=backend, direction=direction, config=traits(problem, more),
            spill_limit=(spill_limits or {}).get(name),
        )
        for name, launch in launches.items()
    ]  # fmt: skip


def traits(problem: Problem, more: tuple[str, ...] = ()) -> dict[str, object]:
    """Values that identify a problem's rows in the report: dtype, head dims, mask, features."""
    p = problem
    about: dict[str, object] = {
        "dtype": _SHORT[str(p.dtype).removeprefix("torch.")],
        "head_dim": p.head_dim,
        "mask": str(p.band),
    }
    if p.head_dim_v != p.head_dim:
        about["head_dim_v"] = p.head_dim_v
    if p.seqlen_k != p.seqlen_q:
        about["seqlen_k - seqlen_q"] = p.seqlen_k - p.seqlen_q
    used = {
        "softcap": p.softcap > 0,
        "alibi": p.alibi,
        "mask": p.mask,
        "tree": p.tree,
        "row intervals": p.row_keys,
        "key intervals": p.key_rows,
        "block lists": p.listed != () and not p.has_bits,
        "block lists with bits": p.has_bits,
        "bias": p.bias_dtype is not None,
        "score_mod": p.score_function is not None,
        "mask_mod": p.mask_function is not None,
        "sinks": p.sinks,
        "dropout": p.dropout_p > 0,
        "max_scores": p.max_scores,
        "varlen": p.varlen,
        "origins": p.origins,
        "deterministic": p.deterministic,
        "float32 out": p.out_dtype == torch.float32 != p.dtype,
        "float32 gradients": p.grad_dtype != p.dtype,
    }
    features = [*(name for name, is_used in used.items() if is_used), *more]
    wanted = [name for name, is_wanted in zip(("dq", "dk", "dv"), p.grads, strict=False) if is_wanted]
    if 0 < len(wanted) < 3:
        features.append(f"only {' and '.join(wanted)}")
    return about | ({"features": "+".join(features)} if features else {})


_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float8_e4m3fn": "e4m3"}
