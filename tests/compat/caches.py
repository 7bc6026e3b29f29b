"""The table of cached calls, made through flash-attn's functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashtile.compat import flash_attn_2 as fa2
from tests.compat.by_hand import cumulated
from tests.kvcache.cases import CASES, CacheCall, CacheCase, build, judge_caches, judge_results

NAMED = {case.name: case for case in CASES}
LENGTHS = (9, 0, 17)


def case_of(name: str, rows: int = 1, new: int = 0, **values: Any) -> CacheCase:
    """Three sequences, one without keys, over four heads and two."""
    sequences = tuple((length, rows, new) for length in LENGTHS)
    return CacheCase(name, sequences, appends=new > 0, capacity=24, **{"heads": 4, "causal": True} | values)


def given(version: Any, call: CacheCall, **changes: Any) -> dict[str, Any]:
    """The arguments of a version's ``flash_attn_with_kvcache``."""
    t, keywords = call.tensors, {name: x for name, x in call.keywords.items() if name != "out"}
    window = keywords["window_size"] or (-1, -1)
    keywords["window_size"] = tuple(-1 if x is None else x for x in window)
    keywords |= {"q": t.q, "k_cache": t.k_cache, "v_cache": t.v_cache} | changes
    if version is fa2 and "page_table" in keywords:
        keywords["block_table"] = keywords.pop("page_table")
    return keywords


def run(version: Any, call: CacheCall, **changes: Any) -> tuple[Tensor, Tensor]:
    """out and lse of the function, ``changes`` of its arguments."""
    out, lse, *rest = version.flash_attn_with_kvcache(**given(version, call, **changes), return_softmax_lse=True)
    assert [x.numel() for x in rest] == ([] if version is fa2 else [0, 0])
    return out, lse


def judge(version: Any, call: CacheCall, **changes: Any) -> None:
    """Asserts that out, lse and the caches are what the library's definition says of the call."""
    before = call.copies()
    out, lse = run(version, call, **changes)
    after = call.copies()
    assert torch.equal(after.q, before.q), "the caller's queries have changed"
    judge_caches(call, before, after)
    judge_results(call, before, after, out, lse)


def packed_over_pages(dtype: torch.dtype, **values: Any) -> tuple[CacheCall, tuple[Any, ...]]:
    """A call without new keys, and its tensors and lengths as ``flash_attn_varlen_func`` takes them."""
    values = {"causal": False, "page_size": 5, "packed": True} | values
    case = case_of("varlen", **values)
    sequences = tuple((length, rows, 0) for length, rows in zip(LENGTHS, (7, 2, 3), strict=True))
    call = build(replace(case, sequences=sequences), dtype)
    t = call.tensors
    return call, (t.q, t.k_cache, t.v_cache, t.cu_seqlens_q, cumulated(LENGTHS), torch.tensor(7), 17)
