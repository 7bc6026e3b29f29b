"""The CPU backend: the case table, sums in float32, large scores, calls in steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import reference
from flashtile.backends import cpu
from flashtile.core.masks import Band
from flashtile.core.states import Partial
from tests.cases import CASES, Case, build, judge, results
from tests.maxima import judge_maxima
from tests.mods.calls import with_functions
from tests.partials import BANDS, CHAINS, judge_chain, judge_rows_without_keys
from tests.poison import poisoned_memory
from tests.rule import drawn
from tests.sums import judge_gaps, judge_sums

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.one_in(3)  # of four dtypes: each case has another one
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, dtype: torch.dtype) -> None:
    judge(build(case, dtype), "cpu")


@pytest.mark.one_in(3)  # of four dtypes: each case has another one
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_largest_scores(case: Case, dtype: torch.dtype) -> None:
    judge_maxima(build(case, dtype), "cpu")


# Sums over so many rows, keys or heads that rounding them to 16 bits after each block would show.
LONG_SUMS = (
    Case("dv of one key", batch=1, seqlen_q=339, seqlen_k=1),
    Case("few keys", batch=1, seqlen_q=700, seqlen_k=3, head_dim=64),
    Case("one key head", batch=1, seqlen_q=300, seqlen_k=300, heads=8, kv_heads=1, causal=True),
    Case("many keys", batch=1, seqlen_q=3, seqlen_k=9000, head_dim=64),
    Case("bias and sinks", batch=1, seqlen_q=700, seqlen_k=3, bias="k", sinks=True),
    Case("window", batch=1, seqlen_q=700, seqlen_k=700, heads=4, kv_heads=1, window=(300, 0)),
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", LONG_SUMS, ids=str)
def test_gradients_are_summed_in_float32(case: Case, dtype: torch.dtype) -> None:
    """The error is at most twice the bound of rounding the largest exact gradient once."""
    call = build(case, dtype)
    exact_call = call.upcast()
    dout = torch.randn(*call.tensors.q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = results(call, *call.run("cpu"), dout, None).values

    def by_definition() -> dict[str, torch.Tensor]:
        return results(exact_call, *reference.attention(call.problem, exact_call.tensors), dout, None).values

    exact, in_float32 = by_definition(), drawn(by_definition, torch.float32)
    for name in got.keys() - {"out", "lse"}:
        error = (got[name] - exact[name]).abs().max().item()
        largest = exact[name].abs().max().item()
        # Half a unit in the last place. The error of rounding these very numbers may be far less, by chance.
        rounding = torch.finfo(dtype).eps / 2 * 2.0 ** math.floor(math.log2(largest)) if largest else 0.0
        floor = (in_float32[name] - exact[name]).abs().max().item()
        assert error <= 2 * (rounding + floor), f"{name}: error {error:.2e}, one rounding {rounding:.2e}"


_LONG: dict[str, Any] = dict(batch=1, seqlen_q=40, seqlen_k=1040, head_dim=8)
LARGE_CASES = (
    (Case("kernel", bias="hqk", large="min", kv_heads=1, **_LONG), None),
    (Case("tiles", bias="qk", large="-1e9", softcap=3.0, alibi="h", dropout=0.2, lse_grad=True, **_LONG), None),
    (Case("rows", bias="qk", large="min", heads=1, kv_heads=1, **(_LONG | {"seqlen_q": 288})), None),
    (Case("masked", bias="k", large="max", mask="qk", sinks=True, bias_grad=False, head_dim_v=24, **_LONG), None),
    (Case("varlen", lengths=((40, 600), (30, 530)), bias="hqk", large="-3e5", causal=True), None),
    (Case("function", kv_heads=1, **_LONG), "large_1e9"),
    (Case("learned", causal=True, bias="qk", large="min", **_LONG), "large_lowest"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("case", "score"), LARGE_CASES, ids=lambda x: x and str(x))
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("case", "cuts"), CHAINS, ids=str)
def test_a_chain_of_partial_results_is_the_whole(case: Case, cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    with poisoned_memory(), torch.no_grad():
        judge_chain(cpu.BACKEND, case, cuts, dtype)


def test_a_result_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        Partial(torch.zeros(1, 2, 3, 4).transpose(1, 2), torch.zeros(1, 2, 3))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("case", "cuts"), CHAINS, ids=str)
def test_gradients_of_pieces_add_up_in_float32(case: Case, cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    # PyTorch's kernel and blocks of rows add to the sums as they come.
    with poisoned_memory():
        judge_sums(cpu.BACKEND, case, cuts, dtype, exact=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_rows_without_keys_keep_what_they_start_from(band: Band, dtype: torch.dtype) -> None:
    with poisoned_memory():
        judge_rows_without_keys(cpu.BACKEND, dtype, band)


@pytest.mark.parametrize("head_dim", [64])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_gaps_keep_their_sums(band: Band, head_dim: int) -> None:
    with poisoned_memory():
        judge_gaps(cpu.BACKEND, torch.float16, band, head_dim=head_dim)
