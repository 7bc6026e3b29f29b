"""On a GPU: the pages keep their books without waiting for it, and the server writes the same through a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from extras.tests.test_serve_gpt import asked, made
from flashtile.serving import PagedKVCache
from flashtile_lab.examples.plain_loops import recompute
from flashtile_lab.examples.serve_gpt import Server

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_nothing_waits_for_the_device() -> None:
    cache = PagedKVCache(2, 16, 2, 64, page_size=4, dtype=torch.bfloat16, device="cuda")
    buffers = cache.buffers(4, 8)
    parent = cache.allocate()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = cache.append({parent: 6})
        child = cache.fork(parent)
        cache.append({parent: 1, child: 1}, out=buffers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert batch.page_table.tolist() == [[0, 1]]
    assert buffers.page_table[:2, :2].tolist() == [list(cache.pages(each)) for each in (parent, child)]
    assert buffers.cache_seqlens.tolist() == [6, 6, -1, -1] and buffers.cu_seqlens_q.tolist() == [0, 1, 2, 2, 2]


@pytest.mark.parametrize("fixed", [False, True])
def test_serving_equals_recomputing(fixed: bool) -> None:
    model, expected, requests = made().cuda(), asked(), asked()
    recompute(model, expected)
    server = Server(model, max_batch=4, max_rows=16, fixed=fixed)
    server.share(requests[1].prefix)
    server.submit(*requests)
    written = sum(1 for _ in server.stream())
    assert written == sum(each.count for each in requests)
    assert [each.tokens for each in requests] == [each.tokens for each in expected]
