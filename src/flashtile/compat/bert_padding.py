"""Packs padded batches and unpacks them: flash-attn's ``bert_padding``."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.core.errors import InvalidInputError

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Takes rows ``(taken, ...)`` of a tensor ``(rows, ...)`` by int64 indices ``(taken,)``; differentiable."""
    return torch.index_select(input, 0, indices)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """``index_first_axis``, and the tensor itself for a residual connection."""
    return index_first_axis(input, indices), input


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Puts rows ``(put, ...)`` into zeros ``(first_axis_dim, ...)`` by int64 indices ``(put,)``; differentiable.

    Each index may occur at most once.
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
    _check_mask("attention_mask", attention_mask, hidden_states)
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
    used = attention_mask != 0
    selected = used if unused_mask is None else used | (unused_mask != 0)
    lengths = selected.sum(dim=1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    indices = selected.flatten().nonzero().flatten()
    longest = int(lengths.max()) if lengths.numel() else 0
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, longest, used.sum(dim=1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """``unpad_input`` where each row of the batch holds several sequences, one after another from its start.

    Args:
        hidden_states: ``(batch, seqlen, ...)``.
        attention_mask_in_length: ``(batch, seqlen)`` integers: the lengths of the sequences in a row of the batch, in
            order, anywhere among zeros.

    Returns:
        The rows ``(total, ...)``; their indices ``(total,)`` int64 in the flattened batch; cu_seqlens ``(sequences +
        1,)`` int32; and the longest sequence.

    Raises:
        InvalidInputError: If the shape does not match.
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    filled = attention_mask_in_length.sum(dim=1, keepdim=True)
    places = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    rows, indices, *_ = unpad_input(hidden_states, places < filled)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return rows, indices, cu_seqlens, int(lengths.max()) if lengths.numel() else 0


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    if mask.shape != hidden_states.shape[:2]:
        must = tuple(hidden_states.shape[:2])
        raise InvalidInputError(name, f"has shape {tuple(mask.shape)}, must be {must} as hidden_states has")


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
