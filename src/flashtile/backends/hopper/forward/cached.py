"""The Hopper forward over a cache of keys and values: which calls it computes, and their launch."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.backends.gpu.decode.config import bounded
from flashtile.backends.gpu.launch import Launch, Pointer, TensorMap, pointer
from flashtile.backends.hopper import tensor_maps
from flashtile.backends.hopper.device.records import Cache, CacheScale
from flashtile.backends.hopper.forward import config as configs
from flashtile.backends.hopper.forward.config import Config
from flashtile.backends.hopper.forward.launch import forward_launch
from flashtile.call.cached_arguments import FLOAT8, CacheTensors
from flashtile.call.problem import Problem, Tensors

# Rows of a page. A TMA box has 8 at least; with windows, caps and other widths so many boxes would spill the producer's
# registers (Triton 3.7.1).
_FEWEST_PAGE_ROWS, _FEWEST_OF_OTHERS, _WIDTHS = 8, 16, {64, 128}
# Up to so many tiles a sequence, in the mean, sequences of one tile are visited first: finding that there is none takes
# a microsecond, and among longer prompts they matter less.
_MOST_TILES_OF_SOLE = 8


def reasons(problem: Problem) -> list[str]:
    """What keeps a kind of call from the forward, whatever its number of rows; none if nothing does."""
    p, size, unit = problem, problem.keys.page_size, 16 if configs.widens(problem) else 8
    is_plain = {p.head_dim, p.head_dim_v} <= _WIDTHS and p.band.left is None and p.softcap == 0
    fewest = _FEWEST_PAGE_ROWS if is_plain and not configs.widens(p) else _FEWEST_OF_OTHERS
    against = {
        "caches in 8 bits": configs.widens(p) and not (configs.WIDENS and p.precision.kv == FLOAT8),
        "dtype": p.dtype not in (torch.float16, torch.bfloat16),
        f"head_dim that is no multiple of {unit}": p.head_dim % unit > 0 or p.head_dim_v % unit > 0,
        f"pages of {size}": 0 < size < fewest or size & (size - 1) != 0,
        "strides that TMA cannot read": not p.aligned,
        "tree_mask": p.tree,
    }
    return [reason for reason, is_against in against.items() if is_against]


def can_read(tensors: CacheTensors) -> bool:
    """Whether TMA can read queries and caches and write the output of a call that nothing else is ``against``."""
    t = tensors
    read = (t.k_cache, t.v_cache, t.out, *(() if t.rotary_cos is not None else (t.q,)))
    entries, entry, row = t.v_cache.shape[0], *t.v_cache.stride()[:2]
    # All entries of v are read as rows of one tensor, counted in 32 bits.
    is_one = row > 0 and entry % row == 0 and entries * entry // row < 2**30
    return t.cache_leftpad is None and is_one and all(x.numel() and tensor_maps.is_readable(x) for x in read)


def cached_launch(problem: Problem, tensors: CacheTensors, leaves: tuple[int, int] | None = None) -> Launch:
    """The launch of a call; ``leaves``: (most packed rows a key head, keys above which) sequences go to another one.

    Operands are ``DecodePlan``'s: k and v are the caches, counters the tile counter.
    """
    p, t = bounded(problem), tensors
    q = t.q if t.rotary_cos is None else torch.empty_like(t.q, device="meta").contiguous()
    plain = Tensors(q, t.k_cache, t.v_cache, t.alibi_slopes, sinks=t.sinks, cu_seqlens_q=t.cu_seqlens_q)
    config = configs.choose(p, rows=q.shape[-3])
    if configs.widens(p) != (config.widen_warps > 0):
        raise ValueError(f"tiles for {'8' if config.widen_warps else '16'} bits, over a cache of others: {config}")
    has_new = t.k is not None and t.cu_seqlens_k_new is None
    few, long = leaves or (None, None)
    sole = None
    if p.varlen:
        tile = config.num_warpgroups * config.block_m
        rows = q.shape[-3] * (p.group_size if config.pack_gqa else 1)
        sole = p.batch if rows <= _MOST_TILES_OF_SOLE * tile * p.batch else 0
    cache = Cache(
        pointer(t.cache_seqlens, "cached"),
        None if t.k is None else pointer(t.cu_seqlens_k_new, "cu_seqlens_new"),
        t.k.shape[1] if t.k is not None and has_new else 0,
        pointer(t.cache_batch_idx, "entries"),
        Pointer(torch.int32, "pages") if t.in_pages else None,
        None if t.page_table is None else t.page_table.stride(0),
        pointer(t.page_indptr, "indptr"),
        t.v_cache.stride(0) // t.v_cache.stride(1),
        None if t.causal is None else Pointer(torch.uint8, "causal"),
        sole, p.keys.page_size, few, long, _scale("k_scale", t.k_scale), _scale("v_scale", t.v_scale),
    )  # fmt: skip
    out_map = tensor_maps.rows_map("out", t.out, config.strip, config.out_cols, p.varlen)
    return forward_launch(p, plain, config, cached=(cache, *_maps_of_keys(p, t, config), out_map))


def _scale(name: str, scale: Tensor | None) -> CacheScale:
    return CacheScale(pointer(scale, name), scale.stride(0) if scale is not None and scale.dim() == 2 else None)


def _maps_of_keys(problem: Problem, tensors: CacheTensors, config: Config) -> tuple[TensorMap, TensorMap]:
    """k: a map of entries or pages. v: a map of packed rows, which TMA fills with zeros past the last key."""
    size = problem.keys.page_size
    rows = min(size or config.block_n, config.block_n)
    # Several boxes in a block, and boxes of 8 bits in a part, have at most 128 bytes a row: see ``parts.load``.
    most = 256 if rows == config.block_n and not config.widen_warps else 128 // problem.precision.kv.itemsize
    cols, cols_v = (min(configs.narrowest(width), most) for width in (config.block_d, config.block_dv))
    return (
        tensor_maps.rows_map("k", tensors.k_cache, rows, cols, varlen=False),
        tensor_maps.entries_map("v", tensors.v_cache, rows, cols_v),
    )
