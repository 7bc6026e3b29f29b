"""The ``Problem`` of a cached call, and the check of the values in its index tensors."""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashtile.call.axes import Axes, checked_kinds, is_aligned, lengths_between, mod_keys, packed_lengths
from flashtile.call.cached_arguments import (
    EIGHT_BITS,
    FLOAT8,
    TENSORS,
    CacheOptions,
    CacheTensors,
    check_tree,
    check_tree_rows,
    tree_pairs,
)
from flashtile.call.problem import Problem, checked_problem
from flashtile.core.errors import InvalidInputError
from flashtile.core.masks import Band
from flashtile.core.sizes import holds, is_expanded

# What an argument is nothing without.
_NEEDS = {
    "k": "v", "v": "k", "rotary_cos": "rotary_sin", "rotary_sin": "rotary_cos", "rotary_seqlens": "rotary_cos",
    "cu_seqlens_k_new": "k", "slot_mapping": "k", "page_indptr": "page_indices", "page_indices": "page_indptr",
}  # fmt: skip

# Keys of a sequence in a batch-invariant call: their splits are counted in 15 bits, ``gpu/decode/states.py``.
MOST_INVARIANT_KEYS = 2**22


def problem_of(tensors: CacheTensors, options: CacheOptions) -> Problem:
    """Checks the tensors of a cached call against one another and records the call.

    Its ``seqlen_k`` is the capacity of an entry, of a row of page_table or of all page_indices, if there is no
    max_seqlen_k.

    Raises:
        InvalidInputError: Naming the argument that does not match.
        UnsupportedError: The call is traced by ``torch.jit.trace``.
    """
    t, o, sizes = tensors, options, _check_tensors(tensors, options)
    page_size = sizes.get("page_size", 0)
    capacity = sizes["capacity"] if not t.in_pages else sizes.get("max_pages", sizes.get("total_pages", 0)) * page_size
    capacity = capacity if o.max_seqlen_k is None else o.max_seqlen_k
    if o.batch_invariant and holds(capacity > MOST_INVARIANT_KEYS):
        what = "max_seqlen_k" if t.page_indptr is not None else "k_cache"
        must = f"at most {MOST_INVARIANT_KEYS} with batch_invariant=True"
        raise InvalidInputError(what, f"has room for {capacity} keys of a sequence, {must}")
    functions = mod_keys(t, o.mods)
    own = {} if t.qv is None else _with_qv(t, o, sizes)
    if t.in_pages and any(x is not None and x.dim() == 2 for x in (t.k_scale, t.v_scale)):
        own["paged_scales"] = True
    return checked_problem(
        t, o, sizes, (t.k_cache, t.v_cache),
        seqlen_k=capacity, cached=True, page_size=page_size, alibi=t.alibi_slopes is not None,
        score_function=functions.get("score"), mask_function=functions.get("mask"), tree=t.tree_mask is not None,
        causal_each=t.causal is not None, row_keys=t.row_keys is not None, key_rows=t.key_rows is not None,
        mirrored=o.mirrored, by_head=any(x is not None and holds(x.shape[1] > 1) for x in (t.row_keys, t.key_rows)),
        rotary_interleaved=o.rotary_interleaved, max_scores=o.return_max_scores,
        batch_invariant=o.batch_invariant, **own,
    )  # fmt: skip


def _with_qv(t: CacheTensors, o: CacheOptions, sizes: dict[str, int]) -> dict[str, Any]:
    """What a call with further queries has otherwise than most: a score is a product of all columns."""
    scale = (sizes["head_dim"] + sizes["head_dim_v"]) ** -0.5 if o.softmax_scale is None else o.softmax_scale
    assert t.qv is not None
    each = (t.q, t.k_cache, t.v_cache, t.qv)
    return {
        "qv": True,
        "row_scale": t.row_scale is not None,
        "softmax_scale": scale,
        "aligned": all(map(is_aligned, each)) or t.q.device.type == "cpu",
    }


_warned = False  # of 8 bits without scales, once in a process


def _warn_of_scales(t: CacheTensors) -> None:
    """Warns of a cache in e4m3 that lacks a scale: without one, new elements past 448 are cut off."""
    global _warned
    missing = [name for name in ("k_scale", "v_scale") if getattr(t, name) is None]
    if missing and t.k_cache.dtype == torch.float8_e4m3fn and t.row_scale is None and not _warned:
        _warned = True
        names, given = " and ".join(missing), ", ".join(f"{name}=1.0" for name in missing)
        warnings.warn(
            f"a cache in float8_e4m3fn without {names} is read with scales of 1; if it is so, give {given}",
            stacklevel=2,
        )


def _check_tensors(t: CacheTensors, o: CacheOptions) -> dict[str, int]:
    """Checks dtypes, devices, shapes and which go together; returns sizes by axis name."""
    found = checked_kinds(t, TENSORS)
    _check_company(t, o)
    axes = Axes(_renamed(t))
    for name in ("q", "k_cache", "v_cache"):
        axes.bind(name, found[name][1], found[name][0])
    for name in ("cu_seqlens_q", "cu_seqlens_k_new", "page_indptr"):
        if name in found:
            axes.bind_bounds(name, found)
    if t.cu_seqlens_q is not None:
        shown = 1 if t.row_keys is None else t.row_keys.shape[2]  # of a mask the size is a bound too
        longest = axes.sizes["total_q"] if holds(shown == 1) else shown
        axes.fix("max_seqlen_q", "seqlen_q", longest if o.max_seqlen_q is None else o.max_seqlen_q)
    axes.fix("an interval", "ends", 2)
    if t.key_rows is not None:
        axes.fix("block_mask", "mask_keys", t.key_rows.shape[2])
    axes.check_heads()
    axes.bind_all(found)
    _check_sizes(t, axes.sizes)
    _warn_of_scales(t)
    if t.tree_mask is not None:
        _check_trees(t, o, axes.sizes)
    return axes.sizes


def _renamed(t: CacheTensors) -> dict[str, str]:
    renamed = {}
    if t.cu_seqlens_q is not None:
        renamed["batch seqlen_q"] = "total_q"
    if t.cu_seqlens_k_new is not None:
        renamed["batch seqlen_new"] = "total_new"
    if t.in_pages:
        renamed |= {"entries capacity": "pages page_size", "[entries]": "[pages]"}
    return renamed


def _check_company(t: CacheTensors, o: CacheOptions) -> None:
    """Refuses arguments that need others, or exclude them."""
    if t.row_scale is not None:
        _check_eight_bit_rows(t)
    for name, other in _NEEDS.items():
        if getattr(t, name) is not None and getattr(t, other) is None:
            raise InvalidInputError(name, f"is given, but goes with {other}")
    if t.rotary_cos is not None and t.k is None:
        raise InvalidInputError("rotary_cos", "is given, but goes with new keys k and v")
    if o.rotary_interleaved and t.rotary_cos is None:
        raise InvalidInputError("rotary_interleaved", "is True, but goes with rotary_cos")
    pages = "page_table" if t.page_table is not None else "page_indptr" if t.page_indptr is not None else ""
    for name, excluded in (("cache_batch_idx", pages), ("page_indptr", pages if t.page_table is not None else "")):
        if excluded and getattr(t, name) is not None:
            raise InvalidInputError(name, f"is given with {excluded}, which says where each sequence is")
    if o.max_seqlen_q is not None and t.cu_seqlens_q is None:
        raise InvalidInputError("max_seqlen_q", "is given, but goes with cu_seqlens_q alone")
    if o.max_seqlen_k is not None and t.page_indptr is None:
        raise InvalidInputError("max_seqlen_k", "is given, but goes with page_indptr alone")
    if t.k is not None and t.cu_seqlens_q is not None and t.cu_seqlens_k_new is None:
        raise InvalidInputError("cu_seqlens_k_new", "is None, but goes with k where q is packed")
    if t.row_scale is None and t.v_cache.dtype != t.k_cache.dtype:
        raise InvalidInputError("v_cache", f"dtype is {t.v_cache.dtype}, but k_cache has {t.k_cache.dtype}")
    for name in ("k_scale", "v_scale"):
        if getattr(t, name) is not None and t.k_cache.dtype not in EIGHT_BITS:
            raise InvalidInputError(name, f"is given, but goes with float8 caches; k_cache has {t.k_cache.dtype}")


def _check_eight_bit_rows(t: CacheTensors) -> None:
    """Refuses what latent rows with values of 8 bits do not go with."""
    if t.qv is None or t.v_cache.dtype != FLOAT8 or t.k_cache.dtype != t.q.dtype:
        raise InvalidInputError(
            "row_scale", "is given, but goes with qv, values in float8_e4m3fn and keys in q's dtype"
        )
    for name in ("k", "k_scale", "v_scale"):
        if getattr(t, name) is not None:
            hint = ": write new rows as flashtile.serving.latent_rows makes them" if name == "k" else ""
            raise InvalidInputError(name, f"is given, but rows of 656 bytes have their scales{hint}")


def _check_sizes(t: CacheTensors, sizes: dict[str, int]) -> None:
    if t.row_scale is not None and holds(sizes["head_dim_v"] != 128 * sizes["v_blocks"]):
        raise InvalidInputError("row_scale", f"has {sizes['v_blocks']} scales a row for {sizes['head_dim_v']} columns")
    if t.in_pages and holds(sizes["page_size"] == 0):
        raise InvalidInputError("k_cache", "page_size is 0, must be at least 1")
    if not t.in_pages and t.cache_batch_idx is None and holds(sizes["entries"] < sizes["batch"]):
        must = f"must be at least the batch of {sizes['batch']} without cache_batch_idx and page_table"
        raise InvalidInputError("k_cache", f"entries is {sizes['entries']}, {must}")
    turned = 2 * sizes.get("rotary_dim/2", 0)
    if holds(turned > sizes["head_dim"]):
        raise InvalidInputError("rotary_cos", f"turns {turned} features, but q has head_dim {sizes['head_dim']}")
    written = ("out", "k_cache", "v_cache") if t.k is not None else ("out",)
    for name in ("out", "k_cache", "v_cache"):
        x = getattr(t, name)
        if holds(x.shape[-1] > 1) and holds(x.stride(-1) != 1) and holds(x.numel() > 0):
            raise InvalidInputError(name, f"has strides {x.stride()}, its last dimension must be contiguous")
        if name in written and is_expanded(x):
            raise InvalidInputError(name, f"has strides {x.stride()}, but is written: it must not be expanded")


def _check_trees(t: CacheTensors, o: CacheOptions, sizes: dict[str, int]) -> None:
    rows, queries = sizes["draft_rows"], sizes["seqlen_q"]
    if o.mods or t.row_keys is not None or t.key_rows is not None:
        given = "score_mod or mask_mod" if o.mods else "block_mask"
        raise InvalidInputError("tree_mask", f"is given with {given}, which know no depths")
    check_tree_rows("tree_mask", rows)
    if o.window_right != 0:
        raise InvalidInputError("tree_mask", "goes with causal=True: of the keys before the drafts a row sees all")
    if o.attention_chunk is not None:
        raise InvalidInputError("tree_mask", "is given with attention_chunk, whose chunks do not count by depth")
    if t.cu_seqlens_q is None and holds(rows != queries):
        raise InvalidInputError("tree_mask", f"is of trees of {rows} rows, but q has seqlen_q {queries}")
    new = sizes.get("seqlen_new", queries)
    if t.rotary_cos is not None and holds(new != queries) and t.cu_seqlens_q is None:
        must = f"must be as many as the {queries} rows of a tree where they are rotated"
        raise InvalidInputError("k", f"seqlen_new is {new}, {must}")


def check_length(t: CacheTensors, length: int) -> None:
    """Checks the one number that all cache_seqlens have, as far as shapes tell.

    Raises:
        InvalidInputError: Keys of that length and the new ones do not fit into the cache.
    """
    pages, keys = t.page_table if t.page_indices is None else t.page_indices, t.k_cache
    if keys.dim() != 4 or (pages is not None and pages.dim() != 1 + (t.page_indices is None)):
        return  # ``problem_of`` says so
    capacity = keys.shape[1] * (1 if pages is None else pages.shape[-1])
    new = 0 if t.k is None or t.cu_seqlens_k_new is not None or t.k.dim() != 4 else t.k.shape[1]
    if holds(length + new > capacity):
        more = f" and {new} new keys do" if new else " does"
        raise InvalidInputError(
            "cache_seqlens", f"{length}{more} not fit into a cache of {capacity}{_without_pages(t)}"
        )


def _without_pages(t: CacheTensors) -> str:
    """What to add of caches that may be in pages, unknown to the call."""
    return "" if t.in_pages else " without page_table"


def check_apart(t: CacheTensors) -> None:
    """Refuses appending to caches that are one tensor, unless keys and values are one too and nothing rotates keys."""
    k, v = t.k_cache, t.v_cache
    one = k is v or (k.data_ptr(), k.shape, k.stride()) == (v.data_ptr(), v.shape, v.stride())
    if one and t.k is not None and t.v is not None and k.numel() and not (t.k is t.v and t.rotary_cos is None):
        raise InvalidInputError("v_cache", "is the same tensor as k_cache: new values would overwrite new keys")


def check_values(problem: Problem, tensors: CacheTensors) -> None:
    """Checks that caches are two, and what index tensors hold: lengths, padding, entries, pages, positions and bounds.

    No two new keys may be written to one row. Many sequences may share entries and pages that are only read.

    On a GPU this waits for the device, so callers run it only when ``FLASHTILE_CHECK`` is set.

    Raises:
        InvalidInputError: Naming the tensor or the length that is wrong.
    """
    t, batch, capacity = tensors, problem.batch, problem.seqlen_k
    check_apart(t)
    rows = _row_counts(problem, t)
    lengths, new = lengths_of(t, batch)
    pages = pages_of(t) if problem.page_size else []
    for b, length in enumerate(lengths):
        # Each sequence of a ragged list has its own room.
        room = capacity if t.page_indptr is None else min(capacity, len(pages[b]) * problem.page_size)
        if length + new[b] > room:
            more = f" and {new[b]} new keys do" if new[b] else " does"
            own = f"sequence {b}'s cache of {room}{_without_pages(t)}"
            raise InvalidInputError("cache_seqlens", f"{length}{more} not fit into {own}")
    leftpad = [0] * batch if t.cache_leftpad is None else t.cache_leftpad.tolist()
    for b, first in enumerate(leftpad):
        if first < 0:
            raise InvalidInputError("cache_leftpad", f"is {first} for sequence {b}, must be at least 0")
    size, places = t.k_cache.shape[1], list[list[int]]()
    if t.cache_batch_idx is not None:
        entries = t.cache_batch_idx.tolist()
        _check_range("cache_batch_idx", entries, t.k_cache.shape[0], "entries")
        places = [[entry] for entry in entries]
    name = "cache_batch_idx" if not t.in_pages else "page_table" if t.page_indptr is None else "page_indices"
    if pages:
        for b, table in enumerate(pages):
            stop = lengths[b] + new[b]
            start = min(leftpad[b], lengths[b]) if new[b] and t.slot_mapping is None else leftpad[b]
            used = table[start // size : -(-stop // size)].tolist() if start < stop else []
            _check_range(name, used, t.k_cache.shape[0], f"pages; it is used by sequence {b}")
            places.append(used[lengths[b] // size - start // size :])
    if t.slot_mapping is not None:
        _check_slots(t)
    elif places and t.k is not None:
        _check_new_rows(name, size, places, lengths, new)
    if t.tree_mask is not None:
        rows, new = _check_tree_values(t, t.tree_mask.cpu(), rows, new)
    if t.rotary_cos is not None:
        _check_positions(problem, t, rows, new, lengths)


def _check_tree_values(t: CacheTensors, mask: Tensor, rows: list[int], new: list[int]) -> tuple[list[int], list[int]]:
    """Returns how many positions the queries and the new keys of each sequence take."""
    taken, taken_new = list(rows), list(new)
    for b, words in enumerate(mask):
        if rows[b] > len(words):
            continue  # no tree
        check_tree("tree_mask", words, rows[b], b)
        if t.rotary_cos is not None and t.cache_seqlens[b] >= 0 and new[b] != rows[b]:
            must = f"must have as many as the {rows[b]} rows of its tree where they are rotated"
            raise InvalidInputError("cu_seqlens_k_new", f"gives sequence {b} {new[b]} keys, {must}")
        taken[b] = max(tree_pairs(words, rows[b]).sum(-1).tolist(), default=0)
        taken_new[b] = min(new[b], taken[b])
    return taken, taken_new


def _row_counts(problem: Problem, t: CacheTensors) -> list[int]:
    """The number of queries of each sequence."""
    if t.cu_seqlens_q is None:
        return [problem.seqlen_q] * problem.batch
    return packed_lengths("q", t.cu_seqlens_q, t.q.shape[0], problem.seqlen_q)


def lengths_of(t: CacheTensors, batch: int) -> tuple[list[int], list[int]]:
    """The keys of each sequence before appending, and its new ones: none where cache_seqlens is negative.

    Raises:
        InvalidInputError: The values of cu_seqlens_k_new are no bounds of packed sequences.
    """
    old, new = t.cache_seqlens.tolist(), new_counts(t, batch)
    return [max(length, 0) for length in old], [n if m >= 0 else 0 for m, n in zip(old, new, strict=True)]


def bands_of(problem: Problem, t: CacheTensors) -> list[Band]:
    """The band of each sequence."""
    if t.causal is None:
        return [problem.band] * problem.batch
    return [replace(problem.band, right=0) if each else problem.band for each in t.causal.tolist()]


def new_counts(t: CacheTensors, batch: int) -> list[int]:
    """The number of new keys of each sequence, from the values of cu_seqlens_k_new where they are packed.

    Raises:
        InvalidInputError: The values are no bounds of packed sequences.
    """
    if t.k is None:
        return [0] * batch
    if t.cu_seqlens_k_new is None:
        return [t.k.shape[1]] * batch
    return lengths_between("cu_seqlens_k_new", t.cu_seqlens_k_new.tolist(), t.k.shape[0], "k")


def pages_of(t: CacheTensors) -> list[Tensor]:
    """The pages of each sequence, in their order.

    Raises:
        InvalidInputError: The values of page_indptr are no bounds of page_indices.
    """
    if t.page_indptr is None or t.page_indices is None:
        return [] if t.page_table is None else list(t.page_table)
    bounds, total = t.page_indptr.tolist(), t.page_indices.shape[0]
    counts = lengths_between("page_indptr", bounds, total, "page_indices")
    return [t.page_indices[first : first + count] for first, count in zip(bounds, counts, strict=False)]


def _check_slots(t: CacheTensors) -> None:
    assert t.slot_mapping is not None
    slots = t.slot_mapping if t.cu_seqlens_k_new is None else t.slot_mapping[: t.cu_seqlens_k_new[-1]]
    count = t.k_cache.shape[0] * t.k_cache.shape[1]
    wrong = slots[(slots < -1) | (slots >= count)].tolist()
    if wrong:
        raise InvalidInputError("slot_mapping", f"has {wrong[0]}, must be -1 or one of k_cache's {count} slots")
    written = t.cache_seqlens >= 0
    if t.cu_seqlens_k_new is not None:
        written = written.repeat_interleave(t.cu_seqlens_k_new.diff())
    taken = slots[written]
    taken = taken[taken >= 0].sort().values
    twice = taken[1:][taken[1:] == taken[:-1]].tolist()
    if twice:
        raise InvalidInputError("slot_mapping", f"has {twice[0]} twice: of two new keys in one slot one would be lost")


def _check_new_rows(name: str, size: int, places: list[list[int]], lengths: list[int], new: list[int]) -> None:
    """Refuses two new keys in one row: one would be lost.

    ``places`` are each sequence's entries or pages, of ``size`` rows, from its first new key's on.
    """
    spans = defaultdict[int, list[tuple[int, int, int]]](list)
    for b, (length, count) in enumerate(zip(lengths, new, strict=True)):
        for n, place in enumerate(places[b] if count else ()):
            start, stop = 0 if n else length % size, min(length % size + count - n * size, size)
            for other, first, end in spans[place]:
                if (row := max(first, start)) < min(end, stop):
                    who = f"sequence {b} twice" if other == b else f"sequences {other} and {b}"
                    lost = f"of two new keys in its row {row} one would be lost"
                    raise InvalidInputError(name, f"has {place} for {who}: {lost}")
            spans[place].append((b, start, stop))


def _check_range(name: str, values: list[int], count: int, what: str) -> None:
    for value in values:
        if not 0 <= value < count:
            raise InvalidInputError(name, f"has {value}, but k_cache has {count} {what}")


def _check_positions(problem: Problem, t: CacheTensors, rows: list[int], new: list[int], lengths: list[int]) -> None:
    assert t.rotary_cos is not None
    firsts = lengths if t.rotary_seqlens is None else t.rotary_seqlens.tolist()
    bands = bands_of(problem, t)
    for b, (first, cached) in enumerate(zip(firsts, t.cache_seqlens.tolist(), strict=True)):
        if cached < 0:
            continue
        if first < 0:
            raise InvalidInputError("rotary_seqlens", f"is {first} for sequence {b}, must be at least 0")
        of_rows = min(rows[b], 1) if bands[b].unbounded else rows[b]
        last = first + max(of_rows, new[b])
        if max(of_rows, new[b]) and last > t.rotary_cos.shape[0]:
            has = f"has {t.rotary_cos.shape[0]} positions"
            raise InvalidInputError("rotary_cos", f"{has}, but sequence {b} rotates at {last - 1}")
