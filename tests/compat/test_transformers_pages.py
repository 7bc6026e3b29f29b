"""transformers' decoding over pages, with flash-attn's function found and called as that library does it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import modeling_flash_attention_utils as utils

from flashtile.compat import flash_attn_2 as fa2
from flashtile.compat import flash_attn_3 as fa3
from tests.compat.by_hand import assert_same, cumulated
from tests.compat.caches import LENGTHS, case_of
from tests.kvcache.cases import build, judge_caches


@pytest.mark.parametrize("version", [fa2, fa3], ids=["2", "3"])
@pytest.mark.parametrize("sliding_window", [None, 2])
def test_decoding_over_pages(version: Any, sliding_window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = (version.flash_attn_func, version.flash_attn_varlen_func, version.flash_attn_with_kvcache)
    processes = tuple(utils._lazy_define_process_function(function) for function in functions[1:])
    monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda _: ((*functions, None, None), processes))
    window = None if sliding_window is None else (sliding_window - 1, sliding_window - 1)
    case = case_of("transformers", new=1, page_size=4, softcap=3.0, scale=0.3, window=window)
    call = build(case, torch.float64)
    t, before = call.tensors, call.copies()
    rows = {name: getattr(t, name).flatten(0, 1)[None] for name in "qkv"}
    out = utils._flash_attention_forward(
        rows["q"],
        rows["k"],
        rows["v"],
        None,
        query_length=3,
        is_causal=True,
        softmax_scale=0.3,
        softcap=3.0,
        sliding_window=sliding_window,
        cu_seq_lens_k=cumulated(tuple(length + 1 for length in LENGTHS)),
        cu_seq_lens_q=cumulated((1, 1, 1)),
        max_length_q=1,
        max_length_k=1,
        block_table=t.page_table,
        k_cache=t.k_cache,
        v_cache=t.v_cache,
    )
    judge_caches(call, before, call.copies())
    want, _ = build(case, torch.float64).run("cpu")
    assert_same((out.view_as(want),), (want,))
