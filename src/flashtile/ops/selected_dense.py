"""The operators of regular calls where each query names the keys that it sees, with their gradients.

The forward is a call over keys and values as a cache, see ``call.selected``; the backward finds the rows again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function

from flashtile.call import selected
from flashtile.call.arguments import GRADIENTS, Options, Tensors, check_tensor, differentiable, grads_of, is_dtensor
from flashtile.call.cached_arguments import CacheOptions, CacheTensors
from flashtile.call.latent import are_first_columns
from flashtile.call.problem import Problem
from flashtile.call.selected import Selected, SelectedInputs
from flashtile.core import settings
from flashtile.core.errors import InvalidInputError, UnsupportedError
from flashtile.core.states import without_max_scores
from flashtile.ops import selected as over_cache
from flashtile.ops.operation import LIBRARY, refuse_tangents
from flashtile.ops.operators import REGULAR, plain_gradient
from flashtile.ops.transforms import Below, underivable

# What lists of keys do not go with, besides functions.
_APART = {
    "alibi_slopes": "", "attn_mask": "", "attn_bias": "", "row_keys": "block_mask", "key_rows": "block_mask",
    "row_blocks": "block_mask", "key_blocks": "block_mask",
}  # fmt: skip
_SECOND = "second derivative with selected: its backward"


def attend(t: Tensors, options: Options, lists: Tensor) -> tuple[Tensor, Tensor]:
    """Out and lse of the call, differentiable; lse as in ``call.backend.Forward``.

    Raises:
        InvalidInputError: Naming the argument that is wrong or does not go with the lists.
        UnsupportedError: A gradient is needed, and the backend that is named has no backward.
    """
    check_tensor("selected", lists)
    _check(t, options)
    _check_backward(options, t.q.device.type)
    found: tuple[Tensor, Tensor] = FORWARD.overload(lists, *REGULAR.flatten(REGULAR.readable(t), options))
    return found


def _check(t: Tensors, o: Options) -> None:
    for name, keyword in _APART.items():
        if getattr(t, name) is not None:
            raise InvalidInputError(keyword or name, "is given, but does not go with selected")
    if o.mods:
        raise InvalidInputError("selected", "is given with score_mod or mask_mod, which it does not go with")
    if o.dropout_p:
        raise InvalidInputError("dropout_p", f"is {o.dropout_p}, but does not go with selected")
    if o.attention_chunk is not None:
        raise InvalidInputError("attention_chunk", f"is {o.attention_chunk}, but does not go with selected")
    if is_dtensor(t.q):
        raise InvalidInputError("q", "is a DTensor, but calls with selected take local tensors alone")


def _check_backward(o: Options, device_type: str) -> None:
    name, able = o.backend or settings.BACKEND.get() or "", "cpu" if device_type == "cpu" else "portable"
    if any(o.grads) and name not in ("", able):
        reasons = [f"has no backward of selected keys on {device_type}, {able} has"]
        raise UnsupportedError(f"backend {name!r} cannot run this backward", {name: reasons})


def _as_cache(t: Tensors, o: Options, out: Tensor | None = None) -> tuple[CacheTensors, CacheOptions]:
    """The call over keys and values as the entries of a cache, one after another."""
    k, v = t.k, t.v
    batch, seqlen_k = k.shape[:2]
    if not _in_line(k) or not _in_line(v):
        is_part = are_first_columns(v, k)
        k = k.contiguous()
        v = k[..., : v.shape[-1]] if is_part else v.contiguous()
    out = t.q.new_empty((*t.q.shape[:-1], v.shape[-1])) if out is None else out
    lengths = torch.full((batch,), seqlen_k, dtype=torch.int32, device=k.device)
    settled = CacheOptions(
        o.window_left, o.window_right, softmax_scale=o.softmax_scale, softcap=o.softcap, backend=o.backend,
        return_max_scores=o.return_max_scores,
    )  # fmt: skip
    return CacheTensors(out, t.q, k, v, lengths, sinks=t.sinks), settled


def _in_line(x: Tensor) -> bool:
    """Whether all rows of a batch are one after another."""
    return x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def _checked(t: Tensors, options: Options) -> tuple[Tensors, Problem]:
    """The tensors with readable strides, and the problem; kernels of regular calls may have no such head_dims."""
    t = REGULAR.readable(t)
    problem: Problem = REGULAR.problem_of(t, options)
    return t, problem


def _run(lists: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    t, options = REGULAR.unflatten(args)
    _check(t, options)
    t, _ = _checked(t, options)
    over, settled = _as_cache(t, options)
    given = Selected(lists, None)
    selected.check_lists(over, given)
    return over.out, over_cache.attend_apart(over, settled, given)


def _fake(lists: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    t, options = REGULAR.unflatten(args)
    _check(t, options)
    found = REGULAR.fake(*args)
    selected.check_lists(_as_cache(t, options)[0], Selected(lists, None))
    return found


def _gradients_of(device_type: str) -> Callable[..., tuple[Tensor | None, ...]]:
    name = "cpu.selected" if device_type == "cpu" else "portable.selected_backward"
    found: Any = importlib.import_module(f"flashtile.backends.{name}").gradients
    return found


def _backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, lists: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    t, options = REGULAR.unflatten(args)
    t, problem = _checked(t, options)
    over, settled = _as_cache(t, options, out)
    rows, counts = over_cache.rows_of(over, settled, Selected(lists, None))
    k, v = (x.flatten(0, 1) for x in (over.k_cache, over.v_cache))
    q, out, dout = (x.flatten(0, 1) for x in (t.q, out, dout))
    sums, dsums = lse.mT.flatten(0, 1), None if dlse is None else dlse.mT.flatten(0, 1)
    choices = {"deterministic": options.deterministic} if q.is_cuda else {}  # on CPUs all are
    given = SelectedInputs(q, k, v, out, sums, dout, dsums, rows, counts)
    dq, dk, dv, dsinks = _gradients_of(q.device.type)(given, problem.softmax_scale, options.softcap, t.sinks, **choices)
    found = dict(zip(GRADIENTS.values(), (dq, dk, dv, None, dsinks), strict=True))
    return tuple(
        x.view(like.shape) if wanted and x is not None and like is not None else out.new_empty(0)
        for x, like, wanted in zip(found.values(), differentiable(t), options.grads.named, strict=True)
    )


def _backward_fake(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, lists: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    t, options = REGULAR.unflatten(args)
    pairs = zip(differentiable(t), options.grads.named, strict=True)
    return tuple(x.new_empty(x.shape) if wanted and x is not None else out.new_empty(0) for x, wanted in pairs)


def _flops(given: dict[str, Any]) -> int:
    """Two products over the elements of all lists, also those that name nothing."""
    lists, q, v = given["selected"], given["q"], given["v"]
    return 2 * lists[0] * lists[1] * lists[2] * int(q[-2]) * int(q[-1] + v[-1])


def _backward_flops(given: dict[str, Any]) -> int:
    """Five products: three over head_dim, two over head_dim_v."""
    lists, q, v = given["selected"], given["q"], given["v"]
    return 2 * lists[0] * lists[1] * lists[2] * int(q[-2]) * int(3 * q[-1] + 2 * v[-1])


FORWARD = REGULAR.define(
    "selected_attention", _run, _fake, leading={"selected": "Tensor"}, flops=_flops, has_derivative=True
)
BACKWARD = REGULAR.define(
    "selected_attention_backward",
    _backward,
    _backward_fake,
    leading={"dout": "Tensor", "dlse": "Tensor?", "out": "Tensor", "lse": "Tensor", "selected": "Tensor"},
    results=tuple(GRADIENTS.values()),
    flops=_backward_flops,
    has_derivative=True,
)


class _OfSelected(torch.autograd.Function):
    """The forward operator with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, below: Below, options: Options, lists: Tensor, t: Tensors, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = below(lists, *REGULAR.flatten(t, options))
        ctx.save_for_backward(lists, t.q, t.k, t.v, t.sinks, out, _without_max_scores(lse, options))
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        lists, q, k, v, sinks, out, lse = ctx.saved_tensors
        wanted = grads_of("grads", ctx.needs_input_grad[4:])
        dlse = None if dlse is None else plain_gradient(dlse, out, ctx.options)
        dout = torch.zeros_like(out) if dout is None else dout
        args = REGULAR.flatten(Tensors(q, k, v, sinks=sinks), ctx.options._replace(grads=wanted))
        found = BACKWARD.overload(dout, dlse, out, lse, lists, *args)
        return (None,) * 4 + tuple(x if is_wanted else None for x, is_wanted in zip(found, wanted.named, strict=True))


def _without_max_scores(lse: Tensor, options: Options) -> Tensor:
    return without_max_scores(lse) if options.return_max_scores else lse


# As in ``transforms``.
_apply = super(torch.autograd.Function, _OfSelected).apply


def _under_autograd(keyset: Any, lists: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    below = Below(FORWARD, keyset)
    t, options = REGULAR.unflatten(args)
    refuse_tangents(REGULAR.rows, REGULAR.values(t), "a call with selected")
    inputs = differentiable(t)
    needed = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in inputs]
    found: tuple[Tensor, Tensor]
    if any(needed):
        options = options._replace(grads=grads_of("grads", [*map(max, needed, options.grads.named)]))
        with enable_single_level_autograd_function():
            found = _apply(below, options, lists, t, *inputs)
    else:
        found = below(lists, *args)
    return found


LIBRARY.impl(FORWARD.name, _under_autograd, "Autograd", with_keyset=True)
LIBRARY.impl(BACKWARD.name, underivable(BACKWARD, _SECOND), "Autograd", with_keyset=True)
