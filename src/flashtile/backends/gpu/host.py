"""Launches kernels for all GPU backends: from a kernel and the records of its arguments to a driver call.

A backend describes a launch once per kind of call, as a ``Launch`` whose leaves give only layouts. ``Step`` finds the
build that it needs, which depends on dtypes and constants alone, never on a length or an address; lays out the argument
block; and from then on a call writes addresses into the block and starts the kernel. Where that is not known to work
(AMD, a Triton whose kernels have other parameters) Triton's launcher starts what was compiled, and on CPU tensors its
interpreter runs the kernel.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu import archive, driver
from flashtile.backends.gpu.launch import (
    TYPES,
    Captured,
    Const,
    Launch,
    Pointer,
    Specialisation,
    TensorMap,
    compile_kernel,
    lower,
    mapped,
    specialise,
    text_of,
    with_functions,
)
from flashtile.call import backend as base
from flashtile.call.problem import AHEAD
from flashtile.core import settings
from flashtile.core.errors import UnsupportedError

_CONTEXT_MISSING = 201


@dataclass(frozen=True, eq=False)
class Build:
    """A kernel compiled and loaded on a device.

    Attributes:
        compiled: Triton's object, or an archive's, which keeps the code loaded.
        names: Of the run-time leaves, in order.
        unknown: Why the kernel cannot be launched without Triton, or None.
        function: The driver's handle.
        layout: Layout of its argument block; None if it cannot be launched without Triton.
        places: Of each run-time leaf, in order: the 64-bit word of a block that its address is written to, None for a
            number, and of a tensor descriptor (box, swizzle, bytes of an element).
    """

    compiled: Any
    names: tuple[str, ...]
    unknown: str | None
    function: int
    layout: driver.BlockLayout | None
    places: list[tuple[int | None, tuple[Any, ...] | None]]


# Keys keep their kernels alive; the tensor maps' makers keep Gluon's layouts alive.
_builds: dict[tuple[Any, ...], Build] = {}
_locks: dict[tuple[Any, ...], threading.Lock] = {}


def find_build(launch: Launch, device: int, key: tuple[Any, ...] | None = None) -> Build:
    """The build of a launch on a device, made if this process has not seen it; key: what ``lower`` says.

    Waits for another thread that is making it.
    """
    lowered = key or lower(launch)[0]
    key = device, *lowered
    if key not in _builds:
        with _locks.setdefault(key, threading.Lock()):
            if key not in _builds:
                _builds[key] = _from_archive(lowered, device) or _compiled(launch, device)
    return _builds[key]


def missing(*, gluon: bool = False) -> str | None:
    """Why kernels, of Triton or of Gluon, can neither be compiled nor come from an archive; None if they can."""
    return None if archive.archives() else _no_compiler(gluon)


@functools.cache
def _no_compiler(gluon: bool) -> str | None:
    if (found := find_spec("triton")) is None:
        return "needs Triton, which is not installed"
    # To look for a package within Triton would import Triton.
    if gluon and not any(
        Path(each, "experimental", "gluon").is_dir() for each in found.submodule_search_locations or ()
    ):
        return "needs Triton 3.6 or later, which brings Gluon"
    return None


def _compiled(launch: Launch, device: int) -> Build:
    if why := _no_compiler(gluon=False):
        raise UnsupportedError(
            f"the kernel {launch.kernel.__name__} of this call is in no archive of kernels, and to be compiled it {why}"
        )
    if place := settings.RECORD.text():
        from flashtile.backends.gpu.ahead import as_json  # what few programs need is not loaded by all

        with open(os.path.expanduser(place), "a") as file:
            file.write(as_json(launch) + "\n")
    what = specialise(launch)
    with _alone(launch, device):
        return make_build(what, load(launch, what, device))


@contextmanager
def _alone(launch: Launch, device: int) -> Iterator[None]:
    """Within, no other process compiles the same kernel: the ranks of a host wait for one, then find it in the cache."""
    import fcntl  # no Triton is where this is not

    from triton import knobs

    folder = Path(knobs.cache.dir, "flashtile-locks")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = f"{torch.cuda.get_device_capability(device)} {text_of(lower(launch)[0])}"
        file = open(folder / hashlib.sha256(text.encode()).hexdigest(), "w")  # noqa: SIM115
    except OSError:  # a folder that cannot be written has no cache either
        yield
        return
    with file:
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _from_archive(lowered: tuple[Any, ...], device: int) -> Build | None:
    """The build among the archives; None if it is not there, or if the driver refuses it."""
    if not archive.archives() or not _is_direct():
        return None
    if (found := archive.look_up(text_of(lowered), device)) is None:
        return None
    try:
        return known_build(found.about, archive.load(found, device))
    except driver.DriverError as error:
        warnings.warn(f"a kernel of an archive is compiled instead: {error}", stacklevel=4)
        return None


def load(launch: Launch, what: Specialisation, device: int) -> Any:
    """Triton's compiled kernel, loaded on a device."""
    from triton.runtime import driver as triton_driver

    _start_hashing().join()
    with torch.cuda.device(device):
        compiled = compile_kernel(launch.kernel, what, launch.options, triton_driver.active.get_current_target())
        # Triton's launcher knows no tensor maps in records: it takes each leaf as a parameter, as the kernel does.
        compiled.src = SimpleNamespace(signature=dict(enumerate(what.signature.values())), constants={})
        if _is_direct() and why_unknown(what, compiled) is None:
            _load_code(compiled, device)
        else:
            _ = compiled.run  # loads the code; raises if it needs more than the device has
    return compiled


@functools.cache
def start_hashing() -> threading.Thread | None:
    """``_start_hashing``, unless archives are expected to have all that a call needs."""
    return None if archive.archives() else _start_hashing()


@functools.cache
def _start_hashing() -> threading.Thread:
    """Has Triton hash its own 400 MB, for the keys of its cache, while a process imports its first kernels."""
    thread = threading.Thread(target=_hash)
    thread.start()
    return thread


def _hash() -> None:
    # Where another release keeps it elsewhere, its first build calls it.
    getattr(importlib.import_module("triton.runtime.cache"), "triton_key", int)()


def _load_code(compiled: Any, device: int) -> None:
    """As Triton loads it, but for its launcher, which 3.6 compiles from C for each signature: half a second each."""
    from triton.runtime import driver as triton_driver
    from triton.runtime.errors import OutOfResources

    utils, needed, threads = triton_driver.active.utils, compiled.metadata.shared, 32 * compiled.metadata.num_warps
    if needed > (most := utils.get_device_properties(device)["max_shared_mem"]):
        raise OutOfResources(needed, most, "shared memory")
    compiled.module, compiled.function, *_, most = utils.load_binary(compiled.name, compiled.kernel, needed, device)
    if threads > most:
        raise OutOfResources(threads, most, "threads")


def make_build(what: Specialisation, compiled: Any) -> Build:
    """The record that launches need of a compiled kernel."""
    unknown = why_unknown(what, compiled)
    if unknown is not None:
        return Build(compiled, tuple(what.signature), unknown, compiled.function, None, [])
    return known_build(about_of(what, compiled), compiled)


def about_of(what: Specialisation, compiled: Any) -> dict[str, Any]:
    """What launches need to know of a compiled kernel for which ``why_unknown`` has no reason, as JSON values."""
    about = compiled.metadata
    maps = [[list(each["block_size"]), each["swizzle"], each["elem_size"]] for each in about.tensordesc_meta or []]
    # How a box lies in shared memory matters no more.
    leaves = [[name, kind[: kind.find("]") + 1] or kind] for name, kind in what.signature.items()]
    return {"name": about.name, "num_warps": about.num_warps, "shared": about.shared, "leaves": leaves, "maps": maps}


def known_build(about: Mapping[str, Any], compiled: Any) -> Build:
    """The record of loaded code, from ``about_of`` it."""
    signature, maps = dict(about["leaves"]), iter(about["maps"])
    layout = driver.BlockLayout(signature, 32 * about["num_warps"], about["shared"])
    places: list[Any] = []
    for name, kind in signature.items():
        about_map = None
        if kind.startswith("tensordesc"):
            box, swizzle, size = next(maps)
            about_map = (tuple(box), swizzle, size)
        places.append((layout.words[name] if about_map or kind.startswith("*") else None, about_map))
    return Build(compiled, tuple(signature), None, compiled.function, layout, places)


def why_unknown(what: Specialisation, compiled: Any) -> str | None:
    """Why this module cannot launch a compiled kernel, or None."""
    about = compiled.metadata
    descriptors = sum(kind.startswith("tensordesc") for kind in what.signature.values())
    maps = getattr(about, "tensordesc_meta", None) or []
    if descriptors != len(maps) or any(each.get("fp4_padded") for each in maps):
        return "its tensor descriptors are not tensor maps"
    if about.global_scratch_size or getattr(about, "profile_scratch_size", 0):
        return "it needs scratch memory"
    if about.num_ctas != 1 or about.launch_cooperative_grid or about.launch_pdl:
        return "it needs launch attributes"
    try:
        expected = [driver.SIZES[code] for codes in driver.layout(what.signature).values() for code in codes]
    except KeyError as error:
        return f"it has an argument of type {error}"
    found = driver.parameter_sizes(compiled.asm["ptx"])
    if found != expected:
        return f"its parameters have {found} bytes, {expected} were expected"
    return None


@functools.cache
def launcher() -> str:
    """Which launcher runs NVIDIA kernels: ``"driver"``, or ``"triton"`` with the reason."""
    if settings.LAUNCHER.get() == "triton":
        return f"triton ({settings.LAUNCHER.name}=triton)"
    try:
        driver.ensure_context(torch.cuda.current_device())
        return "driver" if driver.address_comes_first() else "triton (tensor maps of an unknown form)"
    except (OSError, AttributeError, driver.DriverError) as error:
        return f"triton ({error})"


def _is_direct() -> bool:
    return torch.version.hip is None and launcher() == "driver"


class Step:
    """One launch of a plan, repeatable with other tensors of the same layouts."""

    __slots__ = (
        "_addresses", "_build", "_content", "_function", "_launch", "_leaves", "_numbers", "_places", "_spare",
        "_start", "device", "kernel", "programs",
    )  # fmt: skip
    _build: Build
    # The word, operand and offset of each address.
    _addresses: list[tuple[int, int, int]]
    # The word and operand of each ``Captured``, and whether it is a float.
    _numbers: list[tuple[int, int, bool]]
    # What Triton's launcher takes, but for the tensors.
    _leaves: list[Any]

    def __init__(self, launch: Launch, operands: Sequence[str], device: torch.device) -> None:
        """Finds the build and lays out the arguments.

        Args:
            launch: What it starts. No tensor in it is kept.
            operands: In the order of the tensors given to ``run``.
            device: The device it runs on.
        """
        self.kernel, self.programs = launch.kernel, launch.programs
        self.device = device.index if device.type == "cuda" else None
        self._spare: list[driver.Block] | None = None
        if not self.programs:
            return
        self._places = {name: place for place, name in enumerate(operands)}
        if self.device is None:
            self._launch = launch
            return
        is_direct = _is_direct()
        if is_direct:
            driver.ensure_context(self.device)
        key, leaves = lower(launch)
        self._build = find_build(launch, self.device, key)
        if is_direct and self._build.layout is not None:
            self._lay_out(leaves, self._build.layout)
        else:
            self._leaves = leaves

    def _lay_out(self, leaves: list[Any], layout: driver.BlockLayout) -> None:
        """Makes the content of blocks."""
        values: list[Any] = []
        self._addresses, self._numbers = [], []
        named = zip(leaves, self._build.places, self._build.names, strict=True)
        for value, (word, about_map), name in named:
            if type(value) is Captured:
                values.append(0)
                self._numbers.append((layout.words[name], self._places[value.name], value.kind == "fp64"))
                continue
            if word is None:
                values.append(value)
                continue
            self._addresses.append((word, self._places[value.operand], value.offset))
            if about_map is None:
                values.append(0)
            else:
                values += (driver.tensor_map(TYPES[value.dtype], value.shape, value.strides, *about_map),)
                values += (*value.shape, *value.strides)
        self._content = layout.content(self.programs, (*values, 0, 0))
        self._spare, self._function = layout.spare, self._build.function
        self._start = driver.library().cuLaunchKernelEx

    def start(self, tensors: Sequence[Tensor | None], stream: int) -> None:
        """Launches on a stream of the step's device, which is the current one; see ``run``."""
        spare = self._spare
        if spare is None:
            if self.programs and self.device is None:
                interpret(with_functions(self._launch._replace(arguments=self._filled(tensors))))
            elif self.programs:
                given = [self._given(leaf, tensors) for leaf in self._leaves]
                self._build.compiled[self.programs, 1, 1](*given, stream=stream)
            return
        # A block serves one launch at a time; a thread that launches concurrently makes its own.
        try:
            block = spare.pop()
        except IndexError:
            block = self._build.layout.block()  # type: ignore[union-attr]
        if block.content is not self._content:
            block.memory[:] = block.content = self._content
        words = block.words
        words[driver.STREAM_WORD] = stream
        for word, place, offset in self._addresses:
            words[word] = tensors[place].data_ptr() + offset  # type: ignore[union-attr]
        for word, place, is_float in self._numbers:
            words[word] = _bits(tensors[place], is_float)
        status = self._start(block.config, self._function, block.pointers, None)
        if status == _CONTEXT_MISSING:
            driver.ensure_context(self.device)  # type: ignore[arg-type]
            status = self._start(block.config, self._function, block.pointers, None)
        spare.append(block)
        if status:
            driver.check(status, f"launch of {self.kernel.__name__}")

    def _filled(self, tensors: Sequence[Tensor | None]) -> dict[str, Any]:
        """The arguments with tensors and descriptors in their places."""
        return mapped(self._launch, lambda _, leaf, is_constant: leaf if is_constant else self._given(leaf, tensors))

    def _given(self, leaf: Any, tensors: Sequence[Tensor | None]) -> Any:
        """What Triton's launcher takes for a run-time leaf."""
        if isinstance(leaf, Captured):
            number: Any = tensors[self._places[leaf.name]]
            return float(number) if leaf.kind == "fp64" else int(number)
        if not isinstance(leaf, (Pointer, TensorMap)):
            return leaf
        tensor = tensors[self._places[leaf.operand]]
        assert tensor is not None
        if leaf.offset:
            tensor = tensor.view(torch.uint8)[leaf.offset :]
        if tensor.dtype != leaf.dtype:
            tensor = tensor.view(leaf.dtype)
        return leaf.descriptor(tensor) if isinstance(leaf, TensorMap) else tensor


def _bits(number: Any, is_float: bool) -> int:
    """A number as the word of a block."""
    if is_float:
        return int.from_bytes(struct.pack("<d", number), "little")
    return int(number) & 2**64 - 1


def run(steps: Sequence[Step], tensors: Sequence[Tensor | None]) -> None:
    """Launches steps in order on the current stream of their device.

    Args:
        steps: At least one, with the same operands.
        tensors: One for each operand; None for absent ones, and numbers for those that mods read.
    """
    device, stream = steps[0].device, 0
    if device is not None:
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                run(steps, tensors)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
    for step in steps:
        step.start(tensors, stream)


def like_floats(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A model for ``torch.empty_like``: float32 on a tensor's device, but of a single element.

    1 us a call less than giving a shape and a dtype takes.
    """
    return _a_float(tensor.device).expand(shape)


@functools.cache
def _a_float(device: torch.device) -> Tensor:
    return kept((), torch.float32, device)


def kept(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that outlive the call that makes them.

    Another thread allocates them: what a call within ``torch.compile(mode="reduce-overhead")`` allocates, in its
    warm-up too, is memory of a CUDA graph, which fails if it finds something alive there that is no output.
    """
    zeros = functools.partial(torch.zeros, shape, dtype=dtype, device=device)
    if device.type != "cuda" or torch._C._cuda_isCurrentStreamCapturing():
        return zeros()
    with ThreadPoolExecutor(1) as pool:
        made: Tensor = pool.submit(zeros).result()
    torch.cuda.default_stream(device).synchronize()  # that thread's, for which the call's own does not wait
    return made


def interpret(launch: Launch) -> None:
    """Runs a launch on CPU tensors, which are in their places; tests put other interpreters of kernels here."""
    constant = _constant_to_interpret()

    def leaf(name: str, value: Any, is_constant: bool) -> Any:
        if isinstance(value, Const):
            return value.value
        # The interpreter makes tensors of the numbers in a record.
        return constant(value) if is_constant and "." in name and isinstance(value, (int, str)) else value

    launch.kernel[(launch.programs,)](**mapped(launch, leaf), **launch.options)


@functools.cache
def _constant_to_interpret() -> Any:
    """Makes a constant of a record whose arithmetic is its value's: a plain one's with a tensor gives no tensor."""
    from triton.language import constexpr

    def method(name: str) -> Callable[[Any, Any], Any]:
        return lambda x, y: getattr(x.value, name)(y.value if isinstance(y, constexpr) else y)

    names = [f"__{side}{name}__" for side in ("", "r") for name in ("add", "sub", "mul", "floordiv", "mod")]
    return type("Constant", (constexpr,), {name: method(name) for name in names})


def builds(launches: Mapping[str, Launch]) -> list[base.Build]:
    """The result of ``Backend.builds`` for launches by name: on the current device, or for that of ``call.gpus``."""
    if (gpu := AHEAD.get()) is not None:
        from triton.backends.compiler import GPUTarget

        from flashtile.backends.gpu.ahead import RECORDER

        target, recorder = GPUTarget(gpu.backend, gpu.arch, gpu.warp_size), RECORDER.get()
        return [
            base.Build(
                name,
                functools.partial(compile_kernel, each.kernel, specialise(each), each.options, target)
                if recorder is None else functools.partial(recorder.build, each, target),
            )
            for name, each in launches.items()
        ]  # fmt: skip
    device = torch.cuda.current_device()
    return [base.Build(name, functools.partial(find_build, launch, device)) for name, launch in launches.items()]
