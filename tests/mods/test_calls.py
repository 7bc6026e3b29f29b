"""score_mod and mask_mod against the float64 oracle, on the CPU backend: values and gradients."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile import InvalidInputError, UnsupportedError
from tests.cases import Case, judge
from tests.mods.calls import indices_are_cut, with_functions
from tests.mods.functions import MASKS, SCORES

DENSE = Case("mods", batch=2, seqlen_q=37, seqlen_k=37, heads=4, kv_heads=2)
LONGER = Case("mods_longer", batch=2, seqlen_q=29, seqlen_k=43, causal=True, sinks=True, lse_grad=True)
PACKED = Case("varlen_mods", batch=3, lengths=((13, 21), (1, 1), (29, 18)), heads=4, kv_heads=2)
EVERYTHING = Case(
    "mods_everything", window=(20, 3), softcap=3.0, alibi="bh", mask="bqk", bias="hk", sinks=True, dropout=0.2,
    heads=2, kv_heads=1, lse_grad=True, seqlen_q=29, seqlen_k=43, head_dim=20, head_dim_v=12,
)  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", [DENSE, LONGER, PACKED, EVERYTHING], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_score_mods(name: str, case: Case) -> None:
    judge(with_functions(case, name, None, torch.float32), "cpu")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", [DENSE, LONGER, PACKED, EVERYTHING], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_mask_mods(name: str, case: Case) -> None:
    judge(with_functions(case, None, name, torch.float32), "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_both_at_once(dtype: torch.dtype) -> None:
    judge(with_functions(DENSE, "read_twice", "documents", dtype), "cpu")


def test_a_call_of_many_tiles() -> None:
    case = Case("mods_long", batch=1, seqlen_q=300, seqlen_k=1100, heads=6, kv_heads=3, head_dim=8)
    judge(with_functions(case, "by_distance", "heads_differ", torch.float32), "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_indices_past_the_ends_are_cut(dtype: torch.dtype) -> None:
    assert indices_are_cut("cpu", dtype)


def test_what_is_captured_may_alone_need_a_gradient() -> None:
    case = Case("alone", wanted="o")
    call = with_functions(case, "by_row_and_key", "causal", torch.float32)
    assert set(call.leaves) == {"operand0", "operand1"} and not call.tensors.q.requires_grad
    judge(call, "cpu")


def _inputs(*, heads: int = 2, rows: int = 12) -> tuple[torch.Tensor, ...]:
    make = torch.Generator().manual_seed(3)
    return tuple(torch.randn(2, rows, heads, 8, generator=make, requires_grad=True) for _ in range(3))


def test_recognised_masks_and_caps_are_the_keywords_bit_for_bit() -> None:
    q, k, v = _inputs()
    more = k.detach()[:, :7].clone(), v.detach()[:, :7].clone()
    cap, width = 5.0, 3

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx <= width) & (kv_idx <= q_idx)

    def capped(score, b, h, q_idx, kv_idx):
        return torch.tanh(score / cap) * cap

    pairs = [
        (dict(mask_mod=causal), dict(causal=True)), (dict(mask_mod=window), dict(causal=True, window_size=(3, None))),
        (dict(score_mod=capped), dict(softcap=5.0)),
        (
            dict(score_mod=capped, mask_mod=causal, window_size=(4, 4)),
            dict(softcap=5.0, causal=True, window_size=(4, 4)),
        ),
    ]  # fmt: skip
    for ours, keywords in pairs:
        got, want = (flashtile.attention(q, k, v, **each) for each in (ours, keywords))
        assert torch.equal(got, want)
        assert flashtile.explain(q, k, v, **ours) == flashtile.explain(q, k, v, **keywords)
    # From the first row and key, where lengths differ.
    got = flashtile.attention(q, *more, mask_mod=window)
    i, j = torch.arange(12)[:, None], torch.arange(7)
    want = flashtile.attention(q, *more, attn_mask=(i - j <= 3) & (j <= i))
    torch.testing.assert_close(got, want)
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = [x.detach()[0] for x in (q, k, v)]
    got = flashtile.attention_varlen(*packed, bounds, bounds, mask_mod=causal)
    assert torch.equal(got, flashtile.attention_varlen(*packed, bounds, bounds, causal=True))


def test_what_functions_make_of_dropped_pairs_stays_out() -> None:
    q, k, v = _inputs()
    table = torch.randn(12, 12)
    table[:, 5] = torch.nan
    table[3] = torch.inf
    leaf = table.clone().requires_grad_()

    def wild(score, b, h, q_idx, kv_idx):
        return score + leaf[q_idx, kv_idx] + 1.0 / (kv_idx - 7)

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx != 5) & (q_idx != 3) & (kv_idx != 7)

    out, lse = flashtile.attention(q, k, v, score_mod=wild, mask_mod=mask, return_lse=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v, leaf))
    assert out.isfinite().all() and all(x.isfinite().all() for x in grads)
    assert (out[:, 3] == 0).all() and (lse[:, :, 3] == -torch.inf).all()
    assert (grads[3][3] == 0).all() and (grads[3][:, 5] == 0).all() and (grads[3][0, 0] != 0).all()


def test_new_values_are_read_at_every_call() -> None:
    q, k, v = _inputs()
    table, factor = torch.randn(12), 2.0

    def mod(score, b, h, q_idx, kv_idx):
        return score * factor + table[kv_idx]

    for factor in (2.0, 0.5):
        table.normal_()
        want = flashtile.attention(q, k, v, softmax_scale=factor * 8**-0.5, attn_bias=table[None])
        torch.testing.assert_close(flashtile.attention(q, k, v, score_mod=mod), want)


def test_a_gradient_is_the_same_every_time() -> None:
    case = Case("mods_same", batch=2, seqlen_q=200, seqlen_k=200, heads=4, kv_heads=4, deterministic=True)
    call = with_functions(case, "buckets", None, torch.float32)
    out, _ = call.run("cpu")
    leaves = list(call.leaves.values())
    first = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    second = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all(map(torch.equal, first, second))


def test_functions_of_a_packed_call_with_out() -> None:
    q, k, v = torch.randn(3, 9, 2, 16).unbind()
    slope = torch.randn(2, requires_grad=True)
    bounds, out = torch.tensor([0, 4, 9], dtype=torch.int32), torch.full_like(q, torch.nan)
    keywords = dict(score_mod=lambda s, b, h, i, j: s + slope[h] * (i - j), mask_mod=lambda b, h, i, j: i + b >= j)
    with pytest.raises(InvalidInputError, match="score_mod requires grad"):
        flashtile.attention_varlen(q, k, v, bounds, bounds, out=out, **keywords)
    with torch.no_grad():
        expected = flashtile.attention_varlen(q, k, v, bounds, bounds, **keywords)
        assert flashtile.attention_varlen(q, k, v, bounds, bounds, out=out, **keywords) is out
    assert torch.equal(out, expected)


def test_refusals_name_the_argument() -> None:
    q, k, v = _inputs()
    table = torch.randn(4, 4)
    cases = [
        (dict(score_mod=3.0), "score_mod: is of type float, must be a function of (score, b, h, q_idx, kv_idx)"),
        (dict(mask_mod=lambda b, h: b > h), "mask_mod: takes (b, h), must take (b, h, q_idx, kv_idx)"),
        (dict(score_mod=lambda s, b, h, i, j: s + table.sum()), "sum of a captured tensor"),
        (dict(score_mod=lambda s, b, h, i, j: s + table[h]), "index these too"),
        (dict(score_mod=lambda s, b, h, i, j: s if i > j else -s), "use torch.where"),
        (dict(score_mod=lambda s, b, h, i, j: torch.stack([s, s])), "not one number"),
        (dict(mask_mod=lambda b, h, i, j: torch.empty(0)[i] > 0), "score's own indices"),
        (dict(mask_mod=lambda b, h, i, j: table[:0, 0][i] > 0), "which has no element"),
        (dict(score_mod=lambda s, b, h, i, j: s, precision="fp8"), "does not go with 8 bits"),
    ]
    for keywords, text in cases:
        with pytest.raises(InvalidInputError) as caught:
            flashtile.attention(q, k, v, **keywords)
        assert text in str(caught.value) or "mask_mod" in keywords, str(caught.value)
        assert ("score_mod" if "score_mod" in keywords else "mask_mod") in str(caught.value)
    with pytest.raises(InvalidInputError, match=r"test_calls.py:\d+: .*table.sum"):
        flashtile.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table.sum())
    with pytest.raises(UnsupportedError, match="no float32"):
        flashtile.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 2, backend="hopper")
