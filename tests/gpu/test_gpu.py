"""On a GPU (``pytest -m gpu``): the case table at real sizes, and what only a device can show."""

from __future__ import annotations

import dataclasses
import gc
import importlib
from typing import Any

import pytest
import torch

import flashtile
from flashtile.backends.gpu import host
from flashtile.backends.portable.backward import launch
from flashtile.call.arguments import band_of
from flashtile.call.problem import Tensors
from flashtile.ops import dispatch, plans
from tests.cases import CASES, Case, build, judge, one_sign
from tests.maxima import judge_maxima
from tests.poison import poisoned_memory
from tests.problems import banded_problem
from tests.test_second import SCORES, scores

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BACKENDS = [name for name in flashtile.backends() if name != "cpu"]
SHORT = (torch.float16, torch.bfloat16)
DTYPES = (*SHORT, torch.float32)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_second_derivatives(backend: str | None) -> None:
    """Of gradients on the GPU, beside those in float64 on the CPU."""

    def second(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        make = torch.Generator().manual_seed(0)
        shapes = [(2, 300, 4, 64), (2, 350, 2, 64), (2, 350, 2, 64)]
        given = [torch.randn(shape, generator=make).half().to(device, dtype) for shape in (*shapes, *shapes)]
        leaves = [x.requires_grad_() for x in given[:3]]
        chosen = backend if device == "cuda" else None
        out = flashtile.attention(*leaves, causal=True, softcap=3.0, backend=chosen)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return [x.cpu().double() for x in torch.autograd.grad(first, leaves, given[3:])]

    for found, wanted in zip(second("cuda", torch.float16), second("cpu", torch.float64), strict=True):
        assert (found - wanted).abs().max() <= 2e-2 * wanted.abs().max()


@pytest.mark.parametrize("name", SCORES)
def test_second_derivatives_with_functions_of_scores(name: str) -> None:
    """In float32, since a score is rounded otherwise by the steps of its function; beside a mask of a function."""
    make = torch.Generator().manual_seed(0)
    table = torch.randn(2, 150, generator=make)
    inputs = [torch.randn(1, n, heads, 32, generator=make) for n, heads in ((100, 2), (150, 1), (150, 1)) * 2]

    def second(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v, *of = (x.to(device, dtype) for x in inputs)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        functions: Any = {
            "score_mod": scores(table.to(device))[name],
            "mask_mod": lambda b, h, q, kv: (q + kv) % 3 != h,
        }
        out = flashtile.attention(*leaves, **functions)
        first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        return [x.cpu().double() for x in torch.autograd.grad(first, leaves, of)]

    for found, wanted in zip(second("cuda", torch.float32), second("cpu", torch.float64), strict=True):
        assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max()


def test_a_hessian_times_a_vector() -> None:
    """``hvp`` differentiates a second derivative by its directions."""
    q, w = (torch.randn(1, 200, 2, 64, device="cuda") for _ in range(2))
    loss = lambda q: flashtile.attention(q, q, q, causal=True).sin().sum()  # noqa: E731
    found, want = (product(loss, q, w)[1] for product in (torch.autograd.functional.hvp, torch.autograd.functional.vhp))
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)


# A tile with a NaN in it is computed again in another order.
ROUNDING = {"rtol": 2e-2, "atol": 2e-2}


def _id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


LARGE = (
    Case("large", seqlen_q=1024, seqlen_k=1024, heads=4, kv_heads=4, head_dim=128),
    Case("large_causal", seqlen_q=2048, seqlen_k=2048, heads=4, kv_heads=4, head_dim=64, causal=True),
    Case("large_causal_128", seqlen_q=1536, seqlen_k=1536, heads=4, kv_heads=2, head_dim=128, causal=True),
    Case("large_256", seqlen_q=777, seqlen_k=1000, heads=2, kv_heads=2, head_dim=256, causal=True),
    Case("large_odd", seqlen_q=1021, seqlen_k=997, heads=4, kv_heads=4, head_dim=64),
    Case("large_dims_80", seqlen_q=500, seqlen_k=700, heads=4, kv_heads=4, head_dim=80, causal=True),
    Case("large_dims_96", seqlen_q=512, seqlen_k=512, heads=4, kv_heads=4, head_dim=96),
    Case("large_128_full", seqlen_q=1100, seqlen_k=1300, heads=4, kv_heads=2, head_dim=128, sinks=True, lse_grad=True),
    Case("varlen_large_128_full", batch=5, lengths=((1100, 700), (0, 300), (1025, 1100), (64, 0), (0, 130)), heads=4,
         kv_heads=2, head_dim=120, spare=200),
    Case("large_dims_96_full", seqlen_q=1100, seqlen_k=1300, heads=4, kv_heads=2, head_dim=96),
    Case("large_dims_96_causal", seqlen_q=1111, seqlen_k=1300, heads=4, kv_heads=4, head_dim=88, causal=True),
    Case("varlen_large_96", batch=3, lengths=((1100, 700), (0, 300), (1025, 1100)), heads=4, kv_heads=2, head_dim=96,
         causal=True),
    # So long that pairs of programs share the rows of the backward.
    Case("large_pairs_256", batch=1, seqlen_q=8200, seqlen_k=8333, heads=1, kv_heads=1, head_dim=256, causal=True,
         lse_grad=True),
    Case("large_pairs_192", batch=1, seqlen_q=8192, seqlen_k=8250, heads=1, kv_heads=1, head_dim=184),
    Case("large_dims_192_128", seqlen_q=512, seqlen_k=512, head_dim=192, head_dim_v=128, causal=True),
    Case("large_512", seqlen_q=777, seqlen_k=1000, heads=4, kv_heads=2, head_dim=512, causal=True),
    Case("large_512_packed", lengths=((300, 500), (900, 64), (1, 700)), kv_heads=1, head_dim=320, window=(200, 30)),
    Case("large_window", seqlen_q=2048, seqlen_k=2048, heads=4, kv_heads=4, head_dim=64, window=(256, 0)),
    Case("large_window_both", seqlen_q=1000, seqlen_k=1300, heads=4, kv_heads=2, head_dim=128, window=(100, 77)),
    Case("large_softcap", seqlen_q=1024, seqlen_k=1024, heads=4, kv_heads=4, head_dim=128, softcap=5.0, causal=True),
    Case("large_alibi", seqlen_q=900, seqlen_k=900, heads=8, kv_heads=2, head_dim=64, alibi="bh", causal=True),
    Case("large_bias", seqlen_q=700, seqlen_k=600, heads=4, kv_heads=4, head_dim=64, bias="hqk"),
    Case("large_bias_batch", seqlen_q=700, seqlen_k=600, heads=4, kv_heads=2, head_dim=64, bias="bk", causal=True),
    Case("large_bias_128", seqlen_q=500, seqlen_k=600, heads=4, kv_heads=2, head_dim=128, bias="bhqk", causal=True,
         sinks=True, lse_grad=True),
    Case("varlen_large_bias", batch=3, lengths=((300, 500), (129, 64), (0, 7)), heads=4, kv_heads=2, head_dim=64,
         bias="hqk", softcap=5.0, causal=True),
    Case("large_mask", seqlen_q=700, seqlen_k=900, heads=4, kv_heads=4, head_dim=128, mask="bqk"),
    Case("large_sinks", seqlen_q=1000, seqlen_k=1000, heads=8, kv_heads=2, head_dim=64, sinks=True, window=(128, 0)),
    Case("large_dropout", seqlen_q=800, seqlen_k=800, heads=4, kv_heads=4, head_dim=64, dropout=0.2, causal=True),
    Case("large_decode", seqlen_q=1, seqlen_k=4097, heads=8, kv_heads=2, head_dim=128, causal=True),
    Case("large_few_rows", seqlen_q=7, seqlen_k=3000, heads=8, kv_heads=1, head_dim=128, causal=True),
    Case("large_groups_of_7", seqlen_q=1500, seqlen_k=1400, heads=14, kv_heads=2, head_dim=128, causal=True),
    Case("large_causal_256", seqlen_q=704, seqlen_k=960, heads=4, kv_heads=2, head_dim=256, causal=True),
    Case("large_256_full", seqlen_q=640, seqlen_k=513, heads=4, kv_heads=1, head_dim=256, lse_grad=True),
    Case("large_256_window", seqlen_q=900, seqlen_k=1100, heads=2, kv_heads=2, head_dim=256, window=(300, 40),
         softcap=9.0),
    Case("large_everything", seqlen_q=600, seqlen_k=700, heads=4, kv_heads=2, head_dim=64, causal=True, window=(400, 0),
         softcap=5.0, alibi="bh", mask="bqk", bias="hk", sinks=True, dropout=0.2, lse_grad=True),
    Case("varlen_large_256", batch=3, lengths=((300, 500), (129, 64), (0, 7)), heads=4, kv_heads=2, head_dim=256,
         causal=True, spare=5, lse_grad=True),
    Case("varlen_large", batch=4, lengths=((1000, 1000), (17, 17), (640, 640), (1, 1)), heads=4, kv_heads=4,
         head_dim=128, causal=True, lse_grad=True),
    Case("varlen_large_mixed", batch=3, lengths=((100, 900), (513, 300), (0, 64)), heads=8, kv_heads=2, head_dim=64,
         causal=True, sinks=True, spare=33, say_longest=False),
)  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=_id)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_small(case: Case, dtype: torch.dtype, backend: str) -> None:
    judge(build(case, dtype, "cuda"), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("dtype", SHORT, ids=_id)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case: Case, dtype: torch.dtype, seed: int, backend: str) -> None:
    judge(build(case, dtype, "cuda", seed), backend)


TRAINED = [case for case in LARGE if case.bias is not None]


@pytest.mark.parametrize("dtype", SHORT, ids=_id)
@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_a_trained_bias(case: Case, dtype: torch.dtype) -> None:
    """On Hopper by two backends."""
    call = build(case, dtype, "cuda")
    with_hopper = call.problem.compute_capability == (9, 0)
    assert dispatch.select(call.problem, "backward").name == ("hopper" if with_hopper else "portable")
    judge(call, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=_id)
@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_a_gradient_of_a_large_bias(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose sums do not fit the cache, whose gradient has a kernel of its own."""
    monkeypatch.setattr(launch, "MOST_SUMS", 0)
    with plans.own_plans():
        judge(build(case, dtype, "cuda"), "portable")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("name", ["large", "large_causal", "large_causal_256", "large_window", "large_softcap"])
def test_scores_all_of_one_sign(name: str, sign: float, backend: str) -> None:
    case = next(case for case in LARGE if case.name == name)
    judge(one_sign(build(case, torch.float16, "cuda"), sign), backend)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_in_float32(case: Case) -> None:
    judge(build(case, torch.float32, "cuda"), "portable")


def _can(backend: str, q: torch.Tensor, *, grad: bool = False, varlen: bool = False, **keywords: Any) -> bool:
    problem = banded_problem(Tensors(q, q, q), band_of(keywords.get("causal", False), keywords.get("window_size")))
    problem = problem.but(varlen=varlen, softcap=keywords.get("softcap", 0.0), needs_grad=grad)
    return not dispatch.reasons(backend, problem, "backward" if grad else "forward")


def _inputs(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=grad) for _ in range(3)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """A backend that runs on this device at all."""
    name: str = request.param
    if not _can(name, torch.empty(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)):
        pytest.skip(f"{name} does not run on this device")
    return name


@pytest.mark.parametrize("kwargs", [{}, {"causal": True}, {"causal": True, "window_size": (100, 0)}], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1], ids=["", "mqa"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_the_forward_is_the_same_alone_and_in_any_batch(
    backend: str, kwargs: dict[str, Any], head_dim: int, kv_heads: int
) -> None:
    q, k, v = _inputs(7, 1100, 4, head_dim)
    k, v = k[:, :, :kv_heads], v[:, :, :kv_heads]
    if not _can(backend, q, **kwargs):
        pytest.skip(f"{backend} declares that it cannot")
    whole = flashtile.attention(q, k, v, backend=backend, **kwargs)
    for b in (0, 5):
        alone = flashtile.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], backend=backend, **kwargs)
        assert torch.equal(alone[0], whole[b])
    if _can(backend, q, varlen=True, **kwargs):
        lengths = torch.arange(8, device="cuda", dtype=torch.int32) * 1100
        rows = [x.flatten(0, 1) for x in (q, k, v)]
        packed = flashtile.attention_varlen(*rows, lengths, lengths, 1100, 1100, backend=backend, **kwargs)
        own = [x[5 * 1100 : 6 * 1100] for x in rows]
        alone = flashtile.attention_varlen(*own, lengths[:2], lengths[:2], 1100, 1100, backend=backend, **kwargs)
        assert torch.equal(packed[5 * 1100 : 6 * 1100], alone)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_lengths_known_to_be_equal_change_no_bit(backend: str, head_dim: int) -> None:
    """One tensor of offsets for queries and keys tells a kernel more than two of the same content."""
    lengths = torch.tensor([1000, 17, 0, 640, 1, 64])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().cuda()
    q, k, v = (torch.randn(int(lengths.sum()), 4, head_dim, device="cuda").bfloat16() for _ in range(3))
    with poisoned_memory():
        (out, lse), (other_out, other_lse) = (
            flashtile.attention_varlen(q, k, v, offsets, other, causal=True, return_lse=True, backend=backend)
            for other in (offsets, offsets.clone())
        )
    assert torch.equal(out, other_out) and torch.equal(lse, other_lse)


def test_the_forward_repeats_its_bits_beside_another_stream(backend: str) -> None:
    q, k, v = _inputs(2, 1024, 8, 128)
    want = flashtile.attention(q, k, v, causal=True, backend=backend)
    busy = torch.randn(2048, 2048, device="cuda")
    side = torch.cuda.Stream()
    for _ in range(100):
        with torch.cuda.stream(side):
            busy = (busy @ busy).clamp(-1, 1)
        with poisoned_memory():
            got = flashtile.attention(q, k, v, causal=True, backend=backend)
        assert torch.equal(got, want)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("causal", [True, False], ids=["", "full"])
def test_deterministic_gradients_repeat_their_bits(backend: str, causal: bool, packed: bool, head_dim: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 1400, 4, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(1, 1400, 2, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
    if not _can(backend, q, grad=True, varlen=packed, causal=causal):
        pytest.skip(f"{backend} declares that it cannot")
    cu_seqlens = torch.tensor([0, 300, 333, 1400], device="cuda", dtype=torch.int32)
    kwargs: dict[str, Any] = {"causal": causal, "deterministic": True, "backend": backend}
    leaves = [q, k, v]
    if backend == "portable" and not packed:
        kwargs["attn_bias"] = torch.randn(1, 4, 1, 1400, device="cuda", requires_grad=True)
        leaves.append(kwargs["attn_bias"])
    dout = torch.randn_like(q)

    def gradients() -> tuple[torch.Tensor, ...]:
        if packed:
            rows = (x[0] for x in (q, k, v))
            out = flashtile.attention_varlen(*rows, cu_seqlens, cu_seqlens, 1067, 1067, **kwargs)
            return torch.autograd.grad(out, leaves, dout[0])
        return torch.autograd.grad(flashtile.attention(q, k, v, **kwargs), leaves, dout)

    want = gradients()
    for _ in range(100):
        with poisoned_memory():
            got = gradients()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_runs_on_a_second_stream(backend: str) -> None:
    q, k, v = _inputs(2, 512, 4, 64, grad=True)
    dout = torch.randn_like(q)

    def run(q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = flashtile.attention(q, k, v, deterministic=True, backend=backend)
        return out, *torch.autograd.grad(out, (k, v), dout)

    want = run(q)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        got = run(q + 0)
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_cuda_graph_replays_on_new_data(backend: str, packed: bool) -> None:
    shape = (900, 4, 64) if packed else (2, 450, 4, 64)
    q, k, v = _inputs(*shape)
    if not _can(backend, q.view(2, 450, 4, 64), varlen=packed, causal=True):
        pytest.skip(f"{backend} declares that it cannot")
    cu_seqlens = torch.tensor([0, 300, 900], device="cuda", dtype=torch.int32)

    def run() -> torch.Tensor:
        if packed:
            return flashtile.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 900, 900, causal=True, backend=backend)
        return flashtile.attention(q, k, v, causal=True, backend=backend)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    if packed:
        cu_seqlens.copy_(torch.tensor([0, 50, 777]))
    graph.replay()
    assert torch.equal(out, run())


def test_cuda_graph_of_gradients_replays_on_new_data(backend: str) -> None:
    q, k, v = _inputs(2, 300, 4, 64, grad=True)
    dout = torch.randn_like(q)

    def step() -> tuple[torch.Tensor, ...]:
        out = flashtile.attention(q, k, v, causal=True, deterministic=True, backend=backend)
        return torch.autograd.grad(out, (q, k, v), dout)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = step()
    with torch.no_grad():
        for x in (q, k, v, dout):
            x.copy_(torch.randn_like(x))
    for _ in range(3):
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(grads, step(), strict=True))


def test_compiled_into_graphs_from_the_first_call(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What calls keep is not memory of a graph, also where a graph's warm-up is the first of all calls."""
    for module, name in (("hopper.forward", "_counters"), ("gpu.decode", "_counters"), ("gpu.decode", "_spare")):
        monkeypatch.setattr(importlib.import_module(f"flashtile.backends.{module}.launch"), name, {})
    host._a_float.cache_clear()
    (q, k, v), lengths = _inputs(2, 450, 4, 64), torch.tensor([3, 450], device="cuda", dtype=torch.int32)

    def step() -> torch.Tensor:
        out = flashtile.attention(q, k, v, causal=True, backend=backend)
        return out + flashtile.attention_with_kvcache(out[:, -1:], k, v, cache_seqlens=lengths, backend=backend)

    with torch.no_grad(), plans.own_plans():
        compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled().clone()
        torch.testing.assert_close(got, step())


def test_cuda_graph_of_a_training_step() -> None:
    q, k, v = _inputs(2, 256, 4, 64, grad=True)
    dout = torch.randn_like(q)

    def step() -> tuple[torch.Tensor, ...]:
        out = flashtile.attention(q, k, v, causal=True, dropout_p=0.1, deterministic=True)
        return torch.autograd.grad(out, (q, k, v), dout)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = step()
    graph.replay()
    first = [g.clone() for g in grads]
    graph.replay()
    assert all(torch.isfinite(g).all() for g in first)
    assert not torch.equal(first[0], grads[0]), "each replay draws its own dropout"


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiles_whole_with_gradients(backend: str, compiler: str) -> None:
    torch._dynamo.reset()
    q, k, v = _inputs(2, 384, 4, 64, grad=True)

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flashtile.attention(q * 1.5, k, v, causal=True, deterministic=True, backend=backend)
        return (out.float() ** 2).mean()

    want = torch.autograd.grad(loss(q, k, v), (q, k, v))
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend=compiler)(q, k, v), (q, k, v))
    torch.testing.assert_close(got, want)


def test_more_than_two_to_the_31_elements(backend: str) -> None:
    """Rows whose offset passes 2^31 elements: a view into a large tensor, checked against a copy of the same rows."""
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    heads, head_dim, seqlen = 16, 128, 1_100_000
    big = torch.empty(1, seqlen, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    assert big.numel() > 2**31
    tail = torch.randn(1, 300, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    big[:, -300:] = tail
    got = flashtile.attention(tail, big, big, causal=True, window_size=(200, 0), backend=backend)
    want = flashtile.attention(tail, tail, tail, causal=True, window_size=(200, 0), backend=backend)
    torch.testing.assert_close(got[:, 200:], want[:, 200:], rtol=2e-2, atol=1e-3)
    wide = torch.empty(3, 2**31 - 2**20, device="cuda", dtype=torch.bfloat16)
    far = wide.as_strided((2, 256, heads, head_dim), (2**31 + 2**20, heads * head_dim, head_dim, 1))
    far.copy_(torch.randn(2, 256, heads, head_dim, device="cuda"))
    near = far.contiguous()
    assert torch.equal(
        flashtile.attention(far, far, far, backend=backend), flashtile.attention(near, near, near, backend=backend)
    )


def test_gradients_of_more_than_two_to_the_31_elements(backend: str) -> None:
    """Gradients of keys whose offset passes 2^31 elements, against those of the same keys alone."""
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    heads, head_dim, rows, left = 16, 128, 300, 200
    big = torch.zeros(1, 1_100_000, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    assert big.numel() > 2**31
    tail = torch.randn(1, rows, heads, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    big[:, -rows:] = tail.detach()
    big.requires_grad_()
    dout = torch.randn_like(tail)
    # Rows whose window reaches in front of the tail see other keys there than alone.
    dout[:, :left] = 0

    def gradients(keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = flashtile.attention(tail, keys, keys, causal=True, window_size=(left, 0), backend=backend)
        return torch.autograd.grad(out, (tail, keys), dout)

    own = tail.detach().clone().requires_grad_()
    (dq, dk), (want_dq, want_dk) = gradients(big), gradients(own)
    # Other blocks of keys, other sums of roundings: an element near 0 may be off by as much as a large one.
    for got, want in ((dq, want_dq), (dk[:, -rows:], want_dk)):
        error = torch.linalg.vector_norm(got.double() - want.double()) / torch.linalg.vector_norm(want.double())
        assert error < 2e-2
    assert not dk[:, :-rows].any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_of_gradients_is_linear(backend: str, deterministic: bool) -> None:
    extra = {}
    for seqlen in (8192, 32768):
        leaves = _inputs(1, seqlen, 2, 64, grad=True)
        out = flashtile.attention(*leaves, causal=True, deterministic=deterministic, backend=backend)
        dout = torch.randn_like(out)
        # What earlier tests left in cycles would be freed at any time.
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = torch.autograd.grad(out, leaves, dout)
        extra[seqlen] = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in gradients)
    assert extra[32768] <= 4 * extra[8192] + 2**22


def test_memory_is_linear(backend: str) -> None:
    """Beyond inputs, output and lse, a forward keeps nothing that grows with the square of the length."""
    extra = {}
    for seqlen in (16384, 65536):
        q, k, v = _inputs(1, seqlen, 2, 64)
        flashtile.attention(q, k, v, causal=True, backend=backend)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = flashtile.attention(q, k, v, causal=True, backend=backend)
        extra[seqlen] = torch.cuda.max_memory_allocated() - before - out.nbytes
    assert extra[65536] <= 4 * extra[16384] + 2**22


def test_a_nan_reaches_the_rows_that_attend_to_it_and_no_other_head_or_sequence(backend: str) -> None:
    q, k, v = _inputs(2, 300, 2, 64)
    clean = flashtile.attention(q, k, v, causal=True, backend=backend)
    for x in (k, v):
        kept = x[0, 200, 1, 5].clone()
        x[0, 200, 1, 5] = torch.nan
        dirty = flashtile.attention(q, k, v, causal=True, backend=backend)
        x[0, 200, 1, 5] = kept
        assert torch.equal(dirty[1], clean[1]) and torch.equal(dirty[0, :, 0], clean[0, :, 0])
        # A score is selected, so a key stays with its rows; a value is multiplied, with all rows of a tile.
        if x is k:
            assert torch.equal(dirty[0, :200], clean[0, :200])
        assert dirty[0, 200:, 1].isnan().any(dim=-1).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_nan_reaches_gradients_of_its_own_head_and_sequence_alone(backend: str, head_dim: int) -> None:
    q, k, v = _inputs(2, 300, 2, head_dim, grad=True)
    dout = torch.randn_like(q)

    def gradients() -> tuple[torch.Tensor, ...]:
        out = flashtile.attention(q, k, v, causal=True, deterministic=True, backend=backend)
        return torch.autograd.grad(out, (q, k, v), dout)

    clean = gradients()
    with torch.no_grad():
        dout[0, 150, 1, 3] = torch.nan
    dq, dk, dv = gradients()
    for got, want in zip((dq, dk, dv), clean, strict=True):
        assert torch.equal(got[1], want[1]) and torch.equal(got[0, :, 0], want[0, :, 0])
    assert dq[0, 150, 1].isnan().any()
    assert dv[0, :151, 1, 3].isnan().all()


def test_gradients_do_not_see_what_lies_beyond_a_length(backend: str) -> None:
    leaves = _inputs(700, 2, 64, grad=True)
    if not _can(backend, leaves[0][None], grad=True, varlen=True, causal=True):
        pytest.skip(f"{backend} declares that it cannot")
    cu_seqlens = torch.tensor([0, 100, 100, 613], device="cuda", dtype=torch.int32)
    dout = torch.randn_like(leaves[0])
    results = []
    for junk in (0.0, torch.nan):
        with torch.no_grad():
            for x in (*leaves, dout):
                x[613:] = junk
        kwargs: dict[str, Any] = {"causal": True, "deterministic": True, "backend": backend}
        with poisoned_memory():
            out = flashtile.attention_varlen(*leaves, cu_seqlens, cu_seqlens, 513, 513, **kwargs)
            results.append(torch.autograd.grad(out, leaves, dout))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second) and (first[613:] == 0).all()


def test_what_lies_beyond_a_length_is_never_read_into_a_result(backend: str) -> None:
    rows = _inputs(700, 2, 64)
    if not _can(backend, rows[0][None], varlen=True, causal=True):
        pytest.skip(f"{backend} declares that it cannot")
    cu_seqlens = torch.tensor([0, 100, 100, 613], device="cuda", dtype=torch.int32)
    results = []
    for junk in (0.0, torch.nan):
        for x in rows:
            x[613:] = junk
        results.append(
            flashtile.attention_varlen(*rows, cu_seqlens, cu_seqlens, 513, 513, causal=True, backend=backend)
        )
    assert torch.equal(*results) and (results[0][613:] == 0).all()


# Of the largest scores: tiles of every kind, what is masked, what is repaired, and rows that keep nothing.
MAXIMA = [
    *(case for case in LARGE if case.name in {
        "large", "large_causal", "large_causal_128", "large_256", "large_dims_96", "large_window", "large_softcap",
        "large_alibi", "large_bias", "large_mask", "large_sinks", "large_dropout", "large_decode", "large_few_rows",
        "large_groups_of_7", "large_512", "large_everything", "varlen_large", "varlen_large_mixed",
        "varlen_large_bias", "varlen_large_128_full",
    }),
    *(case for case in CASES if case.name in {
        "bias_large", "bias_large_max", "masked_out_sinks", "no_keys_sinks", "both_intervals", "varlen_empty",
        "varlen_out_part",
    }),
    Case("negative_scale", seqlen_q=700, seqlen_k=600, heads=4, kv_heads=2, head_dim=128, scale=-0.1, causal=True),
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=_id)
@pytest.mark.parametrize("case", MAXIMA, ids=str)
def test_largest_scores(case: Case, dtype: torch.dtype, backend: str) -> None:
    """Of float64's to float32's rounding, in poisoned memory; out, lse and deterministic gradients keep their bits."""
    is_trained = backend == "portable" and case.bias is None
    call = build(case if is_trained else dataclasses.replace(case, wanted=""), dtype, "cuda")
    judge_maxima(call, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_largest_scores_of_one_sign(head_dim: int, sign: float, backend: str) -> None:
    case = Case("one_sign", seqlen_q=300, seqlen_k=1000, heads=2, kv_heads=1, head_dim=head_dim)
    judge_maxima(one_sign(build(case, torch.bfloat16, "cuda"), sign), backend, gradients=False)


def test_gradients_keep_their_bits_beside_largest_scores() -> None:
    for case in LARGE:
        if case.name in ("large_causal", "large_causal_128", "large_256", "varlen_large"):
            judge_maxima(build(dataclasses.replace(case, deterministic=True), torch.bfloat16, "cuda"), None)


def test_largest_scores_in_a_graph_and_compiled() -> None:
    q, k, v = (torch.randn(2, 500, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def call() -> Any:
        return flashtile.attention(q, k, v, causal=True, return_lse=True, return_max_scores=True)

    want, graph = call(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for x in found:
        x.fill_(torch.nan)
    graph.replay()
    assert all(map(torch.equal, found, want))
    assert all(map(torch.equal, torch.compile(call, fullgraph=True)(), want))
