"""FlashAttention-3's functions against a score matrix written out by hand, and against one another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import InvalidInputError, UnsupportedError
from flashtile.compat import flash_attn_3 as fa3
from tests.compat.by_hand import assert_same, by_hand, cumulated, inputs, shown, with_gradients
from tests.rule import assert_close

DESCALES = "q_descale=None, k_descale=None, v_descale=None"
LOCAL = "window_size=(-1, -1), attention_chunk=0, softcap=0.0"
TAIL = (
    f"softmax_scale=None, causal=False, qv=None, {DESCALES}, {LOCAL}, num_splits=1, pack_gqa=None, "
    "deterministic=False, sm_margin=0, return_attn_probs=False"
)
SIGNATURES = {
    "flash_attn_combine": "(out_partial, lse_partial, out=None, out_dtype=None)",
    "flash_attn_func": f"(q, k, v, {TAIL})",
    "flash_attn_qkvpacked_func": (
        f"(qkv, softmax_scale=None, causal=False, {DESCALES}, {LOCAL}, deterministic=False, num_heads_q=None, "
        "sm_margin=0, return_attn_probs=False)"
    ),
    "flash_attn_varlen_func": (
        "(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, "
        + TAIL
        + ")"
    ),
    "flash_attn_with_kvcache": (
        "(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        f"max_seqlen_q=None, rotary_seqlens=None, {DESCALES}, softmax_scale=None, causal=False, {LOCAL}, "
        "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
        "return_softmax_lse=False)"
    ),
    "get_scheduler_metadata": (
        "(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
        "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
        "page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, "
        "num_splits=0, pack_gqa=None, sm_margin=0)"
    ),
}


def test_signatures() -> None:
    assert {name: shown(getattr(fa3, name)) for name in fa3.__all__} == SIGNATURES


CASES: list[dict] = [
    {},
    {"softmax_scale": 0.3, "causal": True},
    {"causal": True, "seqlen_q": 50, "seqlen_k": 20, "deterministic": True},
    {"window_size": torch.tensor([5, 3]), "seqlen_q": 20},
    {"window_size": [9, -1], "softcap": 1.5, "heads": (4, 1)},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case) or "plain")
def test_out_lse_and_gradients(case: dict) -> None:
    shape = {name: case[name] for name in ("seqlen_q", "seqlen_k", "heads") if name in case}
    keywords = {name: value for name, value in case.items() if name not in shape}
    leaves = inputs(**shape)
    meaning = {name: value for name, value in keywords.items() if name != "deterministic"}
    if "window_size" in meaning:
        meaning["window_size"] = tuple(int(bound) for bound in meaning["window_size"])
    out, lse = fa3.flash_attn_func(*leaves, **keywords, return_attn_probs=True)
    expected, expected_lse = by_hand(*leaves, **meaning)
    assert_same((out, lse), (expected, expected_lse))
    pair, expected_pair = (out, lse[..., -9:]), (expected, expected_lse[..., -9:])  # rows that keep some key
    grads = tuple(torch.randn_like(x) for x in pair)
    assert_same(torch.autograd.grad(pair, leaves, grads), torch.autograd.grad(expected_pair, leaves, grads))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_with_wider_values_errs_no_more_than_twice_pytorch(dtype: torch.dtype) -> None:
    q, k, _ = inputs(seqlen_q=65, seqlen_k=90, dtype=dtype)
    leaves = q, k, torch.randn(2, 90, 2, 40).to(dtype).requires_grad_()
    wide = tuple(x.detach().double().requires_grad_() for x in leaves)
    out = fa3.flash_attn_func(*leaves, causal=True)
    assert out.shape == (2, 65, 4, 40)
    dout = torch.randn_like(out)
    got = with_gradients(out, leaves, dout)
    assert {x.dtype for x in got.values()} == {dtype}
    plain = with_gradients(by_hand(*leaves, causal=True)[0], leaves, dout)
    assert_close(got, lambda: with_gradients(by_hand(*wide, causal=True)[0], wide, dout), plain, dtype)


@pytest.mark.parametrize("hints", [{"num_splits": 0}, {"num_splits": 7, "pack_gqa": True}, {"pack_gqa": False}])
def test_how_to_fill_a_gpu_changes_no_bit(hints: dict) -> None:
    leaves = inputs(dtype=torch.float32)
    rows = tuple(x.flatten(0, 1) for x in leaves)
    bounds = cumulated((37, 37))
    assert torch.equal(fa3.flash_attn_func(*leaves, **hints), fa3.flash_attn_func(*leaves))
    packed = (*rows, bounds, bounds, 37, 37)
    assert torch.equal(fa3.flash_attn_varlen_func(*packed, **hints), fa3.flash_attn_varlen_func(*packed))


@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (6, 2)])
def test_packed_tensors_equal_separate_ones(heads: tuple[int, int]) -> None:
    q, k, v = inputs(heads=heads)
    keywords = {"causal": True, "window_size": (9, -1), "softmax_scale": 0.2, "return_attn_probs": True}
    expected = fa3.flash_attn_func(q, k, v, **keywords)
    dout = torch.randn_like(expected[0])
    dq, dk, dv = torch.autograd.grad(expected[0], (q, k, v), dout)
    flat = torch.cat([q, k, v], dim=2).detach().requires_grad_()
    found = fa3.flash_attn_qkvpacked_func(flat, **keywords, num_heads_q=heads[0])
    assert_same(found, expected)
    assert_same(torch.autograd.grad(found[0], (flat,), dout), (torch.cat([dq, dk, dv], dim=2),))
    if heads == (2, 2):
        stacked = torch.stack([q, k, v], dim=2).detach().requires_grad_()
        found = fa3.flash_attn_qkvpacked_func(stacked, **keywords)
        assert_same(found, expected)
        assert_same(torch.autograd.grad(found[0], (stacked,), dout), (torch.stack([dq, dk, dv], dim=2),))
        assert_same(fa3.flash_attn_qkvpacked_func(stacked, **keywords, num_heads_q=2), expected)


# Some rows of a sequence, none, all, and of an empty one; then three rows and two keys of no sequence.
LENGTHS_Q, USED_Q = (7, 5, 9, 0, 4), (5, 0, 9, 0, 3)
LENGTHS_K, USED_K = (6, 8, 9, 2, 3), (4, 8, 2, 0, 0)


def parts(x: Tensor, lengths: tuple[int, ...], used: tuple[int, ...]) -> list[Tensor]:
    """The used rows of each sequence."""
    starts = cumulated(lengths).tolist()
    return [x[start : start + n] for start, n in zip(starts, used, strict=False)]


@pytest.mark.parametrize("used", ["q", "k", "qk"])
def test_used_lengths_equal_shorter_sequences(used: str) -> None:
    generator = torch.Generator().manual_seed(6)
    q, k, v = (
        torch.randn(rows, heads, 8, generator=generator, dtype=torch.float64)
        for rows, heads in ((sum(LENGTHS_Q) + 3, 4), (sum(LENGTHS_K) + 2, 2), (sum(LENGTHS_K) + 2, 2))
    )
    used_q, used_k = USED_Q if "q" in used else LENGTHS_Q, USED_K if "k" in used else LENGTHS_K
    takes_part = []
    for x, lengths, counts in ((q, LENGTHS_Q, used_q), (k, LENGTHS_K, used_k), (v, LENGTHS_K, used_k)):
        rows = torch.cat(parts(torch.arange(x.shape[0]), lengths, counts))
        idle = torch.ones(x.shape[0], dtype=torch.bool).index_fill(0, rows, False)
        x[idle] = torch.nan
        x.requires_grad_()
        takes_part.append(~idle)
    keywords = {
        "seqused_q": torch.tensor(USED_Q, dtype=torch.int32) if "q" in used else None,
        "seqused_k": torch.tensor(USED_K, dtype=torch.int32) if "k" in used else None,
        "causal": True,
        "window_size": (4, -1),
        "return_attn_probs": True,
    }
    call = (q, k, v, cumulated(LENGTHS_Q), cumulated(LENGTHS_K), torch.tensor(9), 9)
    out, lse = fa3.flash_attn_varlen_func(*call, **keywords)
    alone = zip(parts(q, LENGTHS_Q, used_q), parts(k, LENGTHS_K, used_k), parts(v, LENGTHS_K, used_k), strict=True)
    meaning = {"causal": True, "window_size": (4, -1)}
    pairs = [by_hand(a[None], b[None], c[None], **meaning) for a, b, c in alone if a.shape[0] and b.shape[0]]
    some_keys = torch.cat([torch.full((n,), m > 0) for n, m in zip(used_q, used_k, strict=True)])
    has_keys = takes_part[0].clone()
    has_keys[takes_part[0]] = some_keys
    assert_same(
        (out[has_keys], lse[:, has_keys]),
        tuple(torch.cat(x, dim=d) for x, d in ((([p[0][0] for p in pairs]), 0), (([p[1][0] for p in pairs]), 1))),
    )
    assert torch.equal(out[~has_keys], torch.zeros_like(out[~has_keys]))
    assert (lse[:, ~has_keys] == -torch.inf).all()
    assert torch.equal(out, fa3.flash_attn_varlen_func(*call, **{**keywords, "return_attn_probs": False}))

    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    expected = torch.autograd.grad(torch.cat([p[0][0] for p in pairs]), (q, k, v), dout[has_keys])
    for grad, truth, valid in zip(grads, expected, takes_part, strict=True):
        torch.testing.assert_close(grad[valid], truth[valid], rtol=1e-10, atol=1e-11)
        assert torch.equal(grad[~valid], torch.zeros_like(grad[~valid]))


def test_used_lengths_compile_to_one_graph() -> None:
    torch._dynamo.reset()
    q, k, v = (torch.randn(11, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    call = (q, k, v, cumulated((5, 6)), cumulated((5, 6)), 6, 6, torch.tensor([2, 6]), torch.tensor([5, 4]))
    compiled = torch.compile(fa3.flash_attn_varlen_func, fullgraph=True, backend="eager")
    assert_same((compiled(*call),), (fa3.flash_attn_varlen_func(*call),))


def splits(count: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """q, k, v and attention to each ``count``-th part of the keys; the last part is empty and holds NaN."""
    q, k, v = inputs(seqlen_q=9, seqlen_k=40, heads=(2, 2))
    states = [
        flashtile.attention(q, part_k, part_v, return_lse=True)
        for part_k, part_v in zip(k.chunk(count, dim=1), v.chunk(count, dim=1), strict=True)
    ]
    nothing = torch.full_like(states[0][0], torch.nan), torch.full_like(states[0][1], -torch.inf)
    out_partial, lse_partial = (torch.stack(x) for x in zip(*states, nothing, strict=True))
    return (q, k, v), out_partial, lse_partial.transpose(-1, -2)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_combined_splits_are_attention_to_all_keys(count: int) -> None:
    leaves, out_partial, lse_partial = splits(count)
    out, lse = fa3.flash_attn_combine(out_partial, lse_partial)
    expected, expected_lse = by_hand(*leaves)
    assert_same((out, lse), (expected, expected_lse.transpose(1, 2)))
    grads = torch.randn_like(out), torch.randn_like(lse)
    expected_pair = expected, expected_lse.transpose(1, 2)
    assert_same(torch.autograd.grad((out, lse), leaves, grads), torch.autograd.grad(expected_pair, leaves, grads))


@pytest.mark.parametrize("score", [torch.finfo(torch.float32).min, -1e9, 1e9])
def test_combined_splits_of_huge_rows_count_alike(score: float) -> None:
    values = torch.tensor([1.0, 2.0, 6.0])[:, None, None, None, None].expand(3, 1, 2, 3, 4)
    lse_partial = torch.full((3, 1, 2, 3), score, requires_grad=True)
    out, lse = fa3.flash_attn_combine(values, lse_partial)
    torch.testing.assert_close((out, lse), (torch.full_like(out, 3.0), torch.full_like(lse, score)))
    (grad,) = torch.autograd.grad(out.sum() + lse.sum(), lse_partial)
    torch.testing.assert_close(grad, ((values - 3).sum(-1) + 1) / 3)


def test_combine_writes_dtypes_and_targets() -> None:
    _, out_partial, lse_partial = splits(4)
    out_partial, lse_partial = out_partial.detach(), lse_partial.detach()
    exact, _ = fa3.flash_attn_combine(out_partial, lse_partial)
    low, lse = fa3.flash_attn_combine(out_partial.bfloat16(), lse_partial.float())
    assert low.dtype == torch.bfloat16 and lse.dtype == torch.float32
    # Each part rounded to 8 bits, their mean with weights that sum to 1, and one more rounding.
    torch.testing.assert_close(low.double(), exact, rtol=2**-7, atol=2**-8)
    half, _ = fa3.flash_attn_combine(out_partial.float(), lse_partial.float(), out_dtype=torch.float16)
    target = torch.empty_like(half).transpose(1, 2).contiguous().transpose(1, 2)
    found, _ = fa3.flash_attn_combine(out_partial.float(), lse_partial.float(), target)
    assert found is target and torch.equal(target, half)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.double(), exact, rtol=2**-10, atol=2**-12)
    nothing, none = fa3.flash_attn_combine(out_partial[:0], lse_partial[:0])
    assert torch.equal(nothing, torch.zeros_like(exact)) and (none == -torch.inf).all()


Q, QKV = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 3, 2, 8)
ROWS, CU = torch.zeros(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
SPLITS, LSES = torch.zeros(3, 1, 4, 2, 8), torch.zeros(3, 1, 4, 2)


def varlen(**changed: object) -> object:
    call = {"q": ROWS, "k": ROWS, "v": ROWS, "cu_seqlens_q": CU, "cu_seqlens_k": CU}
    return fa3.flash_attn_varlen_func(**{**call, "max_seqlen_q": 4, "max_seqlen_k": 4, **changed})


BAD_CALLS = {
    "softcap": ("softcap", lambda: fa3.flash_attn_func(Q, Q, Q, softcap=-1.0)),
    "float8": ("q", lambda: fa3.flash_attn_func(*[Q.to(torch.float8_e4m3fn)] * 3)),
    "probs": ("return_attn_probs", lambda: fa3.flash_attn_func(Q, Q, Q, return_attn_probs=1)),
    "splits": ("num_splits", lambda: fa3.flash_attn_func(Q, Q, Q, num_splits="auto")),
    "pack_gqa": ("pack_gqa", lambda: fa3.flash_attn_func(Q, Q, Q, pack_gqa=1)),
    "chunk, None": ("attention_chunk", lambda: fa3.flash_attn_func(Q, Q, Q, attention_chunk=None)),
    "margin, bool": ("sm_margin", lambda: fa3.flash_attn_func(Q, Q, Q, sm_margin=True)),
    "qkv, list": ("qkv", lambda: fa3.flash_attn_qkvpacked_func([Q, Q, Q])),
    "qkv, two": ("qkv", lambda: fa3.flash_attn_qkvpacked_func(QKV[:, :, :2])),
    "qkv, integers": ("qkv", lambda: fa3.flash_attn_qkvpacked_func(QKV.int())),
    "heads, none": ("num_heads_q", lambda: fa3.flash_attn_qkvpacked_func(Q)),
    "heads, all": ("num_heads_q", lambda: fa3.flash_attn_qkvpacked_func(Q, num_heads_q=2)),
    "heads, odd": ("num_heads_q", lambda: fa3.flash_attn_qkvpacked_func(Q, num_heads_q=1)),
    "heads, other": ("num_heads_q", lambda: fa3.flash_attn_qkvpacked_func(QKV, num_heads_q=4)),
    "used, too many": ("seqused_k", lambda: varlen(seqused_k=torch.tensor([5]))),
    "used, negative": ("seqused_q", lambda: varlen(seqused_q=torch.tensor([-1]))),
    "used, two": ("seqused_q", lambda: varlen(seqused_q=torch.tensor([1, 2]))),
    "used, float": ("seqused_k", lambda: varlen(seqused_k=torch.tensor([1.0]))),
    "used, list": ("seqused_k", lambda: varlen(seqused_k=[1])),
    "used, far": ("cu_seqlens_k", lambda: varlen(seqused_k=torch.tensor([2]), cu_seqlens_k=CU + CU)),
    "used, late": ("cu_seqlens_q", lambda: varlen(seqused_q=torch.tensor([2]), cu_seqlens_q=CU.flip(0) + 1)),
    "used, int64 bounds": ("cu_seqlens_q", lambda: varlen(seqused_q=torch.tensor([2]), cu_seqlens_q=CU.long())),
    "used, elsewhere": ("seqused_q", lambda: varlen(seqused_q=torch.tensor([2], device="meta"))),
    "used, rank": ("cu_seqlens_q", lambda: varlen(seqused_q=torch.tensor([2]), cu_seqlens_q=CU[None])),
    "used, no bounds": ("cu_seqlens_k", lambda: varlen(seqused_k=torch.tensor([2]), cu_seqlens_k=None)),
    "used, v": ("v", lambda: varlen(seqused_k=torch.tensor([2]), v=ROWS[:3])),
    "lse": ("lse_partial", lambda: fa3.flash_attn_combine(SPLITS, LSES.transpose(2, 3))),
    "out_partial, rank": ("out_partial", lambda: fa3.flash_attn_combine(SPLITS[0], LSES[0])),
    "out_partial, integers": ("out_partial", lambda: fa3.flash_attn_combine(SPLITS.int(), LSES)),
    "out, shape": ("out", lambda: fa3.flash_attn_combine(SPLITS, LSES, SPLITS)),
    "out, dtype": ("out", lambda: fa3.flash_attn_combine(SPLITS, LSES, Q, torch.float16)),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_name_their_argument(case: str) -> None:
    argument, call = BAD_CALLS[case]
    with pytest.raises(InvalidInputError, match=f"^{argument}: ") as caught:
        call()
    assert caught.value.argument == argument


def test_chunks_are_those_of_attention() -> None:
    q = torch.randn(2, 19, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 23, 2, 8, dtype=torch.float64, requires_grad=True) for _ in "kv")
    p, j = torch.arange(19)[:, None] + 4, torch.arange(23)
    for causal in (False, True):
        keep = (p // 6 == j // 6) & ((j <= p) | (not causal))
        want = flashtile.attention(q, k, v, attn_mask=keep)
        got = fa3.flash_attn_func(q, k, v, causal=causal, attention_chunk=6)
        torch.testing.assert_close(got, want)
        grads = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got, want))
        for mine, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(mine, theirs)
        cached = fa3.flash_attn_with_kvcache(q.detach(), k.detach(), v.detach(), causal=causal, attention_chunk=6)
        torch.testing.assert_close(cached, want.detach())
        bounds = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (19, 23)]
        packed = fa3.flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q, k, v)), *bounds, 19, 23, causal=causal, attention_chunk=6
        )
        torch.testing.assert_close(packed.view_as(want), want)
    assert torch.equal(fa3.flash_attn_func(q, k, v, attention_chunk=-1), fa3.flash_attn_func(q, k, v))


@pytest.mark.parametrize("causal", [False, True])
def test_qv_is_a_second_product(causal: bool) -> None:
    """Of queries with the values: as if queries and keys were wider, dense, packed and over a cache."""
    make = torch.Generator().manual_seed(3)
    q, qv = (torch.randn(2, 5, 4, dim, generator=make) for dim in (8, 24))
    k, v = (torch.randn(2, 23, 2, dim, generator=make) for dim in (8, 24))
    options = {"causal": causal, "window_size": (11, -1), "softcap": 4.0}
    want, lse = flashtile.attention(
        torch.cat([qv, q], dim=-1), torch.cat([v, k], dim=-1), v, return_lse=True, **options
    )
    found = fa3.flash_attn_func(q, k, v, qv=qv, return_attn_probs=True, **options)
    torch.testing.assert_close(found, (want, lse))
    cached = fa3.flash_attn_with_kvcache(q, k, v, qv=qv, cache_seqlens=23, return_softmax_lse=True, **options)
    torch.testing.assert_close(cached[:2], (want, lse))
    bounds = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 23)]
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    packed = fa3.flash_attn_varlen_func(*flat, *bounds, 5, 23, qv=qv.flatten(0, 1), **options)
    torch.testing.assert_close(packed.view_as(want), want)
    used = torch.tensor([3, 5], dtype=torch.int32)
    packed = fa3.flash_attn_varlen_func(*flat, *bounds, 5, 23, used, qv=qv.flatten(0, 1), **options)
    alone = fa3.flash_attn_func(q[:1, :3], k[:1], v[:1], qv=qv[:1, :3], **options)
    torch.testing.assert_close(packed.view_as(want)[:1, :3], alone)
    torch.testing.assert_close(packed.view_as(want)[1], want[1])
    with pytest.raises(UnsupportedError, match="^qv: "):
        fa3.flash_attn_func(q.requires_grad_(), k, v, qv=qv).sum().backward()
    with pytest.raises(UnsupportedError, match="^k_descale: "):
        fa3.flash_attn_func(q, k, v, qv=qv, k_descale=torch.ones(2, 2))


@pytest.mark.parametrize("scaled", [(), (0, 1, 2), (1,)])
def test_float8_is_widened_in_chunks_and_over_caches(scaled: tuple[int, ...]) -> None:
    """Against float64 of the numbers that 8 bits and descales mean, to the rounding of q and out in bfloat16."""
    make = torch.Generator().manual_seed(5)
    shapes = (2, 5, 4, 16), (2, 23, 2, 16), (2, 23, 2, 16)
    low = [torch.randn(shape, generator=make).to(torch.float8_e4m3fn) for shape in shapes]
    descales = [0.5 + torch.rand(2, 2, generator=make) if n in scaled else None for n in range(3)]
    exact = [
        x.double() if f is None else x.double() * f.double().repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None]
        for x, f in zip(low, descales, strict=True)
    ]
    options = {"causal": True, "attention_chunk": 7, "softcap": 4.0}
    want, lse = flashtile.attention(*exact, return_lse=True, **options)
    words = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True)) | options

    def assert_near(found: tuple[Tensor, ...]) -> None:
        assert found[0].dtype == torch.bfloat16
        torch.testing.assert_close(found[0].double().view_as(want), want, rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(
            found[1].double().reshape(-1).sort()[0], lse.reshape(-1).sort()[0], rtol=0, atol=2**-6
        )

    assert_near(fa3.flash_attn_func(*low, return_attn_probs=True, **words))
    bounds = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 23)]
    flat = [x.flatten(0, 1) for x in low]
    assert_near(fa3.flash_attn_varlen_func(*flat, *bounds, 5, 23, return_attn_probs=True, **words))
    # The last 5 keys are new, and written as they are.
    q, k, v = low
    caches = [torch.zeros(2, 32, 2, 16).to(torch.float8_e4m3fn) for _ in "kv"]
    for cache, x in zip(caches, (k, v), strict=True):
        cache[:, :18] = x[:, :18]
    new = k[:, 18:], v[:, 18:]
    places = {"cache_seqlens": torch.tensor([18, 18], dtype=torch.int32), "return_softmax_lse": True}
    assert_near(fa3.flash_attn_with_kvcache(q, *caches, *new, **places, **words)[:2])
    for cache, x in zip(caches, (k, v), strict=True):
        assert torch.equal(cache[:, :23].float(), x.float())
    packed = {"cu_seqlens_q": bounds[0], "max_seqlen_q": 5, "cache_seqlens": places["cache_seqlens"] + 5}
    assert_near(fa3.flash_attn_with_kvcache(flat[0], *caches, **places | packed, **words)[:2])


def test_float8_needs_all_of_its_tensors() -> None:
    q = Q.to(torch.float8_e4m3fn)
    with pytest.raises(InvalidInputError, match="^k: dtype"):
        fa3.flash_attn_func(q, Q, q, attention_chunk=2)
    with pytest.raises(InvalidInputError, match="^v_cache: dtype"):
        fa3.flash_attn_with_kvcache(q, q, Q, cache_seqlens=4)
    with pytest.raises(InvalidInputError, match="^k: "):
        fa3.flash_attn_func(q, q[0, 0, 0], q, attention_chunk=2)
    with pytest.raises(InvalidInputError, match="^k_descale: is"):
        fa3.flash_attn_with_kvcache(q, q, q, cache_seqlens=4, k_descale=torch.ones(1, 3))
    with pytest.raises(UnsupportedError, match="^qv: "):
        fa3.flash_attn_with_kvcache(q, q, q, cache_seqlens=4, qv=q)


@pytest.mark.parametrize("chunk", [0, 2])
def test_float8_that_requires_grad_has_none(chunk: int) -> None:
    q = torch.zeros(1, 4, 2, 16).to(torch.float8_e4m3fn).requires_grad_()
    out = fa3.flash_attn_func(q, q, q, attention_chunk=chunk)
    with pytest.raises(UnsupportedError, match="^q: attention of 8 bits has no gradient"):
        out.sum().backward()


def test_what_is_not_supported_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="^sm_margin: "):
        fa3.flash_attn_func(Q, Q, Q, sm_margin=3)
    with pytest.raises(UnsupportedError, match="^sm_margin: "):
        varlen(sm_margin=3)
    with pytest.raises(UnsupportedError, match="^sm_margin: "):
        fa3.flash_attn_qkvpacked_func(QKV, sm_margin=3)
