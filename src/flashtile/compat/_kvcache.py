"""Functions shared by flash-attn 2's and FlashAttention-3's calls over caches and pages of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.api.attention import attention_with_kvcache
from flashtile.call.arguments import DTYPES, checked, flag, integer, probability
from flashtile.compat._arguments import Window, index_tensor, length, names, tensor, values_are_checked, window
from flashtile.core.errors import InvalidInputError, UnsupportedError
from flashtile.core.sizes import holds


@torch.no_grad()
def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: int | Tensor | None,
    window_size: Window,
    return_lse: bool,
    **given: Any,
) -> Any:
    """``attention_with_kvcache`` without gradients. cache_seqlens may be None for full caches.

    ``given`` are further keywords of ``attention_with_kvcache``, such as k, page_table, rotary_cos, rotary_interleaved.
    """
    flag("return_softmax_lse", return_lse)
    if cache_seqlens is None:
        if given["k"] is not None:
            raise InvalidInputError("cache_seqlens", "is None, must be given with k, which is written behind them")
        cache_seqlens = _capacity(tensor("k_cache", k_cache), given["page_table"])
    if given["rotary_cos"] is None:
        # flash-attn allows it without cos, and is interleaved by default; without cos it has no effect.
        given["rotary_interleaved"] = flag("rotary_interleaved", given["rotary_interleaved"]) and False
        if given.get("rotary_seqlens") is not None:
            index_tensor("rotary_seqlens", given.pop("rotary_seqlens"), None, tensor("q", q).device)
    return attention_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=cache_seqlens,
        window_size=window(window_size),
        return_lse=return_lse,
        **given,
    )


def _capacity(k_cache: Tensor, page_table: Tensor | None) -> int:
    """The number of keys that each sequence has room for. Wrong shapes give 0, and are refused later."""
    positions = k_cache.shape[1] if k_cache.dim() == 4 else 0
    if page_table is None:
        return positions
    return positions * page_table.shape[1] if tensor("page_table", page_table).dim() == 2 else 0


def packed(
    new: tuple[Any, Any], bounds: tuple[Tensor | None, Tensor | None], max_seqlen_q: int | Tensor | None, q: Tensor
) -> dict[str, Any]:
    """FlashAttention-3's k and v, cu_seqlens_q and cu_seqlens_k_new, and max_seqlen_q, for ``attend``.

    If q is packed, new keys that are not packed are packed. If q is not packed, max_seqlen_q must agree with q's shape,
    and is dropped.
    """
    (k, v), (cu_seqlens_q, cu_seqlens_k_new) = new, bounds
    longest = checked(max_seqlen_q=length("max_seqlen_q", max_seqlen_q))["max_seqlen_q"]
    if cu_seqlens_q is None and longest is not None:
        seqlen_q = tensor("q", q).shape[1] if q.dim() == 4 else 0
        if holds(longest < seqlen_q):
            raise InvalidInputError("max_seqlen_q", f"is {longest}, but q has seqlen_q {seqlen_q}")
        longest = None
    unpacked = all(isinstance(x, Tensor) and x.dim() == 4 for x in new)
    if cu_seqlens_q is not None and cu_seqlens_k_new is None and unpacked:
        cu_seqlens_k_new = torch.arange(k.shape[0] + 1, dtype=torch.int32, device=k.device) * k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new, "max_seqlen_q": longest}
    return {"k": k, "v": v, **lengths}


def places(page_table: Tensor | None, cache_batch_idx: Tensor | None) -> dict[str, Tensor | None]:
    """FlashAttention-3's page_table and cache_batch_idx, for ``attend``: with a table, the index selects its rows."""
    if page_table is None or cache_batch_idx is None:
        return {"page_table": page_table, "cache_batch_idx": cache_batch_idx}
    if tensor("page_table", page_table).dim() != 2:
        raise InvalidInputError("page_table", f"has {page_table.dim()} dimensions, must have 2: (entries, max_pages)")
    rows, entries = index_tensor("cache_batch_idx", cache_batch_idx, None, page_table.device), page_table.shape[0]
    if values_are_checked(rows.device):
        for row in rows.tolist():
            if not 0 <= row < entries:
                raise InvalidInputError("cache_batch_idx", f"has {row}, but page_table has {entries} entries")
    return {"page_table": page_table.index_select(0, rows), "cache_batch_idx": None}


def metadata(
    sizes: dict[str, Any], dtype: torch.dtype, index: dict[str, Tensor | None], bounds: dict[str, Tensor | None]
) -> Tensor:
    """A placeholder for FlashAttention-3's plan of a call, after checks of the arguments that describe the call.

    ``index`` are tensors ``(batch,)``, cache_seqlens first, and ``bounds`` tensors ``(batch + 1,)``.
    """
    found = {name: integer(name, length(name, size), 0) for name, size in sizes.items() if size is not None}
    heads_q, heads_kv = found["num_heads_q"], found["num_heads_kv"]
    if not heads_kv or heads_q % heads_kv:
        raise InvalidInputError("num_heads_q", f"is {heads_q}, must be a multiple of num_heads_kv {heads_kv}")
    if dtype not in (*DTYPES, torch.float8_e4m3fn):
        must = "float16, bfloat16, float32, float64 or float8_e4m3fn"
        raise InvalidInputError("qkv_dtype", f"is {dtype}, must be {must}")
    lengths = tensor("cache_seqlens", index["cache_seqlens"])
    for tensors, count in ((index, found["batch_size"]), (bounds, found["batch_size"] + 1)):
        for name, x in tensors.items():
            if x is not None:
                index_tensor(name, x, (count,), lengths.device)
    return lengths.new_zeros(1)


def attend_pages(tensors: tuple[Any, ...], lengths: tuple[Any, ...], block_table: Tensor, tail: tuple[Any, ...]) -> Any:
    """``flash_attn_varlen_func`` of flash-attn 2 over keys in pages.

    ``tensors`` are q, k and v; ``lengths`` are cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k; ``tail`` are
    the last arguments of flash-attn's functions, from dropout_p on.
    """
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, probs = tail
    refuse_dropout(dropout_p)
    flag("deterministic", deterministic)
    flag("return_attn_probs", probs)
    options = (softmax_scale, causal, window(window_size), softcap, alibi_slopes)
    cu_seqlens_k, max_seqlen_k = lengths[1], lengths[3]
    out, lse = paged(
        tensors, lengths[0], used(tensors[0], cu_seqlens_k, max_seqlen_k), lengths[2], block_table, options
    )
    out, lse = without_backward("block_table: attention over a cache", out, lse, tensors)
    return (out, lse, out.new_empty(0)) if probs else out


def refuse_pages(q: Any, k: Any, v: Any, hint: str) -> None:
    """Raises for keys or values in pages with packed queries but without a table; ``hint`` names the right argument."""
    for name, x in (("k", k), ("v", v)):
        if isinstance(x, Tensor) and x.dim() == 4 and isinstance(q, Tensor) and q.dim() == 3:
            raise InvalidInputError(name, f"has 4 dimensions, must have 3 for packed sequences; for pages {hint}")


@torch.no_grad()
def paged(
    tensors: tuple[Any, ...],
    cu_seqlens_q: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int | Tensor,
    block_table: Tensor,
    options: tuple[Any, ...],
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of packed queries over keys in pages. Errors name the arguments of flash-attn's packed functions."""
    softmax_scale, causal, window_size, softcap, alibi_slopes = options
    if cu_seqlens_q is None:
        raise InvalidInputError("cu_seqlens_q", "is None, must be an int32 tensor of shape (batch + 1,)")
    with names(k_cache="k", v_cache="v", cache_seqlens="cu_seqlens_k", page_table="block_table"):
        found = attention_with_kvcache(
            *tensors,
            cache_seqlens=cache_seqlens,
            page_table=block_table,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=length("max_seqlen_q", max_seqlen_q),
            causal=causal,
            window_size=window_size,
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            batch_invariant=batch_invariant,
            return_lse=True,
        )
    out, lse = found
    return out, lse


def used(q: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int | Tensor) -> Tensor:
    """The lengths, ``(batch,)`` int32, between the bounds in cu_seqlens_k."""
    bounds = index_tensor("cu_seqlens_k", cu_seqlens_k, None, tensor("q", q).device)
    lengths, longest = bounds.diff(), checked(max_seqlen_k=length("max_seqlen_k", max_seqlen_k))["max_seqlen_k"]
    if values_are_checked(bounds.device) and longest is not None and lengths.numel() and lengths.max() > longest:
        holds = f"cu_seqlens_k holds a sequence of {lengths.max().item()}"
        raise InvalidInputError("max_seqlen_k", f"is {longest}, but {holds}")
    return lengths


def refuse_dropout(dropout_p: float) -> None:
    """Raises unless dropout_p is 0."""
    if probability("dropout_p", dropout_p) > 0:
        raise UnsupportedError(
            f"dropout_p: must be 0 with block_table, is {dropout_p}: keys in pages are for inference"
        )


def without_backward(why: str, out: Tensor, lse: Tensor, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Out and lse of these tensors, with a backward that raises ``why``, which names an argument."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        out, lse = _NoBackward.apply(why, out, lse, *tensors)
    return out, lse


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, why: str, out: Tensor, lse: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.why = why
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UnsupportedError(f"{ctx.why} has no gradient")
