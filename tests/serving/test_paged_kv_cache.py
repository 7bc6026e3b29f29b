"""The pages against a dictionary of lists that holds the tokens themselves."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import flashtile
from flashtile import InvalidInputError
from flashtile.serving import OutOfPagesError, PagedBatch, PagedKVCache
from tests import fresh

LAYERS, HEADS = 2, 1


def write(cache: PagedKVCache, batch: PagedBatch, tokens: list[list[float]]) -> None:
    """What attention does with new keys, from the tables alone: layer l gets ``token + l / 4``, values its negative."""
    bounds = batch.cu_seqlens_q.tolist()
    for b, row in enumerate(tokens):
        assert bounds[b + 1] - bounds[b] == len(row)
        for i, token in enumerate(row):
            page, slot = divmod(int(batch.cache_seqlens[b]) + i, cache.page_size)
            for layer in range(LAYERS):
                cache.k[layer, batch.page_table[b, page], slot] = token + layer / 4
                cache.v[layer, batch.page_table[b, page], slot] = -token - layer / 4


def read(cache: PagedKVCache, sequence: int) -> list[float]:
    """The tokens of a sequence by its pages; keys and values of all layers must agree."""
    pages, length = torch.tensor(cache.pages(sequence), dtype=torch.int64), cache.length(sequence)
    k, v = (x[:, pages].flatten(1, 2)[:, :length].flatten(2) for x in (cache.k, cache.v))
    by_layer = k.amax(-1) - torch.arange(LAYERS)[:, None] / 4
    assert (k.amin(-1) == k.amax(-1)).all() and (v == -k.amax(-1, keepdim=True)).all()
    assert (by_layer == by_layer[0]).all()
    return by_layer[0].tolist()


class Pages(RuleBasedStateMachine):
    """Any order of operations leaves each sequence with the tokens that a list of its own would hold."""

    @initialize(num_pages=st.integers(1, 12), page_size=st.integers(1, 5), fixed=st.booleans(), by_page=st.booleans())
    def start(self, num_pages: int, page_size: int, fixed: bool, by_page: bool) -> None:
        self.cache = PagedKVCache(LAYERS, num_pages, HEADS, 2, page_size=page_size, head_dim_v=3, dtype=torch.float64)
        for x in (self.cache.k, self.cache.v):
            x.fill_(torch.nan)
        self.buffers = self.cache.buffers(4, 100, 20) if fixed else None
        self.tokens: dict[int, list[float]] = {}
        self.next = 1

    def one(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    @rule()
    def allocate(self) -> None:
        sequence = self.cache.allocate()
        assert sequence not in self.tokens
        self.tokens[sequence] = []

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True, max_size=4))
        counts = {sequence: data.draw(st.integers(0, 6)) for sequence in chosen}
        new = [[float(self.next + i) for i in range(count)] for count in counts.values()]
        new = [[token + 100 * b for token in row] for b, row in enumerate(new)]
        needed, free = self.cache.pages_needed(counts), self.cache.num_free_pages
        if needed > free:
            with pytest.raises(OutOfPagesError, match=f"^{needed} pages are needed, {free} are free") as caught:
                self.cache.append(counts, out=self.buffers)
            assert (caught.value.needed, caught.value.free) == (needed, free)
            return
        before = [len(self.tokens[sequence]) for sequence in chosen]
        batch = self.cache.append(counts, out=self.buffers)
        assert self.cache.num_free_pages == free - needed
        self.check(batch, chosen, before, list(counts.values()))
        write(self.cache, batch, new)
        for sequence, row in zip(chosen, new, strict=True):
            self.tokens[sequence] += row
        self.next += 1000

    def check(self, batch: PagedBatch, chosen: list[int], before: list[int], counts: list[int]) -> None:
        spare = 0 if self.buffers is None else 4 - len(chosen)
        bounds = [sum(counts[:b]) for b in range(len(counts) + 1)]
        for tensor in (batch.page_table, batch.cache_seqlens, batch.cu_seqlens_q):
            assert tensor.dtype == torch.int32 and tensor.is_contiguous()
        assert batch.cache_seqlens.tolist() == before + [-1] * spare
        assert batch.cu_seqlens_q.tolist() == bounds + [sum(counts)] * spare
        assert batch.max_seqlen_q == (max(counts, default=0) if self.buffers is None else 20)
        assert batch is self.buffers or self.buffers is None
        for sequence, row in zip(chosen, batch.page_table.tolist(), strict=False):
            pages = self.cache.pages(sequence)
            assert tuple(row[: len(pages)]) == pages
            assert self.buffers is not None or set(row[len(pages) :]) <= {-1}

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, free = self.one(data), self.cache.num_free_pages
        length = data.draw(st.none() | st.integers(0, len(self.tokens[parent])))
        child = self.cache.fork(parent, length)
        assert child not in self.tokens and self.cache.num_free_pages == free
        self.tokens[child] = self.tokens[parent][:length]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = self.one(data)
        length = data.draw(st.integers(0, len(self.tokens[sequence])))
        self.cache.truncate(sequence, length)
        del self.tokens[sequence][length:]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self.one(data)
        self.cache.free(sequence)
        del self.tokens[sequence]
        with pytest.raises(InvalidInputError, match=f"sequence: is {sequence}, which"):
            self.cache.length(sequence)

    @invariant()
    def contents_are_what_was_appended(self) -> None:
        for sequence, tokens in getattr(self, "tokens", {}).items():
            assert read(self.cache, sequence) == tokens

    @invariant()
    def no_page_is_lost_or_counted_wrong(self) -> None:
        if not hasattr(self, "tokens"):
            return
        held = Counter(page for sequence in self.tokens for page in self.cache.pages(sequence))
        assert [held[page] for page in range(self.cache.num_pages)] == self.cache._references
        assert sorted([*self.cache._free, *held]) == list(range(self.cache.num_pages))
        for sequence, tokens in self.tokens.items():
            assert len(self.cache.pages(sequence)) == -(-len(tokens) // self.cache.page_size)


Pages.TestCase.settings = settings(max_examples=25, stateful_step_count=30)
TestPages = Pages.TestCase


def made(num_pages: int = 8, **keywords: object) -> PagedKVCache:
    return PagedKVCache(LAYERS, num_pages, HEADS, 2, page_size=4, **keywords)


def test_a_fork_costs_one_page_once_either_appends() -> None:
    cache = made()
    parent = cache.allocate()
    cache.append({parent: 6})
    children = [cache.fork(parent) for _ in range(2)]
    assert cache.num_free_pages == 6
    # All three in one step: the last keeps the page. One of them: it copies.
    assert cache.pages_needed(dict.fromkeys([parent, *children], 1)) == 2
    assert cache.pages_needed({parent: 1}) == 1 and cache.pages_needed({parent: 3}) == 2
    cache.append(dict.fromkeys([parent, *children], 0))
    assert cache.num_free_pages == 6
    cache.append(dict.fromkeys([parent, *children], 1))
    assert cache.num_free_pages == 4
    assert len({cache.pages(each)[0] for each in (parent, *children)}) == 1
    assert len({cache.pages(each)[1] for each in (parent, *children)}) == 3
    assert cache.pages_needed({parent: 1}) == 0


def test_whole_pages_are_shared_for_good() -> None:
    cache = made()
    parent = cache.allocate()
    cache.append({parent: 8})
    child = cache.fork(parent)
    assert cache.pages_needed({child: 1}) == 1
    cache.append({child: 1, parent: 1})
    assert cache.pages(child)[:2] == cache.pages(parent)[:2] and cache.num_free_pages == 4
    cache.free(parent)
    assert cache.num_free_pages == 5


@pytest.mark.parametrize("fixed", [False, True])
def test_attention_over_the_pages_is_attention_over_the_tokens(fixed: bool) -> None:
    torch.manual_seed(0)
    cache = PagedKVCache(1, 12, 1, 8, page_size=4, dtype=torch.float64)
    for x in (cache.k, cache.v):
        x.fill_(torch.nan)
    buffers = cache.buffers(3, 6, 5) if fixed else None
    a, held = cache.allocate(), {}
    held[a] = [torch.empty(0, 1, 8, dtype=torch.float64)] * 2
    for counts in ({0: 5}, {0: 1}, {1: 3, 0: 2}, {0: 4, 1: 1, 2: 2}, {2: 1, 1: 1}):
        for child, length in {1: 6, 2: 3}.items():
            if child in counts and child not in held:
                assert cache.fork(0, length) == child
                held[child] = [x[:length] for x in held[0]]
        batch, total = cache.append(counts, out=buffers), sum(counts.values())
        # Rows past the last bound belong to no sequence, as in a graph that more sequences were captured for.
        q, k, v = (torch.randn(total + 2, heads, 8, dtype=torch.float64) for heads in (2, 1, 1))
        out = flashtile.attention_with_kvcache(
            q, cache.k[0], cache.v[0], k=k, v=v, page_table=batch.page_table, cache_seqlens=batch.cache_seqlens,
            cu_seqlens_q=batch.cu_seqlens_q, max_seqlen_q=batch.max_seqlen_q,
        )  # fmt: skip
        start = 0
        for sequence, count in counts.items():
            rows = slice(start, start + count)
            held[sequence] = [torch.cat((old, new[rows])) for old, new in zip(held[sequence], (k, v), strict=True)]
            expected = flashtile.attention(q[None, rows], *(x[None] for x in held[sequence]), causal=True)
            torch.testing.assert_close(out[rows], expected[0], rtol=1e-12, atol=1e-13)
            start += count
        assert (out[total:] == 0).all()


@pytest.mark.parametrize("packed", [False, True])
def test_sequences_that_are_not_there_append_nothing(packed: bool) -> None:
    cache = PagedKVCache(1, 4, 1, 8, page_size=4, dtype=torch.float64)
    for x in (cache.k, cache.v):
        x.fill_(torch.nan)
    buffers = cache.buffers(3, 2)

    def call() -> torch.Tensor:
        rows = (3,) if packed else (3, 1)
        q, k, v = (torch.ones(*rows, 1, 8, dtype=torch.float64) for _ in range(3))
        places = vars(buffers) if packed else {name: getattr(buffers, name) for name in ("page_table", "cache_seqlens")}
        return flashtile.attention_with_kvcache(q, cache.k[0], cache.v[0], k=k, v=v, **places).view(3, 8)

    assert (call() == 0).all() and cache.k.isnan().all() and cache.v.isnan().all()
    cache.append({cache.allocate(): 1}, out=buffers)
    assert (call() == torch.tensor([[1.0], [0.0], [0.0]])).all()
    assert cache.k.isfinite().sum() == cache.v.isfinite().sum() == 8


def test_missing_pages_are_counted_and_change_nothing() -> None:
    cache = made(3)
    a, b = cache.allocate(), cache.allocate()
    cache.append({a: 5})
    with pytest.raises(OutOfPagesError) as caught:
        cache.append({a: 1, b: 5})
    assert str(caught.value).startswith("2 pages are needed, 1 are free")
    assert (cache.length(a), cache.length(b), cache.num_free_pages) == (5, 0, 1)


@pytest.mark.parametrize("by_page", [False, True])
def test_float8_pages_and_their_scales_are_copied(by_page: bool) -> None:
    shape = (LAYERS, 8, HEADS) if by_page else (LAYERS, HEADS)
    scales = [torch.rand(shape) for _ in range(2)]
    cache = made(dtype=torch.float8_e4m3fn, k_scale=scales[0], v_scale=scales[1])
    parent = cache.allocate()
    cache.append({parent: 3})
    (page,) = cache.pages(parent)
    for x in (cache.k, cache.v):
        x[:, page] = torch.randn(LAYERS, 4, HEADS, 2).to(x.dtype)
    child = cache.fork(parent, 2)
    cache.append({child: 1})
    (copy,) = cache.pages(child)
    assert copy != page
    for x in (cache.k, cache.v):
        assert torch.equal(x[:, copy].float(), x[:, page].float()) and x[:, page].float().isfinite().all()
    for mine, given in ((cache.k_scale, scales[0]), (cache.v_scale, scales[1])):
        assert torch.equal(mine, given)
        assert not by_page or torch.equal(mine[:, copy], mine[:, page])


def test_scales_are_one_by_default_and_absent_without_float8() -> None:
    assert torch.equal(made(dtype=torch.float8_e4m3fn).k_scale, torch.ones(LAYERS, HEADS))
    assert made().k_scale is None and made().v_scale is None
    assert made().k.dtype == torch.get_default_dtype()


def test_wider_tables_come_in_powers_of_two() -> None:
    cache = made(16)
    sequence, widths = cache.allocate(), []
    for _ in range(9):
        widths.append(cache.append({sequence: 4}).page_table.shape[1])
    assert widths == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert cache.append({}).page_table.shape == (0, 1)


def test_refusals() -> None:
    cache = made()
    sequence = cache.allocate()
    cache.append({sequence: 5})
    buffers = cache.buffers(1, 2)
    for refused, message in (
        (lambda: made(dtype=torch.int8), "dtype: is torch.int8, must be float16"),
        (lambda: made(0), "num_pages: is 0, must be an integer >= 1"),
        (lambda: made(k_scale=torch.ones(LAYERS, HEADS)), "k_scale: is given, but dtype is torch.float32"),
        (
            lambda: made(dtype=torch.float8_e4m3fn, v_scale=torch.ones(3)),
            r"v_scale: has shape \(3,\), must be \(2, 1\)",
        ),
        (lambda: made(dtype=torch.float8_e4m3fn, v_scale=torch.ones(2, 1).half()), "v_scale: dtype is torch.float16"),
        (lambda: cache.append({sequence: -1}), "counts: is -1"),
        (lambda: cache.append({7: 1}), "sequence: is 7, which was never allocated"),
        (lambda: cache.fork(sequence, 6), "length: is 6, but the sequence has 5 tokens"),
        (lambda: cache.truncate(sequence, -1), "length: is -1"),
        (lambda: cache.append({sequence: 2}, out=buffers), "out: has room for 1 tokens of a sequence"),
        (lambda: cache.append({sequence: 0, cache.allocate(): 0}, out=buffers), "out: has room for 1 sequences"),
        (lambda: cache.append({sequence: 1}, out=cache.buffers(1, 1)), "out: has room for 1 pages of a sequence"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            refused()
    assert cache.length(sequence) == 5


def test_it_is_imported_only_when_asked_for() -> None:
    code = "import sys, flashtile; assert 'flashtile.serving' not in sys.modules; flashtile.serving.PagedKVCache"
    fresh.run(code, check=True)


def test_a_list_is_one_token_for_each_and_a_batch_unpacks() -> None:
    cache = PagedKVCache(1, 4, 2, 8, page_size=2)
    first, second = cache.allocate(), cache.allocate()
    assert cache.pages_needed([first, second]) == 2
    batch = cache.append([second, first])
    assert (cache.length(first), cache.length(second)) == (1, 1) and batch.cu_seqlens_q.tolist() == [0, 1, 2]
    assert {**batch} == vars(batch)
    with pytest.raises(InvalidInputError, match="^counts: "):
        cache.append([first, first])
    shown = (
        "PagedKVCache(num_layers=1, num_pages=4, num_heads_kv=2, head_dim=8, page_size=2: float32 on cpu, 2 sequences"
    )
    assert repr(cache) == f"{shown}, 2 pages free)"
