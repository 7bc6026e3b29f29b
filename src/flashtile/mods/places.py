"""The way in which the places that a load reads depend on a pair: it decides how the load's gradient is summed.

Also the values that depend on a pair's distance alone, which kernels read from a table.
"""

from __future__ import annotations

import functools
from typing import Literal

from flashtile.mods.graph import Graph, inputs_of

# rows: the places depend on b, h and i alone. keys: on b, h and j. pairs: each pair of a head has its own entry.
# diagonals: on i - j, b and h. any: otherwise.
Way = Literal["rows", "keys", "pairs", "diagonals", "any"]
# Operators that take many instructions.
EXPENSIVE = {"floordiv", "rem", "fmod", "pow", "exp", "log", "log2", "log1p", "sin", "cos", "tanh", "sigmoid", "erf"}
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")


@functools.lru_cache(maxsize=1024)
def way_of(graph: Graph, load: int) -> Way:
    """The way in which a load's places depend on a pair."""
    index = inputs_of(graph.nodes[load])
    needed = {graph.nodes[n].op for n in graph.needed(index)} if index else set()
    if "score" in needed:
        return "any"
    if "j" not in needed:
        return "rows"
    if "i" not in needed:
        return "keys"
    names = [_name(graph, n) for n in index]
    if {"i", "j"} <= set(names) and None not in names and len(set(names)) == len(names):
        return "pairs"
    return "diagonals" if all(_is_of_distance(graph, n) for n in index) else "any"


def reads_pairs(graph: Graph) -> bool:
    """Whether some load depends on more of a pair than its row, its key or its distance."""
    return any(node.op == "load" and way_of(graph, n) in ("pairs", "any") for n, node in enumerate(graph.nodes))


def axes_of(graph: Graph, load: int) -> tuple[int | None, ...]:
    """For a load by pairs, the dimension of its tensor along which each of b, h, i and j lies."""
    names = [_name(graph, n) for n in inputs_of(graph.nodes[load])]
    return tuple(names.index(name) if name in names else None for name in ("b", "h", "i", "j"))


def _name(graph: Graph, n: int) -> str | None:
    """The name of a node that is b, h, i or j; None for other nodes."""
    node = graph.nodes[n]
    while node.op == "cast" and node.kind in "il":
        node = graph.nodes[node.args[0]]
    return node.op if node.op in ("b", "h", "i", "j") else None


@functools.lru_cache(maxsize=1024)
def _drifts(graph: Graph) -> tuple[int | None, ...]:
    """How much each node grows if i and j both grow by one: 0 if it depends on their distance, None if unknown.

    Only integers have a known growth, since they do not round; a float is unknown unless it depends on distance alone.
    """
    found: list[int | None] = []
    for node in graph.nodes:
        op, kind, _ = node
        given = [found[n] for n in inputs_of(node)]
        drift: int | None = None if op == "score" or None in given else 0
        x, y = (*given, 0, 0)[:2]
        if op in ("i", "j"):
            drift = 1
        elif drift is not None and any(given):
            assert x is not None and y is not None
            if op in ("add", "sub"):
                drift = x + y if op == "add" else x - y
            elif op in ("neg", "cast"):
                drift = -x if op == "neg" else x
            elif op in _COMPARE or op in ("maximum", "minimum"):
                drift = None if x != y else 0 if op in _COMPARE else x
            elif op == "mul":
                drift = next((d * graph.nodes[n].args[0] for n, d in zip(node.args, (y, x), strict=True)
                              if graph.nodes[n].op == "const"), None)  # fmt: skip
            else:
                drift = None
            drift = None if drift and kind not in "il" else drift
        found.append(drift)
    return tuple(found)


def _is_of_distance(graph: Graph, n: int) -> bool:
    """Whether a node depends on i and j only by their difference."""
    return _drifts(graph)[n] == 0


@functools.lru_cache(maxsize=1024)
def tabulated(graph: Graph) -> tuple[int, ...]:
    """Expensive floats of a score mod that depend on a pair's distance alone: a table of them is made once a head.

    If one is computed from another, the last one is taken. They are in order.
    """
    if graph.what != "score":
        return ()
    ends = {graph.result, *(() if graph.slope is None else (graph.slope,)), *(p.slope for p in graph.partials)}
    able = [n for n, node in enumerate(graph.nodes)
            if node.kind == "f" and _is_of_distance(graph, n) and _is_expensive(graph, n)]  # fmt: skip
    return tuple(n for n in graph.needed(sorted(ends), able) if n in able)


def _is_expensive(graph: Graph, n: int) -> bool:
    """Whether a node takes many instructions per pair."""
    return any(
        (graph.nodes[x].op == "load" or graph.nodes[x].op in EXPENSIVE)
        and {"i", "j"} <= {graph.nodes[y].op for y in graph.needed([x])}
        for x in graph.needed([n])
    )
