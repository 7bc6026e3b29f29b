"""The operators under opcheck, FakeTensor, torch.compile, export of shapes and the FLOP counter."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flashtile
from flashtile import UnsupportedError
from flashtile.ops import Options


def arguments(**options: Any) -> tuple[Any, ...]:
    q = torch.randn(2, 6, 4, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 9, 2, 8, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 9, 2, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, 1, 9, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    o = Options(needs_grad=True, bias_grad=True, **options)
    return (q, k, v, None, None, bias, sinks, None, None, None, *vars(o).values())


@pytest.mark.parametrize("options", [{}, {"window_right": 0}, {"softcap": 2.0, "window_left": 3}], ids=str)
def test_opcheck_forward(options: dict[str, Any]) -> None:
    torch.library.opcheck(torch.ops.flashtile.attention_forward.default, arguments(**options))


def test_opcheck_forward_packed() -> None:
    x = torch.randn(7, 2, 8, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    state = torch.tensor([1, 2])
    o = Options(max_seqlen_q=4, needs_grad=True, dropout_p=0.2)
    args = (x, x, x, None, None, None, None, cu_seqlens, cu_seqlens, state, *vars(o).values())
    torch.library.opcheck(torch.ops.flashtile.attention_forward.default, args)


def test_opcheck_backward() -> None:
    args = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments(window_right=0)]
    out, lse = torch.ops.flashtile.attention_forward(*args)
    for dlse in (None, torch.randn_like(lse)):
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


def test_a_second_derivative_is_refused() -> None:
    q = torch.randn(1, 3, 1, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(flashtile.attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        grad.sum().backward()


COUNTED = """
import sys, torch
if {first}: import torch.utils.flop_counter
import flashtile
from torch.utils.flop_counter import FlopCounterMode
q = torch.randn(1, 4, 2, 8)
with FlopCounterMode(display=False) as counter:
    flashtile.attention(q, q, q)
print(counter.get_total_flops())
"""


@pytest.mark.parametrize("first", [True, False])
def test_flops_are_counted_whichever_is_imported_first(first: bool) -> None:
    script = COUNTED.format(first=first)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 2 * 16 * 4 * 8
