"""The host's side of ``device.distances``: which calls have a table, and the launch that fills it."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.backends.gpu.device.records import SLACK, DistanceTable, Tabulated
from flashtile.backends.gpu.functions import module_of, operands_of
from flashtile.backends.gpu.launch import Launch, Pointer
from flashtile.backends.gpu.named import device_code
from flashtile.call.functions import score_function
from flashtile.call.problem import Problem
from flashtile.mods.places import tabulated

tabulate = device_code("flashtile.backends.gpu.device.distances").tabulate


_BLOCK = 256


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
