"""Rule 12 for cached calls: a sequence gives the same bits alone as with any others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashtile.call.cached_problem import pages_of
from tests.kvcache.cases import CacheCall, CacheCase, build

# Lengths around multiples of what tiles and splits may be, in no order.
LENGTHS = (1, 129, 16, 513, 0, 64, 1025, 15, 127, 65, 512, 17, 256, 511, 63, 128, 255, 1024, 257, 3)


def invariance_cases(lengths: tuple[int, ...] = LENGTHS) -> tuple[CacheCase, ...]:
    """Calls on sequences of these lengths, one for each way of finding keys and rows."""

    def each(rows: int = 1, new: int = 0) -> tuple[tuple[int, int, int], ...]:
        return tuple((length, rows, new) for length in lengths)

    mixed = tuple((length, 1 + n % 3 * 5, 1 + n % 3 * 5) for n, length in enumerate(lengths))
    sizes: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=64)
    return (
        CacheCase("dense", each(), **sizes),
        CacheCase("steps", each(4), **sizes, alibi="bh", sinks=True),
        CacheCase("window", each(3), **sizes, window=(300, 0)),
        CacheCase("softcap", each(2), **sizes, softcap=5.0, leftpad=tuple(n // 3 for n in lengths)),
        CacheCase("pages", each(), **sizes, page_size=16),
        CacheCase("pages_of_1", each(2), **sizes, page_size=1, causal=False),
        CacheCase("append", each(2, 2), **sizes, appends=True, rotary=32),
        CacheCase("packed", mixed, **sizes, packed=True, appends=True, page_size=16),
        CacheCase("slots", mixed, **sizes, packed=True, appends=True, page_size=8, slots="own", rotary=64),
        CacheCase("ragged", mixed, **sizes, packed=True, appends=True, page_size=4, ragged="bound"),
        CacheCase("causal_each", mixed, **sizes, packed=True, appends=True, causal_each=True, rotary=32),
        CacheCase("float8", each(), **sizes, page_size=16, float8="eh"),
        CacheCase("e5m2", each(2), **sizes, page_size=16, float8="h", e5m2=True),
        CacheCase("tree", each(7), **sizes, page_size=16, tree="shuffled", window=(300, 0), alibi="bh", words=True),
        CacheCase("tree_packed", mixed, **sizes, packed=True, appends=True, tree="random", tree_rows=6, rotary=32),
    )


def judge_alone(case: CacheCase, dtype: torch.dtype, backend: str, device: str = "cpu") -> None:
    """Asserts that every sequence of a case gives the same bits in the batch, alone, and in the batch reversed."""
    call = build(case, dtype, device)
    out, lse = (x.clone() for x in call.run(backend))
    count = len(case.sequences)
    bounds = [0, *torch.tensor([rows for _, rows, _ in case.sequences]).cumsum(0).tolist()]
    for order in [[b] for b in range(count)] + [list(range(count))[::-1]]:
        # New keys are appended again, the same ones to the same places.
        got, got_lse = _of(call, order, bounds, backend)
        at = 0
        for b in order:
            if case.packed:
                here, there = slice(bounds[b], bounds[b + 1]), slice(at, at + bounds[b + 1] - bounds[b])
                at = there.stop
                pairs = (got[there], out[here]), (got_lse[:, there], lse[:, here])
            else:
                pairs = (got[at], out[b]), (got_lse[at], lse[b])
                at += 1
            for mine, want in pairs:
                assert torch.equal(mine, want), (
                    f"sequence {b} of {case.sequences[b][0]} keys, with {len(order) - 1} others"
                )


def _of(call: CacheCall, order: list[int], bounds: list[int], backend: str) -> tuple[Tensor, Tensor]:
    """Some sequences of a call."""
    t, case, keywords = call.tensors, call.case, dict(call.keywords)
    keywords.pop("out", None)
    index = torch.tensor(order, device=t.q.device)
    for name in ("cache_seqlens", "page_table", "cache_leftpad", "rotary_seqlens", "tree_mask", "causal"):
        if isinstance(keywords.get(name), Tensor):
            keywords[name] = keywords[name][index]
    if case.alibi == "bh":
        keywords["alibi_slopes"] = keywords["alibi_slopes"][index]
    if case.ragged:
        pages = pages_of(t)
        bounds_of_pages = torch.tensor([0, *(len(pages[b]) for b in order)]).cumsum(0)
        keywords["page_indptr"] = bounds_of_pages.to(t.q.device, torch.int32)
        keywords["page_indices"] = torch.cat([pages[b] for b in order])
        keywords["max_seqlen_k"] = call.problem.seqlen_k
    if not case.page_size:
        entries = keywords.get("cache_batch_idx")
        keywords["cache_batch_idx"] = index.to(torch.int32) if entries is None else entries[index]
    rows = torch.cat([torch.arange(bounds[b], bounds[b + 1]) for b in order]) if case.packed else index
    rows = rows.to(t.q.device)
    if case.packed:
        lengths = torch.tensor([0, *(bounds[b + 1] - bounds[b] for b in order)])
        keywords["cu_seqlens_q"] = lengths.cumsum(0).to(t.q.device, torch.int32)
        # It may choose the kernel.
        keywords["max_seqlen_q"] = call.problem.seqlen_q
    for name in ("k", "v", "slot_mapping"):
        if name in keywords:
            keywords[name] = keywords[name][rows]
    some = replace(call, tensors=replace(t, q=t.q[rows]), keywords=keywords)
    return some.run(backend)
