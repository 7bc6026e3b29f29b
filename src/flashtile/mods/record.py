"""The functions of a call: from what the user gives to a text, the tensors that it reads and the numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashtile.core.errors import InvalidInputError
from flashtile.mods import recognise
from flashtile.mods.build import with_values
from flashtile.mods.captured import Captured, Path, at_path, captured
from flashtile.mods.graph import Graph, kind_of, parse
from flashtile.mods.reading import taken

if TYPE_CHECKING:
    from flashtile.mods.trace import Traced


class Operand(NamedTuple):
    """What kernels are built for of a tensor that a mod reads.

    Attributes:
        dtype: Its dtype.
        dim: Its number of dimensions.
    """

    dtype: torch.dtype
    dim: int


class ModKey(NamedTuple):
    """A mod in a ``Problem``: its graph's text and what its operands are; no values and no lengths."""

    text: str
    operands: tuple[Operand, ...]

    @property
    def graph(self) -> Graph:
        """The graph."""
        return parse(self.text)


class Lowered(NamedTuple):
    """A function of a call, and what of it the library has another way for.

    Attributes:
        text: Its graph's, empty if it changes and drops nothing.
        operands: The tensors that it reads.
        numbers: The numbers that it reads.
        bounds: Of a mask mod the bounds of a band: (whether the right one, how many keys), from the first row and key.
        softcap: Of a score mod the softcap that ends it, 0 for none.
    """

    text: str
    operands: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    bounds: tuple[tuple[bool, int], ...] = ()
    softcap: float = 0.0


# Plain values alone, since torch.compile takes them as constants. A part: a text, its operands and its numbers. An
# operand: (its place among the captured tensors, or its path; the steps of a view). A number: its place, or its path.
_Part = tuple[str, tuple[tuple[Any, tuple[Any, ...]], ...], tuple[Any, ...]]
# (whether it is the right bound, a constant, numbers with factors)
_Bound = tuple[bool, int, tuple[tuple[Any, int], ...]]


class _Kept(NamedTuple):
    """What is kept of a function's code.

    Attributes:
        text: Its graph's.
        whole: All of it; the text is empty if it changes and drops nothing.
        rest: What is left of it without bounds and softcap; None if it has none.
        bounds: See ``_Bound``.
        cap: Its softcap: (a constant, or None and a number); None for none.
    """

    text: str
    whole: _Part
    rest: _Part | None
    bounds: tuple[_Bound, ...]
    cap: tuple[float | None, Any] | None


_PARAMETERS = {"score": ("score", "b", "h", "q_idx", "kv_idx"), "mask": ("b", "h", "q_idx", "kv_idx")}
_MOST = 1024
_FLOAT32 = torch.finfo(torch.float32)
# By what captured finds; None where numbers and lengths are in the text, which is then kept in ``_of_values``.
_kept: dict[Any, _Kept | None] = {}
_of_values: dict[Any, _Kept] = {}


def lowered(f: Callable[..., Any], argument: str, what: str, recognises: bool = True) -> Lowered:
    """A function's text, tensors and numbers; a function whose code and kinds of values are known costs a look-up.

    Args:
        f: The function.
        argument: How errors name it.
        what: "score" or "mask".
        recognises: Whether bounds and a softcap are taken out of it.

    Raises:
        InvalidInputError: It does what no mod may do; names the operator and the user's line.
    """
    if torch.compiler.is_compiling():
        kept, fixed = _known(f, argument, what)
        for path, value in fixed:
            if at_path(f, path) != value:  # torch.compile guards what it compares
                raise InvalidInputError(argument, "reads a number that changed while torch.compile ran")
        return _of_call(kept, recognises, lambda path: at_path(f, path), lambda path: at_path(f, path))
    if not callable(f):
        raise InvalidInputError(argument, f"is of type {type(f).__name__}, must be a function of {_signature(what)}")
    found = captured(f)
    kept = _kept_of(f, found, argument, what)
    return _of_call(kept, recognises, found.tensors.__getitem__, found.numbers.__getitem__)


def _of_call(kept: _Kept, recognises: bool, tensor: Callable[[Any], Tensor], number: Callable[[Any], float]) -> Lowered:
    """What is kept with the tensors and numbers of a call."""
    _, part, rest, bounds, cap = kept
    found: list[tuple[bool, int]] = []
    softcap = 0.0
    if recognises and rest is not None:
        if cap is not None:
            softcap = float(number(cap[1]) if cap[0] is None else cap[0])
        if cap is None or _FLOAT32.tiny <= softcap <= _FLOAT32.max:
            part = rest
            for is_right, most, numbers in bounds:
                for name, factor in numbers:
                    most += factor * int(number(name))
                found.append((is_right, most))
        else:
            softcap = 0.0
    text, operands, places = part
    read = []
    for name, steps in operands:
        x = tensor(name)
        for step in steps:
            x = taken(x, step)
        read.append(x)
    return Lowered(text, tuple(read), tuple([float(number(n)) for n in places]), tuple(found), softcap)


def _kept_of(f: Callable[..., Any], found: Captured, argument: str, what: str) -> _Kept:
    key, values = _keys(found, what)
    if key in _kept:
        kept = _kept[key] or _of_values.get((key, values))
        if kept is not None:
            return kept
    traced, varies = _traced(f, found, argument, what)
    made = _parted(traced)
    if len(_kept) > _MOST or len(_of_values) > _MOST:
        _kept.clear()
        _of_values.clear()
    _kept[key] = made if varies else None
    _of_values[key, values] = made
    return made


def _keys(found: Captured, what: str) -> tuple[Any, Any]:
    """What a function's graph depends on: if it holds for all values, and if not."""
    kinds = tuple((kind_of(x.dtype), x.dim()) for x in found.tensors)
    return (what, tuple(found.key), kinds), (tuple(found.numbers), tuple(tuple(x.shape) for x in found.tensors))


def _traced(f: Callable[..., Any], found: Captured, argument: str, what: str) -> tuple[Traced, bool]:
    """A function traced, and whether its text holds for other numbers and lengths."""
    # What few programs need is not loaded by all.
    from flashtile.mods.trace import TraceError, trace

    _check_parameters(f, argument, what)
    try:
        plain = trace(f, what, found.tensors)
    except TraceError as error:
        raise InvalidInputError(argument, str(error)) from error
    if not found.numbers and not plain.asked_lengths:
        return plain, True
    try:
        made = trace(f, what, found.tensors, found.numbers)
    except TraceError:
        return plain, False
    views = [view.of(found.tensors[view.tensor]) for view in made.operands]
    numbers, sizes = [found.numbers[n] for n in made.numbers], [tuple(x.shape) for x in views]
    # If not: it asks for the type of a number, or for its value in a way that the other run does not see.
    varies = with_values(made.graph, numbers, sizes) == plain.graph.text
    return (made, True) if varies else (plain, False)


def _parted(traced: Traced) -> _Kept:
    """A graph with what is recognised of it."""
    text = traced.graph.text
    operands, numbers = tuple((view.tensor, view.steps) for view in traced.operands), traced.numbers

    def part(rest: recognise.Rest) -> _Part:
        return rest.text, tuple(operands[n] for n in rest.operands), tuple(numbers[n] for n in rest.numbers)

    nothing = recognise.is_identity(text) if traced.graph.what == "score" else recognise.keeps_all(text)
    whole: _Part = ("", (), ()) if nothing else (text, operands, numbers)
    if traced.graph.what == "score":
        ends = recognise.softcap_of(text)
        if ends is None:
            return _Kept(text, whole, None, (), None)
        cap = ends[0], None if ends[1] is None else numbers[ends[1]]
        return _Kept(text, whole, part(ends[2]), (), cap)
    band = recognise.band_of(text)
    if band is None:
        return _Kept(text, whole, None, (), None)
    bounds = tuple(
        (bound.is_right, bound.most.constant, tuple((numbers[n], factor) for n, factor in bound.most.numbers))
        for bound in band[0]
    )
    return _Kept(text, whole, part(band[1]), bounds, None)


def _check_parameters(f: Callable[..., Any], argument: str, what: str) -> None:
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*_PARAMETERS[what])
    except TypeError as error:
        raise InvalidInputError(argument, f"takes {signature}, must take {_signature(what)}") from error


def _signature(what: str) -> str:
    return f"({', '.join(_PARAMETERS[what])})"


def source_graph(f: Callable[..., Any]) -> Graph:
    """The graph of a score mod or a mask mod, told apart by the number of their parameters."""
    required = [p for p in inspect.signature(f).parameters.values() if p.default is p.empty]
    what = "score" if len(required) == len(_PARAMETERS["score"]) else "mask"
    return parse(_kept_of(f, captured(f), f"{what}_mod", what).text)


def _known(f: Callable[..., Any], argument: str, what: str) -> tuple[_Kept, tuple[tuple[Path, Any], ...]]:
    """What torch.compile takes as a constant, with paths in place of places; and the values that must stay."""
    found = captured(f)
    kept = _kept_of(f, found, argument, what)
    holds = _kept[_keys(found, what)[0]] is not None
    fixed = () if holds else tuple(zip(found.number_paths, found.numbers, strict=True))

    def part(of: _Part) -> _Part:
        text, operands, numbers = of
        paths = tuple((found.tensor_paths[n], steps) for n, steps in operands)
        return text, paths, tuple(found.number_paths[n] for n in numbers)

    bounds = tuple(
        (is_right, most, tuple((found.number_paths[n], factor) for n, factor in numbers))
        for is_right, most, numbers in kept.bounds
    )
    cap = kept.cap
    if cap is not None and cap[1] is not None:
        cap = None, found.number_paths[cap[1]]
    rest = None if kept.rest is None else part(kept.rest)
    return (kept.text, part(kept.whole), rest, bounds, cap), fixed  # type: ignore[return-value]


# As ``torch.compiler.assume_constant_result`` marks one, which would import the compiler here.
_known._dynamo_marked_constant = True  # type: ignore[attr-defined]
