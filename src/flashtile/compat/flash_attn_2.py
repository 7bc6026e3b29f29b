"""The functions of flash-attn 2, by its names, defaults, shapes and return arities (version 2.8.4).

Differences, all of them:

- Any head dim, float32 everywhere and float64 on the CPU also run; softcap and dropout also run together.
- lse of a row without keys is -inf (flash-attn: +inf), and gradients flow through lse (flash-attn: none).
- With ``return_attn_probs`` the third value is an empty tensor, as it is there without dropout. With dropout it would
  be a dense ``(seqlen_q, seqlen_k)`` matrix, which flashtile never makes: refused.
- ``block_table`` (paged keys) is refused. ``flash_attn_with_kvcache`` is not here.
- Errors are InvalidInputError (a ValueError) and UnsupportedError (a NotImplementedError, so a RuntimeError).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flashtile.api import attention, attention_varlen
from flashtile.compat._arguments import length, names, refuse, unstack, window
from flashtile.errors import InvalidInputError, UnsupportedError

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]

Window = Sequence[int | None] | Tensor
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

    Args:
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``.
        k: ``(batch, seqlen_k, num_heads_kv, head_dim)``; num_heads_q is a multiple of num_heads_kv.
        v: ``(batch, seqlen_k, num_heads_kv, head_dim)``.
        dropout_p: Probability with which attention probabilities are dropped; give 0 in evaluation.
        softmax_scale: Factor of the scores; ``head_dim ** -0.5`` by default.
        causal: Mask aligned bottom-right: the last query sees the last key.
        window_size: ``(left, right)``, a pair or a tensor of two; any negative bound is unbounded. causal overrides
            the right one.
        softcap: c > 0 caps the scores as ``c * tanh(scores / c)``.
        alibi_slopes: ``(num_heads_q,)`` or ``(batch, num_heads_q)`` float32; adds
            ``-slope * |i + seqlen_k - seqlen_q - j|``.
        deterministic: The backward returns the same bits every time.
        return_attn_probs: Return ``(out, lse, S_dmask)``.

    Returns:
        out ``(batch, seqlen_q, num_heads_q, head_dim)``; with return_attn_probs also lse
        ``(batch, num_heads_q, seqlen_q)`` float32, natural log, and an empty tensor.

    Raises:
        InvalidInputError: Naming the argument.
        UnsupportedError: No backend can, or return_attn_probs together with dropout.
    """
    keywords = _keywords(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return _result(attention(q, k, v, **keywords))


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
    """``flash_attn_func`` with k and v in one tensor.

    Args:
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``.
        kv: ``(batch, seqlen_k, 2, num_heads_kv, head_dim)``.
        dropout_p: As in ``flash_attn_func``, like all that follow.
        softmax_scale: Likewise.
        causal: Likewise.
        window_size: Likewise.
        softcap: Likewise.
        alibi_slopes: Likewise.
        deterministic: Likewise.
        return_attn_probs: Likewise.

    Returns:
        As ``flash_attn_func``.
    """
    k, v = unstack("kv", kv, 2, dim=2)
    keywords = _keywords(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    with names(k="kv", v="kv"):
        return _result(attention(q, k, v, **keywords))


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
    """``flash_attn_func`` with q, k and v in one tensor.

    Args:
        qkv: ``(batch, seqlen, 3, num_heads, head_dim)``.
        dropout_p: As in ``flash_attn_func``, like all that follow.
        softmax_scale: Likewise.
        causal: Likewise.
        window_size: Likewise.
        softcap: Likewise.
        alibi_slopes: Likewise.
        deterministic: Likewise.
        return_attn_probs: Likewise.

    Returns:
        As ``flash_attn_func``.
    """
    q, k, v = unstack("qkv", qkv, 3, dim=2)
    keywords = _keywords(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    with names(q="qkv", k="qkv", v="qkv"):
        return _result(attention(q, k, v, **keywords))


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

    Args:
        q: ``(total_q, num_heads_q, head_dim)``.
        k: ``(total_k, num_heads_kv, head_dim)``.
        v: ``(total_k, num_heads_kv, head_dim)``.
        cu_seqlens_q: ``(batch + 1,)`` int32: sequence b is rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``.
        cu_seqlens_k: ``(batch + 1,)`` int32, the same for k and v.
        max_seqlen_q: The longest query sequence; a tensor on a GPU costs a synchronisation.
        max_seqlen_k: The longest key sequence, likewise.
        dropout_p: As in ``flash_attn_func``, like all that follow.
        softmax_scale: Likewise.
        causal: Likewise, by the lengths of each sequence.
        window_size: Likewise.
        softcap: Likewise.
        alibi_slopes: Likewise.
        deterministic: Likewise.
        return_attn_probs: Likewise.
        block_table: Must be None.

    Returns:
        out ``(total_q, num_heads_q, head_dim)``; with return_attn_probs also lse ``(num_heads_q, total_q)`` float32
        and an empty tensor.

    Raises:
        InvalidInputError: Naming the argument.
        UnsupportedError: No backend can, or block_table, or return_attn_probs together with dropout.
    """
    refuse("block_table", block_table, "paged keys and values are not supported here")
    keywords = _keywords(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    longest = length("max_seqlen_q", max_seqlen_q), length("max_seqlen_k", max_seqlen_k)
    return _result(attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, **keywords))


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
    """``flash_attn_varlen_func`` with k and v in one tensor.

    Args:
        q: ``(total_q, num_heads_q, head_dim)``.
        kv: ``(total_k, 2, num_heads_kv, head_dim)``.
        cu_seqlens_q: As in ``flash_attn_varlen_func``, like all that follow.
        cu_seqlens_k: Likewise.
        max_seqlen_q: Likewise.
        max_seqlen_k: Likewise.
        dropout_p: Likewise.
        softmax_scale: Likewise.
        causal: Likewise.
        window_size: Likewise.
        softcap: Likewise.
        alibi_slopes: Likewise.
        deterministic: Likewise.
        return_attn_probs: Likewise.

    Returns:
        As ``flash_attn_varlen_func``.
    """
    k, v = unstack("kv", kv, 2, dim=1)
    keywords = _keywords(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    longest = length("max_seqlen_q", max_seqlen_q), length("max_seqlen_k", max_seqlen_k)
    with names(k="kv", v="kv"):
        return _result(attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, **keywords))


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
    """``flash_attn_varlen_func`` with q, k and v in one tensor.

    Args:
        qkv: ``(total, 3, num_heads, head_dim)``.
        cu_seqlens: ``(batch + 1,)`` int32: sequence b is rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``.
        max_seqlen: The longest sequence; a tensor on a GPU costs a synchronisation.
        dropout_p: As in ``flash_attn_varlen_func``, like all that follow.
        softmax_scale: Likewise.
        causal: Likewise.
        window_size: Likewise.
        softcap: Likewise.
        alibi_slopes: Likewise.
        deterministic: Likewise.
        return_attn_probs: Likewise.

    Returns:
        As ``flash_attn_varlen_func``.
    """
    q, k, v = unstack("qkv", qkv, 3, dim=1)
    keywords = _keywords(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    longest = length("max_seqlen", max_seqlen)
    with names(q="qkv", k="qkv", v="qkv", **_ONE_LENGTH):
        return _result(attention_varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **keywords))


_ONE_LENGTH = {
    "cu_seqlens_q": "cu_seqlens",
    "cu_seqlens_k": "cu_seqlens",
    "max_seqlen_q": "max_seqlen",
    "max_seqlen_k": "max_seqlen",
}


def _keywords(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
) -> dict[str, Any]:
    """The keywords of flashtile's own functions."""
    if not isinstance(return_attn_probs, bool):
        raise InvalidInputError("return_attn_probs", f"is {return_attn_probs!r}, must be True or False")
    if return_attn_probs and isinstance(dropout_p, (int, float)) and 0 < dropout_p < 1:
        raise UnsupportedError(
            "return_attn_probs: with dropout it asks for the dense (seqlen_q, seqlen_k) matrix, which is never made; "
            "flashtile.attention(..., return_lse=True) returns lse with dropout"
        )
    return {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window(window_size),
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
        "return_lse": return_attn_probs,
    }


def _result(returned: Tensor | tuple[Tensor, Tensor]) -> Result:
    """The output alone, or out, lse and an empty S_dmask."""
    if isinstance(returned, Tensor):
        return returned
    out, lse = returned
    return out, lse, out.new_empty(0)
