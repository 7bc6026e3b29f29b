"""The second derivative of a score mod: the derivative of its slope, found symbolically in its graph.

It is made when a second derivative is wanted, and a graph's text does not have it. A function that detaches, or has a
backward of its own, may have a slope that is not the derivative of its result; what the derivative of such a slope is
cannot be known from the graph, so none is made, unless the slope is the same for all scores.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashtile.mods.build import GraphBuilder
from flashtile.mods.graph import Graph, Node, evaluate, inputs_of, parse
from flashtile.mods.trace import nothing_else

# A derivative's node, None for 0.
Derivative = int | None
# What a rule makes its result of: the builder, the operator's own node, its arguments' nodes, and their derivatives.
_Rule = Callable[["_Floats", int, Sequence[int], Sequence[Derivative]], Derivative]
# Scores, rows and keys at which a slope is compared with the derivative of the result.
_SAMPLES = 256
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9


class NoCurveError(ValueError):
    """Raised for a function without a second derivative, with the reason."""


class _Floats:
    """Adds operators on floats to a graph's own nodes; what is given as a float becomes a constant."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.made = GraphBuilder()
        for node in nodes:  # their numbers stay
            self.made.keep(node)

    def __call__(self, op: str, *args: int | float, kind: str = "f") -> int:
        nodes = (self.made.const(x, "f") if isinstance(x, float) else x for x in args)
        return self.made.add(op, kind, *nodes)

    def times(self, x: Derivative, factor: int | float) -> Derivative:
        """A derivative multiplied by a node or a number."""
        return None if x is None else self("mul", x, factor)

    def sum(self, x: Derivative, y: Derivative) -> Derivative:
        """The sum of derivatives."""
        return y if x is None else x if y is None else self("add", x, y)

    def difference(self, x: Derivative, y: Derivative) -> Derivative:
        """The difference of derivatives."""
        return x if y is None else self("neg", y) if x is None else self("sub", x, y)

    def either(self, condition: int, x: Derivative, y: Derivative) -> Derivative:
        """One derivative where a condition holds, and the other elsewhere."""
        if x is None and y is None:
            return None
        return self("where", condition, 0.0 if x is None else x, 0.0 if y is None else y)


def _chain(slope: Callable[[_Floats, int, int], int]) -> _Rule:
    """The rule of an operator of one argument: ``slope`` of its own node and its argument's."""
    return lambda f, n, args, by: f.times(by[0], slope(f, n, args[0]))


def _mul(f: _Floats, n: int, args: Sequence[int], by: Sequence[Derivative]) -> Derivative:
    return f.sum(f.times(by[0], args[1]), f.times(by[1], args[0]))


def _div(f: _Floats, n: int, args: Sequence[int], by: Sequence[Derivative]) -> Derivative:
    above = f.difference(by[0], f.times(by[1], n))
    return None if above is None else f("div", above, args[1])


def _pow(f: _Floats, n: int, args: Sequence[int], by: Sequence[Derivative]) -> Derivative:
    base, exponent = args
    by_base = by_exponent = None
    if by[0] is not None:
        slope = f("mul", exponent, f("pow", base, f("sub", exponent, 1.0)))
        by_base = f.times(by[0], f("where", f("eq", exponent, 0.0, kind="b"), 0.0, slope))
    if by[1] is not None:
        slope = f("mul", n, f("log", base))
        by_exponent = f.times(by[1], f("where", f("eq", base, 0.0, kind="b"), 0.0, slope))
    return f.sum(by_base, by_exponent)


def _extreme(comparison: str) -> _Rule:
    """The rule of the greater or the lesser; each is one half where both are equal, as in PyTorch."""

    def rule(f: _Floats, n: int, args: Sequence[int], by: Sequence[Derivative]) -> Derivative:
        chosen = f.either(f(comparison, *args, kind="b"), *by)
        return f.either(f("eq", *args, kind="b"), f.times(f.sum(*by), 0.5), chosen)

    return rule


def _remainder(rounded: Callable[[_Floats, int, int], int]) -> _Rule:
    """The rule of ``x - rounded(x / y) * y``."""

    def rule(f: _Floats, n: int, args: Sequence[int], by: Sequence[Derivative]) -> Derivative:
        return f.difference(by[0], None if by[1] is None else f.times(by[1], rounded(f, *args)))

    return rule


def _zero(f: _Floats, n: int, args: Sequence[int], by: Sequence[Derivative]) -> Derivative:
    return None


# Operators of floats -> their rules. All others make no floats that depend on a score smoothly.
RULES: dict[str, _Rule] = {
    "add": lambda f, n, args, by: f.sum(*by), "sub": lambda f, n, args, by: f.difference(*by), "mul": _mul,
    "div": _div, "neg": lambda f, n, args, by: f.difference(None, by[0]), "pow": _pow,
    "abs": _chain(lambda f, n, x: f("sign", x)), "maximum": _extreme("gt"), "minimum": _extreme("lt"),
    "where": lambda f, n, args, by: f.either(args[0], by[1], by[2]),
    "rem": _remainder(lambda f, x, y: f("floordiv", x, y)),
    "fmod": _remainder(lambda f, x, y: f("trunc", f("div", x, y))),
    "exp": _chain(lambda f, n, x: n), "exp2": _chain(lambda f, n, x: f("mul", n, math.log(2.0))),
    "log": _chain(lambda f, n, x: f("div", 1.0, x)),
    "log2": _chain(lambda f, n, x: f("div", 1.0 / math.log(2.0), x)),
    "log1p": _chain(lambda f, n, x: f("div", 1.0, f("add", x, 1.0))),
    "sqrt": _chain(lambda f, n, x: f("div", 0.5, n)), "rsqrt": _chain(lambda f, n, x: f("div", f("mul", n, -0.5), x)),
    "sin": _chain(lambda f, n, x: f("cos", x)), "cos": _chain(lambda f, n, x: f("neg", f("sin", x))),
    "tanh": _chain(lambda f, n, x: f("sub", 1.0, f("mul", n, n))),
    "sigmoid": _chain(lambda f, n, x: f("mul", n, f("sub", 1.0, n))),
    "erf": _chain(lambda f, n, x: f("mul", f("exp", f("neg", f("mul", x, x))), 2.0 / math.sqrt(math.pi))),
    **dict.fromkeys(("sign", "floordiv", "floor", "ceil", "trunc", "cast"), _zero),
}  # fmt: skip


@functools.lru_cache(maxsize=1024)
def curved(text: str) -> Graph:
    """The graph of a score mod's slope: its slope is the second derivative. It has the mod's nodes, and others.

    Raises:
        NoCurveError: There is no second derivative.
    """
    graph = parse(text)
    assert graph.slope is not None
    floats = _Floats(graph.nodes)
    curve = _derivative(floats, graph, graph.slope)
    if curve is not None:
        result = _derivative(floats, graph, graph.result)
        if _differs(graph, floats, result):
            raise NoCurveError("it detaches something or has a backward of its own")
    end = floats.made.const(0.0, "f") if curve is None else curve
    nodes = tuple(floats.made.nodes)
    return Graph(graph.what, graph.operands, graph.numbers, nodes, graph.slope, end)


def reason(text: str) -> str | None:
    """Why a score mod has no second derivative; None if it has one."""
    try:
        curved(text)
    except NoCurveError as error:
        return str(error)
    return None


def _derivative(floats: _Floats, graph: Graph, end: int) -> Derivative:
    """The derivative of one of the graph's nodes with respect to the score."""
    found: dict[int, Derivative] = {}
    for n in graph.needed([end]):
        op, kind, _ = node = graph.nodes[n]
        args = inputs_of(node)
        by = [found[x] for x in args]
        if op == "score":
            found[n] = floats.made.const(1.0, "f")
        elif kind != "f" or all(x is None for x in by) or op == "load":
            found[n] = None
        elif op in RULES:
            found[n] = RULES[op](floats, n, args, by)
        else:
            raise NoCurveError(f"there is none of its operator {op}")
    return found[end]


def _differs(graph: Graph, floats: _Floats, derivative: Derivative) -> bool:
    """Whether the slope is another number than the derivative of the result, for random scores, operands and numbers.

    Points at which either is no finite number are left out.
    """
    made = tuple(floats.made.nodes)
    whole = Graph(graph.what, graph.operands, graph.numbers, made, graph.result, graph.slope)
    assert graph.slope is not None
    with nothing_else():
        make = torch.Generator("cpu").manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=make, dtype=torch.float64, device="cpu")

        def below(most: int, *shape: int) -> Tensor:
            return torch.randint(1, most, shape, generator=make, device="cpu")

        magnitudes = 10.0 ** (below(4, _SAMPLES) - 2)
        at = {"score": normal(_SAMPLES) * magnitudes}
        at |= {name: below(16, _SAMPLES) for name in ("b", "h", "i", "j")}
        operands = [
            normal(*shape) if kind[0] == "f" else below(8, *shape)
            for kind, shape in ((x, (16,) * int(x[1:])) for x in graph.operands)
        ]
        numbers = [float(normal().abs()) + 0.1 if kind == "f" else int(below(8)) for kind in graph.numbers]
        ends = [graph.slope, *(() if derivative is None else (derivative,))]
        try:
            slope, *others = evaluate(whole, ends, at, operands, numbers, torch.float64)
        except RuntimeError:  # integers divided by 0
            return False
        own, other = torch.broadcast_tensors(slope, others[0] if others else torch.zeros_like(slope))
        size = torch.maximum(own.abs(), other.abs())
        return bool(((own - other).abs() > _RELATIVE * size + _ABSOLUTE)[size.isfinite()].any())
