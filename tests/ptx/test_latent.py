"""The kernel over latent rows as compiled, against the oracle: divided tiles, small pages, appending, lanes, 8 bits."""

from __future__ import annotations

import pytest
import torch

from flashtile import attention_with_kvcache as attend
from tests.backends.hopper.test_latent import patient, running
from tests.kvcache.cases import CacheCase, build, judge, judge_results
from tests.kvcache.cases import latent_case as case_of
from tests.ptx import hopper
from tests.ptx.machine import Options
from tests.slow import slow_but

CASES = (
    case_of("steps", (300, 65), 2, heads=40, sinks=True),
    case_of("small_pages", (200, 0), page_size=16),
    CacheCase("append", ((130, 2, 2), (0, 2, 2), (63, 2, 2)), appends=True, rotary=64, heads=16, kv_heads=1,
              head_dim=64, head_dim_v=512, qv=True, layout="stacked", page_size=16),
    case_of("two_lanes", (333, 70), heads=128),
    case_of("rows", (300, 65), 2, heads=40, sinks=True, float8="rows", layout="apart"),
    case_of("rows_small_pages", (200, 0), page_size=16, float8="rows", layout="apart"),
    case_of("copied", (200, 0, 64), page_size=1),
    CacheCase("append_copied", ((130, 2, 2), (63, 2, 2)), appends=True, rotary=64, heads=16, kv_heads=1,
              head_dim=64, head_dim_v=512, qv=True, layout="stacked", page_size=3),
    case_of("rows_copied", (200, 0, 64), page_size=1, float8="rows", layout="apart"),
)  # fmt: skip


@pytest.mark.one_in(9)
@pytest.mark.parametrize("dtype", slow_but((torch.bfloat16, torch.float16), lambda dtype: dtype == torch.bfloat16))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases_under_the_rule(case: CacheCase, dtype: torch.dtype) -> None:
    if case.float8 and dtype != torch.bfloat16:
        return  # theirs are columns of bfloat16
    with hopper.on_cpu(Options(seed=len(case.name))), running(4):
        judge(build(case, dtype), "hopper")


@pytest.mark.long
@pytest.mark.parametrize(("mask", "low", "high"), [(0xFF, -20.0, 9.0), (0x87, 7.0, 9.0)])
def test_any_8_bits_and_scales(mask: int, low: float, high: float) -> None:
    """Subnormal numbers, scales past 256, and NaN, which is not lost."""
    make = torch.Generator().manual_seed(mask)
    codes = torch.randint(0, 256, (2, 64, 1, 512), generator=make).to(torch.uint8) & mask
    codes[(codes & 0x7F) == 0x7F] = 0x3C
    # A scale a block of columns, so that each is judged by itself.
    scales = torch.exp2(torch.linspace(low, high, 4)).expand(2, 64, 1, 4).contiguous()
    others = torch.randn(2, 64, 1, 64, generator=make).bfloat16()
    rows = torch.cat([codes, scales.view(torch.uint8), others.view(torch.uint8)], dim=-1)
    q = torch.randn(2, 1, 16, 576, generator=make).bfloat16()

    def call(backend: str) -> torch.Tensor:
        return attend(q, rows, rows[..., :512], cache_seqlens=60, softmax_scale=1e-6, backend=backend)

    with hopper.on_cpu(Options(seed=5)), running(4):
        out = call("hopper").double().unflatten(-1, (4, 128))
        exact = call("cpu").double().unflatten(-1, (4, 128))
        error, most = ((x**2).sum((0, 1, 2, 4)) for x in (out - exact, exact))
        assert (error <= 1e-4 * most).all()
        rows[1, 59, 0, 300] = 0xFF
        out = call("hopper")
        assert out[0].isfinite().all() and out[1].isnan().all()


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_who_folds_two_states_does_not_show(seed: int) -> None:
    """Two programs that wait for each other finish a piece each of a half, else one finishes all: the same bits."""
    call = build(case_of("pair", (200,), heads=48, page_size=64, sinks=True), torch.bfloat16)
    before, found = call.copies(), []
    for patience in (0, 10_000):
        with hopper.on_cpu(Options(seed=seed)), patient(patience), running(2):
            found.append([x.clone() for x in call.run("hopper")])
        judge_results(call, before, call.copies(), *found[-1])
    assert all(map(torch.equal, *found))
