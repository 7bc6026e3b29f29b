"""Bad cached calls: each is refused at once by an error that names the argument, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import InvalidInputError, UnsupportedError, masks, reference
from flashtile.call.cached_arguments import FLOAT8, CacheOptions, CacheTensors
from flashtile.call.cached_problem import problem_of
from flashtile.ops.cached import CACHED

Q, CACHE, NEW = torch.randn(2, 3, 4, 8), torch.randn(3, 16, 2, 8), torch.randn(2, 3, 2, 8)
ROWS, PACKED_NEW = torch.randn(5, 4, 8), torch.randn(5, 2, 8)


def index(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


LENGTHS, BOUNDS, PAGES = index(5, 9), index(0, 2, 5), index([0, 1], [2, -1])
PAGED: dict[str, Any] = {"page_indptr": index(0, 1, 2), "page_indices": index(0, 1, 2)}
COS = torch.ones(30, 4)
SLOTS = torch.arange(6).view(2, 3)
SELECTED = torch.arange(4, dtype=torch.int32).expand(2, 3, 4)
TREE = torch.ones(2, 3, 3).tril() > 0
BITS = CACHE.to(FLOAT8)
# Pages of two rows.
SMALL: dict[str, Any] = {"k_cache": CACHE.view(24, 2, 2, 8), "v_cache": CACHE.view(24, 2, 2, 8).clone()}


def new(**changes: Any) -> dict[str, Any]:
    return {"k": NEW, "v": NEW} | changes


def separate(**changes: Any) -> dict[str, Any]:
    return new(v_cache=CACHE.clone()) | changes


def paged(**changes: Any) -> dict[str, Any]:
    return {"page_table": PAGES} | changes


def packed(**changes: Any) -> dict[str, Any]:
    return {"q": ROWS, "cu_seqlens_q": BOUNDS} | changes


def meeting(**changes: Any) -> dict[str, Any]:
    """New keys at rows 5 to 7 and 7 to 9."""
    return separate(cache_seqlens=index(5, 7)) | changes


def packed_slots(slots: Tensor) -> dict[str, Any]:
    return packed(v_cache=CACHE.clone(), k=PACKED_NEW, v=PACKED_NEW, slot_mapping=slots)


def rotary(**changes: Any) -> dict[str, Any]:
    return new(v_cache=CACHE.clone(), rotary_cos=COS, rotary_sin=COS) | changes


def bits(**changes: Any) -> dict[str, Any]:
    return {"k_cache": BITS, "v_cache": BITS} | changes


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "score_mod a number": ("score_mod", {"score_mod": 1.0}),
    "mask_mod of two arguments": ("mask_mod", {"mask_mod": lambda q_idx, kv_idx: q_idx >= kv_idx}),
    "block_mask a tensor": ("block_mask", {"block_mask": torch.ones(3)}),
    "block_mask of other rows": ("block_mask", {"block_mask": masks.rows(0, torch.ones(7, dtype=torch.int32))}),
    "q a list": ("q", {"q": [1.0]}),
    "q None": ("q", {"q": None}),
    "q of rank 0": ("q", {"q": torch.tensor(1.0)}),
    "q of rank 3": ("q", {"q": ROWS}),
    "q of rank 4 with cu_seqlens_q": ("q", packed(q=Q)),
    "q integer": ("q", {"q": Q.int(), "k_cache": CACHE.int(), "v_cache": CACHE.int()}),
    "q of 8 bits": ("q", bits(q=Q.to(FLOAT8))),
    "q nested": ("q", {"q": torch.nested.nested_tensor(list(Q))}),
    "q sparse": ("q", {"q": Q.to_sparse()}),
    "q that requires grad": ("q", {"q": Q.clone().requires_grad_()}),
    "heads that do not divide": ("q", {"q": Q[:, :, :3]}),
    "no heads": ("q", {"q": Q[:, :, :0]}),
    "k_cache None": ("k_cache", {"k_cache": None}),
    "k_cache of rank 3": ("k_cache", {"k_cache": CACHE[0]}),
    "k_cache head_dim": ("k_cache", {"k_cache": CACHE[..., :6]}),
    "k_cache dtype": ("k_cache", {"k_cache": CACHE.half(), "v_cache": CACHE.half()}),
    "k_cache e4m3fnuz": ("k_cache", {"k_cache": CACHE.to(torch.float8_e4m3fnuz)}),
    "v_cache of other 8 bits": ("v_cache", bits(v_cache=CACHE.to(torch.float8_e5m2))),
    "k_cache device": ("k_cache", {"k_cache": CACHE.to("meta")}),
    "k_cache sparse": ("k_cache", {"k_cache": CACHE.to_sparse()}),
    "k_cache strided": ("k_cache", {"k_cache": CACHE.mT.contiguous().mT}),
    "k_cache with fewer entries": ("k_cache", {"k_cache": CACHE[:1], "v_cache": CACHE[:1]}),
    "k_cache that requires grad": ("k_cache", {"k_cache": CACHE.clone().requires_grad_()}),
    "k_cache expanded and written": ("k_cache", new(k_cache=CACHE[:1].expand(3, 16, 2, 8))),
    "k_cache without rows in a page": ("k_cache", paged(k_cache=CACHE[:, :0], v_cache=CACHE[:, :0])),
    "k_cache without heads": ("k_cache", {"k_cache": CACHE[:, :, :0], "v_cache": CACHE[:, :, :0]}),
    "v_cache None": ("v_cache", {"v_cache": None}),
    "v_cache nested": ("v_cache", {"v_cache": torch.nested.nested_tensor(list(CACHE))}),
    "v_cache of rank 0": ("v_cache", {"v_cache": torch.tensor(1.0)}),
    "v_cache capacity": ("v_cache", {"v_cache": CACHE[:, :9]}),
    "v_cache heads": ("v_cache", {"v_cache": CACHE[:, :, :1]}),
    "v_cache entries": ("v_cache", {"v_cache": CACHE[:2]}),
    "v_cache dtype": ("v_cache", {"v_cache": BITS}),
    "v_cache strided": ("v_cache", {"v_cache": CACHE.mT.contiguous().mT}),
    "cache_seqlens None": ("cache_seqlens", {"cache_seqlens": None}),
    "cache_seqlens a float": ("cache_seqlens", {"cache_seqlens": 5.0}),
    "cache_seqlens a bool": ("cache_seqlens", {"cache_seqlens": True}),
    "cache_seqlens a list": ("cache_seqlens", {"cache_seqlens": [5, 9]}),
    "cache_seqlens negative": ("cache_seqlens", {"cache_seqlens": -1}),
    "cache_seqlens too many": ("cache_seqlens", {"cache_seqlens": 17}),
    "cache_seqlens too many with new": ("cache_seqlens", new(cache_seqlens=14)),
    "cache_seqlens too many in pages": ("cache_seqlens", paged(cache_seqlens=33)),
    "cache_seqlens int64": ("cache_seqlens", {"cache_seqlens": LENGTHS.long()}),
    "cache_seqlens batch": ("cache_seqlens", {"cache_seqlens": index(1, 2, 3)}),
    "cache_seqlens of rank 2": ("cache_seqlens", {"cache_seqlens": LENGTHS[None]}),
    "cache_seqlens past the cache": ("cache_seqlens", {"cache_seqlens": index(5, 17)}),
    "cache_seqlens past the cache with new": ("cache_seqlens", new(cache_seqlens=index(5, 14))),
    "page_table a list": ("page_table", paged(page_table=[[0]])),
    "page_table int64": ("page_table", paged(page_table=PAGES.long())),
    "page_table batch": ("page_table", paged(page_table=PAGES[:1])),
    "page_table of rank 1": ("page_table", paged(page_table=PAGES[0])),
    "page_table past the pages": ("page_table", paged(page_table=index([0, 1], [3, -1]))),
    "page_table negative": ("page_table", paged(cache_seqlens=index(5, 17))),
    "page_table with cache_batch_idx": ("cache_batch_idx", paged(cache_batch_idx=index(0, 1))),
    "cache_batch_idx batch": ("cache_batch_idx", {"cache_batch_idx": index(0)}),
    "cache_batch_idx int64": ("cache_batch_idx", {"cache_batch_idx": index(0, 1).long()}),
    "cache_batch_idx past the entries": ("cache_batch_idx", {"cache_batch_idx": index(0, 3)}),
    "cache_batch_idx negative": ("cache_batch_idx", {"cache_batch_idx": index(0, -1)}),
    "cache_leftpad batch": ("cache_leftpad", {"cache_leftpad": index(0)}),
    "cache_leftpad a float": ("cache_leftpad", {"cache_leftpad": torch.zeros(2)}),
    "cache_leftpad negative": ("cache_leftpad", {"cache_leftpad": index(0, -1)}),
    "k without v": ("k", {"k": NEW}),
    "v without k": ("v", {"v": NEW}),
    "k dtype": ("k", new(k=NEW.half())),
    "k batch": ("k", new(k=NEW[:1])),
    "k heads": ("k", new(k=NEW[:, :, :1])),
    "k head_dim": ("k", new(k=NEW[..., :4])),
    "k of rank 3": ("k", new(k=PACKED_NEW)),
    "k of rank 4 where packed": ("k", packed(k=NEW, v=NEW)),
    "k that requires grad": ("k", new(k=NEW.clone().requires_grad_())),
    "v seqlen_new": ("v", new(v=NEW[:, :2])),
    "v head_dim_v": ("v", new(v=NEW[..., :4])),
    "rotary_cos without rotary_sin": ("rotary_cos", new(rotary_cos=COS)),
    "rotary_sin without rotary_cos": ("rotary_sin", new(rotary_sin=COS)),
    "rotary_cos without new keys": ("rotary_cos", {"rotary_cos": COS, "rotary_sin": COS}),
    "rotary_cos wider than heads": ("rotary_cos", rotary(rotary_cos=torch.ones(30, 5), rotary_sin=torch.ones(30, 5))),
    "rotary_cos dtype": ("rotary_cos", rotary(rotary_cos=COS.half())),
    "rotary_cos of rank 3": ("rotary_cos", rotary(rotary_cos=COS[None])),
    "rotary_cos too short": ("rotary_cos", rotary(rotary_cos=COS[:11], rotary_sin=COS[:11])),
    "rotary_sin shape": ("rotary_sin", rotary(rotary_sin=COS[:, :2])),
    "rotary_sin positions": ("rotary_sin", rotary(rotary_sin=COS[:20])),
    "rotary_interleaved a number": ("rotary_interleaved", rotary(rotary_interleaved=1)),
    "rotary_interleaved alone": ("rotary_interleaved", {"rotary_interleaved": True}),
    "rotary_seqlens alone": ("rotary_seqlens", {"rotary_seqlens": LENGTHS}),
    "rotary_seqlens batch": ("rotary_seqlens", rotary(rotary_seqlens=index(0))),
    "rotary_seqlens negative": ("rotary_seqlens", rotary(rotary_seqlens=index(0, -1))),
    "k_scale without 8 bits": ("k_scale", {"k_scale": torch.ones(2)}),
    "k_scale dtype": ("k_scale", bits(k_scale=torch.ones(2).half())),
    "k_scale heads": ("k_scale", bits(k_scale=torch.ones(4))),
    "k_scale entries": ("k_scale", bits(k_scale=torch.ones(2, 2))),
    "k_scale of rank 3": ("k_scale", bits(k_scale=torch.ones(3, 2, 1))),
    "v_scale without 8 bits": ("v_scale", {"v_scale": torch.ones(2)}),
    "v_scale pages": ("v_scale", bits(page_table=PAGES, v_scale=torch.ones(2, 2))),
    "k_scale a number without 8 bits": ("k_scale", {"k_scale": 2.0}),
    "v_scale zero": ("v_scale", bits(v_scale=0.0)),
    "v_scale a bool": ("v_scale", bits(v_scale=True)),
    "v_scale a list": ("v_scale", bits(v_scale=[1.0, 1.0])),
    "cu_seqlens_q a list": ("cu_seqlens_q", packed(cu_seqlens_q=[0, 5])),
    "cu_seqlens_q int64": ("cu_seqlens_q", packed(cu_seqlens_q=BOUNDS.long())),
    "cu_seqlens_q empty": ("cu_seqlens_q", packed(cu_seqlens_q=BOUNDS[:0])),
    "cu_seqlens_q of rank 2": ("cu_seqlens_q", packed(cu_seqlens_q=BOUNDS[None])),
    "cu_seqlens_q start": ("cu_seqlens_q", packed(cu_seqlens_q=index(1, 2, 5))),
    "cu_seqlens_q falling": ("cu_seqlens_q", packed(cu_seqlens_q=index(0, 4, 2))),
    "cu_seqlens_q past the rows": ("cu_seqlens_q", packed(cu_seqlens_q=index(0, 2, 6))),
    "cu_seqlens_k_new alone": ("cu_seqlens_k_new", {"cu_seqlens_k_new": BOUNDS}),
    "cu_seqlens_k_new batch": ("cu_seqlens_k_new", new(k=PACKED_NEW, v=PACKED_NEW, cu_seqlens_k_new=index(0, 5))),
    "cu_seqlens_k_new past the rows": (
        "cu_seqlens_k_new", new(k=PACKED_NEW, v=PACKED_NEW, cu_seqlens_k_new=index(0, 1, 6)),
    ),
    "cu_seqlens_k_new a list": ("cu_seqlens_k_new", new(cu_seqlens_k_new=[0, 1, 5])),
    "max_seqlen_q alone": ("max_seqlen_q", {"max_seqlen_q": 3}),
    "max_seqlen_q too small": ("max_seqlen_q", packed(max_seqlen_q=2)),
    "max_seqlen_q a float": ("max_seqlen_q", packed(max_seqlen_q=3.0)),
    "causal a number": ("causal", {"causal": 1}),
    "causal a list": ("causal", {"causal": [True]}),
    "window an int": ("window_size", {"window_size": 4}),
    "window below -1": ("window_size", {"window_size": (-2, 0)}),
    "scale nan": ("softmax_scale", {"softmax_scale": float("nan")}),
    "softcap negative": ("softcap", {"softcap": -1.0}),
    "batch_invariant of another word": ("batch_invariant", {"batch_invariant": "always"}),
    "attention_chunk negative": ("attention_chunk", {"attention_chunk": -1}),
    "attention_chunk a float": ("attention_chunk", {"attention_chunk": 8.0}),
    "tree_mask with a chunk": ("tree_mask", {"tree_mask": TREE, "attention_chunk": 4}),
    "slopes shape": ("alibi_slopes", {"alibi_slopes": torch.zeros(3)}),
    "slopes dtype": ("alibi_slopes", {"alibi_slopes": torch.zeros(4).half()}),
    "slopes that require grad": ("alibi_slopes", {"alibi_slopes": torch.zeros(4, requires_grad=True)}),
    "sinks shape": ("sinks", {"sinks": torch.zeros(2)}),
    "sinks integer": ("sinks", {"sinks": torch.zeros(4, dtype=torch.long)}),
    "sinks that require grad": ("sinks", {"sinks": torch.zeros(4, requires_grad=True)}),
    "qv of rank 3": ("qv", {"qv": Q[0]}),
    "qv a list": ("qv", {"qv": [1]}),
    "tree_mask a list": ("tree_mask", {"tree_mask": [1]}),
    "tree_mask int32": ("tree_mask", {"tree_mask": TREE.int()}),
    "tree_mask of floats": ("tree_mask", {"tree_mask": TREE.float()}),
    "tree_mask of rank 2": ("tree_mask", {"tree_mask": TREE[0]}),
    "tree_mask not square": ("tree_mask", {"tree_mask": TREE[:, :2]}),
    "tree_mask batch": ("tree_mask", {"tree_mask": TREE[:1]}),
    "tree_mask rows": ("tree_mask", {"tree_mask": TREE[:, :2, :2]}),
    "tree_mask words of rank 1": ("tree_mask", {"tree_mask": torch.ones(3).long()}),
    "tree_mask of 65 rows": ("tree_mask", {"q": torch.randn(2, 65, 4, 8), "tree_mask": torch.ones(2, 65, 65) > 0}),
    "tree_mask of 65 words": ("tree_mask", {"q": torch.randn(2, 65, 4, 8), "tree_mask": torch.ones(2, 65).long()}),
    "tree_mask of 65 rows where packed": ("tree_mask", packed(tree_mask=torch.ones(2, 65).long())),
    "tree_mask not causal": ("tree_mask", {"tree_mask": TREE, "causal": False}),
    "tree_mask with a window to the right": ("tree_mask", {"tree_mask": TREE, "causal": False, "window_size": (3, 1)}),
    "tree_mask with its row missing": ("tree_mask", {"tree_mask": ~TREE}),
    "k that are not the drafts": ("k", rotary(k=NEW[:, :2], v=NEW[:, :2], tree_mask=TREE)),
    "causal int32": ("causal", {"causal": LENGTHS}),
    "causal of rank 2": ("causal", {"causal": LENGTHS[None] > 5}),
    "causal batch": ("causal", {"causal": LENGTHS[:1] > 5}),
    "causal by sequence with trees": ("tree_mask", {"causal": LENGTHS > 5, "tree_mask": TREE}),
    "page_indptr without page_indices": ("page_indptr", {"page_indptr": PAGED["page_indptr"]}),
    "page_indices without page_indptr": ("page_indices", {"page_indices": PAGED["page_indices"]}),
    "page_indptr int64": ("page_indptr", PAGED | {"page_indptr": PAGED["page_indptr"].long()}),
    "page_indptr batch": ("page_indptr", PAGED | {"page_indptr": index(0, 1)}),
    "page_indptr with page_table": ("page_indptr", PAGED | {"page_table": PAGES}),
    "page_indptr that falls": ("page_indptr", PAGED | {"page_indptr": index(0, 2, 1)}),
    "page_indptr past page_indices": ("page_indptr", PAGED | {"page_indptr": index(0, 1, 4)}),
    "page_indices of rank 2": ("page_indices", PAGED | {"page_indices": PAGES}),
    "page_indices of no page": ("page_indices", PAGED | {"page_indices": index(0, 3, 0)}),
    "pages too few of a sequence": ("cache_seqlens", PAGED | {"page_indptr": index(0, 0, 3)}),
    "more keys than page_indices have": ("cache_seqlens", PAGED | {"cache_seqlens": 49}),
    "more keys than max_seqlen_k": ("cache_seqlens", PAGED | {"max_seqlen_k": 8}),
    "max_seqlen_k without page_indptr": ("max_seqlen_k", {"max_seqlen_k": 16}),
    "max_seqlen_k negative": ("max_seqlen_k", PAGED | {"max_seqlen_k": -1}),
    "cache_batch_idx with page_indptr": ("cache_batch_idx", PAGED | {"cache_batch_idx": LENGTHS}),
    "slot_mapping a list": ("slot_mapping", new(slot_mapping=[1])),
    "slot_mapping without k": ("slot_mapping", {"slot_mapping": SLOTS}),
    "slot_mapping int16": ("slot_mapping", new(slot_mapping=SLOTS.short())),
    "slot_mapping of rank 1": ("slot_mapping", new(slot_mapping=SLOTS[0])),
    "slot_mapping rows": ("slot_mapping", new(slot_mapping=SLOTS[:, :2])),
    "slot_mapping of rank 2 where packed": ("slot_mapping", packed(k=PACKED_NEW, v=PACKED_NEW, slot_mapping=SLOTS)),
    "slot_mapping below -1": ("slot_mapping", separate(slot_mapping=SLOTS - 2)),
    "slot_mapping of a slot past the last": ("slot_mapping", separate(slot_mapping=SLOTS + 43)),
    "slot_mapping of a page past the last": ("slot_mapping", separate(page_table=PAGES, slot_mapping=SLOTS + 43)),
    "slot_mapping of a slot twice": ("slot_mapping", separate(slot_mapping=SLOTS % 5)),
    "slot_mapping of a slot twice where packed": ("slot_mapping", packed_slots(index(3, -1, 4, 7, 3))),
    "cache_batch_idx of one entry": ("cache_batch_idx", meeting(cache_batch_idx=index(1, 1))),
    "page_table of one page": ("page_table", meeting(page_table=index([1, 0], [1, 2]))),
    "page_table of one page twice": (
        "page_table", meeting(cache_seqlens=index(3, 0), page_table=index([2, 0, 0], [3, 4, 5]), **SMALL),
    ),
    "page_table of one page in other places": (
        "page_table", meeting(cache_seqlens=index(1, 4), page_table=index([2, 0, -1, -1], [1, 3, 0, 5]), **SMALL),
    ),
    "page_indices of one page": ("page_indices", meeting(**PAGED | {"page_indices": index(1, 1, 2)})),
    "return_lse None": ("return_lse", {"return_lse": None}),
    "return_max_scores None": ("return_max_scores", {"return_max_scores": None}),
    "out a list": ("out", {"out": [1.0]}),
    "out shape": ("out", {"out": torch.empty(2, 3, 4, 6)}),
    "out rows": ("out", {"out": torch.empty(2, 2, 4, 8)}),
    "out dtype": ("out", {"out": torch.empty(2, 3, 4, 8).half()}),
    "out device": ("out", {"out": torch.empty(2, 3, 4, 8, device="meta")}),
    "out strided": ("out", {"out": torch.empty(2, 3, 8, 4).mT}),
    "out expanded": ("out", {"out": torch.empty(1, 3, 4, 8).expand(2, 3, 4, 8)}),
    "out that requires grad": ("out", {"out": torch.empty(2, 3, 4, 8, requires_grad=True)}),
    "selected a list": ("selected", {"selected": [1]}),
    "selected int64": ("selected", {"selected": SELECTED.long()}),
    "selected of other rows": ("selected", {"selected": SELECTED[:, :2]}),
    "selected of rank 3 where packed": ("selected", packed(selected=SELECTED)),
    "selected on another device": ("selected", {"selected": SELECTED.to("meta")}),
    "selected of a key twice": ("selected", {"selected": SELECTED % 3}),
    "selected with new keys": ("k", separate(selected=SELECTED)),
    "selected with a tree": ("tree_mask", {"tree_mask": TREE, "selected": SELECTED}),
    "selected with slopes": ("alibi_slopes", {"alibi_slopes": torch.ones(4), "selected": SELECTED}),
    "selected with chunks": ("attention_chunk", {"attention_chunk": 4, "selected": SELECTED}),
    "selected with a function": ("selected", {"mask_mod": lambda b, h, i, j: j > 1, "selected": SELECTED}),
    "selected with intervals": ("block_mask", {"block_mask": masks.rows(0, index(1, 2, 3)), "selected": SELECTED}),
    "selected with scales by page": (
        "k_scale", paged(selected=SELECTED, k_scale=torch.ones(3, 2), k_cache=BITS, v_cache=BITS)
    ),
    "selected in pages at odd places": (
        "k_cache", paged(selected=SELECTED, k_cache=torch.randn(3, 265)[:, :256].view(3, 16, 2, 8))
    ),
    "selected in pages at other places": (
        "k_cache", paged(selected=SELECTED, k_cache=torch.randn(3, 2, 16, 2, 8)[:, 0])
    ),
    "selected_slots int64": ("selected_slots", {"selected_slots": SELECTED.long()}),
    "selected_slots of rank 2": ("selected_slots", {"selected_slots": SELECTED[0]}),
    "selected_slots with selected": ("selected_slots", {"selected_slots": SELECTED, "selected": SELECTED}),
    "selected_slots of a slot twice": ("selected_slots", {"selected_slots": SELECTED % 3}),
    "selected_slots with windows": ("window_size", {"selected_slots": SELECTED, "window_size": (3, 0)}),
    "selected_slots with leftpad": ("cache_leftpad", {"selected_slots": SELECTED, "cache_leftpad": index(1, 1)}),
    "selected_slots with entries": ("cache_batch_idx", {"selected_slots": SELECTED, "cache_batch_idx": index(1, 0)}),
    "selected_slots with causal by sequence": ("causal", {"selected_slots": SELECTED, "causal": index(1, 0) > 0}),
    "selected_slots with max_seqlen_k": ("max_seqlen_k", {"selected_slots": SELECTED, "max_seqlen_k": 9, **PAGED}),
    "backend unknown": ("backend", {"backend": "fast"}),
    "backend a list": ("backend", {"backend": ["cpu"]}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*prototype:UserWarning")
@pytest.mark.parametrize("name", BAD)
def test_names_the_argument(name: str) -> None:
    argument, changes = BAD[name]
    arguments: dict[str, Any] = {"q": Q, "k_cache": CACHE, "v_cache": CACHE, "cache_seqlens": LENGTHS} | changes
    held = CACHE.clone()
    with pytest.raises(InvalidInputError, match=f"^{argument}: ") as caught:
        flashtile.attention_with_kvcache(**arguments)
    assert caught.value.argument == argument
    assert torch.equal(CACHE, held)


def test_says_what_it_is_and_what_it_must_be() -> None:
    for name, message in {
        "k_cache dtype": r"dtype is torch.float16, must be float8_e4m3fn, float8_e5m2 or q's torch.float32$",
        "k_cache of rank 3": r"must have 4: \(entries, capacity, num_heads_kv, head_dim\)$",
        "k_scale of rank 3": r"must have 1 or 2: \(num_heads_kv,\) or \(entries, num_heads_kv\)$",
        "k_cache with fewer entries": r"at least the batch of 2 without cache_batch_idx and page_table$",
        "page_table past the pages": r"has 3, but k_cache has 3 pages; it is used by sequence 1$",
        "cache_seqlens past the cache with new": r"14 and 3 new keys do not fit into sequence 1's cache of 16 without",
        "cache_seqlens too many": r"17 does not fit into a cache of 16 without page_table$",
        "cache_seqlens too many in pages": r"33 does not fit into a cache of 32$",
        "cache_batch_idx of one entry": r"has 1 for sequences 0 and 1: of two new keys in its row 7 one would be lost$",
        "page_table of one page": r"has 1 for sequences 0 and 1: of two new keys in its row 7 one would be lost$",
        "page_table of one page twice": r"has 0 for sequence 0 twice: of two new keys in its row 1 one would be lost$",
        "slot_mapping of a slot twice": r"has 0 twice: of two new keys in one slot one would be lost$",
        "rotary_cos too short": r"has 11 positions, but sequence 1 rotates at 11$",
        "tree_mask int32": r"dtype is torch.int32, must be bool \(batch, T, T\) or int64 words \(batch, T\)$",
        "tree_mask rows": r"is of trees of 2 rows, but q has seqlen_q 3$",
        "tree_mask of 65 rows": r"is of trees of 65 rows, at most 64 are supported$",
        "tree_mask not causal": r"goes with causal=True: of the keys before the drafts a row sees all$",
        "k that are not the drafts": r"seqlen_new is 2, must be as many as the 3 rows of a tree where they are",
        "q that requires grad": r"a cached call has no gradient: use torch.no_grad\(\)$",
    }.items():
        arguments: dict[str, Any] = {"q": Q, "k_cache": CACHE, "v_cache": CACHE, "cache_seqlens": LENGTHS}
        with pytest.raises(InvalidInputError, match=message):
            flashtile.attention_with_kvcache(**arguments | BAD[name][1])


def test_every_argument_is_refused_somehow() -> None:
    import inspect

    arguments = set(inspect.signature(flashtile.attention_with_kvcache).parameters)
    assert {argument for argument, _ in BAD.values()} == arguments - {"_more", "_unknown"}


def test_gradients_are_no_matter_where_they_are_off() -> None:
    q = Q.clone().requires_grad_()
    want = flashtile.attention_with_kvcache(Q, CACHE, CACHE, cache_seqlens=5)
    with torch.no_grad():
        got = flashtile.attention_with_kvcache(q, CACHE, CACHE, cache_seqlens=5)
    assert torch.equal(got, want) and not got.requires_grad


@pytest.mark.parametrize("backend", [name for name in flashtile.backends() if name != "cpu"])
def test_an_explicit_backend_never_falls_back(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedError, match=f"(?s)cannot run this decode.*{backend}: ."):
        flashtile.attention_with_kvcache(Q, CACHE, CACHE, cache_seqlens=5, backend=backend)


def test_nobody_supports_it() -> None:
    meta, lengths = Q.to("meta"), LENGTHS.to("meta")
    tensors = CacheTensors(meta, meta, CACHE.to("meta"), CACHE.to("meta"), lengths)
    from flashtile.ops import dispatch

    with pytest.raises(UnsupportedError) as caught:
        dispatch.select(problem_of(tensors, CacheOptions()), "decode")
    assert set(caught.value.reasons) == set(flashtile.backends()) and all(caught.value.reasons.values())


def test_the_operators_refuse_new_keys_that_they_would_not_declare() -> None:
    tensors = CacheTensors(torch.empty(2, 3, 4, 8), Q, CACHE, CACHE, LENGTHS)
    given = CacheTensors(torch.empty(2, 3, 4, 8), Q, CACHE.clone(), CACHE.clone(), LENGTHS, k=NEW, v=NEW)
    with pytest.raises(InvalidInputError, match=r"^k: is given: the operator is append_attention_with_kvcache"):
        torch.ops.flashtile.attention_with_kvcache(*CACHED.flatten(given, CacheOptions()))
    with pytest.raises(InvalidInputError, match=r"^k: is None: the operator is attention_with_kvcache"):
        torch.ops.flashtile.append_attention_with_kvcache(*CACHED.flatten(tensors, CacheOptions()))


def test_one_tensor_as_both_caches_is_refused_while_appending() -> None:
    keys, values = NEW, NEW.clone()
    for other in (CACHE, CACHE[:]):
        held = CACHE.clone()
        with pytest.raises(InvalidInputError, match="^v_cache: is the same tensor as k_cache"):
            flashtile.attention_with_kvcache(Q, CACHE, other, cache_seqlens=5, k=keys, v=values)
        assert torch.equal(CACHE, held)
    flashtile.attention_with_kvcache(Q, CACHE, CACHE, cache_seqlens=5)
    alone = torch.empty(3, 16, 2, 2, 8)
    flashtile.attention_with_kvcache(Q, *alone.unbind(2), cache_seqlens=0, k=keys, v=values)
    assert torch.equal(alone[:2, :3, 0], keys) and torch.equal(alone[:2, :3, 1], values)


SHARED: dict[str, tuple[Tensor, dict[str, Any]]] = {
    "pages of a prefix": (index(8, 8), {"page_table": index([1, 2, 3], [1, 2, 4])}),
    "a page that is full, later in another order": (index(8, 9), {"page_table": index([1, 2, 3], [2, 1, 4])}),
    "a page that two append to in other rows": (index(0, 3), {"page_table": index([1, 2], [1, 2])}),
    "an entry that two append to in other rows": (index(0, 3), {"cache_batch_idx": index(2, 2)}),
    "an entry of a sequence that is none": (index(2, -1), {"cache_batch_idx": index(2, 2)}),
    "nowhere": (index(2, 1), {"slot_mapping": torch.tensor([[7, -1, 8], [-1, -1, 9]])}),
    "slots of a sequence that is none": (index(1, -1), {"slot_mapping": torch.tensor([[7, 0, 8], [8, 7, 9]])}),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_what_is_shared_is_computed_where_no_two_new_keys_meet(name: str) -> None:
    lengths, changes = SHARED[name]
    pages = CACHE.view(-1, 4, 2, 8) if "page_table" in changes else CACHE
    tensors = CacheTensors(torch.empty_like(Q), Q, pages, pages.flip(0), lengths, k=NEW, v=NEW.flip(0), **changes)
    want, _ = reference.attention_with_kvcache(problem_of(tensors, CacheOptions(window_right=0)), tensors)
    caches = tensors.k_cache.clone(), tensors.v_cache.clone()
    got = flashtile.attention_with_kvcache(Q, *caches, cache_seqlens=lengths, k=NEW, v=NEW.flip(0), **changes)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)


def test_explain_takes_a_call_over_a_cache() -> None:
    call: dict[str, Any] = {"k_cache": CACHE, "v_cache": CACHE.clone(), "cache_seqlens": LENGTHS}
    text = flashtile.explain(Q, NEW, NEW, **call)
    assert "3 x a cache of 16" in text and "decode: cpu" in text and ", causal" in text
    assert ", full" in flashtile.explain(Q, **call, causal=False)
    assert "in pages of 16" in flashtile.explain(Q, **call, page_table=PAGES)
    listed = flashtile.explain(Q, **call, **PAGED, max_seqlen_k=20, causal=LENGTHS > 5)
    assert "a cache of 20 in pages of 16" in listed and ", causal by sequence" in listed
    assert "a cache of 48 in pages" in flashtile.explain(Q, NEW, NEW, **call, **PAGED, slot_mapping=SLOTS)
    assert flashtile.warm_up(Q.to("meta"), **{name: x.to("meta") for name, x in call.items()}, device="cpu") == []
    for name, changes in {
        "attn_mask": {"attn_mask": torch.ones(3, 16, dtype=torch.bool)}, "dropout_p": {"dropout_p": 0.5},
        "v_cache": {"v_cache": None}, "cache_seqlens": {"cache_seqlens": 20}, "v": {"k": NEW},
    }.items():  # fmt: skip
        with pytest.raises(InvalidInputError, match=f"^{name if name != 'v' else 'k'}: "):
            flashtile.explain(Q, **call | changes)
