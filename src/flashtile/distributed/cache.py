"""``attention_with_sharded_kvcache``: a cache with keys that are spread over the ranks of a mesh, for long contexts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashtile.api.cached import attention_with_kvcache
from flashtile.call.arguments import check_tensor, flag, integer, window_bounds
from flashtile.core.errors import InvalidInputError, shown
from flashtile.distributed.exchange import Ranks, agree, ranks_of, refuse_differences
from flashtile.distributed.shards import everyone
from flashtile.ops import plans

_LAYOUTS = ("striped", "contiguous")


def attention_with_sharded_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    mesh: DeviceMesh,
    layout: str = "striped",
    interleave: int = 1,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    causal: bool = True,
    window_size: Sequence[int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Attention of new queries over keys and values in caches that hold a part of each sequence on every rank.

    Each rank attends to its own part, and one exchange merges outputs and log-sum-exps in float32; its size does not
    depend on the lengths. There is no gradient. New keys are appended before the call, by the rank that holds their
    position.

    Args:
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``, the same on all ranks.
        k_cache: This rank's part, as in ``attention_with_kvcache``.
        v_cache: Likewise.
        cache_seqlens: ``(batch,)`` int32: the keys of each sequence on all ranks together; an int for all.
        mesh: The ranks. The ranks of a mesh of two dimensions count as one row.
        layout: "striped": rank ``j // interleave % ranks`` holds key j, and holds its keys in the order of j.
            "contiguous": rank r holds the keys from ``r * capacity`` on, where ``capacity`` is the capacity of an entry
            of its cache.
        interleave: The number of neighbouring keys on one rank under "striped", such as the page size.
        page_table: As in ``attention_with_kvcache``, for this rank's pages.
        cache_batch_idx: See there.
        k_scale: See there.
        v_scale: See there.
        causal: Row i sees keys ``j <= i + L - seqlen_q``, where L is the length of the whole sequence.
        window_size: See there; with positions in the whole sequence.
        softmax_scale: See there.
        softcap: See there.
        sinks: See there; the same on all ranks.
        return_lse: Also return the log-sum-exp of the scores.
        backend: See there.

    Returns:
        out ``(batch, seqlen_q, num_heads_q, head_dim_v)`` in q's dtype, the same on all ranks, or ``(out, lse)`` with
        lse ``(batch, num_heads_q, seqlen_q)``.

    Raises:
        InvalidInputError: Names the argument.
        UnsupportedError: No backend can run the call.
        ExchangeError: Another rank died or stalled.

    Source: Bhatia et al. 2025, "Helix Parallelism", arXiv:2507.07120; docs/algorithm.md, "The monoid".
    """
    ranks = ranks_of(mesh)
    check_tensor("q", q)
    if q.dim() != 4:
        raise InvalidInputError("q", f"has {q.dim()} dimensions, must have 4: (batch, seqlen_q, num_heads_q, head_dim)")
    if layout not in _LAYOUTS:
        raise InvalidInputError("layout", f"is {shown(layout)}, must be one of {', '.join(_LAYOUTS)}")
    left, right = window_bounds(window_size)
    right = 0 if flag("causal", causal) else right
    each = integer("interleave", interleave) if layout == "striped" else _capacity(k_cache, page_table)
    said = {"q": f"{q.dtype} {tuple(q.shape)}", "v_cache": v_cache.shape[-1], "interleave": each, "layout": layout}
    _compare(ranks, q.device, {**said, "window_size, causal": [left, right], "sinks": sinks is not None})
    batch, seqlen_q = q.shape[:2]
    lengths = cache_seqlens
    if not isinstance(lengths, Tensor):
        lengths = torch.full((batch,), integer("cache_seqlens", lengths, 0), dtype=torch.int32, device=q.device)
    held = functools.partial(_held, ranks=ranks, layout=layout, each=each)
    keywords: dict[str, Any] = {"page_table": page_table, "cache_batch_idx": cache_batch_idx, "cache_leftpad": None}
    rows = q
    if left is None and (right is None or (right == 0 and seqlen_q == 1)):
        here = held(lengths)
    else:
        # The mask ends at a different key on each rank: every row becomes a sequence.
        rows = q.flatten(0, 1)[:, None]
        diagonal = lengths[:, None] + torch.arange(-seqlen_q, 0, device=q.device, dtype=torch.int32)
        here = held(
            _clamped(diagonal + 1 + right, lengths) if right is not None else lengths[:, None].expand_as(diagonal)
        )
        if left is not None:
            keywords["cache_leftpad"] = held(_clamped(diagonal - left, lengths)).flatten()
        here = here.flatten()
        if seqlen_q > 1:
            if page_table is not None:
                keywords["page_table"] = page_table.repeat_interleave(seqlen_q, 0)
            else:
                entries = torch.arange(batch, dtype=torch.int32, device=q.device)
                entries = entries if cache_batch_idx is None else cache_batch_idx
                keywords["cache_batch_idx"] = entries.repeat_interleave(seqlen_q)
    found: Any = attention_with_kvcache(
        rows, k_cache, v_cache, cache_seqlens=here, k_scale=k_scale, v_scale=v_scale, causal=False,
        softmax_scale=softmax_scale, softcap=softcap, sinks=sinks if ranks.rank == 0 else None, return_lse=True,
        backend=backend, **keywords,
    )  # fmt: skip
    out, lse = _merged(ranks, *found)
    out, lse = out.to(q.dtype).view(*q.shape[:3], -1), lse.view(q.shape[:3]).transpose(1, 2)
    return (out, lse.contiguous()) if return_lse else out


def _held(count: Tensor, *, ranks: Ranks, layout: str, each: int) -> Tensor:
    """The number of a sequence's first ``count`` keys that this rank holds."""
    if layout == "contiguous":
        return (count - ranks.rank * each).clamp(0, each)
    turn = each * len(ranks.members)
    return count // turn * each + (count % turn - ranks.rank * each).clamp(0, each)


def _capacity(k_cache: Tensor, page_table: Tensor | None) -> int:
    return k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])


def _clamped(count: Tensor, lengths: Tensor) -> Tensor:
    return torch.minimum(count, lengths[:, None]).clamp(min=0)


def _compare(ranks: Ranks, device: torch.device, said: dict[str, Any]) -> None:
    """Compares a call with the other ranks' calls, if it is the first of its kind."""
    key = "sharded cache", ranks, str(said)
    if plans.kept.get(key) is None:
        refuse_differences(ranks, agree(ranks, device, said))
        plans.keep(key, True)


def _merged(ranks: Ranks, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """All ranks' states merged: out ``(batch, rows, heads, width)`` and lse ``(batch, rows, heads)``."""
    lse = lse.transpose(1, 2)
    packed = torch.cat([out.to(lse.dtype), lse[..., None]], -1)
    states = everyone(ranks, "the exchange of partial results", packed, packed.shape[0])
    outs, lses = states[..., :-1], states[..., -1]
    top = lses.amax(0)
    weights = torch.exp(lses - torch.where(top == -torch.inf, 0.0, top))
    total = weights.sum(0)
    # Where no rank has a key, and there is no sink, out is 0 and lse -inf.
    share = weights / torch.where(total == 0, 1.0, total)
    return (share[..., None] * outs).sum(0), top + torch.log(total)
