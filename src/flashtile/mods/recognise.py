"""Finds parts of a graph that the library computes in another way: a mask mod's band, a score mod's final softcap.

A mask of the conjuncts ``kv <= q + c`` and ``kv >= q - c`` becomes a ``Band``, and blocks outside it are skipped. The
outermost ``c * tanh(x / c)`` becomes ``softcap=c``. So a user's causal mask is ``causal=True``, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from flashtile.mods.build import GraphBuilder, finished, rebuilt
from flashtile.mods.graph import Graph, LoadDerivative, Node, inputs_of, parse


class Sum(NamedTuple):
    """``constant`` plus a sum of some of a call's numbers, each times an integer."""

    constant: int
    numbers: tuple[tuple[int, int], ...] = ()

    def of(self, numbers: Sequence[float]) -> int:
        """The sum's value in a call."""
        return self.constant + sum(factor * int(numbers[n]) for n, factor in self.numbers)


class Bound(NamedTuple):
    """Row q keeps keys up to ``q + most`` (right), or from ``q - most`` (left)."""

    is_right: bool
    most: Sum


class Rest(NamedTuple):
    """The rest of a graph, and the operands and numbers of the whole that it has; no text if nothing is left."""

    text: str
    operands: tuple[int, ...]
    numbers: tuple[int, ...]


_NOTHING = Rest("", (), ())


@functools.lru_cache(maxsize=1024)
def band_of(text: str) -> tuple[tuple[Bound, ...], Rest] | None:
    """The bounds in a mask mod, and the rest of it; None if it has no bounds."""
    graph = parse(text)
    bounds: list[Bound] = []
    left: list[int] = []
    for n in _conjuncts(graph, graph.result):
        bound = _bound(graph, n)
        if bound is None:
            left.append(n)
        else:
            bounds.append(bound)
    if not bounds:
        return None
    if not left:
        return tuple(bounds), _NOTHING
    made = GraphBuilder()
    at = rebuilt(graph, made, lambda node: None)
    result = at[left[0]]
    for n in left[1:]:
        result = made.add("and", "b", result, at[n])
    return tuple(bounds), _rest(graph, made, result, None, ())


def keeps_all(text: str) -> bool:
    """Whether a mask mod keeps every pair for all operands."""
    graph = parse(text)
    return graph.is_const(graph.result, True)


@functools.lru_cache(maxsize=1024)
def softcap_of(text: str) -> tuple[float | None, int | None, Rest] | None:
    """The softcap that ends a score mod, as a constant or as the place of a number, and the graph before it."""
    graph = parse(text)
    nodes = graph.nodes
    outer = nodes[graph.result]
    if outer.op != "mul":
        return None
    for cap, inner in (outer.args, outer.args[::-1]):
        if nodes[inner].op != "tanh" or nodes[nodes[inner].args[0]].op != "div":
            continue
        before, divisor = nodes[nodes[inner].args[0]].args
        value = _number(graph, cap)
        if divisor != cap or value is None:
            continue
        handed = _cap_slope(graph, cap, inner)
        if handed is not None:
            return (*value, _NOTHING if nodes[before].op == "score" else _without_cap(graph, before, handed))
    return None


def _without_cap(graph: Graph, before: int, handed: int) -> Rest:
    """The graph before a cap. Autograd passes it the node ``handed`` as the derivative by its result.

    With 1 in place of that node, the graph computes its own derivative.
    """
    made = GraphBuilder()
    one, numbered = made.const(1.0, "f"), iter(range(len(graph.nodes)))
    at = rebuilt(graph, made, lambda node: one if next(numbered) == handed else None)
    assert graph.slope is not None
    partials = [LoadDerivative(at[p.load], at[p.slope]) for p in graph.partials]
    return _rest(graph, made, at[before], at[graph.slope], partials)


def is_identity(text: str) -> bool:
    """Whether a score mod returns the score as it is."""
    graph = parse(text)
    return graph.nodes[graph.result].op == "score"


def _rest(graph: Graph, made: GraphBuilder, result: int, slope: int | None, partials: Sequence[LoadDerivative]) -> Rest:
    kinds, numbers = dict(enumerate(graph.operands)), dict(enumerate(graph.numbers))
    found, operands, places = finished(made, graph.what, result, slope, partials, kinds, numbers)
    return Rest(found.text, tuple(operands), tuple(places))


def _conjuncts(graph: Graph, n: int) -> list[int]:
    node = graph.nodes[n]
    if node.op != "and" or node.kind != "b":
        return [n]
    return [x for arg in node.args for x in _conjuncts(graph, arg)]


def _bound(graph: Graph, n: int) -> Bound | None:
    """A comparison as the bound of a band."""
    node = graph.nodes[n]
    if node.op not in ("lt", "le", "gt", "ge"):
        return None
    left, right = (_linear(graph, x) for x in node.args)
    if left is None or right is None:
        return None
    if node.op in ("gt", "ge"):
        left, right = right, left
    # left - right <= most
    difference = _plus(left, right, -1)
    i, j = difference.pop("i", 0), difference.pop("j", 0)
    if (i, j) not in ((-1, 1), (1, -1)):
        return None
    constant = -difference.pop("constant", 0) - (node.op in ("lt", "gt"))
    numbers = tuple((int(name), -factor) for name, factor in sorted(difference.items()) if factor)
    return Bound(j == 1, Sum(constant, numbers))


def _linear(graph: Graph, n: int) -> dict[str, int] | None:
    """An integer as a constant plus multiples of i, j and numbers by their places; None if it is no such sum."""
    op, kind, args = graph.nodes[n]
    if kind not in "il":
        return None
    if op in ("i", "j"):
        return {op: 1}
    if op == "const":
        return {"constant": args[0]}
    if op == "number":
        return {str(args[0]): 1}
    if op == "cast":
        return _linear(graph, args[0])
    if op not in ("add", "sub", "neg"):
        return None
    found = [_linear(graph, x) for x in inputs_of(Node(op, kind, args))]
    first, last = found[0], found[-1]
    if first is None or last is None:
        return None
    return _plus({}, first, -1) if op == "neg" else _plus(first, last, 1 if op == "add" else -1)


def _plus(x: dict[str, int], y: dict[str, int], factor: int) -> dict[str, int]:
    return {name: x.get(name, 0) + factor * y.get(name, 0) for name in (*x, *(n for n in y if n not in x))}


def _number(graph: Graph, n: int) -> tuple[float | None, int | None] | None:
    """A node as a constant or as the place of a number of the call."""
    node = graph.nodes[n]
    if node.op == "cast":
        node = graph.nodes[node.args[0]]
    if node.op == "const":
        return float(node.args[0]), None
    return (None, node.args[0]) if node.op == "number" else None


def _cap_slope(graph: Graph, cap: int, tanh: int) -> int | None:
    """The node ``cap * (1 - tanh^2) / cap``, as autograd computes it; None if there is none."""
    find = {(node.op, *(sorted(node.args) if node.op == "mul" else node.args)): n for n, node in enumerate(graph.nodes)}
    square = find.get(("mul", tanh, tanh))
    one = next((n for n in range(len(graph.nodes)) if graph.is_const(n, 1.0) and graph.nodes[n].kind == "f"), None)
    inner = find.get(("sub", one, square), -1)
    return find.get(("div", find.get(("mul", *sorted((cap, inner)))), cap))
