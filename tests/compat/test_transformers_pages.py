"""transformers' decoding over pages, with flash-attn's function found and called as that library does it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import modeling_flash_attention_utils as utils

from flashtile.compat import flash_attn_2 as fa2
from flashtile.compat import flash_attn_3 as fa3
from tests.compat.by_hand import assert_same, cumulated
from tests.compat.caches import Case, build, expected


@pytest.mark.parametrize("version", [fa2, fa3], ids=["2", "3"])
@pytest.mark.parametrize("sliding_window", [None, 2])
def test_decoding_over_pages(version: Any, sliding_window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = (version.flash_attn_func, version.flash_attn_varlen_func, version.flash_attn_with_kvcache)
    processes = tuple(utils._lazy_define_process_function(function) for function in functions[1:])
    monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda _: ((*functions, None, None), processes))
    options: dict[str, Any] = {"causal": True, "softcap": 3.0, "softmax_scale": 0.3}
    if sliding_window is not None:
        options["window_size"] = (sliding_window - 1, sliding_window - 1)
    case = Case("transformers", new=(1, 1, 1), page=4, options=options)
    call = build(case, torch.float64)
    t = call.tensors
    before = t["k_cache"].clone(), t["v_cache"].clone()
    rows = {name: t[name].flatten(0, 1)[None] for name in "qkv"}
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
        cu_seq_lens_k=cumulated(tuple(length + 1 for length in call.lengths)),
        cu_seq_lens_q=cumulated((1, 1, 1)),
        max_length_q=1,
        max_length_k=1,
        block_table=t["table"],
        k_cache=t["k_cache"],
        v_cache=t["v_cache"],
    )
    outs, _, flat = expected(case, call, before, torch.float64)
    assert_same((out[0],), (torch.cat(outs),))
    for name, cache in zip(("k_cache", "v_cache"), flat, strict=True):
        torch.testing.assert_close(t[name].flatten(0, 1), cache, rtol=0, atol=0, equal_nan=True)
