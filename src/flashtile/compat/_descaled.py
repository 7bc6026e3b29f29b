"""FlashAttention-3's calls of 8-bit tensors with descales, as calls of a ``Quantized``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.api.attention import attention, attention_varlen
from flashtile.call.quantized import Quantized
from flashtile.compat._arguments import tensor
from flashtile.core.errors import InvalidInputError

_NAMES = ("q_descale", "k_descale", "v_descale")


def attend(
    qkv: tuple[Tensor, ...],
    descales: tuple[Tensor | None, ...],
    keywords: dict[str, Any],
    packed: tuple[Any, ...] = (),
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over q, k and v; those of float8_e4m3fn times their descales, with a bfloat16 output.

    Args:
        qkv: q, k and v.
        descales: Those of q, k and v, ``(batch, num_heads_kv)`` float32; None is 1.
        keywords: Of ``flashtile.attention``.
        packed: Of packed sequences cu_seqlens_q, cu_seqlens_k and the longest lengths.

    Raises:
        InvalidInputError: Naming the argument; a descale whose q does not have 8 bits is one.
    """
    q, k, v = qkv
    bounds = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), packed, strict=False))
    if tensor("q", q).dtype == torch.float8_e4m3fn:
        record = Quantized.from_fp8(q, k, v, *descales, **bounds)
        return attention_varlen(record, **keywords) if packed else attention(record, **keywords)
    for name, descale in zip(_NAMES, descales, strict=True):
        if descale is not None:
            raise InvalidInputError(name, f"is given, but goes with a float8_e4m3fn q; q has {q.dtype}")
    return attention_varlen(q, k, v, *packed, **keywords) if packed else attention(q, k, v, **keywords)


def chosen(x: Tensor, order: Tensor) -> Tensor:
    """Rows of a tensor, which may have 8 bits."""
    if x.element_size() > 1:
        return x.index_select(0, order)
    return x.view(torch.uint8).index_select(0, order).view(x.dtype)
