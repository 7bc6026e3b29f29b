"""``attention_with_kvcache``, the public function."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from flashtile.api.keywords import CacheKeywords, counter_of, intervals_of, with_functions
from flashtile.call import arguments, latent
from flashtile.call.arguments import check_tensor
from flashtile.call.cached_arguments import CacheTensors, read, tree_words
from flashtile.call.cached_problem import check_apart, check_length, problem_of
from flashtile.call.prepared import autocast, autocast_is_on
from flashtile.call.selected import Selected
from flashtile.core.errors import InvalidInputError, shown
from flashtile.core.states import asked_for
from flashtile.masks import Intervals
from flashtile.ops import cached as ops
from flashtile.ops import selected as of_selected


@overload
def attention_with_kvcache(
    q: Tensor | tuple[Tensor, Tensor], k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor | int,
    return_lse: Literal[False] = False, return_max_scores: Literal[False] = False, **others: Unpack[CacheKeywords],
) -> Tensor: ...  # fmt: skip
@overload
def attention_with_kvcache(
    q: Tensor | tuple[Tensor, Tensor], k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor | int,
    return_lse: Literal[True], return_max_scores: Literal[False] = False, **others: Unpack[CacheKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_with_kvcache(
    q: Tensor | tuple[Tensor, Tensor], k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor | int,
    return_lse: bool, return_max_scores: Literal[False] = False, **others: Unpack[CacheKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_with_kvcache(
    q: Tensor | tuple[Tensor, Tensor], k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor | int,
    return_lse: Literal[False] = False, return_max_scores: Literal[True], **others: Unpack[CacheKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_with_kvcache(
    q: Tensor | tuple[Tensor, Tensor], k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor | int,
    return_lse: Literal[True], return_max_scores: Literal[True], **others: Unpack[CacheKeywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_with_kvcache(
    q: Tensor | tuple[Tensor, Tensor], k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor | int,
    return_lse: bool, return_max_scores: bool, **others: Unpack[CacheKeywords],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
def attention_with_kvcache(
    q: Tensor | tuple[Tensor, Tensor],
    k_cache: Tensor,
    v_cache: Tensor,
    *_more: Any,
    cache_seqlens: Tensor | int,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_seqlens: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool | Tensor = True,
    window_size: Sequence[int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    page_indptr: Tensor | None = None,
    page_indices: Tensor | None = None,
    max_seqlen_k: int | None = None,
    attention_chunk: int | None = None,
    qv: Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: Intervals | None = None,
    batch_invariant: bool | Literal["strict"] = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
    return_max_scores: bool = False,
    selected: Tensor | None = None,
    selected_slots: Tensor | None = None,
    **_unknown: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Attention of new queries over keys and values in a cache, which may be in pages, with new keys appended first.

    Each sequence attends to its own keys. With L its length in the cache, new keys included, and seqlen_q its queries,
    row i is aligned with key ``i + L - seqlen_q``: the last query with the last key. What lies before cache_leftpad or
    from L on is never read into a result, whatever it holds. Lengths of 0 are allowed anywhere. No gradient.

    Args:
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``, or packed ``(total_q, num_heads_q, head_dim)`` with
            cu_seqlens_q; float16, bfloat16, float32, or float64 on the CPU. It is not changed. Or (q_nope, q_pe), where
            values are columns of keys: see v_cache.
        k_cache: ``(entries, capacity, num_heads_kv, head_dim)``, or with page_table ``(pages, page_size, num_heads_kv,
            head_dim)``; q's dtype, float8_e4m3fn or float8_e5m2. Never copied: its last dimension must be contiguous,
            other strides are free, so that K and V may be views of one tensor, or heads lie before positions.
        v_cache: The same with head_dim_v, in k_cache's dtype. If it is ``k_cache[..., :head_dim_v]``, as address and
            strides say (MLA: head_dim 576, head_dim_v 512), each row is read once, and q may be its first head_dim_v
            columns and the others as two tensors. Rows of 576 columns may be the 656 bytes of ``serving.latent_rows``.
        cache_seqlens: ``(batch,)`` int32: the keys of each sequence in the cache before appending; an int for all.
        page_table: ``(batch, max_pages)`` int32: key j of sequence b is row ``j % page_size`` of page
            ``page_table[b, j // page_size]``. What stands past a sequence's last page is not used.
        cache_batch_idx: ``(batch,)`` int32: the entry of each sequence, b by default. Not with page_table.
        cache_leftpad: ``(batch,)`` int32: the first key that each sequence sees, 0 by default.
        k: New keys, ``(batch, seqlen_new, num_heads_kv, head_dim)`` in q's dtype, or packed ``(total_new, ...)`` with
            cu_seqlens_k_new; written into k_cache at positions from cache_seqlens on, then attended to.
        v: New values, the same with head_dim_v. Left out where v_cache is the first columns of k_cache: k has them.
        rotary_cos: ``(seqlen_rotary, rotary_dim / 2)`` in float32 or q's dtype: rotates the new keys and the queries;
            the features from rotary_dim on are unchanged. In float32, rounded to q's dtype. Goes with k.
        rotary_sin: Like rotary_cos.
        rotary_interleaved: Rotates pairs of features (2i, 2i + 1); otherwise ``(i, i + rotary_dim / 2)``.
        rotary_seqlens: ``(batch,)`` int32: the position of the first new key and the first query in rotary_cos,
            cache_seqlens by default. Later ones follow; if neither causal nor windowed, all queries are at the first.
        k_scale: ``(num_heads_kv,)`` or ``(entries, num_heads_kv)``, with page_table ``(pages, num_heads_kv)``; float32:
            a float8 cache holds keys divided by it; 1 by default. New keys are divided and saturated to 448, in e5m2
            to 57344. Or a number for all.
        v_scale: The same for values.
        cu_seqlens_q: ``(batch + 1,)`` int32: sequence b has rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q.
            Rows past the last bound belong to no sequence: out 0, lse -inf.
        cu_seqlens_k_new: The same for k and v; cu_seqlens_q by default.
        max_seqlen_q: The most queries that a packed sequence has, if known; total_q by default.
        causal: Row i sees keys ``j <= i + L - seqlen_q``; a ``(batch,)`` bool tensor says it of each sequence.
        window_size: ``(left, right)``: row i sees ``i + L - seqlen_q - left <= j <= i + L - seqlen_q + right``, ends
            inclusive; -1 or None leaves a side unbounded. ``causal`` overrides the right bound.
        softmax_scale: Factor of the scores; ``head_dim ** -0.5`` by default.
        softcap: c > 0 replaces the scaled scores by ``c * tanh(scores / c)``.
        alibi_slopes: ``(num_heads_q,)`` or ``(batch, num_heads_q)`` float32; adds ``-slope * |i + L - seqlen_q - j|``.
        sinks: ``(num_heads_q,)``: a logit per head that joins each row's denominator, without a value.
        tree_mask: ``(batch, T, T)`` bool or ``(batch, T)`` int64 with bit u for key u, T up to 64: the T queries are
            a tree of drafts and have the last T keys. A row sees all keys before these and, of these, the keys that it
            marks: its ancestors' and its own; rotary, windows and ALiBi go by depth, the number of ancestors. For n < T
            packed queries the first n rows and columns count; more than T are no tree. Goes with causal.
        slot_mapping: Like k without heads, ``(batch, seqlen_new)`` or packed ``(total_new,)``, int64 or int32: the slot
            at which each new key and value is written, in place of its position: row ``slot % page_size`` of page
            ``slot // page_size``, without pages of an entry; -1 writes nothing. Goes with k. What is attended to is
            as without it, keys 0 to L - 1 where page_table has them; so a key that was written elsewhere, or not at
            all, is whatever the cache holds at its position.
        page_indptr: ``(batch + 1,)`` int32, in place of page_table: key j of sequence b is row ``j % page_size`` of
            page ``page_indices[page_indptr[b] + j // page_size]``.
        page_indices: ``(total_pages,)`` int32, which may be more than ``page_indptr[-1]``.
        max_seqlen_k: With page_indptr, the most keys that a sequence may have, new ones included; more are not seen. By
            default ``total_pages * page_size``: the workspace has room for the splits of so many keys of each sequence,
            and tiles are chosen for them.
        attention_chunk: c > 0: a row sees the keys of its own chunk alone, ``floor(p / c) * c <= j < floor(p / c) * c +
            c`` with ``p = i + L - seqlen_q``, both counted from cache_leftpad on; 0 or None for no chunks. Not with
            tree_mask.
        qv: Like q with head_dim_v: the scores are ``softmax_scale * (q @ k^T + qv @ v^T)``, and softmax_scale is
            ``(head_dim + head_dim_v) ** -0.5`` by default. FlashAttention-3's argument.
        score_mod: As of ``attention``: q_idx counts from the sequence's first query of this call, kv_idx from its first
            key after cache_leftpad. Nothing that it captures has a gradient. Not with tree_mask.
        mask_mod: Likewise.
        block_mask: Intervals, as of ``attention``, counted likewise; its keys are the first, and those after its last
            are dropped where it is by columns. All keys are read. No lists.
        batch_invariant: A row's bits depend on its query, its keys and its position alone: not on other sequences,
            max_seqlen_q, pages or processors, nor on how a prompt was cut into chunks of more than ``max(16 //
            group_size, 1)`` rows. "strict": nor into any others, so that decodes have the bits of prompts; then no keys
            are split, which takes time where sequences are few. On the CPU both are strict.
        return_lse: Also return the log-sum-exp of the scores.
        out: Where to write the output, in place of a new tensor: its shape, q's dtype, last dimension contiguous.
        backend: The backend to use, or an error with its reasons if it cannot; None takes the first that can.
        return_max_scores: Also return the largest score that each row keeps, as of ``attention``.
        selected: ``(batch, seqlen_q, most)``, packed ``(total_q, most)``, int32: the positions of its sequence that
            each query sees, in place of all before L. -1, or any negative number, is none; positions at or past L
            are ignored, and causal and window_size cut further. Positions of one list must differ, which is checked on
            CPUs and with ``FLASHTILE_CHECK``. A page, or an entry, must begin a whole number of rows after the one
            before. Not with k, alibi_slopes, tree_mask, attention_chunk, block_mask, functions or scales by page.
        selected_slots: The same, but names rows of the cache, as FlashMLA's ``indices`` do: row ``slot % page_size``
            of page ``slot // page_size``, without pages of an entry; a slot past the last is none too. Lengths,
            page tables and causal do not apply to slots, and windows, cache_batch_idx and cache_leftpad are refused.

    Returns:
        out ``(batch, seqlen_q, num_heads_q, head_dim_v)``, packed ``(total_q, num_heads_q, head_dim_v)``, in q's dtype;
        or ``(out, lse)`` with lse ``(batch, num_heads_q, seqlen_q)``, packed ``(num_heads_q, total_q)``, float32
        (float64 for float64), natural log, sinks included. A row without keys has out 0 and lse -inf, or the sink. With
        return_max_scores a tensor like lse is the last result, -inf for a row without keys.

    Raises:
        InvalidInputError: A ValueError that names the argument.
        UnsupportedError: No backend can run the call; lists the reasons of each.

    Source: Dao et al. 2022, arXiv:2205.14135; Kwon et al. 2023, arXiv:2309.06180 (pages); DeepSeek-V3.2,
    2025 (selected).
    """
    counted_by = counter_of("attention_with_kvcache", _more, _unknown) if _more or _unknown else ""
    of_all, of_each = causality(causal)
    row_keys, key_rows, mirrored = (None, None, False) if block_mask is None else intervals_of(block_mask)
    plain = (
        max_seqlen_q, max_seqlen_k, softmax_scale, softcap, rotary_interleaved, backend, attention_chunk, mirrored,
        return_max_scores, batch_invariant,
    )  # fmt: skip
    options = read(of_all, window_size, return_lse, plain)
    options = options._replace(counted_by=counted_by) if counted_by else options
    tensors = CacheTensors(
        out, q, k_cache, v_cache, cache_seqlens, page_table, cache_batch_idx, cache_leftpad, k, v, rotary_cos,  # type: ignore[arg-type]
        rotary_sin, rotary_seqlens, k_scale, v_scale, cu_seqlens_q, cu_seqlens_k_new, alibi_slopes, sinks,  # type: ignore[arg-type]
        tree_mask, slot_mapping, of_each, page_indptr, page_indices, qv, row_keys, key_rows,
    )  # fmt: skip
    if score_mod is not None or mask_mod is not None:
        options = with_functions(tensors, score_mod, mask_mod, softcap).options(options, 0)
    tensors = completed(tensors)
    if k_cache is v_cache and k is not None and not k_cache.is_meta:
        problem_of(tensors, options)
        check_apart(tensors)
    wants_more = return_lse or return_max_scores
    if selected is None and selected_slots is None:
        lse = ops.attend(tensors, options)
    else:
        lse = of_selected.attend(tensors, options, Selected(selected, selected_slots), wants_more)
    return asked_for(tensors.out, lse, return_lse, return_max_scores) if wants_more else tensors.out


def causality(causal: Any) -> tuple[Any, Tensor | None]:
    """What is so for all sequences, and a tensor that says it of each."""
    return (False, causal) if isinstance(causal, Tensor) else (causal, None)


def completed(t: CacheTensors) -> CacheTensors:
    """A record of a call with what its caller left out: out, bounds and values of new keys, numbers as tensors."""
    k_cache = t.k_cache
    if isinstance(k_cache, Tensor) and k_cache.shape[-1:] == (latent.ROW_BYTES,) and latent.has_eight_bit_rows(t):
        t = latent.of_eight_bit_rows(t)
    elif not isinstance(t.q, Tensor):
        t = latent.split_queries(t, t.q)
    if autocast_is_on():
        check_tensor("q", t.q)
        t = autocast(t, t.q.device.type)
    if t.k is not None and t.cu_seqlens_k_new is None:
        t.cu_seqlens_k_new = t.cu_seqlens_q
    if t.k is not None and isinstance(t.k_cache, Tensor) and isinstance(t.v_cache, Tensor):
        latent.complete_values(t)
    if t.tree_mask is not None:
        t.tree_mask = tree_words("tree_mask", t.tree_mask)
    if t.out is None:
        t.out = _empty_out(t.q, t.v_cache)
    number = t.k_scale
    for name, scale in (("k_scale", t.k_scale), ("v_scale", t.v_scale)):
        if scale is not None and type(scale) is not Tensor and not isinstance(scale, Tensor):
            # Latent rows have one scale for keys and values where that is one tensor.
            is_same = name == "v_scale" and type(number) is type(scale) and number == scale
            setattr(t, name, t.k_scale if is_same else _one_scale(name, scale, t.k_cache))
    length: Any = t.cache_seqlens
    # isinstance alone would take longer than making the record.
    if type(length) is Tensor or isinstance(length, Tensor):
        ops.CACHED.check_types(t)
    else:
        t.cache_seqlens = _filled(length, t.q, t.cu_seqlens_q)
        ops.CACHED.check_types(t)
        check_length(t, length)
    return t


def _empty_out(q: Tensor, v_cache: Tensor) -> Tensor:
    for name, x in (("q", q), ("v_cache", v_cache)):
        if type(x) is not Tensor or x.is_nested or x.layout is not torch.strided:
            check_tensor(name, x)
    if not torch.compiler.is_compiling() and q.is_contiguous() and q.shape[-1:] == v_cache.shape[-1:]:
        return torch.empty_like(q)
    # Slices, so that tensors of too few dimensions are refused by name.
    return q.new_empty((*q.shape[:-1], *v_cache.shape[-1:]))


def _one_scale(name: str, scale: object, k_cache: Tensor) -> Tensor:
    """k_scale or v_scale of one number for all heads."""
    if not isinstance(scale, (numbers.Real, torch.SymFloat)) or arguments.finite(name, scale) <= 0:
        raise InvalidInputError(name, f"is {shown(scale)}, must be a float32 tensor or a number above 0")
    check_tensor("k_cache", k_cache)
    return torch.full(k_cache.shape[-2:-1], arguments.finite(name, scale), dtype=torch.float32, device=k_cache.device)


def _filled(length: int, q: Tensor, bounds: Tensor | None) -> Tensor:
    """cache_seqlens of one number for all sequences."""
    if isinstance(length, bool) or not isinstance(length, (numbers.Integral, torch.SymInt)):
        raise InvalidInputError(
            "cache_seqlens", f"is of type {type(length).__name__}, must be int32 (batch,) or an int"
        )
    if not isinstance(length, torch.SymInt):
        length = arguments.integer("cache_seqlens", length, 0)
    if torch.compiler.is_compiling():
        torch._check(
            length >= 0
        )  # of a number that depends on data: in a tensor it would say that there is no sequence
    check_tensor("q", q)
    if bounds is not None:
        check_tensor("cu_seqlens_q", bounds)
    sequences = q.shape[:1] if bounds is None else (bounds.numel() - 1,)
    return torch.full(sequences, length, dtype=torch.int32, device=q.device)
