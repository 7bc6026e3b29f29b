"""The functions of FlashAttention-3's module ``flash_attn_interface``, by its names, defaults, shapes and returns.

``num_splits`` and ``pack_gqa`` choose among FlashAttention-3's kernels and say nothing about the result. Every value is
accepted and none has an effect: a result does not depend on how a GPU is filled.

Differences, all of them:

- Any head dims run, also of v alone, and so do float32 everywhere and float64 on the CPU.
- Gradients flow through lse and through ``flash_attn_combine`` (FlashAttention-3: none).
- ``seqused_q`` and ``seqused_k`` cost a copy of q, or of k and v. Rows of q past ``seqused_q`` have out 0 and lse -inf
  (FlashAttention-3 leaves them unwritten), and rows past a used length have gradients 0.
- Refused: ``qv``, ``q_descale``, ``k_descale``, ``v_descale``, ``attention_chunk`` and ``sm_margin`` with any value but
  their default; float8 tensors; every call of ``flash_attn_with_kvcache`` and ``get_scheduler_metadata``.
- Errors are InvalidInputError (a ValueError) and UnsupportedError (a NotImplementedError, so a RuntimeError).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flashtile import settings, states
from flashtile.api import attention, attention_varlen
from flashtile.compat._arguments import Window, flag, integer, length, names, refuse, split_qkv, tensor, window
from flashtile.errors import InvalidInputError, UnsupportedError

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
    ``flashtile.attention``; so is window_size, which may also be a tensor of two, and any negative bound of which is
    unbounded. num_splits and pack_gqa have no effect; the other arguments must have their defaults.

    Returns:
        out ``(batch, seqlen_q, num_heads_q, head_dim_v)``; with return_attn_probs also lse
        ``(batch, num_heads_q, seqlen_q)`` float32, natural log. No probabilities, as in FlashAttention-3.

    Raises:
        InvalidInputError: Naming the argument.
        UnsupportedError: No backend can run the call, or it asks for what is not supported here.
    """
    _check_features((qv, q_descale, k_descale, v_descale), attention_chunk, sm_margin, num_splits, pack_gqa)
    keywords = _keywords(softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs)
    return attention(q, k, v, **keywords)


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
    _check_features((None, q_descale, k_descale, v_descale), attention_chunk, sm_margin)
    q, k, v = split_qkv(qkv, num_heads_q)
    keywords = _keywords(softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs)
    with names(q="qkv", k="qkv", v="qkv"):
        return attention(q, k, v, **keywords)


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
    _check_features((qv, q_descale, k_descale, v_descale), attention_chunk, sm_margin, num_splits, pack_gqa)
    keywords = _keywords(softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs)
    order = None
    if seqused_q is not None:
        order, cu_seqlens_q = _used_first("q", q, cu_seqlens_q, seqused_q)
        q = q.index_select(0, order)
    if seqused_k is not None:
        order_k, cu_seqlens_k = _used_first("k", k, cu_seqlens_k, seqused_k)
        if tensor("v", v).shape[0] != k.shape[0]:
            raise InvalidInputError("v", f"total_k is {v.shape[0]}, but k has {k.shape[0]}")
        k, v = k.index_select(0, order_k), v.index_select(0, order_k)
    longest = length("max_seqlen_q", max_seqlen_q), length("max_seqlen_k", max_seqlen_k)
    found = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, **keywords)
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
            split without keys, whose out_partial may hold anything.
        out: ``(batch, seqlen_q, num_heads_q, head_dim_v)`` to write to, or None for a new tensor.
        out_dtype: The dtype of the result; by default that of out, or of out_partial.

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
    empty = out_partial.new_zeros(rows, dtype=wide), out_partial.new_full(rows[:-1], -torch.inf, dtype=wide)
    splits = zip(out_partial.to(wide), lse_partial.to(wide), strict=True)
    merged, lse = functools.reduce(lambda a, b: states.merge(*a, *b), splits, empty)
    return merged.to(dtype) if out is None else out.copy_(merged), lse


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
) -> Result:
    """Exists for code that imports it.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError("flash_attn_with_kvcache: attention over a cache of keys and values is not supported")


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
    """Exists for code that imports it.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError("get_scheduler_metadata: it plans flash_attn_with_kvcache, which is not supported")


def _check_features(
    extra: tuple[Tensor | None, ...], attention_chunk: int, sm_margin: int, num_splits: int = 1, pack_gqa: Any = None
) -> None:
    """Refuses what flashtile does not have; ``extra`` is qv and the descales of q, k and v."""
    refuse("qv", extra[0], "a second product, of these with the values, is not supported here")
    for name, descale in zip(("q_descale", "k_descale", "v_descale"), extra[1:], strict=True):
        refuse(name, descale, "float8 and its scales are not supported here")
    if integer("attention_chunk", attention_chunk) != 0:
        raise UnsupportedError(
            f"attention_chunk: must be 0 (none), is {attention_chunk}: chunks are not supported here"
        )
    if integer("sm_margin", sm_margin) != 0:
        raise UnsupportedError(f"sm_margin: must be 0, is {sm_margin}: kernels here use all multiprocessors")
    integer("num_splits", num_splits)
    if pack_gqa is not None:
        flag("pack_gqa", pack_gqa)


def _keywords(
    softmax_scale: float | None, causal: bool, window_size: Window, softcap: float, deterministic: bool, probs: bool
) -> dict[str, Any]:
    """The keywords of flashtile's own functions."""
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window(window_size),
        "softcap": softcap,
        "deterministic": deterministic,
        "return_lse": flag("return_attn_probs", probs),
    }


def _used_first(side: str, x: Tensor, cu_seqlens: Tensor, seqused: Tensor) -> tuple[Tensor, Tensor]:
    """Where only some rows of each sequence are used: the order that packs these first, and their cu_seqlens.

    The others follow and belong to no sequence. Nothing is read from the device, so shapes do not depend on the data.
    """
    rows = torch.arange(tensor(side, x).shape[0], device=x.device)
    outer, name = f"cu_seqlens_{side}", f"seqused_{side}"
    bounds = tensor(outer, cu_seqlens)
    if bounds.dim() != 1 or not bounds.shape[0] or bounds.dtype != torch.int32 or bounds.device != x.device:
        raise InvalidInputError(outer, f"{_described(bounds)}, must be int32 (batch + 1,) on {x.device}")
    must = (bounds.shape[0] - 1,)
    ok = tensor(name, seqused).shape == must and seqused.dtype in (torch.int32, torch.int64)
    if not ok or seqused.device != x.device:
        raise InvalidInputError(name, f"{_described(seqused)}, must be int32 {must} on {x.device} as {outer} has it")
    if (x.device.type == "cpu" or settings.CHECK.enabled()) and not torch.compiler.is_compiling():
        starts, total = bounds.tolist(), rows.shape[0]
        if starts[0] != 0 or starts[-1] > total:
            found = f"starts with {starts[0]} and ends with {starts[-1]}"
            raise InvalidInputError(outer, f"{found}, must start with 0 and end with at most {total}")
        for b, (used, held) in enumerate(zip(seqused.tolist(), bounds.diff().tolist(), strict=True)):
            if not 0 <= used <= held:
                raise InvalidInputError(name, f"is {used} for sequence {b}, which has {held} rows")
    bounds = bounds.to(torch.int64)
    sequence = torch.searchsorted(bounds[1:], rows, right=True)
    limit = torch.nn.functional.pad(seqused, (0, 1))  # 0 for the rows of no sequence
    unused = rows - bounds[sequence] >= limit[sequence]
    packed = torch.nn.functional.pad(seqused.cumsum(0), (1, 0)).to(torch.int32)
    return torch.argsort(unused, stable=True), packed


def _described(x: Tensor) -> str:
    return f"is {x.dtype} {tuple(x.shape)} on {x.device}"
