"""The functions of flash-attn 2, by its names, defaults, shapes and return arities (version 2.8.4).

Differences, all of them:

- Any head dim, float32 everywhere and float64 on the CPU also run; softcap and dropout also run together.
- lse of a row without keys is -inf (flash-attn: +inf), and gradients flow through lse (flash-attn: none).
- With ``return_attn_probs`` the third value, S_dmask, is an empty tensor without dropout. With dropout it is
  ``exp(score - largest score of the row)``, negative where dropped: ``(batch, num_heads_q, seqlen_q, seqlen_k)`` in q's
  dtype, not padded, without a gradient. It costs O(N^2) time and memory and does not compile: for tests alone.
- ``block_table`` (paged keys) is refused, and ``flash_attn_with_kvcache`` refuses every call.
- Errors are InvalidInputError (a ValueError) and UnsupportedError (a NotImplementedError, so a RuntimeError).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashtile import autocast, sharding
from flashtile.api import attention, attention_varlen
from flashtile.arguments import Tensors, read
from flashtile.compat import _s_dmask
from flashtile.compat._arguments import Window, flag, length, names, refuse, unstack, window
from flashtile.errors import UnsupportedError

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention over padded or equally long sequences.

    q is ``(batch, seqlen_q, num_heads_q, head_dim)``, k and v ``(batch, seqlen_k, num_heads_kv, head_dim)``. The rest
    is as in ``flashtile.attention``, except that window_size may be a tensor of two, any negative bound of it is
    unbounded, and return_attn_probs returns ``(out, lse, S_dmask)``.

    Returns:
        out ``(batch, seqlen_q, num_heads_q, head_dim)``; with return_attn_probs also lse
        ``(batch, num_heads_q, seqlen_q)`` float32, natural log, and S_dmask.

    Raises:
        InvalidInputError: Naming the argument.
        UnsupportedError: No backend can run the call.
    """
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _attend((q, k, v), tail)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_func`` with k and v in one tensor, kv ``(batch, seqlen_k, 2, num_heads_kv, head_dim)``."""
    k, v = unstack("kv", kv, 2, dim=2)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    with names(k="kv", v="kv"):
        return flash_attn_func(q, k, v, *tail)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_func`` with q, k and v in one tensor, qkv ``(batch, seqlen, 3, num_heads, head_dim)``."""
    q, k, v = unstack("qkv", qkv, 3, dim=2)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    with names(q="qkv", k="qkv", v="qkv"):
        return flash_attn_func(q, k, v, *tail)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention over sequences packed one after another.

    q is ``(total_q, num_heads_q, head_dim)``, k and v ``(total_k, num_heads_kv, head_dim)``; cu_seqlens_q and
    cu_seqlens_k ``(batch + 1,)`` int32: sequence b is rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``. A longest
    length may be a tensor, which costs a synchronisation on a GPU. block_table must be None; all else is as in
    ``flash_attn_func``.

    Returns:
        out ``(total_q, num_heads_q, head_dim)``; with return_attn_probs also lse ``(num_heads_q, total_q)`` float32
        and S_dmask ``(batch, num_heads_q, max_seqlen_q, max_seqlen_k)``, each sequence in the top left corner.

    Raises:
        InvalidInputError: Naming the argument.
        UnsupportedError: No backend can run the call, or block_table.
    """
    refuse("block_table", block_table, "paged keys and values are not supported here")
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    longest = length("max_seqlen_q", max_seqlen_q), length("max_seqlen_k", max_seqlen_k)
    return _attend((q, k, v, cu_seqlens_q, cu_seqlens_k, *longest), tail)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_varlen_func`` with k and v in one tensor, kv ``(total_k, 2, num_heads_kv, head_dim)``."""
    k, v = unstack("kv", kv, 2, dim=1)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    with names(k="kv", v="kv"):
        return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *tail)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_varlen_func`` with q, k and v in one tensor, qkv ``(total, 3, num_heads, head_dim)``.

    cu_seqlens and max_seqlen apply to both queries and keys.
    """
    q, k, v = unstack("qkv", qkv, 3, dim=1)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    one = {"cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens"}
    with names(q="qkv", k="qkv", v="qkv", max_seqlen_q="max_seqlen", max_seqlen_k="max_seqlen", **one):
        return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *tail)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Exists for code that imports it.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError("flash_attn_with_kvcache: attention over a cache of keys and values is not supported")


def _attend(inputs: tuple[Any, ...], tail: tuple[Any, ...]) -> Result:
    """Calls flashtile, from the positional arguments of one of its functions and what all of flash-attn's end with."""
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, probs = tail
    bounds = window(window_size)
    if flag("return_attn_probs", probs) and isinstance(dropout_p, (int, float)) and 0 < dropout_p < 1:
        q, k, v, *packed = inputs
        tensors = Tensors(q, k, v, alibi_slopes, **dict(zip(("cu_seqlens_q", "cu_seqlens_k"), packed, strict=False)))
        numbers, lengths = (softmax_scale, softcap, dropout_p, deterministic, None), packed[2:] or (None, None)
        options = read(tensors, causal, bounds, True, numbers, tuple(lengths))
        sharding.refuse_dropout(q)
        return _s_dmask.attention(autocast.cast(tensors, q.device.type), options)[:3]
    found = (attention if len(inputs) == 3 else attention_varlen)(
        *inputs,
        causal=causal,
        window_size=bounds,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_lse=probs,
    )
    return (*found, found[0].new_empty(0)) if probs else found
