"""The kernels of cached calls as compiled for two architectures, against the oracle: splits, pages and appending."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from flashtile.backends.decode import config
from flashtile.backends.decode.config import Config, Splitting
from tests.kvcache.cases import CacheCase, build, judge
from tests.ptx import portable
from tests.ptx.machine import Options
from tests.slow import slow_but

CASES = (
    CacheCase("splits", ((150, 1, 0), (0, 1, 0), (33, 1, 0)), heads=8, kv_heads=2, head_dim=64, page_size=16),
    CacheCase("append", ((70, 2, 2), (0, 2, 2)), heads=2, kv_heads=1, head_dim=64, appends=True, rotary=32,
              window=(50, 0), sinks=True),
    CacheCase("float8", ((90, 1, 1), (31, 1, 1)), heads=4, kv_heads=1, head_dim=64, appends=True, float8="eh",
              page_size=16),
)  # fmt: skip


# Small ones, so that few keys are many splits, which several programs share.
TILES = Config(16, 32, 4, 3, programs_per_sm=2, splitting=Splitting(programs=8, fewest_keys=32, most_keys=64))


@pytest.mark.parametrize(
    ("case", "arch"),
    slow_but(
        [(case, arch) for case in CASES for arch in ("sm_90", "sm_80")],
        lambda each: (each[0].name, each[1]) in (("splits", "sm_80"), ("append", "sm_90")),
    ),
    ids=str,
)
def test_compiled_kernels_under_the_rule(case: CacheCase, arch: str) -> None:
    with portable.on_cpu(Options(seed=len(case.name)), arch), mock.patch.object(config, "_override", [TILES]):
        judge(build(case, torch.bfloat16), "portable")
