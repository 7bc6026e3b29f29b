"""The backward's host code: the kernels' launches in order, and the plan that repeats them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu.device.records import Call
from flashtile.backends.gpu.launch import Launch, Pointer, pointer
from flashtile.backends.gpu.masks import Side, bounds_launch, masks_of, most_bounds
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.plan import BackwardPlan, Made, Memory, empty, gradient_memory, table_memory
from flashtile.backends.gpu.records import multiprocessors, rows_of, table_launches
from flashtile.backends.portable.backward.config import (
    MOST_SUMS,
    PROGRAMS,
    Kernel,
    choose,
    heads_per_split,
    may_add_bias,
    wanted_kernels,
)
from flashtile.backends.portable.backward.workspace import (
    Repair,
    gqa_splits,
    num_rows,
    places_of,
    row_pitch,
    row_terms,
)
from flashtile.backends.portable.config import for_repair, padded
from flashtile.backends.portable.device.records import BiasGradient, BiasSums, Derivative, ForwardResults, KeyGradients
from flashtile.backends.portable.records import (
    call_of,
    heads_at_once,
    num_programs,
    tiles_of,
)
from flashtile.backends.portable.tuned import or_tables
from flashtile.call.backend import Gradients
from flashtile.call.problem import Problem, Tensors

attention_backward_dbias = device_code("flashtile.backends.portable.backward.dbias").attention_backward_dbias
_kernels = device_code("flashtile.backends.portable.backward.kernel")
attention_backward_dkdv = _kernels.attention_backward_dkdv
attention_backward_dq = _kernels.attention_backward_dq
repair_dq = _kernels.repair_dq
_preprocess = device_code("flashtile.backends.portable.backward.preprocess")
prepare_rows = _preprocess.prepare_rows
sum_gqa_splits = _preprocess.sum_gqa_splits


_PREPARE_ROWS = 32
# Float32 numbers, 1 MB: sequences that run at once add to different copies.
_FEWEST_SUMS = 2**18


def plan(problem: Problem, tensors: Tensors, dout: Tensor, dlse: Tensor | None) -> BackwardPlan:
    """The backward of calls with the same layouts and options; see ``call.backend.Backward``.

    Computes only the gradients that ``problem.grads`` requests. The workspace "rows": ``workspace.places_of``.
    """
    p, shares = problem, list[Any]()
    if p.operand_grad:
        from flashtile.backends.portable.backward import operands  # what few programs need is not loaded by all

        shares = operands.shares_of(p, tensors)

    def prepare(t: Tensors, made: Made, adds: bool) -> tuple[Memory, dict[str, Launch]]:
        device = t.q.device
        memory = gradient_memory(p, t) | table_memory(p, t.q) | {"rows": empty(device, (places_of(p, t)[-1],))}
        if p.intervals:
            memory["bounds"] = empty(device, (bounds_places(p, t)[-1],), torch.int32)
        if t.attn_bias is not None and p.grads.bias:
            memory["dbias"] = _dbias_memory(p, t.attn_bias)
        for share in shares:
            memory |= operands.memory_of(p, t, share)
        return memory, launches(p, t, made["dout"], made["dlse"], adds=adds)

    def finish(t: Tensors, made: Made, adds: bool) -> Gradients:
        dbias, dsinks = made.get("dbias"), None
        if t.sinks is not None and p.grads.sinks:
            of_rows = made["lse"].shape[: 2 if p.varlen else 3]
            delta = made["rows"][: num_rows(p, t)].view(*of_rows[:-1], row_pitch(of_rows[-1], p.varlen))
            dsinks = sinks_gradient(p, t.sinks, made["lse"], delta[..., : of_rows[-1]])
        if dbias is not None and t.attn_bias is not None:
            dbias = (dbias[0] if len(dbias) == 1 else dbias.sum(0)).to(t.attn_bias.dtype)
        of_operands = operands.gradients_of(p, t, shares, made) if shares else ()
        return Gradients(made.get("dq"), made.get("dk"), made.get("dv"), dbias, dsinks, of_operands)

    return BackwardPlan(tensors.q.device, prepare, dout.stride(-1) != 1, finish, or_tables)


def bounds_places(problem: Problem, tensors: Tensors) -> tuple[int, int, int]:
    """Where bounds of tiles of keys begin, bounds for dv alone, and the end of all; bounds of rows come first."""
    rows, keys = most_bounds(problem, tensors), most_bounds(problem, tensors, over_keys=True)
    return rows, rows + keys, rows + 2 * keys


def side_of(problem: Problem, tensors: Tensors, name: Kernel) -> Side:
    """The tiles of the kernel of dq, or of one over keys."""
    config = choose(problem, name)
    if name == "dq":
        return Side(config.block_m)
    offset = bounds_places(problem, tensors)[name == "dv"] if problem.intervals else 0
    return Side(config.block_n, over_keys=True, offset=offset)


def _tiles_to_visit(problem: Problem, tensors: Tensors, name: Kernel, repair: Repair | None) -> Side:
    side = side_of(problem, tensors, name)
    return side if repair is None else side._replace(operand=repair.bounds)


def launches(
    problem: Problem, tensors: Tensors, dout: Tensor, dlse: Tensor | None, *, adds: bool = False
) -> dict[str, Launch]:
    """The launches by kernel name, in order, for plans and for builds; ``adds``: dq, dk and dv to what is there."""
    p, wanted = problem, problem.grads
    made = table_launches(p, tensors) | {"prepare_rows": prepare_launch(p, tensors, dout, dlse)}
    for name, computes in wanted_kernels(p).items():
        if p.intervals:
            made[f"interval_bounds_{name}"] = bounds_launch(p, tensors, side_of(p, tensors, name))
        made[f"attention_backward_{name}"] = dkdv_launch(p, tensors, dout, name, (*computes, adds))
    if gqa_splits(p) > 1:
        places = places_of(p, tensors)
        for name, x, place in (("dk", tensors.k, places[1]), ("dv", tensors.v, places[2])):
            if (wanted.k, wanted.v)[name == "dv"]:
                made[f"sum_gqa_splits_{name}"] = sum_launch(p, name, x, place, adds)
    if wanted.q:
        if p.intervals:
            made["interval_bounds_dq"] = bounds_launch(p, tensors, side_of(p, tensors, "dq"))
        made["attention_backward_dq"] = dq_launch(p, tensors, dout, adds)
    if wanted.bias and not adds_bias(p, tensors.attn_bias):
        made["attention_backward_dbias"] = _dbias_launch(p, tensors, dout)
    return made | (_operand_launches(p, tensors, dout) if p.operand_grad else {})


def _operand_launches(problem: Problem, tensors: Tensors, dout: Tensor) -> dict[str, Launch]:
    """Launches for gradients of what a score mod captures; two by arbitrary places, if they must be repeatable."""
    from flashtile.backends.portable.backward import operands

    made, of_rows = {}, row_terms(problem, tensors)
    for share in operands.shares_of(problem, tensors):
        for first in (True, False) if share.way == "any" and problem.deterministic else (False,):
            name = f"attention_backward_operand{share.number}" + "_greatest" * first
            made[name] = operands.launch_of(problem, tensors, dout, of_rows, share, first=first)
    return made


def prepare_launch(problem: Problem, tensors: Tensors, dout: Tensor, dlse: Tensor | None) -> Launch:
    """Computes delta and lse from the forward's results and their gradients."""
    packed = dout.dim() == 3
    batch, block_dv = 1 if packed else dout.shape[0], padded(problem.head_dim_v)
    strides = (0, 0, 0) if dlse is None else (0, *dlse.stride()) if packed else dlse.stride()
    results = ForwardResults(
        Pointer(dout.dtype, "out"), Pointer(torch.float32, "lse"), pointer(dlse, "dlse"), strides[0], strides[1],
        strides[2], batch, dout.shape[-3], problem.num_heads_q,
    )  # fmt: skip
    rows, of_rows = rows_of("dout", dout, block_dv), row_terms(problem, tensors)
    programs = batch * problem.num_heads_q * (of_rows.stride_head // _PREPARE_ROWS)
    arguments = {"results": results, "douts": rows, "of_rows": of_rows, "BLOCK_M": _PREPARE_ROWS}
    return Launch(prepare_rows, programs, arguments, {"num_warps": 4, "num_stages": 1})


def dkdv_launch(
    problem: Problem, tensors: Tensors, dout: Tensor, name: Kernel, wanted: tuple[bool, bool, bool],
    repair: Repair | None = None,
) -> Launch:  # fmt: skip
    """``wanted``: whether dk, whether dv, and whether to add them."""
    config, splits, places = choose(problem, name), gqa_splits(problem), places_of(problem, tensors)
    if repair is not None:
        config, splits = for_repair(config), 1
    masks = masks_of(problem, tensors, _tiles_to_visit(problem, tensors, name, repair))
    call, rows = call_of(problem, tensors, config, ("q", "dout"), dout, masks=masks)
    dk, dv = (
        (Pointer(problem.grad_dtype, grad) if splits == 1 else Pointer(torch.float32, "rows", 4 * place)) if is_wanted
        else None for grad, is_wanted, place in zip(("dk", "dv"), wanted, places[1:], strict=False)
    )  # fmt: skip
    grads = KeyGradients(dk, dv, None if repair else heads_per_split(problem), wanted[2] and splits == 1)
    tiles = tiles_of(config, heads_at_once(problem, tensors.q, dout))
    arguments = {
        "call": call,
        "douts": rows,
        "of_rows": row_terms(problem, tensors, repair),
        "grads": grads,
        "tiles": tiles,
    }
    programs = num_programs(problem, tensors, config.block_n, over_keys=True) * splits
    return Launch(attention_backward_dkdv, programs, arguments, config.options())


def sum_launch(problem: Problem, name: str, x: Tensor, place: int, adds: bool) -> Launch:
    """``x``: k or v; ``place``: of its gradient by split in the workspace."""
    arguments = {
        "splits_ptr": Pointer(torch.float32, "rows", 4 * place), "sum_ptr": Pointer(problem.grad_dtype, name),
        "total": x.numel(), "splits": gqa_splits(problem), "DIM": x.shape[-1], "ADDS": adds, "BLOCK": 1024,
    }  # fmt: skip
    return Launch(sum_gqa_splits, -(-x.numel() // 1024), arguments, {"num_warps": 4, "num_stages": 1})


def dq_launch(problem: Problem, tensors: Tensors, dout: Tensor, adds: bool, repair: Repair | None = None) -> Launch:
    """Computes dq, and dbias if ``adds_bias``; ``adds``: to what is there."""
    config = choose(problem, "dq") if repair is None else for_repair(choose(problem, "dq"))
    masks = masks_of(problem, tensors, _tiles_to_visit(problem, tensors, "dq", repair))
    call, rows = call_of(problem, tensors, config, ("k", "v"), dout, masks=masks)
    sums = bias_sums(problem, tensors.attn_bias if adds_bias(problem, tensors.attn_bias) else None, call)
    tiles = tiles_of(config, heads_at_once(problem, tensors.k, tensors.v))
    arguments = {
        "call": call, "douts": rows, "of_rows": row_terms(problem, tensors, repair),
        "dq_ptr": Pointer(problem.grad_dtype, "dq"), "bias_sums": sums, "tiles": tiles,
    }  # fmt: skip
    programs = num_programs(problem, tensors, config.block_m)
    if repair is None:
        return Launch(attention_backward_dq, programs, {**arguments, "ADDS": adds}, config.options())
    at_once = min(2 * multiprocessors(tensors.q.device), programs)
    return Launch(repair_dq, at_once, {**arguments, "count": programs}, config.options())


def adds_bias(problem: Problem, bias: Tensor | None) -> bool:
    """Whether the kernel of dq computes dbias too."""
    return bias is not None and may_add_bias(problem) and bias.numel() <= MOST_SUMS


def bias_sums(problem: Problem, bias: Tensor | None, call: Call) -> BiasSums:
    """Where a kernel adds dbias up, of a bias that it computes the gradient of, else None."""
    if bias is None:
        return BiasSums(None, None, None, None, None, None, None, None, None)
    (heads, rows, cols), (over_heads, over_rows, over_cols) = _bias_shape(problem, bias)
    assert call.mods.scores is not None
    vector_width = call.mods.scores[-1].operands.VECTOR  # the bias comes last
    return BiasSums(
        Pointer(torch.float32, "dbias"), bias_entries(problem, bias), heads, rows, cols, vector_width,
        over_heads, over_rows, over_cols,
    )  # fmt: skip


def sums_memory(problem: Problem, bias: Tensor) -> Callable[[], Tensor]:
    """What ``bias_sums`` are, ``(parts, *bias.shape)``."""
    parts = bias_entries(problem, bias) if _bias_batch(bias) == 1 else 1
    return functools.partial(torch.zeros, (parts, *bias.shape), device=bias.device)


def _dbias_memory(problem: Problem, bias: Tensor) -> Callable[[], Tensor]:
    """What dbias is computed in, ``(parts, *bias.shape)``: float32 sums, or of its dtype if there is but one."""
    if adds_bias(problem, bias):
        return sums_memory(problem, bias)
    parts = bias_parts(problem, bias)
    return empty(bias.device, (parts, *bias.shape), bias.dtype if parts == 1 else torch.float32)


def _bias_batch(bias: Tensor) -> int:
    """The sequences that a bias has numbers for: 1, or the batch's."""
    return bias.shape[0] if bias.dim() == 4 else 1


def bias_entries(problem: Problem, bias: Tensor) -> int:
    """Copies of dbias, which sequence b % copies adds to: more of a small one, so that fewer atomics collide."""
    sequences = _bias_batch(bias)
    return sequences if sequences > 1 else max(1, min(problem.batch, _FEWEST_SUMS // max(1, bias.numel())))


def _bias_shape(problem: Problem, bias: Tensor) -> tuple[tuple[int, ...], list[bool]]:
    """A bias's heads, rows and keys, and along which of them it broadcasts."""
    full, shape = (problem.num_heads_q, problem.seqlen_q, problem.seqlen_k), (1, 1, 1, *bias.shape)[-3:]
    return shape, [have == 1 and size != 1 for have, size in zip(shape, full, strict=True)]


def bias_parts(problem: Problem, bias: Tensor) -> int:
    """Parts of a batch that shares a bias of few tiles; each has sums of its own: for some 256 programs."""
    programs, is_shared = _bias_tiles(problem, bias), _bias_batch(bias) == 1
    return max(1, min(problem.batch, PROGRAMS // max(1, programs))) if is_shared else 1


def _bias_tiles(problem: Problem, bias: Tensor) -> int:
    config, shape = choose(problem, "dbias"), (1, 1, 1, 1, *bias.shape)[-4:]
    return math.prod(bias.shape[:-2]) * -(-shape[2] // config.block_m) * -(-shape[3] // config.block_n)


def _dbias_launch(problem: Problem, tensors: Tensors, dout: Tensor) -> Launch:
    config, bias = choose(problem, "dbias"), tensors.attn_bias
    assert bias is not None
    parts, (shape, over) = bias_parts(problem, bias), _bias_shape(problem, bias)
    sums_batch = _bias_batch(bias) == 1 and problem.batch != 1
    masks = masks_of(problem, tensors, Side(config.block_m))
    masks = None if masks is None else masks._replace(bounds=None)
    call, rows = call_of(problem, tensors, config, ("q", "k", "v", "dout"), dout, (sums_batch, over[0]), masks)
    dbias = BiasGradient(
        Pointer(bias.dtype if parts == 1 else torch.float32, "dbias"), shape[0], shape[1], shape[2],
        problem.seqlen_q, problem.seqlen_k, parts, sums_batch, over[0], over[1], over[2],
    )  # fmt: skip
    arguments = {
        "call": call,
        "douts": rows,
        "of_rows": row_terms(problem, tensors),
        "dbias": dbias,
        "partial": Derivative(None, 0),
        "tiles": tiles_of(config),
    }
    programs = _bias_tiles(problem, bias) * parts
    return Launch(attention_backward_dbias, programs, arguments, config.options())


def sinks_gradient(problem: Problem, sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """``-sum over rows of exp(sink - lse) * delta``: a sink is a key with value 0, so its dprobs is 0."""
    rest: Tensor | float = 0.0
    if problem.large_scores:
        lse, rest = lse.unbind(-1)
    weight = torch.exp(sinks.float()[:, None] - torch.where(lse == -torch.inf, torch.inf, lse) - rest)
    if problem.varlen:
        weight, delta = weight[None], delta[None]
    return -(weight * delta).sum(dim=(0, 2)).to(sinks.dtype)
