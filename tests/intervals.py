"""Random interval masks, and what they mean as booleans."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile import masks
from flashtile.masks import Intervals

KINDS = ("documents", "prefix", "chunks", "rows", "rows of heads", "columns", "columns of heads", "both",
         "documents and rows")  # fmt: skip


def drawn_mask(
    kind: str, batch_heads: tuple[int, int], seqlen_q: int, seqlen_k: int, make: Any = None, device: str = "cpu"
) -> Intervals:
    """A mask of one of ``KINDS``; documents need as many rows as keys, else they are chunks."""
    batch, heads = batch_heads

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=make, device=device, dtype=torch.int32)

    def ends(length: int, other: int, of_heads: bool) -> tuple[Tensor, Tensor]:
        """Some are empty, some begin before the first or end after the last."""
        shape = (batch, heads if of_heads else 1, length)
        start = integers(-3, other, *shape)
        return start, start + integers(-2, other, *shape)

    if kind == "documents" and seqlen_q == seqlen_k:
        return masks.documents(integers(0, 4, batch, seqlen_q).sort(-1).values)
    if kind in ("documents", "chunks"):
        return masks.chunks(max(1, seqlen_k // 3), seqlen_q, seqlen_k=seqlen_k, device=device)
    if kind == "prefix":
        return masks.prefix(integers(0, seqlen_k + 1, batch), seqlen_q, seqlen_k=seqlen_k)
    if kind == "documents and rows":
        first = drawn_mask("documents", batch_heads, seqlen_q, seqlen_k, make, device)
        return first & drawn_mask("rows", batch_heads, seqlen_q, seqlen_k, make, device)
    of_heads = kind.endswith("of heads")
    if kind.startswith("rows"):
        return masks.rows(*ends(seqlen_q, seqlen_k, of_heads))
    columns = masks.columns(*ends(seqlen_k, seqlen_q, of_heads))
    return columns if kind.startswith("columns") else masks.rows(*ends(seqlen_q, seqlen_k, True)) & columns


def dense(mask: Intervals, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The booleans of a mask, ``(batch or 1, heads or 1, seqlen_q, seqlen_k)``."""
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    keep = torch.ones(1, 1, seqlen_q, seqlen_k, dtype=torch.bool)
    if mask.row_keys is not None:
        keep = keep & (mask.row_keys[..., :1] <= j) & (j < mask.row_keys[..., 1:])
    if mask.key_rows is not None:
        keep = keep & (mask.key_rows[..., None, :, 0] <= i) & (i < mask.key_rows[..., None, :, 1])
    return keep
