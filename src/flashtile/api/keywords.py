"""The keywords of the public functions as types, for the overloads by ``return_lse`` and for what takes any call's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from torch import Tensor

from flashtile.core.errors import shown

# What other libraries call a keyword -> what it is called here.
_ELSEWHERE = {
    "is_causal": "causal, aligned with the last key and not the first", "scale": "softmax_scale",
    "sm_scale": "softmax_scale", "dropout": "dropout_p", "mask": "attn_mask (True keeps) or attn_bias (added)",
    "block_table": "page_table", "key_padding_mask": "attn_mask=valid[:, None, None, :], where True keeps",
}  # fmt: skip


class Common(TypedDict, total=False):
    """Keywords of every call, but ``return_lse``."""

    causal: bool
    window_size: Sequence[int | None] | None
    softmax_scale: float | None
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    backend: str | None


class Keywords(Common, total=False):
    """Keywords of ``attention`` and ``attention_varlen``."""

    attn_mask: Tensor | None
    attn_bias: Tensor | None
    dropout_p: float
    deterministic: bool
    precision: str | None


class Cached(TypedDict, total=False):
    """Keywords of ``attention_with_kvcache`` that no other call has."""

    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    rotary_seqlens: Tensor | None
    k_scale: Tensor | float | None
    v_scale: Tensor | float | None
    cu_seqlens_k_new: Tensor | None
    out: Tensor | None


class CacheKeywords(Common, Cached, total=False):
    """Keywords of ``attention_with_kvcache`` but ``cache_seqlens``."""

    k: Tensor | None
    v: Tensor | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None


class CachedCall(Cached, total=False):
    """What ``explain`` and ``warm_up`` take besides for a call over a cache."""

    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor | int


def refused(function: str, more: tuple[object, ...], unknown: dict[str, object]) -> TypeError:
    """The error of a call with more positions than a function has, or with keywords that it does not know."""
    if more:
        first = "cache_seqlens" if function.endswith("kvcache") else "causal"
        return TypeError(f"{function}() got {shown(more[0])} as a position too many: give {first} and the rest by name")
    name = next(iter(unknown))
    hint = f": it is called {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
