"""Graphs of mods: a user's function of one score, as numbered operators from a fixed table.

A ``Graph`` has one text, which is the same for all functions that compute the same: the operators in the order of their
first use, operands and numbers by their place, without names and values. PyTorch's operators carry the text, and it is
the key of plans and kernels. It is parsed against the table, so no code comes from a text.

Kinds of values: "f" float (float32 on GPUs, the dtype of the softmax on CPUs), "i" and "l" integers of 32 and 64 bits,
"b" bool.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The separator of operators in a text.
_END = "; "
INPUTS = {"score": "f", "b": "i", "h": "i", "i": "i", "j": "i"}
# Operators with data in place of arguments: a value; the place of a number; an operand and one of its dimensions.
LEAVES = {"const": 1, "number": 1, "size": 2}
# Operators with arguments that may be exchanged without a change of a bit.
COMMUTATIVE = {"add", "mul", "maximum", "minimum", "and", "or", "xor", "eq", "ne"}
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")


def kind_of(dtype: torch.dtype) -> str:
    """The graph's kind of values for a dtype."""
    if dtype.is_floating_point:
        return "f"
    return {torch.bool: "b", torch.int64: "l"}.get(dtype, "i")


class Node(NamedTuple):
    """One operator: its result's kind, and the numbers of its arguments' nodes, or data if it is in ``LEAVES``.

    A "load" has the place of an operand, followed by a node for each of its dimensions.
    """

    op: str
    kind: str
    args: tuple[Any, ...] = ()


class LoadDerivative(NamedTuple):
    """The derivative of the result with respect to a load; both are numbers of nodes."""

    load: int
    slope: int


def _fmod(x: Tensor, y: Tensor) -> Tensor:
    return torch.fmod(x, y)


# Operator -> (kinds of its arguments: "." the result's own, "?" any, the same for all; PyTorch's function).
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
# Operators that allow only some kinds of results.
_RESULTS = {
    **dict.fromkeys(_COMPARE, "b"), **dict.fromkeys(("and", "or", "xor", "not"), "bil"),
    **dict.fromkeys(("shl", "shr"), "il"), **dict.fromkeys(("where", "cast"), "filb"),
    **dict.fromkeys(("add", "sub", "mul", "neg", "abs", "sign", "maximum", "minimum"), "fil"),
    **dict.fromkeys(("floordiv", "rem", "fmod"), "fil"),
}  # fmt: skip


@dataclass(frozen=True)
class Graph:
    """The computation of a mod.

    Attributes:
        what: "score" or "mask".
        operands: Kind and number of dimensions of each tensor that it reads, as ``"f2"``.
        numbers: Kind of each Python number that it reads, "f" or "i".
        nodes: Its operators, each after its arguments.
        result: The node of its result: for a score mod a float, for a mask mod whether a pair is kept.
        slope: For a score mod the node of the derivative with respect to the score, else None.
        partials: Derivatives with respect to its loads from float tensors, if they are not 0 everywhere.
    """

    what: str
    operands: tuple[str, ...]
    numbers: tuple[str, ...]
    nodes: tuple[Node, ...]
    result: int
    slope: int | None
    partials: tuple[LoadDerivative, ...] = ()

    @functools.cached_property
    def text(self) -> str:
        """The canonical text. It is one line, because PyTorch writes arguments into comments of generated code."""
        lines = [f"{self.what} {' '.join(self.operands) or '-'} | {' '.join(self.numbers) or '-'}"]
        lines += [f"{node.kind} {node.op} {' '.join(map(repr, node.args))}".rstrip() for node in self.nodes]
        ends = [str(self.result), "-" if self.slope is None else str(self.slope)]
        return _END.join([*lines, " ".join(["return", *ends, *(f"{p.load}:{p.slope}" for p in self.partials)])])

    @functools.cached_property
    def levels(self) -> tuple[int, ...]:
        """The most that each node depends on: 0 head, 1 row, 2 key or pair, 3 the score."""
        found: list[int] = []
        for node in self.nodes:
            own = {"score": 3, "j": 2, "i": 1}.get(node.op, 0)
            found.append(max([own, *(found[n] for n in inputs_of(node))]))
        return tuple(found)

    def needed(self, ends: Sequence[int], given: Sequence[int] = ()) -> list[int]:
        """The nodes that ``ends`` need, ``ends`` included, in order; without the nodes that only ``given`` need."""
        wanted = set(ends)
        for n in range(len(self.nodes) - 1, -1, -1):
            if n in wanted and n not in given:
                wanted.update(inputs_of(self.nodes[n]))
        return sorted(wanted)

    def is_const(self, n: int | None, value: float) -> bool:
        """Whether a node is a constant of this value."""
        return n is not None and self.nodes[n].op == "const" and self.nodes[n].args[0] == value


def inputs_of(node: Node) -> tuple[int, ...]:
    """The nodes that are a node's arguments."""
    if node.op in LEAVES:
        return ()
    return node.args[1:] if node.op == "load" else node.args


class GraphError(ValueError):
    """Raised for a text that is not a graph."""


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Graph:
    """The graph of a text.

    Raises:
        GraphError: The text is not a graph, or has something that the table does not permit.
    """
    lines = text.split(_END)
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
            tuple(LoadDerivative(*map(int, pair.split(":"))) for pair in partials),
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
    """Raises GraphError if the table does not permit the graph."""
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
    if op in LEAVES:
        if len(args) != LEAVES[op] or kind not in ("f", "i", "l", "b"):
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


def evaluate(
    graph: Graph, ends: Sequence[int], at: Mapping[str, Tensor], operands: Sequence[Tensor], numbers: Sequence[float],
    dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """Computes nodes' values with PyTorch's operators; gradients flow through them.

    Args:
        graph: The graph.
        ends: The wanted nodes.
        at: The inputs by name, which broadcast against one another.
        operands: The tensors that the graph reads.
        numbers: The numbers that the graph reads.
        dtype: The dtype of floats. Integers are int64.
    """
    device = next(iter(at.values())).device
    dtypes = {"f": dtype, "i": torch.int64, "l": torch.int64, "b": torch.bool}
    values: dict[int, Tensor] = {}
    for n in graph.needed(ends):
        op, kind, args = graph.nodes[n]
        if op in INPUTS:
            value = at[op].to(dtypes[kind])
        elif op in ("const", "number"):
            value = torch.full((), args[0] if op == "const" else numbers[args[0]], dtype=dtypes[kind], device=device)
        elif op == "size":
            value = torch.full((), operands[args[0]].shape[args[1]], dtype=dtypes[kind], device=device)
        elif op == "load":
            tensor = operands[args[0]]
            index = tuple(inside(values[x], size) for x, size in zip(args[1:], tensor.shape, strict=True))
            value = (tensor[index] if index else tensor).to(dtypes[kind])
        else:
            value = OPERATORS[op][1](*(values[x] for x in args)).to(dtypes[kind])
        values[n] = value
    return [values[n] for n in ends]


def inside(x: Tensor, size: int) -> Tensor:
    """An index in range: negative ones count from the end as in Python, and then the nearest valid index is taken."""
    return torch.where(x < 0, x + size, x).clamp(0, max(size - 1, 0))


def places_of(
    graph: Graph, load: int, at: Mapping[str, Tensor], operands: Sequence[Tensor], numbers: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The places that a load reads, as indices into its flattened operand; they broadcast as the inputs do."""
    node = graph.nodes[load]
    shape = operands[node.args[0]].shape
    flat = torch.zeros((), dtype=torch.int64, device=next(iter(at.values())).device)
    steps = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    for x, size, step in zip(evaluate(graph, node.args[1:], at, operands, numbers, dtype), shape, steps, strict=True):
        flat = flat + inside(x, size) * step
    return flat
