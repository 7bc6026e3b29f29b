"""The server writes what recomputing everything writes, token by token, whoever else is being served."""

from __future__ import annotations

import random

import pytest
import torch

from flashtile_lab.examples.char_gpt import CharGPT, GPTConfig
from flashtile_lab.examples.plain_loops import Request, choose, recompute, static_cache
from flashtile_lab.examples.serve_gpt import Server

VOCAB = 19
PREFIX = 37


def made() -> CharGPT:
    """A model whose every weight matters; as models start, they ignore what they have read."""
    torch.manual_seed(0)
    model = CharGPT(GPTConfig(VOCAB, seqlen=64, num_layers=2, num_heads=2, d_model=32))
    for block in model.blocks:
        torch.nn.init.normal_(block.out.weight, std=0.4)
        torch.nn.init.normal_(block.down.weight, std=0.2)
    torch.nn.init.normal_(model.head.weight, std=0.4)
    return model


@pytest.fixture(scope="module")
def model() -> CharGPT:
    return made().double()


def asked() -> list[Request]:
    """Ten requests of all lengths, most of which share a prefix."""
    draw = random.Random(1)
    prefix = Request([draw.randrange(VOCAB) for _ in range(PREFIX)], 0)
    prompts = [[draw.randrange(VOCAB) for _ in range(draw.choice((1, 2, 9, 50)))] for _ in range(10)]
    return [
        Request(prompt, draw.randrange(1, 24), seed, prefix if seed % 3 else None)
        for seed, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def expected(model: CharGPT) -> list[list[int]]:
    requests = asked()
    recompute(model, requests)
    return [each.tokens for each in requests]


def test_texts_depend_on_all_that_was_read(model: CharGPT, expected: list[list[int]]) -> None:
    changed = asked()
    changed[1].tokens[0] = (changed[1].tokens[0] + 1) % VOCAB
    recompute(model, changed[1:2])
    assert changed[1].tokens[-20:] != expected[1][-20:] and len(expected[1]) == changed[1].length


@pytest.mark.parametrize("sizes", [
    {},
    {"fixed": True},
    {"max_batch": 3, "max_rows": 5},
    {"max_batch": 1},
    {"max_batch": 6, "max_rows": 16, "num_pages": 12},
    {"max_batch": 6, "max_rows": 16, "num_pages": 12, "fixed": True},
], ids=str)  # fmt: skip
def test_serving_equals_recomputing(model: CharGPT, expected: list[list[int]], sizes: dict) -> None:
    server, requests = Server(model, **sizes), asked()
    for x in (server.cache.k, server.cache.v):
        x.fill_(torch.nan)
    server.share(requests[1].prefix)
    kept = server.cache.num_free_pages
    assert server.cache.num_pages - kept == -(-PREFIX // server.cache.page_size)
    # Every token is read once, but not a prefix again, nor the last of a text.
    once = sum(each.length - 1 - (PREFIX if each.prefix else 0) for each in requests)
    server.submit(*requests)
    heard: dict[Request, list[int]] = {each: list(each.tokens) for each in requests}
    steps, forward = [], server.forward

    def counted(rows: dict[Request, list[int]]) -> torch.Tensor:
        steps.append(sum(map(len, rows.values())))
        return forward(rows)

    server.forward = counted
    for request, token in server.stream():
        heard[request].append(token)
        assert len(server.running) <= server.max_batch
    assert [each.tokens for each in requests] == expected
    assert [heard[each] for each in requests] == expected
    assert server.cache.num_free_pages == kept and not server.running
    assert max(steps) <= server.max_rows
    # Where pages run out, a request is read again.
    assert sum(steps) > once if "num_pages" in sizes else sum(steps) == once
    assert server.decode is None if "fixed" not in sizes else server.decode._batch.cu_seqlens_q[-1] > 0


def test_requests_may_come_while_others_are_served(model: CharGPT, expected: list[list[int]]) -> None:
    server, requests = Server(model, max_batch=4), asked()
    server.share(requests[1].prefix)
    server.submit(*requests[:3])
    late = iter(requests[3:])
    for _ in server.stream():
        server.submit(*[each for each in [next(late, None)] if each])
    assert [each.tokens for each in requests] == expected


def test_a_request_that_cannot_fit_is_refused(model: CharGPT) -> None:
    server = Server(model, num_pages=2)
    server.submit(Request([1] * 40, 1))
    with pytest.raises(RuntimeError, match="3 pages are needed, 2 are free"):
        list(server.stream())


def test_static_cache_equals_recomputing(model: CharGPT, expected: list[list[int]]) -> None:
    requests = asked()
    static_cache(model, requests, max_batch=4)
    assert [each.tokens for each in requests] == expected


def test_choosing_follows_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    requests = [Request([0], 1, seed) for seed in range(4000)]
    chosen = choose((probabilities.log() * 0.8).expand(len(requests), -1), requests)
    share = torch.bincount(torch.tensor(chosen), minlength=4) / len(requests)
    # Four standard deviations of a share.
    assert (share - probabilities).abs().max() < 4 * (0.25 / len(requests)) ** 0.5 and share[1] == 0
    assert choose(torch.empty(0, 4), []) == []
