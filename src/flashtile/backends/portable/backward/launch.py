"""The backward's host code: the kernels' launches in order, and the plan that repeats them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu.host import Step, like_floats, run
from flashtile.backends.gpu.intervals import Side, bounds_launch, empty_bounds, most_bounds
from flashtile.backends.gpu.launch import Launch, Pointer, pointer
from flashtile.backends.gpu.lists import masks_of
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.records import multiprocessors, operand_names, read_by_mods, rows_of, table_launches
from flashtile.backends.gpu.trial import on_trial
from flashtile.backends.portable.backward.config import (
    MOST_SUMS,
    PROGRAMS,
    Kernel,
    choose,
    heads_per_split,
    key_kernels,
    may_add_bias,
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
from flashtile.backends.portable.device.records import BiasGradient, BiasSums, ForwardResults, KeyGradients, Partial
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
_OPERANDS = (
    "q", "k", "v", "dout", "alibi", "mask", "bias", "cu_seqlens_q", "cu_seqlens_k", "rng_state", "origins", "out",
    "lse", "dlse", "rows", "dq", "dk", "dv", "dbias", "row_keys", "key_rows", "row_blocks", "row_items", "key_blocks",
    "key_items", "bounds",
)  # fmt: skip


class BackwardPlan:
    """The backward of calls with the same layouts and options; see ``call.backend.Backward``.

    Computes only the gradients that ``problem.grads`` requests. Workspace: ``workspace.places_of``.
    """

    def __init__(self, problem: Problem, tensors: Tensors, dout: Tensor, dlse: Tensor | None) -> None:
        """Lays out no launch yet: tiles depend on those on trial when the plan runs."""
        t = tensors
        self._problem = problem
        self._copies_dout = dout.stride(-1) != 1
        self._like_rows = like_floats(t.q, (places_of(problem, t)[-1],))
        self._empty_like: Callable[[Tensor], Tensor] = functools.partial(_empty_contiguous, dtype=problem.grad_dtype)
        if problem.grad_dtype == problem.dtype and all(x.is_contiguous() for x in (t.q, t.k, t.v)):
            self._empty_like = torch.empty_like
        self._steps: dict[object, list[Step]] = {}
        self._bounds = bounds_places(problem, t)[-1] if problem.intervals else None
        self._shares: list[Any] = []
        if problem.operand_grad:
            from flashtile.backends.portable.backward import operands  # what few programs need is not loaded by all

            self._shares, self._operands = operands.shares_of(problem, t), operands

    def __call__(
        self,
        tensors: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        sums: Gradients | None = None,
    ) -> Gradients:
        """The gradients, from the forward's results, added to ``sums`` if given."""
        p, t, wanted = self._problem, tensors, self._problem.grads
        if self._copies_dout:
            dout = dout.contiguous()
        # The forward's results are 16-byte aligned, but a caller may pass others.
        if (out.data_ptr() | lse.data_ptr()) % 16:
            out, lse = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (out, lse))
        rows, empty_like = torch.empty_like(self._like_rows), self._empty_like
        if sums is None:
            dq = empty_like(t.q) if wanted.q else None
            dk = empty_like(t.k) if wanted.k else None
            dv = empty_like(t.v) if wanted.v else None
        else:
            dq, dk, dv = sums.dq, sums.dk, sums.dv
        bias, dbias = t.attn_bias, None
        if bias is not None and wanted.bias:
            dbias = _new_dbias(p, bias)
        key = (sums is None, on_trial())
        steps = self._steps.get(key)
        if steps is None:
            steps = self._steps[key] = or_tables(lambda: self._make(t, dout, dlse, sums is not None))
        sums_of = [self._operands.new_sums(p, t, share) for share in self._shares]
        run(steps, (
            t.q, t.k, t.v, dout, t.alibi_slopes, t.attn_mask, t.attn_bias, t.cu_seqlens_q, t.cu_seqlens_k, t.rng_state,
            t.origins, out, lse, dlse, rows, dq, dk, dv, dbias, t.row_keys, t.key_rows,
            t.row_blocks, t.row_items, t.key_blocks, t.key_items,
            None if self._bounds is None else empty_bounds(self._bounds, t.q),
            *read_by_mods(t, self._problem), *(x for each in sums_of for x in each),
        ))  # fmt: skip
        dsinks = None
        if t.sinks is not None and wanted.sinks:
            of_rows = lse.shape[: 2 if p.varlen else 3]
            delta = rows[: num_rows(p, t)].view(*of_rows[:-1], row_pitch(of_rows[-1], p.varlen))
            dsinks = sinks_gradient(p, t.sinks, lse, delta[..., : of_rows[-1]])
        if bias is not None and dbias is not None:
            dbias = (dbias[0] if len(dbias) == 1 else dbias.sum(0)).to(bias.dtype)
        return Gradients(dq, dk, dv, dbias, dsinks, self._of_operands(t, sums_of))

    def _of_operands(self, t: Tensors, sums_of: list[list[Tensor]]) -> tuple[Tensor | None, ...]:
        """The gradients of what the score mod captures, from their sums."""
        if not self._shares:
            return ()
        totals: dict[int, Tensor] = {}
        for share, sums in zip(self._shares, sums_of, strict=True):
            found = self._operands.gradient_of(self._problem, t, share, sums)
            totals[share.operand] = totals[share.operand] + found if share.operand in totals else found
        wanted = zip(t.operands or (), self._problem.grads.operands, strict=True)
        return tuple(
            (totals[n].to(x.dtype) if n in totals else torch.zeros_like(x)) if is_wanted else None
            for n, (x, is_wanted) in enumerate(wanted)
        )

    def _make(self, t: Tensors, dout: Tensor, dlse: Tensor | None, adds: bool) -> list[Step]:
        made = launches(self._problem, t, dout, dlse, adds=adds).values()
        names = (*_OPERANDS, *operand_names(t))
        for share in self._shares:
            names += (share.sums, f"greatest{share.number}")[: len(self._operands.new_sums(self._problem, t, share))]
        return [Step(each, names, t.q.device) for each in made]


def bounds_places(problem: Problem, tensors: Tensors) -> tuple[int, int, int]:
    """Where the bounds of tiles of keys begin, those for dv alone, and the end of all; those of rows come first."""
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


def _empty_contiguous(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``torch.empty_like``, but contiguous, and slower."""
    return x.new_empty(x.shape, dtype=dtype)


def launches(
    problem: Problem, tensors: Tensors, dout: Tensor, dlse: Tensor | None, *, adds: bool = False
) -> dict[str, Launch]:
    """The launches by kernel name, in order, for plans and for builds; ``adds``: dq, dk and dv to what is there."""
    p, wanted = problem, problem.grads
    made = table_launches(p, tensors) | {"prepare_rows": _prepare_launch(p, tensors, dout, dlse)}
    for name in key_kernels(p):
        with_dk, with_dv = wanted.k and name != "dv", wanted.v and name != "dk"
        if with_dk or with_dv:
            if p.intervals:
                made[f"interval_bounds_{name}"] = bounds_launch(p, tensors, side_of(p, tensors, name))
            made[f"attention_backward_{name}"] = dkdv_launch(p, tensors, dout, name, (with_dk, with_dv, adds))
    if gqa_splits(p) > 1:
        places = places_of(p, tensors)
        for name, x, place in (("dk", tensors.k, places[1]), ("dv", tensors.v, places[2])):
            if (wanted.k, wanted.v)[name == "dv"]:
                made[f"sum_gqa_splits_{name}"] = _sum_launch(p, name, x, place, adds)
    if wanted.q:
        if p.intervals:
            made["interval_bounds_dq"] = bounds_launch(p, tensors, side_of(p, tensors, "dq"))
        made["attention_backward_dq"] = dq_launch(p, tensors, dout, adds)
    if wanted.bias and not adds_bias(p, tensors.attn_bias):
        made["attention_backward_dbias"] = _dbias_launch(p, tensors, dout)
    return made | (_operand_launches(p, tensors, dout) if p.operand_grad else {})


def _operand_launches(problem: Problem, tensors: Tensors, dout: Tensor) -> dict[str, Launch]:
    """Those of the gradients of what a score mod captures; by arbitrary places two, if they must be repeatable."""
    from flashtile.backends.portable.backward import operands

    made, of_rows = {}, row_terms(problem, tensors)
    for share in operands.shares_of(problem, tensors):
        for first in (True, False) if share.way == "any" and problem.deterministic else (False,):
            name = f"attention_backward_operand{share.number}" + "_greatest" * first
            made[name] = operands.launch_of(problem, tensors, dout, of_rows, share, first=first)
    return made


def _prepare_launch(problem: Problem, tensors: Tensors, dout: Tensor, dlse: Tensor | None) -> Launch:
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


def _sum_launch(problem: Problem, name: str, x: Tensor, place: int, adds: bool) -> Launch:
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
    bias = tensors.attn_bias if adds_bias(problem, tensors.attn_bias) else None
    sums: Any = BiasSums(None, None, None, None, None, None, None, None, None)
    if bias is not None:
        (heads, bias_rows, cols), (over_heads, over_rows, over_cols) = _bias_shape(problem, bias)
        assert call.mods.scores is not None
        unit = call.mods.scores[-1].operands.UNIT  # the bias comes last
        sums = BiasSums(
            Pointer(torch.float32, "dbias"), bias_entries(problem, bias), heads, bias_rows, cols, unit, over_heads,
            over_rows, over_cols,
        )  # fmt: skip
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


def _new_dbias(problem: Problem, bias: Tensor) -> Tensor:
    """What dbias is computed in, ``(parts, *bias.shape)``: float32 sums, or of its dtype if there is but one."""
    if adds_bias(problem, bias):
        parts = bias_entries(problem, bias) if _bias_batch(bias) == 1 else 1
        return bias.new_zeros((parts, *bias.shape), dtype=torch.float32)
    parts = bias_parts(problem, bias)
    return bias.new_empty((parts, *bias.shape), dtype=bias.dtype if parts == 1 else torch.float32)


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
    """Parts of a batch that shares a bias of few tiles, each of which has sums of its own: for some 256 programs."""
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
        "partial": Partial(None, 0),
        "tiles": tiles_of(config),
    }
    programs = _bias_tiles(problem, bias) * parts
    return Launch(attention_backward_dbias, programs, arguments, config.options())


def sinks_gradient(problem: Problem, sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """``-sum over rows of exp(sink - lse) * delta``: a sink is a key whose value is 0, so its dprobs is 0."""
    rest: Tensor | float = 0.0
    if problem.large_scores:
        lse, rest = lse.unbind(-1)
    weight = torch.exp(sinks.float()[:, None] - torch.where(lse == -torch.inf, torch.inf, lse) - rest)
    if problem.varlen:
        weight, delta = weight[None], delta[None]
    return -(weight * delta).sum(dim=(0, 2)).to(sinks.dtype)
