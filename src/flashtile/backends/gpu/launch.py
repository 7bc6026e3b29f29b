"""A launch as data: a kernel, its arguments by name, and the specialisation that the compiler derives from them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.bool: "i1",
}


class Pointer(NamedTuple):
    """A tensor that a launch reads or writes by address: newly allocated, so 16-byte aligned.

    Attributes:
        dtype: Of its elements.
        operand: The step's operand that contains it; by default the one that the argument is named after.
        offset: Bytes from the operand's first element, a multiple of 16.
    """

    dtype: torch.dtype
    operand: str = ""
    offset: int = 0


class TensorMap(NamedTuple):
    """A tensor that TMA copies box by box.

    Attributes:
        dtype: Of its elements.
        shape: Elements along each dimension, the contiguous one last.
        strides: In elements.
        box: Elements that one descriptor operation moves.
        layout: Gluon's layout of the box in shared memory, or None where Triton chooses it.
        operand: As in ``Pointer``.
        offset: As in ``Pointer``.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    layout: Any = None
    operand: str = ""
    offset: int = 0

    @property
    def type(self) -> str:
        """As Triton spells it in a signature."""
        ending = "" if self.layout is None else f",{self.layout!r}"
        return f"tensordesc<{TYPES[self.dtype]}{list(self.box)}{ending}>"

    def descriptor(self, base: Tensor) -> Any:
        """The descriptor that Triton's own launcher takes, for the memory of ``base``."""
        if self.layout is None:
            from triton.tools.tensor_descriptor import TensorDescriptor

            return TensorDescriptor(base, list(self.shape), list(self.strides), list(self.box))
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        return GluonDescriptor(base, list(self.shape), list(self.strides), list(self.box), self.layout)


class Launch(NamedTuple):
    """A kernel with its grid, arguments and options.

    Calls of a family, as ``families.family_of`` has it, differ in lengths, batch and strides alone. Such values, and
    whatever follows from them, are in ``sizes``. All others follow from the family and ``key``, and are computed by
    ``others`` only if no launch with that key has been laid out.

    Attributes:
        kernel: The ``@triton.jit`` or ``@gluon.jit`` function.
        programs: Size of the one-dimensional grid; nothing is launched for 0.
        sizes: Arguments by name: a tensor that gives its layout, ``Pointer`` or ``TensorMap``; numbers; None for an
            absent one.
        options: The compiler's: warps, stages, registers.
        others: Makes the other arguments by name, compile-time ones included.
        key: What options and the other arguments depend on, besides the family: the tiles, above all.
    """

    kernel: Any
    programs: int
    sizes: Mapping[str, Any]
    options: Mapping[str, int]
    others: Callable[[], Mapping[str, Any]] = dict
    key: Hashable = None

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name."""
        return {**self.others(), **self.sizes}


def row_strides(name: str, tensor: Tensor) -> dict[str, int]:
    """Batch, row and head strides of ``(batch, rows, heads, dim)``; the batch stride of a packed tensor is 0."""
    strides = tensor.stride()
    batch, row, head = strides[:3] if len(strides) == 4 else (0, *strides[:2])
    return {f"{name}_stride_b": batch, f"{name}_stride_row": row, f"{name}_stride_head": head}


@dataclass(frozen=True)
class Specialisation:
    """The part of a launch that the compiled code depends on.

    Attributes:
        signature: Type of each run-time argument, in order.
        constexprs: Value of each compile-time argument; None, and an integer of 1, are compile-time values too.
        divisible: Run-time arguments that the compiler may assume to be multiples of 16.
    """

    signature: dict[str, str]
    constexprs: dict[str, Any]
    divisible: tuple[str, ...]


@functools.cache
def parameters_of(kernel: Any) -> list[tuple[str, bool, bool, bool]]:
    """Each argument's name, whether it is a compile-time argument, and whether the build may depend on its value.

    The last says whether a 1 is a compile-time value too: not for strides between rows, heads or sequences, which are 1
    only where head_dim is, and which Triton 3.6 would lose in a record.
    """
    outer = ("_stride_b", "_stride_head", "_stride_row")
    return [
        (each.name, each.is_constexpr, not each.do_not_specialize, not each.name.endswith(outer))
        for each in kernel.params
    ]


def specialise(launch: Launch) -> Specialisation:
    """The types and values with which a launch must be compiled."""
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    divisible: list[str] = []
    arguments = launch.arguments
    for name, is_constexpr, is_looked_at, may_be_constant in parameters_of(launch.kernel):
        value = arguments[name]
        if is_constexpr or value is None:
            constexprs[name] = value
        elif isinstance(value, (Tensor, Pointer)):
            signature[name] = f"*{TYPES[value.dtype]}"
            if is_looked_at and is_on_16_bytes(value):
                divisible.append(name)
        elif isinstance(value, TensorMap):
            signature[name] = value.type
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and is_looked_at and may_be_constant:
            constexprs[name] = value
        else:
            signature[name] = "i32" if fits_32_bits(value) else "i64"
            if is_looked_at and value % 16 == 0:
                divisible.append(name)
    return Specialisation(signature, constexprs, tuple(divisible))


def is_memory(value: Any) -> bool:
    """Whether an argument is an address, not a number; the tensor test comes last because it is the slowest."""
    return type(value) not in _NUMBERS and isinstance(value, (Pointer, TensorMap, Tensor))


_NUMBERS = (int, float, bool, type(None))


def is_on_16_bytes(value: Tensor | Pointer) -> bool:
    """Whether it is 16-byte aligned, so that loads may be 16 bytes wide."""
    return isinstance(value, Pointer) or value.data_ptr() % 16 == 0


def fits_32_bits(value: int) -> bool:
    """Whether an integer is passed as i32."""
    return -(2**31) <= value < 2**31


def compile_kernel(kernel: Any, what: Specialisation, options: Mapping[str, object], target: Any) -> Any:
    """Triton's compiled kernel for a ``GPUTarget``, which need not be the machine's."""
    import triton
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    position = kernel.arg_names.index
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        {name: what.signature.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={(position(name),): value for name, value in what.constexprs.items()},
        attrs={
            (position(name),): _divisible_by_16(what.signature[name], target.backend == "hip")
            for name in what.divisible
        },
    )
    return triton.compile(source, target=target, options=dict(options))


def _divisible_by_16(kind: str, amd: bool) -> list[list[object]]:
    attributes: list[list[object]] = [["tt.divisibility", 16]]
    # On AMD such a pointer is also compiled as reaching less than 2 GiB, which is so for most tensors.
    return [*attributes, ["tt.pointer_range", 32]] if amd and kind.startswith("*") else attributes
