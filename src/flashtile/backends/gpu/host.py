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

from flashtile.backends.gpu import driver
from flashtile.backends.gpu.launch import (
    TYPES,
    Launch,
    Pointer,
    Specialisation,
    TensorMap,
    compile_kernel,
    is_memory,
    is_on_16_bytes,
    parameters_of,
    specialise,
)
from flashtile.call import backend as base
from flashtile.core import settings

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
        places: By name of a run-time argument, in order: where its first value is among the block's, the operand that
            it is named after, the 64-bit word of a block that its address is written to, None for a number, and of a
            tensor descriptor (box, swizzle, bytes of an element).
    """

    compiled: Any
    what: Specialisation
    unknown: str | None
    function: int
    layout: driver.BlockLayout | None
    places: dict[str, tuple[int, str, int | None, tuple[Any, ...] | None]]


# Keys keep their kernels alive; the tensor maps' makers keep Gluon's layouts alive.
_builds: dict[tuple[Any, ...], Build] = {}


def _build_key(launch: Launch, device: int) -> tuple[Any, ...]:
    """Equal where ``specialise`` is equal, but much faster."""
    arguments, looked_at = launch.arguments, _looked_at(launch.kernel)
    in_order = {name: arguments[name] for name in looked_at}
    return launch.kernel, device, *launch.options.items(), *_traits(in_order, looked_at)


def _traits(arguments: Mapping[str, Any], looked_at: Mapping[str, bool | None]) -> list[Any]:
    """What a build depends on of arguments."""
    found: list[Any] = []
    for name, value in arguments.items():
        kind, is_looked_at = type(value), looked_at[name]
        if is_looked_at is None or value is None:
            found.append(value)
        elif kind is int:
            # Its type and, if the kernel specialises on it, whether it is 1 and whether it is divisible by 16.
            fits = -(2**31) <= value < 2**31  # fits_32_bits, but a call takes longer
            found.append((fits, value == 1, value % 16 == 0) if is_looked_at else fits)
        elif kind is TensorMap:
            found.append((value.dtype, value.box, id(value.layout)))
        else:
            found.append(kind if kind is float else (value.dtype, is_looked_at and is_on_16_bytes(value)))
    return found


@functools.cache
def _looked_at(kernel: Any) -> dict[str, bool | None]:
    """Whether a build may depend on the value of a run-time argument, by name; None for compile-time arguments."""
    return {
        name: None if is_constexpr else is_looked_at for name, is_constexpr, is_looked_at, _ in parameters_of(kernel)
    }


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
        return Build(compiled, what, unknown, compiled.function, None, {})
    layout = driver.BlockLayout(what.signature, 32 * about.num_warps, about.shared)
    maps = iter(about.tensordesc_meta or [])
    places, count = {}, 0
    for name, kind in what.signature.items():
        about_map, codes = None, layout.formats[name]
        if kind.startswith("tensordesc"):
            each = next(maps)
            about_map = (tuple(each["block_size"]), each["swizzle"], each["elem_size"])
        word = layout.words[name] if about_map or kind.startswith("*") else None
        places[name] = (count, name.rpartition("_")[0], word, about_map)
        count += len(codes)
    return Build(compiled, what, None, compiled.function, layout, places)


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

    __slots__ = (
        "_addresses", "_arguments", "_build", "_content", "_function", "_launch", "_memory", "_numbers", "_places",
        "_slots", "_spare", "_values", "device", "kernel", "options", "programs",
    )  # fmt: skip
    _places: dict[str, int]
    _build: Build
    # Of the first step of a family: the block's values, and the word, operand and offset of each address.
    _values: list[Any]
    _slots: dict[str, tuple[int, int, int]]
    _arguments: dict[str, Any]

    def __init__(
        self, launch: Launch, operands: Sequence[str], device: torch.device, known: dict[Any, Step] | None = None
    ) -> None:
        """Finds the build and lays out the arguments.

        Args:
            launch: Its tensors give only the layouts and are not kept.
            operands: In the order of the tensors given to ``run``: "q" stands for the arguments q_ptr and q_desc.
            device: The device it runs on.
            known: Steps of calls of its family with the same operands, to which this one is added. Where one has the
                kernel and the key, and sizes that the compiler does not tell apart, only the sizes are laid out anew.
        """
        self.kernel, self.options, self.programs = launch.kernel, launch.options, launch.programs
        self.device = device.index if device.type == "cuda" else None
        self._spare: list[driver.Block] | None = None
        if not self.programs:
            return
        is_direct = self.device is not None and torch.version.hip is None and launcher() == "driver"
        key, like = None, None
        if known is not None:
            traits = _traits(launch.sizes, _looked_at(launch.kernel)) if is_direct else ()
            key = (id(launch.kernel), launch.key, *traits)
            like = known.get(key)
        self._places = {name: place for place, name in enumerate(operands)} if like is None else like._places
        if not (is_direct and self._lay_out(launch, like)):
            self._keep_arguments(launch, like)
        if known is not None and like is None:
            known[key] = self

    def _lay_out(self, launch: Launch, like: Step | None) -> bool:
        """Makes the content of blocks; False if only Triton can launch the build."""
        assert self.device is not None
        if like is None:
            driver.ensure_context(self.device)
        build = self._build = find_build(launch, self.device) if like is None else like._build
        if build.layout is None:
            return False
        if like is None:
            arguments: Mapping[str, Any] = launch.arguments
            self._values, self._slots = [0] * sum(map(len, build.layout.formats.values())), {}
            values, slots = self._values, self._slots
        else:
            arguments, values, slots = launch.sizes, like._values.copy(), like._slots.copy()
        for name, value in arguments.items():
            place = build.places.get(name)
            if place is None:
                continue  # The compiler knows it.
            at, operand, word, about_map = place
            kind = type(value)
            if word is None:
                values[at] = value
                continue
            if kind is TensorMap and about_map is not None:
                map_bytes = driver.tensor_map(TYPES[value.dtype], value.shape, value.strides, *about_map)
                values[at : at + 1 + 2 * len(value.shape)] = (map_bytes, *value.shape, *value.strides)
            if kind is TensorMap or kind is Pointer:
                slots[name] = (word, self._places[value.operand or operand], value.offset)
            elif like is None:
                slots[name] = (word, self._places[operand], 0)
        self._content = build.layout.content(self.programs, values)
        self._addresses = tuple(slots.values())
        self._spare, self._function = build.layout.spare, build.function
        self._launch = driver.library().cuLaunchKernelEx
        return True

    def _keep_arguments(self, launch: Launch, like: Step | None) -> None:
        """What Triton's own launcher takes, but for the tensors."""
        arguments = launch.arguments if like is None else {**like._arguments, **launch.sizes}
        # No tensor is kept.
        self._arguments = {
            name: Pointer(value.dtype) if isinstance(value, Tensor) else value for name, value in arguments.items()
        }
        self._numbers = {name: value for name, value in self._arguments.items() if not is_memory(value)}
        # For each memory argument: its name, the index of its operand, and its description.
        self._memory = [
            (name, self._places[value.operand or name.rpartition("_")[0]], value)
            for name, value in self._arguments.items()
            if is_memory(value)
        ]

    def start(self, tensors: Sequence[Tensor | None], stream: int) -> None:
        """Launches on a stream of the step's device, which is the current one; see ``run``."""
        spare = self._spare
        if spare is None:
            if self.programs:
                self._start_by_triton(tensors)
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
        status = self._launch(block.config, self._function, block.pointers, None)
        if status == _CONTEXT_MISSING:
            driver.ensure_context(self.device)  # type: ignore[arg-type]
            status = self._launch(block.config, self._function, block.pointers, None)
        spare.append(block)
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


def run(steps: Sequence[Step], tensors: Sequence[Tensor | None]) -> None:
    """Launches steps in order on the current stream of their device.

    Args:
        steps: At least one, with the same operands.
        tensors: One for each operand; None for absent ones.
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
    return torch.empty((), dtype=torch.float32, device=device)


def launch_by_triton(kernel: Any, programs: int, arguments: dict[str, Any], options: Mapping[str, int]) -> None:
    """Launches through Triton, which inspects every argument; tests replace this with an interpreter of kernels."""
    kernel[(programs,)](**arguments, **options)


def builds(launches: Mapping[str, Launch]) -> list[base.Build]:
    """The result of ``Backend.builds`` for launches by name on the current device."""
    device = torch.cuda.current_device()
    return [base.Build(name, functools.partial(find_build, launch, device)) for name, launch in launches.items()]
