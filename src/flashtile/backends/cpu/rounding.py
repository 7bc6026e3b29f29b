"""Quantisation in plain PyTorch, for any device; the kernels are compared with it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from flashtile.call.blocks import LARGEST, MOST_KEYS, as_columns, joined, sequence_of_blocks, sequence_of_rows, split
from flashtile.call.quantized import (
    E4M3,
    Choices,
    Inputs,
    Quantized,
    Scales,
    record,
    spread_scales,
    turned,
)
from flashtile.call.rotation import rotate, unrotate


def quantized(given: Inputs, choices: Choices, lengths: tuple[int | None, int | None] = (None, None)) -> Quantized:
    """``quantize`` for arguments that have been checked."""
    bounds_q, bounds_k = given.cu_seqlens_q, given.cu_seqlens_k
    (q, k), v = turned(given, choices), given.v.float()
    shift = None
    if choices.smooth_k:
        mean = _mean(k, bounds_k)
        k = k - _by_row(mean, bounds_k, k)
        group = q.shape[-2] // k.shape[-2]
        shift = (q * _by_row(mean.repeat_interleave(group, dim=1), bounds_q, q)).sum(-1).movedim(-1, -2).contiguous()
    if choices.rotate:
        q, k = rotate(q, choices.seed), rotate(k, choices.seed)
    q8, q_scale = rounded(q, bounds_q, choices.scales)
    k8, k_scale = rounded(k, bounds_k, choices.scales)
    v8, v_scale = rounded(v, bounds_k, choices.scales)
    q8, k8 = joined(q8, bounds_q, q.shape[-3]).contiguous(), joined(k8, bounds_k, k.shape[-3]).contiguous()
    outs = [q8.view(E4M3), k8.view(E4M3), as_columns(v8).view(E4M3)]
    return record(given, choices, lengths, outs, [q_scale, k_scale, v_scale], shift)


def restored(record: Quantized, k_given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The q, k and v that a record represents, in its output's dtype. ``k_given`` is the k that it was made of."""
    q, k, v = record.dequantized()
    if record.rotated:
        q, k = unrotate(q, record.seed), unrotate(k, record.seed)
    if record.smoothed:
        k = k + _by_row(_mean(k_given.float(), record.cu_seqlens_k), record.cu_seqlens_k, k)
    return q.to(record.dtype), k.to(record.dtype), v.to(record.dtype)


def _mean(k: Tensor, bounds: Tensor | None) -> Tensor:
    """The mean of ``MOST_KEYS`` keys of each sequence and head, ``(batch, heads, head_dim)``; 0 without keys."""
    numbers = torch.arange(MOST_KEYS, device=k.device)
    if bounds is None:
        rows = numbers[: k.shape[1]] * k.shape[1] // min(max(k.shape[1], 1), MOST_KEYS)
        return k[:, rows].sum(1) / max(len(rows), 1)
    lengths = bounds.diff()[:, None]
    count = lengths.clamp(max=MOST_KEYS)
    at = bounds[:-1, None] + numbers * lengths // count.clamp(min=1)
    chosen = k[torch.where(numbers < count, at, 0)] if len(k) else k.new_zeros(*at.shape, *k.shape[1:])
    return torch.where((numbers < count)[..., None, None], chosen, 0.0).sum(1) / count.clamp(min=1)[..., None]


def _by_row(of_sequences: Tensor, bounds: Tensor | None, like: Tensor) -> Tensor:
    """Values of sequences, repeated for each of their rows; 0 for rows without a sequence."""
    if bounds is None:
        return of_sequences[:, None]
    sequence, exists = sequence_of_rows(bounds, len(like))
    return torch.where(exists[:, None, None], of_sequences[sequence], 0.0)


def rounded(x: Tensor, bounds: Tensor | None, scales: Scales, room: float = 1.0) -> tuple[Tensor, Tensor]:
    """Blocks of rows as bytes of e4m3 numbers, and scales as in ``Quantized``, ``room`` times as large."""
    blocks = split(x, bounds)
    largest = blocks.abs().amax((-3, -1)).movedim(-1, -2)  # ([batch,] heads, blocks)
    if scales != "block":
        largest = functional.pad(largest, (0, 1))  # There may be no block.
    if scales == "tensor":
        largest = largest.amax().expand([1] * largest.dim())
    elif scales == "head" and bounds is None:
        largest = largest.amax(-1, keepdim=True)
    elif scales == "head" and bounds is not None:
        largest = largest[:, :-1]
        sequence = sequence_of_blocks(bounds, len(x)).expand_as(largest)
        largest = largest.new_zeros(largest.shape[0], bounds.shape[0] - 1).scatter_reduce(1, sequence, largest, "amax")
        largest = spread_scales(largest, bounds, len(x))
    scale = scale_of(largest * room)
    factor = (1.0 / scale).movedim(-1, -2)[..., None, :, None]
    return (blocks * factor).to(E4M3).view(torch.uint8), scale.contiguous()


def scale_of(largest: Tensor) -> Tensor:
    """The scale that makes the largest number e4m3's largest; 1 if all are 0."""
    # The scale is at least float32's smallest normal number, so that float32 can hold the inverse.
    return torch.where(largest > 0, (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny), 1.0)
