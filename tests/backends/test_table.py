"""The case table against every backend on this machine's CPU: numbers where it runs, its declared reasons where not."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile.call.backend import DIRECTIONS, FEATURES
from flashtile.ops import dispatch
from tests.cases import CASES, build, judge


@pytest.mark.parametrize("backend", [name for name in flashtile.backends() if name != "cpu"])
def test_gpu_backends_refuse_cpu_tensors(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    judge(build(CASES[0], torch.float32), backend)


def test_the_table_uses_every_feature() -> None:
    problems = [build(case, torch.float32).problem for case in CASES]
    used = {f.name for f in FEATURES if any(f.used(p) for p in problems)}
    regular = {f.name for f in FEATURES if "forward" in f.directions}
    alone = {"unaligned", "origins", "score_mod", "mask_mod", "big_functions", "operand_grad", "block_lists"}
    alone |= {"odd_block_lists", "fine_block_lists", "big_block_lists"}
    assert used == regular - alone, "caches: tests/kvcache; origins: test_origins.py; functions, lists: tests/mods"


def test_capabilities_name_features_that_exist() -> None:
    declared = [dispatch.backend(name).capabilities(each) for name in dispatch.NAMES for each in DIRECTIONS]
    assert all(c is None or c.features <= {f.name for f in FEATURES} for c in declared)


def test_the_support_table_says_what_is_declared() -> None:
    rows = {row.split(" | ")[0].strip("| "): row for row in flashtile.support_table().splitlines()}
    for feature in FEATURES:
        cells = [cell.strip() for cell in rows[feature.label].strip("|").split("|")][1:]
        for name, cell in zip(dispatch.NAMES, cells, strict=True):
            declared = [dispatch.backend(name).capabilities(each) for each in feature.directions]
            assert (cell == "no") == (not any(c is not None and feature.name in c.features for c in declared))
