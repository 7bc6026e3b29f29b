"""Where a sequence's rows begin, how many it has, and 64-bit addressing, for dense and packed tensors.

A dense tensor starts every sequence at row 0 of its batch entry. A packed one has a single entry, in which sequence b
starts at row ``cu_seqlens[b]``; its batch stride is never used. Queries and keys each have a layout of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class SequenceLayout(NamedTuple):
    """The memory layout of the sequences of the queries or of the keys.

    Attributes:
        cu_seqlens_ptr: (num_sequences + 1,) int32 for packed sequences, None for dense ones.
        num_sequences: How many there are.
        total: Rows of a packed tensor, or the common length of dense sequences.
    """

    cu_seqlens_ptr: Any
    num_sequences: Any
    total: Any


class Sequence(NamedTuple):
    """One sequence: its entry of the batch (0 if packed), its first row there, and how many rows it has."""

    batch_index: Any
    start: Any
    length: Any


class Strided(NamedTuple):
    """A tensor (batch, rows, heads, dim) as a kernel receives it: strides in elements, dim's is 1.

    ptr is None for a result that is not needed; source is a tensor descriptor of it, or None.
    """

    ptr: Any
    source: Any
    stride_b: Any
    stride_row: Any
    stride_head: Any


class Operand(NamedTuple):
    """A tensor, ``Strided``, and the ``SequenceLayout`` of its rows, DIM columns wide in tiles of BLOCK_DIM.

    Its strides are multiples of UNIT, which the compiler sees by itself only of multiples of 16. It holds constants, so
    it is only passed as an argument, never assigned.
    """

    data: Any
    layout: Any
    DIM: Any
    BLOCK_DIM: Any
    UNIT: Any = 1


class Rows(NamedTuple):
    """The rows of one head of one ``Sequence`` of an ``Operand``."""

    tensor: Any
    head: Any
    sequence: Any


@triton.jit
def sequence(cu_seqlens_ptr, b, num_sequences, total, VARLEN: tl.constexpr):
    """First row and length of sequence b.

    Args:
        cu_seqlens_ptr: (num_sequences + 1,) int32, read only if VARLEN.
        b: The sequence; ``num_sequences`` stands for the rows past the last sequence of a packed tensor.
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
def sequence_of(layout, b):
    """Sequence b of a ``SequenceLayout``; ``num_sequences`` means the rows past the last one of a packed tensor."""
    PACKED: tl.constexpr = layout.cu_seqlens_ptr is not None
    start, length = sequence(layout.cu_seqlens_ptr, b, layout.num_sequences, layout.total, PACKED)
    batch_index = b
    if PACKED:
        batch_index = 0
    return Sequence(batch_index, start, length)


@triton.jit
def base(ptr, b, start, head, stride_b, stride_row, stride_head):
    """Address of (sequence b, its first row, head); every product is 64 bits wide."""
    offset = tl.cast(b, tl.int64) * stride_b + tl.cast(start, tl.int64) * stride_row
    return ptr + offset + tl.cast(head, tl.int64) * stride_head


@triton.jit
def addresses(rows, first, row, col):
    """Addresses of elements of ``Rows``.

    Args:
        rows: The rows.
        first: Added to every row.
        row: Rows of the sequence, counted from ``first``.
        col: Columns, broadcastable against row.
    """
    data, seq = rows.tensor.data, rows.sequence
    stride_b, stride_row, stride_head = data.stride_b, data.stride_row, data.stride_head
    if rows.tensor.UNIT > 1:
        stride_b = stride_b // rows.tensor.UNIT * rows.tensor.UNIT
        stride_row = stride_row // rows.tensor.UNIT * rows.tensor.UNIT
        stride_head = stride_head // rows.tensor.UNIT * rows.tensor.UNIT
    start = base(data.ptr, seq.batch_index, seq.start, rows.head, stride_b, stride_row, stride_head)
    return start + tl.cast(first, tl.int64) * stride_row + (row.to(tl.int64) * stride_row + col)
