"""Host side of the Hopper forward: the launch, and the plan that repeats it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu.device.records import Rows
from flashtile.backends.gpu.host import Step, kept, like_floats, run
from flashtile.backends.gpu.intervals import Side, bounds_launch, empty_bounds, most_bounds
from flashtile.backends.gpu.launch import Launch, TensorMap
from flashtile.backends.gpu.lists import masks_of
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.records import num_packed_tiles, operand_names, read_by_mods, table_launches
from flashtile.backends.hopper import tensor_maps
from flashtile.backends.hopper.device.records import BOUNDS_BLOCK, Cache
from flashtile.backends.hopper.forward import config as configs
from flashtile.backends.hopper.forward.config import Config
from flashtile.backends.hopper.records import call_of, keys_of, mods_of, output_of, rows_of, schedule_of
from flashtile.backends.portable import repair
from flashtile.call.problem import Problem, Tensors
from flashtile.core import states
from flashtile.core.states import Partial

attention_forward = device_code("flashtile.backends.hopper.forward.kernel").attention_forward


_OPERANDS = (
    "q", "k", "v", "out", "lse", "sinks", "cu_seqlens_q", "cu_seqlens_k", "counter", "alibi", "bias", "mask",
    "partial_out", "partial_lse", "row_keys", "key_rows", "row_blocks", "row_items", "bounds", "rng_state",
    repair.BOUNDS,
)  # fmt: skip
_NO_PARTIAL: tuple[Tensor | None, Tensor | None] = (None, None)


class ForwardPlan:
    """The forward of calls of one kind: ``plan(tensors)`` returns out and lse, as ``call.backend.Forward`` says."""

    def __init__(self, problem: Problem, tensors: Tensors, config: Any = None) -> None:
        """Prepares the launch.

        Args:
            problem: A call that the backend's capabilities cover.
            tensors: Tensors of its layouts.
            config: Tiles to use instead of the chosen ones, for tuning.
        """
        q, k = tensors.q, tensors.k
        self._whole, problem = problem, configs.by_bits(problem)
        self._problem = problem
        self._out_shape = (*q.shape[:-1], problem.head_dim_v)
        self._out_is_like_q = q.is_contiguous() and self._out_shape == q.shape and problem.out_dtype == q.dtype
        self._like_lse = like_floats(q, problem.lse_shape(q))
        # TMA has no map of an empty tensor.
        self._is_empty = q.numel() == 0 or k.numel() == 0
        if self._is_empty:
            return
        self._config = config or self._choose(problem, tensor_maps.score_bytes(tensors), q.shape[-3])
        self._is_dynamic = self._config.dynamic
        self._device = q.device
        self._steps = self._steps_of(tensors, self._config)
        self._joining: tuple[Step, ...] | None = None
        self._bounds = most_bounds(problem, tensors) if problem.intervals else None
        self._repair_bounds = repair.forward_bounds(problem, tensors)

    def __call__(
        self, tensors: Tensors, partial: Partial | None = None, into: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention's output and log-sum-exp, merged with ``partial``, those over other keys, if given."""
        t = tensors
        if into is not None:
            out = into
        elif self._out_is_like_q:
            out = torch.empty_like(t.q)
        else:
            out = t.q.new_empty(self._out_shape, dtype=self._problem.out_dtype)
        lse = torch.empty_like(self._like_lse)
        if self._is_empty:
            out, lse = without_keys(self._problem, t.sinks, t.cu_seqlens_q, out, lse)
            return (out, lse) if partial is None else _joined(partial, out, lse)
        tile_counter = counter(self._device) if self._is_dynamic else None
        steps, parts = self._steps, _NO_PARTIAL
        if partial is not None:
            if self._joining is None:
                config = replace(self._config, strip=self._config.block_m)
                self._joining = self._steps_of(t, config, is_joined=True)
            steps, parts = self._joining, (partial.out, partial.lse)
        run(steps, (
            t.q, t.k, t.v, out, lse, t.sinks, t.cu_seqlens_q, t.cu_seqlens_k, tile_counter, t.alibi_slopes, t.attn_bias,
            t.attn_mask, *parts, t.row_keys, t.key_rows, t.row_blocks, t.row_items,
            None if self._bounds is None else empty_bounds(self._bounds, t.q), t.rng_state,
            None if self._repair_bounds is None else empty_bounds(self._repair_bounds, t.q),
            *read_by_mods(t, self._problem),
        ))  # fmt: skip
        return out, lse

    @staticmethod
    def _choose(problem: Problem, score_bytes: tuple[int, int], rows: int) -> Any:
        return configs.choose(problem, score_bytes, rows)

    def _steps_of(self, t: Tensors, config: Any, *, is_joined: bool = False) -> tuple[Step, ...]:
        made = self._launches(self._problem, t, config, is_joined=is_joined)
        made |= repair.forward_launches(self._whole, t, is_joined=is_joined)
        return tuple(Step(each, (*_OPERANDS, *operand_names(t)), t.q.device) for each in made.values())

    @staticmethod
    def _launches(problem: Problem, tensors: Tensors, config: Any, *, is_joined: bool = False) -> dict[str, Launch]:
        return launches(problem, tensors, config, is_joined=is_joined)


def _joined(partial: Partial, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """``states.joined`` in out's dtype."""
    both, lse = states.joined(partial, out, lse)
    return both.to(out.dtype), lse


# Rows for which there are bounds of intervals.
OF_ROWS = Side(BOUNDS_BLOCK)


def launches(problem: Problem, tensors: Tensors, config: Config, *, is_joined: bool = False) -> dict[str, Launch]:
    """The launches by kernel name, in order; arguments as of ``forward_launch``."""
    made = table_launches(problem, tensors)
    if problem.intervals:
        made["interval_bounds"] = bounds_launch(problem, tensors, OF_ROWS)
    return {**made, "attention_forward": forward_launch(problem, tensors, config, is_joined=is_joined)}


def forward_launch(
    problem: Problem,
    tensors: Tensors,
    config: Config,
    *,
    is_joined: bool = False,
    cached: tuple[Cache, Rows, Rows, TensorMap] | None = None,
) -> Launch:
    """The forward's launch: what a plan repeats and what a build compiles.

    Args:
        problem: The call.
        tensors: Its tensors.
        config: The tiles.
        is_joined: Whether to merge a result over other keys: partial_out and partial_lse, contiguous float32.
        cached: Where the keys of a call over a cache lie, they and the values as rows, and the map of the output.
    """
    p, t = problem, tensors
    programs = num_programs(p, t, config)
    equal_lengths = p.varlen and is_same(t.cu_seqlens_q, t.cu_seqlens_k)
    # Only the device knows where in a block the keys of a cache end.
    has_edges = meets_edges(p, config, equal_lengths) or (cached is not None and p.band.right is not None)
    cache, k, v, out_map = cached or (None, *_rows_of_keys(p, t, config), _map_of_out(p, t.q, config))
    q_cols = configs.narrowest(config.block_d)
    q_map = tensor_maps.rows_map("q", t.q, config.strip, min(q_cols, 64) if config.pack_gqa else q_cols, p.varlen)
    # At head_dim 80 a sixth of the products of queries and keys would be with zeros.
    q = rows_of(q_map, config.block_d, 80 if p.head_dim <= 80 and config.block_d == 96 else None)
    bias_map, mask_map = (
        tensor_maps.score_map(each, config.block_m, config.block_n) if config.score_stages else None
        for each in (t.attn_bias, t.attn_mask)
    )
    mods = mods_of(p, t, bias_map, mask_map, masks_of(p, t, OF_ROWS))
    arguments = {
        "call": call_of(p, t, (q, k, v), keys_of(p, t, cache), mods),
        "output": output_of(p, out_map, config.block_dv, is_joined),
        "schedule": schedule_of(p, config, has_edges, "counter" if cache is None else "counters"),
    }
    return Launch(attention_forward, programs, arguments, {"num_warps": 4, "maxnreg": config.max_registers})


def num_programs(problem: Problem, tensors: Tensors, config: Any) -> int:
    """One for each multiprocessor, or for each tile if those are fewer."""
    p, rows_q = problem, tensors.q.shape[-3]
    heads, unit = (p.group_size, config.strip) if config.pack_gqa else (1, 1)
    rows = config.num_warpgroups * config.block_m
    blocks = -(-(-(-rows_q // unit) * unit * heads) // rows) * p.batch
    if p.varlen:
        blocks = num_packed_tiles(rows_q, p.batch, rows, heads, unit - 1)
    return min(tensor_maps.num_sms(tensors.q.device), blocks * (p.num_heads_q // heads))


def _map_of_out(problem: Problem, q: Tensor, config: Config) -> TensorMap | None:
    """The map of an output that TMA stores."""
    if problem.out_dtype == torch.float32:
        return None
    shape = (*q.shape[:-1], problem.head_dim_v)
    return tensor_maps.contiguous_map("out", q.dtype, shape, config.strip, config.out_cols, problem.varlen)


def _rows_of_keys(problem: Problem, tensors: Tensors, config: Config) -> tuple[Rows, Rows]:
    """K and v by maps of the narrowest part that a tile's columns consist of."""
    cols, cols_v = configs.narrowest(config.block_d), configs.narrowest(config.block_dv)
    return (
        rows_of(tensor_maps.rows_map("k", tensors.k, config.block_n, cols, problem.varlen), config.block_d),
        rows_of(tensor_maps.rows_map("v", tensors.v, config.block_n, cols_v, problem.varlen), config.block_dv),
    )


def meets_edges(problem: Problem, config: Any, equal_lengths: bool) -> bool:
    """Whether a warpgroup may meet an edge of the band after the first block of keys that it works on.

    Keys are visited from the last block down. The right edges of a warpgroup's rows are ``block_m`` neighbouring keys:
    aligned to ``block_m`` they lie in one block, the first one visited. With pack_gqa they are fewer, and aligned only
    if the group size is a power of two.

    Args:
        problem: A call.
        config: Its tiles.
        equal_lengths: Whether every packed sequence has as many queries as keys.
    """
    left, right = problem.band.left, problem.band.right
    # Only the device knows where masks of blocks and rows have edges.
    is_given = problem.intervals or problem.listed != ()
    if problem.has_bits and problem.band.unbounded and not problem.varlen:
        return False
    if left is not None or right is None or is_given:
        return left is not None or is_given
    if config.pack_gqa and problem.group_size & (problem.group_size - 1):
        return True
    if problem.varlen:
        return not equal_lengths or right % config.block_m != 0
    return (problem.seqlen_k - problem.seqlen_q + right) % config.block_m != 0


def is_same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both are one tensor, by address: comparing values would synchronise."""
    if a is b or a is None or b is None:
        return a is b
    return not a.is_meta and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


_counters: dict[tuple[int | None, int], Tensor] = {}


def counter(device: torch.device) -> Tensor:
    """The tile counter, 0 before and after a launch: one a stream, whose launches run one after another.

    A captured launch may be replayed on any stream beside others, so it gets a counter of its own.
    """
    stream = 0
    if device.type == "cuda":
        if torch._C._cuda_isCurrentStreamCapturing():
            return torch.zeros((), dtype=torch.int32, device=device)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
    found = _counters.get((device.index, stream))
    if found is None:
        found = _counters[device.index, stream] = kept((), torch.int32, device)
    return found


def without_keys(
    problem: Problem, sinks: Tensor | None, cu_seqlens_q: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """No keys at all, or no rows."""
    out.zero_()
    lse.zero_()
    found = lse[..., 0] if problem.large_scores else lse
    found.fill_(-math.inf)
    if sinks is not None and lse.numel():
        if problem.varlen:
            assert cu_seqlens_q is not None
            rows = torch.arange(found.shape[1], device=lse.device) < cu_seqlens_q[-1]
            found.copy_(torch.where(rows, sinks[:, None].float(), found))
        else:
            found.copy_(sinks[:, None].float().expand(found.shape))
    return out, lse
