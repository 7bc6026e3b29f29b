"""On a GPU: the kernels that quantise against PyTorch's arithmetic, at real sizes, repeated, and in a CUDA graph."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import flashtile
from flashtile.backends.cpu.rounding import quantized
from tests.quantization.quantizer import CASES, Case, check, inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LARGE = (
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
@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_numbers(case: Case, dtype: torch.dtype) -> None:
    # Before a product with the rotation numbers are rounded: to 16 bits, or those of tf32, which are float16's.
    apart = 0.02 if dtype == torch.bfloat16 else 0.006
    flips = 2e-3 if torch.cuda.get_device_capability() >= (9, 0) else 0.02
    check(case, inputs(case, dtype, "cuda"), apart if case.rotate else 0.0, flips)


def test_the_same_bits_in_every_run_and_in_a_graph() -> None:
    case = LARGE[0]
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
