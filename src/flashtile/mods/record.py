"""A call's functions: converts what the user gives to a text, and the tensors and numbers that it reads."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashtile.core.errors import InvalidInputError
from flashtile.mods import recognise
from flashtile.mods.build import with_values
from flashtile.mods.captured import CapturedValues, captured, with_numbers
from flashtile.mods.graph import Graph, kind_of, parse
from flashtile.mods.reading import TraceError, taken, untransformed

if TYPE_CHECKING:
    from flashtile.mods.trace import Traced


class OperandKind(NamedTuple):
    """The properties of a mod's tensor that kernels are built for.

    Attributes:
        dtype: Its dtype.
        dim: Its number of dimensions.
    """

    dtype: torch.dtype
    dim: int


class ModKey(NamedTuple):
    """A mod in a ``Problem``: its graph's text and operands, without values and lengths."""

    text: str
    operands: tuple[OperandKind, ...]

    @property
    def graph(self) -> Graph:
        """The graph."""
        return parse(self.text)


class Lowered(NamedTuple):
    """A function of a call, after the parts are taken out that the library computes in another way.

    Attributes:
        text: The graph's text; empty if the function changes and drops nothing.
        operands: The tensors that it reads.
        numbers: The numbers that it reads.
        bounds: For a mask mod the bounds of a band: (whether it is the right one, keys), from the first row and key.
        softcap: For a score mod the softcap that ends it, 0 for none.
        is_mapped: Whether a transform of ``torch.func`` wraps one of the tensors.
    """

    text: str
    operands: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    bounds: tuple[tuple[bool, int], ...] = ()
    softcap: float = 0.0
    is_mapped: bool = False


# Plain values alone, which torch.compile takes as constants. A part: a text, its operands and its numbers. An operand:
# (its place among the captured tensors, or its path; the steps of a view). A number: its place, or its path.
_Part = tuple[str, tuple[tuple[Any, tuple[Any, ...]], ...], tuple[Any, ...]]
# (whether it is the right bound, a constant, numbers with factors)
_Bound = tuple[bool, int, tuple[tuple[Any, int], ...]]


class _KeptGraph(NamedTuple):
    """The record that is kept of a function's code.

    Attributes:
        text: The graph's text.
        whole: The whole graph; its text is empty if the function changes and drops nothing.
        rest: The graph without bounds and softcap; None if it has neither.
        bounds: See ``_Bound``.
        cap: The softcap: (a constant, or None and a number's place); None for none.
    """

    text: str
    whole: _Part
    rest: _Part | None
    bounds: tuple[_Bound, ...]
    cap: tuple[float | None, Any] | None


# The record of a function, and the tensors and numbers that it reads now.
_Read = tuple[_KeptGraph, Sequence[Tensor], Sequence[float]]
_PARAMETERS = {"score": ("score", "b", "h", "q_idx", "kv_idx"), "mask": ("b", "h", "q_idx", "kv_idx")}
_MOST = 1024
_FLOAT32 = torch.finfo(torch.float32)
# Records by captured keys. None if numbers and lengths are in the text: the record is then in ``_of_values``.
_kept: dict[Any, _KeptGraph | None] = {}
_of_values: dict[Any, _KeptGraph] = {}


def lowered(
    f: Callable[..., Any],
    argument: str,
    what: str,
    recognises: bool = True,
    device: torch.device | None = None,
) -> Lowered:
    """A function's text, tensors and numbers. If its code and kinds of values are known, this is a look-up.

    Args:
        f: The function.
        argument: Its name in errors.
        what: "score" or "mask".
        recognises: Whether bounds and a softcap are taken out of it.
        device: The device of the call.

    Raises:
        InvalidInputError: The function does something that a mod may not; names the operator and the user's line.
    """
    if torch.compiler.is_dynamo_compiling():
        from flashtile.mods.compiled import RECORDED

        kept, tensors, numbers, is_mapped = RECORDED(f, argument, what, device or torch.device("cpu"))
    else:
        kept, tensors, numbers = recorded(f, argument, what)
        is_mapped = any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))
    return _of_call(kept, recognises, tensors, numbers, is_mapped)


def recorded(f: Callable[..., Any], argument: str, what: str) -> _Read:
    """The record of a function, and the tensors and numbers that it reads now."""
    # If torch.compile cannot trace the function, it must not compile it piece by piece.
    return (_disabled(_recorded) if "torch._dynamo" in sys.modules else _recorded)(f, argument, what)


# Importing torch._dynamo takes seconds.
_disabled = functools.cache(torch.compiler.disable)


def _recorded(f: Callable[..., Any], argument: str, what: str) -> _Read:
    if not callable(f):
        raise InvalidInputError(argument, f"is of type {type(f).__name__}, must be a function of {_signature(what)}")
    found = captured(f)
    key = None if found is None else _key(found, what)
    kept = None if found is None else _known(key, found)
    if kept is not None:
        assert found is not None
        return kept, found.tensors, found.numbers
    _check_parameters(f, argument, what)
    try:
        return _traced(f, found, key, what)
    except TraceError as error:
        raise InvalidInputError(argument, str(error)) from error


def _of_call(
    kept: _KeptGraph, recognises: bool, tensors: Sequence[Tensor], given: Sequence[float], is_mapped: bool
) -> Lowered:
    """A record with the tensors and numbers of a call."""
    _, part, rest, bounds, cap = kept
    found: list[tuple[bool, int]] = []
    softcap = 0.0
    if recognises and rest is not None:
        if cap is not None:
            softcap = float(given[cap[1]] if cap[0] is None else cap[0])
        if cap is None or _FLOAT32.tiny <= softcap <= _FLOAT32.max:
            part = rest
            for is_right, most, numbers in bounds:
                for name, factor in numbers:
                    most += factor * int(given[name])
                found.append((is_right, most))
        else:
            softcap = 0.0
    text, operands, places = part
    read = []
    for name, steps in operands:
        x = tensors[name]
        for step in steps:
            x = taken(x, step)
        read.append(x)
    return Lowered(text, tuple(read), tuple([float(given[n]) for n in places]), tuple(found), softcap, is_mapped)


def _key(found: CapturedValues, what: str) -> Any:
    """The key of a graph that holds for all values."""
    return what, tuple(found.key), tuple((kind_of(x.dtype), x.dim()) for x in found.tensors)


def _values(found: CapturedValues) -> Any:
    """The further key of a graph that holds for these values alone."""
    return tuple(map(repr, found.numbers)), tuple(tuple(x.shape) for x in found.tensors)


def _known(key: Any, found: CapturedValues) -> _KeptGraph | None:
    if key not in _kept:
        return None
    return _kept[key] or _of_values.get((key, _values(found)))


def _traced(f: Callable[..., Any], found: CapturedValues | None, key: Any, what: str) -> _Read:
    """Traces a function, and keeps the record if everything that it reads is watched."""
    from flashtile.mods.trace import trace  # what few programs need is not loaded by all

    plain = trace(lambda _: f, what, [] if found is None else found.tensors)
    made = parted(plain)
    if found is None or plain.asked_more:
        return made, plain.tensors, ()
    varies = not found.numbers and not plain.asked_lengths
    lifted = None if varies else _lifted(f, found, what, plain)
    if lifted is not None:
        made, varies = parted(lifted), True
    if len(_kept) > _MOST or len(_of_values) > _MOST:
        _kept.clear()
        _of_values.clear()
    _kept[key] = made if varies else None
    if not varies:
        _of_values[key, _values(found)] = made
    return made, found.tensors, found.numbers


def _lifted(f: Callable[..., Any], found: CapturedValues, what: str, plain: Traced) -> Traced | None:
    """A graph that also holds for other numbers and lengths; None if there is none."""
    from flashtile.mods.trace import trace

    # There is none if the function asks for a number's type, or for its value in a way that the other run does not
    # notice. Other numbers are tried too, since 0 and 1 leave little of a graph.
    others = [2 * x + 3 for x in found.numbers]
    try:
        made = trace(functools.partial(with_numbers, f), what, found.tensors, found.numbers)
        other = trace(lambda _: with_numbers(f, others.__getitem__), what, found.tensors)
    except TraceError:
        return None
    sizes = [tuple(view.of(untransformed(found.tensors[view.tensor])).shape) for view in made.operands]
    for numbers, text in ((found.numbers, plain.graph.text), (others, other.graph.text)):
        if with_values(made.graph, [numbers[n] for n in made.numbers], sizes) != text:
            return None
    return made


def parted(traced: Traced) -> _KeptGraph:
    """A graph, with the parts that are recognised."""
    text = traced.graph.text
    operands, numbers = tuple((view.tensor, view.steps) for view in traced.operands), traced.numbers

    def part(rest: recognise.Rest) -> _Part:
        return rest.text, tuple(operands[n] for n in rest.operands), tuple(numbers[n] for n in rest.numbers)

    nothing = recognise.is_identity(text) if traced.graph.what == "score" else recognise.keeps_all(text)
    whole: _Part = ("", (), ()) if nothing else (text, operands, numbers)
    if traced.graph.what == "score":
        ends = recognise.softcap_of(text)
        if ends is None:
            return _KeptGraph(text, whole, None, (), None)
        cap = ends[0], None if ends[1] is None else numbers[ends[1]]
        return _KeptGraph(text, whole, part(ends[2]), (), cap)
    band = recognise.band_of(text)
    if band is None:
        return _KeptGraph(text, whole, None, (), None)
    bounds = tuple(
        (bound.is_right, bound.most.constant, tuple((numbers[n], factor) for n, factor in bound.most.numbers))
        for bound in band[0]
    )
    return _KeptGraph(text, whole, part(band[1]), bounds, None)


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
    """The graph of a score mod or a mask mod; the number of parameters tells which it is."""
    required = [p for p in inspect.signature(f).parameters.values() if p.default is p.empty]
    what = "score" if len(required) == len(_PARAMETERS["score"]) else "mask"
    return parse(recorded(f, f"{what}_mod", what)[0].text)
