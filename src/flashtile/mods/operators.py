"""Translates PyTorch's operators to a graph's: a function and its derivative may consist of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashtile.mods.build import GraphBuilder
from flashtile.mods.graph import OPERATORS, kind_of
from flashtile.mods.reading import Refused

# PyTorch's name -> the graph's name, if they differ; in-place and reflected operators follow from these.
_NAMES = {
    "true_divide": "div", "divide": "div", "floor_divide": "floordiv", "remainder": "rem", "multiply": "mul",
    "subtract": "sub", "bitwise_and": "and", "logical_and": "and", "__and__": "and", "bitwise_or": "or",
    "logical_or": "or", "__or__": "or", "bitwise_xor": "xor", "logical_xor": "xor", "__xor__": "xor",
    "bitwise_not": "not", "logical_not": "not", "__lshift__": "shl", "bitwise_left_shift": "shl", "__rshift__": "shr",
    "bitwise_right_shift": "shr", "sgn": "sign", "greater": "gt", "less": "lt", "not_equal": "ne", "absolute": "abs",
    "clamp_min": "maximum", "clamp_max": "minimum", "negative": "neg",
}  # fmt: skip
_COMPARE = {"eq", "ne", "lt", "le", "gt", "ge"}
_LOGICAL = {"logical_and", "logical_or", "logical_xor", "logical_not"}
_SAME = {
    "alias", "detach", "clone", "view", "_unsafe_view", "reshape", "expand", "squeeze", "unsqueeze", "lift_fresh",
    "lift_fresh_copy", "contiguous", "view_as", "_reshape_alias", "positive",
}  # fmt: skip
_VALUES = {"_local_scalar_dense", "is_nonzero", "equal"}
_CASTS = {"_to_copy", "to", "type_as", "convert_element_type"}
_CONSTANTS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_FILLED = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0, "fill": 1, "fill_": 1}


def _formulas(b: GraphBuilder) -> dict[str, Callable[..., int]]:
    """Operators that become several of a graph's operators. The arguments are nodes of floats."""

    def op(name: str, *args: int) -> int:
        return b.add(name, "f", *args)

    def c(value: float) -> int:
        return b.const(value, "f")

    return {
        "square": lambda x: op("mul", x, x),
        "reciprocal": lambda x: op("div", c(1.0), x),
        "relu": lambda x: b.add("where", "f", b.add("le", "b", x, c(0.0)), c(0.0), x),
        "expm1": lambda x: op("sub", op("exp", x), c(1.0)),
        "tanh_backward": lambda g, y: op("mul", g, op("sub", c(1.0), op("mul", y, y))),
        "sigmoid_backward": lambda g, y: op("mul", g, op("mul", op("sub", c(1.0), y), y)),
        "isnan": lambda x: b.add("ne", "b", x, x),
        "log10": lambda x: op("mul", op("log2", x), c(0.30102999566398120)),
        "silu": lambda x: op("mul", x, op("sigmoid", x)),
        "tan": lambda x: op("div", op("sin", x), op("cos", x)),
    }


def record(recorder: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Records an operator on numbers without values."""
    name = func.overloadpacket.__name__
    if name in _VALUES:
        raise Refused(
            "needs the value of a score or an index in Python (if, range, int): it has none when the function is "
            "traced; use torch.where"
        )
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place:
        name = name[:-1]
    node_of = _known(recorder, name)
    if node_of is None:
        return _decomposed(recorder, func, args, kwargs)
    out = args[0] if in_place else recorder.unknown(func, args, kwargs)
    recorder.stands_for(out, node_of(args, kwargs, kind_of(out.dtype)))
    return out


def _decomposed(recorder: Any, func: Any, args: Any, kwargs: Any) -> Any:
    from torch._decomp import decomposition_table

    made = decomposition_table.get(func)
    if made is None:
        raise Refused(f"{func} is no operator of mods")
    with recorder:
        out = made(*args, **kwargs)
    if out is NotImplemented:
        raise Refused(f"{func} is no operator of mods")
    return out


def _known(recorder: Any, name: str) -> Callable[[Any, Any, str], int] | None:
    """A function that makes an operator's node from its arguments and its result's kind; None for unknown operators."""
    b: GraphBuilder = recorder.made
    node = recorder.node
    own = _NAMES.get(name, name)
    formula = _formulas(b).get(name)

    def plain(args: Any, kwargs: Any, kind: str) -> int:
        if own in _COMPARE:
            return int(b.add(own, "b", *_alike(recorder, args)))
        if name in _LOGICAL:
            return b.add(own, "b", *(node(x, "b") for x in args))
        given = [node(x, kind) for x in args[:2]]
        if own in ("add", "sub"):
            given = [given[0], _times(b, given[1], args, kwargs)]
        if own == "div" and kwargs.get("rounding_mode") == "floor":
            return b.add("floordiv", kind, *given)
        if own == "div" and kwargs.get("rounding_mode") == "trunc":
            return b.cast(b.add("trunc", "f", b.add("div", "f", *(b.cast(x, "f") for x in given))), kind)
        if own in ("maximum", "minimum", "add", "mul") and kind == "b":
            return b.add("and" if own in ("minimum", "mul") else "or", "b", *given)
        return b.add(own, kind, *given)

    if formula is not None:
        return lambda args, kwargs, kind: formula(*(node(x, "f") for x in args))
    if name == "rsub":
        return lambda args, kwargs, kind: b.add(
            "sub", kind, node(args[1], kind), _times(b, node(args[0], kind), args, kwargs)
        )
    if name == "clamp":
        return lambda args, kwargs, kind: _clamped(recorder, args, kwargs, kind)
    if name in ("where", "masked_fill"):
        order = (0, 1, 2) if name == "where" else (1, 2, 0)
        return lambda args, kwargs, kind: b.add(
            "where", kind, node(args[order[0]], "b"), node(args[order[1]], kind), node(args[order[2]], kind)
        )
    if name == "threshold_backward":
        return lambda args, kwargs, kind: b.add(
            "where",
            "f",
            b.add("le", "b", node(args[1], "f"), b.const(args[2], "f")),
            b.const(0.0, "f"),
            node(args[0], "f"),
        )
    if name in _SAME or name in _CASTS:
        return lambda args, kwargs, kind: node(args[0], kind)
    if name == "copy":
        return lambda args, kwargs, kind: node(args[1], kind)
    if name in _CONSTANTS:
        return lambda args, kwargs, kind: b.const(_CONSTANTS[name], kind)
    if name in _FILLED:
        return lambda args, kwargs, kind: node(args[_FILLED[name]], kind)
    return plain if own in OPERATORS and own not in ("cast", "where") else None


def _times(b: GraphBuilder, n: int, args: Any, kwargs: Any) -> int:
    """A node multiplied by an operator's ``alpha``."""
    alpha, kind = kwargs.get("alpha", args[2] if len(args) > 2 else 1), b.nodes[n].kind
    return n if alpha == 1 else b.add("mul", kind, n, b.const(alpha, kind))


def _alike(recorder: Any, args: Any) -> list[int]:
    """The nodes to compare, converted to the kind in which PyTorch compares them."""
    nodes = [recorder.node(x) for x in args]
    kinds = [recorder.made.nodes[n].kind for n in nodes]
    # A Python number does not widen a tensor's integers.
    widest = next(kind for kind in "flib" if kind in kinds)
    return [recorder.made.cast(n, widest) if widest != "b" else n for n in nodes]


def _clamped(recorder: Any, args: Any, kwargs: Any, kind: str) -> int:
    low, high = (*args[1:], None, None)[:2]
    low, high = kwargs.get("min", low), kwargs.get("max", high)
    found = recorder.node(args[0], kind)
    for op, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            found = recorder.made.add(op, kind, found, recorder.node(bound, kind))
    return int(found)
