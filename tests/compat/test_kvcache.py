"""flash_attn_with_kvcache of flash-attn 2 and 3, and pages: on the table of cached calls, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile import InvalidInputError, UnsupportedError
from flashtile.compat import _private as private
from flashtile.compat import flash_attn_2 as fa2
from flashtile.compat import flash_attn_3 as fa3
from tests.compat.by_hand import assert_same, cumulated
from tests.compat.caches import LENGTHS, NAMED, case_of, given, judge, packed_over_pages, run
from tests.kvcache.cases import CASES, CacheCase, build, judge_results

VERSIONS = pytest.mark.parametrize("version", [fa2, fa3], ids=["2", "3"])


def is_expressed(version: Any, case: CacheCase) -> bool:
    """Whether a version's function has what a case gives."""
    ours = case.sinks or case.tree or case.slots or case.ragged or case.causal_each or case.e5m2 or case.invariant
    common = not ours and case.float8 in ("", "none") and len(case.sequences) > 0
    if version is fa2:
        return common and not (case.packed or case.packed_new or case.rotary_start or case.chunk or case.qv)
    return common and not case.alibi


CALLS_EACH = [(version, case) for version in (fa2, fa3) for case in CASES if is_expressed(version, case)]
# They are flash-attn's own, though no wider than the library's.
CALLS_EACH += [
    (fa2, case_of("turned, one side open", 3, 3, rotary=16, causal=False, window=(-1, 4))),
    (fa2, case_of("turned and padded", 2, 2, rotary=16, entries=True, leftpad=(4, 0, 2), interleaved=True)),
    (fa3, case_of("packed and turned", 4, 4, packed=True, rotary=16, interleaved=True, page_size=5)),
]


EACH_DTYPE = [(*each, (torch.float64, torch.bfloat16)[n % 2]) for n, each in enumerate(CALLS_EACH)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("version", "case", "dtype"), EACH_DTYPE, ids=[f"{version.__name__[-1]}-{case}" for version, case in CALLS_EACH]
)
def test_out_lse_and_caches(version: Any, case: CacheCase, dtype: torch.dtype) -> None:
    judge(version, build(case, dtype))


@VERSIONS
@pytest.mark.parametrize("page_size", [0, 16])
def test_no_lengths_are_full_caches(version: Any, page_size: int) -> None:
    case = replace(NAMED["full_cache"], page_size=page_size, causal=False)
    judge(version, build(case, torch.float64), cache_seqlens=None)


@VERSIONS
@pytest.mark.parametrize(
    ("window", "given_as"), [((4, 1), torch.tensor([4, 1])), ((5, -1), [5, -3]), ((-1, -1), (-7, -2))], ids=str
)
def test_windows_of_any_form(version: Any, window: tuple[int, int], given_as: Any) -> None:
    call = build(case_of("window", 3, window=window, causal=False), torch.float64)
    judge(version, call, window_size=given_as)


def test_entries_of_flash_attention_3_are_rows_of_its_table() -> None:
    call = build(case_of("rows of a table", 3, 3, page_size=4), torch.float64)
    rows = torch.tensor([3, 0, 4], dtype=torch.int32)
    table = torch.full((5, call.tensors.page_table.shape[1]), -1, dtype=torch.int32)
    table[rows.long()] = call.tensors.page_table
    judge(fa3, call, page_table=table, cache_batch_idx=rows)


def test_new_keys_of_packed_queries_need_not_be_packed() -> None:
    case = replace(case_of("alike", 0, 2, packed=True), sequences=((9, 4, 2), (0, 1, 2), (17, 2, 2)))
    call = build(case, torch.float64)
    new = {name: call.keywords[name].unflatten(0, (3, 2)) for name in "kv"}
    judge(fa3, call, **new, cu_seqlens_k_new=None)


TO_PAGES = case_of("append to pages", 4, 4, page_size=3)
HINTS = [
    (fa2, {"num_splits": 3}),
    (fa3, {"num_splits": 5, "pack_gqa": True, "sm_margin": 8}),
    (fa3, {"num_splits": 1, "pack_gqa": False, "scheduler_metadata": torch.zeros(9, dtype=torch.int32)}),
]


@pytest.mark.parametrize(("version", "hints"), HINTS, ids=["2", "3", "3, metadata"])
def test_how_to_divide_the_work_changes_no_bit(version: Any, hints: dict[str, Any]) -> None:
    once, again = (run(version, build(TO_PAGES, torch.float32), **more) for more in ({}, hints))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_metadata_is_made_and_taken() -> None:
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    call = {"num_heads_q": 4, "num_heads_kv": 2, "headdim": 16, "cache_seqlens": lengths, "max_seqlen_k_new": 3}
    more = {"cu_seqlens_q": cumulated((3, 1, 2)), "cache_leftpad": lengths, "window_size": torch.tensor([5, -1])}
    for each in ({}, {**more, "headdim_v": 8, "page_size": 4, "num_splits": 3, "sm_margin": 2, "has_softcap": True}):
        plan = fa3.get_scheduler_metadata(3, 3, torch.tensor(24), **call, qkv_dtype=torch.float16, **each)
        assert plan.dtype == torch.int32 and plan.tolist() == [0]
        case = case_of("causal", 5)
        both = [run(fa3, build(case, torch.float32), scheduler_metadata=x) for x in (None, plan)]
        assert torch.equal(both[0][0], both[1][0])


@VERSIONS
def test_tensors_that_require_grad_are_detached(version: Any) -> None:
    case = case_of("append", 2, 2)
    plain, call = build(case, torch.float32), build(case, torch.float32)
    for x in (call.tensors.q, call.tensors.k_cache, call.tensors.v_cache, call.keywords["k"], call.keywords["v"]):
        x.requires_grad_()
    for a, b in zip(run(version, plain), run(version, call), strict=True):
        assert torch.equal(a, b) and not b.requires_grad
    assert torch.equal(call.tensors.k_cache.nan_to_num(), plain.tensors.k_cache.nan_to_num())


def test_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    for version, case in ((fa2, case_of("turn", 3, 3, rotary=16)), (fa3, TO_PAGES)):
        eager, traced = build(case, torch.float64), build(case, torch.float64)
        compiled = torch.compile(version.flash_attn_with_kvcache, fullgraph=True, backend="eager")
        assert_same((compiled(**given(version, traced)),), run(version, eager)[:1])
        for name in ("k_cache", "v_cache"):
            assert torch.equal(getattr(traced.tensors, name).nan_to_num(), getattr(eager.tensors, name).nan_to_num())


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (3, 2), "softcap": 2.0}, {"alibi": "bh"}], ids=str
)
def test_packed_queries_over_pages(options: dict[str, Any]) -> None:
    call, args = packed_over_pages(torch.float64, **options)
    words = {"causal": call.case.causal, "softcap": call.case.softcap, "window_size": call.case.window or (-1, -1)}
    words |= {"alibi_slopes": call.tensors.alibi_slopes, "block_table": call.tensors.page_table}
    before = call.copies()
    out, lse, probs = fa2.flash_attn_varlen_func(*args, **words, deterministic=True, return_attn_probs=True)
    judge_results(call, before, before, out, lse)
    assert probs.numel() == 0 and torch.equal(fa2.flash_attn_varlen_func(*args, **words), out)


def test_private_packed_forward_over_pages() -> None:
    call, args = packed_over_pages(torch.float64)
    table = call.tensors.page_table
    out, lse, _ = fa2.flash_attn_varlen_func(
        *args, causal=True, window_size=(6, 0), return_attn_probs=True, block_table=table
    )
    tail = (0.0, 16**-0.5, True, 6, 0)
    found = private._flash_attn_varlen_forward(*args, *tail, block_table=table)
    assert_same(found[:2], (out, lse))
    assert found[2].numel() == 0 and found[3].tolist() == [0, 0]
    longer, lengths = (*args[:4], cumulated((20, 20, 20)), 7, 20), torch.tensor(LENGTHS, dtype=torch.int32)
    used = private._flash_attn_varlen_forward(*longer, *tail, block_table=table, seqused_k=lengths)
    assert_same(used[:2], (out, lse))


def test_pages_have_no_gradient_and_say_so_when_it_is_asked_for() -> None:
    call, args = packed_over_pages(torch.float32)
    pages = {"block_table": call.tensors.page_table}
    expected_out = fa2.flash_attn_varlen_func(*args, **pages)
    q = args[0].clone().requires_grad_()
    out, lse, _ = fa2.flash_attn_varlen_func(q, *args[1:], **pages, return_attn_probs=True)
    assert torch.equal(out, expected_out)
    for x in (out, lse):
        with pytest.raises(UnsupportedError, match="^block_table: attention over a cache has no gradient"):
            x[0].sum().backward()
    with torch.no_grad():
        assert not fa2.flash_attn_varlen_func(q, *args[1:], **pages).requires_grad


CAPACITY = 24


def second(**changed: Any) -> Any:
    call = build(case_of("bad", 1, 1, page_size=8), torch.float32)
    return fa2.flash_attn_with_kvcache(**{**given(fa2, call), **changed})


def third(**changed: Any) -> Any:
    call = build(case_of("bad", 1, 1, page_size=8), torch.float32)
    rows = {"cache_batch_idx": torch.tensor((1, 0, 2), dtype=torch.int32)}
    return fa3.flash_attn_with_kvcache(**{**given(fa3, call), **rows, **changed})


def varlen(**changed: Any) -> Any:
    call, args = packed_over_pages(torch.float32)
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    words = {**dict(zip(names, args, strict=True)), "block_table": call.tensors.page_table}
    return fa2.flash_attn_varlen_func(**{**words, **changed})


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def plan(**changed: Any) -> Tensor:
    call = {"batch_size": 3, "max_seqlen_q": 1, "max_seqlen_k": 9, "num_heads_q": 4, "num_heads_kv": 2, "headdim": 16}
    return fa3.get_scheduler_metadata(**{**call, "cache_seqlens": int32((1, 2, 3)), **changed})


BAD_CALLS = {
    "2, table": ("block_table", lambda: second(block_table=int32([[0, 1, 2]]))),
    "2, page": ("block_table", lambda: second(block_table=int32([[0, 1, 99]] * 3))),
    "2, entries": ("cache_batch_idx", lambda: second(cache_batch_idx=int32((0, 1, 2)))),
    "2, too long": ("cache_seqlens", lambda: second(cache_seqlens=int32((9, 0, CAPACITY)))),
    "2, one too long": ("cache_seqlens", lambda: second(cache_seqlens=CAPACITY)),
    "2, no lengths": ("cache_seqlens", lambda: second(cache_seqlens=None)),
    "2, v alone": ("v", lambda: second(k=None)),
    "2, sin alone": ("rotary_sin", lambda: second(rotary_sin=torch.zeros(CAPACITY, 8))),
    "2, interleaved": ("rotary_interleaved", lambda: second(rotary_interleaved=None)),
    "2, splits": ("num_splits", lambda: second(num_splits="auto")),
    "2, lse": ("return_softmax_lse", lambda: second(return_softmax_lse=1)),
    "2, window": ("window_size", lambda: second(window_size=(1, 2, 3))),
    "2, cache": ("k_cache", lambda: second(cache_seqlens=None, k=None, v=None, k_cache=torch.zeros(3, 8))),
    "2, list": ("block_table", lambda: second(cache_seqlens=None, k=None, v=None, block_table=[[0]])),
    "3, row": ("cache_batch_idx", lambda: third(cache_batch_idx=int32((0, 1, 3)))),
    "3, rows": ("cache_batch_idx", lambda: third(cache_batch_idx=torch.tensor((0, 1, 2)))),
    "3, table": ("page_table", lambda: third(page_table=int32((0, 1, 2)))),
    "3, metadata": ("scheduler_metadata", lambda: third(scheduler_metadata=torch.zeros(4))),
    "3, empty metadata": ("scheduler_metadata", lambda: third(scheduler_metadata=int32(()))),
    "3, longest": ("max_seqlen_q", lambda: third(max_seqlen_q=0)),
    "3, margin": ("sm_margin", lambda: third(sm_margin=None)),
    "3, positions": ("rotary_seqlens", lambda: third(rotary_seqlens=torch.zeros(3))),
    "3, float8": ("k_cache", lambda: third(q=torch.zeros(3, 1, 4, 16).to(torch.float8_e4m3fn))),
    "3, descale": ("q_descale", lambda: third(q_descale=torch.ones(3, 2))),
    "varlen, page": ("block_table", lambda: varlen(block_table=int32([[0, 99, 1, 2, 3]] * 3))),
    "varlen, too long": ("cu_seqlens_k", lambda: varlen(cu_seqlens_k=cumulated((9, 99, 17)), max_seqlen_k=99)),
    "varlen, longest": ("max_seqlen_k", lambda: varlen(max_seqlen_k=16)),
    "varlen, longest q": ("max_seqlen_q", lambda: varlen(max_seqlen_q=2)),
    "varlen, bounds": ("cu_seqlens_k", lambda: varlen(cu_seqlens_k=torch.tensor((0, 9, 9, 26)))),
    "varlen, no bounds": ("cu_seqlens_q", lambda: varlen(cu_seqlens_q=None)),
    "varlen, keys": ("k", lambda: varlen(k=torch.zeros(26, 2, 16))),
    "varlen, dropout": ("dropout_p", lambda: varlen(dropout_p=1.0)),
    "varlen, flag": ("deterministic", lambda: varlen(deterministic=None)),
    "plan, size": ("headdim", lambda: plan(headdim=-1)),
    "plan, heads": ("num_heads_q", lambda: plan(num_heads_q=3)),
    "plan, dtype": ("qkv_dtype", lambda: plan(qkv_dtype=torch.float8_e5m2)),
    "plan, lengths": ("cache_seqlens", lambda: plan(cache_seqlens=int32((1, 2)))),
    "plan, bounds": ("cu_seqlens_q", lambda: plan(cu_seqlens_q=int32((0, 1, 2)))),
    "plan, window": ("window_size", lambda: plan(window_size=3)),
    "plan, causal": ("causal", lambda: plan(causal=1)),
    "plan, cap": ("has_softcap", lambda: plan(has_softcap=2.0)),
}


# By the words of the error that say what to give instead.
CURES = {
    "k: .*for pages block_table is missing": lambda: varlen(block_table=None),
    "v: .*for pages block_table is missing": lambda: varlen(block_table=None, k=torch.zeros(26, 2, 16)),
    "k: .*for pages flash_attn_with_kvcache has page_table": lambda: fa3.flash_attn_varlen_func(
        torch.zeros(4, 2, 16), *[torch.zeros(2, 8, 2, 16)] * 2, *[int32((0, 4))] * 2, 4, 4
    ),
    "cache_seqlens: .* without block_table": lambda: second(block_table=None, cache_seqlens=int32((9, 0, 3))),
    "cache_seqlens: .*cache of 8 without block_table": lambda: second(block_table=None, cache_seqlens=9),
    "k_cache: .* without cache_batch_idx and block_table": lambda: second(
        block_table=None, k_cache=torch.zeros(2, 8, 2, 16), v_cache=torch.zeros(2, 8, 2, 16)
    ),
    "cache_seqlens: .* without page_table": lambda: third(page_table=None, cache_seqlens=int32((9, 0, 3))),
    "block_table: .* of two new keys in its row 3 one would be lost": lambda: second(
        block_table=int32([[0], [1], [0]]), cache_seqlens=int32((3, 3, 3))
    ),
    "k_descale: .* has k_scale for 8-bit caches": lambda: third(k_descale=torch.ones(3, 2)),
    "v_descale: .* has v_scale for 8-bit caches": lambda: third(v_descale=torch.ones(3, 2)),
    "q_descale: .*q has torch.float32$": lambda: third(q_descale=torch.ones(3, 2)),
    "alibi_slopes: .*flashtile.mods.alibi": lambda: fa2.flash_attn_func(
        *[torch.zeros(1, 4, 2, 8)] * 3, alibi_slopes=torch.zeros(2, requires_grad=True)
    ),
}


@pytest.mark.parametrize("words", CURES)
def test_errors_say_what_to_give_instead(words: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{words}"):
        CURES[words]()


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_name_their_argument(case: str) -> None:
    argument, call = BAD_CALLS[case]
    with pytest.raises(InvalidInputError, match=f"^{argument}: ") as caught:
        call()
    assert caught.value.argument == argument


def test_what_is_not_supported_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="^dropout_p: "):
        varlen(dropout_p=0.1)
