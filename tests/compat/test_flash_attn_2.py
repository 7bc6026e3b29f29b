"""flash-attn 2's functions against a score matrix written out by hand, and against one another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashtile import InvalidInputError
from flashtile.compat import flash_attn_2 as fa2
from flashtile.compat._private import _get_block_size_n
from tests.compat.by_hand import assert_same, by_hand, cumulated, inputs, shown

TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"(q, k, v, {TAIL})",
    "flash_attn_kvpacked_func": f"(q, kv, {TAIL})",
    "flash_attn_qkvpacked_func": f"(qkv, {TAIL})",
    "flash_attn_varlen_func": f"(q, k, v, {LENGTHS}, {TAIL}, block_table=None)",
    "flash_attn_varlen_kvpacked_func": f"(q, kv, {LENGTHS}, {TAIL})",
    "flash_attn_varlen_qkvpacked_func": f"(qkv, cu_seqlens, max_seqlen, {TAIL})",
    "flash_attn_with_kvcache": (
        "(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False)"
    ),
}


def test_signatures() -> None:
    assert {name: shown(getattr(fa2, name)) for name in fa2.__all__} == SIGNATURES


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
CASES: list[dict] = [
    {},
    {"softmax_scale": 0.3},
    {"causal": True},
    {"causal": True, "seqlen_q": 12},
    {"causal": True, "seqlen_q": 50, "seqlen_k": 20},
    {"window_size": (5, 3)},
    {"window_size": [0, 0]},
    {"window_size": (-1, 4), "seqlen_q": 20},
    {"window_size": (-7, -2)},
    {"window_size": (6, -3), "seqlen_k": 60},
    {"window_size": torch.tensor([5, -1])},
    {"window_size": (8, 8), "causal": True},
    {"window_size": (3, 0), "seqlen_q": 40, "seqlen_k": 9},
    {"softcap": 1.5},
    {"softcap": 1.5, "causal": True, "alibi_slopes": SLOPES},
    {"alibi_slopes": SLOPES},
    {"alibi_slopes": torch.stack([SLOPES, 2 * SLOPES]), "seqlen_q": 11, "window_size": (9, 2)},
    {"head_dim": 59},
    {"head_dim": 111, "causal": True},
    {"heads": (4, 1), "seqlen_q": 1, "causal": True},
    {"seqlen_q": 1, "seqlen_k": 1},
    {"deterministic": True, "causal": True},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case) or "plain")
def test_out_lse_and_gradients(case: dict) -> None:
    shape = {name: case[name] for name in ("seqlen_q", "seqlen_k", "heads", "head_dim") if name in case}
    keywords = {name: value for name, value in case.items() if name not in shape}
    leaves = inputs(**shape)
    meaning = {name: value for name, value in keywords.items() if name != "deterministic"}
    if "window_size" in meaning:
        meaning["window_size"] = tuple(int(bound) for bound in meaning["window_size"])
    out, lse, s_dmask = fa2.flash_attn_func(*leaves, **keywords, return_attn_probs=True)
    expected, expected_lse = by_hand(*leaves, **meaning)
    assert_same((out, lse), (expected, expected_lse))
    assert s_dmask.numel() == 0 and s_dmask.dtype == out.dtype
    dout = torch.randn_like(out)
    assert_same(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout))


@pytest.mark.parametrize("causal", [False, True])
def test_packed_tensors_equal_separate_ones(causal: bool) -> None:
    q, k, v = inputs(heads=(2, 2))
    keywords = {"causal": causal, "window_size": (9, -1), "return_attn_probs": True}
    expected = fa2.flash_attn_func(q, k, v, **keywords)
    dout = torch.randn_like(expected[0])
    dq, dk, dv = torch.autograd.grad(expected[0], (q, k, v), dout)
    qkv = torch.stack([q, k, v], dim=2).detach().requires_grad_()
    kv = torch.stack([k, v], dim=2).detach().requires_grad_()
    whole = fa2.flash_attn_qkvpacked_func(qkv, **keywords)
    half = fa2.flash_attn_kvpacked_func(q, kv, **keywords)
    assert_same(whole, expected)
    assert_same(half, expected)
    assert_same(torch.autograd.grad(whole[0], (qkv,), dout), (torch.stack([dq, dk, dv], dim=2),))
    assert_same(torch.autograd.grad(half[0], (q, kv), dout), (dq, torch.stack([dk, dv], dim=2)))


LENGTHS_Q, LENGTHS_K = (7, 0, 1, 19), (11, 4, 0, 19)


VARLEN_CASES: list[dict] = [
    {},
    {"causal": True, "softmax_scale": 0.2},
    {"window_size": (4, 2), "alibi_slopes": SLOPES[:2]},
    {"softcap": 2.0, "alibi_slopes": torch.stack([SLOPES[:2] * (b + 1) for b in range(4)])},
]


@pytest.mark.parametrize("case", VARLEN_CASES, ids=lambda case: "-".join(case) or "plain")
def test_varlen_equals_each_sequence_alone(case: dict) -> None:
    q = torch.randn(sum(LENGTHS_Q), 2, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(sum(LENGTHS_K), 1, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    cu_q, cu_k = cumulated(LENGTHS_Q), cumulated(LENGTHS_K)
    longest = torch.tensor(max(LENGTHS_Q)), max(LENGTHS_K)
    out, lse, s_dmask = fa2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, **case, return_attn_probs=True)
    parts = []
    for b, (rows, keys) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
        alone = dict(case)
        if "alibi_slopes" in case and case["alibi_slopes"].dim() == 2:
            alone["alibi_slopes"] = case["alibi_slopes"][b]
        part_q = q[cu_q[b] : cu_q[b + 1]][None]
        part_k, part_v = (x[cu_k[b] : cu_k[b + 1]][None] for x in (k, v))
        if keys == 0:
            parts.append((torch.zeros_like(part_q), torch.full((1, 2, rows), -torch.inf, dtype=q.dtype)))
        else:
            parts.append(by_hand(part_q, part_k, part_v, **alone))
    expected = torch.cat([part[0][0] for part in parts])
    expected_lse = torch.cat([part[1][0] for part in parts], dim=1)
    assert_same((out, lse), (expected, expected_lse))
    assert s_dmask.numel() == 0
    dout = torch.randn_like(out)
    assert_same(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout))


def test_packed_varlen_equals_separate_varlen() -> None:
    q, k, v = (torch.randn(27, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    cu = cumulated(LENGTHS_Q)
    keywords = {"causal": True, "softcap": 3.0, "return_attn_probs": True}
    expected = fa2.flash_attn_varlen_func(q, k, v, cu, cu, 19, 19, **keywords)
    dout = torch.randn_like(expected[0])
    dq, dk, dv = torch.autograd.grad(expected[0], (q, k, v), dout)
    qkv = torch.stack([q, k, v], dim=1).detach().requires_grad_()
    kv = torch.stack([k, v], dim=1).detach().requires_grad_()
    whole = fa2.flash_attn_varlen_qkvpacked_func(qkv, cu, torch.tensor(19), **keywords)
    half = fa2.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 19, torch.tensor([19]), **keywords)
    assert_same(whole, expected)
    assert_same(half, expected)
    assert_same(torch.autograd.grad(whole[0], (qkv,), dout), (torch.stack([dq, dk, dv], dim=1),))
    assert_same(torch.autograd.grad(half[0], (q, kv), dout), (dq, torch.stack([dk, dv], dim=1)))


def test_lse_has_a_gradient() -> None:
    leaves = inputs(seqlen_q=9, seqlen_k=13)
    lse = fa2.flash_attn_func(*leaves, causal=True, return_attn_probs=True)[1]
    expected = by_hand(*leaves, causal=True)[1]
    dlse = torch.randn_like(lse)
    assert_same(torch.autograd.grad(lse, leaves[:2], dlse), torch.autograd.grad(expected, leaves[:2], dlse))


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_dropout_drops_its_share_and_scales_the_rest(softcap: float) -> None:
    seqlen, dropout_p = 64, 0.3
    q = torch.zeros(2, seqlen, 4, seqlen, dtype=torch.float64)
    v = torch.eye(seqlen, dtype=torch.float64)[None, :, None].expand(2, seqlen, 4, seqlen)
    torch.manual_seed(5)
    probs = fa2.flash_attn_func(
        q, q, v, dropout_p, softcap=softcap
    )  # equal scores, so out is the dropped probabilities
    kept = probs[probs != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / seqlen / (1 - dropout_p)))
    spread = (dropout_p * (1 - dropout_p) / probs.numel()) ** 0.5
    assert abs(1 - kept.numel() / probs.numel() - dropout_p) < 5 * spread
    torch.manual_seed(5)
    assert torch.equal(probs, fa2.flash_attn_func(q, q, v, dropout_p, softcap=softcap))
    assert not torch.equal(probs, fa2.flash_attn_func(q, q, v, dropout_p, softcap=softcap))


def test_dropout_has_the_gradient_of_its_own_mask() -> None:
    q, k, v = inputs(seqlen_q=16, seqlen_k=16, heads=(2, 2))
    eye = torch.eye(16, dtype=torch.float64)[None, :, None].expand_as(v)
    torch.manual_seed(3)
    dropped = fa2.flash_attn_func(q, k, eye, 0.4).detach()
    plain = fa2.flash_attn_func(q, k, eye)
    mask = (dropped != 0).double() / (1 - 0.4)
    torch.manual_seed(3)
    out = fa2.flash_attn_func(q, k, v, 0.4)
    expected = torch.einsum("bihj,bjhd->bihd", plain * mask, v)
    dout = torch.randn_like(out)
    assert_same((out,), (expected,))
    assert_same(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout))


def decoded(s_dmask: Tensor, lse: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Kept or dropped, and the probabilities, from S_dmask by blocks of keys as flash-attn's tests do it."""
    size = _get_block_size_n(s_dmask.device, 64, True, False)
    blocks, places = s_dmask.abs().split(size, dim=-1), scores.split(size, dim=-1)
    largest = torch.stack([place.amax(dim=-1) for place in places], dim=-1)
    later = largest.flip(-1).cummax(dim=-1).values.flip(-1).unbind(-1)
    steps = zip(blocks, later, strict=True)
    probs = [torch.where(top == -torch.inf, 0.0, torch.exp(top - lse))[..., None] * block for block, top in steps]
    return s_dmask >= 0, torch.cat(probs, dim=-1)


DROPOUT_CASES: list[dict] = [
    {},
    {"causal": True, "seqlen_q": 50, "seqlen_k": 20},  # the first rows keep no key
    {"window_size": (5, 3), "heads": (4, 1), "softmax_scale": 0.7},
    {"softcap": 1.5, "alibi_slopes": SLOPES},
]


@pytest.mark.parametrize("case", DROPOUT_CASES, ids=lambda case: "-".join(case) or "plain")
def test_s_dmask_holds_the_probabilities_and_the_dropout_of_the_call(case: dict) -> None:
    shape = {name: case[name] for name in ("seqlen_q", "seqlen_k", "heads") if name in case}
    meaning = {name: value for name, value in case.items() if name not in shape}
    q, k, v = inputs(**shape)
    torch.manual_seed(4)
    out, lse, s_dmask = fa2.flash_attn_func(q, k, v, 0.3, **meaning, return_attn_probs=True)
    torch.manual_seed(4)
    assert torch.equal(out, fa2.flash_attn_func(q, k, v, 0.3, **meaning))
    assert s_dmask.shape == (2, 4, q.shape[1], k.shape[1]) and s_dmask.dtype == q.dtype and not s_dmask.requires_grad

    eye = torch.eye(k.shape[1], dtype=q.dtype)[None, :, None].expand(2, -1, k.shape[2], -1)
    expected_probs, expected_lse = by_hand(q, k, eye, **meaning)
    expected_probs = expected_probs.transpose(1, 2)
    kept, probs = decoded(s_dmask, lse, torch.log(expected_probs) + expected_lse[..., None])
    assert_same((lse, probs), (expected_lse, expected_probs))
    share = (~kept & (expected_probs > 0)).sum() / (expected_probs > 0).sum()
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / (expected_probs > 0).sum()) ** 0.5
    wide = v.repeat_interleave(4 // v.shape[2], dim=2)
    expected = torch.einsum("bhij,bjhd->bihd", expected_probs * kept / 0.7, wide)
    dout = torch.randn_like(out)
    assert_same((out,), (expected,))
    assert_same(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout))


def test_s_dmask_of_packed_sequences_is_in_their_corners() -> None:
    q = torch.randn(sum(LENGTHS_Q) + 3, 2, 8, dtype=torch.bfloat16)  # three rows belong to no sequence
    k, v = (torch.randn(sum(LENGTHS_K), 1, 8, dtype=torch.bfloat16) for _ in range(2))
    cu_q, cu_k = cumulated(LENGTHS_Q), cumulated(LENGTHS_K)
    out, _, s_dmask = fa2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 19, 19, 0.2, causal=True, return_attn_probs=True)
    assert s_dmask.shape == (4, 2, 19, 19) and s_dmask.dtype == torch.bfloat16
    assert torch.equal(out[-3:], torch.zeros(3, 2, 8, dtype=q.dtype))
    for b, (rows, keys) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
        corner = s_dmask[b, :, :rows, :keys].double()
        assert s_dmask[b].count_nonzero() == corner.count_nonzero()
        if not rows * keys:
            continue
        mine = slice(cu_q[b], cu_q[b + 1])
        part_q, part_k = q[None, mine].double(), k[None, cu_k[b] : cu_k[b + 1]].double()
        eye = torch.eye(keys, dtype=torch.float64)[None, :, None]
        expected = by_hand(part_q, part_k, eye, causal=True)[0][0].transpose(0, 1)
        top = expected.amax(dim=-1, keepdim=True)
        expected = torch.where(top > 0, expected / top, 0.0)
        # One rounding to 8 bits.
        torch.testing.assert_close(corner.abs(), expected, rtol=2**-8, atol=1e-6)
        assert (corner < 0).any() and (corner > 0).any()
        undone = corner.clamp(min=0) * torch.where(top > 0, top, 0.0) / 0.8
        from_probs = torch.einsum("hij,jd->ihd", undone, v[cu_k[b] : cu_k[b + 1], 0].double())
        torch.testing.assert_close(out[mine].double(), from_probs, rtol=2**-6, atol=2**-6)


def test_s_dmask_under_autocast_is_that_of_cast_tensors() -> None:
    leaves = inputs(dtype=torch.float32)
    low = tuple(x.bfloat16() for x in leaves)
    torch.manual_seed(8)
    expected = fa2.flash_attn_func(*low, 0.2, return_attn_probs=True)
    torch.manual_seed(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fa2.flash_attn_func(*leaves, 0.2, return_attn_probs=True)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_s_dmask_without_keys_or_queries() -> None:
    q, k = torch.zeros(2, 3, 2, 8), torch.zeros(2, 0, 2, 8)
    out, lse, s_dmask = fa2.flash_attn_func(q, k, k, 0.5, return_attn_probs=True)
    assert s_dmask.shape == (2, 2, 3, 0)
    assert torch.equal(out, q) and (lse == -torch.inf).all()


Q, KV = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 2, 8)
PACKED, CU = torch.zeros(4, 3, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
ROWS = torch.zeros(4, 2, 8)
BAD_CALLS = {
    "window_size, three": ("window_size", lambda: fa2.flash_attn_func(Q, Q, Q, window_size=(1, 2, 3))),
    "window_size, float": ("window_size", lambda: fa2.flash_attn_func(Q, Q, Q, window_size=torch.ones(2))),
    "window_size, number": ("window_size", lambda: fa2.flash_attn_func(Q, Q, Q, window_size=3)),
    "dropout_p, 1": ("dropout_p", lambda: fa2.flash_attn_func(Q, Q, Q, 1.0)),
    "dropout_p, text": ("dropout_p", lambda: fa2.flash_attn_func(Q, Q, Q, "no", return_attn_probs=True)),
    "softcap, negative": ("softcap", lambda: fa2.flash_attn_func(Q, Q, Q, softcap=-1.0)),
    "causal, number": ("causal", lambda: fa2.flash_attn_func(Q, Q, Q, causal=1)),
    "return_attn_probs": ("return_attn_probs", lambda: fa2.flash_attn_func(Q, Q, Q, return_attn_probs=None)),
    "alibi_slopes": ("alibi_slopes", lambda: fa2.flash_attn_func(Q, Q, Q, alibi_slopes=torch.zeros(3))),
    "k, head_dim": ("k", lambda: fa2.flash_attn_func(Q, Q[..., :4], Q)),
    "kv, rank": ("kv", lambda: fa2.flash_attn_kvpacked_func(Q, Q)),
    "kv, list": ("kv", lambda: fa2.flash_attn_kvpacked_func(Q, [Q, Q])),
    "kv, dtype": ("kv", lambda: fa2.flash_attn_kvpacked_func(Q, KV.double())),
    "qkv, two": ("qkv", lambda: fa2.flash_attn_qkvpacked_func(KV)),
    "qkv, integers": ("qkv", lambda: fa2.flash_attn_varlen_qkvpacked_func(PACKED.int(), CU, 4)),
    "cu_seqlens, int64": ("cu_seqlens", lambda: fa2.flash_attn_varlen_qkvpacked_func(PACKED, CU.long(), 4)),
    "max_seqlen, short": ("max_seqlen", lambda: fa2.flash_attn_varlen_qkvpacked_func(PACKED, CU, 3)),
    "max_seqlen_q, two": (
        "max_seqlen_q",
        lambda: fa2.flash_attn_varlen_func(ROWS, ROWS, ROWS, CU, CU, torch.tensor([4, 4]), 4),
    ),
    "max_seqlen_k, float": (
        "max_seqlen_k",
        lambda: fa2.flash_attn_varlen_func(ROWS, ROWS, ROWS, CU, CU, 4, torch.tensor(4.0)),
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_name_their_argument(case: str) -> None:
    argument, call = BAD_CALLS[case]
    with pytest.raises(InvalidInputError, match=f"^{argument}: ") as caught:
        call()
    assert caught.value.argument == argument


def test_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    qkv = torch.randn(11, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    cu = cumulated((5, 6))
    dense = torch.compile(fa2.flash_attn_func, fullgraph=True, backend="eager")
    packed = torch.compile(fa2.flash_attn_varlen_qkvpacked_func, fullgraph=True, backend="eager")
    leaves = inputs()
    assert_same((dense(*leaves, causal=True),), (fa2.flash_attn_func(*leaves, causal=True),))
    expected = fa2.flash_attn_varlen_qkvpacked_func(qkv, cu, 6, causal=True)
    out = packed(qkv, cu, 6, causal=True)
    assert_same((out,), (expected,))
    dout = torch.randn_like(out)
    assert_same(torch.autograd.grad(out, (qkv,), dout), torch.autograd.grad(expected, (qkv,), dout))
