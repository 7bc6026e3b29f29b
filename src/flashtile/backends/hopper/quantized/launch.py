"""Host side of the Hopper forward of 8-bit tensors: the launch, and the plan that repeats it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashtile.backends.gpu.device.records import LOG2_E, BlockScale
from flashtile.backends.gpu.launch import DEFAULT, Launch, TensorMap, pointer
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.plan import EmptyPlan, ForwardPlan, Memory, forward_memory
from flashtile.backends.gpu.records import geometry
from flashtile.backends.hopper import tensor_maps
from flashtile.backends.hopper.device.records import Scales
from flashtile.backends.hopper.forward import launch as forward
from flashtile.backends.hopper.quantized import config as configs
from flashtile.backends.hopper.quantized.config import QuantizedTiles
from flashtile.backends.hopper.records import call_of, keys_of, output_of, plain_mods, rows_of, schedule_of
from flashtile.call.backend import Plan
from flashtile.call.problem import Problem
from flashtile.call.quantized_call import QuantizedTensors, scale_strides

attention_quantized = device_code("flashtile.backends.hopper.quantized.kernel").attention_quantized


def plan(problem: Problem, tensors: QuantizedTensors) -> Plan:
    """The forward of quantized calls of one kind; see ``call.backend.QuantizedForward``."""
    # TMA has no map of an empty tensor.
    if 0 in (tensors.q.numel(), tensors.k.numel(), tensors.v.numel()):
        return EmptyPlan(forward.without_keys, problem)
    config = configs.choose(problem)

    def prepare(t: QuantizedTensors, *_: Any) -> tuple[Memory, dict[str, Launch]]:
        memory = forward_memory(problem, t) | forward.counter_memory(config, t.q.device)
        return memory, {"attention_quantized": quantized_launch(problem, t, config)}

    return ForwardPlan(tensors.q.device, prepare)


def columns_map(v: Tensor, rows: int, cols: int) -> TensorMap:
    """Boxes of dimensions and keys of one head of v, transposed: ([batch,] heads, head_dim_v, columns)."""
    v = v if v.dim() == 4 else v[None]
    box = (1, 1, rows, cols)
    return TensorMap(v.dtype, *geometry(tuple(v.shape), v.stride(), False), box, DEFAULT, "v")


def quantized_launch(problem: Problem, tensors: QuantizedTensors, config: QuantizedTiles) -> Launch:
    """The launch: what a plan repeats and what a build compiles."""
    p, t, varlen = problem, tensors, problem.varlen
    rows_q = t.q.shape[-3]
    rows = config.num_warpgroups * config.block_m
    blocks = rows_q // rows + p.batch + 1 if varlen else -(-rows_q // rows) * p.batch
    has_edges = forward.meets_edges(p, config, varlen and forward.is_same(t.cu_seqlens_q, t.cu_seqlens_k))

    out_shape = (*t.q.shape[:-1], p.head_dim_v)
    q, k, v, out = (
        tensor_maps.rows_map("q", t.q, config.block_m, config.block_d, varlen),
        tensor_maps.rows_map("k", t.k, config.block_n, config.block_d, varlen),
        columns_map(t.v, config.block_dv, config.block_n),
        tensor_maps.contiguous_map("out", p.out_dtype, out_shape, config.block_m, config.out_cols, varlen),
    )
    call_rows = rows_of(q, config.block_d), rows_of(k, config.block_d), rows_of(v, config.block_dv)
    each_scale = (("q_scale", t.q_scale), ("k_scale", t.k_scale), ("v_scale", t.v_scale))
    q_scale, k_scale, v_scale = (BlockScale(pointer(each, name), *scale_strides(each)) for name, each in each_scale)
    shift, out_scale = pointer(t.shift, "shift"), pointer(t.out_scale, "out_scale")
    scales = Scales(q_scale, k_scale, v_scale, shift, p.softmax_scale * LOG2_E, out_scale)
    arguments = {
        "call": call_of(p, t, call_rows, keys_of(p, t), plain_mods(p, t)),
        "scales": scales,
        "output": output_of(p, out, config.block_dv),
        "schedule": schedule_of(p, config, has_edges),
        "WIDTH": config.width,
        "BEHIND": config.behind,
    }
    programs = min(tensor_maps.num_sms(t.q.device), blocks * p.num_heads_q)
    return Launch(attention_quantized, programs, arguments, {"num_warps": 4, "maxnreg": config.max_registers})
