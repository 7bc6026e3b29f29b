"""Host side of the Hopper forward: the launch, and the plan that repeats it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu.device.records import Rows
from flashtile.backends.gpu.host import kept
from flashtile.backends.gpu.launch import Launch, TensorMap
from flashtile.backends.gpu.masks import Side, bounds_launch, masks_of
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.plan import EmptyPlan, ForwardPlan, Memory, forward_memory, max_scores_memory
from flashtile.backends.gpu.records import num_packed_tiles, table_launches
from flashtile.backends.hopper import tensor_maps
from flashtile.backends.hopper.device.records import BOUNDS_BLOCK, Keys, Output
from flashtile.backends.hopper.forward import config as configs
from flashtile.backends.hopper.forward.config import ForwardTiles
from flashtile.backends.hopper.records import call_of, keys_of, mods_of, output_of, rows_of, schedule_of
from flashtile.backends.portable import repair
from flashtile.call.backend import Plan
from flashtile.call.problem import Problem, Tensors
from flashtile.core import states
from flashtile.core.states import Partial

attention_forward = device_code("flashtile.backends.hopper.forward.kernel").attention_forward


def plan(problem: Problem, tensors: Tensors, config: ForwardTiles | None = None) -> Plan:
    """The forward of calls of one kind, as ``call.backend.Forward`` says.

    Args:
        problem: A call that the backend's capabilities cover.
        tensors: Tensors of its layouts.
        config: Tiles to use instead of the chosen ones, for tuning.
    """
    return plan_of(problem, tensors, config, configs.choose, forward_launch)


def plan_of(problem: Problem, tensors: Tensors, config: Any, choose: Any, launch: Callable[..., Launch]) -> Plan:
    """``plan`` of a kernel with tiles and a launch of its own; its arguments as of ``forward_launch``."""
    # TMA has no map of an empty tensor.
    if tensors.q.numel() == 0 or tensors.k.numel() == 0:
        return EmptyPlan(without_keys, problem)
    config = config or choose(problem, tensor_maps.score_bytes(tensors), tensors.q.shape[-3])

    def prepare(t: Tensors, _: Any, is_joined: bool) -> tuple[Memory, dict[str, Launch]]:
        p, tiles = configs.by_bits(problem), replace(config, strip=config.block_m) if is_joined else config
        memory = forward_memory(p, t) | counter_memory(config, t.q.device) | repair.forward_memory(problem, t)
        made, main = table_launches(p, t), launch(p, t, tiles, is_joined=is_joined)
        if p.intervals:
            made["interval_bounds"] = bounds_launch(p, t, OF_ROWS)
        made[main.kernel.__name__] = main
        return memory, made | repair.forward_launches(problem, t, is_joined=is_joined)

    return ForwardPlan(tensors.q.device, prepare, max_scores=max_scores_memory(problem, tensors.q))


def counter_memory(config: Any, device: torch.device) -> Memory:
    """The counter of tiles, where one is used."""
    return {"counters": functools.partial(counter, device, device.index)} if config.dynamic else {}


# Rows for which there are bounds of intervals.
OF_ROWS = Side(BOUNDS_BLOCK)


def forward_launch(problem: Problem, tensors: Tensors, config: ForwardTiles, *, is_joined: bool = False) -> Launch:
    """The forward's launch: what a plan repeats and what a build compiles.

    Args:
        problem: The call.
        tensors: Its tensors.
        config: The tiles.
        is_joined: Whether to merge a result over other keys: partial_out and partial_lse, contiguous float32.
    """
    p, t = problem, tensors
    has_edges = meets_edges(p, config, p.varlen and is_same(t.cu_seqlens_q, t.cu_seqlens_k))
    output = output_of(p, _map_of_out(p, t.q, config), config.block_dv, is_joined)
    return launch_of(attention_forward, p, t, config, keys_of(p, t), rows_of_keys(p, t, config), output, has_edges)


def launch_of(
    kernel: Any, problem: Problem, tensors: Tensors, config: ForwardTiles, keys: Keys, rows: tuple[Rows, Rows],
    output: Output, has_edges: bool, q_name: str = "q", **more: Any,
) -> Launch:  # fmt: skip
    """A launch of a kernel over some ``Keys``.

    Args:
        kernel: The kernel.
        problem: The call.
        tensors: Its tensors.
        config: The tiles.
        keys: Where keys are.
        rows: Keys and values as rows.
        output: Where results go.
        has_edges: As in ``ForwardSchedule``.
        q_name: The operand of the queries.
        more: Further arguments of the kernel.
    """
    p, t, q = problem, tensors, rows_of_queries(problem, tensors, config, q_name)
    bias_map, mask_map = (
        tensor_maps.score_map(each, config.block_m, config.block_n) if config.score_stages else None
        for each in (t.attn_bias, t.attn_mask)
    )
    mods = mods_of(p, t, bias_map, mask_map, masks_of(p, t, OF_ROWS))
    arguments = {
        "call": call_of(p, t, (q, *rows), keys, mods),
        "output": output,
        "schedule": schedule_of(p, config, has_edges),
        **more,
    }
    return Launch(kernel, num_programs(p, t, config), arguments, {"num_warps": 4, "maxnreg": config.max_registers})


def num_programs(problem: Problem, tensors: Tensors, config: Any) -> int:
    """One for each multiprocessor, or for each tile if those are fewer."""
    p, rows_q = problem, tensors.q.shape[-3]
    heads, unit = (p.group_size, config.strip) if config.pack_gqa else (1, 1)
    rows = config.num_warpgroups * config.block_m
    blocks = -(-(-(-rows_q // unit) * unit * heads) // rows) * p.batch
    if p.varlen:
        blocks = num_packed_tiles(rows_q, p.batch, rows, heads, unit - 1)
    return min(config.programs * tensor_maps.num_sms(tensors.q.device), blocks * (p.num_heads_q // heads))


def _map_of_out(problem: Problem, q: Tensor, config: ForwardTiles) -> TensorMap | None:
    """The map of an output that TMA stores."""
    if problem.out_dtype == torch.float32:
        return None
    shape = (*q.shape[:-1], problem.head_dim_v)
    return tensor_maps.contiguous_map("out", q.dtype, shape, config.strip, config.out_cols, problem.varlen)


def rows_of_queries(problem: Problem, tensors: Tensors, config: ForwardTiles, name: str = "q") -> Rows:
    """Q by maps of a tile's strips."""
    cols = configs.narrowest(config.block_d)
    box = tensor_maps.rows_map(
        name, tensors.q, config.strip, min(cols, 64) if config.pack_gqa else cols, problem.varlen
    )
    # At head_dim 80 a sixth of the products of queries and keys would be with zeros.
    return rows_of(box, config.block_d, 80 if problem.head_dim <= 80 and config.block_d == 96 else None)


def rows_of_keys(problem: Problem, tensors: Tensors, config: ForwardTiles) -> tuple[Rows, Rows]:
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


# By a name of this module, as in ``gpu.host``.
_torch = torch._C
_counters: dict[tuple[int | None, int], Tensor] = {}


def counter(device: torch.device, number: int | None) -> Tensor:
    """The tile counter, 0 before and after a launch: one a stream, where launches run one after another.

    ``number`` is the device's, None for a CPU; to ask the device for it at each launch takes as long as what follows.

    A captured launch may be replayed on any stream beside others, so it gets a counter of its own.
    """
    stream = 0
    if number is not None:
        if _torch._cuda_isCurrentStreamCapturing():
            return torch.zeros((), dtype=torch.int32, device=device)
        stream = _torch._cuda_getCurrentRawStream(number)
    found = _counters.get((number, stream))
    if found is None:
        found = _counters[number, stream] = kept((), torch.int32, device)
    return found


def without_keys(
    problem: Problem, t: Any, partial: Partial | None = None, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A forward, also a quantized one, without any keys, or without rows."""
    sinks, shape = t.sinks, (*t.q.shape[:-1], problem.head_dim_v)
    out = t.q.new_empty(shape, dtype=problem.out_dtype) if into is None else into
    lse = torch.zeros(problem.lse_shape(t.q), device=t.q.device)
    out.zero_()
    found = lse[..., 0] if problem.large_scores else lse
    found.fill_(-math.inf)
    if sinks is not None and lse.numel():
        if problem.varlen:
            rows = torch.arange(found.shape[1], device=lse.device) < t.cu_seqlens_q[-1]
            found.copy_(torch.where(rows, sinks[:, None].float(), found))
        else:
            found.copy_(sinks[:, None].float().expand(found.shape))
    if problem.max_scores:
        return out, states.with_max_scores(lse, torch.full_like(lse, -math.inf))
    if partial is None:
        return out, lse
    both, lse = states.joined(partial, out, lse)
    return both.to(out.dtype), lse
