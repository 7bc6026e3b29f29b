"""Launches kernels for all GPU backends: from a kernel and its arguments by name to a driver call.

A backend describes a launch once per kind of call, as a ``Launch`` whose tensors give only layouts. ``Step`` finds the
build that it needs, which depends on dtypes and compile-time arguments alone, never on a length or an address; lays out
the argument block; and from then on a call writes addresses into the block and starts the kernel. Where that is not
known to work (AMD, Triton's interpreter, a Triton whose kernels have other parameters) Triton's own launcher is used.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashtile import settings
from flashtile.backends import base, driver
from flashtile.backends.launch import (
    TYPES,
    Launch,
    Pointer,
    Specialisation,
    TensorMap,
    compile_kernel,
    fits_32_bits,
    is_memory,
    is_on_16_bytes,
    parameters_of,
    specialise,
)

_CONTEXT_MISSING = 201


@dataclass(frozen=True, eq=False)
class Build:
    """A kernel compiled and loaded on a device.

    Attributes:
        compiled: Triton's object, which keeps the code loaded.
        what: The specialisation it was compiled for.
        unknown: Why the kernel cannot be launched without Triton, or None.
        function: The driver's handle.
        layout: Layout of its argument block; None if it cannot be launched without Triton.
        fields: Its run-time arguments in order: name, operand that it is named after, 64-bit word of a block that its
            address is written to, None for a number; of a tensor descriptor (box, swizzle, bytes of an element).
    """

    compiled: Any
    what: Specialisation
    unknown: str | None
    function: int
    layout: driver.BlockLayout | None
    fields: list[tuple[str, str, int | None, tuple[Any, ...] | None]]


# Keys keep their kernels alive; the tensor maps' makers keep Gluon's layouts alive.
_builds: dict[tuple[Any, ...], Build] = {}


def _build_key(launch: Launch, device: int) -> tuple[Any, ...]:
    """Equal where ``specialise`` is equal, but much faster; computed for every new length."""
    key: list[Any] = [launch.kernel, device, *launch.options.items()]
    arguments = launch.arguments
    for name, is_constexpr, is_looked_at, _ in parameters_of(launch.kernel):
        value = arguments[name]
        kind = type(value)
        if is_constexpr or value is None:
            key.append(value)
        elif kind is int:
            # An integer's type and, if the kernel specialises on it, whether it is 1 and whether it is divisible by 16.
            traits = fits_32_bits(value)
            key.append((traits, value == 1, value % 16 == 0) if is_looked_at else traits)
        elif kind is TensorMap:
            key.append((value.dtype, value.box, id(value.layout)))
        elif kind is not float:
            key.append((value.dtype, is_looked_at and is_on_16_bytes(value)))
    return tuple(key)


def find_build(launch: Launch, device: int) -> Build:
    """The build of a launch on a device, compiled if this process has not seen it."""
    key = _build_key(launch, device)
    found = _builds.get(key)
    if found is None:
        what = specialise(launch)
        found = _builds[key] = make_build(what, load(launch, what, device))
    return found


def load(launch: Launch, what: Specialisation, device: int) -> Any:
    """Triton's compiled kernel, loaded on a device."""
    from triton.runtime import driver as triton_driver

    with torch.cuda.device(device):
        compiled = compile_kernel(launch.kernel, what, launch.options, triton_driver.active.get_current_target())
        _ = compiled.run  # loads the code; raises if it needs more than the device has
    return compiled


def make_build(what: Specialisation, compiled: Any) -> Build:
    """The record that launches need of a compiled kernel."""
    about = compiled.metadata
    unknown = why_unknown(what, compiled)
    if unknown is not None:
        return Build(compiled, what, unknown, compiled.function, None, [])
    layout = driver.BlockLayout(what.signature, 32 * about.num_warps, about.shared)
    maps = iter(about.tensordesc_meta or [])
    fields = []
    for name, kind in what.signature.items():
        about_map = None
        if kind.startswith("tensordesc"):
            each = next(maps)
            about_map = (tuple(each["block_size"]), each["swizzle"], each["elem_size"])
        word = layout.words[name] if about_map or kind.startswith("*") else None
        fields.append((name, name.rpartition("_")[0], word, about_map))
    return Build(compiled, what, None, compiled.function, layout, fields)


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


class Step:
    """One launch of a plan, repeatable with other tensors of the same layouts."""

    def __init__(self, launch: Launch, operands: Sequence[str], device: torch.device) -> None:
        """Finds the build and lays out the arguments.

        Args:
            launch: Its tensors give only the layouts and are not kept.
            operands: In the order of the tensors given to ``run``: "q" stands for the arguments q_ptr and q_desc.
            device: The device it runs on.
        """
        self.kernel = launch.kernel
        self.programs = launch.programs
        self.options = launch.options
        self._device = device.index if device.type == "cuda" else None
        self._start = self._start_by_triton
        places = {name: place for place, name in enumerate(operands)}
        if self.programs and self._device is not None and torch.version.hip is None and launcher() == "driver":
            self._lay_out(launch, places, self._device)
        if self._start == self._start_by_triton:
            memory = {name: value for name, value in launch.arguments.items() if is_memory(value)}
            self._numbers = {name: value for name, value in launch.arguments.items() if name not in memory}
            # For each memory argument: the index of its operand, and its description; no tensor is kept.
            self._memory = [
                (name, places[getattr(value, "operand", "") or name.rpartition("_")[0]],
                 Pointer(value.dtype) if isinstance(value, Tensor) else value)
                for name, value in memory.items()
            ]  # fmt: skip

    def _lay_out(self, launch: Launch, places: Mapping[str, int], device: int) -> None:
        driver.ensure_context(device)
        build = find_build(launch, device)
        if build.layout is None:
            return
        values: list[Any] = []
        slots = []
        for name, operand, word, about_map in build.fields:
            value = launch.arguments[name]
            if word is None:
                values.append(value)
            elif about_map is None:
                values.append(0)
                if type(value) is Pointer:
                    slots.append((word, places[value.operand or operand], value.offset))
                else:
                    slots.append((word, places[operand], 0))
            else:
                values.append(driver.tensor_map(TYPES[value.dtype], value.shape, value.strides, *about_map))
                values += value.shape
                values += value.strides
                slots.append((word, places[value.operand or operand], value.offset))
        self._values = (*values, 0, 0)
        self._slots = slots
        self._layout = build.layout
        self._spare = [self._layout.block(self.programs, self._values)]
        self._function = build.function
        self._launch = driver.library().cuLaunchKernelEx
        self._build = build
        self._start = self._start_directly

    def run(self, tensors: Sequence[Tensor | None]) -> None:
        """Launches on the current stream of the step's device.

        Args:
            tensors: One for each operand; None for absent ones.
        """
        if not self.programs:
            return
        if self._device is None or torch._C._cuda_getDevice() == self._device:
            self._start(tensors)
        else:
            with torch.cuda.device(self._device):
                self._start(tensors)

    def _start_directly(self, tensors: Sequence[Tensor | None]) -> None:
        # A block serves one launch at a time; a thread that launches concurrently makes its own.
        try:
            block = self._spare.pop()
        except IndexError:
            block = self._layout.block(self.programs, self._values)
        words = block.words
        words[driver.STREAM_WORD] = torch._C._cuda_getCurrentRawStream(self._device)  # type: ignore[arg-type]
        for word, place, offset in self._slots:
            words[word] = tensors[place].data_ptr() + offset  # type: ignore[union-attr]
        status = self._launch(block.config, self._function, block.pointers, None)
        if status == _CONTEXT_MISSING:
            driver.ensure_context(self._device)  # type: ignore[arg-type]
            status = self._launch(block.config, self._function, block.pointers, None)
        self._spare.append(block)
        if status:
            driver.check(status, f"launch of {self.kernel.__name__}")

    def _start_by_triton(self, tensors: Sequence[Tensor | None]) -> None:
        arguments = dict(self._numbers)
        for name, place, like in self._memory:
            tensor = tensors[place]
            assert tensor is not None
            if like.offset:
                tensor = tensor.view(torch.uint8)[like.offset :]
            if tensor.dtype != like.dtype:
                tensor = tensor.view(like.dtype)
            arguments[name] = like.descriptor(tensor) if isinstance(like, TensorMap) else tensor
        launch_by_triton(self.kernel, self.programs, arguments, self.options)


def launch_by_triton(kernel: Any, programs: int, arguments: dict[str, Any], options: Mapping[str, int]) -> None:
    """Launches through Triton, which inspects every argument; tests replace this with an interpreter of kernels."""
    kernel[(programs,)](**arguments, **options)


def builds(launches: Mapping[str, Launch]) -> list[base.Build]:
    """The result of ``Backend.builds`` for launches by name on the current device."""
    device = torch.cuda.current_device()
    return [base.Build(name, functools.partial(find_build, launch, device)) for name, launch in launches.items()]
