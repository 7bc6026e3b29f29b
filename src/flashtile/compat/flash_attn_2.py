"""The functions of flash-attn 2, by its names, defaults, shapes and return arities (version 2.8.4).

Differences, all of them:

- Any head dim, float32 everywhere and float64 on the CPU also run; softcap and dropout also run together.
- lse of a row without keys is -inf (flash-attn: +inf), and gradients flow through lse (flash-attn: none).
- With ``return_attn_probs`` the third value, S_dmask, is an empty tensor without dropout. With dropout it is
  ``exp(score - largest score of the row)``, negative where dropped: ``(batch, num_heads_q, seqlen_q, seqlen_k)`` in q's
  dtype, not padded, without a gradient. It costs O(N^2) time and memory and does not compile: for tests alone.
- With causal and ``alibi_slopes``, lse belongs to the scores as documented. flash-attn adds ``slope * j`` there in
  place of ``-slope * |i + seqlen_k - seqlen_q - j|``: the same attention with another constant in each row's lse.
- Pages, in ``flash_attn_with_kvcache`` and as ``block_table`` of ``flash_attn_varlen_func``, may have any size
  (flash-attn: multiples of 256), and ``cache_leftpad`` goes with them.
- ``rotary_dim`` may be any even number up to head_dim (flash-attn: multiples of 16), and cos and sin float32. Any
  window makes q rotate row by row, as documented there; flash-attn first drops windows as wide as the cache.
- That lengths and appended keys fit in the caches is checked on the CPU, and on a GPU if ``FLASHTILE_CHECK`` is set;
  flash-attn waits for the device in every call with a ``block_table`` to check that.
- Caches may be float8_e4m3fn, without scales.
- ``num_splits`` says how flash-attn divides its work: any value is accepted, and none has an effect.
- ``flash_attn_varlen_func`` with ``block_table`` refuses dropout, and its backward raises.
- Errors are InvalidInputError (a ValueError) and UnsupportedError (a NotImplementedError, so a RuntimeError).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashtile.api.attention import attention, attention_varlen
from flashtile.call.arguments import Plain, Tensors, flag, read
from flashtile.call.prepared import autocast
from flashtile.compat import _kvcache, _s_dmask
from flashtile.compat._arguments import Window, integer, length, names, unstack, window
from flashtile.ops import sharding

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
    length may be a tensor, which costs a synchronisation on a GPU. All else is as in ``flash_attn_func``.

    With block_table ``(batch, max_pages)`` int32, k and v are pages ``(pages, page_size, num_heads_kv, head_dim)``, and
    the ``cu_seqlens_k[b + 1] - cu_seqlens_k[b]`` keys of sequence b are in the pages ``block_table[b]``, in order.
    Entries past its last page may hold anything. There is no backward then, and no dropout.

    Returns:
        out ``(total_q, num_heads_q, head_dim)``; with return_attn_probs also lse ``(num_heads_q, total_q)`` float32
        and S_dmask ``(batch, num_heads_q, max_seqlen_q, max_seqlen_k)``, each sequence in the top left corner.

    Raises:
        InvalidInputError: Naming the argument.
        UnsupportedError: No backend can run the call; block_table with dropout_p, or in the backward.
    """
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    if block_table is not None:
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return _kvcache.attend_pages((q, k, v), lengths, block_table, tail)
    _kvcache.refuse_pages(q, k, v, "block_table is missing")
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over caches of keys and values, to which k and v are appended in the same call.

    q is ``(batch, seqlen_q, num_heads_q, head_dim)``, k and v ``(batch, seqlen_new, num_heads_kv, head_dim)``, k_cache
    and v_cache ``(entries, capacity, num_heads_kv, head_dim)``: sequence b has entry ``cache_batch_idx[b]``, or b. With
    block_table ``(batch, max_pages)`` int32 the caches are ``(pages, page_size, num_heads_kv, head_dim)``.

    cache_seqlens is the length of all sequences or ``(batch,)`` int32: the keys in the cache before k is appended; by
    default the caches are full. k and v are written behind them, into the caches; cache_leftpad ``(batch,)`` int32 is
    the first key of each sequence. rotary_cos and rotary_sin ``(seqlen_rotary, rotary_dim / 2)`` rotate k at
    ``cache_seqlens + i``, and q likewise if causal or if window_size is not (-1, -1), else all of q at cache_seqlens.
    rotary_interleaved pairs dimensions 2i and 2i + 1, else i and ``i + rotary_dim / 2``. The rest is as in
    ``flash_attn_func``, with seqlen_k the length after appending. Tensors that require grad are used detached.

    Returns:
        out ``(batch, seqlen_q, num_heads_q, head_dim)``; with return_softmax_lse also lse
        ``(batch, num_heads_q, seqlen_q)`` float32, natural log.

    Raises:
        InvalidInputError: Naming the argument.
        UnsupportedError: No backend can run the call.
    """
    integer("num_splits", num_splits)
    given = {"k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_batch_idx": cache_batch_idx}
    with names(page_table="block_table"):
        return _kvcache.attend(
            q,
            k_cache,
            v_cache,
            cache_seqlens,
            window_size,
            return_softmax_lse,
            **given,
            cache_leftpad=cache_leftpad,
            page_table=block_table,
            rotary_interleaved=rotary_interleaved,
            softmax_scale=softmax_scale,
            causal=causal,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
        )


def _attend(inputs: tuple[Any, ...], tail: tuple[Any, ...]) -> Result:
    """Calls flashtile with the positional arguments of one of its functions, and flash-attn's common last arguments."""
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, probs = tail
    bounds = window(window_size)
    if flag("return_attn_probs", probs) and isinstance(dropout_p, (int, float)) and 0 < dropout_p < 1:
        q, k, v, *packed = inputs
        tensors = Tensors(q, k, v, alibi_slopes, **dict(zip(("cu_seqlens_q", "cu_seqlens_k"), packed, strict=False)))
        plain, lengths = Plain(softmax_scale, softcap, dropout_p, deterministic), packed[2:] or (None, None)
        options = read(tensors, causal, bounds, True, plain, tuple(lengths))
        sharding.refuse_dropout(q)
        return _s_dmask.attention(autocast(tensors, q.device.type), options)[:3]
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
