"""Cached calls' arguments from a ``Problem`` and its tensors; operands are ``launch.plan_of``'s."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flashtile.backends.gpu.decode.call import (
    Cache,
    CacheScales,
    DecodeCall,
    DecodeResults,
    DecodeSchedule,
    HeadScale,
    New,
    Rotation,
    Splitting,
)
from flashtile.backends.gpu.decode.config import (
    FEW_ROWS,
    LONG_KEYS,
    DecodeTiles,
    bounded,
    has_many,
    hopper_rows,
    most_few,
)
from flashtile.backends.gpu.device.records import KeyBand, Mod, Mods, Rows, Sequences, Tree
from flashtile.backends.gpu.launch import Pointer, pointer
from flashtile.backends.gpu.masks import intervals_of
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.records import alibi_of, functions_of, indices, max_scores_of, named, rows_of, softcap_of
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Problem

# Heads of one token that a program moves.
HEADS_AT_ONCE = 16

mods = device_code("flashtile.backends.gpu.device.mods")


def call_of(
    problem: Problem, tensors: CacheTensors, config: DecodeTiles, slots: int, heads_in_step: int, *, few: bool
) -> DecodeCall:
    """The attention's ``DecodeCall``.

    Args:
        problem: The call.
        tensors: Its tensors; k and v are read by TMA if the tiles are ``specialised``.
        config: The tiles.
        slots: Slots of the workspace, 0 if nothing is ever split.
        heads_in_step: As in ``DecodeSchedule``.
        few: Whether packed sequences of ``FEW_ROWS`` with more than ``LONG_KEYS`` alone are computed.
    """
    p, t = problem, tensors
    least = 16 * (2 if _is_8_bit(p) else 1)
    # Each has 64 columns if the other has: ptxas may lose one of two swizzles, see ``portable.config.padded_dims``.
    block_d, block_dv = padded(p.head_dim, least), padded(p.head_dim_v, least)
    block_d, block_dv = max(block_d, min(block_dv, 64)), max(block_dv, min(block_d, 64))
    cache = cache_of(p, t, None if config.specialised else torch.int16, block_d, block_dv)
    results = DecodeResults(Pointer(torch.float32, "lse"), None, None, None, max_scores_of(p))
    if slots:
        acc, counters = Pointer(torch.float32, "acc"), Pointer(torch.int32, "counters")
        results = results._replace(acc=acc, stats=acc._replace(offset=4 * slots * p.head_dim_v), counters=counters)
    return DecodeCall(
        rows_of(*queries_of(t), block_d), rows_of("out", t.out, block_dv),
        _queries(p, t), cache, _mods(p, t), results, _schedule(p, config, heads_in_step, few),
        indices(t.cache_leftpad, "cache_leftpad"), _causal(t), _value_queries(t, block_dv), pointer(t.sinks, "sinks"),
        p.num_heads_kv, p.group_size,
    )  # fmt: skip


def cache_of(problem: Problem, t: CacheTensors, as_8_bit: torch.dtype | None, block_d: int, block_dv: int) -> Cache:
    """The record of a cache, its 8-bit numbers read as another type; without its rows if that is None."""
    p, is_8_bit = problem, _is_8_bit(problem)
    values, none = t.v_cache, Rows(*[None] * len(Rows._fields))
    if t.row_scale is not None:
        values = values.view(torch.uint8)
    k, v = (
        None if as_8_bit is None else rows_of(name, cache.view(as_8_bit), block // as_8_bit.itemsize)
        if is_8_bit else rows_of(name, cache, block)
        for name, cache, block in (("k_cache", t.k_cache, block_d), ("v_cache", values, block_dv))
    )  # fmt: skip
    e5m2 = p.kv_dtype == torch.float8_e5m2
    # GPUs before sm_89 have no instruction that decodes e4m3 numbers.
    bits = is_8_bit and (p.compute_capability is None or (not e5m2 and p.compute_capability < (8, 9)))
    of_k, of_v = _scale("k_scale", t.k_scale), _scale("v_scale", t.v_scale)
    of_rows = none if as_8_bit is None or t.row_scale is None else rows_of("row_scale", t.row_scale, block_dv // 128)
    by_page = t.in_pages and bool(of_k.stride_b or of_v.stride_b)
    bounds = None if t.k is None else indices(t.cu_seqlens_k_new, "cu_seqlens_k_new")
    new = Sequences(bounds, p.batch, 0 if t.k is None or bounds is not None else t.k.shape[1])
    return Cache(
        k, v, CacheScales(of_k, of_v, of_rows, is_8_bit, e5m2, bits, by_page), new,
        indices(t.cache_seqlens, "cache_seqlens"), indices(t.cache_batch_idx, "cache_batch_idx"), p.seqlen_k,
        pages_of(t), 0 if t.page_table is None else t.page_table.stride(0), indices(t.page_indptr, "page_indptr"),
        p.page_size,
    )  # fmt: skip


def new_of(problem: Problem, t: CacheTensors, count: int) -> New:
    """The record of ``count`` new tokens."""
    assert t.k is not None and t.v is not None
    p = problem
    k, v = rows_of("k", t.k, padded(p.head_dim)), rows_of("v", t.v, padded(p.head_dim_v))
    if t.slot_mapping is None:
        return New(k, v, count, None, None, None, p.num_heads_kv, HEADS_AT_ONCE)
    entries, rows = t.k_cache.shape[:2]
    return New(
        k, v, count, indices(t.slot_mapping, "slot_mapping"), entries * rows, rows, p.num_heads_kv, HEADS_AT_ONCE
    )


def rotation_of(problem: Problem, t: CacheTensors) -> Rotation:
    """The record of what the launch that appends rotates."""
    if t.rotary_cos is None:
        return Rotation(None, None, None, None, None, None, None, None, None, None, None, 0, None, None, None)
    p, (rows, pairs), block = problem, t.rotary_cos.shape, padded(problem.head_dim)
    starts = (
        indices(t.cache_seqlens, "cache_seqlens")
        if t.rotary_seqlens is None
        else (indices(t.rotary_seqlens, "rotary_seqlens"))
    )
    return Rotation(
        rows_of("q", t.q, block), rows_of(*queries_of(t), block), _queries(p, t), p.num_heads_q,
        starts, _causal(t) if p.band.unbounded else None, pointer(t.rotary_cos, "rotary_cos"),
        pointer(t.rotary_sin, "rotary_sin"), *_tree(t), rows, 2 * pairs, power_of_two(pairs), p.rotary_interleaved,
        p.causal_each or not p.band.unbounded,
    )  # fmt: skip


def queries_of(t: CacheTensors) -> tuple[str, Tensor]:
    """The operand that the attention has for queries, and a tensor of its layout: q, or what the append makes of it."""
    return ("q", t.q) if t.rotary_cos is None else ("rotated", torch.empty_like(t.q, device="meta").contiguous())


def pages_of(t: CacheTensors) -> Pointer | None:
    """The pages of sequences, None for a cache without."""
    return Pointer(torch.int32, "page_table" if t.page_indices is None else "page_indices") if t.in_pages else None


def _queries(problem: Problem, t: CacheTensors) -> Sequences:
    return Sequences(indices(t.cu_seqlens_q, "cu_seqlens_q"), problem.batch, t.q.shape[-3])


def _value_queries(t: CacheTensors, block_dv: int) -> Rows:
    return Rows(*[None] * len(Rows._fields)) if t.qv is None else rows_of("qv", t.qv, block_dv)


def _scale(name: str, scale: Tensor | None) -> HeadScale:
    return HeadScale(pointer(scale, name), scale.stride(0) if scale is not None and scale.dim() == 2 else 0)


def _causal(t: CacheTensors) -> Pointer | None:
    return None if t.causal is None else Pointer(torch.uint8, "causal")


def _tree(t: CacheTensors) -> Tree:
    return Tree(pointer(t.tree_mask, "tree_mask"), None if t.tree_mask is None else t.tree_mask.shape[1])


def _mods(problem: Problem, t: CacheTensors) -> Mods:
    p = bounded(problem)
    masks, mask_names = named(tree=Mod(mods.select_tree, None, mods.tree_of_head, _tree(t)) if p.tree else None)
    score_mod, mask_mod = functions_of(p, t)
    if mask_mod is not None:
        masks, mask_names = named(mask_mod=mask_mod)
    transforms, names = named(score_mod=score_mod, softcap=softcap_of(p), alibi=alibi_of(p, t.alibi_slopes))
    band = _band(p)
    if p.intervals:
        row_keys, key_rows = intervals_of(p, t)
        band = band._replace(row_keys=row_keys, key_rows=key_rows)
    return Mods(
        p.softmax_scale, transforms, band, masks, None, None, names, mask_names,
        transforms is not None or p.softmax_scale <= 0, "ieee", p.large_scores,
    )  # fmt: skip


def _band(problem: Problem) -> KeyBand:
    """The band; its chunks are added to positions: longer ones than a sequence have the same effect."""
    band, most = problem.band, max(problem.seqlen_k, 1)
    if band.chunk is None:
        return KeyBand(band.left, band.right)
    return KeyBand(*(None if x is None else min(x, most) for x in (band.left, band.right, band.chunk)))


def _schedule(problem: Problem, config: DecodeTiles, heads_in_step: int, few: bool) -> DecodeSchedule:
    p, cut = problem, config.splitting
    rows = config.block_m if p.varlen else min(config.block_m, p.seqlen_q * p.group_size)
    fold_rows = min(power_of_two(rows), 4)
    # States loaded at once, whole runs. 16 save 1% of a call of one sequence and make Triton compile twice as long.
    most = 16 if 64 < hopper_rows(p) <= 128 else 8
    ahead = max(min(most, 8192 // (fold_rows * padded(p.head_dim_v))) // cut.run, 1) * cut.run
    # Numbers wherever there may be others, so that one build serves sequences of few rows and whole calls of them.
    most_rows = above_keys = fewest_rows = None
    if p.varlen and not config.specialised:
        most_rows, above_keys = (FEW_ROWS, LONG_KEYS) if few else (2**30, -1)
    if p.varlen and p.batch_invariant:
        most_rows, above_keys = most_few(p) if few else 2**30, -1
        fewest_rows = most_few(p) + 1 if has_many(p) and not few else 0
    search = search_of(p.batch, p.varlen, 64 if config.specialised else 32)
    return DecodeSchedule(
        config.block_m, config.block_n, fold_rows, ahead, heads_in_step, 64 if p.device_type == "cuda" else 1,
        Splitting(*dataclasses.astuple(cut)), most_rows, above_keys, search,
        config.block_m * padded(p.head_dim_v) <= 16 * 128, fewest_rows,
    )  # fmt: skip


def search_of(batch: int, packed: bool, least: int) -> int:
    """``DecodeSchedule.SEARCH``: few widths, as each has a build, which would be compiled while a server runs.

    32 take no longer than 2, as each warp sums them alone; where one warp does all, 64 are two for each thread.
    A step of 48 sequences takes 1.04 times as long with 256 as with 64.
    """
    count = batch + packed  # with the rows past the last packed sequence, for which a full width has no place
    if count <= least:
        return 1 if count == 1 else least
    return 128 if count <= 128 else max(256, power_of_two(batch))


def _is_8_bit(problem: Problem) -> bool:
    return problem.kv_dtype.itemsize == 1


def power_of_two(n: int) -> int:
    """The least that is not smaller, 1 at least."""
    return 1 << max(n - 1, 0).bit_length()


def padded(dim: int, least: int = 16) -> int:
    """The power of two that holds a head dimension, at least what matrix products take."""
    return max(least, power_of_two(dim))
