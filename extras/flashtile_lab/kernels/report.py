"""Builds every GPU kernel for an architecture, without a GPU, and reports on the compiler's output.

``build`` defines a build, a module for each backend lists its own, and this module compiles them in parallel processes
(threads would not work: Triton's passes and LLVM keep global state).
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from flashtile.backends.gpu import build as loading
from flashtile.backends.gpu import launch
from flashtile.call.problem import gpu_of
from flashtile.core.errors import InvalidInputError, UnsupportedError
from flashtile.ops import dispatch
from flashtile_lab.kernels.build import ARCHS, KernelBuild

# The instructions counted, by their names in the report: a pattern for the mnemonic, matched from its start.
PTX_INSTRUCTIONS: Mapping[str, str] = {
    "mma": r"mma\.sync",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05.mma": r"tcgen05\.mma",
    "tcgen05.ld": r"tcgen05\.ld",
    "tcgen05.st": r"tcgen05\.st",
    "ldmatrix": r"ldmatrix",
    "stmatrix": r"stmatrix",
    "tma_load": r"cp\.async\.bulk\.(?:tensor\.\dd\.|prefetch\.)?shared",
    "tma_store": r"cp\.async\.bulk\.(?:tensor\.\dd\.)?global",
    "tma_reduce": r"cp\.reduce\.async\.bulk",
    "cp.async": r"cp\.async\.c[ag]",
    "cp.async.wait": r"cp\.async\.wait",
    "ld.global": r"ld\.global",
    "st.global": r"st\.global",
    "atomic": r"(?:atom|red)\.(?:\w+\.)*global",
    "bar": r"(?:bar|barrier)(?:\.cta)?\.(?:sync|arrive)",
    "mbarrier.wait": r"mbarrier\.(?:try|test)_wait",
    "mbarrier.arrive": r"mbarrier\.arrive",
    "setmaxnreg": r"setmaxnreg",
}
AMDGCN_INSTRUCTIONS: Mapping[str, str] = {
    "mfma": r"v_mfma",
    "buffer_load": r"buffer_load",
    "buffer_store": r"buffer_store",
    "global_load": r"global_load",
    "global_store": r"global_store",
    "ds_read": r"ds_(?:read|load)",
    "ds_write": r"ds_(?:write|store)",
    "atomic": r"(?:buffer|global|flat)_atomic",
    "s_barrier": r"s_barrier",
}


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """One kernel in one configuration, compiled."""

    name: str
    backend: str
    direction: str  # "forward", "backward", or another purpose
    arch: str  # a key of ``ARCHS``
    triton: str  # version of the Triton that compiled it
    config: dict[str, object]  # values that identify it among the kernel's rows
    registers: int  # of 32 bits, a thread at launch; on AMD vector and accumulation registers together
    spill_bytes: int  # local (AMD: private) memory of a thread, where registers spill to
    shared_bytes: int  # shared memory (AMD: LDS) of a block, dynamic and static
    # How often each kind occurs in the text (PTX, AMD assembly), zeros omitted; a loop's body counts once.
    instructions: dict[str, int] = field(default_factory=dict)
    spill_limit: int | None = None  # the most spill_bytes that the backend allows
    unknown_launch: str | None = None  # why ``gpu.host`` would launch it through Triton on an NVIDIA GPU, if so

    @property
    def problems(self) -> list[str]:
        """Faults of a kernel that did compile: it could not be launched, or it spills more than allowed."""
        wrong = []
        if self.shared_bytes > (limit := ARCHS[self.arch]):
            wrong.append(f"needs {self.shared_bytes} bytes of shared memory, {self.arch} has {limit}")
        if self.spill_limit is not None and self.spill_bytes > self.spill_limit:
            wrong.append(f"spills {self.spill_bytes} bytes, at most {self.spill_limit} are promised")
        if self.unknown_launch is not None:
            wrong.append(f"cannot be launched past Triton: {self.unknown_launch}")
        return wrong


@dataclass(frozen=True)
class Job:
    """One build by its list index, because a kernel itself cannot be sent to another process."""

    module: str  # that has ``builds``
    arch: str  # a key of ``ARCHS``
    index: int  # in the list that ``builds(arch)`` returns
    label: str  # the kernel and its configuration, for messages


@dataclass(frozen=True)
class Outcome:
    """The result of a job."""

    job: Job
    report: KernelReport | None  # None if the kernel did not compile
    error: str | None = None  # the compiler's message if it did not

    @property
    def problems(self) -> list[str]:
        """Faults of the kernel, empty if there are none."""
        if self.report is None:
            return [f"does not build: {self.error}"]
        return self.report.problems


def jobs(arch: str, backend: str | None = None, *, quick: bool = False) -> list[Job]:
    """The builds for an architecture, in the order of the backends' table.

    Args:
        arch: A key of ``ARCHS``.
        backend: One backend alone; None for all that have kernels for the architecture.
        quick: The first configuration of each kernel; of one in Gluon, whose names differ between Triton's releases, as
            few as have every mask and feature among them.

    Raises:
        InvalidInputError: If there is no such architecture or no such backend.
        UnsupportedError: If Triton is not installed, or no selected backend has kernels for the architecture.
    """
    if arch not in ARCHS:
        raise InvalidInputError("arch", f"is {arch!r}, must be one of {', '.join(ARCHS)}")
    if backend is not None and backend not in dispatch.NAMES:
        raise InvalidInputError("backend", f"is {backend!r}, must be one of {', '.join(dispatch.NAMES)}")
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedError("building kernels needs Triton, which is not installed: pip install triton")
    found: list[Job] = []
    for name in dispatch.NAMES if backend is None else (backend,):
        module = f"flashtile_lab.kernels.{name}"
        if importlib.util.find_spec(module) is not None:
            found += jobs_of(module, arch, quick=quick)
    if not found:
        raise UnsupportedError(f"{backend or 'no backend'} has {'no ' if backend else ''}GPU kernels for {arch}")
    return found


def jobs_of(module: str, arch: str, *, quick: bool = False) -> list[Job]:
    """The builds that one ``builds`` module lists for an architecture.

    Args:
        module: Its dotted name.
        arch: A key of ``ARCHS``.
        quick: The first configuration of each kernel; of one in Gluon, whose names differ between Triton's releases, as
            few as have every mask and feature among them.
    """
    found: list[Job] = []
    seen: set[object] = set()
    for index, build in enumerate(_builds(module, arch)):
        traits = _traits(build)
        if quick and traits <= seen:
            continue
        seen |= traits
        found.append(Job(module, arch, index, build.label))
    return found


def _traits(build: KernelBuild) -> set[object]:
    """The properties of a build that one Triton release may support and another may not."""
    kind = (build.name, build.direction)
    if not build.kernel.is_gluon():
        return {kind}
    mask = str(build.config.get("mask", "")).partition("(")[0]
    features = str(build.config.get("features", "")).split("+")
    return {(kind, trait) for trait in (mask, *features)}


def run(todo: Sequence[Job], workers: int | None = None) -> Iterator[Outcome]:
    """Compiles in parallel and yields each result as it is ready.

    Args:
        todo: From ``jobs``.
        workers: Processes; by default one per CPU core. More than one needs a caller whose ``__main__`` can be imported
            without starting anything, as ``multiprocessing`` always requires.
    """
    workers = min(workers or os.cpu_count() or 1, len(todo))
    if workers <= 1:
        yield from map(_run_job, todo)
        return
    # Each worker is forked from a process that has already imported Triton and has not started a thread.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flashtile_lab.kernels.report", "triton"])
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for done in as_completed([pool.submit(_run_job, job) for job in todo]):
            yield done.result()


def compile_build(build: KernelBuild, arch: str) -> KernelReport:
    """Compiles one kernel for an architecture and reports on the result. Needs Triton, and no GPU.

    Args:
        build: The kernel and its configuration.
        arch: A key of ``ARCHS``.

    Raises:
        ValueError: If the build does not name each of the kernel's arguments once.
        Exception: Whatever Triton raises for a kernel that does not compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    _check_arguments(build)
    target, what = GPUTarget(*dataclasses.astuple(gpu_of(arch))), build.what
    amd = target.backend == "hip"
    compiled = launch.compile_kernel(build.kernel, what, build.options, target)
    resources = amd_resources(compiled.asm["amdgcn"]) if amd else nvidia_resources(compiled.asm["cubin"])
    return KernelReport(
        name=build.name,
        backend=build.backend,
        direction=build.direction,
        arch=arch,
        triton=triton.__version__,
        config=dict(build.config),
        # The launch requests the dynamic shared memory that Triton reports; the binary knows only the static part.
        shared_bytes=compiled.metadata.shared,
        instructions=count_amdgcn(compiled.asm["amdgcn"]) if amd else count_ptx(compiled.asm["ptx"]),
        spill_limit=build.spill_limit,
        unknown_launch=None if amd else loading.why_unknown(what, compiled),
        **resources,
    )


def count_ptx(text: str) -> dict[str, int]:
    """How often each kind of ``PTX_INSTRUCTIONS`` occurs in a PTX program."""
    return _count(re.sub(r"//.*", "", text), PTX_INSTRUCTIONS)


def count_amdgcn(text: str) -> dict[str, int]:
    """How often each kind of ``AMDGCN_INSTRUCTIONS`` occurs in an AMD assembly program."""
    return _count(re.sub(r";.*", "", text), AMDGCN_INSTRUCTIONS)


def nvidia_resources(cubin: bytes) -> dict[str, int]:
    """Registers and local memory of a kernel's binary, from the ``cuobjdump`` bundled with Triton.

    Returns:
        ``registers`` and ``spill_bytes``, both for one thread.
    """
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(tool, check=True, capture_output=True, text=True).stdout
    return {"registers": _field(r"REG:(\d+)", printed), "spill_bytes": _field(r"STACK:(\d+)", printed)}


def amd_resources(text: str) -> dict[str, int]:
    """Registers and private memory of a kernel, from the metadata at the end of its assembly.

    Returns:
        ``registers`` and ``spill_bytes``, both for one thread.
    """
    private = _field(r"\.private_segment_fixed_size:\s*(\d+)", text)
    # gfx90a and later share one register file between both kinds, and .vgpr_count is the sum that occupancy depends on.
    return {"registers": _field(r"\.vgpr_count:\s*(\d+)", text), "spill_bytes": private}


@cache
def _builds(module: str, arch: str) -> list[KernelBuild]:
    return importlib.import_module(module).builds(arch)


def _run_job(job: Job) -> Outcome:
    # Any exception of the compiler becomes an Outcome, so that the other kernels are still reported.
    try:
        return Outcome(job, compile_build(_builds(job.module, job.arch)[job.index], job.arch))
    except Exception as error:
        return Outcome(job, None, f"{type(error).__name__}: {error}")


def _check_arguments(build: KernelBuild) -> None:
    named = Counter([*build.signature, *build.constexprs])
    twice = [name for name, times in named.items() if times > 1]
    wanted = list(launch.leaf_names(build.what.tree))
    missing = [name for name in wanted if name not in named]
    unknown = [name for name in named if name not in wanted]
    unknown += [name for name in build.divisible if name not in build.signature]
    for what, names in (("twice", twice), ("missing", missing), ("unknown", unknown)):
        if names:
            raise ValueError(f"{build.label}: arguments {what}: {', '.join(names)}")


def _count(text: str, kinds: Mapping[str, str]) -> dict[str, int]:
    # A mnemonic does not follow a character of a name, number or register; a predicate (@%p1) may precede it.
    counts = {kind: len(re.findall(rf"(?<![\w.$%@]){pattern}", text)) for kind, pattern in kinds.items()}
    return {kind: count for kind, count in counts.items() if count}


def _field(pattern: str, text: str) -> int:
    match: Any = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"the compiler's output has no {pattern}: {text[-400:]!r}")
    return int(match[1])
