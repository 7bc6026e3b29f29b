"""``return_max_scores``: what public functions return and refuse, transforms, compiled calls, modules. Numbers of every
backend are judged where its case table is, with ``tests.maxima``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jvp, vmap

import flashtile
from flashtile import InvalidInputError, UnsupportedError, reference
from flashtile.call.arguments import Options
from flashtile.ops import operators as ops
from tests.backends.hopper.emulated import on_cpu
from tests.cases import CASES, build
from tests.kvcache.cases import CASES as CACHED
from tests.kvcache.cases import build as build_cached
from tests.maxima import judge_cached_maxima

BOUNDS = torch.tensor([0, 20, 20, 37], dtype=torch.int32)
BOTH: dict[str, Any] = {"return_lse": True, "return_max_scores": True}


def qkv(*batch: int, rows: int = 37, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(*batch, rows, heads, 16, generator=make).to(dtype) for heads in (4, 2, 2))
    return q, k, v


def by_hand(q: Tensor, k: Tensor, scale: float = 0.25) -> Tensor:
    """The largest scores of a causal call."""
    scores = scale * torch.einsum("...ihd,...jhd->...hij", q, k.repeat_interleave(2, -2))
    return scores.masked_fill(~torch.ones(scores.shape[-2:]).bool().tril(), -torch.inf).amax(-1)


def same(x: Any, y: Any) -> None:
    torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def test_the_order_of_results() -> None:
    q, k, v = qkv(2)
    packed = [x[0] for x in (q, k, v)]
    cache = {"cache_seqlens": torch.tensor([37, 30], dtype=torch.int32)}
    for call, rows in (
        (lambda **kw: flashtile.attention(q, k, v, causal=True, **kw), (2, 4, 37)),
        (lambda **kw: flashtile.attention_varlen(*packed, BOUNDS, BOUNDS, causal=True, **kw), (4, 37)),
        (lambda **kw: flashtile.attention_with_kvcache(q[:, :3], k, v, **cache, **kw), (2, 4, 3)),
    ):
        run: Callable[..., Any] = call
        out, (out_, lse) = run(), run(return_lse=True)
        pair, three = run(return_max_scores=True), run(**BOTH)
        assert len(pair) == 2 and len(three) == 3
        same((*pair, *three), (out, three[2], out_, lse, three[2]))
        assert three[2].shape == rows and three[2].dtype == torch.float32 and three[2].is_contiguous()
        assert not isinstance(run(return_max_scores=False), tuple)  # nor after calls that returned them


def test_the_largest_score_of_a_row() -> None:
    q, k, v = qkv(2)
    torch.testing.assert_close(flashtile.attention(q, k, v, causal=True, return_max_scores=True)[1], by_hand(q, k))
    scale = {"softmax_scale": -0.5}
    got = flashtile.attention(q, k, v, causal=True, return_max_scores=True, **scale)[1]
    torch.testing.assert_close(got, by_hand(q, k, -0.5))


def test_sinks_do_not_count() -> None:
    q, k, v = qkv(2)
    _, lse, found = flashtile.attention(q, k, v, sinks=torch.full((4,), 50.0), causal=True, **BOTH)
    assert (lse > 49).all()
    torch.testing.assert_close(found, by_hand(q, k))


@pytest.mark.parametrize("backend", ["cpu", "hopper"])
def test_rows_that_keep_nothing_and_scores_that_are_no_numbers(backend: str) -> None:
    """-inf for the former, NaN for rows that keep the latter, whatever the sink is."""
    q, k, v = (torch.randn(1, 80, 1, 64).bfloat16() for _ in range(3))
    k[0, 60] = torch.nan
    k[0, 70] = torch.inf
    mask = torch.ones(80, 80, dtype=torch.bool)
    mask[:, 60], mask[:, 70], mask[5] = False, False, False
    mask[6, 60] = mask[7, 70] = True
    q[0, 7].abs_()  # plus infinity
    q[0, 8].abs_().neg_()  # minus infinity, beside others
    mask[8, 70] = True
    with on_cpu(1) if backend == "hopper" else torch.no_grad():
        given: dict[str, Any] = {"attn_mask": mask, "sinks": torch.ones(1), "backend": backend}
        found = flashtile.attention(q, k, v, **given, return_max_scores=True)[1][0, 0]
    want = reference.with_max_scores(*_problem(q, k, v, attn_mask=mask, sinks=torch.ones(1)))[2][0, 0]
    assert found[5] == -torch.inf and found[6:8].isnan().all()
    assert torch.equal(found.isnan(), want.isnan()) and found.isnan().sum() == 2
    torch.testing.assert_close(found, want.float(), equal_nan=True)


def _problem(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
    from flashtile.call.problem import Problem, Tensors

    tensors = Tensors(q, k, v, **given)
    return Problem.of(tensors, Options()), tensors


def test_packed_rows_past_the_last_bound() -> None:
    q, k, v = (torch.cat([x, x[:5]]) for x in qkv())
    _, found = flashtile.attention_varlen(q, k, v, BOUNDS, BOUNDS, return_max_scores=True)
    assert (found[:, 37:] == -torch.inf).all() and found[:, :37].isfinite().all()


@pytest.mark.parametrize("backend", ["cpu", "hopper"])
def test_out_is_written_where_it_is_given(backend: str) -> None:
    q, k, v = (torch.randn(37, 2, 64).bfloat16() for _ in range(3))
    out = torch.full_like(q, torch.nan)
    with on_cpu(1) if backend == "hopper" else torch.no_grad():
        given = (q, k, v, BOUNDS, BOUNDS)
        want = flashtile.attention_varlen(*given, backend=backend, **BOTH)
        got = flashtile.attention_varlen(*given, backend=backend, out=out, **BOTH)
    assert got[0] is out
    same(got, want)


def test_no_keys_at_all() -> None:
    q, k, v = (torch.randn(1, n, 2, 64).bfloat16() for n in (5, 0, 0))
    for bias in ({}, {"attn_bias": torch.zeros(5, 1)[:, :0]}):
        with on_cpu(1):
            out, lse, found = flashtile.attention(q, k, v, backend="hopper", sinks=torch.ones(2), **bias, **BOTH)
        assert not out.any() and (lse == 1).all() and (found == -torch.inf).all() and found.shape == lse.shape


@pytest.mark.parametrize("case", CACHED[::7], ids=str)
def test_cached_calls_on_the_cpu(case: Any) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        if case.float8 != "rows":
            judge_cached_maxima(build_cached(case, dtype), build_cached(case, dtype), "cpu")


@pytest.mark.long
@pytest.mark.parametrize("case", CACHED, ids=str)
def test_all_cached_calls_on_the_cpu(case: Any) -> None:
    judge_cached_maxima(build_cached(case, torch.float16), build_cached(case, torch.float16), "cpu")


def test_there_is_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(2))
    out, lse, found = flashtile.attention(q, k, v, causal=True, **BOTH)
    assert lse.requires_grad and not found.requires_grad
    alone = flashtile.attention(q, k, v, causal=True, return_lse=True)
    for x, y in ((out, alone[0]), (lse, alone[1])):
        same(*(torch.autograd.grad(each.square().sum(), (q, k, v), retain_graph=True, allow_unused=True)
               for each in (x, y)))  # fmt: skip
    first = torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]
    want = torch.autograd.grad(alone[0].square().sum(), q, create_graph=True)[0]
    same(*(torch.autograd.grad(each.sin().sum(), (q, k, v)) for each in (first, want)))


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a bias, so lse has parts": {"attn_bias": torch.linspace(-3, 3, 4 * 37 * 37).view(4, 37, 37)},
    "sinks, so samples run one by one": {"sinks": torch.ones(4)},
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_transforms(features: dict[str, Any]) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = flashtile.attention(q, k, v, causal=True, **features, **BOTH)
        return found

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse, _ = call(q, k, v)
        return out.square().sum() + lse.sum()

    samples = tuple(torch.stack([x, x.flip(1) * 1.5]) for x in qkv(2))
    mapped, each = vmap(call)(*samples), [call(*(x[n] for x in samples)) for n in range(2)]
    torch.testing.assert_close(mapped, tuple(map(torch.stack, zip(*each, strict=True))))
    got = vmap(grad(loss, argnums=(0, 1, 2)))(*samples)
    want = [grad(loss, argnums=(0, 1, 2))(*(x[n] for x in samples)) for n in range(2)]
    torch.testing.assert_close(got, tuple(map(torch.stack, zip(*want, strict=True))))
    primals, tangents = [[x[n] for x in samples] for n in range(2)]
    values, along = jvp(call, tuple(primals), tuple(tangents))
    alone = jvp(lambda *x: call(*x)[:2], tuple(primals), tuple(tangents))
    torch.testing.assert_close((*values, *along[:2]), (*each[0], *alone[1]))
    assert not along[2].any()


@pytest.mark.long
@pytest.mark.parametrize("features", list(FEATURES.values())[:2], ids=list(FEATURES)[:2])
def test_compiled_calls(features: dict[str, Any]) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(2))
    packed = [x.detach()[0] for x in (q, k, v)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, found = flashtile.attention(q * 2, k, v, causal=True, **features, **BOTH)
        return out + 1, lse, found * 3

    compiled = torch.compile(call, fullgraph=True)
    got, want = compiled(q, k, v), call(q, k, v)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(x[0].square().sum() + x[1].sum(), (q, k, v)) for x in (got, want)))

    def others(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> tuple[Tensor, ...]:
        first = flashtile.attention_varlen(q, k, v, bounds, bounds, **BOTH)
        second = flashtile.attention_with_kvcache(q[None, :3], k[None], v[None], cache_seqlens=30, **BOTH)
        return *first, *second

    same(torch.compile(others, fullgraph=True)(*packed, BOUNDS), others(*packed, BOUNDS))


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("causal", "bias_heads", "varlen_spare")], ids=str)
def test_operators_and_their_fakes(case: Any) -> None:
    call = build(case, torch.float32)
    longest = {"max_seqlen_q": call.problem.seqlen_q, "max_seqlen_k": call.problem.seqlen_k}
    options = Options(
        window_right=0 if case.causal else None, return_max_scores=True, **(longest if case.lengths else {})
    )
    torch.library.opcheck(ops.FORWARD.overload, ops.REGULAR.flatten(call.tensors, options))
    out, lse = ops.FORWARD.overload(*ops.REGULAR.flatten(call.tensors, options))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = ops.FORWARD.overload(*ops.REGULAR.flatten(call.tensors, options))
    for real, fake in zip((out, lse), fakes, strict=True):
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


def test_meta_tensors() -> None:
    q = torch.empty(2, 37, 4, 16, device="meta")
    out, lse, found = flashtile.attention(q, q, q, **BOTH)
    assert out.shape == q.shape and lse.shape == found.shape == (2, 4, 37) and found.dtype == torch.float32


def test_what_is_refused() -> None:
    q, k, v = qkv(2)
    cache = {"cache_seqlens": 5}
    wrong: Any = 1
    for run in (
        lambda: flashtile.attention(q, k, v, return_max_scores=wrong),
        lambda: flashtile.attention_with_kvcache(q, k, v, **cache, return_max_scores=wrong),
    ):
        with pytest.raises(InvalidInputError, match="return_max_scores: is 1, must be a Python bool"):
            run()
    half = [x.bfloat16() for x in (q, k, v)]
    for given, keywords in ((half, {"precision": "fp8"}), ([flashtile.quantize(*half)], {})):
        with pytest.raises(InvalidInputError, match="return_max_scores: is True, but does not go with 8 bits"):
            flashtile.attention(*given, **keywords, return_max_scores=True)


def test_explain_and_capabilities_know_of_it() -> None:
    q, k, v = qkv(2)
    text = flashtile.explain(q, k, v, return_max_scores=True)
    assert "largest scores (return_max_scores)" in text.splitlines()[0]
    cached = flashtile.explain(q, k_cache=k, v_cache=v, cache_seqlens=3, return_max_scores=True)
    assert "largest scores (return_max_scores)" in cached.splitlines()[0]
    assert "largest scores (return_max_scores)" in flashtile.support_table()


def test_a_module_returns_the_largest_score_of_each_head() -> None:
    torch.manual_seed(0)
    module = flashtile.nn.MultiheadAttention(32, 4, num_kv_heads=2, causal=True)
    x = torch.randn(3, 9, 32)
    out, found = module(x, return_max_scores=True)
    same(out, module(x))
    q, k = module.q_proj(x).unflatten(-1, (4, 8)), module.k_proj(x).unflatten(-1, (2, 8))
    torch.testing.assert_close(found, by_hand(q, k, 8**-0.5).amax((0, 2)).detach())
    assert found.shape == (4,) and not found.requires_grad
    bounds = torch.tensor([0, 9, 18, 27], dtype=torch.int32)
    packed, again = module(x.flatten(0, 1), cu_seqlens=bounds, return_max_scores=True)
    torch.testing.assert_close((packed, again), (out.flatten(0, 1), found))
    empty = module(x[:0], return_max_scores=True)[1]
    assert empty.shape == (4,) and (empty == -torch.inf).all()
    compiled = torch.compile(lambda x: module(x, return_max_scores=True), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), (out, found))
    other = flashtile.nn.MultiheadAttention(32, 4, batch_first=False)
    turned = other(x, x, x, return_max_scores=True)
    assert turned[1].shape == (4,) and turned[0].shape == x.shape
    with pytest.raises(InvalidInputError, match="return_max_scores"):
        module(x, return_max_scores=None)


def test_a_backend_that_lacks_it_would_say_so() -> None:
    problem, _ = _problem(*qkv(2))
    problem = problem.but(max_scores=True)
    for name in flashtile.backends():
        able = flashtile.ops.dispatch.backend(name).capabilities("quantized")
        assert able is not None and any("return_max_scores" in each for each in able.reasons(problem))
    with pytest.raises(UnsupportedError):
        flashtile.attention(*(x.half() for x in qkv(2)), backend="hopper", return_max_scores=True)
