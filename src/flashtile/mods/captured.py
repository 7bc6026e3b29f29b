"""What a function reads besides its arguments: tensors and numbers of closures, globals, defaults and partials.

``captured`` walks over a function in an order that its code alone decides. What it finds that is neither tensor nor
number is the function's key: two functions with equal keys and as many tensors compute the same but for values.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# A step from a function to what it reads: ("cell", 0), ("global", name), ("item", 1), ("attr", name) and so on.
Path = tuple[tuple[str, Any], ...]
# Their attributes are functions that every call finds the same.
_CONSTANT_MODULES = ("torch", "math", "builtins", "numpy", "operator", "functools", "itertools", "typing", "flashtile")


class _Same:
    """An object in a key, equal to itself alone; it is kept alive, so that no other gets its address."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(eq=False)
class Captured:
    """What a function reads.

    Attributes:
        key: All that is neither a tensor nor a number that may vary.
        tensors: Each once.
        numbers: Ints and floats that may vary, in order.
        tensor_paths: Where each tensor is found first.
        number_paths: Where each number is.
    """

    key: list[Any] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    numbers: list[int | float] = field(default_factory=list)
    tensor_paths: list[Path] = field(default_factory=list)
    number_paths: list[Path] = field(default_factory=list)


def captured(f: Callable[..., Any]) -> Captured:
    """What a function reads."""
    walk = _Walk(None)
    walk.visit(f, ())
    return walk.found


def with_numbers(f: Callable[..., Any], number: Callable[[int], Any]) -> Any:
    """A copy of a function whose n-th captured number is ``number(n)``; tensors are those of f."""
    return _Walk(number).visit(f, ())


class _Walk:
    """One walk; with ``number`` it makes a copy."""

    def __init__(self, number: Callable[[int], Any] | None) -> None:
        self.found, self._number = Captured(), number
        self._tensors: dict[int, int] = {}
        self._functions: dict[int, Any] = {}

    def visit(self, x: Any, path: Path, chains: frozenset[tuple[str, ...]] | None = None, fixed: bool = False) -> Any:
        """x, or the copy of it; ``chains``: which attributes of it a function reads; ``fixed``: no copy is possible."""
        key, kind = self.found.key, type(x)
        if isinstance(x, Tensor):
            key.append(self._tensor(x, path))
        elif kind in (int, float) and not fixed:
            return self._of_number(x, kind, path)
        elif kind is types.FunctionType:
            return self._function(x, path, None)
        elif kind is functools.partial:
            key.append("partial")
            inner = self.visit(x.func, (*path, ("attr", "func")))
            given = self.visit(x.args, (*path, ("attr", "args")))
            named = self.visit(x.keywords, (*path, ("attr", "keywords")))
            return x if self._number is None else functools.partial(inner, *given, **named)
        elif kind is types.MethodType:
            return self._function(x.__func__, (*path, ("attr", "__func__")), x.__self__)
        elif kind in (tuple, list) or (isinstance(x, tuple) and hasattr(x, "_fields")):
            key.append((kind, len(x)))
            made = [self.visit(each, (*path, ("item", n)), None, fixed) for n, each in enumerate(x)]
            return x if self._number is None else kind(*made) if hasattr(x, "_fields") else kind(made)
        elif kind is dict:
            key.append((dict, *map(_plain, x)))
            items = {name: self.visit(each, (*path, ("item", name)), None, fixed) for name, each in x.items()}
            return x if self._number is None else items
        elif kind in (bool, int, float, str, type(None), torch.dtype, torch.device, complex, bytes):
            key.append((kind, repr(x) if kind is float else x))
        else:
            self._object(x, path, chains)
        return x

    def _tensor(self, x: Tensor, path: Path) -> tuple[str, int]:
        known = self._tensors.setdefault(id(x), len(self.found.tensors))
        if known == len(self.found.tensors):
            self.found.tensors.append(x)
            self.found.tensor_paths.append(path)
        return "tensor", known

    def _of_number(self, x: Any, kind: type, path: Path) -> Any:
        self.found.key.append(kind)
        self.found.numbers.append(x)
        self.found.number_paths.append(path)
        return x if self._number is None else self._number(len(self.found.numbers) - 1)

    def _object(self, x: Any, path: Path, chains: frozenset[tuple[str, ...]] | None) -> None:
        """An object of any class: the attributes that are read of it, or if it is used otherwise it itself."""
        key = self.found.key
        of = x.__name__ if isinstance(x, types.ModuleType) else ""
        if of.partition(".")[0] in _CONSTANT_MODULES or isinstance(x, type) or not chains or () in chains:
            if callable(x) and not isinstance(x, (type, types.BuiltinFunctionType)) and not of:
                call = vars(type(x)).get("__call__")
                if isinstance(call, types.FunctionType):
                    self._function(call, (*path, ("attr", "__call__"), ("attr", "__func__")), x)
                    return
            key.append(_Same(x))
            return
        key.append(type(x))
        for chain in sorted(chains):
            value, place = x, path
            for name in chain:
                # Of a method that torch or a tensor has, the tensor is what is captured.
                if isinstance(value, Tensor) or not hasattr(value, name):
                    break
                value, place = getattr(value, name), (*place, ("attr", name))
            self.visit(value, place, None, True)

    def _function(self, f: types.FunctionType, path: Path, owner: Any) -> Any:
        key, seen = self.found.key, self._functions
        if id(f) in seen and owner is None:
            key.append(("again", list(seen).index(id(f))))
            return seen[id(f)]
        seen[id(f)] = f
        key.append(f.__code__)
        uses = _uses(f.__code__, owner is not None)
        if owner is not None:
            self._object(owner, (*path[:-1], ("attr", "__self__")), uses.get(("self", ""), frozenset({()})))
        cells = []
        for n, (name, cell) in enumerate(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)):
            try:
                content = cell.cell_contents
            except ValueError:
                key.append("empty")
                cells.append(cell)
                continue
            if content is f:
                key.append("itself")
                cells.append(cell)
                continue
            made = self.visit(content, (*path, ("cell", n)), uses.get(("cell", name)))
            cells.append(cell if self._number is None else types.CellType(made))
        space = f.__globals__
        changed: dict[str, Any] = {}
        if not (f.__module__ or "").startswith(("torch.", "flashtile.")):
            for name in sorted(name for where, name in uses if where == "global" and name in space):
                changed[name] = self.visit(space[name], (*path, ("global", name)), uses["global", name])
        defaults = self.visit(f.__defaults__, (*path, ("attr", "__defaults__")))
        named = self.visit(f.__kwdefaults__, (*path, ("attr", "__kwdefaults__")))
        if self._number is None:
            return f
        copy = types.FunctionType(f.__code__, {**space, **changed}, f.__name__, defaults, tuple(cells) or None)
        copy.__kwdefaults__ = named
        seen[id(f)] = copy
        return copy if owner is None else types.MethodType(copy, owner)


@functools.lru_cache(maxsize=1024)
def _uses(code: types.CodeType, is_method: bool) -> Mapping[tuple[str, str], frozenset[tuple[str, ...]]]:
    """The names that a function reads from outside, each with the attributes that follow; () where none does."""
    found: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    steps = list(dis.get_instructions(code))
    own = code.co_varnames[0] if is_method and code.co_argcount else None
    for n, step in enumerate(steps):
        root = None
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            root = "global", str(step.argval)
        elif step.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF") and step.argval in code.co_freevars:
            root = "cell", str(step.argval)
        elif own is not None and step.opname.startswith("LOAD_FAST") and step.argval == own:
            root = "self", ""
        if root is not None:
            chain = []
            for after in steps[n + 1 :]:
                if after.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                    break
                chain.append(str(after.argval))
            found.setdefault(root, set()).add(tuple(chain))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            for (where, name), chains in _uses(inner, False).items():
                if where == "global" or name in code.co_freevars:
                    found.setdefault((where, name), set()).update(chains)
    return {root: frozenset(chains) for root, chains in found.items()}


def _plain(name: Any) -> Any:
    return name if isinstance(name, (str, int)) else _Same(name)


def at_path(f: Any, path: Path) -> Any:
    """What lies at the end of a path; of steps that torch.compile can follow."""
    for step, name in path:
        if step == "cell":
            f = f.__closure__[name].cell_contents
        elif step == "global":
            f = f.__globals__[name]
        elif step == "item":
            f = f[name]
        else:
            f = getattr(f, name)
    return f
