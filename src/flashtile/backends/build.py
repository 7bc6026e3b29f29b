"""What it takes to build one kernel ahead of a launch, on a machine that may have no GPU.

Each GPU backend has a module ``builds`` with one function, ``builds(arch: str) -> list[KernelBuild]``: every kernel of
the backend in every configuration worth watching on that architecture, the most usual configuration of a kernel first,
and an empty list for an architecture the backend does not run on. It imports the kernels, and with them Triton, when it
is called, never when its module is imported. ``flashtile.builds`` compiles the records and reports on the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Arch:
    """A GPU architecture to build for.

    Attributes:
        backend: Triton's name for the compiler: ``"cuda"`` or ``"hip"``.
        capability: Triton's name for the chip.
        warp_size: Threads a warp.
        shared_bytes: Most shared memory (AMD: LDS) that one block can have; more compiles, and fails at the launch.
    """

    backend: str
    capability: int | str
    warp_size: int
    shared_bytes: int


# NVIDIA: CUDA programming guide, "Compute Capabilities", shared memory per thread block. AMD: CDNA 3 ISA, LDS.
# Triton builds sm_90a for capability 90: the "a" says that the instructions of Hopper alone (wgmma) may be in use.
ARCHS: dict[str, Arch] = {
    "sm_80": Arch("cuda", 80, 32, 163 * 1024),
    "sm_90a": Arch("cuda", 90, 32, 227 * 1024),
    "sm_100": Arch("cuda", 100, 32, 227 * 1024),
    "gfx942": Arch("hip", "gfx942", 64, 64 * 1024),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelBuild:
    """One kernel in one configuration: the arguments' types, the compile-time values, the compiler's options.

    Attributes:
        name: What the report calls the kernel, e.g. ``"attention_forward"``; one name a kernel.
        backend: Folder name of the backend.
        direction: ``"forward"``, ``"backward"``, or what else the kernel is for, e.g. ``"backward preprocess"``.
        config: What tells this row from the kernel's other rows, ready for JSON: dtype, head_dim, mask, tiles, warps.
        kernel: The ``@triton.jit`` or ``@gluon.jit`` function.
        signature: Type of each run-time argument by name, as Triton spells it: ``"*bf16"``, ``"i32"``, ``"fp32"``,
            ``"tensordesc<bf16[64, 128],NVMMASharedLayout(...)>"``. A launch turns an integer of 1 into a compile-time
            value: to build that case, put the argument into ``constexprs`` instead.
        constexprs: Value of each compile-time argument by name. None is a value too: a pointer that a call does not
            have. With ``signature`` it covers the kernel's arguments, each once.
        divisible: Names of run-time arguments that a launch would find divisible by 16: pointers, strides, sizes.
            On AMD such a pointer is taken to reach less than 2 GiB too, as a launch would find for most tensors.
        options: Compiler options: ``num_warps``, ``num_stages``, ``maxnreg``, ``waves_per_eu``.
        spill_limit: Most bytes of registers a thread may spill, a promise that the tests hold; None promises nothing.
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
