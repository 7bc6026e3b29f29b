"""The operators under opcheck, FakeTensor, torch.compile, export of shapes and the FLOP counter."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flashtile
from flashtile import InvalidInputError, UnsupportedError
from flashtile.api import attention as api
from flashtile.api.keywords import AnyCall, CachedCall
from flashtile.call.arguments import Grads, Options, Tensors, differentiable
from flashtile.call.problem import Problem
from flashtile.ops import dispatch, plans
from flashtile.ops import operators as ops
from tests import fresh


def arguments(**options: Any) -> tuple[Any, ...]:
    q = torch.randn(2, 6, 4, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 9, 2, 8, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 9, 2, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, 1, 9, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    return ops.REGULAR.flatten(
        Tensors(q, k, v, None, None, bias, sinks), Options(**{"grads": Grads(*[True] * 5)} | options)
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [{}, {"window_right": 0}, {"softcap": 2.0, "window_left": 3}], ids=str)
def test_opcheck_forward(options: dict[str, Any]) -> None:
    torch.library.opcheck(torch.ops.flashtile.attention_forward.default, arguments(**options))


def test_opcheck_forward_packed() -> None:
    x = torch.randn(7, 2, 8, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    state = torch.tensor([1, 2])
    options = Options(max_seqlen_q=4, grads=Grads(True, True, True), dropout_p=0.2)
    tensors = Tensors(x, x, x, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, rng_state=state)
    args = ops.REGULAR.flatten(tensors, options)
    torch.library.opcheck(torch.ops.flashtile.attention_forward.default, args)


def test_opcheck_backward() -> None:
    args = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments(window_right=0)]
    out, lse = torch.ops.flashtile.attention_forward(*args)
    for dlse in (None, torch.randn_like(lse[..., 0])):
        torch.library.opcheck(
            torch.ops.flashtile.attention_backward.default, (torch.randn_like(out), dlse, out, lse, *args)
        )


@pytest.mark.parametrize("dense", [True, False])
def test_gradcheck(dense: bool) -> None:
    q, k, v = (torch.randn(1, 5, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> Any:
        kwargs: Any = dict(causal=True, sinks=sinks, softcap=1.5, return_lse=True)
        if dense:
            return flashtile.attention(q, k, v, **kwargs)
        return flashtile.attention_varlen(q[0], k[0], v[0], cu_seqlens, cu_seqlens, **kwargs)

    assert torch.autograd.gradcheck(run, (q, k, v, sinks))


def test_fake_tensors_have_the_real_shapes_and_strides() -> None:
    shapes = (2, 6, 4, 8), (2, 9, 2, 8), (2, 9, 2, 5)
    real = flashtile.attention(*(torch.randn(s) for s in shapes), return_lse=True)
    with FakeTensorMode():
        fake = flashtile.attention(*(torch.randn(s, dtype=torch.float32) for s in shapes), return_lse=True)
        on_gpu = flashtile.attention(*(torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes))
    assert [(x.shape, x.stride(), x.dtype) for x in fake] == [(x.shape, x.stride(), x.dtype) for x in real]
    assert on_gpu.shape == (2, 6, 4, 5) and on_gpu.dtype == torch.bfloat16 and on_gpu.device.type == "cuda"


@pytest.mark.parametrize("grad", [False, True])
def test_meta_tensors_show_shapes(grad: bool) -> None:
    q = torch.empty(2, 6, 4, 8, device="meta", requires_grad=grad)
    out, lse = flashtile.attention(q, q, q, causal=True, return_lse=True)
    assert out.is_meta and out.shape == q.shape and lse.shape == (2, 4, 6)
    if grad:
        assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


def test_the_profiler_names_the_operator() -> None:
    q = torch.randn(1, 4, 2, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        flashtile.attention(q, q, q)
    assert any(event.key == "flashtile::attention_forward" for event in profile.key_averages())


def test_compiles_whole_and_once_for_all_lengths() -> None:
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=count)
    def model(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.chunk(3, dim=-1)
        return flashtile.attention(q, k, v, causal=True, window_size=(7, None), softcap=3.0)

    for seqlen in (16, 24, 33, 57):
        x = torch.randn(2, seqlen, 4, 24, requires_grad=True)
        want = flashtile.attention(*x.chunk(3, dim=-1), causal=True, window_size=(7, None), softcap=3.0)
        torch.testing.assert_close(model(x), want)
    assert len(graphs) <= 2, "one static graph, one with a symbolic length"


def test_compiled_gradients_equal_eager_ones() -> None:
    torch._dynamo.reset()
    x = torch.randn(1, 12, 2, 8, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def loss(x: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return flashtile.attention(x, x, x, causal=True, sinks=sinks, dropout_p=0.25).square().sum()

    torch.manual_seed(3)
    want = torch.autograd.grad(loss(x, sinks), (x, sinks))
    torch.manual_seed(3)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x, sinks), (x, sinks))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("causal", [False, True])
def test_flop_counter_counts_kept_pairs(causal: bool) -> None:
    q, k = torch.randn(2, 6, 4, 8, requires_grad=True), torch.randn(2, 9, 2, 8, requires_grad=True)
    pairs = 2 * 4 * (sum(range(4, 10)) if causal else 6 * 9)
    with FlopCounterMode(display=False) as counter:
        out = flashtile.attention(q, k, k, causal=causal)
    assert counter.get_total_flops() == pairs * 4 * 8
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == pairs * 10 * 8


SUBSETS = [tuple(bool(n >> i & 1) for i in range(5)) for n in (1, 2, 4, 8, 16, 6, 21)]


@pytest.mark.parametrize("wanted", SUBSETS, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_gradients_are_those_asked_for(wanted: tuple[bool, ...], softcap: float) -> None:
    tensors, options = ops.REGULAR.unflatten(arguments(softcap=softcap))
    leaves = differentiable(tensors)
    out, lse = torch.ops.flashtile.attention_forward(*ops.REGULAR.flatten(tensors, options))
    dout = torch.randn_like(out)
    everything = torch.autograd.grad(out, leaves, dout)
    asked = options._replace(grads=Grads(*wanted))
    found = torch.ops.flashtile.attention_backward(dout, None, out, lse, *ops.REGULAR.flatten(tensors, asked))
    for want, got, is_wanted in zip(everything, found[:5], wanted, strict=True):
        torch.testing.assert_close(got, want if is_wanted else want.new_empty(0))
    plain = [x.detach().requires_grad_(is_wanted) for x, is_wanted in zip(leaves, wanted, strict=True)]
    q, k, v, bias, sinks = plain
    problem = Problem.of(tensors, asked)
    run = dispatch.backend("cpu").plan("backward", problem, tensors, (dout, None))
    with torch.no_grad():
        gradients = vars(run(tensors, out, lse, dout, None)).values()
    assert [x is not None for x in gradients][:5] == list(wanted), "nothing is computed that nobody asked for"
    flashtile.attention(q, k, v, softcap=softcap, attn_bias=bias, sinks=sinks).backward(dout)
    for x, want, is_wanted in zip(plain, everything, wanted, strict=True):
        assert (x.grad is not None) == is_wanted
        if x.grad is not None:
            torch.testing.assert_close(x.grad, want)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("wanted", SUBSETS[:3], ids=str)
def test_opcheck_backward_of_some(wanted: tuple[bool, ...]) -> None:
    args = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments(grads=Grads(*wanted))]
    out, lse = torch.ops.flashtile.attention_forward(*args)
    torch.library.opcheck(
        torch.ops.flashtile.attention_backward.default, (torch.randn_like(out), None, out, lse, *args)
    )


def test_flops_of_frozen_keys_are_those_of_dq() -> None:
    q, k = torch.randn(2, 6, 4, 8, requires_grad=True), torch.randn(2, 9, 2, 8)
    out = flashtile.attention(q, k, k)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 4 * 6 * 9 * 3 * 2 * 8


@pytest.mark.parametrize("strided", [False, True])
def test_saved_tensors_are_unpacked_once_and_are_what_kernels_read(strided: bool) -> None:
    leaves = [torch.randn(1, 9, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def run() -> torch.Tensor:
        q, k, v = (x.transpose(-1, -2).contiguous().transpose(-1, -2) if strided else x for x in leaves)
        return flashtile.attention(q, k, v, causal=True)

    want = torch.autograd.grad(run().square().sum(), leaves)
    saved, unpacked = [], []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda x: (saved.append(x), x.clone())[1], lambda x: (unpacked.append(x), x)[1]
    )
    with hooks:
        out = run()
    assert len(saved) == 5 and all(x.stride(-1) == 1 for x in saved[:3]), "q, k, v as they are read, out and lse"
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), leaves), want)
    assert len(unpacked) == 5
    again = torch.utils.checkpoint.checkpoint(run, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.square().sum(), leaves), want)


def test_offloaded_activations_have_the_same_gradients() -> None:
    x = torch.randn(1, 9, 2, 8, requires_grad=True)
    want = torch.autograd.grad(flashtile.attention(x, x, x, causal=True).sum(), x)
    with torch.autograd.graph.save_on_cpu():
        out = flashtile.attention(x, x, x, causal=True)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), want)


def test_plans_are_made_once_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    known = type(plans.kept)()
    monkeypatch.setattr(plans, "kept", known)
    monkeypatch.setattr(plans, "MOST", 4)

    def run(seqlen: int, **keywords: Any) -> None:
        x = torch.ones(1, seqlen, 1, 8)
        assert torch.equal(flashtile.attention(x, x, x, **keywords), x)

    for _ in range(3):
        run(5)
    shape_class, first = known
    for seqlen in range(6, 9):
        run(seqlen)
    assert len(known) == 4 and first in known and shape_class not in known
    run(9)
    assert len(known) == 4 and first not in known and shape_class in known
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, [n % 13 + 1 for n in range(300)]))
    assert len(known) == 4


def test_what_changes_between_two_calls_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 5, 2, 8, requires_grad=True)
    flashtile.attention(x, x, x)
    monkeypatch.setenv("FLASHTILE_BACKEND", "hopper")
    with pytest.raises(UnsupportedError, match="hopper"):
        flashtile.attention(x, x, x)
    monkeypatch.delenv("FLASHTILE_BACKEND")
    out = flashtile.attention(x, x, x)
    grads = [
        torch.autograd.grad(out, x, dout, retain_graph=True)[0]
        for dout in (torch.ones(1, 5, 2, 8), torch.ones(()).expand(1, 5, 2, 8), torch.ones(1, 2, 5, 8).transpose(1, 2))
    ]
    torch.testing.assert_close(grads[1:], [grads[0]] * 2)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_jit_trace_is_refused() -> None:
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    for x in (q, q.detach()):
        flashtile.attention(x, x, x)  # a cached plan changes nothing
        with pytest.raises(UnsupportedError, match="torch.jit.trace"):
            torch.jit.trace(lambda x: flashtile.attention(x, x, x), x)


COUNTED = """
import torch
if {first}: import torch.utils.flop_counter
import flashtile
q = torch.randn(1, 4, 2, 8)
call = {call}
from torch.utils.flop_counter import FlopCounterMode
one, other = FlopCounterMode(display=False), FlopCounterMode(display=False)  # each made before the first watched call
for counter in (one, other):
    with {mode}, counter:
        call(q, q, q)
print(one.get_total_flops(), other.get_total_flops())
"""
EXPORTED = """torch.export.export(type("M", (torch.nn.Module,), {
    "forward": lambda self, q, k, v: flashtile.attention(q, k, v)
})(), (q, q, q)).module()"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "mode", "call"),
    [
        (True, "torch.no_grad()", "flashtile.attention"),
        (False, "torch.no_grad()", "flashtile.attention"),
        (False, "torch.inference_mode()", "flashtile.attention"),
        (False, "torch.enable_grad()", EXPORTED),
        (False, "torch.inference_mode()", "torch.compile(flashtile.attention, backend='aot_eager')"),
    ],
)
def test_flops_are_counted_wherever_the_first_call_is(first: bool, mode: str, call: str) -> None:
    script = COUNTED.format(first=first, mode=mode, call=call)
    done = fresh.run(script, check=True)
    assert list(map(int, done.stdout.split())) == [2 * 16 * 4 * 8] * 2


def test_a_formula_of_the_users_own_stays() -> None:
    q = torch.randn(1, 4, 2, 8)
    own = {torch.ops.flashtile.attention_forward: lambda *args, **kwargs: 7}
    with FlopCounterMode(display=False, custom_mapping=own) as counter:
        flashtile.attention(q, q, q)
    assert counter.get_total_flops() == 7


def test_flops_of_a_backward_alone_are_counted() -> None:
    script = """
import torch, flashtile
q = torch.randn(1, 4, 2, 8, requires_grad=True)
out = flashtile.attention(q, q, q).sum()
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    out.backward()
print(counter.get_total_flops())
"""
    done = fresh.run(script, check=True)
    assert int(done.stdout) == 5 * 2 * 16 * 2 * 8


@pytest.mark.parametrize("backend", ["hopper", "cpu"])
def test_slopes_sinks_and_bounds_of_any_strides(backend: str) -> None:
    """Kernels read these as contiguous; expanded sinks and a column of slopes gave wrong results without a word."""
    from tests.backends.hopper.emulated import on_cpu

    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    x = torch.randn(5, 4, 16).to(dtype)
    bounds = torch.tensor([0, 3, 5], dtype=torch.int32)
    slopes, sinks = torch.rand(4), torch.rand(1).expand(4)

    def column(y: torch.Tensor) -> torch.Tensor:
        return torch.stack([y, y + 7], dim=-1)[..., 0]

    with on_cpu():
        call = functools.partial(flashtile.attention_varlen, x, x, x, backend=backend)
        want = call(bounds, bounds, alibi_slopes=slopes, sinks=sinks.contiguous())
        assert torch.equal(call(column(bounds), column(bounds), alibi_slopes=column(slopes), sinks=sinks), want)


def test_explain_takes_every_argument_of_a_call():
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    assert flashtile.explain(q, k, v, return_lse=True) == flashtile.explain(q, k, v)
    of_call = set(inspect.signature(flashtile.attention_varlen).parameters) - {"_more", "_unknown"}
    assert set(AnyCall.__annotations__) | {"q", "k", "v"} == of_call | set(CachedCall.__annotations__)
    assert list(inspect.signature(flashtile.explain).parameters) == ["q", "k", "v", "device", "gpu", "keywords"]
    of_cached = set(inspect.signature(flashtile.attention_with_kvcache).parameters) - {"_more", "_unknown"}
    assert of_call | set(CachedCall.__annotations__) >= of_cached


def test_a_call_with_the_keywords_of_the_one_before() -> None:
    q, k, v = (torch.randn(2, 6, 2, 8) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = flashtile.attention(q, k, v, causal=True)
    for _ in range(3):  # In turns: layouts, lengths, gradients, grad mode.
        strided = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
        rows = [torch.cat((x, x[:, :1]), 1)[:, :6] for x in (q, k, v)]
        for tensors in ((q, k, v), strided, rows, leaves):
            out = flashtile.attention(*tensors, causal=True)
            assert out.requires_grad == (tensors is leaves)
            torch.testing.assert_close(out, want, check_stride=False)
            with mock.patch.object(api, "read", side_effect=AssertionError("they are known")):
                flashtile.attention(*tensors, causal=True)
        short = flashtile.attention(q[:, :3], k[:, :3], v[:, :3], causal=True)
        torch.testing.assert_close(short, want[:, :3])
        with torch.no_grad():
            assert not flashtile.attention(*leaves, causal=True).requires_grad
        grads = torch.autograd.grad(flashtile.attention(q, leaves[1], v, causal=True).sum(), leaves[1])
        one = flashtile.attention(leaves[0].detach(), leaves[1], v, causal=True, backend="cpu")
        torch.testing.assert_close(grads, torch.autograd.grad(one.sum(), leaves[1]))
    flashtile.attention(q, k, v, softmax_scale=float("0.3"))
    with mock.patch.object(api, "read", side_effect=AssertionError("an equal scale of another layer is known")):
        flashtile.attention(q, k, v, softmax_scale=float("0.3"))
    bias = torch.randn(6, 6, requires_grad=True)
    flashtile.attention(*leaves, causal=True, attn_bias=bias)
    with mock.patch.object(ops, "attention_again", side_effect=AssertionError("has no bias")):
        grads = torch.autograd.grad(flashtile.attention(*leaves, causal=True).sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(flashtile.attention(*leaves, causal=True).sum(), leaves), grads)
    with torch.autocast("cpu", torch.bfloat16):
        assert flashtile.attention(q, k, v, causal=True).dtype == torch.bfloat16
    out, lse = flashtile.attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out, want) and lse.shape == (2, 2, 6)
    assert not torch.equal(flashtile.attention(q, k, v, causal=True, sinks=torch.ones(2)), want)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"causal": True}, {"causal": 1}),
        ({}, {"causal": 0}),
        ({}, {"deterministic": 0}),
        ({}, {"softcap": False}),
        ({}, {"dropout_p": False}),
        ({}, {"return_lse": 0}),
        ({"softmax_scale": 1.0}, {"softmax_scale": True}),
        ({"backend": "cpu"}, {"backend": "gpu"}),
    ],
)
def test_a_keyword_equal_to_the_one_before_is_still_checked(right: dict[str, Any], wrong: dict[str, Any]) -> None:
    x = torch.randn(1, 5, 2, 8)
    for _ in range(2):
        flashtile.attention(x, x, x, **right)
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        flashtile.attention(x, x, x, **{**right, **wrong})


def test_a_window_is_read_in_every_call() -> None:
    x, window = torch.randn(1, 5, 2, 8), [1, 0]
    want = flashtile.attention(x, x, x, window_size=(1, 0))
    for _ in range(2):
        assert torch.equal(flashtile.attention(x, x, x, window_size=window), want)
    window[0] = 0
    assert torch.equal(flashtile.attention(x, x, x, window_size=window), x)


def test_new_plans_are_made_where_others_are_kept() -> None:
    x, seen = torch.randn(1, 5, 2, 8), OrderedDict[Any, Any]()
    for _ in range(3):
        flashtile.attention(x, x, x)
    with plans.own_plans(seen):
        flashtile.attention(x, x, x)
        assert len(seen) == 2, "the call and its shape class"
        flashtile.attention(x, x, x)
    flashtile.attention(x, x, x)
    assert len(seen) == 2
