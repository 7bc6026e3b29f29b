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

from flashtile.backends.gpu.launch import Launch, specialise
from flashtile.call.problem import Problem


@dataclass(frozen=True)
class Arch:
    """A GPU architecture to build for.

    Attributes:
        backend: Triton's name for the compiler: ``"cuda"`` or ``"hip"``.
        capability: Triton's name for the chip.
        warp_size: Threads per warp.
        shared_bytes: Most shared memory (AMD: LDS) that one block can have; with more, kernels compile but fail to
            launch.
    """

    backend: str
    capability: int | str
    warp_size: int
    shared_bytes: int

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """``(major, minor)`` as problems have it, None for AMD."""
        return divmod(self.capability, 10) if isinstance(self.capability, int) else None


# NVIDIA: CUDA programming guide, "Compute Capabilities", shared memory per thread block; sm_86 and sm_121 have that of
# sm_89 and sm_120. AMD: CDNA 3 and CDNA 4 ISA, LDS.
# Triton builds sm_90a for capability 90: the "a" allows the instructions that only Hopper has (wgmma).
ARCHS: dict[str, Arch] = {
    "sm_80": Arch("cuda", 80, 32, 163 * 1024),
    "sm_89": Arch("cuda", 89, 32, 99 * 1024),
    "sm_90a": Arch("cuda", 90, 32, 227 * 1024),
    "sm_100": Arch("cuda", 100, 32, 227 * 1024),
    "sm_120": Arch("cuda", 120, 32, 99 * 1024),
    "gfx942": Arch("hip", "gfx942", 64, 64 * 1024),
    "gfx950": Arch("hip", "gfx950", 64, 160 * 1024),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelBuild:
    """One kernel in one configuration: the arguments' types, the compile-time values, the compiler's options.

    Attributes:
        name: Its name in the report, e.g. ``"attention_forward"``; one name per kernel.
        backend: Folder name of the backend.
        direction: ``"forward"``, ``"backward"``, or another purpose, e.g. ``"backward preprocess"``.
        config: Values that identify this row among the kernel's, ready for JSON: dtype, head_dim, mask, tiles, warps.
        kernel: The ``@triton.jit`` or ``@gluon.jit`` function.
        signature: Type of each run-time argument by name, as Triton spells it: ``"*bf16"``, ``"i32"``, ``"fp32"``,
            ``"tensordesc<bf16[64, 128],NVMMASharedLayout(...)>"``. A launch turns an integer of 1 into a compile-time
            value: to build that case, put the argument into ``constexprs`` instead.
        constexprs: Value of each compile-time argument by name. None is a value too: an absent pointer. With
            ``signature`` it covers the kernel's arguments, each once.
        divisible: Names of run-time arguments to compile as divisible by 16: pointers, strides, sizes. On AMD such a
            pointer is also compiled as reaching less than 2 GiB, which is so for most tensors.
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
    options: Mapping[str, object] = field(default_factory=dict)
    spill_limit: int | None = None

    @property
    def label(self) -> str:
        """Name and configuration in one line, e.g. ``portable/attention_forward dtype=bf16 head_dim=64``."""
        return " ".join([f"{self.backend}/{self.name}", *(f"{key}={value}" for key, value in self.config.items())])


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
    made = []
    for name, launch in launches.items():
        what = specialise(launch)
        tiles = {key: value for key, value in launch.arguments.items() if key in ("BLOCK_M", "BLOCK_N", "STAGES")}
        made.append(
            KernelBuild(
                name=name,
                backend=backend,
                direction=direction,
                config=traits(problem, more) | {"tiles": "x".join(map(str, tiles.values())), **launch.options},
                kernel=launch.kernel,
                signature=what.signature,
                constexprs=what.constexprs,
                divisible=what.divisible,
                options=launch.options,
                spill_limit=(spill_limits or {}).get(name),
            )
        )
    return made


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
        "bias": p.bias_dtype is not None,
        "sinks": p.sinks,
        "dropout": p.dropout_p > 0,
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
