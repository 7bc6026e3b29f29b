"""Prints a graph as Triton functions, one for each thing that values depend on: a head, its rows, a pair, a score.

    of_head(operands, at) -> head                           once a tile
    of_rows(operands, head, at) -> rows                     vectors, once a tile of rows
        fetch(operands, head, rows, at) -> fetched              loads by key or pair, while a product runs
        function(score, fetched, operands, head, rows, at)      the score, or for a mask the score x or its replacement
    linear(score, fetched, operands, head, rows, at)        the score and its slope
        partials(score, fetched, operands, head, rows, at)      derivatives of the score by the loads
        places(fetched, operands, sums, head, rows, at)         the places of these derivatives in sums, as 64-bit
        numbers
    of_distance(operands, head, at)                         values of ``places.tabulated``, for their table

``at`` is the device's ``At``, ``operands`` its ``Operands``. Indices are clamped to their tensors. If there is a table
of values that depend on the distance alone, ``fetch`` reads these values from it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

from flashtile.mods.graph import Graph, Node, inputs_of, parse
from flashtile.mods.places import tabulated

HEADER = '''"""Mod {name}, printed from its graph."""
import triton
import triton.language as tl

from flashtile.backends.gpu.device import functions
from flashtile.backends.gpu.device.mods import tanh


'''
_TYPES = {"f": "tl.float32", "i": "tl.int32", "l": "tl.int64", "b": "tl.int1"}
_NAN = ", propagate_nan=tl.PropagateNan.ALL"
# Operators on floats; {0} and {1} are arguments.
_FLOATS = {
    "floordiv": "tl.floor({0} / {1})", "rem": "{0} - tl.floor({0} / {1}) * {1}",
    "fmod": "{0} - functions.trunc({0} / {1}) * {1}", "maximum": f"tl.maximum({{0}}, {{1}}{_NAN})",
    "minimum": f"tl.minimum({{0}}, {{1}}{_NAN})", "sign": "functions.sign({0})",
}  # fmt: skip
_TEXTS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "neg": "-{0}", "abs": "tl.abs({0})",
    "eq": "{0} == {1}", "ne": "{0} != {1}",
    "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}",
    "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "shl": "{0} << {1}", "shr": "{0} >> {1}",
    "where": "tl.where({0}, {1}, {2})", "floordiv": "functions.floor_div({0}, {1})",
    "rem": "functions.remainder({0}, {1})", "fmod": "{0} % {1}", "maximum": "tl.maximum({0}, {1})",
    "minimum": "tl.minimum({0}, {1})", "sign": "functions.sign_of({0})", "pow": "functions.power({0}, {1})",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))", "tanh": "tanh({0})", "trunc": "functions.trunc({0})",
    "log1p": "functions.log1p({0})",
    **{name: f"tl.{name}({{0}})" for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf")},
    "floor": "tl.floor({0})", "ceil": "tl.ceil({0})",
}  # fmt: skip
_POWERS = {2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", 4.0: "({0} * {0}) * ({0} * {0})", 0.5: "tl.sqrt({0})",
           -0.5: "tl.rsqrt({0})", -1.0: "1.0 / {0}", -2.0: "1.0 / ({0} * {0})"}  # fmt: skip

# The number of results of ``functions.divisor``.
_PARTS = 5


@functools.lru_cache(maxsize=1024)
def source(text: str, has_table: bool = False) -> str:
    """The functions of a graph, from its text. All graphs that compute the same have one text.

    ``has_table``: whether kernels get a table of ``places.tabulated``.
    """
    return _Printer(parse(text), has_table).source()


def name_of(text: str) -> str:
    """A name for a printed graph: a hash of its text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Printer:
    """Prints one graph."""

    def __init__(self, graph: Graph, has_table: bool) -> None:
        self.graph = graph
        self.all_tabulated = tabulated(graph)
        self.tabulated = self.all_tabulated if has_table else ()
        ends = [graph.result, *(() if graph.slope is None else (graph.slope,)), *(x for p in graph.partials for x in p)]
        needed, levels = graph.needed(ends), graph.levels
        self.crossing = [self._crossing(needed, ends, level) for level in (0, 1)]
        self.divisors = sorted({graph.nodes[n].args[1] for n in needed if self._divides_index(graph.nodes[n])})
        if self.tabulated:
            loads = {p.load for p in graph.partials}
            needed = graph.needed([n for n in ends if n not in loads - {graph.result}], self.tabulated)
        self.fetched = [n for n in needed if (graph.nodes[n].op == "load" and levels[n] == 2) or n in self.tabulated]

    def _crossing(self, needed: Sequence[int], ends: Sequence[int], level: int) -> list[int]:
        """The nodes of a level that are arguments of nodes of higher levels."""
        graph = self.graph
        taken = {x for n in needed if graph.levels[n] > level for x in inputs_of(graph.nodes[n])} | set(ends)
        return [n for n in needed if n in taken and graph.levels[n] == level and not _is_plain(graph.nodes[n])]

    def _divides_index(self, node: Node) -> bool:
        """Whether a node divides a row or a key, which is not negative, by a number that depends on the head alone."""
        if node.op not in ("floordiv", "rem") or node.kind != "i":
            return False
        a, b = (self.graph.nodes[n] for n in node.args)
        return a.op in ("i", "j") and b.op != "const" and self.graph.levels[node.args[1]] == 0 and not _is_plain(b)

    def _compares_distance(self, node: Node) -> bool:
        """Whether a node is ``abs(x - y) <= n`` for integers that depend on the pair, and n on the head alone."""
        if node.op != "le" or self.graph.levels[node.args[1]] > 0 or self.graph.levels[node.args[0]] < 2:
            return False
        size = self.graph.nodes[node.args[0]]
        return size.op == "abs" and size.kind == "i" and self.graph.nodes[size.args[0]].op == "sub"

    def _inputs(self, node: Node) -> tuple[int, ...]:
        """The nodes that appear in the text of a node."""
        if not self._compares_distance(node):
            return inputs_of(node)
        first, second = self.graph.nodes[self.graph.nodes[node.args[0]].args[0]].args
        ordered = (second, first) if self.graph.levels[first] < self.graph.levels[second] else (first, second)
        return *ordered, node.args[1]

    def source(self) -> str:
        """The module's text."""
        graph, (head, rows) = self.graph, self.crossing
        parts = [
            self._function("of_head(operands, at)", head, (), self.divisors),
            self._function("of_rows(operands, head, at)", rows, ("head",)),
            self._function("fetch(operands, head, rows, at)", self.fetched, ("head", "rows", "table")),
        ]
        if graph.what == "mask":
            keep = self._body([graph.result], ("head", "rows", "fetched"))
            value = f"tl.where({self._text(graph.result)}, x, fill)"
            if graph.nodes[graph.result].op == "const":
                value = "x" if graph.is_const(graph.result, True) else "functions.filled(fill, x)"
            parts.append(f"def function(x, fetched, operands, head, rows, at, fill):\n{keep}    return {value}\n")
        else:
            arguments = "(score, fetched, operands, head, rows, at)"
            body, value = self._body([graph.result], ("head", "rows", "fetched")), self._of_score(graph.result)
            parts.append(f"def function{arguments}:\n{body}    return {value}\n")
            assert graph.slope is not None
            body = self._body([graph.result, graph.slope], ("head", "rows", "fetched"))
            parts.append(f"def linear{arguments}:\n{body}    return {value}, {self._of_score(graph.slope)}\n")
            slopes = [p.slope for p in graph.partials]
            body = self._body(slopes, ("head", "rows", "fetched"))
            parts.append(f"def partials{arguments}:\n{body}    return {_tuple([self._of_score(n) for n in slopes])}\n")
            parts.append(self._places())
            if self.all_tabulated:
                parts.append(self._function("of_distance(operands, head, at)", self.all_tabulated, ("head",)))
        return HEADER.format(name=name_of(graph.text)) + "\n\n".join("@triton.jit\n" + part for part in parts)

    def _places(self) -> str:
        loads = [self.graph.nodes[p.load] for p in self.graph.partials]
        body = self._body([n for load in loads for n in inputs_of(load)], ("head", "rows", "fetched"))
        offsets = [self._offset(load, "sums") or "tl.cast(0, tl.int64)" for load in loads]
        return f"def places(fetched, operands, sums, head, rows, at):\n{body}    return {_tuple(offsets)}\n"

    def _of_score(self, n: int) -> str:
        """A value broadcast to the score's shape."""
        return self._text(n) if self.graph.levels[n] == 3 else f"functions.filled({self._text(n)}, score)"

    def _function(
        self, signature: str, results: Sequence[int], given: tuple[str, ...], divisors: Sequence[int] = ()
    ) -> str:
        body = self._body(results, given)
        body += "".join(f"    d{n} = functions.divisor(x{n})\n" for n in divisors)
        values = [f"x{n}" for n in results] + [f"d{n}[{part}]" for n in divisors for part in range(_PARTS)]
        return f"def {signature}:\n{body}    return {_tuple(values)}\n"

    def _body(self, results: Sequence[int], given: tuple[str, ...]) -> str:
        """The lines that compute some nodes, from the results of earlier functions."""
        have: dict[int, str] = {}
        for name, nodes in (("head", self.crossing[0]), ("rows", self.crossing[1]), ("fetched", self.fetched)):
            if name in given:
                have |= {n: f"{name}[{place}]" for place, n in enumerate(nodes)}
        if "table" in given:
            table = enumerate(self.tabulated)
            have |= {n: f"functions.by_distance(operands.table, {place}, at)" for place, n in table}
        lines: list[str] = []
        done: set[int] = set()

        def need(n: int) -> None:
            node = self.graph.nodes[n]
            if n in done or _is_plain(node):
                return
            done.add(n)
            if n not in have:
                for x in self._inputs(node):
                    need(x)
            lines.append(f"    x{n} = {have.get(n) or self._expression(node)}\n")

        for n in results:
            need(n)
        return "".join(lines)

    def _text(self, n: int) -> str:
        """The name of a value where it is used."""
        op, kind, args = self.graph.nodes[n]
        if op == "const":
            return f'float("{args[0]}")' if kind == "f" and repr(args[0]) in ("inf", "-inf", "nan") else repr(args[0])
        return "score" if op == "score" else f"at.{op}" if op in ("b", "h", "i", "j") else f"x{n}"

    def _expression(self, node: Node) -> str:
        op, kind, args = node
        if op == "number":
            return f"tl.cast(operands.numbers[{args[0]}], {_TYPES[kind]})"
        if op == "size":
            return f"operands.tensors[{args[0]}].sizes[{args[1]}]"
        if op == "load":
            offset = self._offset(node)
            text = f"tl.load(operands.tensors[{args[0]}].ptr{offset and f' + ({offset})'})"
            return f"{text} != 0" if kind == "b" else f"tl.cast({text}, {_TYPES[kind]})"
        texts = [self._text(n) for n in args]
        if self._divides_index(node):
            start = len(self.crossing[0]) + _PARTS * self.divisors.index(args[1])
            divisor = ", ".join(f"head[{start + part}]" for part in range(_PARTS))
            return f"functions.index_{'div' if op == 'floordiv' else 'rem'}({texts[0]}, {divisor})"
        if self._compares_distance(node):
            first, second, most = map(self._text, self._inputs(node))
            if sorted((first, second)) == ["at.i", "at.j"]:
                first, second = "functions.apart(at)", "0"
            return f"functions.is_within({first}, {second}, {most})"
        if op == "sub" and sorted(texts) == ["at.i", "at.j"]:
            return f"{'-' * (texts[0] == 'at.j')}functions.apart(at)"
        if op == "cast":
            return f"tl.cast({texts[0]}, {_TYPES[kind]})"
        if op == "not":
            return f"{texts[0]} == 0" if kind == "b" else f"~{texts[0]}"
        if op == "pow" and self.graph.nodes[args[1]].op == "const":
            known = _POWERS.get(self.graph.nodes[args[1]].args[0])
            if known is not None:
                return known.format(texts[0])
        texts = [f"({x})" if x.startswith("-") else x for x in texts]
        return (_FLOATS.get(op, _TEXTS[op]) if kind == "f" else _TEXTS[op]).format(*texts)

    def _offset(self, load: Node, tensors: str = "operands") -> str:
        operand, *index = load.args
        where = f"{tensors}.tensors[{operand}]"
        terms = []
        for d, n in enumerate(index):
            size, node = f"{where}.sizes[{d}]", self.graph.nodes[n]
            inside = f"functions.inside({self._text(n)}, {size})"
            if self.graph.levels[n] == 2 and tensors == "operands":
                inside = f"functions.inside_by_key({self._text(n)}, {size}, at.j)"
            if node.op == "const":
                inside = f"functions.inside_from_{'end' if node.args[0] < 0 else 'start'}({abs(node.args[0])}, {size})"
            terms.append(f"{inside} * {where}.steps[{d}]")
        return " + ".join(terms)


def _is_plain(node: Node) -> bool:
    """Whether a value has the same name everywhere."""
    return node.op in ("const", "score", "b", "h", "i", "j")


def _tuple(values: Sequence[str]) -> str:
    # A number stands for nothing (``gpu.device``: results); a tuple in a record has no Python number.
    return f"({''.join(f'{x}, ' for x in values).rstrip()})" if values else "(tl.cast(0, tl.int32),)"
