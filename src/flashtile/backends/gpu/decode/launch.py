"""Host code of attention over a cache: the launches of a call, and the plan that repeats them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu.decode.append import cache_append
from flashtile.backends.gpu.decode.config import FEW_ROWS, LONG_KEYS, Config, choose, hopper_rows
from flashtile.backends.gpu.decode.kernel import cache_attention
from flashtile.backends.gpu.device import scores
from flashtile.backends.gpu.host import Step, like_floats, run
from flashtile.backends.gpu.launch import Launch, Pointer, named, row_strides
from flashtile.backends.gpu.trial import tried
from flashtile.call.backend import Known
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Problem

_OPERANDS = (
    "out", "lse", "q", "k", "v", "cached", "leftpad", "cu_seqlens_q", "cu_seqlens_new", "entries", "pages", "alibi",
    "sinks", "k_scale", "v_scale", "acc", "counters",
)  # fmt: skip
_APPEND_OPERANDS = (
    "k", "v", "k_cache", "v_cache", "q", "rotated", "cached", "starts", "entries", "pages", "cu_seqlens_new",
    "cu_seqlens_q", "cos", "sin", "k_scale", "v_scale",
)  # fmt: skip
_HEADS_AT_ONCE = 16


class DecodePlan:
    """Attention over a cache, of calls with the same layouts and options; see ``call.backend.Decode``."""

    def __init__(self, problem: Problem, tensors: CacheTensors, known: Known | None = None) -> None:
        """Prepares the launches.

        Args:
            problem: A call that the backend's capabilities cover.
            tensors: Tensors with the call's layouts.
            known: See ``Backend``.
        """
        t = tensors
        self._problem, self._known = problem, known
        self._like_lse = like_floats(t.q, problem.lse_shape(t.q))
        self._rotates = t.rotary_cos is not None
        self._append: tuple[Step] | None = None
        if t.k is not None:
            launch = append_launch(problem, t)
            self._append = (Step(launch, _APPEND_OPERANDS, t.q.device),)
        self._steps: dict[Config | None, tuple[tuple[Step, ...], int, int]] = {}

    def __call__(self, tensors: CacheTensors) -> Tensor:
        """Appends if there are new keys, writes ``tensors.out``, returns lse."""
        t, q = tensors, tensors.q
        rotated = torch.empty_like(q, memory_format=torch.contiguous_format) if self._rotates else None
        if self._append is not None:
            run(self._append, (
                t.k, t.v, t.k_cache, t.v_cache, q, rotated, t.cache_seqlens,
                t.cache_seqlens if t.rotary_seqlens is None else t.rotary_seqlens, t.cache_batch_idx, t.page_table,
                t.cu_seqlens_k_new, t.cu_seqlens_q, t.rotary_cos, t.rotary_sin, t.k_scale, t.v_scale,
            ))  # fmt: skip
        lse = torch.empty_like(self._like_lse)
        key = tried("decode")
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._make(t)
        steps, floats, counters = found
        workspace = None if not floats else torch.empty(floats, dtype=torch.float32, device=q.device)
        run(steps, (
            t.out, lse, q if rotated is None else rotated, t.k_cache, t.v_cache, t.cache_seqlens, t.cache_leftpad,
            t.cu_seqlens_q, t.cu_seqlens_k_new, t.cache_batch_idx, t.page_table, t.alibi_slopes, t.sinks, t.k_scale,
            t.v_scale, workspace, zeros(q.device, counters) if counters else None,
        ))  # fmt: skip
        return lse

    def _make(self, t: CacheTensors) -> tuple[tuple[Step, ...], int, int]:
        launches = self._launches(t)
        steps = tuple(Step(launch, _OPERANDS, t.q.device) for launch, _, _ in launches)
        # One launch after the other uses the workspace, and leaves the counters at 0.
        return steps, max(floats for _, floats, _ in launches), max(counters for _, _, counters in launches)

    def _launches(self, t: CacheTensors) -> list[tuple[Launch, int, int]]:
        """The launches, each with the floats and the counters that it needs."""
        return [self._launch(t, choose(self._problem))]

    def _launch(self, t: CacheTensors, config: Config, *, few: bool = False) -> tuple[Launch, int, int]:
        bounds = Bounds(self._problem, t, config)
        launch = attention_launch(self._problem, t, config, multiprocessors(t.q.device), few=few)
        return launch, bounds.floats, bounds.counters


class Bounds:
    """The most that a call may need, whatever its lengths turn out to be.

    Attributes:
        tiles: Tiles of rows.
        items: Work items: their splits.
        slots: Rows of splits in the workspace; 0 if nothing is ever split, unless warps have roles: that kernel has no
            build without a workspace.
        floats: Size of the workspace.
        counters: Two for each tile, 0 without a workspace.
    """

    def __init__(self, problem: Problem, tensors: CacheTensors, config: Config) -> None:
        p, cut = problem, config.splitting
        group, heads, capacity = p.group_size, p.num_heads_kv, p.keys.length
        if p.varlen:
            rows = tensors.q.shape[0] * group
            splits = cut.bound(capacity, group, 1, heads)
            self.tiles = heads * (-(-rows // config.block_m) + p.batch + 1)
            self.items = self.tiles + p.batch * (cut.most_slots // config.block_m + heads * splits)
            slots = min(heads * rows * splits, p.batch * cut.most_slots)
        else:
            rows = p.seqlen_q * group
            tiles = -(-rows // config.block_m)
            splits = cut.bound(capacity, rows, tiles, heads)
            self.tiles = p.batch * heads * tiles
            self.items = self.tiles * splits
            slots = p.batch * heads * rows * splits
        # The sums and maxima begin on 16 bytes.
        self.slots = max(-(-slots // 4) * 4 if splits > 1 else 0, 4 * config.specialised)
        self.floats = self.slots * (p.head_dim_v + 2)
        self.counters = 2 * self.tiles if self.slots else 0


_CHUNK = 1 << 20
_counters: dict[tuple[torch.device, int], Tensor] = {}
# What is left of the last chunk, and all chunks, since graphs keep addresses and no tensors.
_spare: dict[torch.device, Tensor] = {}
_chunks: list[Tensor] = []


def zeros(device: torch.device, count: int) -> Tensor:
    """Counters of 0, which every launch leaves at 0, so that no other kernel need set them.

    Launches on one stream follow one another and share them. A captured launch gets its own, since graphs may be
    replayed on any stream: from a chunk that calls outside captures renew, or else zeroed by a node of the graph.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    stream, spare = torch._C._cuda_getCurrentRawStream(device.index), _spare.get(device)
    if torch._C._cuda_isCurrentStreamCapturing():
        if spare is None or len(spare) < count:
            return torch.zeros(count, dtype=torch.int32, device=device)
        _spare[device] = spare[-(-count // 4) * 4 :]
        return spare[:count]
    if spare is None or len(spare) < _CHUNK // 2:
        _chunks.append(torch.zeros(_CHUNK, dtype=torch.int32, device=device))
        _spare[device] = _chunks[-1]
    counters = _counters.get((device, stream))
    if counters is None or len(counters) < count:
        counters = _counters[device, stream] = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
    return counters


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 2 for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _as(dtype: torch.dtype, cache: Tensor) -> Tensor:
    """A cache as kernels see it: 8-bit numbers as bytes, or as pairs."""
    return cache.view(dtype) if cache.dtype == torch.float8_e4m3fn else cache


def _scale_stride(scale: Tensor | None) -> int:
    return scale.stride(0) if scale is not None and scale.dim() == 2 else 0


def _decodes_bits(problem: Problem) -> bool:
    """Whether the kernel decodes e4m3 numbers itself: GPUs before sm_89 have no instruction for it."""
    have = problem.compute_capability
    return problem.precision.kv.itemsize == 1 and (have is None or have < (8, 9))


def attention_launch(
    problem: Problem, tensors: CacheTensors, config: Config, num_sms: int, *, few: bool = False
) -> Launch:
    """The launch of the attention; its k and v are the caches.

    Args:
        problem: The call.
        tensors: Its tensors.
        config: The tiles.
        num_sms: Multiprocessors of the device, which bound the number of programs.
        few: Whether it computes packed sequences of ``FEW_ROWS`` with more than ``LONG_KEYS`` alone.
    """
    p, t = problem, tensors
    bounds, bits = Bounds(p, t, config), _decodes_bits(p)
    rows = config.block_m if p.varlen else min(config.block_m, p.seqlen_q * p.group_size)
    # At least 32: a build for each small batch would be compiled while a server runs, and 32 are as quick as 2.
    search = 1 if p.batch + p.varlen == 1 else max(32, _power_of_two(p.batch + p.varlen))
    slots, run = bounds.slots, config.splitting.run
    fold_rows = min(_power_of_two(rows), 4)
    # States loaded at once, whole runs. More would make Triton compile slowly; many rows are split among programs.
    most = 16 if rows <= 4 or 64 < hopper_rows(p) <= 128 else 8
    ahead = max(min(most, 8192 // (fold_rows * padded(p.head_dim_v))) // run, 1) * run
    most_programs = num_sms * config.programs_per_sm
    lanes = max(n for n in range(1, 17) if p.num_heads_kv % n == most_programs % n == 0)
    programs = min(-(-bounds.items // lanes) * lanes, most_programs)
    sizes: dict[str, Any] = {
        **row_strides("q", t.q if t.rotary_cos is None else torch.empty_like(t.q, device="meta").contiguous()),
        **row_strides("k", _as(torch.int16, t.k_cache)),
        **row_strides("v", _as(torch.int16, t.v_cache)),
        **row_strides("out", t.out),
        "stats_ptr": Pointer(torch.float32, "acc", 4 * slots * p.head_dim_v) if slots else None,
        "pages_stride_b": 0 if t.page_table is None else t.page_table.stride(0),
        "batch": p.batch,
        "seqlen_q": t.q.shape[-3],
        "num_new": 0 if t.k is None or t.cu_seqlens_k_new is not None else t.k.shape[1],
        "capacity": p.keys.length,
    }

    def others() -> dict[str, Any]:
        return {
            **_attention_tensors(t, is_split=slots > 0),
            **_attention_constants(p, config),
            "alibi_stride_b": p.num_heads_q if t.alibi_slopes is not None and t.alibi_slopes.dim() == 2 else 0,
            "k_scale_stride_b": _scale_stride(t.k_scale),
            "v_scale_stride_b": _scale_stride(t.v_scale),
            "FOLD_ROWS": fold_rows,
            "AHEAD": ahead,
            "LANES": lanes,
            "PATIENCE": 64 if p.device_type == "cuda" else 1,
            "SEARCH": search,
            "KEEPS": config.block_m * padded(p.head_dim_v) <= 16 * 128,
            "BITS": bits,
            "BY_PAGE": t.page_table is not None and bool(_scale_stride(t.k_scale) or _scale_stride(t.v_scale)),
            "MOST_ROWS": FEW_ROWS if few else None,
            "ABOVE_KEYS": LONG_KEYS if few else None,
        }

    return Launch(cache_attention, programs, named({**others(), **sizes}), config.options())


def _attention_tensors(t: CacheTensors, *, is_split: bool) -> dict[str, Any]:
    floats = Pointer(torch.float32)
    return {
        "q_ptr": t.q if t.rotary_cos is None else Pointer(t.q.dtype),
        "k_ptr": _as(torch.int16, t.k_cache),
        "v_ptr": _as(torch.int16, t.v_cache),
        "out_ptr": t.out,
        "lse_ptr": floats,
        "acc_ptr": floats if is_split else None,
        "counters_ptr": Pointer(torch.int32) if is_split else None,
        "cached_ptr": t.cache_seqlens,
        "leftpad_ptr": t.cache_leftpad,
        "cu_seqlens_q_ptr": t.cu_seqlens_q,
        "cu_seqlens_new_ptr": None if t.k is None else t.cu_seqlens_k_new,
        "entries_ptr": t.cache_batch_idx,
        "pages_ptr": t.page_table,
        "alibi_ptr": t.alibi_slopes,
        "sinks_ptr": t.sinks,
        "k_scale_ptr": t.k_scale,
        "v_scale_ptr": t.v_scale,
    }


def _attention_constants(p: Problem, config: Config) -> dict[str, Any]:
    cut, least = config.splitting, 16 * (2 if p.precision.kv.itemsize == 1 else 1)
    # Of 64 columns where the other side's are: of two swizzles ptxas may lose one, see ``portable.config.padded_dims``.
    block_d, block_dv = padded(p.head_dim, least), padded(p.head_dim_v, least)
    block_d, block_dv = max(block_d, min(block_dv, 64)), max(block_dv, min(block_d, 64))
    return {
        "num_heads_kv": p.num_heads_kv,
        "left": p.band.left or 0,
        "right": p.band.right or 0,
        "scale": p.softmax_scale,
        "param": p.softcap,
        "GROUP": p.group_size,
        "PAGE_SIZE": p.keys.page_size,
        "HEAD_DIM": p.head_dim,
        "HEAD_DIM_V": p.head_dim_v,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "PROGRAMS": cut.programs,
        "FEWEST_KEYS": cut.fewest_keys,
        "MOST_KEYS": cut.most_keys,
        "MOST_SPLITS": cut.most_splits,
        "MOST_SLOTS": cut.most_slots,
        "RUN": cut.run,
        "LONG_KEYS": cut.long_keys,
        "HAS_LEFT": p.band.left is not None,
        "HAS_RIGHT": p.band.right is not None,
        "SCORE_MOD": scores.softcap if p.softcap > 0 else None,
        "SCALE_FIRST": p.softcap > 0 or p.alibi or p.softmax_scale <= 0,
        "INPUT_PRECISION": "ieee",
    }


def padded(dim: int, least: int = 16) -> int:
    """The power of two that holds a head dimension, at least what matrix products take."""
    return max(least, _power_of_two(dim))


def append_launch(problem: Problem, tensors: CacheTensors) -> Launch:
    """The launch that appends keys and values and rotates the queries."""
    p, t = problem, tensors
    assert t.k is not None and t.v is not None
    rotates = t.rotary_cos is not None
    rotary_dim = 2 * t.rotary_cos.shape[-1] if t.rotary_cos is not None else 0
    num_tokens = t.k.shape[0] if t.cu_seqlens_k_new is not None else t.k.shape[0] * t.k.shape[1]
    search = min(max(_power_of_two(p.batch), 32), 1024)
    sizes: dict[str, Any] = {
        **row_strides("k", t.k),
        **row_strides("v", t.v),
        **row_strides("k_cache", t.k_cache),
        **row_strides("v_cache", t.v_cache),
        **row_strides("q", t.q),
        "pages_stride_b": 0 if t.page_table is None else t.page_table.stride(0),
        "batch": p.batch,
        "num_new": 0 if t.cu_seqlens_k_new is not None else t.k.shape[1],
        "seqlen_q": t.q.shape[-3],
        "num_tokens": num_tokens,
        "capacity": p.keys.length,
        "rows": 0 if t.rotary_cos is None else t.rotary_cos.shape[0],
    }

    def others() -> dict[str, Any]:
        return {
            **_append_tensors(t),
            "k_scale_stride_b": _scale_stride(t.k_scale),
            "v_scale_stride_b": _scale_stride(t.v_scale),
            "num_heads_q": p.num_heads_q,
            "num_heads_kv": p.num_heads_kv,
            "HEAD_DIM": p.head_dim,
            "HEAD_DIM_V": p.head_dim_v,
            "BLOCK_D": padded(p.head_dim),
            "BLOCK_DV": padded(p.head_dim_v),
            "ROTARY_DIM": rotary_dim,
            "ROTARY_BLOCK": _power_of_two(max(rotary_dim // 2, 1)),
            "INTERLEAVED": p.rotary_interleaved,
            "EACH_ROW": not p.band.unbounded,
            "PAGE_SIZE": p.keys.page_size,
            "HEADS": _HEADS_AT_ONCE,
            "SEARCH": search,
        }

    head_blocks, q_blocks = (-(-n // _HEADS_AT_ONCE) for n in (p.num_heads_kv, p.num_heads_q))
    rows_q = t.q.shape[0] if p.varlen else t.q.shape[0] * t.q.shape[1]
    programs = num_tokens * head_blocks + (rows_q * q_blocks if rotates else 0)
    return Launch(cache_append, programs, named({**others(), **sizes}), {"num_warps": 4, "num_stages": 1})


def _append_tensors(t: CacheTensors) -> dict[str, Any]:
    rotates = t.rotary_cos is not None
    return {
        "k_ptr": t.k,
        "v_ptr": t.v,
        "k_cache_ptr": _as(torch.uint8, t.k_cache),
        "v_cache_ptr": _as(torch.uint8, t.v_cache),
        "q_ptr": t.q if rotates else None,
        "rotated_ptr": Pointer(t.q.dtype) if rotates else None,
        "cached_ptr": t.cache_seqlens,
        "starts_ptr": t.cache_seqlens if t.rotary_seqlens is None else t.rotary_seqlens,
        "entries_ptr": t.cache_batch_idx,
        "pages_ptr": t.page_table,
        "cu_seqlens_new_ptr": t.cu_seqlens_k_new,
        "cu_seqlens_q_ptr": t.cu_seqlens_q,
        "cos_ptr": t.rotary_cos,
        "sin_ptr": t.rotary_sin,
        "k_scale_ptr": t.k_scale,
        "v_scale_ptr": t.v_scale,
    }
