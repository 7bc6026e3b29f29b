"""Printed mods as Triton functions, and the tables of what a score mod computes by distance alone.

There is one module in memory for each text, so that graphs that are alike share builds.
"""

from __future__ import annotations

import functools
import linecache
import types
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu.device.records import SLACK, DistanceTable, Mod, Operand, Operands, Tabulated
from flashtile.backends.gpu.launch import Captured, Const, Launch, Pointer
from flashtile.backends.gpu.named import DeviceModule, device_code
from flashtile.call.functions import Function, score_function
from flashtile.call.problem import Problem
from flashtile.mods.places import tabulated
from flashtile.mods.printed import name_of, source

tabulate = device_code("flashtile.backends.gpu.device.functions").tabulate

# Distances that a program of ``tabulate`` computes.
_BLOCK = 256


class PrintedModule(DeviceModule):
    """The functions of a graph's text, by name; a launch's build is known by the text, whatever process printed it."""

    def __init__(self, text: str, has_table: bool) -> None:
        """``has_table`` as of ``printed.source``."""
        self.text, self.has_table = text, has_table
        super().__init__(f"mod {name_of(text)}{' table' if has_table else ''}")

    @property
    def source(self) -> str:
        """What is printed."""
        return source(self.text, self.has_table)

    def load(self) -> Any:
        """The module."""
        return _printed(self)


@functools.cache
def module_of(text: str, has_table: bool = False) -> PrintedModule:
    """The functions of a graph's text; ``has_table`` as of ``printed.source``."""
    return PrintedModule(text, has_table)


@functools.cache
def _printed(module: PrintedModule) -> Any:
    lines, name = module.source, f"<{module.name}>"
    linecache.cache[name] = (len(lines), None, lines.splitlines(True), name)
    made = types.ModuleType(module.name.replace(" ", "_"))
    made.__file__ = name
    exec(compile(lines, name, "exec"), vars(made))
    return made


def mod_of(function: Function | None, first_number: int = 0, table: Any = None) -> Mod | None:
    """The record of a call's mod, with leaves for what it reads.

    Args:
        function: The mod.
        first_number: The place of its first number.
        table: ``DistanceTable`` of what it computes by distance, None if it is to compute that itself.
    """
    if function is None:
        return None
    graph, made = function.graph, module_of(function.graph.text, table is not None)
    # Where the slope is 1 there is none to keep.
    has_slope = graph.what == "score" and not graph.is_const(graph.slope, 1.0)
    operands = operands_of(function, first_number)._replace(table=table)
    return Mod(made.function, made.linear if has_slope else None, made.of_head, operands, made.of_rows, made.fetch)


def operands_of(function: Function, first_number: int = 0) -> Operands:
    """Leaves for what a mod reads."""
    tensors = tuple(_operand(x, function.first + n) for n, x in enumerate(function.operands))
    kinds = {"f": "fp64", "i": "i64"}
    numbers = tuple(Captured(f"numbers[{first_number + n}]", kinds[k]) for n, k in enumerate(function.graph.numbers))
    return Operands(tensors or None, numbers or None)


def _operand(x: Tensor, place: int) -> Operand:
    dtype = torch.uint8 if x.dtype == torch.bool else x.dtype
    # Nothing is assumed of address and strides but that elements of a row are beside one another, so that other
    # lengths and views need no build of their own. ``inside_by_key`` relies on the addresses.
    steps = tuple(Const(1) if d == x.dim() - 1 and step == 1 else step for d, step in enumerate(x.stride()))
    return Operand(Pointer(dtype, f"operands[{place}]", 0, False), tuple(x.shape), steps)


def table_of(problem: Problem) -> DistanceTable | None:
    """The record of a call's table; None if it has none, as over a cache, where each sequence has few rows."""
    key = problem.score_function
    if key is None or problem.cached or not (values := tabulated(key.graph)):
        return None
    ops = {key.graph.nodes[n].op for n in key.graph.needed(values)}
    before = problem.seqlen_k + SLACK
    size = before + problem.seqlen_q + SLACK
    batch = problem.batch if "b" in ops else 1
    return DistanceTable(Pointer(torch.float32, "distances"), batch, problem.num_heads_q, size, before)


def table_numbers(problem: Problem) -> int | None:
    """Float32 numbers of a call's table; None if it has none."""
    table, key = table_of(problem), problem.score_function
    if table is None or key is None:
        return None
    return len(tabulated(key.graph)) * table.batch * table.heads * int(table.size)


def table_launches(problem: Problem, t: Any) -> dict[str, Launch]:
    """What fills it, by name."""
    table, function = table_of(problem), score_function(problem, t)
    if table is None or function is None:
        return {}
    made, count = module_of(function.graph.text), len(tabulated(function.graph))
    arguments = {
        "mod": Tabulated(made.of_head, made.of_distance, operands_of(function)), "table": table, "COUNT": count,
        "BLOCK": _BLOCK,
    }  # fmt: skip
    programs = -(-table.size // _BLOCK) * table.batch * table.heads
    return {"tabulate": Launch(tabulate, programs, arguments, {"num_warps": 4, "num_stages": 1})}
