"""Backwards that add to float32 sums: a call in pieces of its keys, each adding, must be the whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashtile.call.backend import Backend, Gradients
from flashtile.call.problem import Problem, Tensors
from flashtile.core.masks import Band
from tests.cases import Case, assert_right, build
from tests.partials import key_places, lse_as, piece
from tests.problems import banded_problem

_NAMES = ("dq", "dk", "dv")
# Of the largest number: a unit in float32's last place, and what float32 sums in another order may differ by.
_EPS = torch.finfo(torch.float32).eps
_FLOAT32 = 32 * _EPS
# out, lse, dout, dlse.
Saved = tuple[Tensor, Tensor, Tensor, Tensor | None]


def _float32(backend: Backend, problem: Problem, t: Tensors, saved: Saved, sums: Gradients | None = None) -> Gradients:
    plan = backend.plan("backward", problem.but(grad_dtype=torch.float32), t, (saved[2], saved[3]))
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
    out, lse = backend.plan("forward", problem, t)(t)
    one = lse_as(problem.but(bias_dtype=None, score_function=None), out, lse)
    dout, dlse = torch.randn_like(out), torch.randn_like(one) if case.lse_grad else None
    saved = out, lse, dout, dlse
    whole = _float32(backend, problem, t, saved)
    assert_right(call, {name: getattr(whole, name) for name in _NAMES}, dout, dlse)

    dq: Tensor | None = None
    for start, stop in itertools.pairwise([None, *cuts, 0]):
        part, tensors = piece(call, start, stop, has_sinks=False)
        part = part.but(needs_grad=True, deterministic=deterministic)
        of_part = out, lse_as(part, out, lse), dout, dlse
        alone = _float32(backend, part, tensors, of_part)
        before = {"dq": _noise(t.q) if dq is None else dq, "dk": _noise(tensors.k), "dv": _noise(tensors.v)}
        given = Gradients(**{name: x.clone() for name, x in before.items()})
        added = _float32(backend, part, tensors, of_part, given)
        for name in _NAMES:
            share, total, had = (getattr(alone, name), getattr(added, name), before[name])
            assert share.dtype == total.dtype == torch.float32 and share.is_contiguous()
            assert total.data_ptr() == getattr(given, name).data_ptr(), "not in place"
            _assert_rounded(name, total, had + share, exact)
        dq = alone.dq if dq is None else added.dq
        rows = key_places(call, start, stop)
        for name in ("dk", "dv"):
            of_whole = getattr(whole, name)
            _assert_same(name, getattr(alone, name), of_whole[rows] if problem.varlen else of_whole[:, rows], dtype)
    assert dq is not None and whole.dq is not None
    _assert_same("dq", dq, whole.dq, dtype)


def judge_gaps(backend: Backend, dtype: torch.dtype, band: Band, *, head_dim: int = 64, device: str = "cpu") -> None:
    """Asserts that rows without keys and keys without rows keep the bits of their sums, and that others get theirs.

    Sequences that have one side alone stand for gaps: in q, where rows have no keys in this call, and in k. The NaN
    that dout, k and v hold there reach nobody.
    """
    make = torch.Generator().manual_seed(8)
    lengths, spare = ((40, 0), (0, 9), (70, 133), (0, 64), (130, 0), (20, 40), (0, 77)), 5
    bounds = [torch.tensor([0, *column]).cumsum(0).to(device, torch.int32) for column in zip(*lengths, strict=True)]
    rows, keys = (sum(column) + spare for column in zip(*lengths, strict=True))
    is_row, is_key = torch.zeros(rows, dtype=torch.bool), torch.zeros(keys, dtype=torch.bool)
    is_row[40:110] = is_row[240:260] = is_key[9:142] = is_key[206:246] = True
    is_row, is_key = is_row.to(device), is_key.to(device)

    def normal(count: int, heads: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(count, heads, head_dim, generator=make).to(device, dtype)

    q, k, v, dout = normal(rows, 4, dtype), normal(keys, 2, dtype), normal(keys, 2, dtype), normal(rows, 4, dtype)
    dout[~is_row] = k[~is_key] = v[~is_key] = torch.nan
    t = Tensors(q, k, v, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1])
    problem = banded_problem(t, band, needs_grad=True, deterministic=True)
    out, lse = backend.plan("forward", problem, t)(t)
    # Of all keys: the rows have others in other calls.
    lse = torch.where(lse == -torch.inf, 0.5, lse)
    saved = out, lse, dout, None
    alone = _float32(backend, problem, t, saved)
    before = Gradients(*(normal(len(x), x.shape[1], torch.float32) for x in (q, k, v)))
    given = Gradients(*(None if x is None else x.clone() for x in (before.dq, before.dk, before.dv)))
    _float32(backend, problem, t, saved, given)
    for name, some in (("dq", is_row), ("dk", is_key), ("dv", is_key)):
        had, share, total = getattr(before, name), getattr(alone, name), getattr(given, name)
        assert torch.equal(total[~some], had[~some]), name
        _assert_rounded(name, total[some], (had + share)[some], False)
        assert share[some].abs().max() > 0.01 and share[some].isfinite().all(), name


def _assert_rounded(name: str, got: Tensor, want: Tensor, exact: bool) -> None:
    if exact:
        assert torch.equal(got, want), f"{name}: not the sum, rounded once"
    else:
        error, largest = _error(got, want)
        assert error.max() <= _FLOAT32 * largest, f"{name}: {error.max():.3e} of {largest:.3e}"


def _assert_same(name: str, got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Of keys in other places of a tile, where the last bits of a float32 sum may differ.

    Kernels round probabilities and their gradients to 16 bits before they multiply with them, and few of those round
    the other way then. If gradients were rounded to 16 bits themselves, most would differ.
    """
    error, largest = _error(got, want)
    assert error.median() <= _EPS * largest, f"{name}: most differ by {error.median():.3e} of {largest:.3e}"
    assert error.max() <= max(_FLOAT32, torch.finfo(dtype).eps) * largest, f"{name}: {error.max():.3e} of {largest:.3e}"


def _error(got: Tensor, want: Tensor) -> tuple[Tensor, float]:
    """Of each number, and the largest of them, at least 1."""
    error = (got - want).abs().flatten() if got.numel() else torch.zeros(1)
    return error, max(1.0, want.abs().max().item() if want.numel() else 0.0)
