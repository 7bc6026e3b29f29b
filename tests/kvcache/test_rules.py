"""Cached calls on the CPU: the table, rules beside numbers, functions of users, what ``supports`` says."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch

import flashtile
from flashtile import InvalidInputError, UnsupportedError, masks, mods
from flashtile.call import cached_problem
from flashtile.call.backend import FEATURES
from flashtile.ops import dispatch
from tests.kvcache.alone import invariance_cases, judge_alone
from tests.kvcache.cases import CASES, CacheCase, build, judge
from tests.kvcache.functions import HUGE, KINDS, LENGTHS, error, huge_error

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: CacheCase, dtype: torch.dtype) -> None:
    judge(build(case, dtype), "cpu")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", invariance_cases(), ids=str)
def test_a_sequence_gives_the_same_bits_in_any_batch(case: CacheCase, dtype: torch.dtype) -> None:
    judge_alone(case, dtype, "cpu")


def test_bits_do_not_depend_on_where_rows_lie() -> None:
    """PyTorch's products of float32 round otherwise where rows are not on 64 bytes, as behind others of odd width."""
    sequences = ((64, 3, 0), (64, 34, 0), (129, 1, 0), (70, 39, 0))
    judge_alone(CacheCase("odd", sequences, packed=True, heads=2, kv_heads=1, head_dim=193), torch.float32, "cpu")


def test_sequences_may_share_pages_and_entries() -> None:
    """A prefix that two sequences have in common is there once; new keys go to pages of their own."""
    pages, new = torch.randn(4, 4, 2, 8), torch.randn(2, 1, 2, 8)
    q, lengths = torch.randn(2, 1, 4, 8), torch.tensor([5, 6], dtype=torch.int32)
    table = torch.tensor([[2, 0], [2, 3]], dtype=torch.int32)
    k_pages, v_pages = pages.clone(), pages.clone()
    got = flashtile.attention_with_kvcache(q, k_pages, v_pages, cache_seqlens=lengths, page_table=table, k=new, v=new)
    for b, last in enumerate((0, 3)):
        keys = torch.cat([pages[2], pages[last][: int(lengths[b]) - 4], new[b]])[None]
        torch.testing.assert_close(got[b : b + 1], flashtile.attention(q[b : b + 1], keys, keys))
    entry = torch.zeros(2, dtype=torch.int32)
    twice = flashtile.attention_with_kvcache(q, pages, pages, cache_seqlens=lengths // 2, cache_batch_idx=entry)
    for b in range(2):
        keys = pages[:1, : int(lengths[b]) // 2]
        torch.testing.assert_close(twice[b : b + 1], flashtile.attention(q[b : b + 1], keys, keys))


@pytest.mark.parametrize("where", ["k", "v", "k_cache", "v_cache", "q"])
def test_a_nan_that_is_seen_is_not_lost(where: str) -> None:
    data = {"q": torch.randn(2, 1, 4, 8), "k_cache": torch.randn(2, 9, 2, 8), "v_cache": torch.randn(2, 9, 2, 8)}
    data |= {"k": torch.randn(2, 1, 2, 8), "v": torch.randn(2, 1, 2, 8)}
    for dtype in (torch.float32, torch.float8_e4m3fn):
        mine = {name: x.clone() for name, x in data.items()}
        mine[where][0, 0, 1, 2] = torch.nan
        caches = [mine.pop(name).to(dtype) for name in ("k_cache", "v_cache")]
        out = flashtile.attention_with_kvcache(mine.pop("q"), *caches, cache_seqlens=5, **mine)
        assert out[0, 0, 1 if where == "q" else 2 :, 2].isnan().any() and out[1].isfinite().all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LENGTHS)
def test_they_count_from_the_first_query_and_the_first_key(name: str, kind: str, packed: bool) -> None:
    assert error(LENGTHS[name], kind, "cpu", packed=packed) < 1e-5


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("value", HUGE)
def test_scores_as_huge_as_float32_has_them(value: float, sinks: bool) -> None:
    assert huge_error(value, "cpu", page_size=16 * sinks, packed=value == -1e9, sinks=sinks) < 1e-5


def test_what_goes_with_no_cache_is_refused() -> None:
    q, cache = torch.randn(1, 2, 2, 16), torch.randn(1, 20, 2, 16)
    tree = torch.ones(1, 2, 2, dtype=torch.bool).tril()
    slope = torch.ones(2, requires_grad=True)
    lists = flashtile.create_block_mask(mods.causal, None, None, 2, 20)
    for given, text in (
        ({"block_mask": lists}, "block_mask: is of type BlockMask"),
        ({"tree_mask": tree, "mask_mod": mods.causal}, "tree_mask: is given with score_mod or mask_mod"),
        ({"tree_mask": tree, "block_mask": masks.rows(0, torch.tensor(9))}, "tree_mask: is given with block_mask"),
        ({"score_mod": lambda score, b, h, q_idx, kv_idx: score * slope[h]}, "score_mod: requires grad"),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match=text):
            flashtile.attention_with_kvcache(q, cache, cache.clone(), cache_seqlens=9, **given)
    with pytest.raises(UnsupportedError, match="a function of the user's"):
        flashtile.attention_with_kvcache(
            q.half(), cache.half(), cache.half(), cache_seqlens=9, mask_mod=mods.dilated(3), backend="hopper"
        )
    said = flashtile.explain(q, k_cache=cache, v_cache=cache, cache_seqlens=9, mask_mod=mods.dilated(3), backend="cpu")
    assert "mask_mod" in said


E4M3 = torch.float8_e4m3fn


def test_backends_of_a_gpu() -> None:
    pytest.importorskip("triton")
    hopper = flashtile.supports(128, page_size=16, compute_capability=(9, 0))
    assert hopper and hopper.backend == "hopper" and hopper.reasons["hopper"] == [] and hopper.reasons["cpu"]
    older = flashtile.supports(128, page_size=16, compute_capability=(8, 0), besides=["softcap", "sinks"])
    assert older.backend == "portable" and "9.0" in older.reasons["hopper"][0]
    by_sequence = flashtile.supports(64, page_size=1, besides=["causal", "slot_mapping"], compute_capability=(9, 0))
    trees = flashtile.supports(64, cache_dtype=torch.float8_e5m2, besides=["tree_mask"], compute_capability=(9, 0))
    assert by_sequence.backend == trees.backend == "hopper"
    named = flashtile.supports(128, page_size=64, besides=["selected"], compute_capability=(9, 0))
    assert named.backend == "hopper"
    none = flashtile.supports(2048, compute_capability=(9, 0))
    assert not none and none.backend is None and all(none.reasons.values())


# What is no argument by itself: sizes, layouts, and what every cached call may have.
_BY_SIZE = {"grouped_heads", "unaligned", "varlen", "pages", "head_dim_v", "float8_cache", "float8_rows"}


def test_besides_has_every_feature_of_a_call_over_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    select = dispatch.select

    def noted(problem: Any, *more: Any) -> Any:
        seen.append(problem)
        return select(problem, *more)

    monkeypatch.setattr(dispatch, "select", noted)
    named = "window_size attention_chunk softcap alibi_slopes sinks causal tree_mask k slot_mapping rotary_cos qv"
    more = "cache_leftpad block_mask score_mod mask_mod batch_invariant return_max_scores selected"
    for each in f"{named} {more}".split(" "):
        assert flashtile.supports(64, dtype=torch.float32, page_size=16, besides=[each], device="cpu"), each
    assert flashtile.supports(64, dtype=torch.float32, page_size=16, besides=["page_indptr"], device="cpu")
    for each in ("cache_batch_idx", "selected_slots"):
        assert flashtile.supports(64, dtype=torch.float32, besides=[each], device="cpu")
    wanted = {f.name for f in FEATURES if "decode" in f.directions} - _BY_SIZE
    assert {f.name for f in FEATURES if any(f.used(p) for p in seen)} >= wanted
    masked = flashtile.supports(64, page_size=16, besides=["block_mask"], compute_capability=(9, 0))
    assert masked.backend == "portable" and "interval masks" in masked.reasons["hopper"][0]


@pytest.mark.parametrize("page_size", [0, 5])
@pytest.mark.parametrize("cache_dtype", [None, E4M3], ids=str)
@pytest.mark.parametrize("head_dim", [1, 24, 64, 2048])
def test_the_cpu_does_what_it_says(head_dim: int, cache_dtype: Any, page_size: int) -> None:
    found = flashtile.supports(
        head_dim, head_dim_v=16, dtype=torch.float32, cache_dtype=cache_dtype, page_size=page_size,
        besides=["window_size", "alibi_slopes", "sinks"], device="cpu",
    )  # fmt: skip
    caches = [torch.ones(2, page_size or 8, 1, dim).to(cache_dtype or torch.float32) for dim in (head_dim, 16)]
    given: dict[str, Any] = dict(cache_seqlens=1, window_size=(2, 0), alibi_slopes=torch.ones(1), sinks=torch.ones(1))
    given |= {"cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32)}
    if page_size:
        given["page_table"] = torch.tensor([[1]], dtype=torch.int32)
    try:
        flashtile.attention_with_kvcache(torch.ones(3, 1, head_dim), *caches, **given)
    except UnsupportedError as error:
        assert not found and found.reasons == error.reasons
    else:
        assert found.backend == "cpu"


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("head_dim", {"head_dim": 0}), ("head_dim_v", {"head_dim_v": -1}), ("page_size", {"page_size": 1.5}),
        ("besides", {"besides": ["bias"]}), ("q", {"dtype": torch.int32}), ("k_cache", {"cache_dtype": torch.int8}),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(argument: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=f"^{argument}: "):
        flashtile.supports(**{"head_dim": 64, "device": "cpu"} | given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(InvalidInputError, match="compute_capability: is None, but torch finds no GPU here"):
        flashtile.supports(64)


def test_a_cache_of_8_bits_without_scales_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_problem, "_warned", False)
    q, cache = torch.ones(1, 1, 1, 16), torch.ones(1, 8, 1, 16)
    for kind, scales, shown in (
        (torch.float8_e5m2, {}, ""),
        (E4M3, {"k_scale": 1.0, "v_scale": 1.0}, ""),
        (E4M3, {"k_scale": 1.0}, "without v_scale is .*give v_scale=1.0$"),
        (E4M3, {}, ""),
    ):
        held = cache.to(kind)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            flashtile.explain(q, k_cache=held, v_cache=held.clone(), cache_seqlens=8, **scales)
        assert len(caught) == bool(shown)
        assert not shown or re.search(shown, str(caught[0].message))
