"""Kernel arguments from a ``Problem``, for launches and for builds without a GPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.gpu.device import dropout, scheduler, scores
from flashtile.backends.gpu.launch import TensorMap, row_strides
from flashtile.backends.portable import config as tiles
from flashtile.backends.portable.config import Config, tile_dims
from flashtile.call.problem import Problem, Tensors, is_aligned
from flashtile.call.quantized_arguments import QuantizedTensors
from flashtile.core import philox

# Bytes of keys and values of heads that run together, the same for all chips, as it changes no result. Far below L2,
# which rows and results pass through as well; measured: docs/tuning-notes.md.
_CACHE_BYTES = 4 * 1024 * 1024


def num_programs(problem: Problem, tensors: Tensors | QuantizedTensors, block: int, *, over_keys: bool = False) -> int:
    """Size of a grid over blocks of rows (or keys), heads and sequences."""
    tensor, cu_seqlens = (tensors.k, tensors.cu_seqlens_k) if over_keys else (tensors.q, tensors.cu_seqlens_q)
    heads = problem.num_heads_kv if over_keys else problem.num_heads_q
    rows = tensor.shape[-3]
    if rows == 0:
        return 0
    if cu_seqlens is not None:
        return scheduler.num_packed_tiles(rows, problem.batch, block) * heads
    return -(-rows // block) * heads * problem.batch


def score_strides(name: str, tensor: Tensor | None) -> dict[str, int]:
    """Strides over (batch, head, row, key), 0 where the tensor broadcasts."""
    strides = [0, 0, 0, 0]
    if tensor is not None:
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True), 4 - tensor.dim()):
            strides[axis] = 0 if size == 1 else stride
    return dict(zip((f"{name}_stride_{axis}" for axis in ("b", "head", "row", "col")), strides, strict=True))


def common_operands(tensors: Tensors) -> dict[str, Tensor | None]:
    """The inputs, by their argument names in the forward and every kernel of the backward."""
    t = tensors
    return {
        "q_ptr": t.q,
        "k_ptr": t.k,
        "v_ptr": t.v,
        "alibi_ptr": t.alibi_slopes,
        "mask_ptr": None if t.attn_mask is None else t.attn_mask.view(torch.uint8),
        "bias_ptr": t.attn_bias,
        "cu_seqlens_q_ptr": t.cu_seqlens_q,
        "cu_seqlens_k_ptr": t.cu_seqlens_k,
        "rng_state_ptr": t.rng_state,
        "origins_ptr": t.origins,
    }


def common_sizes(problem: Problem, tensors: Tensors) -> dict[str, Any]:
    """The sizes, as ``Launch`` has them, that the forward and every kernel of the backward share."""
    return {**band_sizes(problem, tensors.q, tensors.k), **row_strides("v", tensors.v)}


def band_sizes(problem: Problem, q: Tensor, k: Tensor) -> dict[str, Any]:
    """Those of them that q, k and the band have."""
    band, seqlen_q, seqlen_k = problem.band, q.shape[-3], k.shape[-3]
    span = seqlen_q + seqlen_k  # a larger bound has the same effect and could overflow
    return {
        "batch": problem.batch,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "left": 0 if band.left is None else max(-span, min(span, band.left)),
        "right": 0 if band.right is None else max(-span, min(span, band.right)),
        **row_strides("q", q),
        **row_strides("k", k),
    }


def common_arguments(problem: Problem, tensors: Tensors, config: Config, dout: Tensor | None = None) -> dict[str, Any]:
    """The other arguments that they share; in the backward also of dout."""
    p, t = problem, tensors
    arguments: dict[str, Any] = {
        **common_operands(t),
        **tile_arguments(p, config),
        "alibi_stride_b": p.num_heads_q if t.alibi_slopes is not None and t.alibi_slopes.dim() == 2 else 0,
        "dropout_threshold": dropout.threshold_bits(philox.threshold(p.dropout_p)),
        "keep_scale": 1.0 / (1.0 - p.dropout_p),
        "INPUT_PRECISION": input_precision(p),
        "UNIT": _unit((p.head_dim, p.head_dim_v), (t.q, t.k, t.v) if dout is None else (t.q, t.k, t.v, dout)),
        "SCORE_UNIT": _score_unit(p, t),
    }
    return arguments | score_strides("mask", t.attn_mask) | score_strides("bias", t.attn_bias)


def _unit(dims: tuple[int, int], tensors: tuple[Tensor, ...]) -> int:
    """The stride divisor that the kernel may assume where Triton finds no 16: 16 bytes, in elements; else 1."""
    unit = 16 // tensors[0].element_size()
    odd = all(dim % unit == 0 for dim in dims) and any(dim % 16 for dim in dims)
    return unit if odd and all(map(is_aligned, tensors)) else 1


def _score_unit(problem: Problem, tensors: Tensors) -> int:
    """``mask.ScoreTensor.UNIT`` of a call's mask and bias; a packed sequence may have any number of keys."""
    given = [x for x in (tensors.attn_mask, tensors.attn_bias) if x is not None]
    if problem.varlen or not given:
        return 1
    strides = [stride for x in given for stride in list(score_strides("", x).values())[:3]]
    return math.gcd(16, problem.seqlen_k, *strides)


def tile_arguments(problem: Problem, config: Config) -> dict[str, Any]:
    """Heads, scale, softcap and what of the tiles and the band is compiled in."""
    p = problem
    block_d, block_dv = tile_dims(p.head_dim, p.head_dim_v)
    return {
        "num_heads_q": p.num_heads_q,
        "group_size": p.group_size,
        "scale": p.softmax_scale,
        "param": p.softcap,
        "HEAD_DIM": p.head_dim,
        "HEAD_DIM_V": p.head_dim_v,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "HAS_LEFT": p.band.left is not None,
        "HAS_RIGHT": p.band.right is not None,
        "SCORE_MOD": scores.softcap if p.softcap > 0 else None,
        "SCALE_FIRST": p.softcap > 0 or p.alibi or p.bias_dtype is not None or p.softmax_scale <= 0,
    }


def heads_at_once(problem: Problem, first: Tensor, second: Tensor) -> int:
    """How many heads to process together so that their inner-loop tensors (batch, rows, heads, dim) fit in L2.

    1 if all blocks of a head cost the same: neighbouring programs then read the same rows at the same time.
    """
    if problem.band.unbounded:
        return 1
    rows = first.shape[-3]
    a_head = rows * (first.shape[-1] + second.shape[-1]) * first.element_size()
    return max(1, _CACHE_BYTES // max(1, a_head))


def input_precision(problem: Problem) -> str:
    """How float32 is multiplied on an NVIDIA GPU: as six products of bfloat16, or as tf32 if torch's own setting asks.

    A number is the sum of three of bfloat16, so what is left out is below float32's own rounding, and tensor cores take
    a fifth of the time of IEEE products. AMD's matrix units multiply float32 themselves, and 16 bits have one way.
    """
    if problem.dtype != torch.float32 or tiles.arch_of(problem) in ("interpreter", "gfx942"):
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "bf16x6"


def describable(tensor: Tensor) -> bool:
    """Whether a tensor descriptor can read it: not empty, 16-byte aligned, and no dimension expanded."""
    unit = 16 // tensor.element_size()
    strides = [stride for stride, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
    return tensor.numel() > 0 and tensor.data_ptr() % 16 == 0 and all(s > 0 and s % unit == 0 for s in strides)


def descriptors(sources: dict[str, tuple[Tensor, int, int]], config: Config) -> dict[str, Any]:
    """Descriptors of the tensors, given with a tile's rows and columns, that a loop loads: for all of them or none."""
    tma = config.tma and all(
        describable(tensor) and not (tensor.dim() == 3 and config.one_loop) for tensor, _, _ in sources.values()
    )
    return {
        f"{name}_source": descriptor(tensor, rows, columns) if tma else None
        for name, (tensor, rows, columns) in sources.items()
    }


def descriptor(tensor: Tensor, rows: int, columns: int) -> TensorMap:
    """A tensor map over (batch, rows, heads, dim) whose box is ``rows`` by ``columns`` of one head."""
    whole = tensor if tensor.dim() == 4 else tensor[None]
    # The stride of a dimension of size 1 is never used, but must be legal.
    strides = [s if n > 1 else 16 for s, n in zip(whole.stride()[:-1], whole.shape[:-1], strict=True)]
    return TensorMap(tensor.dtype, tuple(whole.shape), (*strides, 1), (1, rows, 1, columns))
