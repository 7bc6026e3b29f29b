"""Batch-invariant calls of the portable kernels: random batches bitwise, splits at fixed keys, and their memory."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from flashtile.backends.gpu.decode.config import FIXED_KEYS, choose, has_many, most_few
from flashtile.backends.gpu.decode.launch import WorkLimits, attend
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Problem, described
from flashtile.core.masks import Band
from tests.invariance import Layer, World, judge
from tests.slow import named, slow_but


@pytest.fixture
def same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products whose rounding does not depend on a row's place, as on GPUs; NumPy's may."""

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        total = d.data.copy()
        wide = [x.data.astype(total.dtype) for x in (a, b)]
        for k in range(wide[0].shape[-1]):
            total = total + wide[0][:, k, np.newaxis] * wide[1][k]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


SIZES: dict[str, Any] = {"heads": 4, "kv_heads": 1, "head_dim": 16, "dtype": torch.float16}
LAYERS = [
    Layer(**SIZES, page_size=16, appends=True, name="pages"),
    Layer(**SIZES, keywords={"window_size": (21, 0), "sinks": torch.rand(4)}, name="window"),
    Layer(**SIZES, page_size=3, float8=True, keywords={"alibi_slopes": torch.rand(4)}, name="float8"),
    Layer(**SIZES, cached=False, keywords={"softcap": 4.0}, name="packed"),
]


@pytest.mark.parametrize("layer", slow_but(LAYERS, named("pages")), ids=str)
@pytest.mark.usefixtures("same_everywhere")
def test_random_batches(layer: Layer) -> None:
    counts = [judge(layer, seed, "portable", longest=24, by_kind=layer.cached) for seed in range(1 + layer.cached)]
    assert sum(compared for compared, _ in counts) > 20 and not any(different for _, different in counts)


@pytest.mark.usefixtures("same_everywhere")
def test_strict_calls_have_one_kind_of_rows() -> None:
    compared, different = judge(LAYERS[0], 3, "portable", longest=20, by_kind=False, invariant="strict")
    assert compared > 20 and different == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("window", [None, 120])
@pytest.mark.usefixtures("same_everywhere")
def test_decodes_and_drafts_over_many_splits(window: int | None) -> None:
    """As single rows, and beside rows and keys that come later: as by the rule they do not."""
    layer = Layer(**SIZES, page_size=16, keywords={} if window is None else {"window_size": (window, 0)})
    different = {}
    for invariant in (True, False):
        world = World(layer, 0, [390, 40, 300])
        for parts in ([(0, 383, 384)], [(0, 382, 386), (1, 39, 40)], [(0, 384, 385), (1, 0, 30), (2, 299, 300)]):
            world.check(parts, invariant, "portable", by_kind=True)
        different[invariant] = world.different
    assert different[True] == 0 and different[False] > 0
    ours, cpu = (world.call([(0, 386, 390)], True, name)[0] for name in ("portable", "cpu"))
    torch.testing.assert_close(ours[0], cpu[0], atol=2e-3, rtol=2e-3)


def _problem(**values: Any) -> Problem:
    common: dict[str, Any] = {
        "device_type": "cuda", "compute_capability": (9, 0), "dtype": torch.bfloat16, "head_dim": 128, "cached": True,
        "head_dim_v": 128, "num_heads_q": 32, "num_heads_kv": 8, "batch": 64, "seqlen_k": 8192, "varlen": True,
        "batch_invariant": "by kind",
    }  # fmt: skip
    return described(**common | values)


def test_tiles_are_the_layers() -> None:
    """Whatever the lengths, the batch, and whether queries are packed."""
    for heads, dim in itertools.product((8, 32, 256), (64, 128, 256, 512)):
        found: dict[bool, set[object]] = {True: set(), False: set()}
        for rows, keys, batch, varlen in itertools.product((1, 5, 700), (9, 70_000), (1, 900), (True, False)):
            one = _problem(seqlen_q=rows, seqlen_k=keys, batch=batch, varlen=varlen, num_heads_q=heads, head_dim=dim)
            found[has_many(one)].add(choose(one))
            found[False].add(choose(one, few=True))
        assert len(found[True]) == len(found[False]) == 1
        few = found[False].pop()
        assert few.splitting.fixed == FIXED_KEYS and FIXED_KEYS % few.block_n == 0
        assert found[True].pop().splitting.bound(2**22, 1, 1, 8) == 1


def test_splits_fit_their_memory() -> None:
    """However they are stored; a window's are counted from where it begins; a counter counts all there may be."""
    for rows, capacity, left in itertools.product((1, 4, 2048), (100, 8192, 2**17, 2**22), (None, 127, 5000)):
        p = _problem(seqlen_q=rows, seqlen_k=capacity, band=Band(left, 0))
        q = torch.empty(64 * rows, 32, 128, device="meta")
        tiles = choose(p, few=True)
        bounds = WorkLimits(p, CacheTensors(q, q, q, q, q), tiles)
        own = min(rows * 4, most_few(p))
        fixed, run = tiles.splitting.fixed, tiles.splitting.run
        for high in {0, 1, capacity // 2, capacity - 1, capacity}:
            low = 0 if left is None else max(high - max(own // 4, 1) - left, 0)
            splits = max(-(-(high - low // (run * fixed) * run * fixed) // fixed), 1) if low < high else 1
            assert splits <= tiles.bound_of_fixed(p)
            most = bounds.most_states
            states = splits if most is not None and splits <= most else -(-splits // run)
            assert states < 2**15
            assert states == 1 or 64 * 8 * own * states <= bounds.slots


def test_packed_calls_have_a_launch_for_each_kind() -> None:
    q, caches = torch.empty(70, 8, 16), torch.empty(4, 64, 2, 16)
    lengths = torch.zeros(4, dtype=torch.int32)
    t = CacheTensors(q, q, caches, caches, lengths, cu_seqlens_q=torch.zeros(5, dtype=torch.int32))
    p = _problem(device_type="cpu", compute_capability=None, dtype=torch.float32, head_dim=16, head_dim_v=16,
                 num_heads_q=8, num_heads_kv=2, batch=4, seqlen_k=64, seqlen_q=50)  # fmt: skip

    def bounds_of(problem: Problem) -> list[tuple[int, int, int]]:
        calls = [each.launch.arguments["call"].schedule for each in attend(problem, t)]
        return [(x.fewest_rows, x.most_rows, x.above_keys) for x in calls]

    assert bounds_of(p) == [(17, 2**30, -1), (0, 16, -1)]
    # Then rows past the last sequence, however many, are of the one launch.
    assert bounds_of(p.but(seqlen_q=4)) == [(0, 2**30, -1)]
    assert bounds_of(p.but(batch_invariant="strict")) == [(1, 2**30, -1)]
    assert bounds_of(p.but(batch_invariant="")) == [(None, 2**30, -1)]
