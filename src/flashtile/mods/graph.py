"""Graphs of mods: what a user's function computes of one score, as numbered operators from a fixed table.

A ``Graph`` has one text, the same for all functions that compute the same: the operators in the order of their first
use, operands and numbers by their place, no names and no values. The text is what operators of PyTorch carry and what
plans and kernels are kept by. It is parsed against the table, so no code comes from a text.

Kinds of values: "f" float (float32 on GPUs, the dtype of the softmax on CPUs), "i" and "l" integers of 32 and 64 bits,
"b" bool.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

INPUTS = {"score": "f", "b": "i", "h": "i", "i": "i", "j": "i"}
# Operators that have data in place of arguments: a value, the place of a number, an operand and one of its dimensions.
_LEAVES = {"const": 1, "number": 1, "size": 2}
# Whose arguments may be exchanged, without a change of a bit.
COMMUTATIVE = {"add", "mul", "maximum", "minimum", "and", "or", "xor", "eq", "ne"}
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")


def kind_of(dtype: torch.dtype) -> str:
    """The graph's kind of values of a dtype."""
    if dtype.is_floating_point:
        return "f"
    return {torch.bool: "b", torch.int64: "l"}.get(dtype, "i")


class Node(NamedTuple):
    """One operator: its result's kind, and the numbers of the nodes that it takes; data for what is in ``_LEAVES``.

    A "load" has the place of an operand, and then a node for each of its dimensions.
    """

    op: str
    kind: str
    args: tuple[Any, ...] = ()


class Partial(NamedTuple):
    """The derivative of the result with respect to what a load reads: both are numbers of nodes."""

    load: int
    slope: int


def _fmod(x: Tensor, y: Tensor) -> Tensor:
    return torch.fmod(x, y)


# Operator -> (kinds of its arguments; "." is the result's own, "?" any, the same for all), and as PyTorch has it.
OPERATORS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "add": ("..", torch.add), "sub": ("..", torch.sub), "mul": ("..", torch.mul), "neg": (".", torch.neg),
    "abs": (".", torch.abs), "sign": (".", torch.sign), "maximum": ("..", torch.maximum),
    "minimum": ("..", torch.minimum), "div": ("ff", torch.true_divide), "floordiv": ("..", torch.floor_divide),
    "rem": ("..", torch.remainder), "fmod": ("..", _fmod), "pow": ("ff", torch.pow),
    "exp": ("f", torch.exp), "exp2": ("f", torch.exp2), "log": ("f", torch.log), "log2": ("f", torch.log2),
    "log1p": ("f", torch.log1p), "sqrt": ("f", torch.sqrt), "rsqrt": ("f", torch.rsqrt), "sin": ("f", torch.sin),
    "cos": ("f", torch.cos), "tanh": ("f", torch.tanh), "sigmoid": ("f", torch.sigmoid), "erf": ("f", torch.erf),
    "floor": ("f", torch.floor), "ceil": ("f", torch.ceil), "trunc": ("f", torch.trunc),
    "and": ("..", torch.bitwise_and), "or": ("..", torch.bitwise_or), "xor": ("..", torch.bitwise_xor),
    "not": (".", torch.bitwise_not), "shl": ("..", torch.bitwise_left_shift), "shr": ("..", torch.bitwise_right_shift),
    **{name: ("??", getattr(torch, name)) for name in _COMPARE},
    "where": ("b..", torch.where), "cast": ("?", lambda x: x),
}  # fmt: skip
# Those whose result may be of some kinds alone.
_RESULTS = {
    **dict.fromkeys(_COMPARE, "b"), **dict.fromkeys(("and", "or", "xor", "not"), "bil"),
    **dict.fromkeys(("shl", "shr"), "il"), **dict.fromkeys(("where", "cast"), "filb"),
    **dict.fromkeys(("add", "sub", "mul", "neg", "abs", "sign", "maximum", "minimum", "floordiv", "rem", "fmod"), "fil"),
}  # fmt: skip


@dataclass(frozen=True)
class Graph:
    """What a mod computes.

    Attributes:
        what: "score" or "mask".
        operands: Kind and number of dimensions of each tensor that it reads, as ``"f2"``.
        numbers: Kind of each Python number that it reads, "f" or "i".
        nodes: Its operators, each after those that it takes.
        result: The node of its result: a float, or of a mask whether a pair is kept.
        slope: Of a score mod the node of the derivative with respect to the score, else None.
        partials: Derivatives with respect to what it loads of float tensors, those that are not 0 everywhere.
    """

    what: str
    operands: tuple[str, ...]
    numbers: tuple[str, ...]
    nodes: tuple[Node, ...]
    result: int
    slope: int | None
    partials: tuple[Partial, ...] = ()

    @functools.cached_property
    def text(self) -> str:
        """The canonical text."""
        lines = [f"{self.what} {' '.join(self.operands) or '-'} | {' '.join(self.numbers) or '-'}"]
        lines += [f"{node.kind} {node.op} {' '.join(map(repr, node.args))}".rstrip() for node in self.nodes]
        ends = [str(self.result), "-" if self.slope is None else str(self.slope)]
        return "\n".join([*lines, " ".join(["return", *ends, *(f"{p.load}:{p.slope}" for p in self.partials)])])

    @functools.cached_property
    def levels(self) -> tuple[int, ...]:
        """What each node depends on at most: 0 head, 1 row, 2 key or pair, 3 the score."""
        found: list[int] = []
        for node in self.nodes:
            own = {"score": 3, "j": 2, "i": 1}.get(node.op, 0)
            found.append(max([own, *(found[n] for n in inputs_of(node))]))
        return tuple(found)

    def needed(self, ends: Sequence[int]) -> list[int]:
        """The nodes that some need, themselves among them, in order."""
        wanted = set(ends)
        for n in range(len(self.nodes) - 1, -1, -1):
            if n in wanted:
                wanted.update(inputs_of(self.nodes[n]))
        return sorted(wanted)

    def is_const(self, n: int | None, value: float) -> bool:
        """Whether a node is a constant of this value."""
        return n is not None and self.nodes[n].op == "const" and self.nodes[n].args[0] == value


def inputs_of(node: Node) -> tuple[int, ...]:
    """The nodes that a node takes."""
    if node.op in _LEAVES:
        return ()
    return node.args[1:] if node.op == "load" else node.args


class GraphError(ValueError):
    """A text that is no graph."""


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Graph:
    """The graph of a text.

    Raises:
        GraphError: It is none, or has what the table does not permit.
    """
    lines = text.split("\n")
    head, _, numbers = lines[0].partition(" | ")
    what, *operands = head.split(" ")
    nodes: list[Node] = []
    try:
        for line in lines[1:-1]:
            kind, op, *args = line.split(" ")
            nodes.append(Node(op, kind, tuple(map(_value, args))))
        word, result, slope, *partials = lines[-1].split(" ")
        graph = Graph(
            what, tuple(x for x in operands if x != "-"), tuple(x for x in numbers.split(" ") if x != "-"),
            tuple(nodes), int(result), None if slope == "-" else int(slope),
            tuple(Partial(*map(int, pair.split(":"))) for pair in partials),
        )  # fmt: skip
    except (ValueError, TypeError, IndexError) as error:
        raise GraphError(f"{text!r} is no graph of a mod: {error}") from error
    if word != "return" or graph.text != text:
        raise GraphError(f"{text!r} is no graph of a mod")
    _check(graph)
    return graph


def _value(word: str) -> Any:
    if word in ("True", "False"):
        return word == "True"
    if word in ("inf", "-inf", "nan") or "." in word or "e" in word:
        return float(word)
    return int(word)


def _check(graph: Graph) -> None:
    """Raises GraphError for what the table does not permit."""
    if graph.what not in ("score", "mask"):
        raise GraphError(f"{graph.what!r} is no kind of mod")
    for n, node in enumerate(graph.nodes):
        if not _is_permitted(graph, n, node):
            raise GraphError(f"{node} is not permitted in the graph of a mod")
    ends = [graph.result, *(() if graph.slope is None else (graph.slope,)), *(x for p in graph.partials for x in p)]
    wanted = "f" if graph.what == "score" else "b"
    if any(not 0 <= n < len(graph.nodes) for n in ends) or graph.nodes[graph.result].kind != wanted:
        raise GraphError("a graph of a mod returns what it does not have")


def _is_permitted(graph: Graph, n: int, node: Node) -> bool:
    op, kind, args = node
    if op in INPUTS:
        return kind == INPUTS[op] and not args and (op != "score" or graph.what == "score")
    if op in _LEAVES:
        if len(args) != _LEAVES[op] or kind not in ("f", "i", "l", "b"):
            return False
        if op == "const":
            return True
        if op == "number":
            return args[0] in range(len(graph.numbers)) and graph.numbers[args[0]] == kind
        return args[0] in range(len(graph.operands)) and args[1] in range(int(graph.operands[args[0]][1:]))
    if any(type(x) is not int or not 0 <= x < n for x in inputs_of(node)):
        return False
    kinds = [graph.nodes[x].kind for x in inputs_of(node)]
    if op == "load":
        known = args and args[0] in range(len(graph.operands))
        return bool(known) and graph.operands[args[0]] == f"{kind}{len(kinds)}" and all(x in "il" for x in kinds)
    if op not in OPERATORS or kind not in _RESULTS.get(op, "f"):
        return False
    takes = OPERATORS[op][0]
    return len(takes) == len(kinds) and all(
        have == (kind if take == "." else kinds[0] if take == "?" else take)
        for take, have in zip(takes, kinds, strict=True)
    )


class Builder:
    """Makes a graph operator by operator; equal ones are one node, and what is constant is computed here."""

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
        # Of numbers as texts, since -0.0 == 0.0 and nan != nan.
        key = (op, kind, *map(repr, args))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = len(self.nodes)
            self.nodes.append(Node(op, kind, args))
        return found

    def const(self, value: Any, kind: str) -> int:
        """A constant's node."""
        return self.add("const", kind, value)

    def cast(self, n: int, kind: str) -> int:
        """A node as another kind."""
        if self.nodes[n].kind == kind:
            return n
        # What has no fraction compares with 0 as a bool does.
        return self.add("ne", "b", n, self.const(0, self.nodes[n].kind)) if kind == "b" else self.add("cast", kind, n)

    def value(self, n: int) -> Any:
        """A constant node's value, None of any other."""
        node = self.nodes[n]
        return node.args[0] if node.op == "const" else None

    def _simpler(self, op: str, kind: str, args: tuple[int, ...]) -> int | None:
        """A node with the same value as an operator's, if there is a simpler one."""
        values = [self.value(n) for n in args]
        if all(x is not None for x in values):
            return self._folded(op, kind, args)
        first, last = values[0], values[-1]
        if (op in ("add", "sub") and last == 0) or (op in ("mul", "div", "pow", "floordiv") and last == 1):
            # A quotient of floats by 1 is floored, and so is one of integers by 1 the same.
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
    made: Builder, what: str, result: int, slope: int | None, partials: Sequence[Partial], kinds: Mapping[int, str],
    numbers: Mapping[int, str],
) -> tuple[Graph, list[int], list[int]]:  # fmt: skip
    """The canonical graph of what a builder has, and which of its operands and numbers come in which order.

    Args:
        made: The builder.
        what: As in ``Graph``, like result, slope and partials.
        result: See there.
        slope: See there.
        partials: See there; those that are constantly 0 are left out.
        kinds: Of the operands, with dimensions.
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
    kept = tuple(Partial(visit(p.load), visit(p.slope)) for p in partials if made.value(p.slope) != 0)
    graph = Graph(
        what, tuple(kinds[n] for n in of_operands), tuple(numbers[n] for n in of_numbers), tuple(nodes), result, slope,
        kept,
    )  # fmt: skip
    return graph, list(of_operands), list(of_numbers)


def _shapes(made: Builder) -> list[str]:
    """Of each node a text of what it computes, without operands and numbers, so that the order of a sum is one."""
    found: list[str] = []
    for node in made.nodes:
        own = repr(node.args) if node.op == "const" else ""
        inner = [found[n] for n in inputs_of(node)]
        inner = sorted(inner) if node.op in COMMUTATIVE else inner
        text = " ".join((node.op, node.kind, own, *inner))
        # Inputs and numbers come before what is computed, constants last.
        rank = {"const": "z", "number": "b", "size": "b"}.get(node.op, "a" if node.op in INPUTS else "c")
        found.append(rank + hashlib.blake2b(text.encode(), digest_size=8).hexdigest())
    return found


def rebuilt(graph: Graph, into: Builder, leaf: Callable[[Node], int | None]) -> list[int]:
    """A graph's nodes in a builder, by number; ``leaf`` may give another node for one."""
    found: list[int] = []
    for node in graph.nodes:
        other = leaf(node)
        if other is None:
            args = tuple(found[n] for n in inputs_of(node))
            args = (node.args[0], *args) if node.op == "load" else node.args if node.op in _LEAVES else args
            other = into.add(node.op, node.kind, *args)
        found.append(other)
    return found


def with_values(graph: Graph, numbers: Sequence[float], sizes: Sequence[Sequence[int]]) -> str:
    """The text of the graph with numbers and sizes of operands as constants."""
    made = Builder()

    def leaf(node: Node) -> int | None:
        if node.op == "number":
            return made.const(numbers[node.args[0]], node.kind)
        return made.const(sizes[node.args[0]][node.args[1]], node.kind) if node.op == "size" else None

    at = rebuilt(graph, made, leaf)
    partials = [Partial(at[p.load], at[p.slope]) for p in graph.partials]
    slope = None if graph.slope is None else at[graph.slope]
    return finished(made, graph.what, at[graph.result], slope, partials, dict(enumerate(graph.operands)), {})[0].text


def evaluate(
    graph: Graph, ends: Sequence[int], at: Mapping[str, Tensor], operands: Sequence[Tensor], numbers: Sequence[float],
    dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """Nodes' values by PyTorch's operators; gradients flow through them.

    Args:
        graph: The graph.
        ends: The nodes that are wanted.
        at: The inputs by name, which broadcast against one another.
        operands: What it reads.
        numbers: Its numbers.
        dtype: Of floats. Integers are int64.
    """
    device = next(iter(at.values())).device
    dtypes = {"f": dtype, "i": torch.int64, "l": torch.int64, "b": torch.bool}
    values: dict[int, Tensor] = {}
    for n in graph.needed(ends):
        op, kind, args = graph.nodes[n]
        if op in INPUTS:
            value = at[op].to(dtypes[kind])
        elif op in ("const", "number"):
            value = torch.tensor(args[0] if op == "const" else numbers[args[0]], dtype=dtypes[kind], device=device)
        elif op == "size":
            value = torch.tensor(operands[args[0]].shape[args[1]], dtype=dtypes[kind], device=device)
        elif op == "load":
            tensor = operands[args[0]]
            index = tuple(inside(values[x], size) for x, size in zip(args[1:], tensor.shape, strict=True))
            value = (tensor[index] if index else tensor).to(dtypes[kind])
        else:
            value = OPERATORS[op][1](*(values[x] for x in args)).to(dtypes[kind])
        values[n] = value
    return [values[n] for n in ends]


def inside(x: Tensor, size: int) -> Tensor:
    """An index in range: from the end if negative as in Python, and then the nearest that exists."""
    return torch.where(x < 0, x + size, x).clamp(0, max(size - 1, 0))


def places_of(
    graph: Graph, load: int, at: Mapping[str, Tensor], operands: Sequence[Tensor], numbers: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Where a load reads: indices into its operand, flattened; they broadcast as the inputs do."""
    node = graph.nodes[load]
    shape = operands[node.args[0]].shape
    flat = torch.zeros((), dtype=torch.int64, device=next(iter(at.values())).device)
    steps = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    for x, size, step in zip(evaluate(graph, node.args[1:], at, operands, numbers, dtype), shape, steps, strict=True):
        flat = flat + inside(x, size) * step
    return flat
