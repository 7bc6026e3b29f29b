"""The quantized forward's host code: one launch, and the plan that repeats it."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.backends.gpu.device.records import BlockScale, Call, Output, Rows
from flashtile.backends.gpu.launch import Launch, Pointer, pointer
from flashtile.backends.gpu.named import device_code
from flashtile.backends.gpu.plan import ForwardPlan, Memory, forward_memory
from flashtile.backends.gpu.records import rows_of
from flashtile.backends.portable.config import PortableTiles, padded_dims
from flashtile.backends.portable.device.records import Scales
from flashtile.backends.portable.quantized.config import choose
from flashtile.backends.portable.records import (
    heads_at_once,
    heads_of,
    num_programs,
    plain_mods,
    sequences_of,
    tiles_of,
)
from flashtile.call.problem import Problem
from flashtile.call.quantized_call import QuantizedTensors, scale_strides

attention_quantized = device_code("flashtile.backends.portable.quantized.kernel").attention_quantized


_SCALES = ("q_scale", "k_scale", "v_scale")


def plan(problem: Problem, tensors: QuantizedTensors) -> ForwardPlan:
    """The forward of quantized calls with the same layouts and options; see ``call.backend.QuantizedForward``."""

    def prepare(t: QuantizedTensors, *_: Any) -> tuple[Memory, dict[str, Launch]]:
        return forward_memory(problem, t), {"attention_quantized": quantized_launch(problem, t, choose(problem))}

    return ForwardPlan(tensors.q.device, prepare)


def quantized_launch(problem: Problem, tensors: QuantizedTensors, config: PortableTiles) -> Launch:
    """The launch: what a plan repeats and what a build compiles."""
    p, t = problem, tensors
    # 8-bit products are over 32 numbers at least.
    block_d, block_dv = padded_dims(max(p.head_dim, 32), max(p.head_dim_v, 32))
    batch, head, dim = t.v.stride()[:3] if t.v.dim() == 4 else (0, *t.v.stride()[:2])
    call = Call(
        rows_of("q", t.q, block_d), rows_of("k", t.k, block_d),
        Rows(pointer(t.v, "v"), None, batch, dim, head, p.head_dim_v, block_dv, 1, t.v.dim() == 3),
        *sequences_of(p, t), heads_of(p), plain_mods(p, t.q.shape[-3] + t.k.shape[-3], t.sinks),
    )  # fmt: skip
    q, k, v = (BlockScale(pointer(getattr(t, name), name), *scale_strides(getattr(t, name))) for name in _SCALES)
    scales = Scales(q, k, v, pointer(t.shift, "shift"), pointer(t.out_scale, "out_scale"))
    output = Output(Pointer(p.out_dtype, "out"), Pointer(torch.float32, "lse"), None, None)
    tiles = tiles_of(config, heads_at_once(p, t.k, t.k))
    arguments = {"call": call, "scales": scales, "output": output, "tiles": tiles}
    return Launch(attention_quantized, num_programs(p, t, config.block_m), arguments, config.options())
