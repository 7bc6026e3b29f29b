"""The table of cached calls that every backend is tested on, and the rules that every backend must meet.

A case is data; ``build`` turns it into tensors on a device, ``judge`` runs a backend and compares: out and lse by the
error rule of ``tests.rule`` with what the backend left in the caches, and the caches by themselves. Whatever a call
must not read is NaN or an infinity, and page ids that it must not use are no pages.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import UnsupportedError, reference
from flashtile.api.cached import causality
from flashtile.call.cached_arguments import FLOAT8, TENSORS, CacheTensors, read, tree_words
from flashtile.call.cached_problem import problem_of
from flashtile.call.problem import Problem
from flashtile.ops import dispatch
from flashtile.serving import latent_rows
from tests import trees
from tests.poison import poisoned_memory
from tests.rule import assert_close


@dataclass(frozen=True)
class CacheCase:
    """One cached call.

    Attributes:
        sequences: Of each sequence the keys before appending, the queries and the new keys.
        packed: Whether queries and new keys are packed; else their numbers are the same for all sequences.
        packed_new: Whether new keys are packed though the queries are not.
        say_longest: Whether a packed call gives max_seqlen_q.
        spare: Rows past the last bound.
        appends: Whether k and v are given.
        capacity: Of each entry, 0 for what is needed and a few more.
        entries: Whether cache_batch_idx is given.
        leftpad: First keys, none if empty.
        rotary: rotary_dim, 0 for none.
        tables: Dtype of the tables is q's rather than float32.
        rotary_start: Whether rotary_seqlens is given.
        float8: Whether the caches are of 8 bits, and which scales they have: "none", "h" (heads) or "eh"; or "rows", of
            656 bytes, whose queries are bfloat16.
        e5m2: Whether those of 8 bits are float8_e5m2.
        layout: How caches lie in memory, see ``_caches``.
        alibi: "", "h" or "bh".
        one_length: Whether cache_seqlens is an int.
        out: "", or whether out is given "whole" or as a "part" of a wider tensor.
        tree: Kind of the draft trees, see ``tests.trees``; "" for none.
        tree_rows: Rows of the mask where queries are packed, 0 for the most of a sequence.
        words: Whether the mask is given as words.
        slots: Where slot_mapping has new keys written: "own", where they are without; "some", but every third nowhere;
            "anywhere", some of them where no sequence looks; "" without it.
        ragged: Whether pages are a list of all sequences' in place of a table; "bound" with max_seqlen_k.
        causal_each: Whether causal is a tensor, true of every other sequence.
        chunk: attention_chunk.
        qv: Whether there are queries of the values.
        invariant: Whether rows must have bits of their own.
    """

    name: str
    sequences: tuple[tuple[int, int, int], ...]
    packed: bool = False
    packed_new: bool = False
    say_longest: bool = True
    spare: int = 0
    appends: bool = False
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    head_dim_v: int | None = None
    page_size: int = 0
    capacity: int = 0
    entries: bool = False
    leftpad: tuple[int, ...] = ()
    rotary: int = 0
    interleaved: bool = False
    tables: bool = False
    rotary_start: bool = False
    float8: str = ""
    e5m2: bool = False
    layout: str = "apart"
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float = 0.0
    alibi: str = ""
    sinks: bool = False
    one_length: bool = False
    out: str = ""
    tree: str = ""
    tree_rows: int = 0
    words: bool = False
    slots: str = ""
    causal_each: bool = False
    ragged: str = ""
    chunk: int | None = None
    qv: bool = False
    invariant: bool = False

    def __str__(self) -> str:
        return self.name


def latent_case(name: str, lengths: tuple[int, ...], rows: int = 1, **values: object) -> CacheCase:
    """Sequences of ``lengths`` keys and ``rows`` queries each, of one key head, in rows of keys and values."""
    own = {"heads": 16, "kv_heads": 1, "head_dim": 64, "head_dim_v": 512, "qv": True, "layout": "stacked"}
    sequences = tuple((length, rows, 0) for length in lengths)
    return CacheCase(name, sequences, **own | values)  # type: ignore[arg-type]


def _same(*lengths: int, rows: int = 1, new: int = 0) -> tuple[tuple[int, int, int], ...]:
    """Sequences of these lengths with as many queries and new keys each."""
    return tuple((length, rows, new) for length in lengths)


_DENSE = (
    CacheCase("one_token", _same(37, 5, 64)),
    CacheCase("one_key", _same(1)),
    CacheCase("steps", _same(37, 5, 64, rows=4)),
    CacheCase("chunk", _same(40, 33, rows=29)),
    CacheCase("more_rows_than_keys", _same(3, 9, 0, rows=8)),
    CacheCase("full_cache", _same(48, 48), capacity=48),
    CacheCase("not_causal", _same(37, 5, rows=4), causal=False),
    CacheCase("window", _same(37, 70, rows=3), window=(9, -1)),
    CacheCase("own_bits", _same(137, 70, 0, rows=3), heads=4, sinks=True, softcap=4.0, invariant=True),
    CacheCase("window_both", _same(37, 70, rows=5), causal=False, window=(6, 2)),
    CacheCase("window_right", _same(37, 70, rows=5), causal=False, window=(None, 1)),
    CacheCase("window_one", _same(37, 70, rows=5), window=(0, 0)),
    CacheCase("chunk_of_keys", _same(37, 70, 9, rows=3), chunk=16),
    CacheCase("chunk_both_ways", _same(37, 70, rows=13), causal=False, chunk=11),
    CacheCase("chunk_leftpad", _same(37, 70, 64, rows=5), chunk=10, leftpad=(11, 0, 63)),
    CacheCase("chunk_window", _same(37, 70, 5, rows=30), chunk=24, window=(9, -1), heads=4, kv_heads=1),
    CacheCase("softcap", _same(37, 5, rows=2), softcap=2.0),
    CacheCase("scale", _same(37, 5, rows=2), scale=0.3),
    CacheCase("alibi", _same(37, 5, rows=3), alibi="h"),
    CacheCase("alibi_batch", _same(37, 5, rows=3), alibi="bh", causal=False),
    CacheCase("sinks", _same(37, 0, 5, rows=2), sinks=True),
    CacheCase("group", _same(37, 5, rows=2), heads=8, kv_heads=2),
    CacheCase("one_kv_head", _same(37, 90), heads=14, kv_heads=1),
    CacheCase("wider_v", _same(37, 5, rows=2), head_dim=8, head_dim_v=24),
    CacheCase("odd_dims", _same(37, 5, rows=2), head_dim=33, head_dim_v=7, heads=3, kv_heads=1),
    CacheCase("one_length", _same(21, 21, 21), one_length=True),
    CacheCase("entries", _same(37, 5, 64), entries=True),
    CacheCase("leftpad", _same(37, 5, 64, rows=3), leftpad=(11, 0, 63)),
    CacheCase("leftpad_past_the_end", _same(7, 5, rows=3), leftpad=(9, 5), sinks=True),
    CacheCase("empty", _same(0, 9, 0, rows=2)),
    CacheCase("all_empty", _same(0, 0)),
    CacheCase("no_rows", _same(9, 4, rows=0)),
    CacheCase("no_batch", ()),
    CacheCase("out_given", _same(37, 5, rows=2), out="whole"),
    CacheCase("out_part", _same(37, 5, rows=2), out="part"),
)

_LAYOUTS = (
    CacheCase("heads_first", _same(37, 5, rows=2, new=2), appends=True, layout="heads_first"),
    CacheCase("stacked", _same(37, 5, rows=2, new=2), appends=True, layout="stacked", head_dim_v=8),
    CacheCase("heads_first_stacked", _same(37, 5, new=1), appends=True, layout="heads_first_stacked", page_size=16),
    CacheCase("between", _same(37, 5, new=1), appends=True, layout="between", page_size=4),
    CacheCase("sliced", _same(37, 5, new=1), appends=True, layout="sliced"),
)

_PAGED = (
    CacheCase("pages_of_1", _same(37, 5, 0, rows=2), page_size=1),
    CacheCase("pages_of_3", _same(37, 6, rows=2), page_size=3, causal=False),
    CacheCase("pages_of_16", _same(37, 16, 64), page_size=16, heads=4, kv_heads=1),
    CacheCase("pages_of_256", _same(37, 300), page_size=256),
    CacheCase("pages_chunk", _same(37, 5, rows=20), page_size=16, sinks=True),
    CacheCase("pages_window", _same(37, 90, rows=3), page_size=4, window=(10, 0)),
    CacheCase("pages_leftpad", _same(37, 50, rows=3), page_size=4, leftpad=(13, 49)),
    CacheCase("pages_leftpad_past_the_end", _same(5, 2, rows=2), page_size=4, leftpad=(7, 3), sinks=True),
    CacheCase("pages_no_pages", _same(0, 0), page_size=4, capacity=1),
)

_APPENDING = (
    CacheCase("append", _same(37, 0, 63, new=1), appends=True),
    CacheCase("append_to_nothing", _same(0, 0, rows=7, new=7), appends=True),
    CacheCase("append_chunk", _same(40, 3, rows=29, new=29), appends=True),
    CacheCase("append_more_than_rows", _same(12, 3, rows=2, new=9), appends=True),
    CacheCase("append_fewer_than_rows", _same(12, 3, rows=5, new=2), appends=True, causal=False),
    CacheCase("append_no_rows", _same(12, 3, rows=0, new=3), appends=True),
    CacheCase("append_nothing", _same(12, 3, rows=2, new=0), appends=True),
    CacheCase("append_fills", _same(12, 12, rows=2, new=4), appends=True, capacity=16, one_length=True),
    CacheCase("append_entries", _same(37, 5, 64, new=2), appends=True, entries=True),
    CacheCase("append_pages_of_1", _same(7, 0, rows=2, new=3), appends=True, page_size=1),
    CacheCase("append_pages_of_3", _same(7, 3, rows=5, new=5), appends=True, page_size=3),
    CacheCase("append_pages_of_16", _same(15, 16, 0, new=1), appends=True, page_size=16),
    CacheCase("append_leftpad", _same(9, 30, rows=2, new=4), appends=True, leftpad=(11, 7)),
    CacheCase("append_pages_leftpad", _same(9, 30, rows=2, new=4), appends=True, leftpad=(12, 8), page_size=4),
    CacheCase("append_window", _same(9, 30, rows=4, new=4), appends=True, window=(5, 0), kv_heads=1),
)

_ROTARY = (
    CacheCase("rotary", _same(37, 0, 63, new=1), appends=True, rotary=16),
    CacheCase("rotary_chunk", _same(37, 0, rows=9, new=9), appends=True, rotary=16, tables=True),
    CacheCase("rotary_interleaved", _same(37, 0, rows=3, new=3), appends=True, rotary=16, interleaved=True),
    CacheCase("rotary_partial", _same(37, 0, rows=3, new=3), appends=True, rotary=6, head_dim=24, heads=4),
    CacheCase("rotary_partial_pairs", _same(37, 0, rows=3, new=3), appends=True, rotary=10, interleaved=True),
    CacheCase("rotary_not_causal", _same(37, 4, rows=3, new=3), appends=True, rotary=16, causal=False),
    CacheCase("rotary_window", _same(37, 4, rows=3, new=3), appends=True, rotary=16, causal=False, window=(20, 3)),
    CacheCase("rotary_start", _same(37, 4, rows=3, new=3), appends=True, rotary=16, rotary_start=True),
    CacheCase("rotary_pages", _same(37, 4, rows=2, new=3), appends=True, rotary=16, page_size=5, leftpad=(3, 0)),
)

_PACKED = (
    CacheCase("packed", ((37, 1, 0), (20, 20, 0), (0, 3, 0)), packed=True),
    CacheCase("packed_spare", ((37, 1, 0), (20, 5, 0)), packed=True, spare=3, say_longest=False, sinks=True),
    CacheCase("packed_mixed", ((37, 1, 1), (0, 20, 20), (9, 7, 7)), packed=True, appends=True, page_size=4),
    CacheCase("packed_empty", ((0, 0, 0), (9, 2, 2), (5, 0, 0), (0, 0, 0)), packed=True, appends=True),
    CacheCase("packed_rotary", ((37, 1, 1), (0, 20, 20)), packed=True, appends=True, rotary=8, kv_heads=1, spare=2),
    CacheCase("packed_window", ((37, 1, 0), (50, 20, 0)), packed=True, window=(11, 0), alibi="bh", page_size=16),
    CacheCase("packed_new_of_other_counts", ((37, 2, 5), (0, 3, 1), (8, 4, 0)), packed=True, appends=True),
    CacheCase("packed_new_alone", ((37, 2, 5), (0, 2, 1), (8, 2, 0)), packed_new=True, appends=True, spare=1),
    CacheCase(
        "packed_own_bits",
        ((37, 1, 1), (0, 30, 30), (90, 4, 4)),
        packed=True,
        appends=True,
        page_size=4,
        rotary=8,
        spare=3,
        invariant=True,
    ),
    CacheCase(
        "packed_own_bits_window",
        ((37, 1, 0), (70, 20, 0)),
        packed=True,
        window=(11, 0),
        heads=4,
        spare=20,
        leftpad=(3, 40),
        invariant=True,
    ),
    CacheCase("packed_no_sequences", (), packed=True, spare=2),
)

_FLOAT8 = (
    CacheCase("float8", _same(37, 5, rows=2), float8="none"),
    CacheCase("float8_heads", _same(37, 5, rows=2), float8="h", heads=4),
    CacheCase("float8_entries", _same(37, 5, rows=2), float8="eh", entries=True),
    CacheCase("float8_pages", _same(37, 5, rows=2), float8="eh", page_size=4, leftpad=(6, 1)),
    CacheCase("float8_heads_pages", _same(37, 5), float8="h", page_size=3, window=(12, 0)),
    CacheCase("float8_append", _same(12, 5, rows=3, new=3), float8="none", appends=True),
    CacheCase("float8_append_saturates", _same(12, 5, rows=2, new=4), float8="h", appends=True, kv_heads=1),
    CacheCase("float8_append_pages", _same(12, 5, new=6), float8="eh", appends=True, page_size=4),
    CacheCase("float8_rotary", _same(12, 5, rows=2, new=2), float8="eh", appends=True, rotary=16),
    CacheCase("float8_stacked", _same(12, 5, new=1), float8="h", appends=True, layout="heads_first_stacked"),
    CacheCase("float8_odd_dims", _same(37, 5, new=2), float8="h", appends=True, head_dim=33, head_dim_v=7),
    CacheCase("float8_sliced", _same(37, 5, new=2), float8="eh", appends=True, layout="sliced", page_size=3),
    CacheCase("not_there", ((-1, 1, 1), (20, 1, 1), (-5, 1, 1)), page_size=16, appends=True, rotary=16, capacity=32),
    CacheCase(
        "not_there_packed", ((-1, 2, 3), (20, 1, 2)), packed=True, packed_new=True, appends=True, rotary=8, sinks=True
    ),
    CacheCase("float8_empty", _same(0, 7), float8="h", sinks=True),
    CacheCase("e5m2", _same(37, 5, rows=2), float8="none", e5m2=True),
    CacheCase("e5m2_pages", _same(37, 5, rows=2), float8="eh", e5m2=True, page_size=4, leftpad=(6, 1), heads=4),
    CacheCase("e5m2_append_saturates", _same(12, 5, rows=2, new=4), float8="h", e5m2=True, appends=True, kv_heads=1),
    CacheCase("e5m2_rotary", _same(12, 5, rows=2, new=2), float8="eh", e5m2=True, appends=True, rotary=16, page_size=3),
    CacheCase("e5m2_odd_dims", _same(37, 5, new=2), float8="none", e5m2=True, appends=True, head_dim=33, head_dim_v=7),
)

_TREES = (
    CacheCase("tree", _same(37, 5, 64, rows=7), tree="random"),
    CacheCase("tree_words", _same(37, 5, rows=12), tree="binary", words=True, heads=8, kv_heads=2),
    CacheCase("tree_one_row", _same(37, 1), tree="random"),
    CacheCase("tree_64", _same(90, 64, rows=64), tree="forest", heads=4, kv_heads=2),
    CacheCase("tree_63_shuffled", _same(70, 100, rows=63), tree="shuffled", words=True),
    CacheCase("tree_chain", _same(37, 70, rows=5), tree="chain", heads=4, kv_heads=1),
    CacheCase("tree_star", _same(37, 16, 0, rows=9), tree="star", sinks=True),
    CacheCase("tree_more_rows_than_keys", _same(3, 9, 0, rows=8), tree="shuffled", alibi="h"),
    CacheCase("tree_window", _same(37, 70, rows=11), tree="random", window=(3, 0), causal=False),
    CacheCase("tree_window_pages", _same(37, 70, rows=30), tree="shuffled", window=(6, -1), page_size=4, heads=8),
    CacheCase("tree_window_none", _same(37, 70, rows=9), tree="forest", window=(0, 0)),
    CacheCase("tree_alibi", _same(37, 20, rows=10), tree="forest", alibi="bh", softcap=3.0),
    CacheCase("tree_leftpad", _same(37, 20, 64, rows=10), tree="binary", leftpad=(30, 15, 70), window=(9, 0)),
    CacheCase("tree_pages", _same(37, 0, 64, rows=6), tree="random", page_size=3, leftpad=(6, 0, 1)),
    CacheCase("tree_append", _same(37, 0, 63, rows=6, new=6), tree="random", appends=True, page_size=16),
    CacheCase("tree_append_more", _same(37, 0, rows=6, new=9), tree="random", appends=True, entries=True),
    CacheCase("tree_append_fewer", _same(37, 8, rows=6, new=2), tree="random", appends=True, alibi="h"),
    CacheCase("tree_rotary", _same(37, 0, 5, rows=9, new=9), tree="shuffled", appends=True, rotary=16),
    CacheCase("tree_rotary_start", _same(37, 0, rows=64, new=64), tree="random", appends=True, rotary=8,
              rotary_start=True, interleaved=True, page_size=5),
    CacheCase("tree_packed", ((37, 1, 0), (20, 5, 0), (0, 3, 0), (40, 0, 0), (5, 8, 0)), packed=True, tree="random"),
    CacheCase("tree_packed_prompt", ((37, 4, 4), (5, 90, 90), (9, 6, 6)), packed=True, appends=True, tree="forest",
              tree_rows=6, rotary=16, page_size=4, kv_heads=1, spare=3, window=(40, 0), alibi="bh"),
    CacheCase("tree_prompt_of_few_new_keys", ((37, 4, 4), (50, 20, 3)), packed=True, appends=True, tree="star",
              tree_rows=6, rotary=16),
    CacheCase("tree_packed_wide", ((37, 4, 0), (90, 64, 0)), packed=True, tree="shuffled", tree_rows=64, words=True),
    CacheCase("tree_not_there", ((-1, 6, 6), (20, 6, 6)), appends=True, rotary=16, capacity=32, tree="random"),
    CacheCase("tree_float8", _same(37, 12, rows=7), tree="random", float8="eh", page_size=4, alibi="h"),
    CacheCase("tree_float8_append", _same(12, 5, rows=20, new=20), tree="shuffled", float8="h", appends=True, rotary=16,
              heads=4, kv_heads=1, window=(9, 0)),
)  # fmt: skip

_SLOTS = (
    CacheCase("slots", _same(37, 5, 64, new=2), appends=True, slots="own"),
    CacheCase("slots_some", _same(12, 3, 0, rows=2, new=9), appends=True, slots="some", entries=True),
    CacheCase("slots_anywhere", _same(12, 3, 0, rows=7, new=7), appends=True, slots="anywhere", layout="sliced"),
    CacheCase("slots_pages", _same(37, 4, rows=2, new=3), appends=True, page_size=5, slots="some", leftpad=(3, 0)),
    CacheCase("slots_pages_anywhere", _same(15, 16, 0, new=3), appends=True, page_size=16, slots="anywhere", rotary=16),
    CacheCase("slots_packed", ((37, 1, 1), (0, 20, 20), (9, 0, 0), (-1, 3, 3), (9, 7, 7)), packed=True, appends=True,
              page_size=4, rotary=8, spare=3, slots="some", kv_heads=1),
    CacheCase("slots_packed_new", ((37, 2, 5), (0, 2, 1), (8, 2, 0)), packed_new=True, appends=True, slots="anywhere"),
    CacheCase("slots_float8", _same(12, 5, rows=3, new=4), float8="eh", appends=True, page_size=3, slots="anywhere"),
    CacheCase("slots_tree", _same(37, 0, 5, rows=9, new=9), tree="shuffled", appends=True, rotary=16, page_size=16,
              slots="some"),
)  # fmt: skip

_RAGGED = (
    CacheCase("ragged", _same(37, 5, 64, rows=2), page_size=16, ragged="pages", heads=4),
    CacheCase("ragged_of_1", _same(37, 0, 5), page_size=1, ragged="bound", window=(20, 0)),
    CacheCase("ragged_append", _same(7, 0, 12, rows=5, new=5), appends=True, page_size=3, ragged="pages", rotary=16),
    CacheCase("ragged_packed", ((37, 1, 1), (0, 20, 20), (9, 0, 0), (-1, 3, 3), (9, 7, 7)), packed=True, spare=2,
              appends=True, page_size=4, ragged="bound", leftpad=(9, 0, 0, 0, 3), slots="some"),
    CacheCase("ragged_float8", _same(37, 5, rows=2, new=2), float8="eh", appends=True, page_size=4, ragged="pages"),
    CacheCase("ragged_tree", _same(37, 20, rows=10), tree="forest", page_size=8, ragged="bound"),
    CacheCase("ragged_all_empty", _same(0, 0), page_size=4, ragged="pages", sinks=True),
)  # fmt: skip

_BY_SEQUENCE = (
    CacheCase("causal_each", _same(37, 5, 64, rows=4), causal_each=True),
    CacheCase("causal_each_window", _same(37, 70, 40, rows=5), causal_each=True, window=(6, 2), sinks=True),
    CacheCase("causal_each_left", _same(37, 5, 40, rows=20), causal_each=True, window=(30, None), page_size=4,
              alibi="h"),
    CacheCase("causal_each_group", _same(90, 0, 40, rows=9), causal_each=True, heads=8, kv_heads=1, float8="h"),
    CacheCase("causal_each_packed", ((37, 1, 1), (0, 20, 20), (9, 0, 0), (-1, 3, 3), (9, 7, 7)), packed=True, spare=2,
              appends=True, page_size=4, rotary=8, causal_each=True),
    CacheCase("causal_each_rotary", _same(37, 4, 9, rows=3, new=3), appends=True, rotary=16, causal_each=True,
              window=(20, 3)),
    CacheCase("causal_each_tree", _same(37, 9, rows=6), causal_each=True, window=(-1, 0), tree="random"),
)  # fmt: skip

_LATENT = (
    CacheCase("qv", _same(37, 5, 64, rows=2), qv=True, heads=4, kv_heads=1, head_dim=8, head_dim_v=24),
    CacheCase("qv_heads", _same(37, 0, rows=3), qv=True, heads=4, head_dim=24, head_dim_v=8, sinks=True, softcap=3.0),
    CacheCase("qv_stacked", _same(37, 5, 0, rows=2, new=2), qv=True, heads=20, kv_heads=1, head_dim_v=40, appends=True,
              layout="stacked", page_size=16, rotary=16),
    CacheCase("qv_packed", ((37, 1, 0), (20, 20, 0), (0, 3, 0)), packed=True, qv=True, page_size=3, window=(11, 0),
              alibi="h", spare=2),
    CacheCase("qv_tree", _same(37, 5, rows=7), tree="random", qv=True, heads=8, kv_heads=1, head_dim_v=48),
    CacheCase("qv_float8", _same(37, 5), qv=True, float8="h"),
    CacheCase("qv_float8_pages", _same(37, 5, rows=2), qv=True, float8="eh", page_size=4, head_dim_v=24),
    CacheCase("qv_ragged", _same(37, 0, 50, rows=3), qv=True, heads=24, kv_heads=1, head_dim=64, head_dim_v=512,
              page_size=16, ragged="pages", layout="stacked", causal_each=True),
    CacheCase("wide_heads", _same(37, 9, rows=2), head_dim=512, heads=4),
    CacheCase("wide_values", _same(70, 5), head_dim=264, head_dim_v=320, page_size=16, heads=12, kv_heads=1,
              sinks=True),
)  # fmt: skip

# In bfloat16.
EIGHT_BIT_ROWS = tuple(
    replace(case, heads=case.heads * 4, kv_heads=1, head_dim=64, head_dim_v=512, qv=True, float8="rows")
    for case in (
        CacheCase("rows", _same(37, 5, 64, rows=2)),
        CacheCase("rows_entries", _same(37, 0, rows=3), entries=True, sinks=True, softcap=3.0),
        CacheCase("rows_pages", _same(37, 5, 0, rows=2), page_size=16, window=(20, 0)),
        CacheCase("rows_odd_pages", _same(37, 5, rows=2), page_size=3, leftpad=(6, 1)),
        CacheCase("rows_packed", ((37, 1, 0), (20, 20, 0), (0, 3, 0)), packed=True, page_size=64, alibi="h", spare=2),
        CacheCase("rows_tree", _same(37, 9, rows=7), tree="random", page_size=32),
        CacheCase("rows_ragged", _same(37, 0, 50, rows=3), page_size=16, ragged="pages", causal_each=True),
    )
)

_EVERYTHING = (
    CacheCase("everything", ((37, 1, 1), (3, 9, 9), (0, 0, 0), (0, 4, 4)), packed=True, appends=True, page_size=3,
              rotary=12, rotary_start=True, leftpad=(5, 1, 0, 2), window=(20, 0), softcap=3.0, alibi="bh", sinks=True,
              heads=6, kv_heads=2, head_dim=20, head_dim_v=12, layout="heads_first", spare=1, out="part"),
    CacheCase("everything_float8", _same(19, 33, rows=2, new=3), appends=True, page_size=16, rotary=16, alibi="h",
              interleaved=True, leftpad=(2, 30), softcap=5.0, sinks=True, heads=4, kv_heads=1, float8="eh",
              layout="between"),
)  # fmt: skip

CASES: tuple[CacheCase, ...] = (
    *_DENSE, *_LAYOUTS, *_PAGED, *_APPENDING, *_ROTARY, *_PACKED, *_FLOAT8, *_TREES, *_SLOTS, *_RAGGED, *_BY_SEQUENCE,
    *_LATENT, *_EVERYTHING,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class CacheCall:
    """A case's tensors and keywords, ready for ``flashtile.attention_with_kvcache``; ``run`` changes the caches.

    ``keywords`` are all but q and the caches; ``tensors`` are those that the operator gets.
    """

    case: CacheCase
    problem: Problem
    tensors: CacheTensors
    keywords: dict[str, Any]

    def run(self, backend: str | None, **changes: Any) -> Any:
        """out and lse of the library."""
        t = self.tensors
        keywords = self.keywords | {"return_lse": True, "backend": backend} | changes
        if t.row_scale is not None:
            rows = t.v_cache.view(torch.uint8).as_strided((*t.v_cache.shape[:-1], 656), t.v_cache.stride())
            parts = keywords.pop("qv"), t.q
            return flashtile.attention_with_kvcache(parts, rows, rows[..., :512], **keywords)
        return flashtile.attention_with_kvcache(t.q, t.k_cache, t.v_cache, **keywords)

    def copies(self) -> CacheTensors:
        """Copies of the tensors in main memory."""
        given = {name: getattr(self.tensors, name) for name in TENSORS}
        return CacheTensors(**{name: None if x is None else x.detach().cpu().clone() for name, x in given.items()})


def build(case: CacheCase, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> CacheCall:
    """The tensors of a case, random with a fixed seed, the same on every device; on meta their layouts alone."""
    with torch.device("meta") if device == "meta" else nullcontext():
        make = None if device == "meta" else torch.Generator().manual_seed(seed)
        return _build(case, dtype, device, make)


def _build(case: CacheCase, dtype: torch.dtype, device: str, make: torch.Generator | None) -> CacheCall:
    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=make).to(dtype)

    def index(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    old, rows, new = (tuple(s[n] for s in case.sequences) for n in range(3))
    batch, dim_v = len(old), case.head_dim_v or case.head_dim
    packed_new = case.packed or case.packed_new
    of_q = (sum(rows) + case.spare,) if case.packed else (batch, rows[0] if rows else 2)
    of_new = (sum(new) + case.spare,) if packed_new else (batch, new[0] if new else 1)
    given: dict[str, Any] = {"q": normal(*of_q, case.heads, case.head_dim)}
    keywords: dict[str, Any] = {"qv": normal(*of_q, case.heads, dim_v)} if case.qv else {}
    if case.packed:
        keywords["cu_seqlens_q"] = index([0, *rows]).cumsum(0, dtype=torch.int32)
        keywords |= {"max_seqlen_q": max(rows, default=0)} if case.say_longest else {}
    if case.appends:
        keywords["k"] = normal(*of_new, case.kv_heads, case.head_dim)
        keywords["v"] = normal(*of_new, case.kv_heads, dim_v)
        if packed_new and (new != rows or not case.packed):
            keywords["cu_seqlens_k_new"] = index([0, *new]).cumsum(0, dtype=torch.int32)
    lengths = [max(a + b, 0) for a, b in zip(old, new, strict=True)]
    capacity = case.capacity or max([*lengths, *case.leftpad], default=0) + 3
    keywords |= _places(case, lengths, capacity, make)
    caches, scales = _caches(case, keywords, capacity, dtype, make)
    keywords |= {name: x for name, x in scales.items() if x is not None}
    if case.slots:
        keywords["slot_mapping"] = _slots(case, keywords, caches["k_cache"], of_new, make)
    keywords["cache_seqlens"] = old[0] if case.one_length else index(old)
    if case.leftpad:
        keywords["cache_leftpad"] = index(case.leftpad)
    if case.rotary:
        keywords |= _rotary(case, capacity + max(rows, default=0) + 9, batch, dtype, make)
    if case.alibi:
        shape = (case.heads,) if case.alibi == "h" else (batch, case.heads)
        keywords["alibi_slopes"] = torch.rand(*shape, generator=make)
    if case.sinks:
        keywords["sinks"] = normal(case.heads)
    if case.tree:
        most = (case.tree_rows or max(rows, default=0)) if case.packed else of_q[1]
        mask = trees.masks(case.tree, list(rows), most)
        mask = mask if make is not None else torch.empty_like(mask)
        keywords["tree_mask"] = tree_words("tree_mask", mask) if case.words else mask
    if case.out:
        wide = torch.full((*of_q, case.heads + 1, dim_v), torch.nan, dtype=dtype)
        keywords["out"] = wide[..., : case.heads, :] if case.out == "part" else wide[..., 1:, :].contiguous()
    if case.ragged:
        counts = [-(-length // case.page_size) for length in lengths]
        keywords |= _as_list(keywords.pop("page_table"), counts, make)
        keywords |= {"max_seqlen_k": max(capacity - 1, 0)} if case.ragged == "bound" else {}
    keywords["causal"] = torch.arange(batch) % 2 == 0 if case.causal_each else case.causal
    keywords = {name: _moved(x, device) for name, x in keywords.items()}
    given = {name: _moved(x, device) for name, x in (given | caches).items()}
    keywords |= dict(
        window_size=case.window, softmax_scale=case.scale, softcap=case.softcap,
        rotary_interleaved=case.interleaved,
    )  # fmt: skip
    if case.chunk is not None:
        keywords["attention_chunk"] = case.chunk
    if case.invariant:
        keywords["batch_invariant"] = True
    return _call(case, given, keywords)


def _moved(x: Any, device: str) -> Any:
    """A tensor on a device, with its strides."""
    if not isinstance(x, Tensor) or device in ("cpu", "meta"):
        return x
    whole = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def _call(case: CacheCase, given: dict[str, Tensor], keywords: dict[str, Any]) -> CacheCall:
    """The records of the call, as the public function makes them."""
    tensors = {name: keywords.get(name) for name in TENSORS} | given
    of_all, tensors["causal"] = causality(keywords["causal"])
    q = tensors["q"]
    if case.one_length:
        tensors["cache_seqlens"] = torch.full((len(case.sequences),), keywords["cache_seqlens"], dtype=torch.int32).to(
            q.device
        )
    if tensors["out"] is None:
        tensors["out"] = q.new_empty(*q.shape[:-1], case.head_dim_v or case.head_dim)
    if case.appends and case.packed and tensors["cu_seqlens_k_new"] is None:
        tensors["cu_seqlens_k_new"] = tensors["cu_seqlens_q"]
    if tensors["tree_mask"] is not None:
        tensors["tree_mask"] = tree_words("tree_mask", tensors["tree_mask"])
    plain = (
        keywords.get("max_seqlen_q"), keywords.get("max_seqlen_k"), case.scale, case.softcap, case.interleaved, None,
        case.chunk, False, False, case.invariant,
    )  # fmt: skip
    made = CacheTensors(**tensors)
    return CacheCall(case, problem_of(made, read(of_all, case.window, True, plain)), made, keywords)


# Page ids that are none; entries that a call must not use hold these.
_GARBAGE = (-1, 2**31 - 1, -(2**31))


def _places(case: CacheCase, lengths: list[int], capacity: int, make: torch.Generator | None) -> dict[str, Tensor]:
    """page_table or cache_batch_idx, with pages and entries in a random order and some that nobody has."""
    batch = len(lengths)
    if case.entries:
        return {"cache_batch_idx": torch.randperm(batch + 2, generator=make)[:batch].to(torch.int32)}
    if not case.page_size:
        return {}
    size, most = case.page_size, -(-capacity // case.page_size)
    table = torch.empty(batch, most, dtype=torch.int32)
    table.flatten().copy_(torch.tensor(_GARBAGE).repeat(table.numel())[: table.numel()])
    if make is None:
        return {"page_table": table}
    order = iter(torch.randperm(sum(-(-length // size) for length in lengths) + 2, generator=make).tolist())
    for b, length in enumerate(lengths):
        first = case.leftpad[b] if case.leftpad else 0
        if case.appends:
            first = min(first, max(case.sequences[b][0], 0))
        for page in range(first // size, -(-length // size)) if first < length else ():
            table[b, page] = next(order)
    return {"page_table": table}


def _as_list(table: Tensor, counts: list[int], make: torch.Generator | None) -> dict[str, Tensor]:
    """page_indptr and page_indices of a table, of so many pages of each sequence and two that are none."""
    total = sum(counts)
    indices = torch.empty(total + 2, dtype=torch.int32)
    bounds = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    if make is not None:
        indices[total:] = torch.tensor(_GARBAGE[:2])
        rows = [row[:count] for row, count in zip(table, counts, strict=True)]
        indices[:total] = torch.cat([*rows, table.new_empty(0)])
    return {"page_indptr": bounds, "page_indices": indices}


def _caches(
    case: CacheCase, places: dict[str, Tensor], capacity: int, dtype: torch.dtype, make: torch.Generator | None
) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """The caches and their scales; what no sequence may see is NaN or infinite.

    Layouts: ``apart``; ``heads_first``, by a transposed view; ``stacked``, keys and values as halves of the last
    dimension; ``heads_first_stacked``, both; ``between``, with both in each page; ``sliced``, at odd addresses.
    """
    batch, heads, dims = len(case.sequences), case.kv_heads, (case.head_dim, case.head_dim_v or case.head_dim)
    count, size = batch + 2 * (case.entries or case.slots != ""), capacity
    if "page_table" in places:
        size = case.page_size
        count = 2 + sum(-(-max(old + new, 0) // size) for old, _, new in case.sequences)
    shapes = [(count, size, heads, dim) for dim in dims]
    poisons = (torch.nan, torch.inf)
    values = [torch.full(shape, poison, dtype=dtype) for shape, poison in zip(shapes, poisons, strict=True)]
    scales: list[Tensor | None] = [None, None]
    kind = torch.float8_e5m2 if case.e5m2 else FLOAT8
    if case.float8 in ("h", "eh"):
        shape = (heads,) if case.float8 == "h" else (count, heads)
        # The largest magnitude of keys is then 1.8 to 3.6: new ones saturate.
        least = 1.8 / torch.finfo(kind).max
        scales = [(torch.rand(*shape, generator=make) + 1) * least for _ in dims]
    for b, (old, _, new) in enumerate(case.sequences if make is not None else ()):
        first = min(case.leftpad[b] if case.leftpad else 0, old)
        # A key that is not written where it is looked for is what is there.
        stop = old + new if case.slots and old >= 0 else old
        for x, dim in zip(values, dims, strict=True):
            for j in range(first, stop):
                x[_place(case, places, b, j)] = torch.randn(heads, dim, generator=make).to(dtype)
    if case.float8 == "rows":
        rows = latent_rows(torch.cat(values[::-1], dim=-1))
        others, row_scale = rows[..., 528:].view(torch.bfloat16), rows[..., 512:528].view(torch.float32)
        return {"k_cache": others, "v_cache": rows[..., :512], "row_scale": row_scale}, {}
    if case.float8:
        values = [_quantised(x, scale, kind) for x, scale in zip(values, scales, strict=True)]
    laid = _lay_out(case.layout, *values)
    return dict(zip(("k_cache", "v_cache"), laid, strict=True)), dict(zip(("k_scale", "v_scale"), scales, strict=True))


def _slots(
    case: CacheCase, places: dict[str, Tensor], cache: Tensor, shape: tuple[int, ...], make: torch.Generator | None
) -> Tensor:
    """slot_mapping: int64 or, with pages, int32."""
    dtype = torch.int32 if case.page_size else torch.int64
    slots = torch.full(shape, -1, dtype=dtype)
    if make is None:
        return slots
    pages, size = cache.shape[:2]
    found = []
    for b, (old, _, new) in enumerate(case.sequences):
        own = [_place(case, places, b, old + i) for i in range(new)] if old >= 0 else [(0, 0)] * new
        found += [page * size + row for page, row in own]
    if case.slots != "own":
        # Rows that nobody has.
        spare = iter(sorted({*range(pages * size)} - {*found})[: len(found)])
        found[::3] = [-1 if case.slots == "some" else next(spare, -1) for _ in found[::3]]
    slots.flatten()[: len(found)] = torch.tensor(found, dtype=dtype)
    return slots


def _place(case: CacheCase, places: dict[str, Tensor], b: int, j: int) -> tuple[int, int]:
    if "page_table" in places:
        return int(places["page_table"][b, j // case.page_size]), j % case.page_size
    return (int(places["cache_batch_idx"][b]) if case.entries else b), j


def _quantised(x: Tensor, scale: Tensor | None, kind: torch.dtype) -> Tensor:
    """8 bits, with NaN for what is not finite."""
    wide = x.float()
    if scale is not None:
        wide = wide / (scale if scale.dim() == 1 else scale[:, None])[..., None]
    most = torch.finfo(kind).max
    return torch.where(wide.isfinite(), wide.clamp(-most, most), torch.nan).to(kind)


def _lay_out(layout: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same values with other strides."""
    # Some operations do not take 8-bit floats.
    dtype, bits = k.dtype, [x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in (k, v)]
    if "stacked" in layout:
        both = torch.cat(bits, dim=-1)
        if layout.startswith("heads_first"):
            both = both.transpose(1, 2).contiguous().transpose(1, 2)
        bits = list(both.split([k.shape[-1], v.shape[-1]], dim=-1))
    elif layout == "heads_first":
        bits = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in bits]
    elif layout == "between":
        bits = list(torch.stack(bits, dim=1).unbind(1))
    elif layout == "sliced":
        bits = [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in bits]
    k, v = (x.view(dtype) for x in bits)
    return k, v


def _rotary(
    case: CacheCase, positions: int, batch: int, dtype: torch.dtype, make: torch.Generator | None
) -> dict[str, Tensor]:
    angle = torch.arange(positions)[:, None] * 0.7 ** torch.arange(1, case.rotary // 2 + 1)
    tables = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    tables = {name: x.to(dtype if case.tables else torch.float32) for name, x in tables.items()}
    if case.rotary_start:
        tables["rotary_seqlens"] = torch.randint(0, 9, (batch,), generator=make).to(torch.int32)
    return tables


def judge(call: CacheCall, backend: str, watched: bool = False) -> None:
    """Checks what a backend writes against the rules, or that it refuses with the reasons it declares. Never skips.

    ``watched``: a tool checks the device's memory, which is then not filled beforehand, so that the tool can report
    unwritten elements.
    """
    against = dispatch.reasons(backend, call.problem, "decode")
    before, around = call.copies(), _surroundings(call)
    if against:
        with pytest.raises(UnsupportedError) as caught:
            call.run(backend)
        assert all(reason in str(caught.value) for reason in against)
        _assert_same_bits(call.copies(), before, list(TENSORS))
        return
    with nullcontext() if watched else poisoned_memory():
        out, lse = call.run(backend)
    after = call.copies()
    assert all(map(torch.equal, around, _surroundings(call))), "memory beside out or the caches was written"
    _assert_same_bits(after, before, [name for name in TENSORS if name not in ("out", "k_cache", "v_cache")])
    if call.case.out:
        assert out is call.keywords["out"]
    judge_caches(call, before, after)
    judge_results(call, before, after, out.cpu(), lse.cpu())


def judge_results(call: CacheCall, before: CacheTensors, after: CacheTensors, out: Tensor, lse: Tensor) -> None:
    """Asserts the error rule for out and lse of a call that left these caches."""
    p = call.problem
    # New keys are judged by themselves: rounded to the other of two neighbours, 8 bits make another result.
    left = replace(reference.appended(p, before), k_cache=after.k_cache, v_cache=after.v_cache)
    assert out.dtype == p.dtype and lse.dtype == p.lse_dtype and lse.is_contiguous()

    def by_definition(dtype: torch.dtype) -> dict[str, Tensor]:
        return dict(zip(("out", "lse"), reference.attention_with_kvcache(p, left, dtype), strict=True))

    assert_close({"out": out, "lse": lse}, lambda: by_definition(torch.float64), by_definition(p.dtype), p.dtype)


def judge_caches(call: CacheCall, before: CacheTensors, after: CacheTensors) -> None:
    """Asserts that new keys and values are in the caches, rounded as rules 14 to 16 say, and nothing else changed."""
    p = call.problem
    wide = {name: getattr(before, name) for name in ("q", "k", "v")}
    wide |= {name: torch.full(getattr(before, name).shape, torch.nan) for name in ("k_cache", "v_cache")}
    upcast = {name: None if x is None else x.double() for name, x in wide.items()}
    exact = reference.appended(p, replace(before, **upcast, k_scale=None, v_scale=None))
    for name in ("k_cache", "v_cache"):
        got, old, want = getattr(after, name), getattr(before, name), getattr(exact, name)
        written = want.isfinite()
        assert torch.equal(_bits(got)[~written], _bits(old)[~written]), f"{name}: what no new key belongs to changed"
        if not written.any():
            continue
        turned = name == "k_cache" and call.case.rotary > 0
        limit = 4 * torch.finfo(torch.float32).eps * want[written].abs().max() if turned else 0.0
        step = torch.finfo(p.dtype).eps
        if not call.case.float8:
            error = (got.double() - want).abs()
            allowed = want.abs() * step * 0.501 + limit if turned else torch.zeros(())
            assert (error <= allowed)[written].all(), f"{name}: a new key is off by {error[written].max():.2e}"
            continue
        scale = getattr(before, f"{name[0]}_scale")
        scale = torch.ones(()) if scale is None else scale[..., None] if scale.dim() == 1 else scale[:, None, :, None]
        most = torch.finfo(got.dtype).max
        want = (want / scale.double()).clamp(-most, most)
        nearest = (want.float().to(got.dtype).double() - want).abs()
        # Rounded twice, first to q's dtype; and a quotient may be off by a rounding of float32, a turned number by that
        # of what cancels in it.
        allowed = nearest + want.abs() * (1.01 * step * turned + 1e-6) + limit / scale.double()
        error = (got.double() - want).abs()
        assert (error <= allowed)[written].all(), f"{name}: {((error - allowed)[written]).max():.2e} past the nearest"


def _surroundings(call: CacheCall) -> list[Tensor]:
    """The memory in which out and the caches lie, byte by byte, but for themselves."""
    t = call.tensors if "out" in call.keywords else replace(call.tensors, out=call.tensors.q.new_empty(1))
    views = [t.out, t.k_cache, t.v_cache]
    found = []
    for x in views:
        memory = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).cpu().clone()
        for y in views:
            if y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                bits = memory.view(_BITS[y.element_size()])
                bits.as_strided(y.shape, y.stride(), y.storage_offset()).zero_()
        found.append(memory)
    return found


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(_BITS[x.element_size()])


def _assert_same_bits(got: CacheTensors, want: CacheTensors, names: list[str]) -> None:
    for name in names:
        x, y = getattr(got, name), getattr(want, name)
        assert (x is None and y is None) or torch.equal(_bits(x), _bits(y)), f"{name} was changed"
