"""Launches kernels for all GPU backends: from a kernel and the records of its arguments to a driver call.

A backend describes a launch once per kind of call, as a ``Launch`` whose leaves give only layouts. ``Step`` finds the
build that it needs, which depends on dtypes and constants alone, never on a length or an address; lays out the argument
block; and from then on a call writes addresses into the block and starts the kernel. Where that is not known to work
(AMD, a Triton whose kernels have other parameters) Triton's launcher starts what was compiled, and on CPU tensors its
interpreter runs the kernel.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu import build, driver
from flashtile.backends.gpu.launch import (
    TYPES,
    Captured,
    Const,
    Launch,
    Pointer,
    TensorMap,
    lower,
    mapped,
    with_functions,
)

_CONTEXT_MISSING = 201


class Step:
    """One launch of a plan, repeatable with other tensors of the same layouts."""

    __slots__ = (
        "_addresses", "_build", "_content", "_function", "_launch", "_leaves", "_numbers", "_places", "_spare",
        "_start", "device", "kernel", "programs",
    )  # fmt: skip
    _build: build.Build
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
        is_direct = build.is_direct()
        if is_direct:
            driver.ensure_context(self.device)
        key, leaves = lower(launch)
        self._build = build.find_build(launch, self.device, key)
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
