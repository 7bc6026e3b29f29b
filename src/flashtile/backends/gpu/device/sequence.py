"""A sequence's first row, its number of rows, and 64-bit addressing, for dense and packed tensors.

In a dense tensor every sequence starts at row 0 of its batch entry. A packed tensor has a single entry, in which
sequence b starts at row ``cu_seqlens[b]``; its batch stride is never used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.device import records

# TMA bounds every dimension of a tensor, but not the sequences packed into one. A descriptor of a packed tensor has two
# further dimensions with strides that cancel modulo 2**64, so that the row coordinate reaches its bound, PACKED_ROWS,
# exactly where the sequence ends: loads past it give zeros, and stores are dropped.
PACKED_ROWS = tl.constexpr(records.PACKED_ROWS)


class Sequence(NamedTuple):
    """One sequence: its entry of the batch (0 if packed), its first row in the entry, and its number of rows."""

    batch_index: Any
    start: Any
    length: Any


class HeadRows(NamedTuple):
    """The rows of one head of one ``Sequence`` in ``records.Rows``; only passed on, never assigned."""

    rows: Any
    head: Any
    sequence: Any


@triton.jit
def sequence(cu_seqlens_ptr, b, num_sequences, total, VARLEN: tl.constexpr):
    """First row and length of sequence b.

    Args:
        cu_seqlens_ptr: (num_sequences + 1,) int32, read only if VARLEN.
        b: The sequence; ``num_sequences`` stands for the rows past the last sequence of a packed tensor.
        num_sequences: Number of sequences.
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
def sequence_of(sequences, b):
    """Sequence b of ``records.Sequences``; ``count`` means the rows past the last one of a packed tensor."""
    PACKED: tl.constexpr = sequences.cu_seqlens is not None
    start, length = sequence(sequences.cu_seqlens, b, sequences.count, sequences.length, PACKED)
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
def addresses(of, first, row, col):
    """Addresses of elements of ``HeadRows``.

    Args:
        of: The ``HeadRows``.
        first: Added to every row.
        row: Rows of the sequence, counted from ``first``.
        col: Columns, broadcastable against row.
    """
    seq = of.sequence
    stride_b, stride_row, stride_head = of.rows.stride_b, of.rows.stride_row, of.rows.stride_head
    if of.rows.UNIT > 1:
        stride_b = stride_b // of.rows.UNIT * of.rows.UNIT
        stride_row = stride_row // of.rows.UNIT * of.rows.UNIT
        stride_head = stride_head // of.rows.UNIT * of.rows.UNIT
    start = base(of.rows.ptr, seq.batch_index, seq.start, of.head, stride_b, stride_row, stride_head)
    return start + tl.cast(first, tl.int64) * stride_row + (row.to(tl.int64) * stride_row + col)
