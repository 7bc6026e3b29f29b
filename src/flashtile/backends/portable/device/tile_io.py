"""Loads and stores of tiles of rows."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.vocab import sequence


@triton.jit
def load_rows(rows, first, BLOCK: tl.constexpr, CHECK: tl.constexpr):
    """A tile [BLOCK, BLOCK_DIM] of ``sequence.Rows`` starting at row ``first``; columns past DIM are 0.

    Args:
        rows: Where to load from, through the tensor's descriptor if it has one.
        first: First row of the tile.
        BLOCK: Rows of the tile.
        CHECK: Whether the tile may reach past the sequence's end; its rows there are 0. A descriptor checks only the
            end of the whole tensor, so such tiles of packed tensors are loaded by pointers.
    """
    PACKED: tl.constexpr = rows.tensor.layout.cu_seqlens_ptr is not None
    if rows.tensor.data.source is not None and not (CHECK and PACKED):
        seq = rows.sequence
        tile = rows.tensor.data.source.load([seq.batch_index, seq.start + first, rows.head, 0]).reshape(
            BLOCK, rows.tensor.BLOCK_DIM
        )
    else:
        row = tl.arange(0, BLOCK)[:, None]
        col = tl.arange(0, rows.tensor.BLOCK_DIM)[None, :]
        at = sequence.addresses(rows, first, row, col)
        if CHECK:
            if rows.tensor.DIM == rows.tensor.BLOCK_DIM:
                tile = tl.load(at, mask=first + row < rows.sequence.length, other=0.0)
            else:
                tile = tl.load(at, mask=(first + row < rows.sequence.length) & (col < rows.tensor.DIM), other=0.0)
        elif rows.tensor.DIM == rows.tensor.BLOCK_DIM:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=col < rows.tensor.DIM, other=0.0)
    return tile


@triton.jit
def load_contiguous(
    ptr, layout, num_heads, head, seq, first, BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):  # fmt: skip
    """``load_rows``, with CHECK, of a sequence and head of a contiguous tensor (batch, rows, num_heads, DIM)."""
    pitch = num_heads * DIM
    data = sequence.Strided(ptr, None, tl.cast(layout.total, tl.int64) * pitch, pitch, DIM)
    return load_rows(sequence.Rows(sequence.Operand(data, layout, DIM, BLOCK_DIM), head, seq), first, BLOCK, True)


@triton.jit
def store_contiguous(ptr, layout, num_heads, head, seq, first, tile, DIM: tl.constexpr, ADDS: tl.constexpr = False):
    """Stores the rows of a tile [BLOCK, BLOCK_DIM] inside the sequence, from row ``first``; arguments as above.

    ADDS: to what is there, which no other program may touch.
    """
    pitch = num_heads * DIM
    data = sequence.Strided(ptr, None, tl.cast(layout.total, tl.int64) * pitch, pitch, DIM)
    row = tl.arange(0, tile.shape[0])[:, None]
    col = tl.arange(0, tile.shape[1])[None, :]
    exists = first + row < seq.length
    if tile.shape[1] != DIM:
        exists = exists & (col < DIM)
    at = sequence.addresses(sequence.Rows(sequence.Operand(data, layout, DIM, DIM), head, seq), first, row, col)
    if ADDS:
        # Not loaded, which would take as many registers as the tile has.
        tl.atomic_add(at, tile.to(ptr.dtype.element_ty), mask=exists, sem="relaxed")
    else:
        tl.store(at, tile.to(ptr.dtype.element_ty), mask=exists)
