"""Which tile a program works on, and how its rows are loaded and stored."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.vocab import scheduler, sequence


class Place(NamedTuple):
    """A tile: a block of one head of one sequence, and where the sequence's queries and keys lie.

    ``b == batch`` stands for rows behind the last packed sequence, which have no counterpart on the other side.
    """

    b: Any
    head: Any
    block: Any
    start_q: Any
    length_q: Any
    start_k: Any
    length_k: Any


@triton.jit
def locate(
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, seqlen_q, seqlen_k, num_heads, heads_at_once,
    BLOCK: tl.constexpr, OVER_KEYS: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """The ``Place`` of this program's tile, of query rows or OVER_KEYS of keys.

    Programs of packed sequences count blocks first, then heads. Dense ones take heads_at_once heads (of all sequences
    together) after one another, so that those share the cache, and of those the longest blocks of all heads first.
    """
    VARLEN: tl.constexpr = cu_seqlens_q_ptr is not None
    pid = tl.program_id(0)
    total = seqlen_k if OVER_KEYS else seqlen_q
    if VARLEN:
        num_tiles = total // BLOCK + batch + 1
        if OVER_KEYS:
            b, block = scheduler.packed_tile(cu_seqlens_k_ptr, batch, pid % num_tiles, BLOCK)
        else:
            b, block = scheduler.packed_tile(cu_seqlens_q_ptr, batch, pid % num_tiles, BLOCK)
        head = pid // num_tiles
    else:
        num_tiles = (total + BLOCK - 1) // BLOCK
        block, head = scheduler.grouped_tile(pid, num_tiles, batch * num_heads, heads_at_once)
        b = head // num_heads
        head = head % num_heads
    start_q, length_q = sequence.sequence(cu_seqlens_q_ptr, b, batch, seqlen_q, VARLEN)
    start_k, length_k = sequence.sequence(cu_seqlens_k_ptr, b, batch, seqlen_k, VARLEN)
    if VARLEN:
        # Rows behind the last query sequence see no keys, keys behind the last key sequence no rows.
        if OVER_KEYS:
            length_q = tl.where(b < batch, length_q, 0)
        else:
            length_k = tl.where(b < batch, length_k, 0)
    if HAS_RIGHT and not OVER_KEYS:
        # A tile behind the end of a packed sequence stays behind it.
        num_blocks = (length_q + BLOCK - 1) // BLOCK
        block = tl.where(block < num_blocks, scheduler.longest_first(block, num_blocks, True), block)
    return Place(b, head, block, start_q, length_q, start_k, length_k)


@triton.jit
def load_rows(rows, first, BLOCK: tl.constexpr, CHECK: tl.constexpr, TMA: tl.constexpr):
    """A tile [BLOCK, BLOCK_DIM] of ``sequence.Rows`` from row ``first`` on; columns that do not exist are 0.

    Args:
        rows: What to load from.
        first: First row of the tile.
        BLOCK: Rows of the tile.
        CHECK: Whether the tile may reach behind the sequence, where its rows are then 0. With TMA, which knows the end
            of the whole tensor alone, that holds for dense tensors only.
        TMA: Whether to use the tensor's descriptor.
    """
    tensor = rows.tensor
    if TMA:
        tile = tensor.source.load([rows.batch_index, rows.start + first, rows.head, 0]).reshape(
            BLOCK, tensor.cols.shape[0]
        )
    else:
        row = tl.arange(0, BLOCK)[:, None]
        col = tensor.cols[None, :]
        stride = tensor.stride_row
        ptrs = sequence.start_of(rows) + tl.cast(first, tl.int64) * stride + (row.to(tl.int64) * stride + col)
        if CHECK:
            if tensor.dim is None:
                tile = tl.load(ptrs, mask=first + row < rows.length, other=0.0)
            else:
                tile = tl.load(ptrs, mask=(first + row < rows.length) & (col < tensor.dim), other=0.0)
        elif tensor.dim is None:
            tile = tl.load(ptrs)
        else:
            tile = tl.load(ptrs, mask=col < tensor.dim, other=0.0)
    return tile


@triton.jit
def store_rows(rows, first, tile, BLOCK: tl.constexpr):
    """Stores the part of a tile [BLOCK, BLOCK_DIM] that exists, from row ``first`` of ``sequence.Rows`` on."""
    tensor = rows.tensor
    row = tl.arange(0, BLOCK)[:, None]
    col = tensor.cols[None, :]
    stride = tensor.stride_row
    ptrs = sequence.start_of(rows) + tl.cast(first, tl.int64) * stride + (row.to(tl.int64) * stride + col)
    exists = first + row < rows.length
    if tensor.dim is not None:
        exists = exists & (col < tensor.dim)
    tl.store(ptrs, tile.to(tensor.ptr.dtype.element_ty), mask=exists)
