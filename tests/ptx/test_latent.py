"""The kernel over latent rows as compiled, against the oracle: divided tiles, small pages, appending, two lanes."""

from __future__ import annotations

import pytest
import torch

from tests.backends.hopper.test_latent import case_of, running
from tests.kvcache.cases import CacheCase, build, judge
from tests.ptx import hopper
from tests.ptx.machine import Options
from tests.slow import slow_but

CASES = (
    case_of("steps", (300, 65), 2, heads=40, sinks=True),
    case_of("small_pages", (200, 0), page_size=16),
    CacheCase("append", ((130, 2, 2), (0, 2, 2), (63, 2, 2)), appends=True, rotary=64, heads=16, kv_heads=1,
              head_dim=64, head_dim_v=512, qv=True, layout="stacked", page_size=16),
    case_of("two_lanes", (333, 70), heads=128),
)  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", slow_but((torch.bfloat16, torch.float16), lambda dtype: dtype == torch.bfloat16))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases_under_the_rule(case: CacheCase, dtype: torch.dtype) -> None:
    with hopper.on_cpu(Options(seed=len(case.name))), running(4):
        judge(build(case, dtype), "hopper")
