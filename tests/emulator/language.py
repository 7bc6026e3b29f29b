"""Triton's and Gluon's functions, as far as the kernels use them, on the emulator's values.

What is missing here raises an AttributeError that names it: add it when a kernel needs it.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.emulator.machine import Machine, Task
from tests.emulator.values import (
    LAYOUT,
    TORCH_DTYPES,
    Anything,
    Barriers,
    Descriptor,
    Operand,
    Pending,
    Pointer,
    SharedMemory,
    Value,
    held,
    pair,
    value_of,
)
from tests.machine import Barrier, MachineError, Order
from tests.machine.clocks import Message
from tests.machine.tensors import Tensor

_NAMES_OF_DTYPES = {
    "fp8e4nv": "float8e4nv",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
}
_LAYOUTS = (
    "NVMMADistributedLayout", "NVMMASharedLayout", "BlockedLayout", "SliceLayout", "DotOperandLayout",
    "SwizzledSharedLayout", "AutoLayout", "DistributedLinearLayout",
)  # fmt: skip


_MATHS = ("abs", "ceil", "cos", "erf", "exp", "floor", "log", "log2", "rsqrt", "sin", "sqrt")
_RELAXED = Order.of("relaxed", "gpu")


class BarrierLayout(Anything):
    """Marks shared memory as barriers."""


class BoxLayout(Anything):
    """Says how many columns a copy may move by themselves."""

    def __init__(self, cols: int) -> None:
        self.cols = cols

    @classmethod
    def get_default_for(cls, shape: Sequence[int], dtype: Any) -> BoxLayout:
        return cls(int(shape[-1]))


# In float32 both would depend on where in memory operands lie, as vector libraries start their loops.
def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In float32, of sums in float64."""
    return (a.double() @ b.double()).float()


def exp2(x: torch.Tensor) -> torch.Tensor:
    """Rounded from float64."""
    return torch.exp2(x.double()).to(x.dtype)


def elementwise(compute: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    """A function of one value or two."""

    def apply(x: Operand, y: Operand | None = None) -> Value:
        return held(compute(value_of(x).data) if y is None else compute(*pair(x, y)))

    return apply


def _extremum(plain: Callable[..., torch.Tensor], with_nan: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    def apply(x: Operand, y: Operand, propagate_nan: bool = False) -> Value:
        return held((with_nan if propagate_nan else plain)(*pair(x, y)))

    return apply


def select(condition: Operand, x: Operand, y: Operand) -> Value:
    a, b = pair(x, y)
    return held(torch.where(value_of(condition).data, a, b))


def _reduce(compute: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    def reduce(x: Value, axis: int | None = None) -> Value:
        data = x.data.reshape(-1) if axis is None else x.data
        return held(compute(data, dim=0 if axis is None else axis))

    return reduce


def _reduced_max(data: torch.Tensor, dim: int) -> torch.Tensor:
    """The maximum, NaN only where there is nothing else."""
    if not data.dtype.is_floating_point:
        return data.amax(dim)
    is_nan = data.isnan()
    top = torch.where(is_nan, -torch.inf, data).amax(dim)
    return torch.where(is_nan.all(dim), torch.nan, top)


def _sum(data: torch.Tensor, dim: int) -> torch.Tensor:
    return data.sum(dim, dtype=data.dtype)


class Language:
    """The functions that need to know which task calls them, and the names under which kernels find all of them."""

    def __init__(self, machine: Machine, num_programs: tuple[int, ...]) -> None:
        self.machine = machine
        self.num_programs = num_programs

    @property
    def task(self) -> Task:
        return self.machine.running

    # Programs.

    def program_id(self, axis: int) -> Value:
        place = self.task.program.number
        for size in self.num_programs[:axis]:
            place //= size
        return value_of(place % self.num_programs[axis] if axis < len(self.num_programs) else 0)

    def count_programs(self, axis: int) -> Value:
        return value_of(self.num_programs[axis] if axis < len(self.num_programs) else 1)

    def warp_specialize(self, partitions: Sequence[tuple[Any, tuple]], num_warps: Any, registers: Any = None) -> None:
        """The first partition goes on in this task, the others get tasks of their own, and all end together."""
        first, *others = partitions
        here = self.task
        started = []
        for number, (function, arguments) in enumerate(others, 1):

            def body(function: Any = function, arguments: tuple = arguments) -> None:
                function(*arguments)
                self._end(self.task)

            role = f"{function.name} (partition {number} of program {here.program.number})"
            task = self.machine.spawn(here.program, number, role, body, int(value_of(num_warps[number - 1])))
            task.learn(here.message())
            started.append(task)
        here.rename(f"{first[0].name} (partition 0 of program {here.program.number})")
        first[0](*first[1])
        self._end(here)
        here.wait(lambda: all(task.greenlet.dead for task in started), lambda: "the other partitions")
        for task in started:
            here.learn(task.message())

    def _end(self, task: Task) -> None:
        if task.products:
            raise MachineError(f"{task.name} ends with a product in flight")
        if task.stores:
            raise MachineError(f"{task.name} ends before its copies have left shared memory")
        if task.copies:
            raise MachineError(f"{task.name} ends with copies to shared memory that no arrival follows")

    # Global memory.

    def tensor(self, memory: torch.Tensor) -> Tensor:
        """What the watch knows of a tensor's memory."""
        storage = memory.untyped_storage()
        name = f"a tensor of {memory.numel()} {str(memory.dtype).removeprefix('torch.')}"
        return self.machine.tensors.tensor(name, storage.data_ptr(), storage.nbytes())

    def load(self, pointer: Pointer, mask: Any = None, other: Any = None, volatile: bool = False, **_: Any) -> Value:
        tensor = self.tensor(pointer.memory)
        if volatile:
            self.task.step_back()
            places = pointer.places(mask)
            self.task.share_tensor(tensor, places, _RELAXED, reads=True)
            self.task.synchronise(tensor, places, _RELAXED, writes=False)
        else:
            self.task.read_tensor(tensor, lambda: pointer.places(mask))
        return pointer.load(mask, other)

    def store(self, pointer: Pointer, value: Operand, mask: Any = None, **_: Any) -> None:
        def same() -> bool:
            places, used = pointer.elements(mask)
            data = value_of(value).data.to(pointer.memory.dtype).expand_as(places)
            return bool((pointer.memory[places[used]] == data[used]).all())

        self.task.write_tensor(self.tensor(pointer.memory), pointer.places(mask), same, is_part=pointer.is_bytes)
        pointer.store(value, mask)

    def atomic_add(self, pointer: Pointer, value: Operand, mask: Any = None, sem: str = "", scope: str = "") -> Value:
        is_sum = pointer.memory.dtype.is_floating_point
        return self._atomic(pointer, mask, sem, scope, lambda old: old + value_of(value), is_sum)

    def atomic_xchg(self, pointer: Pointer, value: Operand, mask: Any = None, sem: str = "", scope: str = "") -> Value:
        return self._atomic(pointer, mask, sem, scope, lambda old: value)

    def atomic_and(self, pointer: Pointer, value: Operand, mask: Any = None, sem: str = "", scope: str = "") -> Value:
        return self._atomic(pointer, mask, sem, scope, lambda old: old & value_of(value))

    def atomic_cas(self, pointer: Pointer, like: Operand, value: Operand, sem: str = "", scope: str = "") -> Value:
        return self._atomic(pointer, None, sem, scope, lambda old: value if old == like else old)

    def _atomic(
        self, pointer: Pointer, mask: Any, sem: str, scope: str, new: Callable[[Value], Operand], is_sum: bool = False
    ) -> Value:
        self.task.pause()
        tensor, places = self.tensor(pointer.memory), pointer.places(mask)
        if is_sum and self.machine.tensors.ordered_sums:
            self.task.write_tensor(tensor, places)
        else:
            # As Triton has it where nothing is said.
            order = Order.of(sem or "acq_rel", scope or "gpu")
            self.task.share_tensor(tensor, places, order)
            self.task.synchronise(tensor, places[:: max(1, pointer.memory.element_size() >> 1)], order)
        old = pointer.load(mask, 0)
        pointer.store(new(old), mask)
        return old

    # Shared memory.

    def allocate_shared_memory(self, dtype: Any, shape: Sequence[int], layout: Any) -> Barriers | SharedMemory:
        made = self._allocate(_assigned_name(), dtype, shape, layout)
        self.task.program.buffers.append(made)
        return made

    def _allocate(self, name: str, dtype: Any, shape: Sequence[int], layout: Any) -> Barriers | SharedMemory:
        if isinstance(layout, BarrierLayout):
            program, names = self.task.program, [f"{name}[{i}]" for i in range(shape[0])]
            return Barriers(program, [*map(Barrier, names)], program.allocate(names))
        rows, cols = self.machine.box
        if not isinstance(layout, BoxLayout):
            return SharedMemory.allocate(self.machine, dtype, shape, name)
        return SharedMemory.allocate(self.machine, dtype, shape, name, rows, min(cols or layout.cols, layout.cols))

    # Barriers.

    def barrier_init(self, barrier: Barriers, count: int) -> None:
        barrier.one.init(count)
        self.task.write(barrier.places)

    def barrier_wait(self, barrier: Barriers, parity: Operand, pred: Operand = True) -> None:
        if not value_of(pred):
            return
        one, over = barrier.one, int(value_of(parity))
        self.task.pause()
        if not one.is_over(over):
            self.task.wait(lambda: one.is_over(over), lambda: one.awaited(over))
        task = self.task
        task.learn(one.message)
        one.seen_by(task.name, task.program.watch.wait(task.actor))

    def barrier_arrive(self, barrier: Barriers, *, count: int = 1, pred: Operand = True) -> None:
        if value_of(pred):
            self.task.pause()
            barrier.reached_by(self.task)
            barrier.one.arrive(count, self.task.message())

    def barrier_expect(self, barrier: Barriers, num_bytes: int, pred: Operand = True) -> None:
        if value_of(pred):
            self.task.pause()
            barrier.one.arrive(1, self.task.message(), num_bytes)

    def fence(self, cluster: bool = False) -> None:
        self.task.fence()

    def thread_barrier(self) -> None:
        """The warps of a partition are one task here."""

    # Copies.

    def copy_in(self, desc: Descriptor, at: Any, barrier: Barriers, memory: SharedMemory, pred: Operand = True) -> None:
        if not value_of(pred):
            return
        _check_box(desc, memory)

        def finish(message: Message) -> None:
            memory.data.copy_(desc.load(at))
            barrier.one.land(desc.num_bytes, message)

        self.task.pause()
        barrier.reached_by(self.task)
        self.task.read_tensor(self.tensor(desc.memory), lambda: desc.places(at))
        self.task.start_load(memory.places, finish, barrier.program)

    def copy_by_threads(self, memory: SharedMemory, pointer: Pointer, mask: Any = None, **_: Any) -> None:
        """Zeros where the mask is false."""
        if tuple(memory.shape) != tuple(pointer.offsets.shape) or memory.dtype != pointer.dtype.element_ty:
            raise MachineError(f"a copy of {pointer.offsets.shape} to shared memory of {memory.dtype}{memory.shape}")
        self.task.pause()
        self.task.read_tensor(self.tensor(pointer.memory), lambda: pointer.places(mask))
        self.task.copies.append((memory, pointer, mask))

    def arrive_after_copies(self, barrier: Barriers, increment_count: bool = True) -> None:
        """Every thread arrives once its copies are complete. Places that several copies share are written once."""
        if increment_count:
            raise MachineError("an arrival that the barrier awaits in addition")
        task = self.task
        copies, task.copies = task.copies, []

        def finish(message: Message) -> None:
            for memory, pointer, mask in copies:
                memory.data.copy_(pointer.load(mask, 0).data)
            barrier.one.arrive(32 * task.warps, message)

        task.pause()
        task.start_copies(np.unique(np.concatenate([memory.places for memory, _, _ in copies])), finish)

    def copy_out(self, desc: Descriptor, at: Any, memory: SharedMemory) -> None:
        self._leave(memory, desc, lambda: desc.store(at, memory.data))
        self.task.write_tensor(self.tensor(desc.memory), desc.places(at), copies=True)

    def reduce_out(self, desc: Descriptor, at: Any, memory: SharedMemory) -> None:
        self._leave(memory, desc, lambda: desc.add(at, memory.data))
        if self.machine.tensors.ordered_sums:
            self.task.write_tensor(self.tensor(desc.memory), desc.places(at), copies=True)
        else:
            self.task.share_tensor(self.tensor(desc.memory), desc.places(at), _RELAXED, copies=True)

    def _leave(self, memory: SharedMemory, desc: Descriptor, move: Callable[[], None]) -> None:
        _check_box(desc, memory)
        self.task.pause()
        self.task.stores.append(self.task.start_read([memory.places], "copy", move))

    def copy_out_wait(self, outstanding: int) -> None:
        self.task.pause()
        self.task.drain(self.task.stores, outstanding)

    # Matrix products.

    def product(
        self, a: Value | SharedMemory, b: SharedMemory, acc: Value | Pending, *, use_acc: Operand = True,
        is_async: bool = False, **_: Any
    ) -> Value | Pending:  # fmt: skip
        adds = bool(value_of(use_acc))
        pending = Pending((a.shape[0], b.shape[1]))
        if a.data.dtype != b.data.dtype:
            raise MachineError(f"a product of {a.dtype} and {b.dtype}")

        def finish() -> None:
            product = matmul(a.data, b.data)
            if adds:
                product = product + (acc.result if isinstance(acc, Pending) else acc).data
            pending.set(Value(product))

        places = [x.places for x in (a, b) if isinstance(x, SharedMemory)]
        self.task.pause()
        self.task.products.append(self.task.start_read(places, "product", finish))
        if is_async:
            return pending
        self.task.drain(self.task.products, 0)
        return pending.result

    def product_wait(self, outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
        self.task.pause()
        self.task.drain(self.task.products, outstanding)
        given = [x.result if isinstance(x, Pending) and x.is_complete else x for x in deps]
        return given[0] if len(given) == 1 else tuple(given)

    # Names.

    def shared_names(self) -> dict[str, Any]:
        """What ``tl`` and ``gl`` have in common."""
        return {_NAMES_OF_DTYPES.get(dtype.name, dtype.name): dtype for dtype in TORCH_DTYPES} | {
            "constexpr": lambda x: x,
            "tensor": Value,
            "where": select,
            "exp2": elementwise(exp2),
            **{name: elementwise(getattr(torch, name)) for name in _MATHS},
            # A NaN gives way to a number, as in the instructions, unless it is to go on.
            "maximum": _extremum(torch.fmax, torch.maximum),
            "minimum": _extremum(torch.fmin, torch.minimum),
            "PropagateNan": SimpleNamespace(ALL=True),
            "fma": _fma,
            "umulhi": elementwise(_upper_product),
            "cdiv": lambda a, b: (a + b - 1) // b,
            "max": _reduce(_reduced_max),
            "min": _reduce(lambda data, dim: -_reduced_max(-data, dim)),
            "sum": _reduce(_sum),
            "arange": lambda start, stop, layout=None: Value(torch.arange(start, stop, dtype=torch.int32)),
            "full": _full,
            "zeros": lambda shape, dtype, layout=None: _full(shape, 0, dtype),
            "cast": lambda x, dtype: value_of(x).to(dtype),
            "reshape": lambda x, shape: x.reshape(*shape),
            "permute": lambda x, order: x.permute(*order),
            "join": lambda a, b: Value(torch.stack(pair(a, b), -1)),
            "split": lambda x: tuple(Value(each) for each in x.data.unbind(-1)),
            "trans": lambda x: x.permute(1, 0),
            "dot": _dot,
            "expand_dims": lambda x, axis: Value(x.data.unsqueeze(axis)),
            "static_range": range,
            "range": lambda *args, **options: range(*args),
            "static_assert": _static_assert,
            "program_id": self.program_id,
            "num_programs": self.count_programs,
            "load": self.load,
            "store": self.store,
            "atomic_add": self.atomic_add,
            "atomic_xchg": self.atomic_xchg,
            "atomic_and": self.atomic_and,
            "atomic_cas": self.atomic_cas,
            "broadcast_to": lambda x, shape: Value(x.data.expand(*(int(n) for n in shape))),
            "cumsum": lambda x, axis: Value(x.data.cumsum(axis, dtype=x.data.dtype)),
            "debug_barrier": self.thread_barrier,
            "multiple_of": lambda x, _: x,
            "max_contiguous": lambda x, _: x,
        }

    def triton(self) -> SimpleNamespace:
        return SimpleNamespace(**self.shared_names())

    def gluon(self) -> SimpleNamespace:
        layouts = dict.fromkeys(_LAYOUTS, LAYOUT)
        return SimpleNamespace(
            **self.shared_names() | layouts | {"NVMMASharedLayout": BoxLayout},
            to_tensor=value_of,
            convert_layout=lambda x, layout, assert_trivial=False: x,
            set_auto_layout=lambda x, layout: x,
            shared_memory_descriptor=SharedMemory,
            allocate_shared_memory=self.allocate_shared_memory,
            warp_specialize=self.warp_specialize,
            num_warps=lambda: self.task.warps,
            barrier=self.thread_barrier,
            thread_barrier=self.thread_barrier,
        )

    def barriers(self) -> SimpleNamespace:
        return SimpleNamespace(
            init=self.barrier_init, wait=self.barrier_wait, arrive=self.barrier_arrive, expect=self.barrier_expect,
            MBarrierLayout=BarrierLayout,
        )  # fmt: skip


def _assigned_name() -> str:
    """What the kernel calls the memory it allocates: ``ring.full`` where ``ring = make_ring(...)`` assigns ``full``."""
    names: list[str] = []
    frame = sys._getframe(2)
    while frame.f_back is not None and "emulator" not in frame.f_globals.get("__name__", ""):
        # A kernel's own globals hold no name of its module.
        found = re.match(r"\s*(\w+) = ", linecache.getline(frame.f_code.co_filename, frame.f_lineno))
        names[:0] = [found[1]] if found else []
        frame = frame.f_back
        while frame.f_back is not None and frame.f_code.co_name == "__call__":
            frame = frame.f_back
    return ".".join(names) or "memory"


def _upper_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The upper half of the 64 bits of a product of int32 taken as unsigned."""
    x, y = (each.numpy().astype(np.uint32).astype(np.uint64) for each in (a, b))
    return torch.from_numpy((x * y >> np.uint64(32)).astype(np.uint32).view(np.int32).copy().reshape(a.shape))


def _full(shape: Sequence[int], value: Operand, dtype: Any, layout: Any = None) -> Value:
    return Value(value_of(value).data.to(TORCH_DTYPES[dtype]).expand(tuple(int(n) for n in shape)).clone())


def _fma(a: Operand, b: Operand, c: Operand) -> Value:
    """The product is not rounded: in float64 it is exact."""
    x, y, z = (value_of(each).data for each in (a, b, c))
    return Value((x.double() * y.double() + z.double()).float())


def _dot(a: Value, b: Value, acc: Value | None = None, input_precision: str = "ieee") -> Value:
    """A product that is over when it returns."""
    if input_precision != "ieee":
        raise MachineError(f"a product in {input_precision}")
    if a.data.dtype != b.data.dtype:
        raise MachineError(f"a product of {a.dtype} and {b.dtype}")
    product = matmul(a.data, b.data)
    return Value(product if acc is None else product + acc.data)


def _static_assert(condition: Any, message: str = "") -> None:
    if not condition:
        raise MachineError(message or "a static assertion does not hold")


def _check_box(desc: Descriptor, memory: SharedMemory) -> None:
    if tuple(memory.shape) != desc.block_shape or memory.dtype != desc.dtype:
        raise MachineError(f"a box of {desc.dtype}{desc.block_shape} into memory of {memory.dtype}{memory.shape}")
