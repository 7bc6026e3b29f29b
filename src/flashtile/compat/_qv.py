"""FlashAttention-3's calls with ``qv`` and without a cache, as calls over a cache with keys as its entries or pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.api.attention import attention_with_kvcache
from flashtile.compat import _descaled
from flashtile.compat._arguments import names, tensor
from flashtile.compat._kvcache import without_backward
from flashtile.core.errors import UnsupportedError


def attend(
    qkv: tuple[Tensor, ...],
    qv: Tensor | None,
    descales: tuple[Tensor | None, ...],
    keywords: dict[str, Any],
    packed: tuple[Any, ...] = (),
) -> Tensor | tuple[Tensor, Tensor]:
    """As ``_descaled.attend``. With queries ``qv`` of the values there is no gradient: asking for one is an error.

    Raises:
        InvalidInputError: Naming the argument.
        UnsupportedError: A descale is given.
    """
    if qv is None:
        return _descaled.attend(qkv, descales, keywords, packed)
    q, k, v = (tensor(name, x) for name, x in zip("qkv", qkv, strict=True))
    for name, descale in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if descale is not None:
            raise UnsupportedError(f"{name}: is given with qv, which does not go with 8 bits")
    given = {name: x for name, x in keywords.items() if name not in ("deterministic", "return_lse")}
    places: dict[str, Any] = {"cache_seqlens": k.shape[1] if k.dim() == 4 else 0}
    if packed:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packed
        places = {
            "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "cache_seqlens": cu_seqlens_k.diff(),
            "page_indptr": cu_seqlens_k, "max_seqlen_k": max_seqlen_k,
            "page_indices": torch.arange(k.shape[0], dtype=torch.int32, device=k.device),
        }  # fmt: skip
        k, v = k.unsqueeze(1), v.unsqueeze(1)
    with torch.no_grad(), names(k_cache="k", v_cache="v", cache_seqlens="cu_seqlens_k", page_indptr="cu_seqlens_k"):
        out, lse = attention_with_kvcache(q, k, v, qv=qv, return_lse=True, **places, **given)
    out, lse = without_backward("qv: attention over a cache", out, lse, (*qkv, qv))
    return (out, lse) if keywords["return_lse"] else out
