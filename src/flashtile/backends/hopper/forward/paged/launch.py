"""The launch of the Hopper forward over a cache of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.backends.gpu.decode.config import bounded
from flashtile.backends.gpu.decode.records import pages_of, queries_of
from flashtile.backends.gpu.device.records import Rows
from flashtile.backends.gpu.launch import Launch, Pointer, pointer
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.records import indices
from flashtile.backends.hopper import tensor_maps
from flashtile.backends.hopper.device.records import CachedKeys, CacheScale, Helpers, Keys, Paging
from flashtile.backends.hopper.forward.config import narrowest
from flashtile.backends.hopper.forward.launch import launch_of, meets_edges
from flashtile.backends.hopper.forward.paged import config as configs
from flashtile.backends.hopper.forward.paged.config import PagedTiles
from flashtile.backends.hopper.records import output_of, rows_of
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Problem, Tensors

paged_forward = device_code("flashtile.backends.hopper.forward.paged.kernel").paged_forward

# Elements of the 16 bytes that one copy of a thread moves.
_VECTOR = 8
# A batch of up to so many tiles a sequence, in the mean, is taken for a mixed one, of decodes and prompts.
_MOST_TILES_OF_MIXED = 8


def cached_launch(problem: Problem, tensors: CacheTensors, leaves: tuple[int, int] | None = None) -> Launch:
    """The launch of a call; ``leaves``: (most packed rows a key head, keys above which) sequences go to another one.

    The operand "counters" is the tile counter.
    """
    p, t = bounded(problem), tensors
    q_name, q = queries_of(t)
    plain = Tensors(q, t.k_cache, t.v_cache, t.alibi_slopes, sinks=t.sinks, cu_seqlens_q=t.cu_seqlens_q)
    config = configs.choose(p, q.shape[-3])
    has_new = t.k is not None and t.cu_seqlens_k_new is None
    few = long = mixed = None
    if p.varlen:
        few, long = leaves or (-1, 0)  # numbers, so that one build serves caches of any capacity
        tile = config.num_warpgroups * config.block_m
        rows = q.shape[-3] * (p.group_size if config.pack_gqa else 1)
        mixed = int(rows <= _MOST_TILES_OF_MIXED * tile * p.batch)
    gathers = config.gathers
    cache = CachedKeys(
        indices(t.cache_seqlens, "cache_seqlens"),
        None if t.k is None else indices(t.cu_seqlens_k_new, "cu_seqlens_k_new"),
        t.k.shape[1] if t.k is not None and has_new else 0,
        indices(t.cache_batch_idx, "cache_batch_idx"),
        pages_of(t),
        None if t.page_table is None else t.page_table.stride(0),
        indices(t.page_indptr, "page_indptr"),
        None if gathers else t.v_cache.stride(0) // t.v_cache.stride(1),
        None if t.causal is None else Pointer(torch.uint8, "causal"),
        mixed, paging_of(p.page_size) if gathers else None, None if gathers else p.page_size, few, long,
        _scale("k_scale", t.k_scale), _scale("v_scale", t.v_scale),
    )  # fmt: skip
    out_map = tensor_maps.rows_map("out", t.out, config.strip, config.out_cols, p.varlen)
    # Only the device knows where in a block the keys of a cache end.
    has_edges = p.band.right is not None or meets_edges(p, config, False)
    return launch_of(
        paged_forward, p, plain, config, Keys(None, p.seqlen_k, cache, True, t.causal is not None),
        _copied_keys(t, config) if gathers else _boxes_of_keys(p, t, config),
        output_of(p, out_map, config.block_dv), has_edges, q_name,
        helpers=Helpers(config.widens, gathers, config.helper_warps, config.helper_registers),
    )  # fmt: skip


def _scale(name: str, scale: Tensor | None) -> CacheScale:
    return CacheScale(pointer(scale, name), scale.stride(0) if scale is not None and scale.dim() == 2 else None)


def paging_of(size: int) -> Paging:
    """``Paging`` of pages of so many rows.

    The multiplier is 2**(31 + shift) / size rounded up, by less than 2**shift / size; so a number up to 2**31 is off by
    less than 1 / size. It takes 32 bits, which a kernel takes for a negative number's.
    """
    shift = (size - 1).bit_length()
    return Paging(size, -(-(2 ** (31 + shift)) // size) - 2**32, shift)


def _copied_keys(tensors: CacheTensors, config: PagedTiles) -> tuple[Rows, Rows]:
    """The rows of caches that threads copy."""

    def rows(name: str, cache: Tensor, width: int) -> Rows:
        entry, row, head, _ = cache.stride()
        return Rows(pointer(cache, name), None, entry, row, head, cache.shape[3], width, _VECTOR, False)

    return rows("k_cache", tensors.k_cache, config.block_d), rows("v_cache", tensors.v_cache, config.block_dv)


def _boxes_of_keys(problem: Problem, tensors: CacheTensors, config: PagedTiles) -> tuple[Rows, Rows]:
    """k: a map of entries or pages. v: a map of packed rows, which TMA fills with zeros past the last key."""
    size = problem.page_size
    rows = min(size or config.block_n, config.block_n)
    # Several boxes in a block, and boxes of 8 bits in a part, have at most 128 bytes a row: see ``parts.load``.
    most = 256 if rows == config.block_n and not config.widens else 128 // problem.kv_dtype.itemsize
    cols, cols_v = (min(narrowest(width), most) for width in (config.block_d, config.block_dv))
    return (
        rows_of(tensor_maps.rows_map("k_cache", tensors.k_cache, rows, cols, varlen=False), config.block_d),
        rows_of(tensor_maps.entries_map("v_cache", tensors.v_cache, rows, cols_v), config.block_dv),
    )
