"""Where a sequence begins and how long it is, dense or packed, read once a program; and 64-bit addressing.

A packed tensor is one whose batch stride is 0 and whose sequences start at ``cu_seqlens[b]``; a dense one starts every
sequence at row 0 of its batch entry. So the same base pointer arithmetic serves both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Operand(NamedTuple):
    """A tensor (batch, rows, heads, dim) as a kernel takes it.

    Attributes:
        ptr: Its first element, None if it is a result nobody asks for.
        source: A descriptor over (batch, rows, heads, dim), or None.
        stride_b: 0 for a packed tensor.
        stride_row: In elements, like all strides; that of dim is 1.
        stride_head: Between heads.
        cols: [BLOCK_DIM] columns of a tile.
        dim: How many of them exist, None for all.
    """

    ptr: Any
    source: Any
    stride_b: Any
    stride_row: Any
    stride_head: Any
    cols: Any
    dim: Any


class Rows(NamedTuple):
    """The rows of one head of one sequence.

    Attributes:
        tensor: The ``Operand`` that holds them.
        batch_index: Their entry of the batch, 0 for a packed tensor.
        head: Their head.
        start: The first one's place in that entry.
        length: How many.
    """

    tensor: Any
    batch_index: Any
    head: Any
    start: Any
    length: Any


@triton.jit
def sequence(cu_seqlens_ptr, b, num_sequences, total, VARLEN: tl.constexpr):
    """First row and length of sequence b.

    Args:
        cu_seqlens_ptr: (num_sequences + 1,) int32, read only if VARLEN.
        b: The sequence; ``num_sequences`` names the rows behind the last sequence of a packed tensor.
        num_sequences: How many there are.
        total: Rows of a packed tensor, or the common length of dense sequences.
        VARLEN: Whether sequences are packed.

    Returns:
        (start, length), int32 or int64 rows.
    """
    start, length = 0, total
    if VARLEN:
        start = tl.load(cu_seqlens_ptr + b)
        stop = tl.load(cu_seqlens_ptr + b + 1, mask=b < num_sequences, other=0)
        length = tl.where(b < num_sequences, stop, total) - start
    return start, length


@triton.jit
def base(ptr, b, start, head, stride_b, stride_row, stride_head):
    """Address of (sequence b, its first row, head); every product is 64 bits wide."""
    offset = tl.cast(b, tl.int64) * stride_b + tl.cast(start, tl.int64) * stride_row
    return ptr + offset + tl.cast(head, tl.int64) * stride_head


@triton.jit
def start_of(rows):
    """Address of the first of ``Rows``."""
    tensor = rows.tensor
    return base(
        tensor.ptr, rows.batch_index, rows.start, rows.head, tensor.stride_b, tensor.stride_row, tensor.stride_head
    )
