"""Runs Gluon kernels for Hopper on a CPU, as they stand in the source: their numbers, and what they do to each other.

``launch`` takes a kernel, a grid and the arguments of a launch. Every partition of ``gl.warp_specialize`` in every
program becomes a task; tasks take turns in an order drawn from a seed, and copies and matrix products complete at some
moment between their start and the wait for them. README.md says how to read its errors: ``MachineError`` for

- a deadlock, with what each task waits for,
- a race: an access to shared memory that no barrier, wait or fence orders behind a conflicting one, whatever the order
  was in this run; the same in global memory, where atomics order too,
- a product read before its wait, a partition that ends with copies or products in flight, more arrivals at a barrier
  than it counts, an access outside a tensor's memory.

It does not model layouts, registers or time, nor races between the threads of one partition: the compiler answers for
those. Shared memory starts as NaN.

Plain ``@triton.jit`` helpers that a kernel calls run here too. Inline assembly does not: ``replacements`` gives such
functions a meaning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import ConstexprFunction, JITFunction

from flashtile.backends.gpu.launch import Const, Launch, mapped
from tests.emulator.cluster import ClusterLanguage
from tests.emulator.machine import Machine
from tests.emulator.values import Descriptor, Pointer, Value, value_of
from tests.machine import DeadlockError, MachineError, RaceError

__all__ = ["DeadlockError", "MachineError", "RaceError", "Value", "launch"]


def launch(
    kernel: Any,
    grid: Sequence[int],
    arguments: Sequence[Any],
    *,
    replacements: Mapping[Any, Callable[..., Any] | str] | None = None,
    seed: int = 0,
    resident: int | None = None,
    ordered_sums: bool = False,
    cluster: int = 1,
) -> None:
    """Runs a kernel to its end.

    Args:
        kernel: A ``@gluon.jit`` function.
        grid: Programs along each axis.
        arguments: As for a launch, in order; tensors must be on the CPU.
        replacements: What to call instead of some of the functions that the kernel calls; a method of the
            language by its name.
        seed: Draws the order of events.
        resident: Programs that run at once, all of them if not given; the others start in order.
        ordered_sums: Whether what is added to tensors must come in an order that does not depend on the run.
        cluster: Programs of a cluster.

    Raises:
        MachineError: The kernel does what hardware does not forgive.
    """
    total = torch.Size(tuple(grid)).numel()
    machine = Machine(seed, resident or total, total, ordered_sums, cluster)
    run_on(machine, range(total), kernel, grid, arguments, replacements or {})


def run_on(
    machine: Machine,
    programs: Iterable[int],
    kernel: Any,
    grid: Sequence[int],
    arguments: Sequence[Any],
    replacements: Mapping[Any, Callable[..., Any] | str],
) -> None:
    """Runs some programs of a grid on a machine."""
    binding = _Binding(ClusterLanguage(machine, tuple(int(n) for n in grid)), replacements)
    function = binding.of(kernel)
    leaves = []

    def leaf(_: str, value: Any, is_constant: bool) -> Any:
        value = value.value if isinstance(value, Const) else value if is_constant else _argument(value)
        leaves.append(binding.of(value) if isinstance(value, JITFunction) else value)
        return leaves[-1]

    launch = Launch(kernel, 1, dict(zip(kernel.arg_names, arguments, strict=True)), {})
    given = list(mapped(launch, leaf).values())
    # Of boxes of rows, (..., rows, 1, columns).
    sides = [each.block_shape[-3:] for each in leaves if isinstance(each, Descriptor) and len(each.block_shape) > 3]
    sides = [(rows, cols) for rows, one, cols in sides if one == 1 and rows > 1]
    machine.box = (min(rows for rows, _ in sides), min(cols for _, cols in sides)) if sides else (0, 0)
    threads = torch.get_num_threads()
    # The tiles are small, and threads that wait for each other cost more than they help.
    torch.set_num_threads(1)
    try:
        machine.run({program: lambda: function(*given) for program in programs})
    finally:
        torch.set_num_threads(threads)


def _argument(x: Any) -> Any:
    if x is None:
        return None
    if isinstance(x, TensorDescriptor):
        return Descriptor(x)
    if isinstance(x, torch.Tensor):
        return Pointer.to_tensor(x)
    return value_of(x)


class _Function:
    """A device function, bound to the emulator when first called."""

    def __init__(self, source: FunctionType, binding: _Binding) -> None:
        self._source = source
        self._binding = binding
        self._bound: FunctionType | None = None
        self.name = source.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._bound is None:
            self._bound = self._binding.rebuilt(self._source)
        return self._bound(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any) -> Any:
        if instance is None:
            return self
        if self._bound is None:
            self._bound = self._binding.rebuilt(self._source)
        return MethodType(self._bound, instance)


class _Binding:
    """Gives functions written for the compiler the emulator's names instead of its own."""

    def __init__(self, language: ClusterLanguage, replacements: Mapping[Any, Callable[..., Any] | str]) -> None:
        self._known: dict[int, Any] = {}
        self._kept: list[Any] = []
        for original, mine in ((tl, language.triton()), (gl, language.gluon()), (mbarrier, language.barriers())):
            self._learn(original, mine)
            for name, function in vars(mine).items():
                # A module may have taken a function out of its namespace.
                if inspect.isfunction(getattr(original, name, None)):
                    self._learn(getattr(original, name), function)
        for original, mine in {
            hopper.fence_async_shared: language.fence,
            hopper.warpgroup_mma: language.product,
            hopper.warpgroup_mma_wait: language.product_wait,
            tma.store_wait: language.copy_out_wait,
            async_copy.mbarrier_arrive: language.arrive_after_copies,
            **{getattr(async_copy, name): language.copy_by_threads
               for name in ("async_load", "async_copy_global_to_shared") if hasattr(async_copy, name)},
            **{getattr(tma, name): language.copy_in for name in ("async_load", "async_copy_global_to_shared")
               if hasattr(tma, name)},
            **{getattr(tma, name): language.copy_out for name in ("async_store", "async_copy_shared_to_global")
               if hasattr(tma, name)},
            **replacements,
        }.items():  # fmt: skip
            self._learn(original, getattr(language, mine) if isinstance(mine, str) else mine)

    def _learn(self, original: Any, mine: Any) -> None:
        self._known[id(original)] = mine
        # An id is only good while its object lives.
        self._kept.append(original)

    def of(self, x: Any) -> Any:
        """The emulator's counterpart of anything a device function may name."""
        if id(x) in self._known:
            return self._known[id(x)]
        if isinstance(x, tl.constexpr):
            return self.of(x.value)
        if isinstance(x, JITFunction):
            mine: Any = _Function(x.fn, self)
        elif isinstance(x, ConstexprFunction):
            # Its arguments are what it would make of them.
            mine = x.fn
        elif inspect.isclass(x) and getattr(x, "__triton_aggregate__", False):
            mine = self._aggregate(x)
        elif isinstance(x, ModuleType):
            mine = _Module(x, self)
        elif isinstance(x, tuple):
            mine = tuple(self.of(each) for each in x)
        else:
            return x
        self._learn(x, mine)
        return mine

    def rebuilt(self, source: FunctionType) -> FunctionType:
        names = {name: self.of(source.__globals__[name]) for name in _names(source.__code__)
                 if name in source.__globals__}  # fmt: skip
        names["__builtins__"] = source.__builtins__
        closure = None
        if source.__closure__:
            closure = tuple(type(cell)(self.of(cell.cell_contents)) for cell in source.__closure__)
        function = FunctionType(source.__code__, names, source.__name__, source.__defaults__, closure)
        function.__kwdefaults__ = source.__kwdefaults__
        return function

    def _aggregate(self, wrapped: Any) -> Any:
        """The class behind Triton's wrapper, its methods bound."""
        plain = inspect.getclosurevars(wrapped.__new__).nonlocals["cls"]
        body: dict[str, Any] = {}
        for name, member in vars(plain).items():
            if isinstance(member, JITFunction):
                body[name] = self.of(member)
            elif hasattr(member, "fn"):
                body[name] = _Function(member.fn, self)

        def fill(instance: Any, *values: Any) -> None:
            vars(instance).update(zip(plain.__annotations__, values, strict=True))

        return type(plain.__name__, (), {"__init__": fill, **body})


def _names(code: CodeType) -> set[str]:
    """Every name that a function and the functions inside it look up."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*(_names(each) for each in inner))


class _Module:
    """A module of device functions, its names bound when asked for."""

    def __init__(self, module: ModuleType, binding: _Binding) -> None:
        self._module = module
        self._binding = binding

    def __getattr__(self, name: str) -> Any:
        return self._binding.of(getattr(self._module, name))
