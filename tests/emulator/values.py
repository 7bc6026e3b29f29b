"""What kernels compute with: tensors that promote and divide as Triton does, pointers, shared memory, descriptors."""

from __future__ import annotations

import functools
import math
import operator
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

    __slots__ = ()
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
    """A tensor or scalar in registers; nothing writes into its data."""

    __slots__ = ("data",)

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
        return held(self.data[index])

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
        return held(-self.data)

    def __invert__(self) -> Value:
        return held(~self.data)

    def __hash__(self) -> int:
        return id(self)


# Bits of what a Number may be.
_BITS = {torch.bool: 1, torch.int32: 32, torch.int64: 64}


class Number(Value):
    """A boolean or an integer that stands alone. Kernels count with more of these than they have tensors.

    Attributes:
        number: In Python; within the range of its dtype.
        kind: Its dtype.
    """

    __slots__ = ("kind", "number")

    def __init__(self, number: int, kind: torch.dtype) -> None:
        self.number = number
        self.kind = kind

    @property
    def data(self) -> torch.Tensor:
        return constant(self.number, self.kind)

    @property
    def dtype(self) -> Any:
        return TRITON_DTYPES[self.kind]

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    def __bool__(self) -> bool:
        return self.number != 0

    def __index__(self) -> int:
        return int(self.number)

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        target = TORCH_DTYPES[dtype]
        if target is self.kind:
            return self
        if bitcast or target not in _BITS:
            return super().to(dtype, bitcast)
        return Number(bool(self.number) if target is torch.bool else _wrapped(int(self.number), target), target)


def _wrapped(number: int, kind: torch.dtype) -> int:
    """The lower bits of an integer, as one of a dtype."""
    half = 1 << _BITS[kind] - 1
    return number if -half <= number < half else (number + half) % (2 * half) - half


def held(data: torch.Tensor) -> Value:
    """A tensor in registers."""
    return Value(data) if data.dim() or data.dtype not in _BITS else Number(data.item(), data.dtype)


def constant(x: Scalar, dtype: torch.dtype) -> torch.Tensor:
    """A number as a tensor, which nobody may write into."""
    return _constant(x, dtype, str(x) if x == 0 else "")


@functools.lru_cache(maxsize=1 << 14, typed=True)
def _filling(x: Scalar, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(x).to(dtype)


@functools.lru_cache(maxsize=1 << 14, typed=True)
def _constant(x: Scalar, dtype: torch.dtype, zero: str) -> torch.Tensor:
    """``zero`` tells zeros apart, which equal one another."""
    return torch.tensor(x, dtype=dtype)


Scalar = bool | int | float
Operand = Value | Scalar


def value_of(x: Any) -> Value:
    """A Python number as Triton takes one that stands alone."""
    if isinstance(x, Value):
        return x
    if isinstance(x, bool):
        return Number(x, torch.bool)
    if isinstance(x, int):
        return Number(x, torch.int32 if -(2**31) <= x < 2**31 else torch.int64)
    if isinstance(x, float):
        return Value(constant(x, torch.float32))
    raise MachineError(f"a register cannot hold {type(x).__name__}")


def pair(a: Operand, b: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands in the dtype of their operation; a Python number takes the other's dtype where that can hold it."""
    if not isinstance(a, Value):
        if not isinstance(b, Value):
            return pair(value_of(a), value_of(b))
        second, first = pair(b, a)
        return first, second
    first = a.data
    if isinstance(b, Value):
        second = b.data
        if first.dtype == second.dtype:
            return first, second
        dtype = _promoted(first, second)
        return first.to(dtype), second.to(dtype)
    own = first.dtype
    if isinstance(b, float) and not own.is_floating_point:
        own = torch.float32
    elif own == torch.bool and not isinstance(b, bool):
        own = torch.int32
    return first.to(own), constant(b, own)


def _binary(name: str, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    exact = _OF_INTEGERS.get(name)

    def forward(self: Value, other: Operand) -> Any:
        if exact is not None and (counted := _counted(exact, self, other)) is not None:
            return counted
        if isinstance(other, Pointer):
            return NotImplemented
        return held(compute(*pair(self, other)))

    def reflected(self: Value, other: Operand) -> Any:
        if exact is not None and (counted := _counted(exact, other, self)) is not None:
            return counted
        return held(compute(*pair(other, self)))

    setattr(Value, f"__{name}__", forward)
    setattr(Value, f"__r{name}__", reflected)


def _counted(exact: Callable[[int, int], int | None], a: Operand, b: Operand) -> Number | None:
    """An operation on numbers that stand alone, as ``pair`` promotes them; None where tensors are to do it."""
    if type(a) is Number:
        if type(b) is Number:
            x, y = a.number, b.number
            kind = a.kind if _BITS[a.kind] >= _BITS[b.kind] else b.kind
        elif (type(b) is int or type(b) is bool) and -(2**31) <= b < 2**31:
            x, y, kind = a.number, b, a.kind
        else:
            return None
    elif type(b) is Number and (type(a) is int or type(a) is bool) and -(2**31) <= a < 2**31:
        x, y, kind = a, b.number, b.kind
    else:
        return None
    if kind is torch.bool:
        if type(x) is not bool or type(y) is not bool:
            kind = torch.int32
        elif exact not in _OF_BOOLEANS:
            return None
    found = exact(x, y)
    if found is None or type(found) is bool:
        return None if found is None else Number(found, torch.bool)
    bits = _BITS[kind]
    return Number(found, kind) if -1 << bits - 1 <= found < 1 << bits - 1 else Number(_wrapped(found, kind), kind)


def _whole(a: int, b: int) -> int:
    """Integer division rounds towards zero, as in ``_divide``."""
    quotient = abs(a) // abs(b or 1)
    return quotient if (a < 0) == (b < 0) else -quotient


# Of what is the same in Python; None where it need not be.
_OF_BOOLEANS: set[Any] = {
    operator.and_, operator.or_, operator.xor, operator.lt, operator.le, operator.gt, operator.ge, operator.eq,
    operator.ne,
}  # fmt: skip
_OF_INTEGERS: dict[str, Callable[[int, int], int | None]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": _whole,
    "mod": lambda a, b: a - _whole(a, b) * (b or 1),
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": lambda a, b: a << b if 0 <= b < 32 else None,
    "rshift": lambda a, b: a >> b if 0 <= b < 32 else None,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}

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
        # The last mask that was asked about, and what was found.
        self._last: tuple[Operand | None, tuple[torch.Tensor, torch.Tensor]] | None = None

    @classmethod
    def to_tensor(cls, tensor: torch.Tensor) -> Pointer:
        memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return cls(memory, Number(tensor.storage_offset(), torch.int64))

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
        if self._last is None or self._last[0] is not mask:
            self._last = mask, self._elements(mask)
        return self._last[1]

    def _elements(self, mask: Operand | None) -> tuple[torch.Tensor, torch.Tensor]:
        places = offsets = self.offsets.data
        used = torch.ones_like(offsets, dtype=torch.bool) if mask is None else value_of(mask).data.expand_as(offsets)
        if mask is not None:
            places = torch.where(used, offsets, 0)
        least, most = torch.aminmax(places) if places.numel() else (0, -1)
        # Element 0, in place of those that are not used, is there but in no memory at all.
        if least < 0 or most >= max(1, self.memory.numel()) or (not self.memory.numel() and used.any()):
            outside = used & ((offsets < 0) | (offsets >= self.memory.numel()))
            raise MachineError(f"element {offsets[outside][0]} of memory that has {self.memory.numel()}")
        return places, used

    def places(self, mask: Operand | None = None) -> Array:
        """Pairs of bytes of its memory, of the elements that are used; two elements of a byte share one."""
        offsets, used = self.elements(mask)
        size = self.memory.element_size()
        first = ((offsets if mask is None else offsets[used]).numpy().reshape(-1) * size) >> 1
        return (first[:, None] + np.arange(max(1, size >> 1))).ravel()

    @property
    def is_bytes(self) -> bool:
        """Whether its elements are."""
        return self.memory.element_size() == 1

    def load(self, mask: Operand | None = None, other: Operand | None = None) -> Value:
        places, used = self.elements(mask)
        has_any = self.memory.numel() > 0
        loaded = self.memory[places] if has_any else torch.zeros(places.shape, dtype=self.memory.dtype)
        if not places.dim():
            loaded = loaded.clone()
        if mask is None:
            return held(loaded)
        # What a masked load leaves without ``other`` is undefined: make it hurt.
        fill = (torch.nan if loaded.dtype.is_floating_point else 1 << 6) if other is None else other
        filling = fill.data.to(loaded.dtype) if isinstance(fill, Value) else _filling(fill, loaded.dtype)
        return held(torch.where(used, loaded, filling))

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
        self._parts: dict[Any, SharedMemory] = {}

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
        if i not in self._parts:
            own = self._is_part or len(self.grid) == 1
            self._parts[i] = SharedMemory(self.machine, self.data[i], self.grid if own else self.grid[i : i + 1], True)
        return self._parts[i]

    def slice(self, start: int, length: int, dim: int = 0) -> SharedMemory:
        which = int(start), length, dim
        if which not in self._parts:
            self._parts[which] = self._slice(*which)
        return self._parts[which]

    def _slice(self, start: int, length: int, dim: int) -> SharedMemory:
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
        # Of the elements of a box, from its first one.
        self._within = torch.zeros((), dtype=torch.int64)
        for side, stride in zip(self.block_shape, self._strides, strict=True):
            self._within = self._within[..., None] + torch.arange(side) * stride
        self._reach = sum((side - 1) * stride for side, stride in zip(self.block_shape, self._strides, strict=True))
        # Each is asked about where a copy starts and where it ends, by several programs too.
        self._boxes: dict[tuple[int, ...], tuple[Pointer, Value]] = {}
        self._places: dict[tuple[int, ...], Array] = {}

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
        at = tuple(map(int, coordinates))
        if at not in self._boxes:
            self._boxes[at] = self._box(at)
        return self._boxes[at]

    def _view(self, coordinates: Sequence[Any]) -> torch.Tensor | None:
        """A box as a view of the tensor's memory, if all of it exists there; what is wrong ``box`` says."""
        if len(coordinates) != len(self._shape):
            return None
        first = self._pointer.offsets.number + sum(map(operator.mul, map(int, coordinates), self._strides))
        sides = zip(map(int, coordinates), self.block_shape, self._shape, strict=True)
        if not all(0 <= at <= size - side for at, side, size in sides):
            return None
        if first < 0 or first + self._reach >= self._pointer.memory.numel():
            return None
        return self._pointer.memory.as_strided(self.block_shape, self._strides, first)

    def _box(self, coordinates: tuple[int, ...]) -> tuple[Pointer, Value]:
        if len(coordinates) != len(self._shape):
            raise MachineError(f"{len(coordinates)} coordinates for a descriptor of {len(self._shape)} dimensions")
        first = sum(map(operator.mul, coordinates, self._strides))
        places = self._within + _wrapped(first, torch.int64)
        exists = torch.ones((), dtype=torch.bool)
        for at, size, side in zip(coordinates, self._shape, self.block_shape, strict=True):
            along = at + torch.arange(side)
            exists = exists[..., None] & (along >= 0) & (along < size)
        return self._pointer + Value(places), Value(exists)

    def load(self, coordinates: Sequence[Any]) -> torch.Tensor:
        if (view := self._view(coordinates)) is not None:
            return view
        pointers, exists = self.box(coordinates)
        return pointers.load(exists, 0).data

    def store(self, coordinates: Sequence[Any], data: torch.Tensor) -> None:
        if (view := self._view(coordinates)) is not None:
            view.copy_(data)
            return
        pointers, exists = self.box(coordinates)
        pointers.store(Value(data), exists)

    def places(self, coordinates: Sequence[Any]) -> Array:
        """Of a box, as ``Pointer.places``."""
        at = tuple(map(int, coordinates))
        if at not in self._places:
            pointers, exists = self.box(at)
            self._places[at] = pointers.places(exists)
        return self._places[at]

    @property
    def memory(self) -> torch.Tensor:
        """That of its tensor."""
        return self._pointer.memory

    def add(self, coordinates: Sequence[Any], data: torch.Tensor) -> None:
        self.store(coordinates, self.load(coordinates) + data)


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
