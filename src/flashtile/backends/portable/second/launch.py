"""The host code of second derivatives: the kernels' launches in order, and the plan that repeats them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu.device.records import Mod, Rows, ScoreTensor
from flashtile.backends.gpu.launch import Launch, Pointer, pointer
from flashtile.backends.gpu.masks import Side, bounds_launch, masks_of, most_bounds
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.plan import Made, Memory, Plan, empty, table_memory
from flashtile.backends.gpu.records import rows_of, table_launches
from flashtile.backends.portable.backward.config import heads_per_split
from flashtile.backends.portable.backward.launch import (
    bias_sums,
    prepare_launch,
    sinks_gradient,
    sum_launch,
    sums_memory,
)
from flashtile.backends.portable.backward.workspace import gqa_splits, num_rows, places_of, row_pitch, row_terms
from flashtile.backends.portable.config import PortableTiles, tile_dims
from flashtile.backends.portable.device.records import KeyGradients, RowChanges, SecondInputs, SinkTangents
from flashtile.backends.portable.records import (
    call_of,
    descriptors,
    heads_at_once,
    num_programs,
    score_tensor,
    tiles_of,
)
from flashtile.backends.portable.second.config import Kernel, choose
from flashtile.call.backend import SecondGradients
from flashtile.call.problem import Problem, Tensors

_kernels = device_code("flashtile.backends.portable.second.kernel")
_NO_ROWS, _NO_BIAS = Rows(*[None] * len(Rows._fields)), ScoreTensor(*[None] * len(ScoreTensor._fields))
_NO_SLOPE = Mod(*[None] * len(Mod._fields))


class SecondPlan(Plan):
    """Second derivatives of calls with the same layouts and options."""

    def __init__(self, problem: Problem, tensors: Tensors) -> None:
        """Prepares nothing yet, see ``Plan``."""
        super().__init__(tensors.q.device, functools.partial(_prepare, problem))
        self._problem = problem

    def __call__(
        self, t: Tensors, of: tuple[Tensor | None, ...], out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> SecondGradients:
        """The gradients from what arrives for the gradients of q, k, v, the bias and the sinks, each None for 0."""
        p, names = self._problem, ("of_q", "of_k", "of_v", "of_bias", "of_sinks")
        made: Made = {"out": out, "lse": lse, "dout": dout, "dlse": dlse, **dict(zip(names, of, strict=True))}
        made = self.run(t, made)
        pitch, rows = row_pitch(t.q.shape[-3], p.varlen), t.q.shape[-3]
        delta, mu, rho = (
            x.view(*lse.shape[: 1 if p.varlen else 2], pitch)[..., :rows]
            for x in (made["rows"][: num_rows(p, t)], *made["changes"].view(2, -1))
        )
        dsinks = None
        if t.sinks is not None:
            weight = rho if of[4] is None else rho + of[4].float()[:, None] * delta
            dsinks = sinks_gradient(p, t.sinks, lse, weight)
        dbias = made.get("dbias")
        if dbias is not None and t.attn_bias is not None:
            dbias = dbias.sum(0).to(t.attn_bias.dtype)
        of_dlse = None if dlse is None else mu.to(dlse.dtype, copy=True, memory_format=torch.contiguous_format)
        dq, dk, dv = (made[name].to(x.dtype) for name, x in (("dq", t.q), ("dk", t.k), ("dv", t.v)))
        return SecondGradients(dq, dk, dv, dbias, dsinks, made["of_dout"], of_dlse)


def _prepare(problem: Problem, t: Tensors, made: Made, kind: Any) -> tuple[Memory, dict[str, Launch]]:
    p, device = problem, t.q.device
    memory = table_memory(p, t.q) | {
        "rows": empty(device, (places_of(p, t)[-1],)),
        "changes": empty(device, (2 * num_rows(p, t),)),
        "dq": empty(device, t.q.shape, p.grad_dtype),
        "dk": empty(device, t.k.shape, p.grad_dtype),
        "dv": empty(device, t.v.shape, p.grad_dtype),
        "of_dout": empty(device, made["dout"].shape, made["dout"].dtype),
    }
    if p.intervals:
        memory["bounds"] = empty(device, (most_bounds(p, t) + most_bounds(p, t, over_keys=True),), torch.int32)
    if t.attn_bias is not None:
        memory["dbias"] = sums_memory(p, t.attn_bias)
    return memory, launches(p, t, made)


def launches(problem: Problem, t: Tensors, made: Made) -> dict[str, Launch]:
    """The launches by kernel name, in order; made: what a call is given, or its layouts on the meta device."""
    p, dout, slope = problem, made["dout"], _slope(problem, t)
    found = table_launches(p, t) | {"prepare_rows": prepare_launch(p, t, dout, made["dlse"])}
    changes = RowChanges(
        Pointer(torch.float32, "changes"), Pointer(torch.float32, "changes", 4 * num_rows(p, t)),
        row_pitch(t.q.shape[-3], p.varlen),
    )  # fmt: skip

    def add(name: Kernel, before: dict[str, Any], after: dict[str, Any]) -> None:
        config, over_keys = choose(p, name), name == "second_dkdv"
        side = Side(config.block_m)
        if over_keys:
            side = Side(config.block_n, over_keys=True, offset=most_bounds(p, t) if p.intervals else 0)
        if p.intervals:
            found[f"interval_bounds_{name}"] = bounds_launch(p, t, side)
        call, rows = call_of(p, t, config, ("q", "dout") if over_keys else ("k", "v"), dout, masks=masks_of(p, t, side))
        programs = num_programs(p, t, config.block_n if over_keys else config.block_m, over_keys=over_keys)
        loaded = (t.q, dout) if over_keys else (t.k, t.v)
        of = _directions(p, made, config, slope, over_keys=over_keys)
        arguments = {"call": call, "douts": rows, "of_rows": row_terms(p, t), "of": of, **before}
        if name == "second_dq":
            arguments["bias_sums"] = bias_sums(p, t.attn_bias, call)
        arguments |= {**after, "tiles": tiles_of(config, heads_at_once(p, *loaded))}
        splits = gqa_splits(p) if over_keys else 1
        found[f"attention_{name}"] = Launch(
            getattr(_kernels, f"attention_{name}"), programs * splits, arguments, config.options()
        )

    sinks = SinkTangents(pointer(t.sinks, "sinks"), pointer(made["of_sinks"], "of_sinks"))
    results = {"out_ptr": Pointer(dout.dtype, "out"), "made_ptr": Pointer(dout.dtype, "of_dout")}
    add("second_rows", {"sinks": sinks, **results}, {"changes": changes})
    add("second_dq", {"changes": changes, "dq_ptr": Pointer(p.grad_dtype, "dq")}, {})
    splits, places = gqa_splits(p), places_of(p, t)
    dk, dv = (
        Pointer(p.grad_dtype, name) if splits == 1 else Pointer(torch.float32, "rows", 4 * place)
        for name, place in (("dk", places[1]), ("dv", places[2]))
    )
    add("second_dkdv", {"changes": changes}, {"grads": KeyGradients(dk, dv, heads_per_split(p), False)})
    if splits > 1:
        for name, x, place in (("dk", t.k, places[1]), ("dv", t.v, places[2])):
            found[f"sum_gqa_splits_{name}"] = sum_launch(p, name, x, place, False)
    return found


def _directions(problem: Problem, made: Made, config: PortableTiles, slope: Mod, *, over_keys: bool) -> SecondInputs:
    """The directions of q, k, v and the bias; those that the loop of a kernel loads by descriptors if all can be."""
    block_d, block_dv = tile_dims(problem)
    columns = {"of_q": block_d, "of_k": block_d, "of_v": block_dv}
    looped, size = (("of_q",), config.block_m) if over_keys else (("of_k", "of_v"), config.block_n)
    maps = descriptors({x: (made[x], size, columns[x]) for x in looped if made[x] is not None}, config)
    q, k, v = (
        _NO_ROWS if made[name] is None else rows_of(name, made[name], block, maps.get(name))
        for name, block in columns.items()
    )
    bias = made["of_bias"]
    return SecondInputs(q, k, v, _NO_BIAS if bias is None else score_tensor("of_bias", bias, 1), slope)


def _slope(problem: Problem, t: Tensors) -> Mod:
    """``SecondInputs.slope`` of a call."""
    if problem.score_function is None:
        return _NO_SLOPE
    from flashtile.backends.gpu.functions import mod_of, module_of
    from flashtile.call.functions import score_function
    from flashtile.mods.curve import curved

    function, graph = score_function(problem, t), curved(problem.score_function.text)
    is_needed = problem.softcap > 0 or not graph.is_const(graph.slope, 0.0)
    if function is None or graph.is_const(graph.result, 1.0) or not is_needed:
        return _NO_SLOPE
    made = mod_of(function._replace(graph=graph))
    assert made is not None
    return made._replace(linear=module_of(graph.text).linear)  # also where the slope's own slope is 1
