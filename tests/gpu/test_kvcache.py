"""Cached calls on a GPU (``pytest -m gpu``): the table, and what only a device can show."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.call.cached_arguments import FLOAT8
from flashtile.core import states
from flashtile.ops import dispatch
from flashtile.serving import tree_words
from tests import trees
from tests.kvcache.alone import invariance_cases, judge_alone
from tests.kvcache.cases import CASES, EIGHT_BIT_ROWS, CacheCase, build, judge, latent_case
from tests.kvcache.functions import HUGE, huge_error
from tests.kvcache.selected import judge_selected
from tests.kvcache.test_trees import CHAINS, assert_chains_are_causal
from tests.maxima import judge_cached_maxima
from tests.poison import poisoned_memory
from tests.rule import assert_close

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
BACKENDS = [name for name in flashtile.backends() if name != "cpu"]
SHORT = (torch.float16, torch.bfloat16)
DTYPES = (*SHORT, torch.float32)


def _id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _same(*lengths: int, rows: int = 1, new: int = 0) -> tuple[tuple[int, int, int], ...]:
    return tuple((length, rows, new) for length in lengths)


_LLAMA: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}
LARGE = (
    CacheCase("large", _same(5000, 777, 0, 8192), **_LLAMA),
    CacheCase("large_steps", _same(3000, 4096, 65, rows=4), **_LLAMA, sinks=True),
    CacheCase("large_pages", _same(3000, 16, 1025), **_LLAMA, page_size=16),
    CacheCase("large_pages_of_1", _same(1500, 1, 700), **_LLAMA, page_size=1),
    CacheCase("large_pages_of_7", _same(1500, 6, 700, rows=2), **_LLAMA, page_size=7, window=(900, 0)),
    CacheCase("large_append", _same(2047, 0, 64, new=1), **_LLAMA, appends=True, rotary=128, page_size=64),
    CacheCase("large_chunk", _same(900, 0, rows=300, new=300), heads=8, kv_heads=2, head_dim=128, appends=True,
              rotary=128, page_size=16),
    # Prompts over pages that TMA has no boxes for.
    CacheCase("large_copied", _same(2900, 0, 300, rows=300), **_LLAMA, page_size=1),
    CacheCase("large_copied_64", ((1500, 600, 0), (0, 70, 0), (300, 1, 0)), heads=64, kv_heads=8, head_dim=64,
              packed=True, page_size=2, spare=7),
    CacheCase("large_copied_96", _same(1200, 5, rows=260, new=260), heads=8, kv_heads=2, head_dim=96, page_size=48,
              window=(300, 0), appends=True, alibi="h", sinks=True),
    CacheCase("large_copied_256", _same(700, 130, rows=200), heads=16, kv_heads=8, head_dim=256, page_size=20,
              softcap=20.0, layout="between"),
    CacheCase("large_float8", _same(4000, 129), **_LLAMA, float8="h", page_size=16),
    CacheCase("large_float8_pages", _same(2000, 300, rows=2, new=2), **_LLAMA, float8="eh", page_size=32, appends=True),
    CacheCase("large_float8_chunk", _same(900, 0, rows=300, new=300), heads=8, kv_heads=2, head_dim=128, appends=True,
              rotary=128, page_size=64, float8="h"),
    CacheCase("large_float8_packed", ((2500, 1, 1), (0, 257, 257), (1000, 64, 64), (31, 1, 1), (0, 0, 0)), heads=8,
              kv_heads=2, head_dim=64, packed=True, appends=True, page_size=16, float8="eh", spare=7, sinks=True),
    CacheCase("large_float8_window", _same(2000, 513, rows=200), heads=8, kv_heads=4, head_dim=192, page_size=256,
              float8="eh", causal=False, window=(700, 5)),
    CacheCase("large_float8_256", _same(1500, 129, rows=150), heads=4, kv_heads=2, head_dim=256, float8="eh",
              entries=True, softcap=20.0),
    CacheCase("large_64", _same(4096, 999), heads=64, kv_heads=8, head_dim=64, layout="heads_first_stacked",
              page_size=16),
    CacheCase("large_71", _same(4096, 30), heads=71, kv_heads=1, head_dim=128),
    CacheCase("large_71_steps", _same(2000, 30, rows=5), heads=71, kv_heads=1, head_dim=64, softcap=20.0),
    CacheCase("large_256", _same(3000, 257), heads=16, kv_heads=8, head_dim=256, alibi="h"),
    CacheCase("large_192_128", _same(2000, 64), heads=16, kv_heads=16, head_dim=192, head_dim_v=128),
    CacheCase("large_80", _same(2000, 64, rows=3), heads=8, kv_heads=8, head_dim=80, leftpad=(1111, 5)),
    CacheCase("large_many", _same(*range(0, 600, 10)), heads=8, kv_heads=2, head_dim=64, page_size=16),
    CacheCase("large_packed", ((2500, 1, 1), (0, 257, 257), (1000, 64, 64), (31, 1, 1), (0, 0, 0)), heads=8,
              kv_heads=2, head_dim=128, packed=True, appends=True, rotary=64, page_size=16, spare=7),
    CacheCase("large_tree", _same(3000, 4096, 65, 0, rows=13), **_LLAMA, page_size=16, tree="random", words=True),
    CacheCase("large_tree_64", _same(2500, 700, rows=64, new=64), **_LLAMA, page_size=64, appends=True, rotary=128,
              tree="shuffled"),
    CacheCase("large_tree_window", _same(2500, 7000, rows=30), **_LLAMA, tree="forest", window=(1000, 0), alibi="h"),
    CacheCase("large_tree_256", _same(2500, 70, rows=8), heads=16, kv_heads=8, head_dim=256, tree="binary", sinks=True),
    CacheCase("large_tree_71", _same(2500, 70, rows=9), heads=71, kv_heads=1, head_dim=64, tree="random"),
    CacheCase("large_tree_float8", _same(2500, 70, rows=9, new=9), **_LLAMA, page_size=32, float8="eh", appends=True,
              tree="random", rotary=128),
    CacheCase("large_tree_packed", ((2500, 9, 9), (10, 700, 700), (9000, 1, 1), (64, 13, 13)), **_LLAMA, packed=True,
              appends=True, rotary=128, page_size=16, tree="random", tree_rows=13, spare=5),
)  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=_id)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_small(case: CacheCase, dtype: torch.dtype, backend: str) -> None:
    judge(build(case, dtype, DEVICE), backend)


LARGE_ROWS = (
    *EIGHT_BIT_ROWS,
    latent_case("large", (5000, 777, 0, 8192), page_size=64, float8="rows", layout="apart"),
    latent_case("large_two_tiles", (5000, 777), 2, heads=128, page_size=16, float8="rows", layout="apart", sinks=True),
    latent_case("large_entries", (3000, 64, 4097), heads=40, float8="rows", layout="apart"),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=_id)
@pytest.mark.parametrize("value", HUGE)
def test_scores_as_huge_as_float32_has_them(value: float, dtype: torch.dtype) -> None:
    for page_size, packed, sinks in ((0, False, False), (16, False, True), (8, True, False)):
        options: dict[str, Any] = {"page_size": page_size, "packed": packed, "sinks": sinks}
        error = huge_error(value, "portable", **options, dtype=dtype, device=DEVICE)
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", LARGE_ROWS, ids=str)
def test_rows_of_656_bytes(case: CacheCase, backend: str) -> None:
    judge(build(case, torch.bfloat16, DEVICE), backend)


@pytest.mark.parametrize("float8", [False, True], ids=("16", "656"))
@pytest.mark.parametrize("batch", [64, 1024])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_selected_tokens(heads: int, batch: int, float8: bool, backend: str) -> None:
    judge_selected(batch, heads, 2048, backend, DEVICE, float8=float8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", SHORT, ids=_id)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case: CacheCase, dtype: torch.dtype, backend: str) -> None:
    judge(build(case, dtype, DEVICE), backend)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """A backend that runs on this device at all."""
    name: str = request.param
    if dispatch.reasons(name, build(CASES[0], torch.bfloat16, DEVICE).problem, "decode"):
        pytest.skip(f"{name} does not run on this device")
    return name


# On both sides of what may end a block of keys or a split.
BOUNDARIES = tuple(sorted({0, 1, 3, *(n * m + d for n in (16, 64, 128, 1024, 2048) for m in (1, 2) for d in (-1, 0, 1)),
                           3000, 6143, 6145, 8191, 8193}))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=_id)
@pytest.mark.parametrize("case", invariance_cases(tuple(random.Random(0).sample(BOUNDARIES, len(BOUNDARIES)))), ids=str)
def test_a_sequence_gives_the_same_bits_in_any_batch(case: CacheCase, dtype: torch.dtype, backend: str) -> None:
    if dispatch.reasons(backend, build(case, dtype, DEVICE).problem, "decode"):
        pytest.skip(f"{backend} declares that it cannot")
    judge_alone(case, dtype, backend, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=_id)
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_a_causal_call(name: str, dtype: torch.dtype) -> None:
    """On one backend: Hopper's own kernels, whose sums are in another order, take no trees."""
    assert_chains_are_causal(name, dtype, "portable", DEVICE)


@pytest.mark.parametrize("heads", [(32, 8, 128), (71, 1, 64), (16, 8, 256)], ids=str)
def test_real_heads_give_the_same_bits_in_any_batch(heads: tuple[int, int, int], backend: str) -> None:
    lengths = (8193, 64, 0, 4096, 65, 2049, 1, 8192, 127)
    shape = dict(zip(("heads", "kv_heads", "head_dim"), heads, strict=True))
    for case in invariance_cases(lengths):
        if case.name in ("dense", "steps", "pages", "float8", "packed", "tree", "tree_packed"):
            judge_alone(dataclasses.replace(case, **shape), torch.bfloat16, backend, DEVICE)


@dataclasses.dataclass(frozen=True)
class Engine:
    """Tensors that stay where they are from step to step, as an engine keeps them for its graphs."""

    name: str
    batch: int = 8
    capacity: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 0
    rows: int = 1
    appends: bool = False
    float8: bool = False
    tree: bool = False

    def __str__(self) -> str:
        return self.name

    def tensors(self) -> dict[str, Any]:
        """A call's arguments; lengths are 0, and what no step has written is NaN."""
        dtype = FLOAT8 if self.float8 else torch.bfloat16
        shape: tuple[int, ...] = (self.batch, self.capacity)
        found: dict[str, Any] = {"cache_seqlens": torch.zeros(self.batch, dtype=torch.int32, device=DEVICE)}
        if self.page_size:
            shape = (self.batch * self.capacity // self.page_size, self.page_size)
            pages = torch.full((self.batch, self.capacity // self.page_size), -1, dtype=torch.int32, device=DEVICE)
            found["page_table"] = pages
        rows = (self.batch, self.rows)
        found["q"] = torch.zeros(*rows, self.heads, self.head_dim, dtype=torch.bfloat16, device=DEVICE)
        if self.appends:
            for name in "kv":
                found[name] = torch.zeros(*rows, self.kv_heads, self.head_dim, dtype=torch.bfloat16, device=DEVICE)
            angle = torch.arange(self.capacity)[:, None] * 0.9 ** torch.arange(1, self.head_dim // 2 + 1)
            found |= {"rotary_cos": angle.cos().to(DEVICE), "rotary_sin": angle.sin().to(DEVICE)}
        if self.tree:
            found["tree_mask"] = torch.zeros(*rows, dtype=torch.int64, device=DEVICE)
        for name in ("k_cache", "v_cache"):
            x = torch.full((*shape, self.kv_heads, self.head_dim), torch.nan, dtype=torch.bfloat16, device=DEVICE)
            found[name] = x.to(dtype)
        return found

    def step(self, tensors: dict[str, Any], lengths: list[int], seed: int) -> None:
        """New queries, lengths, pages and keys, in place: entries of the table that are not used are no pages."""
        make = torch.Generator(device=DEVICE).manual_seed(seed)
        for name in ("q", "k", "v"):
            if name in tensors:
                tensors[name].normal_(generator=make)
        tensors["cache_seqlens"].copy_(torch.tensor(lengths))
        if self.tree:
            kind = trees.KINDS[seed % len(trees.KINDS)]
            tensors["tree_mask"].copy_(tree_words(trees.masks(kind, [self.rows] * self.batch, self.rows)))
        new = self.rows if self.appends else 0
        size, caches = self.page_size or self.capacity, [tensors["k_cache"], tensors["v_cache"]]
        for x in caches:
            x.copy_(torch.full((), torch.nan, dtype=torch.bfloat16, device=DEVICE))
        order = iter(torch.randperm(len(caches[0]), generator=torch.Generator().manual_seed(seed)).tolist())
        garbage = (-1, 2**31 - 1)[seed % 2]
        table = torch.full((self.batch, -(-self.capacity // size)), garbage, dtype=torch.int64)
        for b, length in enumerate(lengths):
            for page in range(-(-(length + new) // size)):
                table[b, page] = next(order) if self.page_size else b
                used = min(size, length - page * size)
                for x in caches:
                    if used > 0:
                        drawn = torch.randn(used, *x.shape[2:], generator=make, device=DEVICE)
                        x[int(table[b, page]), :used] = drawn.to(x.dtype)
        if self.page_size:
            tensors["page_table"].copy_(table)

    def run(self, tensors: dict[str, Any], backend: str, batch: int | None = None) -> tuple[Tensor, Tensor]:
        """out and lse of the call, or of its first sequences."""
        per_sequence = ("q", "k", "v", "cache_seqlens", "page_table", "tree_mask")
        some = {name: x[:batch] if name in per_sequence else x for name, x in tensors.items()}
        return flashtile.attention_with_kvcache(**some, return_lse=True, backend=backend)  # type: ignore[return-value]


ENGINES = (
    Engine("dense"),
    Engine("pages", page_size=16),
    Engine("pages_of_1", page_size=1, capacity=2048, heads=64, head_dim=64),
    Engine("steps", page_size=64, rows=4, heads=16, head_dim=256, capacity=2048),
    Engine("append", page_size=16, appends=True),
    Engine("append_dense", appends=True, rows=2, heads=71, kv_heads=1, head_dim=64),
    Engine("float8", page_size=16, float8=True),
    Engine("float8_append", page_size=16, appends=True, float8=True),
    Engine("tree", page_size=16, rows=13, tree=True),
    Engine("tree_append", page_size=64, rows=30, appends=True, tree=True),
)


def _lengths(engine: Engine) -> list[list[int]]:
    """Of each step: the fullest first, with which a graph is captured; from some on there are only padding entries."""
    most = engine.capacity - engine.rows
    draw = random.Random(engine.name)
    return [
        [most] * 8,
        [draw.randint(0, most) for _ in range(8)],
        [1, 63, 64, 65, most // 4, 0, 0, 0],
        [most, 0, 0, 0, 0, 0, 0, 0],
        [0] * 8,
        [draw.randint(0, 300) for _ in range(7)] + [most],
    ]


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_graph_replays_with_other_lengths_pages_and_a_smaller_batch(engine: Engine, backend: str) -> None:
    tensors, steps = engine.tensors(), _lengths(engine)
    engine.step(tensors, steps[0], 0)
    engine.run(tensors, backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = engine.run(tensors, backend)
    for number, lengths in enumerate([*steps, steps[1]], start=1):
        engine.step(tensors, lengths, number)
        before = {name: tensors[name].clone() for name in ("k_cache", "v_cache")}
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        for _ in range(3):  # each leaves the counters as it found them; appending again writes the same keys
            graph.replay()
        got = [x.clone() for x in (out, lse, tensors["k_cache"], tensors["v_cache"])]
        for name, x in before.items():
            tensors[name].copy_(x)
        with poisoned_memory():
            eager = engine.run(tensors, backend)
        want = [*eager, tensors["k_cache"], tensors["v_cache"]]
        assert all(torch.equal(_bits(a), _bits(b)) for a, b in zip(got, want, strict=True)), lengths
        assert got[0].isfinite().all() and not got[1].isnan().any()
        batch = max((b + 1 for b, length in enumerate(lengths) if length), default=1)
        smaller = engine.run(tensors, backend, batch)
        assert all(torch.equal(a[:batch], b) for a, b in zip(got[:2], smaller, strict=True)), lengths
        if not engine.appends:
            assert (got[0][batch:] == 0).all() and (got[1][batch:] == -torch.inf).all()


def test_graphs_and_calls_on_streams_of_their_own_keep_their_bits(backend: str) -> None:
    engines = (Engine("pages", page_size=16), Engine("steps", rows=4, heads=16, head_dim=64), Engine("dense"))
    streams = [torch.cuda.Stream() for _ in engines]
    all_tensors, wanted, graphs, results = [], [], [], []
    for number, engine in enumerate(engines):
        tensors = engine.tensors()
        engine.step(tensors, _lengths(engine)[1], number)
        all_tensors.append(tensors)
        wanted.append([x.clone() for x in engine.run(tensors, backend)])
    torch.cuda.synchronize()
    for engine, tensors in zip(engines, all_tensors, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(engine.run(tensors, backend))
        graphs.append(graph)
    for _ in range(50):
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = []
        for number, stream in enumerate(reversed(streams)):
            with torch.cuda.stream(stream), poisoned_memory():
                eager.append(engines[number].run(all_tensors[number], backend))
        torch.cuda.synchronize()
        for want, *got in zip(wanted, results, eager, strict=True):
            assert all(torch.equal(a, b) for each in got for a, b in zip(each, want, strict=True))


def test_calls_of_all_shapes_by_turns_repeat_their_bits(backend: str) -> None:
    """They share counters, which a call must leave at 0, and memory for parts, which holds what another call left."""
    work = []
    for number, engine in enumerate(ENGINES):
        if not engine.appends:
            tensors = engine.tensors()
            engine.step(tensors, _lengths(engine)[number % 3], number)
            work.append((engine, tensors, engine.run(tensors, backend)))
    for turn in range(20):
        for engine, tensors, want in random.Random(turn).sample(work, len(work)):
            with poisoned_memory():
                got = engine.run(tensors, backend)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), engine.name


def _softmax(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """(heads, dim) of one query over keys (length, kv_heads, dim)."""
    group = q.shape[0] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    scores = (k @ q.to(dtype)[..., None])[..., 0] * q.shape[-1] ** -0.5
    return (torch.softmax(scores, dim=-1)[:, None] @ v)[:, 0]


@pytest.mark.parametrize("layout", ["entries", "pages", "stacked"])
def test_caches_of_more_than_two_to_the_31_elements(layout: str, backend: str) -> None:
    """Keys whose offset passes 2^31 elements, all others NaN; the last one is appended by the call."""
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    _judge_far(layout, backend, 2**31)


def _judge_far(layout: str, backend: str, most: int) -> None:
    heads, kv_heads, dim, page, length = 16, 8, 128, 16, 300
    q, k, v = (torch.randn(1, 1, n, dim, device=DEVICE).bfloat16() for n in (heads, kv_heads, kv_heads))
    keys, values = (torch.randn(length, kv_heads, dim, device=DEVICE).bfloat16() for _ in "kv")
    keys[-1], values[-1] = k[0, 0], v[0, 0]
    tensors: dict[str, Any] = {}
    if layout == "entries":
        capacity = most // (2 * kv_heads * dim) + 1000
        caches = [
            torch.full((3, capacity, kv_heads, dim), torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"
        ]
        start = capacity - length
        for x, rows in zip(caches, (keys, values), strict=True):
            x[2, start:-1] = rows[:-1]
        # Rounded down to a block, the first key may lie before the first one that counts: it is NaN.
        tensors |= {"cache_batch_idx": _index([2]), "cache_leftpad": _index([start])}
        places = (torch.full((length,), 2), torch.arange(start, capacity))
        before = capacity - 1
    else:
        wide = dim * (2 if layout == "stacked" else 1)
        count = most // (page * kv_heads * wide) + 2000
        made = [torch.full((count, page, kv_heads, wide), torch.nan, dtype=torch.bfloat16, device=DEVICE)]
        made += [torch.full_like(made[0], torch.nan)] if layout == "pages" else []
        caches = list(made[0].split(dim, dim=-1)) if layout == "stacked" else made
        pages = count - 1 - torch.randperm(-(-length // page))
        places = (pages.repeat_interleave(page)[:length], torch.arange(length) % page)
        for x, rows in zip(caches, (keys, values), strict=True):
            x[places[0][:-1].to(DEVICE), places[1][:-1].to(DEVICE)] = rows[:-1]
        tensors["page_table"] = pages.to(DEVICE, torch.int32)[None]
        before = length - 1
    assert int(places[0].min()) * caches[0].stride(0) + int(places[1].min()) * caches[0].stride(1) > most
    out = flashtile.attention_with_kvcache(
        q, *caches, cache_seqlens=_index([before]), k=k, v=v, backend=backend, **tensors
    )
    assert isinstance(out, Tensor)

    def by_hand(dtype: torch.dtype) -> dict[str, Tensor]:
        return {"out": _softmax(q[0, 0], keys, values, dtype)}

    assert_close({"out": out[0, 0]}, lambda: by_hand(torch.float64), by_hand(torch.bfloat16), torch.bfloat16)
    for x, rows in zip(caches, (keys, values), strict=True):
        assert torch.equal(x[places[0].to(DEVICE), places[1].to(DEVICE)], rows)
    assert sum(int(x.isfinite().sum()) for x in caches) == 2 * keys.numel(), "nothing else was written"


def _index(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["pages", "append"])
def test_compiles_whole(name: str, compiler: str, backend: str) -> None:
    torch._dynamo.reset()
    engine = next(engine for engine in ENGINES if engine.name == name)
    tensors = engine.tensors()
    engine.step(tensors, _lengths(engine)[1], 1)
    fixed = {name: tensors.pop(name) for name in ("k_cache", "v_cache")}

    def layer(q: Tensor, rest: dict[str, Tensor], caches: dict[str, Tensor]) -> Tensor:
        out = flashtile.attention_with_kvcache(q * 1.5, **rest, **caches, backend=backend)
        assert isinstance(out, Tensor)
        return out + 1

    q, rest = tensors.pop("q"), tensors
    copies = [{name: x.clone() for name, x in fixed.items()} for _ in range(2)]
    want = layer(q, rest, copies[0])
    got = torch.compile(layer, fullgraph=True, backend=compiler)(q, rest, copies[1])
    torch.testing.assert_close(got, want)
    assert all(torch.equal(_bits(copies[0][name]), _bits(copies[1][name])) for name in fixed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=_id)
def test_states_are_merged_by_a_kernel(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    outs = [torch.randn(3, 70, 8, 128, device="cuda").to(dtype) for _ in range(2)]
    sums = [torch.randn(3, 8, 70, device="cuda") * 9 for _ in range(2)]
    sums[0][0] = sums[1][0, :, 5] = -torch.inf
    outs[0][0] = torch.nan
    from flashtile.backends.gpu.decode import merge  # needs Triton

    assert merge.can_merge(outs[0], sums[0], outs[1], sums[1])
    out, lse = flashtile.merge_states(outs[0], sums[0], outs[1], sums[1])
    want, want_lse = states.merge(
        *(x for o, s in zip(outs, sums, strict=True) for x in (o.double().transpose(1, 2), s.double()))
    )
    plain = want.transpose(1, 2).to(dtype).double()
    error, floor = (out.double() - want.transpose(1, 2)).abs().max(), (plain - want.transpose(1, 2)).abs().max()
    assert error <= 2 * floor + 1e-6
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-5)


MAXIMA = [
    case for case in (*CASES, *LARGE) if case.name in {
        "large", "large_steps", "large_pages", "large_pages_of_7", "large_append", "large_chunk", "large_copied",
        "large_copied_64", "large_float8", "packed", "float8", "tree_pages", "everything", "qv_packed",
    }
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", SHORT, ids=_id)
@pytest.mark.parametrize("case", MAXIMA, ids=str)
def test_largest_scores(case: CacheCase, dtype: torch.dtype, backend: str) -> None:
    judge_cached_maxima(build(case, dtype, DEVICE), build(case, dtype, DEVICE), backend)


@pytest.mark.parametrize("lengths", [(5000, 3, 0, 1100), (40000,)], ids=str)
@pytest.mark.parametrize("heads", [16, 128])
def test_largest_scores_of_latent_rows(heads: int, lengths: tuple[int, ...]) -> None:
    case = latent_case("latent", lengths, heads=heads, page_size=64)
    judge_cached_maxima(build(case, torch.bfloat16, DEVICE), build(case, torch.bfloat16, DEVICE), None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_largest_scores_of_wide_groups(backend: str) -> None:
    case = CacheCase("wide", _same(5000, 3, 0, 900), heads=64, kv_heads=1, head_dim=128, sinks=True)
    judge_cached_maxima(build(case, torch.bfloat16, DEVICE), build(case, torch.bfloat16, DEVICE), backend)
