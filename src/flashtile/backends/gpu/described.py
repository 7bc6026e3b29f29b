"""Tensors without memory of a problem's layouts, to make launches from before there is a call."""

from __future__ import annotations

import functools

import torch

from flashtile.call.blocks import BLOCK, num_blocks
from flashtile.call.problem import Problem, Tensors
from flashtile.call.quantized_call import QuantizedTensors
from flashtile.core.masks import Origin


def described_tensors(problem: Problem) -> Tensors:
    """Contiguous tensors of a problem's layouts without memory, to make launches from.

    Packed sequences all have the longest length, and attend to themselves.
    """
    p = problem
    empty = functools.partial(torch.empty, device="meta")
    rows_q, rows_k = ((p.batch * n,) if p.varlen else (p.batch, n) for n in (p.seqlen_q, p.seqlen_k))
    bounds = empty(p.batch + 1, dtype=torch.int32) if p.varlen else None
    scores = (p.batch, p.num_heads_q, p.seqlen_q, p.seqlen_k)
    functions = [each for each in (p.score_function, p.mask_function) if each is not None]
    return Tensors(
        q=empty(*rows_q, p.num_heads_q, p.head_dim, dtype=p.dtype),
        k=empty(*rows_k, p.num_heads_kv, p.head_dim, dtype=p.dtype),
        v=empty(*rows_k, p.num_heads_kv, p.head_dim_v, dtype=p.dtype),
        alibi_slopes=empty(p.num_heads_q, dtype=torch.float32) if p.alibi else None,
        attn_mask=empty(*scores, dtype=torch.bool) if p.mask else None,
        attn_bias=empty(1, *scores[1:], dtype=p.bias_dtype) if p.bias_dtype else None,
        sinks=empty(p.num_heads_q, dtype=torch.float32) if p.sinks else None,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        rng_state=empty(2, dtype=torch.int64) if p.dropout_p > 0 else None,
        row_keys=empty(1, 1, p.seqlen_q, 2, dtype=torch.int32) if p.row_keys else None,
        key_rows=empty(1, 1, p.seqlen_k, 2, dtype=torch.int32) if p.key_rows else None,
        row_blocks=empty(1, 1, -(-p.seqlen_q // p.listed[0]), 3, dtype=torch.int32) if p.listed else None,
        key_blocks=empty(1, 1, -(-p.seqlen_k // p.listed[1]), 3, dtype=torch.int32) if p.listed else None,
        row_items=empty(256, dtype=torch.int32) if p.listed else None,
        key_items=empty(256, dtype=torch.int32) if p.listed else None,
        origins=empty(p.batch, len(Origin._fields), dtype=torch.int32) if p.origins else None,
        operands=tuple(empty((64,) * x.dim, dtype=x.dtype) for f in functions for x in f.operands)
        if functions
        else None,
        numbers=tuple(1.0 for f in functions for _ in f.graph.numbers) if functions else None,
    )


def described_quantized(problem: Problem, *, shifted: bool = True) -> QuantizedTensors:
    """The same for a quantized call, with a scale for each block."""
    p, t = problem, described_tensors(problem)
    blocks_q, blocks_k = num_blocks(t.q.shape[-3], t.cu_seqlens_q), num_blocks(t.k.shape[-3], t.cu_seqlens_k)
    batch = () if p.varlen else (p.batch,)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*batch, *shape, dtype=dtype, device="meta")

    k_scale = empty(p.num_heads_kv, blocks_k)
    return QuantizedTensors(
        t.q, t.k, empty(p.num_heads_kv, p.head_dim_v, blocks_k * BLOCK, dtype=p.dtype),
        empty(p.num_heads_q, blocks_q), k_scale, k_scale,
        shift=empty(p.num_heads_q, t.q.shape[-3]) if shifted and not p.softcap else None,
        sinks=t.sinks, cu_seqlens_q=t.cu_seqlens_q, cu_seqlens_k=t.cu_seqlens_k,
        out_scale=torch.empty(1, device="meta") if p.out_dtype == p.dtype else None,
    )  # fmt: skip
