"""The host's side of the gradients of what a score mod captures: one launch for each tensor that it loads from.

A load's gradient is summed by what its place depends on, in an order that is fixed unless places are arbitrary: by rows
or by keys of each head, by pairs where each has an entry, by diagonals. Such sums then go to their places: sorted, so
that these too are added in a fixed order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.gpu.device.records import Operand
from flashtile.backends.gpu.functions import module_of, operands_of, table_of
from flashtile.backends.gpu.launch import Launch, Pointer
from flashtile.backends.gpu.masks import Side, masks_of
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.plan import Memory
from flashtile.backends.portable.backward.config import choose
from flashtile.backends.portable.config import PortableTiles
from flashtile.backends.portable.device.records import BiasGradient, Derivative, Diagonals, Places
from flashtile.backends.portable.records import call_of, num_programs, tiles_of
from flashtile.call.functions import Function, score_function
from flashtile.call.problem import Problem, Tensors
from flashtile.mods.places import Way, axes_of, way_of

attention_backward_dbias = device_code("flashtile.backends.portable.backward.dbias").attention_backward_dbias
_scatter = device_code("flashtile.backends.portable.backward.scatter")
attention_backward_diagonals = _scatter.attention_backward_diagonals
attention_backward_places = _scatter.attention_backward_places


_NO_AXES: tuple[int | None, ...] = ()


class Share(NamedTuple):
    """The gradient of one load.

    Attributes:
        number: Which of the graph's partials it is.
        operand: The place of its tensor in ``Tensors.operands``.
        way: How it is summed.
        axes: For "pairs" the dimension of its tensor along which each of "bhij" lies, None where it has none.
    """

    number: int
    operand: int
    way: Way
    axes: tuple[int | None, ...]

    @property
    def sums(self) -> str:
        """The operand of a step that its sums are."""
        return f"sums{self.number}"


def shares_of(problem: Problem, t: Tensors) -> list[Share]:
    """The loads that gradients are wanted of."""
    function = score_function(problem, t)
    if function is None or not problem.grads.operands:
        return []
    found = []
    for number, partial in enumerate(function.graph.partials):
        operand = function.first + function.graph.nodes[partial.load].args[0]
        if problem.grads.operands[operand]:
            way, axes = way_of(function.graph, partial.load), _NO_AXES
            if way == "pairs":
                axes = axes_of(function.graph, partial.load)
                way = way if _covers(problem, function.operands[operand - function.first], axes) else "any"
            found.append(Share(number, operand, way, axes))
    return found


def _covers(problem: Problem, x: Tensor, axes: tuple[int | None, ...]) -> bool:
    """Whether a tensor has an entry for each index along its axes, so that none is cut to another."""
    sizes = (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k)
    return all(axis is None or x.shape[axis] >= size for axis, size in zip(axes, sizes, strict=True))


def _config(problem: Problem, way: Way) -> PortableTiles:
    if way != "diagonals":
        return choose(problem, "dbias")
    config = choose(problem, "diagonals")
    return config if config.block_m >= config.block_n else dataclasses.replace(config, block_n=config.block_m)


def launch_of(problem: Problem, t: Tensors, dout: Tensor, of_rows: Any, share: Share, *, first: bool = False) -> Launch:
    """A share's launch; ``first``: of two, that which finds the greatest magnitudes."""
    function = score_function(problem, t)
    assert function is not None
    config = _config(problem, share.way)
    masks = masks_of(problem, t, Side(config.block_m))
    masks = None if masks is None else masks._replace(bounds=None)
    call, rows = call_of(problem, t, config, ("q", "k", "v", "dout"), dout, masks=masks, has_own_slope=False)
    made = module_of(function.graph.text, table_of(problem) is not None)
    is_one = function.graph.is_const(function.graph.partials[share.number].slope, 1.0)
    partial = Derivative(made.partials, share.number, is_one)
    arguments: dict[str, Any] = {"call": call, "douts": rows, "of_rows": of_rows}
    tiles = tiles_of(config)
    if share.way in ("rows", "keys", "pairs"):
        shape = _domain(problem, share)
        sums = BiasGradient(
            Pointer(torch.float32, share.sums), shape[1], shape[2], shape[3], problem.seqlen_q, problem.seqlen_k, 1,
            shape[0] == 1 != problem.batch, shape[1] == 1 != problem.num_heads_q, share.way == "keys",
            share.way == "rows",
        )  # fmt: skip
        programs = shape[0] * shape[1] * -(-shape[2] // config.block_m) * -(-shape[3] // config.block_n)
        arguments |= {"dbias": sums, "partial": partial, "tiles": tiles}
        return Launch(attention_backward_dbias, programs, arguments, config.options())
    if share.way == "diagonals":
        before, after, _ = _diagonals(problem, config)
        diagonals = Diagonals(Pointer(torch.float32, share.sums), before, after)
        programs = problem.batch * problem.num_heads_q * (before + after)
        arguments |= {"partial": partial, "diagonals": diagonals, "tiles": tiles}
        return Launch(attention_backward_diagonals, programs, arguments, config.options())
    places = _places(problem, function, share, made, first)
    arguments |= {"partial": partial, "places": places, "tiles": tiles}
    return Launch(attention_backward_places, num_programs(problem, t, config.block_m), arguments, config.options())


def _places(problem: Problem, function: Function, share: Share, made: Any, first: bool) -> Places:
    tensors = tuple(
        Operand(None, tuple(x.shape), tuple(math.prod(x.shape[d + 1 :]) for d in range(x.dim())))
        for x in function.operands
    )
    is_repeatable = problem.deterministic
    greatest = Pointer(torch.int32, f"greatest{share.number}") if is_repeatable else None
    sums = Pointer(torch.int64 if is_repeatable else torch.float32, share.sums)
    # Numbers of lengths are not looked at by the compiler, so a constant may not follow from one.
    return Places(
        made.places, operands_of(function)._replace(tensors=tensors), sums, greatest, share.number, first, _ROOM
    )


# 2^34 terms: 131,072 rows and keys.
_ROOM = 34


def _domain(problem: Problem, share: Share) -> tuple[int, int, int, int]:
    """The shape of sums by rows, keys or pairs."""
    p = problem
    if share.way == "pairs":
        has_b, has_h = (axis is not None for axis in share.axes[:2])
        return p.batch if has_b else 1, p.num_heads_q if has_h else 1, p.seqlen_q, p.seqlen_k
    return p.batch, p.num_heads_q, *((p.seqlen_q, 1) if share.way == "rows" else (1, p.seqlen_k))


def _diagonals(problem: Problem, config: PortableTiles) -> tuple[int, int, int]:
    """Blocks of diagonals with keys past rows, those with rows past keys, and how many a tile has a part of."""
    ratio = config.block_m // config.block_n
    return -(-problem.seqlen_k // config.block_n), ratio * -(-problem.seqlen_q // config.block_m), ratio + 1


def _by_distance(problem: Problem, sums: Tensor) -> tuple[Tensor, Tensor]:
    """The distances, and their sums of each sequence and head."""
    config = _config(problem, "diagonals")
    before, after, parts = _diagonals(problem, config)
    total = sums.new_zeros(problem.batch, problem.num_heads_q, before + after + parts - 1, config.block_n)
    for part in range(parts):
        total[:, :, part : part + before + after] += sums[:, :, :, part]
    n = torch.arange(total.shape[2] * config.block_n, device=sums.device) - (before + 1) * config.block_n
    return n, total.flatten(2)


def memory_of(problem: Problem, t: Tensors, share: Share) -> Memory:
    """What a share is summed in: the sums, and of two launches the greatest magnitudes too."""
    dtypes = {share.sums: torch.float32}
    if share.way == "any":
        assert t.operands is not None
        shape: tuple[int, ...] = (t.operands[share.operand].numel(),)
        if problem.deterministic:
            dtypes = {share.sums: torch.int64, f"greatest{share.number}": torch.int32}
    elif share.way == "diagonals":
        config = _config(problem, share.way)
        before, after, parts = _diagonals(problem, config)
        shape = (problem.batch, problem.num_heads_q, before + after, parts, config.block_n)
    else:
        shape = _domain(problem, share)
    # An entry that no pair is at is 0.
    return {name: functools.partial(torch.zeros, shape, dtype=x, device=t.q.device) for name, x in dtypes.items()}


def gradients_of(
    problem: Problem, t: Tensors, shares: Sequence[Share], made: Mapping[str, Any]
) -> tuple[Tensor | None, ...]:
    """The gradients of what a score mod captures, from their sums among what a call has made."""
    totals: dict[int, Tensor] = {}
    for share in shares:
        found = gradient_of(problem, t, share, made)
        totals[share.operand] = totals[share.operand] + found if share.operand in totals else found
    return tuple(
        (totals[n].to(x.dtype) if n in totals else torch.zeros_like(x)) if is_wanted else None
        for n, (x, is_wanted) in enumerate(zip(t.operands or (), problem.grads.operands, strict=True))
    )


def gradient_of(problem: Problem, t: Tensors, share: Share, made: Mapping[str, Any]) -> Tensor:
    """A share's gradient from its sums, float32, of its tensor's shape."""
    function = score_function(problem, t)
    assert function is not None and t.operands is not None
    x, sums = t.operands[share.operand], made[share.sums]
    if share.way == "any":
        if not problem.deterministic:
            return sums.view(x.shape)
        exponent = (made[f"greatest{share.number}"] >> 23).double() - 127
        return (sums.double() * torch.exp2(exponent + _ROOM - 61)).float().view(x.shape)
    if share.way == "pairs":
        return _at_pairs(x, share, sums)
    device = x.device
    at = {"b": torch.arange(problem.batch, device=device)[:, None, None]}
    at["h"] = torch.arange(problem.num_heads_q, device=device)[:, None]
    if share.way == "diagonals":
        n, values = _by_distance(problem, sums)
    else:
        values = sums.view(problem.batch, problem.num_heads_q, -1)
        n = torch.arange(values.shape[-1], device=device)
    at["i"] = n.clamp(min=0) if share.way == "diagonals" else n
    at["j"] = (-n).clamp(min=0) if share.way == "diagonals" else n
    at["score"] = torch.zeros((), device=device)
    load = function.graph.partials[share.number].load
    return _at_places(function.places(load, at, torch.float32), values, x.numel()).view(x.shape)


def _at_places(places: Tensor, values: Tensor, count: int) -> Tensor:
    """The sums of the values for each of ``count`` places, in a fixed order.

    ``index_put_`` adds what is for one place one after another, and a bucket of T5's has most of all distances.
    """
    places = places[(None,) * (values.dim() - places.dim())]
    shared = [d for d, size in enumerate(places.shape) if size == 1 != values.shape[d]]
    values = values.sum(shared, keepdim=True) if shared else values
    places, order = places.flatten().sort(stable=True)
    ends = torch.searchsorted(places, torch.arange(count + 1, device=places.device))
    return torch.segment_reduce(values.flatten()[order], "sum", offsets=ends, initial=0, unsafe=True)


def _at_pairs(x: Tensor, share: Share, sums: Tensor) -> Tensor:
    """Sums by pairs, as the first entries along the axes of their tensor."""
    made = x.new_zeros(x.shape, dtype=torch.float32)
    own = [(axis, name) for name, axis in enumerate(share.axes) if axis is not None]
    view = made
    for axis, name in own:
        view = view.narrow(axis, 0, sums.shape[name])
    kept = sums[tuple(slice(None) if axis is not None else 0 for axis in share.axes)]
    order = sorted(range(len(own)), key=lambda n: own[n][0])
    view.copy_(kept.permute(order))
    return made
