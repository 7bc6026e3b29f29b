"""How the places that a load reads depend on a pair: what decides the order in which its gradient is summed."""

from __future__ import annotations

import functools
from typing import Literal

from flashtile.mods.graph import Graph, inputs_of

# rows: on b, h and i alone. keys: on b, h and j. pairs: each pair of a head has an entry of its own. diagonals: on
# i - j, b and h. any: otherwise.
Way = Literal["rows", "keys", "pairs", "diagonals", "any"]


@functools.lru_cache(maxsize=1024)
def way_of(graph: Graph, load: int) -> Way:
    """How a load's places depend on a pair."""
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


def axes_of(graph: Graph, load: int) -> tuple[int | None, ...]:
    """Of a load by pairs the dimension of its tensor along which each of b, h, i and j lies."""
    names = [_name(graph, n) for n in inputs_of(graph.nodes[load])]
    return tuple(names.index(name) if name in names else None for name in ("b", "h", "i", "j"))


def _name(graph: Graph, n: int) -> str | None:
    """Which of b, h, i and j a node is; None if it is none of them."""
    node = graph.nodes[n]
    while node.op == "cast" and node.kind in "il":
        node = graph.nodes[node.args[0]]
    return node.op if node.op in ("b", "h", "i", "j") else None


def _is_of_distance(graph: Graph, n: int) -> bool:
    """Whether a node depends on i and j by their difference alone."""
    node = graph.nodes[n]
    if node.op in ("i", "j", "score"):
        return False
    if node.op == "sub" and sorted(_name(graph, x) or "" for x in node.args) == ["i", "j"]:
        return True
    return all(_is_of_distance(graph, x) for x in inputs_of(node))
