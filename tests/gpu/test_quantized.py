"""On a GPU: quantized calls and the kernels that quantise, at real sizes, repeated, and in a CUDA graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.backends.cpu.rounding import quantized
from flashtile.call.quantized_call import tensor_values
from flashtile.ops import dispatch
from tests.quantization.cases import CASES, QuantizedCase, build, judge
from tests.quantization.quantizer import CASES as CASES_ROUNDING
from tests.quantization.quantizer import Case, check, inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
BACKENDS = [name for name in flashtile.backends() if name != "cpu"]

_128: dict[str, Any] = {"heads": 4, "kv_heads": 4, "head_dim": 128}
LARGE = (
    QuantizedCase("large", ((1024, 1024),) * 2, **_128),
    QuantizedCase("large_causal", ((1500, 1500),), causal=True, shifted=True, **_128),
    QuantizedCase("large_64", ((1021, 997),) * 2, heads=4, kv_heads=2, head_dim=64, causal=True, sinks=True),
    QuantizedCase("large_256", ((640, 1100),), heads=4, kv_heads=2, head_dim=256, causal=True, shifted=True),
    QuantizedCase("large_256_full", ((513, 900),), heads=2, kv_heads=1, head_dim=256, half=True),
    QuantizedCase("large_96", ((500, 700),), heads=3, kv_heads=3, head_dim=96, causal=True),
    QuantizedCase("large_192_128", ((512, 1536),), heads=4, kv_heads=1, head_dim=192, head_dim_v=128),
    QuantizedCase("large_window", ((2048, 2048),), heads=4, kv_heads=2, head_dim=64, window=(256, 0), shifted=True),
    QuantizedCase("large_window_both", ((1000, 1300),), window=(100, 77), sinks=True, **_128),
    QuantizedCase("large_softcap", ((1024, 1024),), softcap=5.0, causal=True, **_128),
    QuantizedCase("large_by_tensor", ((1024, 1024),), scales=("tensor",) * 3, causal=True, **_128),
    QuantizedCase("large_by_head", ((1024, 1024),) * 2, scales=("head",) * 3, **_128),
    QuantizedCase("large_few_rows", ((7, 3000),), causal=True, heads=8, kv_heads=1, head_dim=128),
    QuantizedCase("large_packed", ((1000, 1000), (17, 17), (640, 640), (1, 1)), packed=True, causal=True, shifted=True,
                  **_128),
    QuantizedCase("large_packed_mixed", ((100, 900), (513, 300), (0, 64)), packed=True, heads=8, kv_heads=2,
                  head_dim=64, causal=True, sinks=True, spare=133, say_longest=False, shifted=True),
    QuantizedCase("large_packed_256", ((300, 500), (129, 64), (0, 7)), packed=True, heads=4, kv_heads=2, head_dim=256,
                  spare=5),
)  # fmt: skip


def _runs(backend: str) -> None:
    reasons = dispatch.reasons(backend, build(CASES[0], DEVICE).problem, "quantized")
    if reasons:
        pytest.skip(f"{backend}: {'; '.join(reasons)}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_case(case: QuantizedCase, backend: str) -> None:
    judge(build(case, DEVICE), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_gives_the_same_bits_every_time_and_beside_others(backend: str) -> None:
    _runs(backend)
    for name in ("large_causal", "large_64", "large_packed_mixed"):
        call = build(next(case for case in LARGE if case.name == name), DEVICE)
        first = call.run(backend)
        torch.empty(2**26, device=DEVICE).fill_(torch.nan)
        for got, want in zip(call.run(backend), first, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_graphs_replay_on_other_values(backend: str) -> None:
    _runs(backend)
    case = next(case for case in LARGE if case.name == "large_packed")
    call, other = build(case, DEVICE), build(case, DEVICE, seed=1)
    call.run(backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call.run(backend)
    for x, y in zip(tensor_values(call.tensors), tensor_values(other.tensors), strict=True):
        if x is not None:
            x.view(torch.uint8).copy_(y.view(torch.uint8))
    graph.replay()
    for got, want in zip(found, other.run(backend), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_error_does_not_grow_with_the_keys(head_dim: int, backend: str) -> None:
    """Products of 8 bits keep 13 bits of their sums: promoted every 128 keys, 64k keys are as exact as 512."""
    _runs(backend)

    def relative(keys: int) -> float:
        make = torch.Generator(DEVICE).manual_seed(0)
        q, k = (torch.randn(1, n, 2, head_dim, generator=make, device=DEVICE).bfloat16() for n in (256, keys))
        v = (torch.rand(1, keys, 2, head_dim, generator=make, device=DEVICE) + 0.5).bfloat16()
        record = flashtile.quantize(q, k, v)
        out = flashtile.attention(record, backend=backend)
        wide = [x.double().transpose(1, 2) for x in record.dequantized()]
        probs = torch.softmax(wide[0] @ wide[1].mT * head_dim**-0.5, -1)
        want = (probs @ wide[2]).transpose(1, 2)
        return ((out.double() - want).norm() / want.norm()).item()

    # The rounding of the output alone is 1.7e-3; few keys have more of the rounding of probabilities.
    assert relative(65536) <= 1.1 * relative(512) and relative(65536) < 4e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_one_key_of_128k_is_found(causal: bool, backend: str) -> None:
    """A needle: each query is like one key of its own, anywhere; its value comes back as from 16 bits."""
    _runs(backend)
    make, keys, rows, dim = torch.Generator(DEVICE).manual_seed(0), 131072, 64, 128

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device=DEVICE)

    q, k, v = normal(1, rows, 1, dim), normal(1, keys, 1, dim), normal(1, keys, 1, dim)
    places = torch.randperm(keys - rows, generator=make, device=DEVICE)[:rows]
    k[0, places, 0] = q[0, :, 0] * 3.0
    q, k, v = (x.bfloat16() for x in (q, k, v))
    plain = flashtile.attention(q, k, v, causal=causal)
    out = flashtile.attention(q, k, v, causal=causal, precision="fp8", backend=backend)
    needles = v[:, places].float()

    def off(x: Tensor) -> Tensor:
        return (x.float() - needles).norm(dim=-1) / needles.norm(dim=-1)

    assert off(plain).max() < 0.01 and off(out).max() < 0.04


@pytest.mark.parametrize("backend", BACKENDS)
def test_unaligned_tensors_run_or_are_refused(backend: str) -> None:
    call = build(next(case for case in LARGE if case.name == "large_64"), DEVICE)

    def moved(x: Tensor) -> Tensor:
        room = torch.zeros(x.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view(x.shape)
        return room.copy_(x.view(torch.uint8)).view(x.dtype)

    t = call.tensors
    other = dataclasses.replace(t, q=moved(t.q), k=moved(t.k), v=moved(t.v))
    problem = dataclasses.replace(call.problem, aligned=False)
    call = dataclasses.replace(call, tensors=other, problem=problem)
    judge(call, backend)


def test_training_steps_as_in_16_bits() -> None:
    """The gradients of a GPU's own backward from an 8-bit forward are near those of 16 bits."""
    make = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = (
        torch.randn(2, 1000, heads, 64, generator=make, device=DEVICE).bfloat16().requires_grad_()
        for heads in (8, 2, 2)
    )
    dout = torch.randn(2, 1000, 8, 64, generator=make, device=DEVICE).bfloat16()
    got = torch.autograd.grad(flashtile.attention(q, k, v, causal=True, precision="fp8"), (q, k, v), dout)
    want = torch.autograd.grad(flashtile.attention(q, k, v, causal=True), (q, k, v), dout)
    for x, y in zip(got, want, strict=True):
        assert (x.double() - y.double()).norm() < 0.1 * y.double().norm()


ROUNDING_LARGE = (
    Case("large", 128, 128, ((4096, 4096),) * 2, heads=(8, 2)),
    Case("large turned", 128, 128, ((1000, 5000),), rotary_dim=128, heads=(8, 8)),
    Case("large 64", 64, 64, ((8192, 8192),), rotary_dim=64, interleaved=True, heads=(4, 4)),
    Case("large 256", 256, 256, ((2000, 2000),), scales="head", rotary_dim=256, heads=(4, 2)),
    Case(
        "large packed", 128, 64, ((1, 3000), (700, 700), (0, 9), (513, 1024)), packed=True, rotary_dim=128, heads=(4, 4)
    ),
    Case("many", 64, 64, tuple((n % 7, n % 300) for n in range(2000)), packed=True, heads=(2, 2)),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES_ROUNDING + ROUNDING_LARGE, ids=str)
def test_numbers(case: Case, dtype: torch.dtype) -> None:
    # Before a product with the rotation numbers are rounded: to 16 bits, or those of tf32, which are float16's.
    apart = 0.02 if dtype == torch.bfloat16 else 0.006
    flips = 2e-3 if torch.cuda.get_device_capability() >= (9, 0) else 0.02
    check(case, inputs(case, dtype, "cuda"), apart if case.rotate else 0.0, flips)


def test_the_same_bits_in_every_run_and_in_a_graph() -> None:
    case = ROUNDING_LARGE[0]
    given = inputs(case, torch.bfloat16, "cuda")
    made = [flashtile.quantize(given.q, given.k, given.v, scales="head") for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.append(flashtile.quantize(given.q, given.k, given.v, scales="head"))
    graph.replay()
    wanted = quantized(given, dataclasses.replace(case.choices, scales="head"))
    for other in made[1:]:
        for field in ("q", "k", "v", "q_scale", "k_scale", "v_scale", "shift"):
            one, another = getattr(made[0], field), getattr(other, field)
            assert torch.equal(one.view(torch.uint8), another.view(torch.uint8)), field
    torch.testing.assert_close(made[0].k_scale, wanted.k_scale, rtol=0.01, atol=0)
