"""On a GPU: queries that name their keys, by every backend; the rows that the kernel finds; graphs; gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.backends.portable import selected as by_kernel
from flashtile.call import selected
from flashtile.call.cached_arguments import CacheOptions, CacheTensors
from flashtile.call.cached_problem import problem_of
from flashtile.call.selected import Selected
from tests.kvcache.cases import build
from tests.poison import poisoned_memory
from tests.selections import SELECTED, finite_caches, judge_selected, lists_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("backend", [None, "portable"])
@pytest.mark.parametrize("name", SELECTED)
def test_the_table(name: str, backend: str | None, slots: bool) -> None:
    call = build(SELECTED[name], torch.bfloat16, "cuda")
    if slots:
        finite_caches(call)
    with poisoned_memory():
        judge_selected(call, lists_for(call, 37, slots=slots), slots=slots, backend=backend)


def _large(batch: int, rows: int, heads: int, most: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    make = torch.Generator("cuda").manual_seed(0)
    pages = torch.randn(batch * 64 + 1, 64, 1, 576, generator=make, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(batch * 64, generator=make, device="cuda").view(batch, 64).int()
    lists = torch.rand(batch, rows, 4096, generator=make, device="cuda").topk(most, sorted=False).indices.int()
    lengths = torch.randint(0, 4097, (batch,), generator=make, device="cuda", dtype=torch.int32)
    q = torch.randn(batch, rows, heads, 576, generator=make, device="cuda", dtype=torch.bfloat16)
    return q, pages, {"page_table": table, "cache_seqlens": lengths, "selected": lists}


@pytest.mark.parametrize("most", [1, 1000, 2048])
def test_the_rows_are_those_of_pytorch(most: int) -> None:
    q, pages, given = _large(9, 3, 16, most)
    t = CacheTensors(torch.empty_like(q), q, pages, pages, given["cache_seqlens"], given["page_table"])
    for options in (CacheOptions(window_right=0), CacheOptions(1500, 7)):
        for lists in (Selected(given["selected"], None), Selected(None, given["selected"] * 5)):
            over = selected.to_check(t, lists)
            reach = selected.reach_of(over, options, problem_of(over, options), lists)
            want, got = (find.compacted(over, lists, reach) for find in (selected, by_kernel))
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and got[1].max() > 0


@pytest.mark.parametrize("backend", [None, "portable"])
def test_a_graph_replays_for_other_lists_lengths_and_pages(backend: str | None) -> None:
    (q, pages, given), (other_q, _, other) = _large(4, 2, 64, 512), _large(4, 2, 64, 512)
    other["cache_seqlens"] = other["cache_seqlens"].flip(0)
    other["page_table"], other["selected"] = other["page_table"].flip(0), other["selected"].flip(0)

    def run(q: Tensor, given: dict[str, Any]) -> Any:
        return flashtile.attention_with_kvcache(q, pages, pages[..., :512], return_lse=True, backend=backend, **given)

    want, first = run(other_q, other), run(q, given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(q, given)
    for x, new in ((q, other_q), *((given[name], other[name]) for name in given)):
        x.copy_(new)
    graph.replay()
    for got, each, before in zip(found, want, first, strict=True):
        assert torch.equal(got, each) and not torch.equal(got, before)


@pytest.mark.parametrize("heads", [16, 128])
def test_gradients_are_those_of_the_cpu(heads: int) -> None:
    pytest.importorskip("flashtile.backends.portable.selected_backward")
    make = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 60, heads, 576, generator=make), torch.randn(2, 300, 1, 576, generator=make)
    sinks, lists = torch.randn(heads, generator=make), torch.rand(2, 60, 300, generator=make).topk(90).indices.int()
    lists[0, 0] = -1
    found = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
        leaves = [x.bfloat16().to(device, dtype).requires_grad_() for x in (q, k, sinks)]
        out = flashtile.attention(
            leaves[0], leaves[1], leaves[1][..., :512], sinks=leaves[2], selected=lists.to(device), causal=True
        )
        found.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    for got, want in zip(*found, strict=True):
        assert (got.cpu() - want).abs().max() < 2e-2 * want.abs().max()
