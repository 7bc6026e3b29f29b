"""The case table against every backend on this machine's CPU: numbers where it runs, its declared reasons where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashtile
from flashtile.call.arguments import FLOAT8
from flashtile.call.backend import DIRECTIONS, FEATURES, Direction
from flashtile.call.problem import Problem, described
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
    alone = {"unaligned", "origins", "score_mod", "mask_mod", "operand_grad", "block_lists", "max_scores"}
    assert used == regular - alone, (
        "max_scores: tests/maxima.py; caches: tests/kvcache; origins: test_origins.py; functions, lists: tests/mods"
    )


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
    lacks = [cell.lower() for cell in rows["what of these it lacks"].strip("|").split(" | ")[1:]]
    for name, cell in zip(dispatch.NAMES, lacks, strict=True):
        declared = [dispatch.backend(name).capabilities(each) for each in DIRECTIONS]
        assert all(limit.label.lower() in cell for c in declared if c is not None for limit in c.limits)


def _problem(**values: Any) -> Problem:
    usual = {
        "device_type": "cuda",
        "compute_capability": (9, 0),
        "dtype": torch.float16,
        "head_dim": 64,
        "head_dim_v": 64,
    }
    return described(**usual | values)


_FLOAT8_CACHE = {"seqlen_k": 64, "cached": True, "kv_dtype": FLOAT8}


@pytest.mark.parametrize(
    ("backend", "direction", "values", "label"),
    [
        ("hopper", "forward", {"listed": (32, 128)}, "no multiples of 64"),
        ("hopper", "forward", {"listed": (128, 128), "head_dim": 320}, "block lists at head_dim past 256"),
        (
            "hopper",
            "backward",
            {"row_keys": True, "by_head": True, "num_heads_q": 4},
            "by head, of grouped",
        ),
        ("hopper", "backward", {"dropout_p": 0.1, "head_dim_v": 264}, "dropout at head_dim past 256"),
        (
            "hopper",
            "backward",
            {"deterministic": True, "listed": (128, 128)},
            "deterministic=True with interval masks, or with",
        ),
        ("hopper", "decode", {**_FLOAT8_CACHE, "head_dim": 63}, "float8 caches of odd widths"),
        ("portable", "backward", {"listed": (16, 24)}, "no multiples of 16"),
        ("portable", "decode", {**_FLOAT8_CACHE, "aligned": False}, "not aligned to 16 bytes"),
    ],
    ids=str,
)
def test_what_kernels_lack_of_their_features(
    backend: str, direction: Direction, values: dict[str, Any], label: str
) -> None:
    able = dispatch.backend(backend).capabilities(direction)
    assert able is not None
    (why,) = able.reasons(_problem(num_heads_kv=1, **{"num_heads_q": 1} | values))
    assert label in why
