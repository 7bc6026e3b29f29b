"""Batch-invariant calls of the Hopper backend in the emulator: random batches bitwise, on devices of any size."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import flashtile
from flashtile.backends.hopper import BACKEND
from flashtile.call.problem import Problem, described
from flashtile.core.masks import Band
from tests.backends.hopper.emulated import on_cpu
from tests.invariance import Layer, World, judge
from tests.slow import named, slow_but

SIZES: dict[str, Any] = {"heads": 4, "kv_heads": 1, "head_dim": 64, "dtype": torch.float16}
LAYERS = [
    Layer(**SIZES, page_size=16, appends=True, name="pages"),
    Layer(**SIZES, page_size=3, keywords={"window_size": (50, 0), "sinks": torch.rand(4)}, name="gathered_window"),
    Layer(**SIZES, page_size=64, float8=True, keywords={"softcap": 4.0}, name="float8"),
    Layer(**SIZES, keywords={"alibi_slopes": torch.rand(4)}, name="alibi"),
    Layer(heads=6, kv_heads=2, head_dim=128, dtype=torch.float16, page_size=32, name="groups_of_3"),
    Layer(heads=2, kv_heads=2, head_dim=256, dtype=torch.float16, name="wide"),
    Layer(heads=16, kv_heads=1, dtype=torch.bfloat16, page_size=64, latent=True, name="latent"),
    Layer(**SIZES, cached=False, name="packed"),
    Layer(
        **SIZES, cached=False, keywords={"window_size": (50, 0), "alibi_slopes": torch.rand(4)}, name="packed_window"
    ),
    Layer(heads=2, kv_heads=1, head_dim=272, dtype=torch.float16, cached=False, name="packed_wide"),
]


# A prompt at once and in chunks, with decodes and drafts beside it, which are another's chunks too.
STEPS = [
    [(0, 0, 140)], [(1, 39, 40), (0, 70, 140)], [(0, 0, 70), (1, 38, 40), (2, 30, 70)],
    [(2, 0, 70), (0, 139, 140), (1, 39, 40)],
]  # fmt: skip


@pytest.mark.one_in(6)
@pytest.mark.parametrize("invariant", [True, "strict"])
@pytest.mark.parametrize("layer", slow_but(LAYERS, named("pages", "alibi", "float8")), ids=str)
def test_steps(layer: Layer, invariant: Any) -> None:
    if layer.float8 and invariant is True:
        invariant = "strict"  # the emulator has no unsigned numbers, which few rows' kernel decodes 8 bits by
    world = World(layer, 0, [140, 40, 70])
    for seed, parts in enumerate(STEPS):
        with on_cpu(seed=seed, num_sms=2 + 3 * seed):
            world.check(parts, invariant, "hopper", by_kind=invariant is True and layer.cached)
    assert world.compared > 180 and world.different == 0


@pytest.mark.slow
@pytest.mark.parametrize("layer", [x for x in LAYERS if not x.float8], ids=str)
def test_random_batches(layer: Layer) -> None:
    compared = different = 0
    for seed, invariant in enumerate((True, "strict")):
        with on_cpu(seed=seed, num_sms=2 + 5 * seed):
            by_kind = invariant is True and layer.cached
            found = judge(layer, seed, "hopper", longest=150, by_kind=by_kind, invariant=invariant)
        compared, different = compared + found[0], different + found[1]
    assert compared > 100 and different == 0


def test_unasked_they_differ() -> None:
    """Decodes alone, and beside a prompt."""
    world = World(LAYERS[0], 0, [140, 150, 90])
    with on_cpu(num_sms=3):
        for parts in ([(0, 139, 140)], [(0, 139, 140), (1, 0, 150)], [(2, 80, 90), (0, 138, 140)]):
            world.check(parts, False, "hopper", by_kind=False)
    assert world.compared == 2 and world.different > 0


def test_a_device_does_not_matter() -> None:
    world = World(LAYERS[0], 1, [400, 50, 333])
    for num_sms in (1, 3, 11):
        with on_cpu(num_sms=num_sms):
            world.check([(0, 397, 400), (1, 0, 50), (2, 332, 333)], True, "hopper", by_kind=True)
    assert world.compared == 2 * 54 and world.different == 0


@pytest.mark.slow
def test_more_states_than_others_have() -> None:
    """266 splits of one tile, which programs store, count and fold."""
    layer = Layer(heads=1, kv_heads=1, head_dim=16, dtype=torch.float16, keywords={"window_size": (2**15, 0)})
    world, found = World(layer, 0, [17_000]), []
    for num_sms in (400, 2):
        with on_cpu(num_sms=num_sms):
            found += world.call([(0, 16_999, 17_000)], True, "hopper")
    assert all(map(torch.equal, *found))
    found += world.call([(0, 16_999, 17_000)], True, "cpu")
    for mine, want in zip(*found[1:], strict=True):
        torch.testing.assert_close(mine, want, atol=1e-3, rtol=1e-3)


def _chosen(**values: Any) -> str:
    common: dict[str, Any] = {
        "device_type": "cuda", "compute_capability": (9, 0), "dtype": torch.bfloat16, "head_dim": 128, "cached": True,
        "head_dim_v": 128, "num_heads_q": 32, "num_heads_kv": 8, "batch": 64, "seqlen_k": 8192, "varlen": True,
        "band": Band(None, 0), "batch_invariant": "by kind",
    }  # fmt: skip
    problem: Problem = described(**common | values)
    return BACKEND.kernel("decode", problem).name


def test_kernels_are_chosen_by_kinds() -> None:
    for rows, strict, asked, unasked in (
        (1, "prompts", "decode", "decode"),
        (4, "prompts", "decode", "decode"),
        (5, "prompts", "prompts", "wide groups"),
        (2048, "prompts", "prompts", "prompts"),
    ):
        assert _chosen(seqlen_q=rows, batch_invariant="strict") == strict
        assert _chosen(seqlen_q=rows) == asked
        assert _chosen(seqlen_q=rows, batch_invariant="") == unasked
    latent: dict[str, Any] = {"qv": True, "head_dim": 64, "head_dim_v": 512, "num_heads_q": 128, "num_heads_kv": 1}
    assert _chosen(seqlen_q=1, batch_invariant="", **latent) == "latent rows"
    assert _chosen(seqlen_q=1, **latent) == _chosen(seqlen_q=9, **latent) == "decode"
    both_ways: dict[str, Any] = {"alibi": True, "band": Band(), "seqlen_q": 99}
    assert _chosen(batch_invariant="", **both_ways) == "prompts" and _chosen(**both_ways) == "decode"


def test_explain_says_how_rows_are_divided() -> None:
    said = BACKEND.describe(
        described(
            device_type="cuda", compute_capability=(9, 0), dtype=torch.bfloat16, head_dim=128, head_dim_v=128,
            cached=True, num_heads_q=32, num_heads_kv=8, seqlen_q=700, seqlen_k=4096, varlen=True,
            band=Band(None, 0), batch_invariant="by kind",
        ), "decode",
    )  # fmt: skip
    assert said.endswith("; up to 16 rows in Triton, splits merged")
    with on_cpu(num_sms=3):
        bounds = torch.tensor([0, 70], dtype=torch.int32)
        q = torch.randn(70, 2, 64, dtype=torch.float16)
        packed: dict[str, Any] = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "backend": "hopper"}
        assert "  batch-invariant, strictly, without being asked" in flashtile.explain(q, q, q, **packed).splitlines()
        cache = random.Random(0).choice([torch.randn(1, 70, 2, 64, dtype=torch.float16)])
        over: dict[str, Any] = {"k_cache": cache, "v_cache": cache, "cache_seqlens": 9, "backend": "hopper"}
        said = flashtile.explain(q, **over, cu_seqlens_q=bounds, batch_invariant=True)
        assert "  batch-invariant, rows of few queries and of many by themselves" in said.splitlines()
