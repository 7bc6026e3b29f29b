"""Prompts over pages that threads copy, on the Hopper forward as compiled: against the oracle, and what orders them."""

from __future__ import annotations

import pytest
import torch

from flashtile.backends.hopper.forward import config as tiles
from tests.kvcache.cases import CacheCase, build, judge
from tests.ptx import hopper
from tests.ptx.launch import Kernels, edited
from tests.ptx.machine import Options
from tests.ptx.text import PtxError
from tests.slow import slow_but

ONES = CacheCase("pages_of_1", ((200, 70, 0), (5, 70, 0), (0, 70, 0)), heads=4, kv_heads=2, head_dim=64, page_size=1)
CASES = (
    ONES,
    CacheCase("pages_of_20", ((130, 90, 0), (60, 3, 0)), packed=True, heads=2, kv_heads=1, head_dim=128, page_size=20,
              window=(50, 3), layout="between"),
    CacheCase("pages_of_48", ((130, 65, 0),), heads=4, kv_heads=1, head_dim=88, page_size=48, softcap=5.0, sinks=True),
    CacheCase("wide", ((70, 140, 0),), heads=1, kv_heads=1, head_dim=256, page_size=3),
)  # fmt: skip
RUNS = slow_but([(case, warps) for case in CASES for warps in (2, 4)], lambda each: each == (ONES, 2))


@pytest.mark.long
@pytest.mark.parametrize(("case", "warps"), RUNS, ids=str)
def test_copied_pages_under_the_rule(case: CacheCase, warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_GATHERING", dict.fromkeys((2, 4), tiles._GATHERING[warps]))
    with hopper.on_cpu(Options(seed=warps, product_at_wait=True, strict_fences=True)):
        judge(build(case, torch.bfloat16), "hopper")


# A fence, where a product follows before the next wait; an arrival behind copies.
FENCE = r"fence\.proxy\.async\.shared::cta;(?=((?!try_wait|fence\.proxy)[\s\S])*wgmma\.mma_async)"
ARRIVAL = r"cp\.async\.mbarrier\.arrive\.noinc\.shared\.b64\s+(\[[^]]*\]);"
TAKEN_OUT = (
    (FENCE, "", "a product of .* reads .* without a proxy fence after the write of a copy"),
    (ARRIVAL, "", "deadlock"),
    (ARRIVAL, r"mbarrier.arrive.shared::cta.b64 _, \1;", "nothing orders that after the write of a copy"),
)


@pytest.mark.long
@pytest.mark.parametrize(("pattern", "replacement", "message"), slow_but(TAKEN_OUT, TAKEN_OUT[:1].__contains__))
def test_what_is_taken_out_is_missed(
    monkeypatch: pytest.MonkeyPatch, pattern: str, replacement: str, message: str
) -> None:
    monkeypatch.setattr(Kernels, "build", edited("attention_forward", pattern, replacement, 1))
    with hopper.on_cpu(Options(strict_fences=True)), pytest.raises((PtxError, RuntimeError), match=message):
        build(ONES, torch.bfloat16).run("hopper")
