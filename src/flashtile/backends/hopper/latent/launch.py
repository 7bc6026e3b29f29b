"""Host side of attention over latent rows: its launch, and the workspace that it needs."""

from __future__ import annotations

from torch import Tensor

from flashtile.backends.gpu.decode import config as portable
from flashtile.backends.gpu.decode import records
from flashtile.backends.gpu.decode.launch import Attention
from flashtile.backends.gpu.launch import DEFAULT, Launch, TensorMap
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.records import geometry, multiprocessors, rows_of
from flashtile.backends.hopper import tensor_maps
from flashtile.backends.hopper.device.records import CopiedRows, Latent
from flashtile.backends.hopper.forward.paged.launch import paging_of
from flashtile.backends.hopper.latent.config import PATIENCE, ROWS, LatentTiles, choose, lanes_of
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Problem

latent_attention = device_code("flashtile.backends.hopper.latent.kernel").latent_attention

# 16-bit elements of the 16 bytes that one copy of a thread moves.
_VECTOR = 8

_Maps = tuple[TensorMap | None, TensorMap | None, TensorMap | None]


def attend(problem: Problem, tensors: CacheTensors) -> list[Attention]:
    """The launch that attends."""
    return [latent_launch(problem, tensors)]


def latent_launch(problem: Problem, tensors: CacheTensors) -> Attention:
    """The launch of the attention, with what it needs.

    A program leaves two states at most: one of the tile that it begins in and one of the tile that it ends in.
    """
    p, t, config, programs = problem, tensors, choose(problem), multiprocessors(tensors.q.device)
    slots = 2 * ROWS * programs
    # All but the tiles is the Triton kernel's.
    tiles = portable.DecodeTiles(ROWS, 64, 4, config.stages, 1, specialised=True)
    call = records.call_of(p, t, tiles, slots, 1, few=False)
    search = max(records.search_of(p.batch + p.varlen, packed=False, least=64), 64)
    # What the Triton kernel's folds would have is the same in every build.
    own = {"SEARCH": search, "PATIENCE": PATIENCE if p.device_type == "cuda" else 1, "FOLD_ROWS": 1, "AHEAD": 1}
    call = call._replace(schedule=call.schedule._replace(**own))
    copied = copied_of(p, t) if config.copiers else None
    if copied is not None:
        call = call._replace(cache=call.cache._replace(PAGE_SIZE=0))  # one build for all pages that are copied
    c, lanes = config, lanes_of(p, min(config.most_lanes, programs))
    k_rows, v_rows = (x.stride(0) // x.stride(1) for x in (t.k_cache, t.v_cache))
    maps: _Maps = (None, None, None) if c.copiers else maps_of(p, t, c)
    latent = Latent(
        *queries_of(p, t), *maps, copied, k_rows, v_rows, c.fixed_cost, c.fewest_blocks, c.stages, c.piece, lanes,
        c.registers, c.few, c.wide if p.row_scale else 0, c.copiers, c.copying,
    )  # fmt: skip
    options = {"num_warps": 4, "maxnreg": c.registers_of_all(widens=p.row_scale)}
    launch = Launch(latent_attention, programs, {"call": call, "latent": latent}, options)
    return Attention(launch, slots * (p.head_dim_v + 4), 4 * programs)


def maps_of(problem: Problem, tensors: CacheTensors, config: LatentTiles) -> _Maps:
    """The caches as TMA loads them, boxes of the rows of a block or of a smaller page: keys, values, their scales."""
    p, t, s = problem, tensors, tensors.row_scale
    rows = min(64, p.page_size or 64)
    k, v = (
        tensor_maps.entries_map(name, x, rows, cols)
        for name, x, cols in (("k_cache", t.k_cache, 64), ("v_cache", t.v_cache, config.piece if p.row_scale else 64))
    )
    return k, v, None if s is None else tensor_maps.entries_map("row_scale", s, rows, s.shape[-1])


def copied_of(problem: Problem, tensors: CacheTensors) -> CopiedRows:
    """The caches as threads copy them, 16 bytes at once."""
    t, s = tensors, tensors.row_scale
    k, v = (
        rows_of(name, x.view(t.k_cache.dtype), ROWS, vector=_VECTOR)
        for name, x in (("k_cache", t.k_cache), ("v_cache", t.v_cache))
    )
    scales = None if s is None else rows_of("row_scale", s, s.shape[-1], vector=_VECTOR // 2)
    return CopiedRows(k, v, scales, paging_of(problem.page_size))


def queries_of(problem: Problem, tensors: CacheTensors) -> tuple[TensorMap | None, TensorMap | None]:
    """The queries' own columns and the values' columns as TMA loads them, or None if it cannot load one of them."""
    p, t = problem, tensors
    maps = [query_map(name, x) for name, x in (records.queries_of(t), ("qv", t.qv)) if x is not None]
    return (None, None) if p.num_heads_kv > 1 or None in maps else (maps[0], maps[1])


def query_map(name: str, queries: Tensor) -> TensorMap | None:
    """Boxes of a tile's rows by 64 columns, if there are rows, and their heads and queries at the same distance."""
    x = queries if queries.dim() == 4 else queries[None]
    batch, seqlen, heads, dim = x.shape
    entry, row, head, _ = x.stride()
    if 0 in x.shape or (min(seqlen, heads) > 1 and row != heads * head) or not tensor_maps.is_readable(x):
        return None
    of_rows = geometry((batch, seqlen * heads, dim), (entry, row if heads == 1 else head, 1), varlen=False)
    return TensorMap(x.dtype, *of_rows, (1, ROWS, 64), DEFAULT, name)
