"""Backwards that add to float32 sums: a call in pieces of its keys, each adding, must be the whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashtile import reference
from flashtile.backends.base import Backend, Gradients
from flashtile.problem import Problem, Tensors
from tests.cases import Call, Case, assert_close, build, results
from tests.partials import key_places, piece

_NAMES = ("dq", "dk", "dv")
# out, lse, dout, dlse.
Saved = tuple[Tensor, Tensor, Tensor, Tensor | None]


def _float32(backend: Backend, problem: Problem, t: Tensors, saved: Saved, sums: Gradients | None = None) -> Gradients:
    plan = backend.plan_backward(problem.but(grad_dtype=torch.float32), t, saved[2], saved[3])
    return plan(t, *saved, sums)


def _noise(like: Tensor) -> Tensor:
    return torch.randn(like.shape, dtype=torch.float32, device=like.device)


def judge_sums(
    backend: Backend,
    case: Case,
    cuts: Sequence[int],
    dtype: torch.dtype,
    *,
    exact: bool = True,
    deterministic: bool = False,
    device: str = "cpu",
) -> None:
    """Asserts the error rule for gradients in float32, and that pieces of the keys add up to them.

    Args:
        backend: What computes them.
        case: The whole call.
        cuts: Where to cut it, as in ``partials``.
        dtype: Of q, k and v.
        exact: Whether a share is computed in full before it is added, so that the sum is rounded once.
        deterministic: Whether gradients must be repeatable.
        device: Of the tensors.
    """
    torch.manual_seed(3)
    call = build(case, dtype, device)
    t = replace(call.tensors, **{name: x.detach() for name, x in vars(call.tensors).items() if x is not None})
    problem = call.problem.but(deterministic=deterministic, bias_grad=False)
    out, lse = backend.plan_forward(problem, t)(t)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) if case.lse_grad else None
    saved = out, lse, dout, dlse
    whole = _float32(backend, problem, t, saved)
    _assert_right(call, whole, dout, dlse)

    dq: Tensor | None = None
    for start, stop in itertools.pairwise([None, *cuts, 0]):
        part, tensors = piece(call, start, stop, has_sinks=False)
        part = part.but(needs_grad=True, deterministic=deterministic)
        alone = _float32(backend, part, tensors, saved)
        before = {"dq": _noise(t.q) if dq is None else dq, "dk": _noise(tensors.k), "dv": _noise(tensors.v)}
        given = Gradients(**{name: x.clone() for name, x in before.items()})
        added = _float32(backend, part, tensors, saved, given)
        for name in _NAMES:
            share, total, had = (getattr(alone, name), getattr(added, name), before[name])
            assert share.dtype == total.dtype == torch.float32 and share.is_contiguous()
            assert total.data_ptr() == getattr(given, name).data_ptr(), "not in place"
            _assert_rounded(name, total, had + share, exact)
        dq = alone.dq if dq is None else added.dq
        rows = key_places(call, start, stop)
        for name in ("dk", "dv"):
            of_whole = getattr(whole, name)
            _assert_rounded(name, getattr(alone, name), of_whole[rows] if problem.varlen else of_whole[:, rows], False)
    assert dq is not None and whole.dq is not None
    _assert_rounded("dq", dq, whole.dq, False)


def _assert_right(call: Call, got: Gradients, dout: Tensor, dlse: Tensor | None) -> None:
    upcast = call.upcast()
    exact = results(upcast, *reference.attention(upcast.problem, upcast.tensors), dout, dlse)
    plain = results(call, *reference.attention(call.problem, call.tensors, call.problem.dtype), dout, dlse)
    for name in _NAMES:
        assert_close(name, getattr(got, name), exact.values[name], plain.values[name])


def _assert_rounded(name: str, got: Tensor, want: Tensor, exact: bool) -> None:
    if exact:
        assert torch.equal(got, want), f"{name}: not the sum, rounded once"
        return
    error, largest = (x.abs().max().item() if x.numel() else 0.0 for x in (got - want, want))
    assert error <= 32 * torch.finfo(torch.float32).eps * max(largest, 1.0), f"{name}: {error:.3e} of {largest:.3e}"
