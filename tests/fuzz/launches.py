"""What a GPU would be asked to start for a drawn call: the plans of its backends, run on tensors without data.

A plan on the meta device goes all the way to ``host.Launcher``, which is given every launch; here it looks for their
operands, keeps them and starts none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from flashtile.backends.gpu import host
from flashtile.backends.gpu.launch import Launch, lower
from flashtile.call.arguments import FLOAT8, Tensors
from flashtile.call.backend import Backend, Chain, Direction, Gradients
from flashtile.call.problem import Problem
from flashtile.call.quantized_call import QuantizedTensors
from flashtile.call.quantized_call import problem_of as quantized_problem
from flashtile.core.masks import Origin
from flashtile.core.states import Partial
from flashtile.ops import cached as cached_ops
from flashtile.ops import dispatch
from flashtile.ops import operators as ops
from flashtile_lab.kernels.build import traits
from tests.cases import Case, build, gradient_of
from tests.fuzz.drawn import Drawn
from tests.kvcache import cases as kvcache
from tests.kvcache.cases import CacheCase
from tests.quantization.cases import BLOCK, QuantizedCase, options_of
from tests.quantization.quantizer import Case as QuantizerCase
from tests.quantization.quantizer import inputs

_SMS = 132
# NVIDIA's by compute capability; None for AMD's.
Capability = tuple[int, int] | None


class Started(NamedTuple):
    """A launch, with the backend and the direction that asked for it, and what the report says of the call."""

    backend: str
    direction: str
    launch: Launch
    about: dict[str, object]
    problem: Problem | None


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def started(call: Drawn, capability: Capability) -> list[Started]:
    """The launches of a call on a GPU, by the backend that is chosen there and by the portable one."""
    of_kind = {
        "plain": _of_plain, "pieces": _of_pieces, "cached": _of_cached, "latent": _of_cached,
        "quantized": _of_quantized, "quantizer": _of_quantizer,
    }[call.kind]  # fmt: skip
    with recorded(capability) as launches:
        found: list[Started] = []
        for backend, direction, about, problem in of_kind(call, capability):
            found += [Started(backend, direction, launch, about, problem) for launch in launches if launch.programs]
            launches.clear()
    return found


@contextmanager
def recorded(capability: Capability) -> Iterator[list[Launch]]:
    """Within, launches are not started but listed."""
    from flashtile.backends.gpu.decode import launch as decode
    from flashtile.backends.gpu.decode import merge
    from flashtile.backends.portable.rounding import launch as quantizer

    found: list[Launch] = []

    def keep(launcher: Any, launch: Launch, device: object, *operands: Any) -> None:
        launcher.device = None
        host.sources_of(launch, lower(launch)[1], *operands)
        found.append(launch)

    patches: list[tuple[Any, str, Any]] = [
        (host.Launcher, "__init__", keep),
        (host.Launcher, "start", lambda *call: None),
        (decode, "multiprocessors", lambda device: _SMS),
        (quantizer, "compute_capability", lambda device: capability),
    ]
    if capability == (9, 0):
        from flashtile.backends.hopper import tensor_maps
        from flashtile.backends.hopper.forward import launch as hopper

        patches += [(tensor_maps, "num_sms", lambda device: _SMS), (hopper, "counter", lambda *device: empty())]
    with ExitStack() as entered:
        for place, name, value in patches:
            entered.enter_context(mock.patch.object(place, name, value))
        yield found
    # It keeps launchers.
    merge._plan.cache_clear()


def _backends(problem: Problem, direction: Direction) -> list[Backend]:
    chosen = dispatch.select(problem, direction)
    portable = dispatch.backend("portable")
    is_other = chosen is not portable and not dispatch.reasons("portable", problem, direction)
    return [chosen, portable] if is_other else [chosen]


def _is_able(problem: Problem, direction: Direction) -> bool:
    """Whether any backend computes it; head_dims past 512, of caches 256, and 8 bits before sm_89 have none."""
    return any(not dispatch.reasons(name, problem, direction) for name in dispatch.NAMES)


def _on(problem: Problem, capability: Capability) -> Problem:
    return replace(problem, device_type="cuda", compute_capability=capability)


Parts = Iterator[tuple[str, str, dict[str, object], Problem | None]]


def _of_plain(call: Drawn, capability: Capability) -> Parts:
    assert isinstance(call.case, Case)
    made = build(call.case, call.dtype, "meta")
    problem = _on(made.problem.but(max_scores=call.maxima), capability)
    t = ops.REGULAR.readable(made.tensors)
    if not _is_able(problem, "forward"):
        return
    for backend in _backends(problem, "forward"):
        backend.plan("forward", problem, t)(t)
        yield backend.name, "forward", traits(problem), problem
    if not any(problem.grads) or not _is_able(problem, "backward"):
        return
    dout = gradient_of(made)
    out = t.q.new_empty(dout.shape)
    lse = t.q.new_empty(problem.lse_shape(t.q), dtype=problem.lse_dtype)
    dlse = lse.new_empty(lse.shape) if call.case.lse_grad else None
    for backend in _backends(problem, "backward"):
        for each, share in dispatch.shares(backend, problem, "backward"):
            each.plan("backward", share, t, (dout, dlse))(t, out, lse, dout, dlse)
            yield each.name, "backward", traits(share), share


def _of_pieces(call: Drawn, capability: Capability) -> Parts:
    """Of a call in steps: to float32, from a partial result, rounded at the end; the backward adding and chained."""
    assert isinstance(call.case, Case) and call.pieces is not None
    origins = call.pieces.origins if call.case.lengths else ""
    case = replace(
        call.case, dropout=0.3 if "d" in origins else 0.0, alibi="h" if "a" in origins else call.case.alibi,
        mask=None if origins else call.case.mask, bias=None if origins else call.case.bias,
    )  # fmt: skip
    made = build(case, call.dtype, "meta")
    problem, t = _on(made.problem, capability), ops.REGULAR.readable(made.tensors)
    if origins:
        problem = replace(problem, origins=True)
        t = replace(t, origins=empty(problem.batch, len(Origin._fields), dtype=torch.int32))
    problem = problem.but(deterministic=call.pieces.deterministic)
    partial = Partial(
        empty(*t.q.shape[:-1], problem.head_dim_v), t.q.new_empty(problem.lse_shape(t.q), dtype=torch.float32)
    )
    for backend in _backends(problem, "forward"):
        for out_dtype, before in ((torch.float32, None), (torch.float32, partial), (call.dtype, partial)):
            step = problem.but(out_dtype=out_dtype)
            backend.plan("forward", step, t)(t, before)
            yield backend.name, "forward", traits(step, ("partial",) if before else ()), step
    problem = problem.but(grad_dtype=torch.float32)
    dout, lse = t.q.new_empty(partial.out.shape), partial.lse
    for backend in _backends(problem, "backward"):
        for sums in (None, Gradients(*(empty(*x.shape) for x in (t.q, t.k, t.v)))):
            (_, main), *rest = dispatch.shares(backend, problem, "backward")
            backend.plan("backward", main, t, (dout, None))(t, dout, lse, dout, None, sums)
            yield backend.name, "backward", traits(main, ("sums",) if sums else ()), main
            for each, share in rest:
                each.plan("backward", share, t, (dout, None))(t, dout, lse, dout, None)
                yield each.name, "backward", traits(share), share
        yield from _of_chain(backend, problem, t, dout, lse)


def _of_chain(backend: Backend, problem: Problem, t: Tensors, dout: Tensor, lse: Tensor) -> Parts:
    able = backend.capabilities("backward")
    has_pairs = problem.mask or problem.bias_dtype is not None or problem.sinks
    if able is None or not able.chain_rows or not problem.varlen or has_pairs or 0 in (t.q.numel(), t.k.numel()):
        return
    plan: Any = backend.plan("backward", problem, t, (dout, None))
    chain, sums = Chain(3), Gradients(dk=empty(*t.k.shape), dv=empty(*t.v.shape))
    for given, heads in ((None, None), (sums, None), (sums, (0, 1))):
        plan.in_chain(t, dout, lse, dout, None, given, chain, heads)
        yield backend.name, "backward", traits(problem, ("chain",)), problem


def _of_cached(call: Drawn, capability: Capability) -> Parts:
    assert isinstance(call.case, CacheCase)
    case, made = call.case, kvcache.build(call.case, call.dtype, "meta")
    problem = _on(made.problem.but(max_scores=call.maxima), capability)
    t = cached_ops.CACHED.readable(made.tensors)
    if not _is_able(problem, "decode"):
        return
    for backend in _backends(problem, "decode"):
        backend.plan("decode", problem, t)(t)
        about = traits(problem) | {"page_size": problem.page_size, "rows": problem.seqlen_q * problem.group_size}
        about |= {"cache": str(problem.kv_dtype)[6:]} if case.float8 else {}
        yield backend.name, "decode", about, problem


def _of_quantized(call: Drawn, capability: Capability) -> Parts:
    assert isinstance(call.case, QuantizedCase)
    t = laid_out_8_bits(call.case)
    problem = _on(quantized_problem(t, options_of(call.case)), capability)
    if not _is_able(problem, "quantized"):
        return
    for backend in _backends(problem, "quantized"):
        backend.plan("quantized", problem, t)(t)
        yield backend.name, "quantized", traits(problem), problem


def laid_out_8_bits(case: QuantizedCase) -> QuantizedTensors:
    """The tensors of ``tests.quantization.cases.build``, without data."""
    batch, dim_v = len(case.lengths), case.head_dim_v or case.head_dim
    total = [sum(pair[side] for pair in case.lengths) + case.spare for side in (0, 1)]
    rows_q, rows_k = (((n,) if case.packed else (batch, n // max(batch, 1))) for n in total)
    blocks = [n // BLOCK + batch if case.packed else -(-(n // max(batch, 1)) // BLOCK) for n in total]
    lead = () if case.packed else (batch,)

    def scale(kind: str, heads: int, blocks: int) -> Tensor:
        return empty(*{"block": (*lead, heads, blocks), "head": (*lead, heads, 1)}.get(kind, (1,) * (len(lead) + 2)))

    bounds = [empty(batch + 1, dtype=torch.int32) if case.packed else None for _ in "qk"]
    return QuantizedTensors(
        empty(*rows_q, case.heads, case.head_dim, dtype=FLOAT8),
        empty(*rows_k, case.kv_heads, case.head_dim, dtype=FLOAT8),
        empty(*lead, case.kv_heads, dim_v, blocks[1] * BLOCK, dtype=FLOAT8),
        scale(case.scales[0], case.heads, blocks[0]), scale(case.scales[1], case.kv_heads, blocks[1]),
        scale(case.scales[2], case.kv_heads, blocks[1]),
        shift=empty(*lead, case.heads, rows_q[-1]) if case.shifted else None,
        sinks=empty(case.heads) if case.sinks else None, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1],
        out_scale=None if case.out_scale is None else empty(1),
    )  # fmt: skip


def _of_quantizer(call: Drawn, capability: Capability) -> Parts:
    from flashtile.backends.portable.rounding.launch import QuantizePlan

    assert isinstance(call.case, QuantizerCase)
    given = inputs(call.case, call.dtype, "meta")
    if 0 in (given.q.numel(), given.k.numel()):
        return
    QuantizePlan(given, call.case.choices)(given)
    about = {"dtype": str(call.dtype)[6:], "head_dim": call.case.head_dim, "head_dim_v": call.case.head_dim_v}
    about |= {name: getattr(call.case, name) for name in ("packed", "rotary_dim", "scales", "rotate", "smooth_k")}
    yield "portable", "quantize", about, None


def merging(dims: tuple[int, ...] = (16, 33, 64, 128, 192, 256)) -> list[Launch]:
    """The launches that merge two states, of every pair of dtypes."""
    from flashtile.backends.gpu.decode import merge

    pairs = itertools.product((torch.bfloat16, torch.float16, torch.float32), repeat=2)
    with recorded(None) as found:
        for dim, (a, b) in zip(itertools.cycle(dims), pairs, strict=False):
            lse = torch.empty(2, 8, 100, device="meta")
            x, y = (torch.empty(2, 100, 8, dim, dtype=dtype, device="meta") for dtype in (a, b))
            merge.merge(x, lse, y, lse)
    return found
