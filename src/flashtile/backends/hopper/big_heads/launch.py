"""Host side of the forward with big heads: its launch and its plan."""

from __future__ import annotations

import torch

from flashtile.backends.gpu.launch import Launch
from flashtile.backends.gpu.masks import masks_of
from flashtile.backends.gpu.named import device_code
from flashtile.backends.hopper import tensor_maps
from flashtile.backends.hopper.big_heads import config as configs
from flashtile.backends.hopper.big_heads.config import BigHeadsTiles
from flashtile.backends.hopper.device.records import Columns
from flashtile.backends.hopper.forward.launch import OF_ROWS, is_same, meets_edges, num_programs, plan_of
from flashtile.backends.hopper.records import call_of, keys_of, mods_of, output_of, rows_of, schedule_of
from flashtile.call.backend import Plan
from flashtile.call.problem import Problem, Tensors

big_heads_forward = device_code("flashtile.backends.hopper.big_heads.kernel").big_heads_forward


# Columns of a box: all that a swizzle of 128 bytes holds.
_BOX = 64


def plan(problem: Problem, tensors: Tensors, config: BigHeadsTiles | None = None) -> Plan:
    """The forward of calls of one kind; see ``forward.launch.plan``."""
    return plan_of(problem, tensors, config, configs.choose, big_heads_launch)


def big_heads_launch(problem: Problem, tensors: Tensors, config: BigHeadsTiles, *, is_joined: bool = False) -> Launch:
    """The launch of the forward; arguments as of ``forward.launch.forward_launch``."""
    p, t, c = problem, tensors, config
    q_map = tensor_maps.rows_map("q", t.q, c.strip, _BOX, p.varlen)
    k_map = tensor_maps.rows_map("k", t.k, c.block_n, _BOX, p.varlen)
    v_map = tensor_maps.rows_map("v", t.v, c.block_n, _BOX, p.varlen)
    out_map = None
    if p.out_dtype != torch.float32:
        shape = (*t.q.shape[:-1], p.head_dim_v)
        out_map = tensor_maps.contiguous_map("out", t.q.dtype, shape, c.strip, _BOX, p.varlen)
    rows = rows_of(q_map, c.block_d), rows_of(k_map, c.block_d), rows_of(v_map, c.block_dv)
    equal_lengths = p.varlen and is_same(t.cu_seqlens_q, t.cu_seqlens_k)
    arguments = {
        "call": call_of(p, t, rows, keys_of(p, t), mods_of(p, t, None, None, masks_of(p, t, OF_ROWS))),
        "output": output_of(p, out_map, c.block_dv, is_joined),
        "schedule": schedule_of(p, c, meets_edges(p, c, equal_lengths)),
        "columns": Columns(c.left, c.chunk, c.key_chunks, c.prob_stages),
    }
    return Launch(big_heads_forward, num_programs(p, t, c), arguments, {"num_warps": 4, "maxnreg": c.max_registers})
