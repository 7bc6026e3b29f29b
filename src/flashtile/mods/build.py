"""Builds graphs: operators are added one by one, constants are folded, and the result is one canonical graph."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flashtile.mods.graph import COMMUTATIVE, INPUTS, LEAVES, OPERATORS, Graph, LoadDerivative, Node, inputs_of


class GraphBuilder:
    """Builds a graph operator by operator. Equal operators become one node, and constant ones are computed here."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._known: dict[tuple[Any, ...], int] = {}

    def add(self, op: str, kind: str, *args: Any) -> int:
        """The node of an operator with these arguments."""
        if op == "const":
            value = args[0]
            args = (float(value) if kind == "f" else bool(value) if kind == "b" else int(value),)
        elif op in OPERATORS:
            simpler = self._simpler(op, kind, args)
            if simpler is not None:
                return simpler
        # Numbers are compared as texts, since -0.0 == 0.0 and nan != nan.
        found = self._known.get((op, kind, *map(repr, args)))
        return self.keep(Node(op, kind, args)) if found is None else found

    def keep(self, node: Node) -> int:
        """The new node of an operator as it is."""
        op, kind, args = node
        self.nodes.append(node)
        return self._known.setdefault((op, kind, *map(repr, args)), len(self.nodes) - 1)

    def const(self, value: Any, kind: str) -> int:
        """A constant's node."""
        return self.add("const", kind, value)

    def cast(self, n: int, kind: str) -> int:
        """A node converted to another kind."""
        if self.nodes[n].kind == kind:
            return n
        # Comparison with 0 converts any kind to bool.
        return self.add("ne", "b", n, self.const(0, self.nodes[n].kind)) if kind == "b" else self.add("cast", kind, n)

    def value(self, n: int) -> Any:
        """The value of a constant node; None for any other node."""
        node = self.nodes[n]
        return node.args[0] if node.op == "const" else None

    def _simpler(self, op: str, kind: str, args: tuple[int, ...]) -> int | None:
        """A node with the same value as an operator's, if there is a simpler one."""
        values = [self.value(n) for n in args]
        if all(x is not None for x in values):
            return self._folded(op, kind, args)
        first, last = values[0], values[-1]
        if (op in ("add", "sub") and last == 0) or (op in ("mul", "div", "pow", "floordiv") and last == 1):
            # For integers a quotient by 1 is the argument; for floats it is floored.
            return args[0] if op != "floordiv" or kind != "f" else None
        if (op == "add" and first == 0) or (op == "mul" and first == 1):
            return args[1]
        if op == "mul" and -1 in (first, last):
            return self.add("neg", kind, args[0] if last == -1 else args[1])
        if op == "sub" and first == 0:
            return self.add("neg", kind, args[1])
        if op == "neg" and self.nodes[args[0]].op == "neg":
            return int(self.nodes[args[0]].args[0])
        if op in ("and", "or") and kind == "b" and (first is not None or last is not None):
            known, other = (first, args[1]) if first is not None else (last, args[0])
            return other if known == (op == "and") else self.const(known, "b")
        if op == "where" and (first is not None or args[1] == args[2]):
            return args[1] if first in (True, None) else args[2]
        return None

    def _folded(self, op: str, kind: str, args: tuple[int, ...]) -> int | None:
        dtypes = {"f": torch.float64, "i": torch.int64, "l": torch.int64, "b": torch.bool}
        given = [torch.tensor(self.value(n), dtype=dtypes[self.nodes[n].kind], device="cpu") for n in args]
        try:
            found = given[0].to(dtypes[kind]) if op == "cast" else OPERATORS[op][1](*given)
        except RuntimeError:  # a division by 0
            return None
        return self.const(found.item(), kind)


def finished(
    made: GraphBuilder, what: str, result: int, slope: int | None, partials: Sequence[LoadDerivative],
    kinds: Mapping[int, str], numbers: Mapping[int, str],
) -> tuple[Graph, list[int], list[int]]:  # fmt: skip
    """The canonical graph of a builder's nodes, and its operands and numbers in the order of their use.

    Args:
        made: The builder.
        what: As in ``Graph``.
        result: As in ``Graph``.
        slope: As in ``Graph``.
        partials: As in ``Graph``; partials that are constantly 0 are left out.
        kinds: Kinds of the operands, with dimensions.
        numbers: Kinds of the numbers.
    """
    nodes: list[Node] = []
    place: dict[int, int] = {}
    of_operands: dict[int, int] = {}
    of_numbers: dict[int, int] = {}
    shapes = _shapes(made)

    def visit(n: int) -> int:
        if n in place:
            return place[n]
        node = made.nodes[n]
        given = inputs_of(node)
        inner = tuple(map(visit, sorted(given, key=shapes.__getitem__) if node.op in COMMUTATIVE else given))
        if node.op in ("load", "size"):
            operand = of_operands.setdefault(node.args[0], len(of_operands))
            inner = (operand, *(inner if node.op == "load" else node.args[1:]))
        elif node.op == "number":
            inner = (of_numbers.setdefault(node.args[0], len(of_numbers)),)
        elif node.op == "const":
            inner = node.args
        place[n] = len(nodes)
        nodes.append(Node(node.op, node.kind, inner))
        return place[n]

    result = visit(result)
    slope = None if slope is None else visit(slope)
    kept = tuple(LoadDerivative(visit(p.load), visit(p.slope)) for p in partials if made.value(p.slope) != 0)
    graph = Graph(
        what, tuple(kinds[n] for n in of_operands), tuple(numbers[n] for n in of_numbers), tuple(nodes), result, slope,
        kept,
    )  # fmt: skip
    return graph, list(of_operands), list(of_numbers)


def _shapes(made: GraphBuilder) -> list[str]:
    """For each node a text of its computation without operands and numbers, by which the terms of a sum are ordered."""
    found: list[str] = []
    for node in made.nodes:
        own = repr(node.args) if node.op == "const" else ""
        inner = [found[n] for n in inputs_of(node)]
        inner = sorted(inner) if node.op in COMMUTATIVE else inner
        text = " ".join((node.op, node.kind, own, *inner))
        # Inputs and numbers come before computed nodes, and constants last.
        rank = {"const": "z", "number": "b", "size": "b"}.get(node.op, "a" if node.op in INPUTS else "c")
        found.append(rank + hashlib.blake2b(text.encode(), digest_size=8).hexdigest())
    return found


def rebuilt(graph: Graph, into: GraphBuilder, leaf: Callable[[Node], int | None]) -> list[int]:
    """A graph's nodes in a builder, by number. ``leaf`` may replace a node by another one."""
    found: list[int] = []
    for node in graph.nodes:
        other = leaf(node)
        if other is None:
            args = tuple(found[n] for n in inputs_of(node))
            args = (node.args[0], *args) if node.op == "load" else node.args if node.op in LEAVES else args
            other = into.add(node.op, node.kind, *args)
        found.append(other)
    return found


def with_values(graph: Graph, numbers: Sequence[float], sizes: Sequence[Sequence[int]]) -> str:
    """The text of the graph, with numbers and operands' sizes as constants."""
    made = GraphBuilder()

    def leaf(node: Node) -> int | None:
        if node.op == "number":
            return made.const(numbers[node.args[0]], node.kind)
        return made.const(sizes[node.args[0]][node.args[1]], node.kind) if node.op == "size" else None

    at = rebuilt(graph, made, leaf)
    partials = [LoadDerivative(at[p.load], at[p.slope]) for p in graph.partials]
    slope = None if graph.slope is None else at[graph.slope]
    return finished(made, graph.what, at[graph.result], slope, partials, dict(enumerate(graph.operands)), {})[0].text
