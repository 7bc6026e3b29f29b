"""Calls over a cache with lists of keys: the table's cases that go with them, and random lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashtile import reference
from flashtile.call import latent
from flashtile.call.cached_arguments import read
from flashtile.call.cached_problem import problem_of
from flashtile.call.selected import Selected, to_check
from tests.kvcache.cases import CASES, EIGHT_BIT_ROWS, CacheCall, CacheCase, latent_case
from tests.rule import assert_close

_OWN = (
    latent_case("latent_decode", (40, 0, 9, 3)),
    latent_case("latent_steps", (40, 0, 9, 3), rows=3, page_size=4, sinks=True, softcap=2.0),
    latent_case("latent_many_heads", (40, 9), heads=128, page_size=16),
    CacheCase("window_causal_each", ((37, 5, 0), (9, 1, 0)), packed=True, window=(9, 3), causal_each=True, page_size=3),
    CacheCase("ragged_leftpad", ((37, 4, 0), (9, 1, 0)), packed=True, ragged="yes", page_size=4, leftpad=(7, 2)),
    CacheCase("heads_first", ((37, 2, 0), (5, 2, 0)), layout="heads_first", head_dim_v=8),
    CacheCase("heads_first_pages", ((37, 2, 0), (5, 2, 0)), layout="heads_first_stacked", page_size=4, heads=4),
    CacheCase("between", ((37, 2, 0), (5, 2, 0)), layout="between", page_size=4, float8="h"),
    CacheCase("sliced", ((37, 2, 0), (5, 2, 0)), layout="sliced", page_size=1, out="part"),
    CacheCase("spare_sinks", ((20, 2, 0), (0, 0, 0), (9, 3, 0)), packed=True, spare=3, page_size=4, sinks=True),
)


def _goes(case: CacheCase) -> bool:
    apart = case.appends, case.alibi, case.tree, case.chunk, case.slots, case.float8 == "eh", case.rotary
    return not any(apart)


# By name: every way of finding keys and rows that goes with lists.
SELECTED = {case.name: case for case in (*CASES, *EIGHT_BIT_ROWS, *_OWN) if _goes(case)}


def lists_for(call: CacheCall, most: int, seed: int = 1, slots: bool = False) -> Tensor:
    """Random lists without an element twice, but for what is none: negative, past the end, anywhere."""
    make, t = torch.Generator().manual_seed(seed), call.tensors
    count = t.k_cache.shape[0] * t.k_cache.shape[1] if slots else call.problem.seqlen_k
    lead = t.q.shape[:-2]
    rows = [torch.randperm(count + 5, generator=make) for _ in range(lead.numel())]
    lists = torch.full((lead.numel(), most), -1)
    for row, each in zip(lists, rows, strict=True):
        row[: len(each)] = each[:most]
    none = torch.rand(lists.shape, generator=make)
    lists = torch.where(none < 0.1, -1, torch.where(none < 0.15, -(2**31), lists))
    if lists.shape[0]:
        lists[0] = torch.where(torch.arange(most) % 2 == 0, -3, 2**31 - 1)  # a list of nothing
    return lists.int().view(*lead, most).to(t.q.device)


def finite_caches(call: CacheCall) -> None:
    """Fills what no sequence has, which is NaN in a case's caches: slots name all rows."""
    t = call.tensors
    parts = [t.k_cache, t.v_cache]
    if t.row_scale is not None:  # on a GPU, the call's rows are in the storage of the values, and the parts apart
        rows = t.v_cache.view(torch.uint8).as_strided((*t.v_cache.shape[:-1], 656), t.v_cache.stride())
        parts += [t.row_scale, rows[..., 512:528].view(torch.float32), rows[..., 528:].view(torch.bfloat16)]
    for x in parts:
        if x is not None:
            x.copy_(x.float().nan_to_num(0.5, 0.5, 0.5).to(x.dtype))


def definition_of(call: CacheCall, lists: Tensor, slots: bool = False) -> Callable[[torch.dtype], dict[str, Tensor]]:
    """Out, lse and the largest scores of a call with lists by the definition, in a dtype."""
    given = Selected(None, lists.cpu()) if slots else Selected(lists.cpu(), None)
    case, t = call.case, call.copies()
    window = None if slots else case.window
    plain = (
        call.keywords.get("max_seqlen_q"), None if slots else call.keywords.get("max_seqlen_k"), case.scale,
        case.softcap, False, None, None, False, True, case.invariant,
    )  # fmt: skip
    options = read(case.causal and not case.causal_each, window, True, plain)
    if slots:
        t = replace(t, causal=None, cache_leftpad=None, cache_batch_idx=None)
    t = to_check(latent.split(t), given)
    problem = problem_of(t, options)

    def by_definition(dtype: torch.dtype) -> dict[str, Tensor]:
        found = reference.cached_with_max_scores(problem, t, dtype, given)
        return dict(zip(("out", "lse", "top"), found, strict=True))

    return by_definition


def judge_selected(call: CacheCall, lists: Tensor, slots: bool = False, **changes: Any) -> None:
    """Asserts the error rule for out, lse and the largest scores of a call with lists."""
    keywords = {"selected_slots" if slots else "selected": lists, "return_max_scores": True} | changes
    if slots:  # what the whole call is asked for about positions does not go with slots
        keywords |= dict.fromkeys(("cache_leftpad", "cache_batch_idx", "window_size", "max_seqlen_k"))
        if isinstance(call.keywords.get("causal"), Tensor):
            keywords["causal"] = True
    out, lse, top = call.run(keywords.pop("backend", None), **keywords)
    results = {"out": out.cpu(), "lse": lse.cpu(), "top": top.cpu()}
    assert lse.is_contiguous() and top.is_contiguous() and out.dtype == call.problem.dtype
    by_definition = definition_of(call, lists, slots)
    assert_close(results, lambda: by_definition(torch.float64), by_definition(call.problem.dtype), call.problem.dtype)
