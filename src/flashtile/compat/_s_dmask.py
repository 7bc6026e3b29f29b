"""flash-attn's third result, S_dmask: the probabilities, not normalised, with their dropout as the sign.

For tests and inspection alone. flash-attn's kernels write S_dmask as they compute it. Here the reference computes it
over the whole score matrix, so it takes O(N^2) time and memory.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashtile import reference
from flashtile.call.arguments import Grads, Options, Tensors
from flashtile.call.problem import Problem
from flashtile.call.rotary import row_positions
from flashtile.core import philox
from flashtile.ops import dropout
from flashtile.ops import operators as ops

# flash-attn scales each block of keys by the largest score of this block and all later ones. Here a row is one block.
BLOCK_SIZE_N = 2**31 - 1


def attention(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention with dropout, from a new state of the random numbers.

    Returns:
        out and lse as in ``ops.attention``, S_dmask as in ``s_dmask``, and the ``(2,)`` int64 state of dropout.
    """
    rng_state = dropout.drawn(tensors.q)
    tensors = dataclasses.replace(tensors, rng_state=rng_state)
    out, lse = ops.attention(tensors, options)
    return out, lse, s_dmask(tensors, options), rng_state


@torch.no_grad()
def s_dmask(tensors: Tensors, options: Options) -> Tensor:
    """``exp(score - largest score of the row)``, negative where dropout drops it; 0 for masked pairs.

    Returns:
        ``(batch, num_heads_q, seqlen_q, seqlen_k)`` in q's dtype, with max_seqlen_q and max_seqlen_k for packed
        sequences, each in the top left corner. It is not padded to blocks, unlike flash-attn's.
    """
    t = tensors
    problem = Problem.of(t, options._replace(dropout_p=0.0, grads=Grads()))
    seqlen_q, seqlen_k, shape = problem.seqlen_q, problem.seqlen_k, (problem.batch, problem.num_heads_q)
    if not seqlen_q * seqlen_k * problem.batch:
        return t.q.new_empty(*shape, seqlen_q, seqlen_k)
    # With the identity for v, out is the probabilities.
    eye = torch.eye(seqlen_k, dtype=t.q.dtype, device=t.q.device)
    keys = slice(None) if t.cu_seqlens_k is None else row_positions(t.k.shape[0], 0, t.cu_seqlens_k, t.k.device)
    v = eye[keys][:, None].expand(*t.k.shape[:-1], seqlen_k)
    plain = dataclasses.replace(t, v=v, rng_state=None)
    with torch.autocast(t.q.device.type, enabled=False):  # or float32 products would take its dtype
        probs, _ = reference.attention(problem.but(head_dim_v=seqlen_k), plain, problem.lse_dtype)
    if t.cu_seqlens_q is not None:
        bounds = itertools.pairwise(t.cu_seqlens_q.tolist())
        probs = torch.stack(
            [pad(probs[start:stop], (0, 0, 0, 0, 0, seqlen_q - stop + start)) for start, stop in bounds]
        )
    probs = probs.transpose(1, 2)
    largest = probs.amax(dim=-1, keepdim=True)
    scaled = torch.where(largest > 0, probs / largest, 0.0)
    assert t.rng_state is not None
    kept = philox.keep(t.rng_state, options.dropout_p, range(shape[0]), shape[1], (0, seqlen_q), (0, seqlen_k))
    return torch.where(kept, scaled, -scaled).to(t.q.dtype)
