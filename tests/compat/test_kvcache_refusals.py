"""What flash_attn_with_kvcache, pages and metadata refuse, and that the refusal names the caller's argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile import InvalidInputError, UnsupportedError
from flashtile.compat import flash_attn_2 as fa2
from flashtile.compat import flash_attn_3 as fa3
from tests.compat.by_hand import cumulated
from tests.compat.caches import case_of, given, packed_over_pages
from tests.kvcache.cases import build

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
