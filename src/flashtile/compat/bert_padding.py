"""From padded batches to packed rows and back: flash-attn's ``bert_padding``."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.errors import InvalidInputError

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Takes rows ``(taken, ...)`` of a tensor ``(rows, ...)`` by int64 indices ``(taken,)``; differentiable."""
    return torch.index_select(input, 0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Puts rows ``(put, ...)`` into zeros ``(first_axis_dim, ...)`` by int64 indices ``(put,)``; differentiable.

    Each index at most once.
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the rows of a padded batch that a mask selects. Waits for the device: the number of rows is in the data.

    Args:
        hidden_states: ``(batch, seqlen, ...)``.
        attention_mask: ``(batch, seqlen)`` bool or integers; not 0 selects.
        unused_mask: ``(batch, seqlen)``: additional rows to pack, which are allocated but not used.

    Returns:
        The rows ``(total, ...)``; their indices ``(total,)`` int64 in the flattened batch; cu_seqlens ``(batch + 1,)``
        int32; the longest sequence; and the used rows of each sequence, ``(batch,)`` int32, without unused_mask.

    Raises:
        InvalidInputError: If a mask's shape does not match.
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            must = tuple(hidden_states.shape[:2])
            raise InvalidInputError(name, f"has shape {tuple(mask.shape)}, must be {must} as hidden_states has")
    used = attention_mask != 0
    selected = used if unused_mask is None else used | (unused_mask != 0)
    lengths = selected.sum(dim=1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    indices = selected.flatten().nonzero().flatten()
    longest = int(lengths.max()) if lengths.numel() else 0
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, longest, used.sum(dim=1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Puts packed rows back into a padded batch; everything else is 0.

    Args:
        hidden_states: ``(total, ...)``.
        indices: ``(total,)`` from ``unpad_input``.
        batch: Sequences.
        seqlen: Rows of each.

    Returns:
        ``(batch, seqlen, ...)``.
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
