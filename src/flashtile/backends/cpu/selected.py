"""The gradients of attention over selected keys by PyTorch: gathered rows, some queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.call.selected import SelectedInputs
from flashtile.core.states import sinks_gradient

# Numbers of gathered keys and values that are held at once.
_MOST_NUMBERS = 2**24


@torch.no_grad()
def gradients(
    given: SelectedInputs, softmax_scale: float, softcap: float = 0.0, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and the sinks; the same bits in each run.

    Args:
        given: The tensors, any float dtype.
        softmax_scale: Factor of the scores.
        softcap: As of ``flashtile.attention``; 0 for none.
        sinks: ``(num_heads_q,)``, or None.

    Returns:
        dq, dk, dv and dsinks, or None without sinks; each in the dtype and shape of its tensor.
    """
    q, k, v, out, lse, dout, dlse, slots, counts = given
    wide, (queries, heads, dim) = torch.promote_types(q.dtype, torch.float32), q.shape
    kv_heads, dim_v, most = k.shape[1], v.shape[-1], slots.shape[1]
    dq, dk, dv = (x.new_zeros(x.shape, dtype=kind) for x, kind in ((q, q.dtype), (k, wide), (v, wide)))
    delta = (out.to(wide) * dout.to(wide)).sum(-1)
    delta = delta if dlse is None else delta - dlse
    step = max(1, _MOST_NUMBERS // max(1, most * kv_heads * (dim + dim_v)))
    for first in range(0, queries if most and k.numel() else 0, step):
        some = slice(first, first + step)
        keep = torch.arange(most, device=q.device) < counts[some, None]
        rows = torch.where(keep, slots[some], 0).long()
        # Rows that no list names may hold anything.
        keys, values = (torch.where(keep[..., None, None], x[rows].to(wide), 0) for x in (k, v))
        own, dprobs_of = (x[some].to(wide).unflatten(1, (kv_heads, heads // kv_heads)) for x in (q, dout))
        of_row, change = (x[some].unflatten(1, (kv_heads, heads // kv_heads))[..., None] for x in (lse, delta))
        scores = torch.einsum("nhgd,nmhd->nhgm", own, keys) * softmax_scale
        slope: Tensor | float = 1.0
        if softcap > 0:
            capped = torch.tanh(scores / softcap)
            scores, slope = softcap * capped, 1 - capped.square()
        seen = keep[:, None, None, :] & (of_row != -torch.inf)
        probs = torch.where(seen, torch.exp(scores - of_row), 0)
        dscores = probs * (torch.einsum("nhge,nmhe->nhgm", dprobs_of, values) - change) * slope
        dscores = torch.where(seen, dscores, 0) * softmax_scale
        dq[some] = torch.einsum("nhgm,nmhd->nhgd", dscores, keys).flatten(1, 2).to(q.dtype)
        dk.index_add_(0, rows[keep], torch.einsum("nhgm,nhgd->nmhd", dscores, own)[keep])
        dv.index_add_(0, rows[keep], torch.einsum("nhgm,nhge->nmhe", probs, dprobs_of)[keep])
    dsinks = None if sinks is None else sinks_gradient(sinks, lse.T, delta.T.to(lse.dtype)).to(sinks.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks
