"""flash-attn 2's functions against a score matrix written out by hand, and against one another."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from torch import Tensor

from flashtile import InvalidInputError, UnsupportedError
from flashtile.compat import flash_attn_2 as fa2

REQUIRED = inspect.Parameter.empty
TAIL = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
SIGNATURES = {
    "flash_attn_func": ("q", "k", "v"),
    "flash_attn_kvpacked_func": ("q", "kv"),
    "flash_attn_qkvpacked_func": ("qkv",),
    "flash_attn_varlen_func": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    "flash_attn_varlen_kvpacked_func": ("q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    "flash_attn_varlen_qkvpacked_func": ("qkv", "cu_seqlens", "max_seqlen"),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(fa2, name)).parameters
    expected = {**dict.fromkeys(SIGNATURES[name], REQUIRED), **TAIL}
    if name == "flash_attn_varlen_func":
        expected["block_table"] = None
    assert [(p.name, p.default) for p in parameters.values()] == list(expected.items())
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_every_function_is_listed() -> None:
    assert sorted(SIGNATURES) == fa2.__all__


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One batch of equal lengths, every score in memory."""
    seqlen_q, seqlen_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(seqlen_k) - (torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(q.dtype).expand(q.shape[0], q.shape[2])
        scores = scores - slopes[:, :, None, None] * distance.abs()
    left, right = window_size
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    empty = hidden.all(dim=-1)[:, None]
    probs = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    return torch.einsum("bhij,bjhd->bihd", probs, v), lse


def inputs(
    seqlen_q: int = 37,
    seqlen_k: int = 37,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    batch: int = 2,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q * 1000 + seqlen_k + head_dim)

    def draw(seqlen: int, num_heads: int) -> Tensor:
        x = torch.randn(batch, seqlen, num_heads, head_dim, generator=generator, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    return draw(seqlen_q, heads[0]), draw(seqlen_k, heads[1]), draw(seqlen_k, heads[1])


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Equal up to float64 rounding over sums of some hundred terms."""
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_errs_no_more_than_twice_pytorch(dtype: torch.dtype) -> None:
    leaves = inputs(seqlen_q=65, seqlen_k=90, dtype=dtype)
    wide = tuple(x.detach().double().requires_grad_() for x in leaves)
    out = fa2.flash_attn_func(*leaves, causal=True)
    plain = by_hand(*leaves, causal=True)[0]
    exact = by_hand(*wide, causal=True)[0]
    dout = torch.randn_like(out)
    pairs = [(out, plain, exact)]
    grads = (torch.autograd.grad(x, xs, dout.to(x.dtype)) for x, xs in ((out, leaves), (plain, leaves), (exact, wide)))
    for ours, torchs, truth in [*pairs, *zip(*grads, strict=True)]:
        assert ours.dtype == dtype
        floor = torch.finfo(dtype).eps * truth.abs().max()
        assert (ours - truth).abs().max() <= 2 * (torchs - truth).abs().max() + floor


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


def cumulated(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


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


def test_what_is_not_supported_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="^return_attn_probs: "):
        fa2.flash_attn_func(Q, Q, Q, 0.1, return_attn_probs=True)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="^block_table: "):
        fa2.flash_attn_varlen_func(ROWS, ROWS, ROWS, CU, CU, 4, 4, block_table=table)


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
