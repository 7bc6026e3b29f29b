"""Rows whose scores are all large and finite: softmax's of the scores, over many tiles of keys and blocks of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from tests.cases import Case, build, judge
from tests.mods.calls import with_functions

_LONG: dict[str, Any] = dict(batch=1, seqlen_q=40, seqlen_k=1040, head_dim=8)
CASES = (
    (Case("kernel", bias="hqk", large="min", kv_heads=1, **_LONG), None),
    (Case("tiles", bias="qk", large="-1e9", softcap=3.0, alibi="h", dropout=0.2, lse_grad=True, **_LONG), None),
    (Case("rows", bias="qk", large="min", heads=1, kv_heads=1, **(_LONG | {"seqlen_q": 288})), None),
    (Case("masked", bias="k", large="max", mask="qk", sinks=True, bias_grad=False, head_dim_v=24, **_LONG), None),
    (Case("varlen", lengths=((40, 600), (30, 530)), bias="hqk", large="-3e5", causal=True), None),
    (Case("function", kv_heads=1, **_LONG), "large_1e9"),
    (Case("learned", causal=True, bias="qk", large="min", **_LONG), "large_lowest"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("case", "score"), CASES, ids=lambda x: x and str(x))
def test_many_tiles_of_large_scores_meet_the_rule(case: Case, score: str | None, dtype: torch.dtype) -> None:
    judge(with_functions(case, score, None, dtype) if score else build(case, dtype), "cpu")


@pytest.mark.parametrize("features", [{}, {"softcap": 5.0}, {"causal": True}], ids=str)
@pytest.mark.parametrize(
    ("dtype", "bias"),
    [(x, x) for x in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
    + [(torch.float16, torch.float32), (torch.float32, torch.float64)],
    ids=str,
)
def test_rows_of_equal_scores_are_averages(dtype: torch.dtype, bias: torch.dtype, features: dict[str, Any]) -> None:
    """Of all keys that they see; and each value's gradient is the sum of its shares."""
    make = torch.Generator().manual_seed(1)
    q, k = (torch.zeros(1, n, 2, 8, dtype=dtype, requires_grad=True) for n in (40, 1100))
    v = torch.randn(1, 1100, 2, 8, generator=make).to(dtype).requires_grad_()
    limits = torch.finfo(bias)
    for number in (limits.min, limits.max, max(-3e5, limits.min)):
        full = torch.full((1, 1, 40, 1100), number, dtype=bias)
        if abs(full[0, 0, 0, 0].item()) > torch.finfo(torch.promote_types(dtype, torch.float32)).max:
            continue  # An infinity where scores are float32.
        out, lse = flashtile.attention(q, k, v, attn_bias=full, return_lse=True, backend="cpu", **features)
        seen = torch.ones(40, 1100, dtype=torch.float64).tril(1060 if "causal" in features else 1100)
        share = seen / seen.sum(-1, keepdim=True)
        want = torch.einsum("ij,bjhd->bihd", share, v.detach().double())
        dv = torch.autograd.grad(out.sum(), v)[0]
        close: dict[str, Any] = {} if dtype != torch.float64 else {"rtol": 1e-7, "atol": 1e-7}
        torch.testing.assert_close(out, want.to(dtype), **close)
        torch.testing.assert_close(dv, _of_keys(share, dv), **close)
        torch.testing.assert_close(lse, (full[..., 0].double() + seen.sum(-1).log()).to(lse.dtype).expand(lse.shape))


def _of_keys(share: Tensor, like: Tensor) -> Tensor:
    return share.sum(0)[None, :, None, None].expand(like.shape).to(like.dtype)
