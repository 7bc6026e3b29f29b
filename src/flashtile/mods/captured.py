"""What a function reads besides its arguments, if that can be watched: it is checked in each call at little cost.

``captured`` walks over a function in an order that the function's code alone decides: over tensors, numbers and
constants of closures, globals, defaults and partials, in lists, tuples and dicts, and over plain attributes. Everything
that is neither a tensor nor a number becomes the function's key, by value. Two functions with equal keys and equally
many tensors compute the same, except for values. A function that may read anything else is not watched: it is traced in
each call.
"""

from __future__ import annotations

import builtins
import dis
import functools
import re
import types
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

# Modules with attributes that are the same functions in every call, except those which read a state or draw numbers.
_CONSTANT_MODULES = {
    "torch", "math", "builtins", "numpy", "operator", "_operator", "functools", "itertools", "typing", "flashtile",
}  # fmt: skip
_STATES = re.compile("rand|get_|is_|initial_seed|cuda|backends|normal|bernoulli|compiler|autocast")
# Built-in functions of Python that depend on the values of their arguments alone.
_PURE = {
    "abs", "all", "any", "bool", "dict", "divmod", "enumerate", "filter", "float", "int", "isinstance", "len", "list",
    "map", "max", "min", "pow", "print", "range", "reversed", "round", "slice", "sorted", "str", "sum", "tuple", "type",
    "zip", "NotImplementedError", "RuntimeError", "TypeError", "ValueError", "AssertionError",
}  # fmt: skip
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, complex, bytes, type(Ellipsis))
# The attributes of a class that ``namedtuple`` made.
_OF_NAMEDTUPLE = {
    *vars(namedtuple("_", ())), "__orig_bases__", "__annotations__", "__annotate__", "__annotate_func__",
    "__annotations_cache__", "__firstlineno__", "__static_attributes__",
}  # fmt: skip
_MISSING = object()
_ALL = frozenset({()})
Chains = frozenset[tuple[str, ...]]


class _Unwatched(Exception):
    """Raised for a function that may read something that is not watched."""


@dataclass(eq=False)
class CapturedValues:
    """What a function reads.

    Attributes:
        key: Everything that is neither a tensor nor a number that may vary. Code is the only object in it.
        tensors: The tensors, each once.
        numbers: Ints and floats that may vary, in order.
    """

    key: list[Any] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    numbers: list[int | float] = field(default_factory=list)


def captured(f: Callable[..., Any]) -> CapturedValues | None:
    """What a function reads; None if it may read something that cannot be watched."""
    walk = _Walk(None)
    try:
        walk.visit(f, frozenset({("__call__",)}))
        walk.check_flags()
    except _Unwatched:
        return None
    return walk.found


def with_numbers(f: Callable[..., Any], number: Callable[[int], Any]) -> Any:
    """A copy of a watched function that reads ``number(n)`` as its n-th number; tensors stay f's own."""
    return _Walk(number).visit(f, frozenset({("__call__",)}))


class _Walk:
    """One walk over a function. With ``number`` it makes a copy."""

    def __init__(self, number: Callable[[int], Any] | None) -> None:
        self.found, self._number = CapturedValues(), number
        self._tensors: dict[int, int] = {}
        self._functions: dict[tuple[int, int, bool], tuple[int, Any]] = {}
        self._within: set[int] = set()
        self._flags: set[str] = set()
        self._names: set[str] = set()

    def visit(self, x: Any, chains: Chains = _ALL, fixed: bool = False) -> Any:
        """Returns x, or its copy.

        ``chains``: the attributes of x that a function reads, or () if it uses x as a whole. ``fixed``: x is in a place
        that cannot be copied, so its numbers are constants.
        """
        key, kind = self.found.key, type(x)
        if isinstance(x, Tensor):
            key.append(self._tensor(x))
        elif kind in (int, float) and not fixed:
            key.append(kind)
            self.found.numbers.append(x)
            return x if self._number is None else self._number(len(self.found.numbers) - 1)
        elif kind in _CONSTANTS:
            key.append((kind, repr(x) if kind in (float, complex) else x))
        elif kind is types.FunctionType:
            return self._function(x, None, fixed, chains)
        elif kind is types.MethodType:
            return self._function(x.__func__, x.__self__, fixed, chains)
        elif kind is functools.partial and not vars(x):
            key.append("partial")
            parts = [self.visit(each, _ALL, fixed) for each in (x.func, x.args, x.keywords)]
            return x if self._number is None or fixed else functools.partial(parts[0], *parts[1], **parts[2])
        elif kind in (tuple, list, dict, torch.Size) or isinstance(x, tuple):
            return self._items(x, kind, fixed)
        else:
            self._object(x, chains)
        return x

    def _tensor(self, x: Tensor) -> tuple[str, int]:
        if not (type(x).__module__ or "").startswith("torch"):
            raise _Unwatched
        self._flags.update(x.__dict__)
        known = self._tensors.setdefault(id(x), len(self.found.tensors))
        if known == len(self.found.tensors):
            self.found.tensors.append(x)
        return "tensor", known

    def check_flags(self) -> None:
        """Raises if the function may read an attribute that a program has set on a tensor."""
        if self._flags and not self._flags.isdisjoint(self._names):
            raise _Unwatched

    def _items(self, x: Any, kind: Any, fixed: bool) -> Any:
        key, is_named = self.found.key, kind not in (tuple, list, dict, torch.Size)
        if id(x) in self._within or (is_named and vars(kind).keys() - _OF_NAMEDTUPLE != set(getattr(x, "_fields", ()))):
            raise _Unwatched
        self._within.add(id(x))
        # The key of a named tuple is its fields.
        key.append((x._fields if is_named else kind, len(x)))
        made: Any
        if kind is dict:
            for name in x:
                if type(name) not in _CONSTANTS:
                    raise _Unwatched
                key.append((type(name), name))
            made = {name: self.visit(each, _ALL, fixed) for name, each in x.items()}
        else:
            made = [self.visit(each, _ALL, fixed) for each in x]
        self._within.remove(id(x))
        if self._number is None or fixed or kind in (list, dict):
            return x if self._number is None or fixed else made
        return kind(*made) if is_named else tuple(made)

    def _object(self, x: Any, chains: Chains) -> None:
        """Visits the attributes that a function reads of an object of any class."""
        key = self.found.key
        root = (getattr(x, "__module__", None) or "").partition(".")[0]
        if isinstance(x, types.ModuleType) and x.__name__.partition(".")[0] in _CONSTANT_MODULES:
            if () in chains or any(_STATES.match(name) for chain in chains for name in chain):
                raise _Unwatched
            key.append(("module", x.__name__))
        elif isinstance(x, types.BuiltinFunctionType):
            if root not in _CONSTANT_MODULES or _STATES.match(x.__name__):
                raise _Unwatched
            if not isinstance(x.__self__, (types.ModuleType, type(None))):
                raise _Unwatched
            key.append(("built in", x.__module__, x.__qualname__))
        elif isinstance(x, type) and root in _CONSTANT_MODULES:
            key.append(("class", x.__module__, x.__qualname__))
        elif isinstance(x, type) and issubclass(x, torch.autograd.Function) and chains == {("apply",)}:
            for name in ("forward", "setup_context", "backward"):
                self.visit(_attribute(x, name), _ALL, True)
        elif () in chains:
            raise _Unwatched
        else:
            for chain in sorted(chains):
                self._chain(x, chain)

    def _chain(self, x: Any, chain: tuple[str, ...]) -> None:
        for n, name in enumerate(chain):
            if n and (
                isinstance(x, (Tensor, type, types.ModuleType)) or type(x).__module__ in ("builtins", "functools")
            ):
                self.found.key.append(n)
                self.visit(x, frozenset({chain[n:]}), True)
                return
            x = _attribute(x, name)
        self.visit(x, _ALL, True)

    def _function(self, f: types.FunctionType, owner: Any, fixed: bool, chains: Chains) -> Any:
        key, root = self.found.key, (f.__module__ or "").partition(".")[0]
        if vars(f).keys() - {"__wrapped__"} or not chains <= {(), ("__call__",)}:
            raise _Unwatched
        known = id(f), id(owner), fixed
        if known in self._functions:
            number, copy = self._functions[known]
            key.append(("again", number))
            return copy
        number = len(self._functions)
        self._functions[known] = number, f if owner is None else types.MethodType(f, owner)
        key.append(f.__code__)
        uses, names = _uses(f.__code__, owner is not None)
        if uses is None:
            raise _Unwatched
        self._names |= names
        if owner is not None and ("self", "") in uses:
            self._object(owner, uses["self", ""])
        cells = []
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            read = uses.get(("cell", name))
            try:
                content = cell.cell_contents
            except ValueError:
                read = None
            if read is None:
                key.append("empty")
                cells.append(cell)
                continue
            made = self.visit(content, read, fixed)
            cells.append(cell if made is content else types.CellType(made))
        changed: dict[str, Any] = {}
        if root not in ("torch", "flashtile"):
            changed = self._globals(f.__globals__, uses, fixed)
        defaults = self.visit(f.__defaults__, _ALL, fixed)
        named = self.visit(f.__kwdefaults__, _ALL, fixed)
        if self._number is None or fixed:
            return self._functions[known][1]
        copy = types.FunctionType(f.__code__, {**f.__globals__, **changed}, f.__name__, defaults, tuple(cells) or None)
        copy.__kwdefaults__ = named
        made = copy if owner is None else types.MethodType(copy, owner)
        self._functions[known] = number, made
        return made

    def _globals(self, space: dict[str, Any], uses: Mapping[tuple[str, str], Chains], fixed: bool) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        for where, name in uses:
            if where != "global":
                continue
            if name in space:
                changed[name] = self.visit(space[name], uses[where, name], fixed)
            elif name in _PURE and hasattr(builtins, name):
                self.found.key.append(name)
            else:
                raise _Unwatched
        return changed


def _attribute(x: Any, name: str) -> Any:
    """A plain attribute of an object, which no code of a program computes."""
    of: Any = type(x)
    if of is types.ModuleType:
        return vars(x).get(name) if name in vars(x) else _unwatched()
    if isinstance(x, type):
        if of.__getattribute__ is not type.__getattribute__ or _in_class(of, name) is not _MISSING:
            _unwatched()
        return _bound(_in_class(x, name), None, x)
    if of.__getattribute__ is not object.__getattribute__:
        _unwatched()
    found = _in_class(of, name)
    if type(found) is types.MemberDescriptorType:
        return getattr(x, name) if hasattr(x, name) else _unwatched()
    if hasattr(type(found), "__set__") or hasattr(type(found), "__delete__"):
        _unwatched()
    own = getattr(x, "__dict__", None)
    if type(own) is dict and name in own:
        return own[name]
    if found is _MISSING and isinstance(x, torch.nn.Module) and of.__getattr__ is torch.nn.Module.__getattr__:
        for space in (x._parameters, x._buffers, x._modules):
            if name in space:
                return space[name]
    return _bound(found, x, of)


def _in_class(x: type, name: str) -> Any:
    for each in x.__mro__:
        if name in each.__dict__:
            return each.__dict__[name]
    return _MISSING


def _bound(found: Any, x: Any, of: type) -> Any:
    """A class's attribute, bound to its instance x, or to the class."""
    if type(found) is types.FunctionType:
        return found if x is None else types.MethodType(found, x)
    if type(found) is staticmethod:
        return found.__func__
    if type(found) is classmethod:
        return types.MethodType(found.__func__, of)
    return _unwatched() if found is _MISSING or hasattr(type(found), "__get__") else found


def _unwatched() -> NoReturn:
    raise _Unwatched


_IMPORTED = ("torch", "math", "operator", "functools", "flashtile")
_NOT_FOLLOWED = {
    "IMPORT_STAR", "LOAD_BUILD_CLASS", "LOAD_LOCALS", "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD", "LOAD_CLASSDEREF",
    "LOAD_NAME", "LOAD_FROM_DICT_OR_DEREF", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL",
}  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _uses(code: types.CodeType, is_method: bool) -> tuple[Mapping[tuple[str, str], Chains] | None, frozenset[str]]:
    """The outside names that code reads, each with the attributes that follow it, and all attribute names in the code.

    The first result is None if the code may read something that has no name.
    """
    found: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    own = code.co_varnames[0] if is_method and code.co_argcount else None
    names = set(code.co_names)

    def use(root: tuple[str, str], n: int | None) -> None:
        chain: list[str] = []
        while n is not None and n + 1 < len(steps) and steps[n + 1].opname in ("LOAD_ATTR", "LOAD_METHOD"):
            n += 1
            chain.append(str(steps[n].argval))
        found.setdefault(root, set()).add(tuple(chain))

    for n, step in enumerate(steps):
        op, name = step.opname, step.argval
        if op in _NOT_FOLLOWED or (op in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars):
            return None, frozenset()
        if op == "IMPORT_NAME" and (name.partition(".")[0] not in _IMPORTED or any(map(_STATES.match, names))):
            return None, frozenset()
        if op == "LOAD_GLOBAL":
            use(("global", str(name)), n)
        elif op == "LOAD_DEREF" and name in code.co_freevars:
            use(("cell", str(name)), n)
        elif own is not None and ("LOAD_FAST" in op or op in ("LOAD_DEREF", "LOAD_CLOSURE")):
            loaded = name if isinstance(name, tuple) else (name,)
            for place, each in enumerate(loaded):
                if each == own and op != "LOAD_CLOSURE":
                    use(("self", ""), n if place == len(loaded) - 1 else None)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            uses, more = _uses(inner, False)
            if uses is None:
                return None, frozenset()
            names |= more
            for (where, name), chains in uses.items():
                if where == "global" or name in code.co_freevars:
                    found.setdefault((where, name), set()).update(chains)
                elif name == own:
                    found.setdefault(("self", ""), set()).update(chains)
    return {root: frozenset(found[root]) for root in sorted(found)}, frozenset(names)
