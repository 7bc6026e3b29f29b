"""A launch as data: a kernel, its arguments as trees of records, and the specialisation that they ask for.

An argument is a leaf or a record, a NamedTuple of leaves and records. The field's name says what a leaf is to the
compiler: one in capitals is a constant, one that begins with ``stride`` a number that counts by its divisibility by 16,
any other a number that counts by its size alone, 32 bits or 64. So other lengths need no other build. None and
functions are constants wherever they are.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.gpu.named import DeviceFunction, loaded
from flashtile.call.backend import MEANWHILE

# Whether Triton had to compile what this thread asked for last, which its cache did not have.
COMPILED: ContextVar[bool] = ContextVar("COMPILED", default=False)

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
    torch.int8: "i8",
    torch.bool: "i1",
}


# How a box lies in shared memory: as Gluon has it by default, or row after row.
DEFAULT, PLAIN = "default", "plain"


class Pointer(NamedTuple):
    """A tensor that a launch reads or writes by address.

    Attributes:
        dtype: Dtype of its elements.
        operand: The operand that contains it: a field of a call's record of tensors, ``operands[0]`` for one of a
            tuple, or a name of what a plan makes; see ``host.Launcher``.
        offset: Bytes from the operand's first element, a multiple of 16.
        aligned: Whether the address is a multiple of 16, as newly allocated memory's is.
    """

    dtype: torch.dtype
    operand: str
    offset: int = 0
    aligned: bool = True


def pointer(tensor: Tensor | None, operand: str) -> Pointer | None:
    """The ``Pointer`` to a tensor of a layout, None for an absent one."""
    return None if tensor is None else Pointer(tensor.dtype, operand, 0, tensor.data_ptr() % 16 == 0)


class Captured(NamedTuple):
    """A number of a call that is written into the block at each launch, as 64 bits.

    Attributes:
        operand: As in ``Pointer``.
        kind: "fp64" or "i64".
    """

    operand: str
    kind: str


class TensorMap(NamedTuple):
    """A tensor that TMA copies box by box.

    Attributes:
        dtype: Dtype of its elements.
        shape: Elements along each dimension, the contiguous one last.
        strides: In elements.
        box: Elements that one descriptor operation moves.
        layout: How the box lies in shared memory, ``DEFAULT`` or ``PLAIN``, or None where Triton chooses it.
        operand: As in ``Pointer``; maps are given it where a record is built.
        offset: As in ``Pointer``.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    layout: str | None = None
    operand: str = ""
    offset: int = 0

    @property
    def type(self) -> str:
        """As Triton spells it in a signature."""
        ending = "" if self.layout is None else f",{_in_shared(self.dtype, self.box, self.layout)!r}"
        return f"tensordesc<{TYPES[self.dtype]}{list(self.box)}{ending}>"

    def descriptor(self, base: Tensor) -> Any:
        """The descriptor that Triton's own launcher takes, for the memory of ``base``."""
        if self.layout is None:
            from triton.tools.tensor_descriptor import TensorDescriptor

            return TensorDescriptor(base, list(self.shape), list(self.strides), list(self.box))
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        layout = _in_shared(self.dtype, self.box, self.layout)
        return GluonDescriptor(base, list(self.shape), list(self.strides), list(self.box), layout)


@functools.cache
def _in_shared(dtype: torch.dtype, box: tuple[int, ...], layout: str) -> Any:
    """Gluon's layout of a box in shared memory."""
    from triton.experimental.gluon import language as gl

    if layout == PLAIN:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * dtype.itemsize, rank=len(box))
    dtypes = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
    dtypes |= {torch.float8_e4m3fn: gl.float8e4nv, torch.uint8: gl.uint8}
    return gl.NVMMASharedLayout.get_default_for(list(box), dtypes[dtype])


class Const(NamedTuple):
    """A number that the code is compiled for, in a field that elsewhere is one of run time."""

    value: Any


class Launch(NamedTuple):
    """A kernel with its grid, arguments and options.

    Attributes:
        kernel: The ``@triton.jit`` or ``@gluon.jit`` function, or its ``DeviceFunction``; arguments are then in
            the order of its parameters.
        programs: Size of the one-dimensional grid; nothing is launched for 0.
        arguments: By name, trees with leaves ``Pointer`` or ``TensorMap``, numbers, constants, and None for what is
            absent.
        options: The compiler's: warps, stages, registers.
        cluster: Programs that start together and reach each other's shared memory; the build does not depend on it.
    """

    kernel: Any
    programs: int
    arguments: Mapping[str, Any]
    options: Mapping[str, int]
    cluster: int = 1


# What a leaf's field says of it.
_NUMBER, _STRIDE, _CONSTANT = range(3)
OPERANDS = (Pointer, TensorMap, Captured)
_LEAVES = (*OPERANDS, Const)


def _rule(name: str) -> int:
    return _CONSTANT if name.isupper() else _STRIDE if name.startswith("stride") else _NUMBER


@functools.cache
def _rules_of(names: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(map(_rule, names))


def parameters_of(launch: Launch) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The names of a kernel's parameters, and what each says of a leaf."""
    is_named = isinstance(launch.kernel, DeviceFunction)
    names = tuple(launch.arguments) if is_named else tuple(launch.kernel.arg_names)
    return names, _rules_of(names)


def lower(launch: Launch) -> tuple[tuple[Any, ...], list[Any]]:
    """What a launch's build depends on, and the leaves that it takes at run time, in order."""
    names, rules = parameters_of(launch)
    key: list[Any] = [launch.kernel, *launch.options.items()]
    leaves: list[Any] = []
    arguments = launch.arguments
    _lower([arguments[name] for name in names], *_sorted(rules), key, leaves)
    return tuple(key), leaves


def parameter_of_map(launch: Launch, operand: str) -> int:
    """The number, among the parameters of the compiled kernel, of the tensor map of an operand."""
    place = 0
    for leaf in lower(launch)[1]:
        if isinstance(leaf, TensorMap):
            if leaf.operand == operand:
                return place
            place += 2 * len(leaf.shape)  # its lengths and strides
        place += 1
    raise LookupError(f"{launch.kernel.__name__} has no map of {operand}")


@functools.cache
def _sorted(rules: tuple[int, ...]) -> tuple[Callable[[Any], Any] | None, tuple[tuple[int, int], ...]]:
    """What reads the constants of a record with these rules at once, and the other fields' places and rules."""
    constants = [place for place, rule in enumerate(rules) if rule == _CONSTANT]
    others = tuple((place, rule) for place, rule in enumerate(rules) if rule != _CONSTANT)
    return operator.itemgetter(*constants) if constants else None, others


@functools.cache
def _sorted_of(record: Any) -> tuple[Callable[[Any], Any] | None, tuple[tuple[int, int], ...]]:
    return _sorted(_rules_of(record._fields))


def _lower(
    values: Any, constants: Callable[[Any], Any] | None, others: tuple[tuple[int, int], ...], key: list[Any],
    leaves: list[Any],
) -> None:  # fmt: skip
    # It sees some hundred leaves, once for each new length: written for speed, the most frequent first.
    if constants is not None:
        key.append(constants(values))
    for place, rule in others:
        value = values[place]
        kind: Any = type(value)
        if value is None:
            key.append(None)
        elif kind is int:
            width = "i32" if -(2**31) <= value < 2**31 else "i64"  # as fits_32_bits has it, but a call takes longer
            key.append((width, value % 16 == 0) if rule == _STRIDE else width)
            leaves.append(value)
        elif kind is Pointer:
            key += value.dtype, value.aligned
            leaves.append(value)
        elif kind is float:
            key.append(float)
            leaves.append(value)
        elif kind is TensorMap:
            key.append((value.dtype, value.box, value.layout))
            leaves.append(value)
        elif kind is Const:
            key.append(value)
        elif kind is Captured:
            key.append(value.kind)
            leaves.append(value)
        elif isinstance(value, tuple):
            key.append(kind)
            _lower(value, *(_sorted_of(kind) if kind is not tuple else _sorted((rule,) * len(value))), key, leaves)
        else:
            key.append(value)


def mapped(launch: Launch, leaf: Callable[[str, Any, bool], Any]) -> dict[str, Any]:
    """The arguments with ``leaf(name, value, is_constant)`` in place of each leaf, named like ``call.q.ptr``."""
    names, rules = parameters_of(launch)
    return {name: _mapped(name, launch.arguments[name], rule, leaf) for name, rule in zip(names, rules, strict=True)}


def with_functions(launch: Launch) -> Launch:
    """The launch with the functions that it names in their places, for what runs device code itself."""
    arguments = mapped(launch, lambda _, value, is_constant: loaded(value))
    return launch._replace(kernel=loaded(launch.kernel), arguments=arguments)


def _mapped(name: str, value: Any, rule: int, leaf: Callable[[str, Any, bool], Any]) -> Any:
    if rule == _CONSTANT or not isinstance(value, tuple):
        is_memory = isinstance(value, Tensor) or hasattr(value, "base")  # once a launcher has put them in their places
        return leaf(name, value, rule == _CONSTANT or not (is_memory or type(value) in (int, float)))
    if isinstance(value, _LEAVES):
        return leaf(name, value, isinstance(value, Const))
    kind = type(value)
    fields = [(str(n), rule) for n in range(len(value))]
    if kind is not tuple:
        names = kind._fields  # type: ignore[attr-defined]
        fields = list(zip(names, _rules_of(names), strict=True))
    made = [_mapped(f"{name}.{field}", each, of, leaf) for (field, of), each in zip(fields, value, strict=True)]
    return kind(*made) if kind is not tuple else tuple(made)


@dataclass(frozen=True)
class Specialisation:
    """The part of a launch that the compiled code depends on; leaves are named like ``call.q.ptr``.

    Attributes:
        signature: Type of each run-time leaf, in order.
        constexprs: Value of each constant leaf.
        divisible: Run-time leaves that the compiler may assume to be multiples of 16.
        tree: By parameter of the kernel, in order, its record with each leaf's name in the leaf's place.
    """

    signature: dict[str, str]
    constexprs: dict[str, Any]
    divisible: tuple[str, ...]
    tree: dict[str, Any]


# Gluon's modules import one another in circles, and a thread may enter a package that another is still importing: each
# then waits for what the other has. So all that a launch is compiled with is imported by one thread at a time.
IMPORTS = threading.Lock()


def specialise(launch: Launch) -> Specialisation:
    """The types and values with which a launch must be compiled; imports what its kernel is made of."""
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    divisible: list[str] = []

    def leaf(name: str, value: Any, is_constant: bool) -> str:
        if is_constant:
            constexprs[name] = value.value if isinstance(value, Const) else loaded(value)
        elif isinstance(value, TensorMap):
            signature[name] = value.type
        elif isinstance(value, Captured):
            signature[name] = value.kind
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif isinstance(value, int):
            signature[name] = "i32" if fits_32_bits(value) else "i64"
            if _rule(name.rpartition(".")[2]) == _STRIDE and value % 16 == 0:
                divisible.append(name)
        else:
            signature[name] = f"*{TYPES[value.dtype]}"
            if value.aligned:
                divisible.append(name)
        return name

    with IMPORTS:
        from triton.experimental.gluon import _runtime  # noqa: F401

        loaded(launch.kernel)
        tree = mapped(launch, leaf)
    return Specialisation(signature, constexprs, tuple(divisible), tree)


def fits_32_bits(value: int) -> bool:
    """Whether an integer is passed as i32."""
    return -(2**31) <= value < 2**31


def compile_kernel(kernel: Any, what: Specialisation, options: Mapping[str, object], target: Any) -> Any:
    """Triton's compiled kernel for a ``GPUTarget``, which need not be the machine's.

    ``MEANWHILE`` is called once the front end is done, a fourth of a build: the rest holds no lock of Python's.
    """
    import triton

    source, after = source_of(kernel, what, target.backend == "hip"), MEANWHILE.get()
    MEANWHILE.set(None)
    COMPILED.set(False)
    source.make_ir = functools.partial(_make_ir, source.make_ir, after)
    return triton.compile(source, target=target, options=dict(options))


def _make_ir(make: Callable[..., Any], after: Callable[[], None] | None, *given: Any) -> Any:
    COMPILED.set(True)
    made = make(*given)
    if after is not None:
        after()
    return made


def source_of(kernel: Any, what: Specialisation, amd: bool) -> Any:
    """What Triton compiles, for a GPU of AMD or another."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = loaded(kernel)
    if [*what.tree] != [*kernel.arg_names]:
        raise ValueError(f"{kernel.__name__} takes {', '.join(kernel.arg_names)}, not {', '.join(what.tree)}")
    paths = {name: path for number, each in enumerate(what.tree.values()) for name, path in _paths(each, (number,))}
    # The innermost first: Triton 3.6 learns of a record's constants when it is given one of the record around it.
    constexprs = sorted(what.constexprs.items(), key=lambda each: -len(paths[each[0]]))
    return (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        {name: _types(each, what.signature) for name, each in what.tree.items()},
        constexprs={paths[name]: value for name, value in constexprs},
        attrs={paths[name]: _divisible_by_16(what.signature[name], amd) for name in what.divisible},
    )


def text_of(key: tuple[Any, ...]) -> str | None:
    """What ``lower`` says a build depends on as a text, the same in every process; None for what has no such text."""
    try:
        return _text(key)
    except TypeError:
        return None


def _text(value: Any) -> str:
    kind = type(value)
    if value is None or kind in (bool, int, float, str, torch.dtype, DeviceFunction):
        return repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if kind is tuple:
        return f"({','.join(map(_text, value))})"
    if kind is Const:
        return f"Const({_text(value.value)})"
    raise TypeError(kind.__name__)


def leaf_names(tree: Mapping[str, Any]) -> list[str]:
    """The names of a ``Specialisation.tree``, in order."""
    return [name for each in tree.values() for name, _ in _paths(each, ())]


def _paths(tree: Any, path: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name of each leaf and where it is."""
    if isinstance(tree, str):
        yield tree, path
    else:
        for number, each in enumerate(tree):
            yield from _paths(each, (*path, number))


def _types(tree: Any, signature: Mapping[str, str]) -> Any:
    if isinstance(tree, str):
        return signature.get(tree, "constexpr")
    made = [_types(each, signature) for each in tree]
    return type(tree)(*made) if type(tree) is not tuple else tuple(made)


def _divisible_by_16(kind: str, amd: bool) -> list[list[object]]:
    attributes: list[list[object]] = [["tt.divisibility", 16]]
    # On AMD such a pointer is also compiled as reaching less than 2 GiB, which is so for most tensors.
    return [*attributes, ["tt.pointer_range", 32]] if amd and kind.startswith("*") else attributes
