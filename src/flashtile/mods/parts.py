"""Mods for parts of longer sequences: the same function of positions in the whole, from a table by sequence."""

from __future__ import annotations

import functools
from typing import Any

from flashtile.mods.graph import LEAVES, Graph, LoadDerivative, Node, parse

# Columns of the table, which has a row of int32 for each sequence: its number among the whole sequences, its first row
# and the step from a row to the next, its first key and the step from a key to the next, and the first head.
COLUMNS = ("b", "row", "row_step", "key", "key_step", "head")


@functools.lru_cache(maxsize=1024)
def of_part(text: str) -> str:
    """The text of the mod with one more operand, the table, after its own operands."""
    graph = parse(text)
    table, nodes = len(graph.operands), list[Node]()
    known: dict[tuple[Any, ...], int] = {}

    def put(op: str, kind: str, *args: Any) -> int:
        node = Node(op, kind, args)
        if node not in known:
            known[node] = len(nodes)
            nodes.append(node)
        return known[node]

    def column(name: str) -> int:
        return put("load", "i", table, put("b", "i"), put("const", "i", COLUMNS.index(name)))

    def along(name: str, side: str) -> int:
        return put("add", "i", column(side), put("mul", "i", column(f"{side}_step"), put(name, "i")))

    wholes = {
        "b": lambda: column("b"), "h": lambda: put("add", "i", column("head"), put("h", "i")),
        "i": lambda: along("i", "row"), "j": lambda: along("j", "key"),
    }  # fmt: skip
    places: list[int] = []
    for op, kind, args in graph.nodes:
        if op in wholes:
            places.append(wholes[op]())
        elif op in LEAVES:
            places.append(put(op, kind, *args))
        elif op == "load":
            places.append(put(op, kind, args[0], *(places[n] for n in args[1:])))
        else:
            places.append(put(op, kind, *(places[n] for n in args)))
    partials = tuple(LoadDerivative(places[p.load], places[p.slope]) for p in graph.partials)
    slope = None if graph.slope is None else places[graph.slope]
    operands = (*graph.operands, "i2")
    return Graph(graph.what, operands, graph.numbers, tuple(nodes), places[graph.result], slope, partials).text
