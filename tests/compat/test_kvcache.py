"""flash_attn_with_kvcache of flash-attn 2 and 3, and pages, against scores written out by hand, one sequence a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile import UnsupportedError
from flashtile.compat import _private as private
from flashtile.compat import flash_attn_2 as fa2
from flashtile.compat import flash_attn_3 as fa3
from tests.compat.by_hand import assert_same, cumulated
from tests.compat.caches import CAPACITY, Call, Case, build, expected, int32, packed_over_pages
from tests.rule import assert_close

BOTH = (
    Case("one query"),
    Case("causal", rows=(5, 5, 5), options={"causal": True}),
    Case("more rows than keys", rows=(12, 12, 12), options={"causal": True, "window_size": (6, 6)}),
    Case("window", rows=(3, 3, 3), options={"window_size": torch.tensor([4, 1])}),
    Case("left window", rows=(2, 2, 2), options={"window_size": [5, -3]}),
    Case("cap and scale", rows=(2, 2, 2), options={"softcap": 1.5, "softmax_scale": 0.4}),
    Case("one key head", rows=(3, 3, 3), heads=(6, 1), options={"causal": True}),
    Case("full", lengths=None),
    Case("full in pages", lengths=None, page=6),
    Case("one length", lengths=7, rows=(2, 2, 2), options={"causal": True}),
    Case("left padding", leftpad=(3, 0, 16), rows=(2, 2, 2), options={"causal": True}),
    Case("entries", places=(4, 0, 2), rows=(2, 2, 2)),
    Case("pages of one", page=1, rows=(2, 2, 2), options={"causal": True}),
    Case("pages of seven", page=7, rows=(2, 2, 2), options={"window_size": (5, 0)}),
    Case("pages of sixteen", page=16),
    Case("padding in pages", page=4, leftpad=(5, 0, 9)),
    Case("append one", new=(1, 1, 1), options={"causal": True}),
    Case("append to pages", new=(4, 4, 4), rows=(4, 4, 4), page=3, options={"causal": True}),
    Case("append more than asked", new=(5, 5, 5), rows=(2, 2, 2)),
    Case("append less than asked", new=(2, 2, 2), rows=(6, 6, 6), options={"causal": True}),
    Case("append to entries", new=(3, 3, 3), rows=(3, 3, 3), places=(1, 4, 0), leftpad=(2, 0, 11)),
    Case("append to one length", new=(2, 2, 2), lengths=5, page=8, options={"causal": True}),
    Case("turn", new=(3, 3, 3), rows=(3, 3, 3), turned=16, options={"causal": True}),
    Case("turn halves", new=(3, 3, 3), rows=(3, 3, 3), turned=16, interleaved=False, options={"causal": True}),
    Case("turn some features", new=(2, 2, 2), rows=(4, 4, 4), turned=6, options={"window_size": (8, 3)}),
    Case("turn all rows alike", new=(4, 4, 4), rows=(3, 3, 3), turned=10, interleaved=False, page=5),
    Case("turn with padding", new=(2, 2, 2), rows=(2, 2, 2), turned=16, leftpad=(4, 0, 2), places=(3, 0, 1)),
)
SECOND = (
    Case("alibi", rows=(3, 3, 3), alibi=True, options={"causal": True}),
    Case("alibi, both sides", rows=(3, 3, 3), alibi=True, leftpad=(2, 0, 5)),
    Case("alibi in pages", rows=(2, 2, 2), new=(2, 2, 2), alibi=True, page=6, options={"causal": True}),
    Case("odd head dim", dims=(59, 59), rows=(2, 2, 2), new=(2, 2, 2), turned=58),
)
THIRD = (
    Case("wider values", dims=(16, 40), rows=(2, 2, 2)),
    Case("narrow values", dims=(24, 8), page=4, new=(1, 1, 1)),
    Case("rows of a table", places=(3, 0, 4), page=4, new=(3, 3, 3), rows=(3, 3, 3), options={"causal": True}),
    Case("packed", rows=(7, 0, 3), options={"causal": True}),
    Case("packed, new keys too", rows=(4, 0, 2), new=(3, 5, 0), page=5, options={"causal": True}),
    Case("packed, new keys alike", rows=(4, 1, 2), new=(2, 2, 2), options={"causal": True}),
    Case("new keys packed", rows=(2, 2, 2), new=(3, 0, 1), options={"causal": True}),
    Case("packed and turned", rows=(4, 0, 2), new=(4, 1, 2), turned=16, options={"causal": True}),
    Case("other positions", rows=(2, 2, 2), new=(2, 2, 2), turned=16, first=(4, 7, 0), options={"causal": True}),
    Case("other positions, all rows alike", rows=(3, 3, 3), new=(2, 2, 2), turned=12, first=(4, 7, 0), page=3),
)

NAMED = {case.name: case for case in (*BOTH, *SECOND, *THIRD)}


def run(version: Any, case: Case, call: Call, **more: Any) -> tuple[Tensor, Tensor]:
    """Calls the function by keywords; returns out packed and lse ``(num_heads_q, total_q)``."""
    names = {"table": "block_table" if version is fa2 else "page_table"}
    given = {names.get(name, name): value for name, value in call.tensors.items()}
    out, lse, *rest = version.flash_attn_with_kvcache(**given, **case.options, **more, return_softmax_lse=True)
    assert [x.numel() for x in rest] == ([] if version is fa2 else [0, 0])
    return (out, lse) if out.dim() == 3 else (out.flatten(0, 1), lse.transpose(0, 1).flatten(1))


EACH = [
    *((fa2, case) for case in (*BOTH, *SECOND)),
    *((fa3, case) for case in (*BOTH, *THIRD)),
]
IDS = [f"{version.__name__[-1]}-{case}" for version, case in EACH]


@pytest.mark.parametrize(("version", "case"), EACH, ids=IDS)
def test_out_lse_and_caches(version: Any, case: Case) -> None:
    call = build(case, torch.float64)
    before = tuple(call.tensors[name].clone() for name in ("k_cache", "v_cache"))
    q = call.tensors["q"].clone()
    out, lse = run(version, case, call)
    outs, lses, flat = expected(case, call, before, torch.float64)
    assert_same((out, lse), (torch.cat(outs), torch.cat(lses, dim=1)))
    for name, cache in zip(("k_cache", "v_cache"), flat, strict=True):
        torch.testing.assert_close(call.tensors[name].flatten(0, 1), cache, rtol=1e-10, atol=1e-11, equal_nan=True)
    assert torch.equal(call.tensors["q"], q), "the caller's queries have changed"


LOW = [
    (fa2, NAMED["causal"]),
    (fa2, NAMED["turn all rows alike"]),
    (fa3, NAMED["turn"]),
    (fa3, NAMED["packed, new keys too"]),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("version", "case"), LOW, ids=[str(case) for _, case in LOW])
def test_low_precision_errs_no_more_than_twice_pytorch(version: Any, case: Case, dtype: torch.dtype) -> None:
    call = build(case, dtype)
    before = tuple(call.tensors[name].clone() for name in ("k_cache", "v_cache"))
    out, lse = run(version, case, call)
    assert out.dtype == dtype and lse.dtype == torch.float32

    def by_hand(dtype: torch.dtype) -> dict[str, Tensor]:
        outs, lses, _ = expected(case, call, before, dtype)
        return {"out": torch.cat(outs), "lse": torch.cat(lses, dim=1)}

    assert_close({"out": out, "lse": lse}, lambda: by_hand(torch.float64), by_hand(dtype), dtype)
    flat = expected(case, call, before, torch.float64)[2]
    # One rounding of each turned key; values are copied.
    keys, values = (call.tensors[name].flatten(0, 1) for name in ("k_cache", "v_cache"))
    torch.testing.assert_close(keys, flat[0], rtol=torch.finfo(dtype).eps, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(values, flat[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("version", [fa2, fa3], ids=["2", "3"])
def test_caches_of_eight_bits_hold_rounded_keys(version: Any) -> None:
    """New keys and values are rounded to float8, so a call over the same numbers in q's dtype gives the same."""
    case = NAMED["append to pages"]
    low, high = build(case, torch.float32), build(case, torch.float32)
    for name in ("k_cache", "v_cache", "k", "v"):
        rounded = high.tensors[name].to(torch.float8_e4m3fn)
        high.tensors[name] = rounded.float()
        if name.endswith("cache"):
            low.tensors[name] = rounded
    found, wide = run(version, case, low), run(version, case, high)
    for a, b in zip(found, wide, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(low.tensors[name].float().nan_to_num(), high.tensors[name].nan_to_num())


HINTS = [
    (fa2, {"num_splits": 3}),
    (fa3, {"num_splits": 5, "pack_gqa": True, "sm_margin": 8}),
    (fa3, {"num_splits": 1, "pack_gqa": False, "scheduler_metadata": torch.zeros(9, dtype=torch.int32)}),
]


@pytest.mark.parametrize(("version", "hints"), HINTS, ids=["2", "3", "3, metadata"])
def test_how_to_divide_the_work_changes_no_bit(version: Any, hints: dict[str, Any]) -> None:
    case = NAMED["append to pages"]
    once, again = (run(version, case, build(case, torch.float32), **more) for more in ({}, hints))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_metadata_is_made_and_taken() -> None:
    lengths = int32((9, 0, 17))
    call = {"num_heads_q": 4, "num_heads_kv": 2, "headdim": 16, "cache_seqlens": lengths, "max_seqlen_k_new": 3}
    given = {"cu_seqlens_q": cumulated((3, 1, 2)), "cache_leftpad": lengths, "window_size": torch.tensor([5, -1])}
    for more in ({}, {**given, "headdim_v": 8, "page_size": 4, "num_splits": 3, "sm_margin": 2, "has_softcap": True}):
        plan = fa3.get_scheduler_metadata(3, 3, torch.tensor(CAPACITY), **call, qkv_dtype=torch.float16, **more)
        assert plan.dtype == torch.int32 and plan.tolist() == [0]
        case = NAMED["causal"]
        both = [run(fa3, case, build(case, torch.float32), scheduler_metadata=x) for x in (None, plan)]
        assert torch.equal(both[0][0], both[1][0])


@pytest.mark.parametrize("version", [fa2, fa3], ids=["2", "3"])
def test_tensors_that_require_grad_are_detached(version: Any) -> None:
    case = Case("append", new=(2, 2, 2), rows=(2, 2, 2), options={"causal": True})
    plain, call = build(case, torch.float32), build(case, torch.float32)
    for name in ("q", "k_cache", "v_cache", "k", "v"):
        call.tensors[name].requires_grad_()
    expected_pair, found = run(version, case, plain), run(version, case, call)
    assert all(torch.equal(a, b) and not b.requires_grad for a, b in zip(expected_pair, found, strict=True))
    assert torch.equal(call.tensors["k_cache"].nan_to_num(), plain.tensors["k_cache"].nan_to_num())


def test_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    for version, case in ((fa2, NAMED["turn"]), (fa3, NAMED["rows of a table"])):
        eager, traced = build(case, torch.float64), build(case, torch.float64)
        names = {"table": "block_table" if version is fa2 else "page_table"}
        given = {names.get(name, name): value for name, value in traced.tensors.items()}
        compiled = torch.compile(version.flash_attn_with_kvcache, fullgraph=True, backend="eager")
        out = compiled(**given, **case.options)
        assert_same((out.flatten(0, 1),), run(version, case, eager)[:1])
        for name in ("k_cache", "v_cache"):
            assert torch.equal(traced.tensors[name].nan_to_num(), eager.tensors[name].nan_to_num())


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 2), "softcap": 2.0}, {"alibi": True}])
def test_packed_queries_over_pages(options: dict[str, Any]) -> None:
    case, call, args = packed_over_pages(torch.float64)
    alibi = bool(options.pop("alibi", False)) if "alibi" in options else False
    meaning = dict(options)
    if alibi:
        call.tensors["alibi_slopes"] = meaning["alibi_slopes"] = torch.rand(3, 4)
    case = Case(**{**vars(case), "options": options, "alibi": alibi})
    found = fa2.flash_attn_varlen_func(
        *args, **meaning, block_table=call.tensors["table"], deterministic=True, return_attn_probs=True
    )
    caches = call.tensors["k_cache"], call.tensors["v_cache"]
    outs, lses, _ = expected(case, call, caches, torch.float64)
    assert_same(found[:2], (torch.cat(outs), torch.cat(lses, dim=1)))
    assert found[2].numel() == 0
    alone = fa2.flash_attn_varlen_func(*args, **meaning, block_table=call.tensors["table"])
    assert torch.equal(alone, found[0])


def test_private_packed_forward_over_pages() -> None:
    _, call, args = packed_over_pages(torch.float64)
    out, lse, _ = fa2.flash_attn_varlen_func(
        *args, causal=True, window_size=(6, 0), return_attn_probs=True, block_table=call.tensors["table"]
    )
    tail, table = (0.0, 16**-0.5, True, 6, 0), call.tensors["table"]
    found = private._flash_attn_varlen_forward(*args, *tail, block_table=table)
    assert_same(found[:2], (out, lse))
    assert found[2].numel() == 0 and found[3].tolist() == [0, 0]
    longer = (*args[:4], cumulated((20, 20, 20)), 7, 20)
    used = private._flash_attn_varlen_forward(*longer, *tail, block_table=table, seqused_k=int32(call.lengths))
    assert_same(used[:2], (out, lse))


def test_pages_have_no_gradient_and_say_so_when_it_is_asked_for() -> None:
    _, call, args = packed_over_pages(torch.float32)
    expected_out = fa2.flash_attn_varlen_func(*args, block_table=call.tensors["table"])
    q = args[0].clone().requires_grad_()
    out, lse, _ = fa2.flash_attn_varlen_func(q, *args[1:], block_table=call.tensors["table"], return_attn_probs=True)
    assert torch.equal(out, expected_out)
    for x in (out, lse):
        with pytest.raises(UnsupportedError, match="^block_table: attention over keys in pages has no gradient"):
            x[0].sum().backward()
    with torch.no_grad():
        assert not fa2.flash_attn_varlen_func(q, *args[1:], block_table=call.tensors["table"]).requires_grad
