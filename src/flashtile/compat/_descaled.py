"""FlashAttention-3's calls with 8-bit tensors and descales, as calls with a ``Quantized``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.api.attention import attention, attention_varlen
from flashtile.call.quantized import Quantized
from flashtile.compat._arguments import tensor, used_first
from flashtile.compat._kvcache import without_backward
from flashtile.core.errors import InvalidInputError, UnsupportedError
from flashtile.core.sizes import differ

_NAMES = ("q_descale", "k_descale", "v_descale")


def attend(
    qkv: tuple[Tensor, ...],
    descales: tuple[Tensor | None, ...],
    keywords: dict[str, Any],
    packed: tuple[Any, ...] = (),
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over q, k and v. Tensors of float8_e4m3fn are multiplied by their descales; out is then bfloat16.

    Args:
        qkv: q, k and v.
        descales: Descales of q, k and v, ``(batch, num_heads_kv)`` float32; None is 1.
        keywords: Keywords of ``flashtile.attention``.
        packed: For packed sequences cu_seqlens_q, cu_seqlens_k and the longest lengths.

    Raises:
        InvalidInputError: Names the argument, such as a descale if q does not have 8 bits.
    """
    q, k, v = qkv
    bounds = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), packed, strict=False))
    if tensor("q", q).dtype != torch.float8_e4m3fn:
        refuse_descales(q, descales)
        return attention_varlen(q, k, v, *packed, **keywords) if packed else attention(q, k, v, **keywords)
    call: Callable[..., Any] = attention_varlen if packed else attention
    given = keywords | {"return_lse": True}
    with torch.no_grad():
        if keywords["attention_chunk"]:
            wide, finished = widened(q, tensor("k", k), descales, packed[0] if packed else None)
            out, lse = call(wide, *(eight_bits(n, x).to(wide.dtype) for n, x in (("k", k), ("v", v))), *packed, **given)
            out = finished(out)
        else:
            out, lse = call(Quantized.from_fp8(q, k, v, *descales, **bounds), **given)
    out, lse = without_backward("q: attention of 8 bits", out, lse, qkv)
    return (out, lse) if keywords["return_lse"] else out


def over_cache(
    q: Any,
    caches: tuple[Any, Any],
    others: tuple[Any, ...],
    qv: Tensor | None,
    descales: tuple[Tensor | None, ...],
    cu_seqlens_q: Tensor | None,
) -> tuple[Any, ...]:
    """(q, k, v, cos, sin, a function from the caches' out to the call's out), in bfloat16 if q has 8 bits.

    ``others`` are new keys, new values, and the two tables of rotary embeddings, or None. The caches stay as they are.
    """
    if tensor("q", q).dtype != torch.float8_e4m3fn:
        refuse_descales(q, descales)
        return q, *others, lambda out: out
    if qv is not None:
        raise UnsupportedError("qv: is given with a float8_e4m3fn q, with which it does not go")
    k_cache, _ = (eight_bits(name, x) for name, x in zip(("k_cache", "v_cache"), caches, strict=True))
    wide, finished = widened(q, k_cache, descales, cu_seqlens_q)
    k, v, *tables = others
    new = (None if x is None else eight_bits(name, x).to(wide.dtype) for name, x in (("k", k), ("v", v)))
    return wide, *new, *(x.to(wide.dtype) if isinstance(x, Tensor) else x for x in tables), finished


def refuse_descales(q: Tensor, descales: tuple[Tensor | None, ...]) -> None:
    """Raises ``InvalidInputError`` for a descale if q does not have 8 bits."""
    for name, descale in zip(_NAMES, descales, strict=True):
        if descale is not None:
            scale = f"{name[0]}_scale"  # a cache may have 8-bit keys or values while q has 16 bits
            of_cache = "" if name == "q_descale" else f": flashtile.attention_with_kvcache has {scale} for 8-bit caches"
            raise InvalidInputError(name, f"is given, but goes with a float8_e4m3fn q; q has {q.dtype}{of_cache}")


def eight_bits(name: str, x: Any) -> Tensor:
    """The tensor, which must be float8_e4m3fn like q."""
    if tensor(name, x).dtype != torch.float8_e4m3fn:
        raise InvalidInputError(name, f"dtype is {x.dtype}, but q's is torch.float8_e4m3fn")
    return x


def widened(
    q: Tensor, k: Tensor, descales: tuple[Tensor | None, ...], cu_seqlens_q: Tensor | None = None
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """(q in bfloat16, a function from out over unscaled values to the call's out).

    q is multiplied by its descale and the keys' descale, and rounded once more. bfloat16 can hold all 8-bit numbers.
    """
    num_heads_kv = k.shape[-2] if k.dim() > 1 else 0
    shape = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1, num_heads_kv
    for name, x in zip(_NAMES, descales, strict=True):
        if x is not None and (differ(tensor(name, x).shape, shape) or x.dtype != torch.float32 or x.device != q.device):
            found = f"{tuple(x.shape)} {x.dtype} on {x.device}"
            raise InvalidInputError(name, f"is {found}, must be (batch, num_heads_kv) = {shape} float32 on {q.device}")
    of_q, of_k, of_v = descales
    of_scores = of_q if of_k is None else of_k if of_q is None else of_q * of_k

    def times(x: Tensor, factor: Tensor | None) -> Tensor:
        if factor is None:
            return x.to(torch.bfloat16)
        factor = factor.repeat_interleave(x.shape[-2] // max(num_heads_kv, 1), 1)[..., None]
        if cu_seqlens_q is None:
            return (x.float() * factor[:, None]).to(torch.bfloat16)
        # Rows past the last sequence use its factor.
        rows = torch.arange(x.shape[0], dtype=cu_seqlens_q.dtype, device=x.device)
        sequences = torch.searchsorted(cu_seqlens_q[1:-1].contiguous(), rows, right=True)
        return (x.float() * factor[sequences]).to(torch.bfloat16)

    return times(q, of_scores), lambda out: times(out, of_v)


def chosen(x: Tensor, order: Tensor) -> Tensor:
    """Rows of a tensor, which may have 8 bits."""
    if x.element_size() > 1:
        return x.index_select(0, order)
    return x.view(torch.uint8).index_select(0, order).view(x.dtype)


def keys_used_first(k: Tensor, v: Tensor, cu_seqlens_k: Tensor, seqused_k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k, v and cu_seqlens_k of packed sequences with the keys that take part, the first of each sequence, alone."""
    order, bounds = used_first("k", k, cu_seqlens_k, seqused_k)
    if tensor("v", v).shape[0] != k.shape[0]:
        raise InvalidInputError("v", f"total_k is {v.shape[0]}, but k has {k.shape[0]}")
    return chosen(k, order), chosen(v, order), bounds
