"""What kernels compute with: tensors that promote and divide as Triton does, pointers, shared memory, descriptors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl

from tests.emulator.machine import Machine, Program, Task
from tests.machine import Barrier, MachineError
from tests.machine.clocks import Array

TORCH_DTYPES: dict[Any, torch.dtype] = {
    tl.int1: torch.bool,
    tl.int8: torch.int8,
    tl.uint8: torch.uint8,
    tl.int16: torch.int16,
    tl.uint32: torch.int32,  # the same bits, for what takes them as having no sign
    tl.int32: torch.int32,
    tl.int64: torch.int64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
TRITON_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}


class Anything:
    """Stands for layouts, which say who holds what: numbers do not depend on them, and the compiler checks them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Anything:
        return self

    def __getattr__(self, name: str) -> Anything:
        return self


LAYOUT = Anything()


@dataclass(frozen=True)
class TypeOf:
    """``x.type`` of a value."""

    element_ty: Any
    shape: tuple[int, ...]
    layout: Any = LAYOUT

    @property
    def scalar(self) -> Any:
        return self.element_ty


def _promoted(a: torch.Tensor, b: torch.Tensor) -> torch.dtype:
    """The dtype of an operation on two Triton values, which does not ask which of them is a scalar."""
    if a.dtype == b.dtype:
        return a.dtype
    if {a.dtype, b.dtype} == {torch.float16, torch.bfloat16}:
        return torch.float32
    return torch.promote_types(a.dtype, b.dtype)


def _divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Integer division rounds towards zero, as it does in C; by 0 it is some number."""
    return torch.div(a, torch.where(b == 0, 1, b), rounding_mode="trunc")


def _remainder(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.fmod(a, b if b.dtype.is_floating_point else torch.where(b == 0, 1, b))


class Typed:
    """What kernels ask of a tensor, wherever it lies."""

    data: torch.Tensor

    @property
    def dtype(self) -> Any:
        return TRITON_DTYPES[self.data.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def type(self) -> TypeOf:
        return TypeOf(self.dtype, self.shape)


class Value(Typed):
    """A tensor or scalar in registers."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __bool__(self) -> bool:
        if self.data.dim():
            raise MachineError("a branch on a tensor")
        return bool(self.data)

    def __index__(self) -> int:
        if self.data.dim():
            raise MachineError("an index that is a tensor")
        return int(self.data)

    def __getitem__(self, index: Any) -> Value:
        return Value(self.data[index])

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        target = TORCH_DTYPES[dtype]
        return Value(self.data.view(target) if bitcast else self.data.to(target))

    def reshape(self, *shape: Any) -> Value:
        return Value(self.data.reshape(*shape))

    def permute(self, *order: Any) -> Value:
        return Value(self.data.permute(*order))

    def trans(self) -> Value:
        return Value(self.data.T)

    def __neg__(self) -> Value:
        return Value(-self.data)

    def __invert__(self) -> Value:
        return Value(~self.data)

    def __hash__(self) -> int:
        return id(self)


Scalar = bool | int | float
Operand = Value | Scalar


def value_of(x: Any) -> Value:
    """A Python number as Triton takes one that stands alone."""
    if isinstance(x, Value):
        return x
    if isinstance(x, bool):
        return Value(torch.tensor(x))
    if isinstance(x, int):
        return Value(torch.tensor(x, dtype=torch.int32 if -(2**31) <= x < 2**31 else torch.int64))
    if isinstance(x, float):
        return Value(torch.tensor(x, dtype=torch.float32))
    raise MachineError(f"a register cannot hold {type(x).__name__}")


def pair(a: Operand, b: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands in the dtype of their operation; a Python number takes the other's dtype where that can hold it."""
    if not isinstance(a, Value):
        if not isinstance(b, Value):
            return pair(value_of(a), value_of(b))
        second, first = pair(b, a)
        return first, second
    if isinstance(b, Value):
        dtype = _promoted(a.data, b.data)
        return a.data.to(dtype), b.data.to(dtype)
    own = a.data.dtype
    if isinstance(b, float) and not own.is_floating_point:
        own = torch.float32
    elif own == torch.bool and not isinstance(b, bool):
        own = torch.int32
    return a.data.to(own), torch.tensor(b, dtype=own)


def _binary(name: str, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    def forward(self: Value, other: Operand) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        return Value(compute(*pair(self, other)))

    def reflected(self: Value, other: Operand) -> Any:
        return Value(compute(*pair(other, self)))

    setattr(Value, f"__{name}__", forward)
    setattr(Value, f"__r{name}__", reflected)


for _name, _compute in {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.true_divide,
    "floordiv": _divide,
    "mod": _remainder,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
}.items():
    _binary(_name, _compute)


class Pointer:
    """Elements of a tensor's memory: a base and offsets, checked against the memory's ends when used."""

    def __init__(self, memory: torch.Tensor, offsets: Value) -> None:
        self.memory = memory
        self.offsets = offsets

    @classmethod
    def to_tensor(cls, tensor: torch.Tensor) -> Pointer:
        memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return cls(memory, Value(torch.tensor(tensor.storage_offset())))

    @property
    def dtype(self) -> Any:
        return tl.pointer_type(TRITON_DTYPES[self.memory.dtype])

    def __add__(self, offsets: Operand) -> Pointer:
        return Pointer(self.memory, self.offsets + value_of(offsets).to(tl.int64))

    __radd__ = __add__

    def __sub__(self, offsets: Operand) -> Pointer:
        return self + -value_of(offsets).to(tl.int64)

    def elements(self, mask: Operand | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets, and whether each is used."""
        offsets = self.offsets.data
        used = torch.ones_like(offsets, dtype=torch.bool) if mask is None else value_of(mask).data.expand_as(offsets)
        outside = used & ((offsets < 0) | (offsets >= self.memory.numel()))
        if outside.any():
            raise MachineError(f"element {offsets[outside][0]} of memory that has {self.memory.numel()}")
        return torch.where(used, offsets, 0), used

    def places(self, mask: Operand | None = None) -> Array:
        """Pairs of bytes of its memory, of the elements that are used; two elements of a byte share one."""
        offsets, used = self.elements(mask)
        size = self.memory.element_size()
        first = (offsets[used].numpy() * size) >> 1
        return (first[:, None] + np.arange(max(1, size >> 1))).ravel()

    @property
    def is_bytes(self) -> bool:
        """Whether its elements are."""
        return self.memory.element_size() == 1

    def load(self, mask: Operand | None = None, other: Operand | None = None) -> Value:
        places, used = self.elements(mask)
        loaded = self.memory[places].clone() if used.any() else torch.zeros(places.shape, dtype=self.memory.dtype)
        if mask is None:
            return Value(loaded)
        # What a masked load leaves without ``other`` is undefined: make it hurt.
        fill = (torch.nan if loaded.dtype.is_floating_point else 1 << 6) if other is None else other
        filling = fill.data.to(loaded.dtype) if isinstance(fill, Value) else torch.tensor(fill).to(loaded.dtype)
        return Value(torch.where(used, loaded, filling))

    def store(self, value: Operand, mask: Operand | None = None) -> None:
        places, used = self.elements(mask)
        data = value_of(value).data.to(self.memory.dtype).expand_as(places)
        self.memory[places[used]] = data[used]


class SharedMemory(Typed):
    """A shared_memory_descriptor: part of an allocation and its places in the watch.

    Attributes:
        data: What it holds.
        grid: The places: of each buffer, or of the one that this is, rows of boxes of columns. Of a view in another
            shape, all that it may touch, in one row.
    """

    def __init__(self, machine: Machine, data: torch.Tensor, grid: Array, is_part: bool = False) -> None:
        self.data = data
        self.grid = grid
        self.machine = machine
        self._is_part = is_part

    @property
    def places(self) -> Array:
        """What the watch knows it by."""
        return self.grid.reshape(-1)

    @classmethod
    def allocate(
        cls, machine: Machine, dtype: Any, shape: Sequence[int], name: str, rows: int = 0, cols: int = 0
    ) -> SharedMemory:
        """Uninitialised memory: NaN, or numbers that nothing expects.

        ``rows`` rows or ``cols`` columns of a buffer may be written by themselves; 0 for all.
        """
        kind = TORCH_DTYPES[dtype]
        data = torch.full(
            tuple(shape), torch.nan if kind.is_floating_point else 7 - (2**30 if kind.is_signed else 0), dtype=kind
        )
        # The first dimension of a small one counts buffers; anything else is a buffer of its own.
        buffers = shape[0] if len(shape) > 1 and shape[0] <= 16 else 1
        across = max(1, shape[-1] // cols) if cols else 1
        down = max(1, shape[-2] // rows) if rows and len(shape) == 3 else 1
        places = machine.running.program.allocate(
            [f"{name}[{i}]" for i in range(buffers) for _ in range(down * across)]
        )
        return cls(machine, data, places.reshape(buffers, down, across))

    @property
    def layout(self) -> Any:
        return LAYOUT

    @property
    def buffer_bytes(self) -> int:
        """Bytes of each of the buffers."""
        return self.data[0].nbytes

    def load(self, layout: Any) -> Value:
        task = self.machine.running
        task.pause()
        task.read(self.places)
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        if value.data.dtype != self.data.dtype:
            raise MachineError(f"a store of {value.dtype} to shared memory of {self.dtype}")
        if value.shape != self.shape:
            raise MachineError(f"a store of {value.shape} to shared memory of {self.shape}")
        task = self.machine.running
        task.pause()
        task.write(self.places)
        self.data.copy_(value.data)

    def index(self, index: Any) -> SharedMemory:
        i = _checked(int(value_of(index)), self.data.shape[0])
        own = self._is_part or len(self.grid) == 1
        return SharedMemory(self.machine, self.data[i], self.grid if own else self.grid[i : i + 1], True)

    def slice(self, start: int, length: int, dim: int = 0) -> SharedMemory:
        _checked(start, self.data.shape[dim] - length + 1)
        axis = dim - self.data.dim()
        grid = self.grid
        if axis > -3 and grid.shape[axis] > 1:
            size = self.data.shape[dim] // grid.shape[axis]
            if (start % size or length % size) and start // size != (start + length - 1) // size:
                what = "columns" if axis == -1 else "rows"
                raise MachineError(f"{what} {start} to {start + length}, where boxes have {size}")
            kept = slice(start // size, -(-(start + length) // size))
            grid = grid[..., kept] if axis == -1 else grid[:, kept]
        return SharedMemory(self.machine, self.data.narrow(dim, start, length), grid, True)

    def permute(self, order: Sequence[int]) -> SharedMemory:
        return self._part(self.data.permute(*order))

    def reshape(self, shape: Sequence[int]) -> SharedMemory:
        return self._part(self.data.view(*shape))

    def reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any = None) -> SharedMemory:
        """A view of the buffer's first bytes; of those of each row where it becomes as many numbers, narrower or not.

        So it is on a device if rows of both are at least the width of a swizzle; else only whole buffers may be read.
        """
        data, count = self.data.view(TORCH_DTYPES[dtype]), math.prod(shape)
        if tuple(shape) == tuple(self.data.shape) and data.numel() >= count:
            return SharedMemory(self.machine, data[..., : shape[-1]], self.grid, True)
        return self._part((data if data.numel() == count else data.view(-1)[:count]).view(*shape))

    _reinterpret = reinterpret

    def _part(self, data: torch.Tensor) -> SharedMemory:
        return SharedMemory(self.machine, data, self.places[None, None], True)


def _checked(index: int, size: int) -> int:
    if not 0 <= index < size:
        raise MachineError(f"buffer {index} of {size}")
    return index


class Barriers:
    """Shared memory that holds mbarriers.

    Attributes:
        program: Where it is.
        places: What the program's watch knows it by.
    """

    buffer_bytes = 8

    @property
    def shape(self) -> tuple[int, int]:
        return len(self._barriers), 1

    def __init__(self, program: Program, barriers: list[Barrier], places: Array) -> None:
        self.program = program
        self.places = places
        self._barriers = barriers

    def index(self, index: Any) -> Barriers:
        i = _checked(int(value_of(index)), len(self._barriers))
        return Barriers(self.program, self._barriers[i : i + 1], self.places[i : i + 1])

    def reached_by(self, task: Task) -> None:
        """A task arrives, or makes a copy arrive: of another program it must know that it is there, and still is."""
        if self.program is task.program:
            return
        if self.program.is_over:
            raise MachineError(f"{task.name} signals {self.one.name} of program {self.program.number}, which has ended")
        self.program.watch.read(task.actor, self.places)

    @property
    def one(self) -> Barrier:
        if len(self._barriers) != 1:
            raise MachineError("several barriers where one is meant")
        return self._barriers[0]


class Descriptor:
    """A TMA descriptor of a tensor: boxes of it, with zeros for what lies outside, where nothing is stored."""

    def __init__(self, host: Any) -> None:
        self._pointer = Pointer.to_tensor(host.base)
        self._shape = [int(n) for n in host.shape]
        self._strides = [int(n) for n in host.strides]
        self.block_shape = tuple(int(n) for n in host.block_shape)

    @property
    def dtype(self) -> Any:
        return self._pointer.dtype.element_ty

    @property
    def block_type(self) -> TypeOf:
        return TypeOf(self.dtype, self.block_shape)

    @property
    def layout(self) -> Any:
        return LAYOUT

    @property
    def shape(self) -> tuple[Value, ...]:
        return tuple(Value(torch.tensor(n, dtype=torch.int32)) for n in self._shape)

    @property
    def strides(self) -> tuple[Value, ...]:
        return tuple(Value(torch.tensor(n, dtype=torch.int64)) for n in self._strides)

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.block_shape).numel() * self._pointer.memory.element_size()

    def box(self, coordinates: Sequence[Any]) -> tuple[Pointer, Value]:
        """Pointers to a box, and whether each element exists. Addresses wrap at 2**64, as they do in the engine."""
        if len(coordinates) != len(self._shape):
            raise MachineError(f"{len(coordinates)} coordinates for a descriptor of {len(self._shape)} dimensions")
        places = torch.zeros((), dtype=torch.int64)
        exists = torch.ones((), dtype=torch.bool)
        for at, size, stride, side in zip(coordinates, self._shape, self._strides, self.block_shape, strict=True):
            along = int(value_of(at)) + torch.arange(side)
            places = places[..., None] + along * stride
            exists = exists[..., None] & (along >= 0) & (along < size)
        return self._pointer + Value(places), Value(exists)

    def load(self, coordinates: Sequence[Any]) -> torch.Tensor:
        pointers, exists = self.box(coordinates)
        return pointers.load(exists, 0).data

    def store(self, coordinates: Sequence[Any], data: torch.Tensor) -> None:
        pointers, exists = self.box(coordinates)
        pointers.store(Value(data), exists)

    def places(self, coordinates: Sequence[Any]) -> Array:
        """Of a box, as ``Pointer.places``."""
        pointers, exists = self.box(coordinates)
        return pointers.places(exists)

    @property
    def memory(self) -> torch.Tensor:
        """That of its tensor."""
        return self._pointer.memory

    def add(self, coordinates: Sequence[Any], data: torch.Tensor) -> None:
        pointers, exists = self.box(coordinates)
        pointers.store(Value(pointers.load(exists, 0).data + data), exists)


class Pending:
    """The result of a matrix product in flight: not to be touched before the wait for it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._result: Value | None = None

    def set(self, result: Value) -> None:
        self._result = result

    @property
    def type(self) -> TypeOf:
        return TypeOf(tl.float32, self._shape)

    @property
    def result(self) -> Value:
        if self._result is None:
            raise MachineError("a product is read before it was waited for")
        return self._result

    @property
    def is_complete(self) -> bool:
        return self._result is not None

    def __getattr__(self, name: str) -> Any:
        raise MachineError("a product is used before it was waited for")
