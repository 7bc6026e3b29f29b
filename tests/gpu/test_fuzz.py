"""On a GPU: random calls of every kind and size by every backend, against the rules of the case tables.

``python -m tests.fuzz numbers --device cuda --backend portable --seed 1000 --count 500`` draws others.
"""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile.backends.hopper.backward import config
from tests.cases import build, judge
from tests.fuzz.drawn import KINDS, LONG, SMALL, Kind, Sizes, draw_for_pairs
from tests.fuzz.functions import fuzz as judge_functions
from tests.fuzz.judged import fuzz
from tests.fuzz.selected import KINDS as KINDS_OF_LISTS
from tests.fuzz.selected import Kind as KindOfLists
from tests.fuzz.selected import fuzz as judge_selected
from tests.second import drawn_call, judge_second

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BACKENDS = [name for name in flashtile.backends() if name != "cpu"]
# Of each kind and size: so many shards of so many calls, most of which compile kernels of their own.
SHARDS, CALLS = 12, 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_tiles_of_two_widths(backend: str) -> None:
    """A call over a cache with head_dim 33 and 16 of values, which was wrong as compiled for sm_90."""
    assert not fuzz(backend, 6002, 1, print, "cached", "cuda", SMALL)


@pytest.mark.skipif("hopper" not in BACKENDS, reason="needs the hopper backend")
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_backwards_by_pairs(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = {192: config.PAIRS_192, 256: config.PAIRS_256}
    monkeypatch.setattr(config, "choose", lambda problem: tiles[192 if problem.head_dim <= 192 else 256])
    for seed in range(25 * shard, 25 * shard + 25):
        case, dtype = draw_for_pairs(seed, 1300)
        judge(build(case, dtype, "cuda", seed), "hopper")


@pytest.mark.parametrize("seed", range(100))
def test_random_second_derivatives(seed: int) -> None:
    judge_second(drawn_call(seed, Sizes(700, 2**21), "cuda"), ("portable", None)[seed % 2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_functions(shard: int, backend: str) -> None:
    assert not judge_functions(backend, CALLS * shard, CALLS, print, "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS_OF_LISTS)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_keys_and_blocks_that_queries_name(shard: int, kind: KindOfLists, backend: str) -> None:
    assert not judge_selected(backend, CALLS * shard, CALLS, print, kind, "cuda", Sizes(700, 2**22))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", sorted(set(KINDS)))
@pytest.mark.parametrize("sizes", [SMALL, LONG], ids=["small", "long"])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_calls(shard: int, sizes: Sizes, kind: Kind, backend: str) -> None:
    assert not fuzz(backend, CALLS * shard, CALLS, print, kind, "cuda", sizes)
