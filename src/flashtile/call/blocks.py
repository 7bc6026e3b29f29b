"""Where the blocks of 128 rows of each sequence lie, and the order of keys in V, in plain PyTorch.

A packed tensor of ``total`` rows in ``batch`` sequences has ``total // BLOCK + batch`` blocks. Sequence b's blocks
begin at ``cu_seqlens[b] // BLOCK + b``: there is room for each one's last, shorter block, and no lengths are summed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128
# The largest number of e4m3.
LARGEST = 448.0
# Smoothing takes off the mean of so many keys of a sequence, spread evenly: number i of n is key ``i * seqlen_k // n``.
# Any vector would leave attention as it is.
MOST_KEYS = 1024
# Place p of 16 neighbouring columns of V holds key ORDER[p]: then the probabilities that a thread holds after the first
# product are what it must hold before the second one.
ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


def num_blocks(rows: int, bounds: Tensor | None) -> int:
    """Blocks of a dense sequence of so many rows, or of all packed ones together."""
    return -(-rows // BLOCK) if bounds is None else rows // BLOCK + bounds.shape[0] - 1


def sequence_of_rows(bounds: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The sequence of each packed row, and whether it has one: rows past the last bound get the last sequence."""
    row = torch.arange(rows, device=bounds.device)
    sequence = torch.searchsorted(bounds[1:].long(), row, right=True)
    return sequence.clamp(max=max(bounds.shape[0] - 2, 0)), row < bounds[-1]


def sequence_of_blocks(bounds: Tensor, rows: int) -> Tensor:
    """The sequence of each block of packed rows, also of those blocks that hold no row."""
    batch = bounds.shape[0] - 1
    firsts = bounds[:-1].long() // BLOCK + torch.arange(batch, device=bounds.device)
    block = torch.arange(num_blocks(rows, bounds), device=bounds.device)
    return (torch.searchsorted(firsts, block, right=True) - 1).clamp(min=0)


def _rows_of_blocks(bounds: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The row at each place of each block, and whether there is one: both ``(blocks, BLOCK)``."""
    sequence = sequence_of_blocks(bounds, rows)
    ends = torch.cat((bounds, bounds[-1:])).long()  # one more, for a batch of 0
    block = torch.arange(sequence.shape[0], device=bounds.device) - (ends[sequence] // BLOCK + sequence)
    row = (ends[sequence] + block * BLOCK)[:, None] + torch.arange(BLOCK, device=bounds.device)
    return row, row < ends[sequence + 1][:, None]


def _places_of_rows(bounds: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The place of each row among the places of all blocks, and whether it has one."""
    sequence, exists = sequence_of_rows(bounds, rows)
    start = bounds.long()[sequence]
    return (start // BLOCK + sequence) * BLOCK + torch.arange(rows, device=bounds.device) - start, exists


def split(x: Tensor, bounds: Tensor | None) -> Tensor:
    """Rows ``(batch, rows, ...)`` or packed ``(total, ...)`` as ``([batch,] blocks, BLOCK, ...)``, 0 where is none."""
    if bounds is None:
        padding = [0, 0] * (x.dim() - 2) + [0, -x.shape[1] % BLOCK]
        return functional.pad(x, padding).unflatten(1, (-1, BLOCK))
    row, exists = _rows_of_blocks(bounds, x.shape[0])
    x = torch.cat((x, torch.zeros_like(x[:1]) if len(x) else x.new_zeros(1, *x.shape[1:])))
    return x[torch.where(exists, row, len(x) - 1)]


def joined(x: Tensor, bounds: Tensor | None, rows: int) -> Tensor:
    """The inverse of ``split``; rows past the last bound are 0."""
    if bounds is None:
        return x.flatten(1, 2)[:, :rows]
    place, exists = _places_of_rows(bounds, rows)
    x = x.flatten(0, 1)
    x = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
    return x[torch.where(exists, place, len(x) - 1)]


def as_columns(blocks: Tensor) -> Tensor:
    """V's blocks ``([batch,] blocks, BLOCK, heads, dim)`` as ``([batch,] heads, dim, columns)``, keys in ORDER."""
    order = torch.tensor(ORDER, device=blocks.device)
    blocks = blocks.unflatten(-3, (-1, 16))[..., order, :, :].flatten(-4, -3)
    return blocks.flatten(-4, -3).movedim(-3, -1).contiguous()


def as_blocks(columns: Tensor) -> Tensor:
    """The inverse of ``as_columns``."""
    order = torch.tensor(ORDER, device=columns.device).argsort()
    rows = columns.movedim(-1, -3).unflatten(-3, (-1, 16))[..., order, :, :].flatten(-4, -3)
    return rows.unflatten(-3, (-1, BLOCK))


def scale_of_rows(scale: Tensor, bounds: Tensor | None, rows: int) -> Tensor:
    """Scales of blocks, ``([batch,] heads, blocks)``, as factors of rows, ``([batch,] rows, heads, 1)``."""
    if scale.shape[-1] != 1 or num_blocks(rows, bounds) == 1:
        spread = scale.movedim(-1, -2)[..., None, :, None].expand(*[-1] * (scale.dim() - 1), BLOCK, -1, -1)
        return joined(spread, bounds, rows)
    return scale.movedim(-1, -2)[..., None]
