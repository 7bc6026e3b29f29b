"""The functions of FlashAttention-3's module ``flash_attn_interface``, by its names, defaults, shapes and returns.

``num_splits`` and ``pack_gqa`` choose among FlashAttention-3's kernels and do not define the result. Every value is
accepted and has no effect: a result does not depend on how a GPU is filled.

Differences, all of them:

- Any head dims run, also of v alone, and so do float32 everywhere, float64 on the CPU, and float8_e4m3fn caches without
  scales under a q of 16 or 32 bits.
- Gradients flow through lse and through ``flash_attn_combine`` (FlashAttention-3: none).
- ``seqused_q`` and ``seqused_k`` cost a copy of q, or of k and v. Rows of q past ``seqused_q`` have out 0 and lse -inf
  (FlashAttention-3 leaves them unwritten), and rows past a used length have gradients 0.
- Calls with ``attention_chunk`` have gradients (FlashAttention-3: the forward alone).
- ``qv`` may have any width (FlashAttention-3: head_dim 64 with head_dim_v from 256 on).
- float8 q over a cache, and float8 q, k and v with ``attention_chunk``, are widened: products multiply bfloat16
  numbers, and q is rounded once more if there is a descale.
- Refused: ``qv`` of float8 numbers, and ``sm_margin`` other than 0 except in calls over a cache.
- float8_e4m3fn q, k and v are copied: V's columns, and rows that are not contiguous. Head dims are multiples of 16.
- ``flash_attn_with_kvcache`` needs no metadata: ``get_scheduler_metadata`` checks its arguments and returns a zero.
  ``sm_margin``, to which FlashAttention-3 fits its plan, has no effect there.
- ``return_softmax_lse`` returns empty tensors for out_accum and lse_accum: no partial results are kept.
- ``rotary_dim`` may be any even number up to head_dim (FlashAttention-3: multiples of 16), and cos and sin float32. Any
  window makes q rotate row by row, as documented there; FlashAttention-3 first drops windows as wide as the cache.
- lse of a row without keys is -inf (FlashAttention-3: +inf).
- Errors are InvalidInputError (a ValueError) and UnsupportedError (a NotImplementedError, so a RuntimeError).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flashtile.call.arguments import band_of, flag
from flashtile.compat import _descaled, _kvcache, _qv
from flashtile.compat._arguments import (
    Window,
    chunk_of,
    index_tensor,
    integer,
    length,
    names,
    split_qkv,
    tensor,
    used_first,
    window,
)
from flashtile.core import states
from flashtile.core.errors import InvalidInputError, UnsupportedError

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention over padded or equally long sequences.

    q is ``(batch, seqlen_q, num_heads_q, head_dim)``, k ``(batch, seqlen_k, num_heads_kv, head_dim)``, v ``(batch,
    seqlen_k, num_heads_kv, head_dim_v)``. softmax_scale, causal, softcap and deterministic are as in
    ``flashtile.attention``, and so are attention_chunk and window_size; window_size may also be a tensor of two, and
    any negative bound is unbounded. The descales ``(batch, num_heads_kv)`` float32, 1 by default, are for q, k and
    v of float8_e4m3fn; out is then bfloat16, without gradient. qv ``(batch, seqlen_q, num_heads_q, head_dim_v)`` are
    queries of the values: scores are of q with k and of qv with v; without gradient. num_splits and pack_gqa have no
    effect; the others must have their defaults.

    Returns:
        out ``(batch, seqlen_q, num_heads_q, head_dim_v)``; with return_attn_probs also lse
        ``(batch, num_heads_q, seqlen_q)`` float32, natural log. No probabilities, as in FlashAttention-3.

    Raises:
        InvalidInputError: Naming the argument.
        UnsupportedError: No backend can run the call, or it asks for what is not supported here.
    """
    _check_features(sm_margin, num_splits, pack_gqa)
    given = _keywords(softmax_scale, causal, (window_size, attention_chunk), softcap, deterministic, return_attn_probs)
    return _qv.attend((q, k, v), qv, (q_descale, k_descale, v_descale), given)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_func`` with q, k and v in one tensor.

    qkv is ``(batch, seqlen, 3, num_heads, head_dim)``; or ``(batch, seqlen, num_heads_q + 2 * num_heads_kv, head_dim)``
    with the heads of q, then k, then v, for which num_heads_q must be given.
    """
    _check_features(sm_margin)
    q, k, v = split_qkv(qkv, num_heads_q)
    given = _keywords(softmax_scale, causal, (window_size, attention_chunk), softcap, deterministic, return_attn_probs)
    with names(q="qkv", k="qkv", v="qkv"):
        return _descaled.attend((q, k, v), (q_descale, k_descale, v_descale), given)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention over sequences packed one after another.

    q is ``(total_q, num_heads_q, head_dim)``, k ``(total_k, num_heads_kv, head_dim)``, v ``(total_k, num_heads_kv,
    head_dim_v)``; cu_seqlens_q and cu_seqlens_k ``(batch + 1,)`` int32: sequence b is rows ``cu_seqlens_q[b]`` to
    ``cu_seqlens_q[b + 1]``. A longest length may be a tensor, which costs a synchronisation on a GPU.

    seqused_q and seqused_k ``(batch,)`` int32 say how many rows of each sequence, from its first, take part; causal
    and window_size then use these lengths. That none exceeds its sequence is checked on the CPU, and on a GPU if
    ``FLASHTILE_CHECK`` is set. All else is as in ``flash_attn_func``.

    Returns:
        out ``(total_q, num_heads_q, head_dim_v)``; with return_attn_probs also lse ``(num_heads_q, total_q)`` float32.
        Rows that take no part: out 0, lse -inf.

    Raises:
        InvalidInputError: Naming the argument.
        UnsupportedError: No backend can run the call, or it asks for what is not supported here.
    """
    _check_features(sm_margin, num_splits, pack_gqa)
    given = _keywords(softmax_scale, causal, (window_size, attention_chunk), softcap, deterministic, return_attn_probs)
    _kvcache.refuse_pages(q, k, v, "flash_attn_with_kvcache has page_table")
    order = None
    if seqused_q is not None:
        order, cu_seqlens_q = used_first("q", q, cu_seqlens_q, seqused_q)
        q, qv = _descaled.chosen(q, order), None if qv is None else _descaled.chosen(tensor("qv", qv), order)
    if seqused_k is not None:
        k, v, cu_seqlens_k = _descaled.keys_used_first(k, v, cu_seqlens_k, seqused_k)
    packed = cu_seqlens_q, cu_seqlens_k, length("max_seqlen_q", max_seqlen_q), length("max_seqlen_k", max_seqlen_k)
    found = _qv.attend((q, k, v), qv, (q_descale, k_descale, v_descale), given, packed)
    if order is None:
        return found
    back = torch.argsort(order)
    if isinstance(found, Tensor):
        return found.index_select(0, back)
    out, lse = found
    return out.index_select(0, back), lse.index_select(1, back)


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merges attention over disjoint sets of keys, the splits, into attention over all of them.

    Args:
        out_partial: ``(splits, batch, seqlen_q, num_heads_q, head_dim_v)``, any float dtype.
        lse_partial: ``(splits, batch, seqlen_q, num_heads_q)``, any float dtype and strides, natural log; -inf for a
                split without keys; out_partial may then hold anything.
        out: ``(batch, seqlen_q, num_heads_q, head_dim_v)`` to write to, or None for a new tensor.
        out_dtype: The dtype of the result; by default out's, or out_partial's.

    Returns:
        out, and lse ``(batch, seqlen_q, num_heads_q)``. Computed in float32 or better.

    Raises:
        InvalidInputError: Naming the argument.

    Source: docs/algorithm.md, "The monoid".
    """
    for name, x in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if not tensor(name, x).dtype.is_floating_point:
            raise InvalidInputError(name, f"dtype is {x.dtype}, must be a float dtype")
    if out_partial.dim() != 5:
        must = "5: (splits, batch, seqlen_q, num_heads_q, head_dim_v)"
        raise InvalidInputError("out_partial", f"has {out_partial.dim()} dimensions, must have {must}")
    rows = out_partial.shape[1:]
    dtype = (out_partial.dtype if out is None else out.dtype) if out_dtype is None else out_dtype
    for name, given, shape in (("lse_partial", lse_partial, out_partial.shape[:-1]), ("out", out, rows)):
        if given is not None and given.shape != shape:
            must = f"{tuple(shape)} to match out_partial"
            raise InvalidInputError(name, f"has shape {tuple(given.shape)}, must be {must}")
    if out is not None and out.dtype != dtype:
        raise InvalidInputError("out", f"dtype is {out.dtype}, but out_dtype is {dtype}")
    wide = torch.promote_types(torch.promote_types(out_partial.dtype, lse_partial.dtype), torch.float32)
    out_partial, lse_partial = out_partial.to(wide), lse_partial.to(wide)
    # In two parts, lse keeps the count of merged splits also if lse is large.
    lse_partial = states.in_parts(lse_partial, torch.zeros_like(lse_partial))
    nothing = out_partial.new_full(rows[:-1], -torch.inf)
    empty = out_partial.new_zeros(rows), states.in_parts(nothing, nothing)
    merged, lse = functools.reduce(lambda a, b: states.merge(*a, *b), zip(out_partial, lse_partial, strict=True), empty)
    return merged.to(dtype) if out is None else out.copy_(merged), states.in_one(lse, merged)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention over caches of keys and values, to which k and v are appended in the same call.

    q is ``(batch, seqlen_q, num_heads_q, head_dim)``, or ``(total_q, num_heads_q, head_dim)`` with cu_seqlens_q;
    k_cache ``(entries, capacity, num_heads_kv, head_dim)`` and v_cache ``(..., head_dim_v)``: sequence b has entry
    ``cache_batch_idx[b]``, or b. With page_table ``(entries, max_pages)`` int32 the caches are ``(pages, page_size,
    num_heads_kv, ...)``, and cache_batch_idx chooses rows of page_table.

    k ``(batch, seqlen_new, num_heads_kv, head_dim)`` and v are new keys, packed with cu_seqlens_k_new. cache_seqlens,
    cache_leftpad, rotary_cos, rotary_sin and rotary_interleaved are as in flash-attn 2's function, see
    ``flash_attn_2.flash_attn_with_kvcache``; rotary_seqlens ``(batch,)`` int32 replaces cache_seqlens in the positions
    at which q and k rotate. scheduler_metadata is what ``get_scheduler_metadata`` returned, or any int32 tensor of one
    dimension. With a q of float8_e4m3fn the caches and k and v are too, and out is bfloat16. The rest, qv and descales
    too, is as in ``flash_attn_func``. Tensors that require grad are used detached.

    Returns:
        out ``(batch, seqlen_q, num_heads_q, head_dim_v)``, or packed like q; with return_softmax_lse ``(out, lse,
        out_accum, lse_accum)``, lse ``(batch, num_heads_q, seqlen_q)``, or ``(num_heads_q, total_q)``, float32, and two
        empty tensors.

    Raises:
        InvalidInputError: Naming the argument.
        UnsupportedError: No backend can run the call, or it asks for what is not supported here.
    """
    _check_features(0, num_splits, pack_gqa)
    integer("sm_margin", sm_margin)
    if scheduler_metadata is not None:
        index_tensor("scheduler_metadata", scheduler_metadata, None, tensor("q", q).device)
    others, descales = (k, v, rotary_cos, rotary_sin), (q_descale, k_descale, v_descale)
    read = _descaled.over_cache(q, (k_cache, v_cache), others, qv, descales, cu_seqlens_q)
    q, k, v, rotary_cos, rotary_sin, finished = read
    found = _kvcache.attend(
        q, k_cache, v_cache, cache_seqlens, window_size, return_softmax_lse,
        **_kvcache.packed((k, v), (cu_seqlens_q, cu_seqlens_k_new), max_seqlen_q, q),
        **_kvcache.places(page_table, cache_batch_idx),
        rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_seqlens=rotary_seqlens,
        rotary_interleaved=rotary_interleaved,
        cache_leftpad=cache_leftpad,
        softmax_scale=softmax_scale,
        causal=causal,
        softcap=softcap,
        attention_chunk=chunk_of(attention_chunk),
        qv=qv,
    )  # fmt: skip
    if not return_softmax_lse:
        return finished(found)
    return finished(found[0]), found[1], found[1].new_empty(0), found[1].new_empty(0)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """For code that calls it before ``flash_attn_with_kvcache``, which needs no plan.

    The arguments describe that call; cache_seqlens is ``(batch,)`` int32. They are checked one by one and have
    no effect.

    Returns:
        ``(1,)`` int32, a zero, on the device of cache_seqlens.

    Raises:
        InvalidInputError: Naming the argument.
    """
    sizes: dict[str, int | None] = {
        "batch_size": batch_size,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    sizes |= {"num_heads_q": num_heads_q, "num_heads_kv": num_heads_kv, "headdim": headdim, "headdim_v": headdim_v}
    sizes |= {"page_size": page_size, "max_seqlen_k_new": max_seqlen_k_new}
    index = {"cache_seqlens": cache_seqlens, "cache_leftpad": cache_leftpad}
    bounds = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new}
    _check_features(0, num_splits, pack_gqa)
    chunk_of(attention_chunk)
    integer("sm_margin", sm_margin)
    flag("has_softcap", has_softcap)
    band_of(causal, window(window_size))
    return _kvcache.metadata(sizes, qkv_dtype, index, bounds)


def _check_features(sm_margin: int, num_splits: int = 1, pack_gqa: Any = None) -> None:
    """Refuses what flashtile does not have."""
    if integer("sm_margin", sm_margin) != 0:
        raise UnsupportedError(f"sm_margin: must be 0, is {sm_margin}: kernels here use all multiprocessors")
    integer("num_splits", num_splits)
    flag("pack_gqa", pack_gqa is not None and pack_gqa)


def _keywords(
    softmax_scale: float | None, causal: bool, bounds: tuple[Window, int], softcap: float, deterministic: bool,
    probs: bool,
) -> dict[str, Any]:  # fmt: skip
    """The keywords of flashtile's own functions; bounds: window_size and attention_chunk."""
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window(bounds[0]),
        "attention_chunk": chunk_of(bounds[1]),
        "softcap": softcap,
        "deterministic": deterministic,
        "return_lse": flag("return_attn_probs", probs),
    }
