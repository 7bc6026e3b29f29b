"""A call in pieces of its keys, each starting from what those before left: every backend must make it whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashtile.call.backend import Backend
from flashtile.call.problem import Problem, Tensors
from flashtile.core.masks import Band
from flashtile.core.states import Partial
from tests.cases import Call, Case, assert_forward_right, build
from tests.problems import banded_problem

# Keys counted from each sequence's end at which it is cut: each piece has its band at an offset of its own.
CHAINS: tuple[tuple[Case, tuple[int, ...]], ...] = (
    (Case("full", batch=1, seqlen_q=150, seqlen_k=260, head_dim=64, sinks=True), (130, 130, 64)),
    (Case("causal", batch=2, seqlen_q=200, seqlen_k=150, kv_heads=1, head_dim=72, causal=True), (90, 33)),
    (Case("window", batch=1, seqlen_q=140, seqlen_k=200, head_dim=128, window=(70, 9), softcap=5.0, mask="bqk"), (70,)),
    (Case("wide_v", batch=1, seqlen_q=70, seqlen_k=150, head_dim=64, head_dim_v=96, sinks=True, causal=True), (50,)),
    (Case("odd_256", batch=1, seqlen_q=90, seqlen_k=130, kv_heads=1, head_dim=200, alibi="h", bias="hk"), (60,)),
    (Case("varlen", batch=3, lengths=((70, 130), (0, 64), (100, 90)), head_dim=64, causal=True, spare=5), (40,)),
    (Case("varlen_128", batch=2, lengths=((130, 150), (9, 40)), kv_heads=1, head_dim=128, sinks=True), (40,)),
    (Case("large", batch=1, seqlen_q=70, seqlen_k=130, kv_heads=1, head_dim=64, bias="hqk", large="min", sinks=True),
     (60,)),
)  # fmt: skip

BANDS = (Band(), Band(None, 0), Band(20, 7))


def _spans(call: Call, start: int | None, stop: int) -> list[tuple[int, int]]:
    lengths = [k for _, k in call.case.lengths] or [call.tensors.k.shape[1]]
    return [(0 if start is None else max(0, n - start), max(0, n - stop)) for n in lengths]


def key_places(call: Call, start: int | None, stop: int) -> Tensor | slice:
    """Where the keys of a ``piece`` are among all keys."""
    spans = _spans(call, start, stop)
    if call.tensors.cu_seqlens_k is None:
        return slice(*spans[0])
    bounds = call.tensors.cu_seqlens_k.tolist()
    device = call.tensors.k.device
    return torch.cat([torch.arange(b + i, b + j, device=device) for b, (i, j) in zip(bounds, spans, strict=False)])


def piece(call: Call, start: int | None, stop: int, *, has_sinks: bool) -> tuple[Problem, Tensors]:
    """The call on the keys of each sequence from ``start`` to ``stop`` before its end."""
    t = replace(call.tensors, **{name: x.detach() for name, x in vars(call.tensors).items() if x is not None})
    spans = _spans(call, start, stop)
    (first, last), keys = spans[0], slice(*spans[0])
    changes: dict[str, Tensor | None] = {}
    if t.cu_seqlens_k is not None:
        rows = key_places(call, start, stop)
        changes["k"], changes["v"] = t.k[rows], t.v[rows]
        changes["cu_seqlens_k"] = torch.tensor([0, *(j - i for i, j in spans)]).cumsum(0).to(rows.device, torch.int32)
    else:
        changes["k"], changes["v"] = t.k[:, keys], t.v[:, keys]
        if t.attn_mask is not None:
            changes["attn_mask"] = t.attn_mask[..., keys]
        if t.attn_bias is not None:
            changes["attn_bias"] = t.attn_bias[..., keys]
        if t.alibi_slopes is not None and stop:
            # Distances are counted from the last key: here from one further to the left.
            distance = (
                (torch.arange(t.q.shape[1])[:, None] + t.k.shape[1] - t.q.shape[1] - torch.arange(first, last))
                .abs()
                .to(t.q.device)
            )
            bias = -t.alibi_slopes[:, None, None] * distance
            changes["alibi_slopes"] = None
            changes["attn_bias"] = bias if t.attn_bias is None else bias + t.attn_bias[..., keys].float()
    if not has_sinks:
        changes["sinks"] = None
    t, band, p = replace(t, **changes), call.problem.band, call.problem
    left, right = (None if x is None else x + by for x, by in ((band.left, -stop), (band.right, stop)))
    longest = {f"max_seqlen_{x}": n for x, n in (("q", p.seqlen_q), ("k", max(j - i for i, j in spans)))}
    lengths_known = longest if p.varlen else {}
    made = banded_problem(t, Band(left, right), softmax_scale=p.softmax_scale, softcap=p.softcap, **lengths_known)
    return made, t


def lse_as(problem: Problem, out: Tensor, lse: Tensor) -> Tensor:
    """lse of the rows of out as plans of this problem have it: in parts or not."""
    if (lse.dim() == out.dim()) == problem.large_scores:
        return lse
    return torch.stack([lse, torch.zeros_like(lse)], dim=-1) if problem.large_scores else lse[..., 0].contiguous()


def judge_chain(
    backend: Backend,
    case: Case,
    cuts: Sequence[int],
    dtype: torch.dtype,
    *,
    exact: bool = True,
    device: str = "cpu",
) -> None:
    """Asserts the error rule for the last of a chain, and that 16 bits of it are rounded once.

    Args:
        backend: What computes it.
        case: The whole call.
        cuts: Where to cut it.
        dtype: Of q, k and v.
        exact: Whether the backend's arithmetic before that rounding is the same for both dtypes.
        device: Of the tensors.
    """
    call = build(case, dtype, device)
    edges = [None, *cuts, 0]
    partial: Partial | None = None
    for n, (start, stop) in enumerate(itertools.pairwise(edges)):
        problem, tensors = piece(call, start, stop, has_sinks=n == 1)
        before = partial and Partial(partial.out, lse_as(problem, partial.out, partial.lse))
        out, lse = backend.plan("forward", problem.but(out_dtype=torch.float32), tensors)(tensors, before)
        assert out.dtype == lse.dtype == torch.float32 and out.is_contiguous()
        # What an empty state's out contains is nobody's business.
        one = lse_as(call.problem.but(bias_dtype=None, score_function=None), out, lse)
        is_empty = (one == -torch.inf).transpose(-1, -2)[..., None]
        partial = Partial(torch.where(is_empty, torch.nan, out).contiguous(), lse)
    assert_forward_right(call, out, one)
    short, short_lse = backend.plan("forward", problem, tensors)(tensors, before)
    assert short.dtype == dtype
    if exact:
        assert torch.equal(short_lse, lse) and torch.equal(short, out.to(dtype))
    torch.testing.assert_close((short, short_lse), (out.to(dtype), lse))


def judge_rows_without_keys(backend: Backend, dtype: torch.dtype, band: Band, device: str = "cpu") -> None:
    """Asserts that sequences without keys, and rows past the last one, keep the bits of what they start from.

    Their neighbours in k and v, at which a block of keys that is not there would lie, hold NaN.
    """
    make = torch.Generator().manual_seed(4)
    lengths, spare = ((40, 0), (70, 130), (0, 9), (133, 0), (30, 0), (20, 40)), 5
    bounds = [torch.tensor([0, *column]).cumsum(0).to(device, torch.int32) for column in zip(*lengths, strict=True)]
    rows, keys = (sum(column) + spare for column in zip(*lengths, strict=True))
    q = torch.randn(rows, 2, 64, generator=make).to(device, dtype)
    k, v = (torch.randn(keys, 1, 64, generator=make).to(device, dtype) for _ in range(2))
    for x in (k, v):
        x[130:139] = x[179:] = torch.nan
    partial = Partial(*(torch.randn(*shape, generator=make).to(device) for shape in ((rows, 2, 64), (2, rows))))
    partial.lse[:, ::7] = -torch.inf
    partial.out[::7] = torch.nan
    without = torch.ones(rows, dtype=torch.bool, device=device)
    without[40:110] = without[273:293] = False
    for tensors in (
        Tensors(q, k, v, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1]),
        Tensors(q, k[:0], v[:0], cu_seqlens_q=bounds[0], cu_seqlens_k=torch.zeros_like(bounds[1])),
    ):
        problem = banded_problem(tensors, band).but(out_dtype=torch.float32)
        out, lse = backend.plan("forward", problem, tensors)(tensors, partial)
        kept = without if len(tensors.k) else torch.ones_like(without)
        assert torch.equal(lse[:, kept], partial.lse[:, kept])
        wanted = torch.where((partial.lse == -torch.inf).T[..., None], 0.0, partial.out)
        assert torch.equal(out[kept], wanted[kept])
        assert torch.isfinite(out).all()
        if len(tensors.k) and band.unbounded:
            assert not torch.isclose(lse[:, ~kept], partial.lse[:, ~kept]).any()
