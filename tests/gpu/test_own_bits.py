"""Batch-invariant calls on a GPU (``pytest -m gpu``): 300 random batches of each kind of call, bitwise.

Each sequence alone; all in one call, shuffled; with strangers; in chunks. ``judge`` says which rows are compared.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashtile
from flashtile import UnsupportedError
from tests.invariance import Layer, World, judge

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
LLAMA: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16}
SMALL: dict[str, Any] = {"heads": 8, "kv_heads": 1, "head_dim": 64, "dtype": torch.float16}


def layers() -> list[Layer]:
    """What batches are of; tensors on the GPU are made when a test runs."""
    on_gpu = DEVICE if torch.cuda.is_available() else "cpu"
    sinks, slopes = torch.randn(8, device=on_gpu), torch.rand(8, device=on_gpu)
    return [
        Layer(**LLAMA, name="entries"),
        Layer(**LLAMA, page_size=16, appends=True, name="pages"),
        Layer(**LLAMA, page_size=1, name="pages_of_1"),
        Layer(**SMALL, page_size=64, keywords={"window_size": (300, 0), "sinks": sinks}, name="window_sinks"),
        Layer(**SMALL, page_size=16, keywords={"alibi_slopes": slopes, "softcap": 20.0}, name="alibi_softcap"),
        Layer(**LLAMA, page_size=16, float8=True, name="float8"),
        Layer(heads=4, kv_heads=2, head_dim=256, dtype=torch.bfloat16, page_size=32, name="wide"),
        Layer(heads=16, kv_heads=1, dtype=torch.bfloat16, page_size=64, latent=True, name="latent"),
        Layer(heads=4, kv_heads=2, head_dim=64, dtype=torch.float32, page_size=16, name="float32"),
        Layer(**LLAMA, cached=False, name="packed"),
        Layer(**SMALL, cached=False, keywords={"window_size": (300, 0), "softcap": 20.0}, name="packed_window"),
        Layer(**SMALL, cached=False, keywords={"alibi_slopes": slopes, "sinks": sinks}, name="packed_alibi"),
    ]


LAYERS = layers()
BACKENDS = [None, "portable"]
# Of each layer by each backend: 12 layers, 300 batches in all of each kind of call.
COUNT = 25


@pytest.mark.parametrize("invariant", [True, "strict"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_random_batches(layer: Layer, backend: str | None, invariant: Any) -> None:
    compared = different = 0
    by_kind = invariant is True and layer.cached
    for seed in range(COUNT):
        # Every fifth batch has sequences of many splits.
        longest = 9000 if seed % 5 == 4 else 1200
        found = judge(layer, seed, backend, longest=longest, device=DEVICE, by_kind=by_kind, invariant=invariant)
        compared, different = compared + found[0], different + found[1]
    assert compared > 10_000 and different == 0, f"{different} of {compared} rows differ"


@pytest.mark.parametrize("layer", LAYERS[:9:3], ids=str)
def test_unasked_they_differ(layer: Layer) -> None:
    found = [judge(layer, seed, None, longest=1200, device=DEVICE, by_kind=False, invariant=False) for seed in range(5)]
    assert sum(different for _, different in found) > 0


@pytest.mark.parametrize("invariant", [True, "strict"])
def test_very_long_sequences(invariant: Any) -> None:
    """More states than a rule's counters count, alone and beside a prompt."""
    world = World(Layer(**LLAMA, page_size=64), 0, [270_000, 500, 3000], DEVICE)
    for parts in ([(0, 269_999, 270_000)], [(1, 0, 500), (0, 269_998, 270_000), (2, 2999, 3000)]):
        world.check(parts, invariant, None, by_kind=invariant is True)
    assert world.compared == 1 and world.different == 0


def test_graphs_replay_the_same_bits() -> None:
    """A decode's graph has the bits of the call, whatever lengths it is replayed with."""
    world = World(Layer(**LLAMA, page_size=16), 3, [3000, 700, 90], DEVICE)
    want = world.call([(b, n - 1, n) for b, n in enumerate(world.lengths)], True, None, dense=True)
    q = torch.stack([world.q[b][-1:] for b in range(3)])
    table = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(x, dtype=torch.int32) for x in world.places], batch_first=True
    )
    given: dict[str, Any] = {"page_table": table.cuda(), "batch_invariant": True}
    lengths = torch.tensor([3000, 9, 9], dtype=torch.int32, device=DEVICE)
    flashtile.attention_with_kvcache(q, *world.caches, cache_seqlens=lengths, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashtile.attention_with_kvcache(q, *world.caches, cache_seqlens=lengths, **given)
    for some in ([3000, 9, 700], world.lengths):
        lengths.copy_(torch.tensor(some, dtype=torch.int32))
        graph.replay()
    assert all(torch.equal(out[b], want[b][0]) for b in range(3))


def test_scales_by_page_are_refused() -> None:
    cache = torch.zeros(4, 16, 2, 64, device=DEVICE).to(torch.float8_e4m3fn)
    scales, table = torch.ones(4, 2, device=DEVICE), torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    q = torch.randn(1, 1, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(UnsupportedError, match="no batch_invariant=True with scales by page"):
        flashtile.attention_with_kvcache(
            q, cache, cache, cache_seqlens=9, page_table=table, k_scale=scales, v_scale=scales, batch_invariant=True
        )
