"""Latent rows (MLA) in 8 bits, in FlashMLA's form of 656 bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.call.arguments import FLOAT8, check_tensor
from flashtile.core.errors import InvalidInputError


def latent_rows(rows: Tensor) -> Tensor:
    """Converts latent rows of 576 columns to the rows of 656 bytes that ``attention_with_kvcache`` takes as keys.

    Args:
        rows: ``(..., 576)``: 512 latent columns, then 64 columns that rotate.

    Returns:
        ``(..., 656)`` in float8_e4m3fn, to be written into the cache. A row holds 512 numbers, the bytes of four
        float32 scales, and the bytes of 64 bfloat16 numbers. A scale is the largest magnitude of 128 columns, over 448.

    Raises:
        InvalidInputError: rows do not have 576 columns.
    """
    check_tensor("rows", rows)
    if rows.shape[-1:] != (576,):
        raise InvalidInputError("rows", f"has shape {tuple(rows.shape)}, must have 576 columns")
    blocks = rows[..., :512].float().unflatten(-1, (4, 128))
    scale = (blocks.abs().amax(-1) / 448).clamp(min=torch.finfo(torch.float32).tiny)
    values = (blocks / scale[..., None]).clamp(-448, 448).to(FLOAT8).flatten(-2)
    parts = values, scale, rows[..., 512:].bfloat16().contiguous()
    return torch.cat([x.view(torch.uint8) for x in parts], dim=-1).view(FLOAT8)
