"""Launches kernels for all GPU backends: from a kernel and the records of its arguments to a driver call.

A backend describes a launch once per kind of call, as a ``Launch``; its leaves give only layouts. ``Launcher`` finds
the build that it needs, which depends on dtypes and constants alone, never on a length or an address; lays out the
argument block; binds operands by name; and from then on a call writes addresses into the block and starts the kernel.
Where that is not known to work (AMD, a Triton that gives kernels other parameters) Triton's launcher starts what was
compiled, and on CPU tensors its interpreter runs the kernel.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu import build, driver
from flashtile.backends.gpu.launch import (
    OPERANDS,
    TYPES,
    Captured,
    Const,
    Launch,
    TensorMap,
    lower,
    mapped,
    with_functions,
)
from flashtile.call.backend import note_launched

_CONTEXT_MISSING = 201
# By a name of this module: torch has a ``__getattr__``, so Python looks for its names anew at each use.
_torch = torch._C


class Launcher:
    """One launch of a plan, repeatable with other tensors of the same layouts."""

    __slots__ = (
        "_build", "_content", "_function", "_launch", "_leaves", "_offsets", "_spare", "_start", "_write", "device",
        "kernel", "programs",
    )  # fmt: skip
    _build: build.LoadedKernel

    def __init__(self, launch: Launch, device: torch.device, tensors: Any, made: Mapping[str, Any]) -> None:
        """Finds the build, lays out the arguments and binds the operands.

        Args:
            launch: What it starts. No tensor in it is kept.
            device: The device it runs on.
            tensors: A record like those given to ``start``, its fields being operands; not kept.
            made: Other operands by name, which come first, like those given to ``start``; not kept.

        Raises:
            LookupError: The launch has an operand that is not among these.
        """
        self.kernel, self.programs = launch.kernel, launch.programs
        self.device = device.index if device.type == "cuda" else None
        self._spare: list[driver.ArgBlock] | None = None
        if not self.programs:
            return
        key, leaves = lower(launch)
        sources = sources_of(launch, leaves, tensors, made)
        # What Triton's launcher and its interpreter take, but for the operands.
        self._launch, self._leaves = launch, leaves
        if self.device is None:
            note_launched(self.kernel.__name__, None)
            return
        is_direct = build.is_direct()
        if is_direct:
            driver.ensure_context(self.device)
        self._build = build.find_build(launch, self.device, key)
        note_launched(self.kernel.__name__, self._build)
        if is_direct and self._build.layout is not None:
            self._lay_out(leaves, self._build.layout, sources)
        elif launch.cluster > 1:
            raise RuntimeError(f"Triton's launcher starts no clusters, as {self.kernel.__name__} needs them")

    def _lay_out(self, leaves: list[Any], layout: driver.BlockLayout, sources: Mapping[str, str]) -> None:
        """Makes the content of blocks, and what writes the operands into them."""
        values: list[Any] = []
        addresses, offsets, numbers = [], [], []
        named = zip(leaves, self._build.places, self._build.names, strict=True)
        for value, (word, about_map), name in named:
            if type(value) is Captured:
                values.append(0)
                numbers.append((layout.words[name], sources[value.operand], value.kind == "fp64"))
                continue
            if word is None:
                values.append(value)
                continue
            addresses.append((word, sources[value.operand], value.offset != 0))
            offsets.append(value.offset)
            if about_map is None:
                values.append(0)
            else:
                values += (driver.tensor_map(TYPES[value.dtype], value.shape, value.strides, *about_map),)
                values += (*value.shape, *value.strides)
        self._content = layout.content(self.programs, (*values, 0, 0), self._launch.cluster)
        self._offsets, self._write = offsets, _writer(tuple(addresses), tuple(numbers))
        self._spare, self._function = layout.spare, driver.address(self._build.function)
        self._start = driver.library().cuLaunchKernelEx

    def start(self, tensors: Any, made: Mapping[str, Any], stream: int) -> None:
        """Launches on a stream of the launcher's device, which is the current one; see ``run``."""
        spare = self._spare
        if spare is None:
            if self.programs:
                self._start_otherwise(tensors, made, stream)
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
        self._write(words, self._offsets, tensors, made)
        status = self._start(block.config, self._function, block.pointers, None)
        if status == _CONTEXT_MISSING:
            driver.ensure_context(self.device)  # type: ignore[arg-type]
            status = self._start(block.config, self._function, block.pointers, None)
        spare.append(block)
        if status:
            driver.check(status, f"launch of {self.kernel.__name__}")

    def _start_otherwise(self, tensors: Any, made: Mapping[str, Any], stream: int) -> None:
        """Launches by Triton, or in its interpreter."""

        def given(leaf: Any) -> Any:
            return _given(leaf, tensors, made) if type(leaf) in OPERANDS else leaf

        if self.device is None:
            arguments = mapped(self._launch, lambda _, leaf, is_constant: leaf if is_constant else given(leaf))
            interpret(with_functions(self._launch._replace(arguments=arguments)))
        else:
            self._build.compiled[self.programs, 1, 1](*map(given, self._leaves), stream=stream)


def sources_of(launch: Launch, leaves: Sequence[Any], tensors: Any, made: Mapping[str, Any]) -> dict[str, str]:
    """Where each operand of a launch is, as Python text; raises LookupError for what is in neither place."""
    sources = {leaf.operand: "" for leaf in leaves if type(leaf) in OPERANDS}
    for name in sources:
        if (made[name] if name in made else _field(name, tensors)) is None:
            where = "neither made by its plan nor among the call's tensors"
            raise LookupError(f"{launch.kernel.__name__} has an operand {name!r}, which is {where}")
        sources[name] = f"made[{name!r}]" if name in made else f"tensors.{name}"
    return sources


def _field(operand: str, tensors: Any) -> Any:
    """The operand in a record of tensors; None if it is not there."""
    if operand[-1] != "]":
        return getattr(tensors, operand, None)
    name, _, place = operand.partition("[")
    found = getattr(tensors, name, None)
    return None if found is None else found[int(place[:-1])]


def _given(leaf: Any, tensors: Any, made: Mapping[str, Any]) -> Any:
    """What Triton's launcher takes for a run-time leaf that is an operand."""
    found = made[leaf.operand] if leaf.operand in made else _field(leaf.operand, tensors)
    if isinstance(leaf, Captured):
        return float(found) if leaf.kind == "fp64" else int(found)
    if leaf.offset:
        found = found.view(torch.uint8)[leaf.offset :]
    if found.dtype != leaf.dtype:
        found = found.view(leaf.dtype)
    return leaf.descriptor(found) if isinstance(leaf, TensorMap) else found


@functools.cache
def _writer(addresses: tuple[tuple[int, str, bool], ...], numbers: tuple[tuple[int, str, bool], ...]) -> Any:
    """A function that writes operands into a block; in a loop that took 0.5 us more.

    Args:
        addresses: The word and the source of each address, and whether it has an offset.
        numbers: The word and the source of each number, and whether it is a float.
    """
    sources = list(dict.fromkeys(source for _, source, _ in addresses))
    lines = [f"x{n} = {source}.data_ptr()" for n, source in enumerate(sources)]
    for n, (word, source, has_offset) in enumerate(addresses):
        lines.append(f"words[{word}] = x{sources.index(source)}" + f" + offsets[{n}]" * has_offset)
    lines += [f"words[{word}] = bits({source}, {is_float})" for word, source, is_float in numbers]
    found: dict[str, Any] = {"bits": _bits}
    text = "\n ".join(["def write(words, offsets, tensors, made):", *lines, "return"])
    exec(compile(text, __file__, "exec"), found)  # this file's name, so that torch.compile skips it too
    return found["write"]


def _bits(number: Any, is_float: bool) -> int:
    """A number as the word of a block."""
    if is_float:
        return int.from_bytes(struct.pack("<d", number), "little")
    return int(number) & 2**64 - 1


def run(launchers: Sequence[Launcher], tensors: Any, made: Mapping[str, Any]) -> None:
    """Launches in order on the current stream of the launchers' device.

    Args:
        launchers: At least one.
        tensors: The call's record of tensors, and of numbers that mods read.
        made: What else the launches read or write, by name.
    """
    device = launchers[0].device
    if is_current(device):
        start(launchers, tensors, made)
    else:
        with torch.cuda.device(device):
            start(launchers, tensors, made)


def start(launchers: Sequence[Launcher], tensors: Any, made: Mapping[str, Any]) -> None:
    """``run`` where the launchers' device is the current one."""
    device = launchers[0].device
    stream = 0 if device is None else _torch._cuda_getCurrentRawStream(device)
    for launcher in launchers:
        launcher.start(tensors, made, stream)


def is_current(device: int | None) -> bool:
    """Whether a GPU, by its number, is the current one; None for a CPU."""
    return device is None or _torch._cuda_getDevice() == device


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
    """Makes a constant of a record with its value's arithmetic: a plain one's with a tensor gives no tensor."""
    from triton.language import constexpr

    def method(name: str) -> Callable[[Any, Any], Any]:
        return lambda x, y: getattr(x.value, name)(y.value if isinstance(y, constexpr) else y)

    names = [f"__{side}{name}__" for side in ("", "r") for name in ("add", "sub", "mul", "floordiv", "mod")]
    return type("Constant", (constexpr,), {name: method(name) for name in names})
