"""Judges the largest scores of a call beside the float64 oracle, to float32 roundings; nothing else changes a bit."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from flashtile import UnsupportedError, reference
from flashtile.ops import dispatch
from tests.cases import Call, gradient_of
from tests.kvcache.cases import CacheCall
from tests.poison import poisoned_memory
from tests.rule import assert_close

# Roundings of the lse's dtype, of a sum as large as the norms of its factors allow: products of 16 columns are summed
# with one rounding or with several.
ROUNDINGS = 24


def judge_maxima(call: Call, backend: str | None, *, gradients: bool = True) -> None:
    """Asserts that a call's largest scores are right, and that out, lse and the gradients keep their bits.

    Without ``gradients`` they are not compared, as where they may differ from call to call, and not asked for, as where
    the backend has none. Calls that the backend does not compute are refused with the option too.
    """
    if backend is not None and dispatch.reasons(backend, call.problem, "forward"):
        with pytest.raises(UnsupportedError):
            call.run(backend, return_max_scores=True)
        return
    with poisoned_memory(), nullcontext() if gradients else torch.no_grad():
        plain, (out, lse, found) = call.run(backend), call.run(backend, return_max_scores=True)
        assert torch.equal(out, plain[0]) and _same_bits(lse, plain[1]), "out or lse changed"
        if gradients and call.leaves:
            dout = gradient_of(call)
            each = (_gradients(call, out, lse, dout), _gradients(call, *plain, dout))
            assert all(map(_same_bits, *each)), "a gradient changed"
    assert not found.requires_grad and found.is_contiguous()
    assert found.shape == lse.shape and found.dtype == lse.dtype == call.problem.lse_dtype
    exact, t = call.in_main_memory().upcast(), call.in_main_memory().tensors
    want = reference.with_max_scores(exact.problem, exact.tensors)[2]
    # (..., rows, heads, dim) -> (..., heads, rows)
    norms = t.q.detach().double().norm(dim=-1).transpose(-1, -2)
    longest = t.k.detach().double().norm(dim=-1).amax() if t.k.numel() else torch.zeros(())
    size = abs(call.problem.softmax_scale) * norms * longest + want.abs()
    if t.alibi_slopes is not None:
        size = size + t.alibi_slopes.double().max() * max(call.problem.seqlen_q, call.problem.seqlen_k)
    assert_near(found.cpu(), want, size)


def judge_cached_maxima(call: CacheCall, again: CacheCall, backend: str | None) -> None:
    """The same of a call over a cache; ``again`` is the call made anew, since calls append to their caches."""
    if backend is not None and dispatch.reasons(backend, call.problem, "decode"):
        with pytest.raises(UnsupportedError):
            call.run(backend, return_max_scores=True)
        return
    before = call.copies()
    with poisoned_memory():
        plain, (out, lse, found) = again.run(backend), call.run(backend, return_max_scores=True)
    assert torch.equal(out, plain[0]) and _same_bits(lse, plain[1]), "out or lse changed"
    assert found.is_contiguous() and found.shape == lse.shape and found.dtype == lse.dtype
    problem, after = call.problem, call.copies()
    left = reference.appended(problem, before)
    left.k_cache, left.v_cache = after.k_cache, after.v_cache
    exact = reference.cached_with_max_scores(problem, left)[2]
    if problem.dtype != torch.float64 and (call.case.rotary or call.case.float8):
        # Rotated queries and 8-bit rows are rounded, and may be rounded to the other of two neighbours.
        short = reference.cached_with_max_scores(problem, left, problem.dtype)[2]
        assert_close({"max_scores": found.cpu()}, lambda: {"max_scores": exact}, {"max_scores": short}, problem.dtype)
        return
    pairs = [(left.q, left.k_cache, left.k_scale)]
    if left.qv is not None:
        pairs.append((left.qv, left.v_cache, left.v_scale))
    norms = torch.zeros(())
    for q, keys, scale in pairs:
        longest = _longest(keys) * (1.0 if scale is None else scale.max().item())
        norms = norms + abs(problem.softmax_scale) * longest * q.double().norm(dim=-1).transpose(-1, -2)
    size = norms + exact.abs()
    if left.alibi_slopes is not None:
        size = size + left.alibi_slopes.double().max() * problem.seqlen_k
    assert_near(found.cpu(), exact, size)


def assert_near(got: Tensor, want: Tensor, size: Tensor) -> None:
    """Asserts that rows are the same where ``want`` is not finite, and else off by a few roundings of ``size``."""
    finite = want.isfinite()
    assert _same_bits(got[~finite].double(), want[~finite])
    error, allowed = (got.double() - want).abs()[finite], (ROUNDINGS * torch.finfo(got.dtype).eps * size)[finite]
    if error.numel():
        assert (error <= allowed).all(), f"off by {(error / allowed).max():.3g} of what is allowed"


def _longest(keys: Tensor) -> float:
    norms = keys.double().norm(dim=-1).nan_to_num(0.0, 0.0, 0.0)
    return norms.max().item() if norms.numel() else 0.0


def _same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.nan_to_num(1.25, 3e38, -3e38), y.nan_to_num(1.25, 3e38, -3e38)) and torch.equal(
        x.isnan(), y.isnan()
    )


def _gradients(call: Call, out: Tensor, lse: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    outputs, given = [out], [dout.to(out.dtype)]
    if call.case.lse_grad and lse.requires_grad:
        outputs, given = [out, lse], [*given, torch.where(lse.isfinite(), lse.detach(), 0.0)]
    return torch.autograd.grad(outputs, list(call.leaves.values()), given)
