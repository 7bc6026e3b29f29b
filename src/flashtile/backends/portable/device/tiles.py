"""The portable kernels' tiles: which one a program has; loads, products and stores, with columns as a tuple of parts.

The dimensions of Triton's tensors are powers of two, so a tile of 192 columns consists of parts of 128 and 64 columns,
a tile of 96 columns of parts of 64 and 32, and a tile of 128 columns is a single part.
"""

# ruff: noqa: RUF005 - Triton can add tuples, but cannot unpack them.

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.device import records
from flashtile.backends.gpu.device.tiles import (
    PACKED_ROWS,
    HeadRows,
    Sequence,
    addresses,
    grouped_tile,
    longest_first,
    packed_tile,
    packed_tiles,
    sequence_of,
)
from flashtile.backends.portable.device.records import widths as _widths

widths = triton.constexpr_function(_widths)
# The number of tiles that a program of a repair checks together.
AT_ONCE = tl.constexpr(8)


class HeadBlock(NamedTuple):
    """A tile: a block of one head of one sequence, with the ``tiles.Sequence`` of its queries and of its keys.

    ``b == batch`` means rows past the last packed sequence, which have no keys, or keys without rows.
    """

    b: Any
    head: Any
    block: Any
    queries: Any
    keys: Any


@triton.jit
def locate(call, tiles, splits, tile=None):
    """The ``HeadBlock`` of this program's tile: of query rows, or with ``splits`` of keys for one split of a group.

    tile: The tile's number, or a tensor of numbers, if a program has more than one tile.

    Programs of packed sequences are numbered by block first, then by head. With dense sequences, heads_at_once heads
    (counted over all sequences) run at a time and share the cache; the longest blocks of all these heads come first.
    """
    sequences, num_heads = call.queries, call.heads.num_q
    OVER_KEYS: tl.constexpr = splits is not None
    BLOCK: tl.constexpr = tiles.BLOCK_N if OVER_KEYS else tiles.BLOCK_M
    if OVER_KEYS:
        sequences, num_heads = call.keys, call.heads.num_q // call.heads.group_size * splits
    PACKED: tl.constexpr = sequences.cu_seqlens is not None
    pid = tl.program_id(0) if tile is None else tile
    if PACKED:
        num_tiles = sequences.length // BLOCK + sequences.count + 1
        if tile is None:
            b, block = packed_tile(sequences.cu_seqlens, sequences.count, pid % num_tiles, BLOCK)
        else:
            b, block = packed_tiles(sequences.cu_seqlens, sequences.count, pid % num_tiles, BLOCK)
        head = pid // num_tiles
    else:
        num_tiles = (sequences.length + BLOCK - 1) // BLOCK
        block, head = grouped_tile(pid, num_tiles, sequences.count * num_heads, tiles.heads_at_once)
        b = head // num_heads
        head = head % num_heads
    queries, keys = sequence_of(call.queries, b), sequence_of(call.keys, b)
    if PACKED:
        # Rows past the last query sequence see no keys; keys past the last key sequence see no rows.
        within = b < sequences.count
        if OVER_KEYS:
            queries = Sequence(queries.batch_index, queries.start, tl.where(within, queries.length, 0))
        else:
            keys = Sequence(keys.batch_index, keys.start, tl.where(within, keys.length, 0))
    if call.mods.band.right is not None and not OVER_KEYS:
        # A tile past the end of a packed sequence keeps its block number.
        num_blocks = (queries.length + BLOCK - 1) // BLOCK
        block = tl.where(block < num_blocks, longest_first(block, num_blocks, True), block)
    return HeadBlock(b, head, block, queries, keys)


@triton.constexpr_function
def parts_of(cols):
    """The first column and the width of each part."""
    return [(sum(widths(cols)[:i]), width) for i, width in enumerate(widths(cols))]


@triton.constexpr_function
def num_parts(cols):
    """The number of parts of a tile."""
    return len(parts_of(cols))


@triton.constexpr_function
def start_of(cols, part):
    """The first column of a part."""
    return parts_of(cols)[part][0]


@triton.constexpr_function
def width_of(cols, part):
    """The number of columns of a part."""
    return parts_of(cols)[part][1]


@triton.jit
def append(parts, part):
    """The parts with one more part."""
    return parts + (part,)


@triton.jit
def zeros(BLOCK: tl.constexpr, COLS: tl.constexpr):
    """A tile [BLOCK, COLS] of float32 zeros."""
    parts = ()
    for p in tl.static_range(num_parts(COLS)):
        parts = append(parts, tl.zeros([BLOCK, width_of(COLS, p)], tl.float32))
    return parts


@triton.jit
def scaled(tile, factor):
    """A tile multiplied by one factor, or by a factor for each row."""
    parts = ()
    for p in tl.static_range(len(tile)):
        parts = append(parts, tile[p] * factor)
    return parts


@triton.jit
def times_transposed(x, y, PRECISION: tl.constexpr):
    """``x @ y^T`` for two tiles with as many columns: [rows of x, rows of y] float32."""
    product = tl.dot(x[0], tl.trans(y[0]), input_precision=PRECISION)
    for p in tl.static_range(1, len(x)):
        product = tl.dot(x[p], tl.trans(y[p]), product, input_precision=PRECISION)
    return product


@triton.jit
def add_product(tile, x, y, PRECISION: tl.constexpr):
    """``tile + x @ y`` for a tensor x [rows of tile, rows of y] and a tile y with as many columns."""
    parts = ()
    for p in tl.static_range(len(tile)):
        parts = append(parts, tl.dot(x, y[p], tile[p], input_precision=PRECISION))
    return parts


@triton.jit
def load_rows(of, first, BLOCK: tl.constexpr, CHECK: tl.constexpr):
    """A tile [BLOCK, BLOCK_DIM] of ``tiles.HeadRows`` starting at row ``first``; columns past DIM are 0.

    Args:
        of: The rows to load from, through the tensor's descriptor if it has one.
        first: First row of the tile.
        BLOCK: Rows of the tile.
        CHECK: Whether the tile may reach past the sequence's end; its rows there are then 0, as with a descriptor.
    """
    parts = ()
    for p in tl.static_range(num_parts(of.rows.BLOCK_DIM)):
        parts = append(parts, load_part(of, first, p, BLOCK, CHECK))
    return parts


@triton.jit
def load_part(of, first, PART: tl.constexpr, BLOCK: tl.constexpr, CHECK: tl.constexpr):
    """One part of ``load_rows``."""
    START: tl.constexpr = start_of(of.rows.BLOCK_DIM, PART)
    WIDTH: tl.constexpr = width_of(of.rows.BLOCK_DIM, PART)
    seq = of.sequence
    if of.rows.desc is not None and of.rows.PACKED:
        at = [PACKED_ROWS, seq.start + seq.length, PACKED_ROWS - seq.length + first, of.head, START]
        tile = of.rows.desc[PART].load(at).reshape(BLOCK, WIDTH)
    elif of.rows.desc is not None:
        tile = of.rows.desc[PART].load([seq.batch_index, seq.start + first, of.head, START]).reshape(BLOCK, WIDTH)
    else:
        row = tl.arange(0, BLOCK)[:, None]
        col = START + tl.arange(0, WIDTH)[None, :]
        at = addresses(of, first, row, col)
        if CHECK:
            if of.rows.DIM >= START + WIDTH:
                tile = tl.load(at, mask=first + row < seq.length, other=0.0)
            else:
                tile = tl.load(at, mask=(first + row < seq.length) & (col < of.rows.DIM), other=0.0)
        elif of.rows.DIM >= START + WIDTH:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=col < of.rows.DIM, other=0.0)
    return tile


@triton.jit
def load_contiguous(
    ptr, sequences, num_heads, head, seq, first, BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):  # fmt: skip
    """``load_rows``, with CHECK, for a sequence and head of a contiguous tensor (batch, rows, num_heads, DIM)."""
    pitch = num_heads * DIM
    entry = tl.cast(sequences.length, tl.int64) * pitch
    return load_rows(
        HeadRows(records.Rows(ptr, None, entry, pitch, DIM, DIM, BLOCK_DIM, 1, False), head, seq),
        first, BLOCK, True,
    )  # fmt: skip


@triton.jit
def store_contiguous(
    ptr, sequences, num_heads, head, seq, first, tile, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ADDS: tl.constexpr = False, REPAIRS: tl.constexpr = False, wanted=None,
):  # fmt: skip
    """Stores the rows of a tile [BLOCK, BLOCK_DIM] inside the sequence, from row ``first``; arguments as above.

    ADDS: adds to the contents, which no other program may touch, for REPAIRS in any dtype. wanted: mask of rows, or
        None.
    """
    pitch = num_heads * DIM
    entry = tl.cast(sequences.length, tl.int64) * pitch
    for p in tl.static_range(len(tile)):
        store_part(
            HeadRows(records.Rows(ptr, None, entry, pitch, DIM, DIM, BLOCK_DIM, 1, False), head, seq),
            first, tile[p], start_of(BLOCK_DIM, p), ADDS, REPAIRS, wanted,
        )  # fmt: skip


@triton.jit
def store_part(of, first, part, START: tl.constexpr, ADDS: tl.constexpr, REPAIRS: tl.constexpr, wanted):
    """One part of ``store_contiguous``."""
    ptr = of.rows.ptr
    row = tl.arange(0, part.shape[0])[:, None]
    col = START + tl.arange(0, part.shape[1])[None, :]
    exists = first + row < of.sequence.length
    if START + part.shape[1] > of.rows.DIM:
        exists = exists & (col < of.rows.DIM)
    if wanted is not None:
        exists = exists & wanted[:, None]
    at = addresses(of, first, row, col)
    if REPAIRS and ADDS:
        part += tl.load(at, mask=exists, other=0.0).to(tl.float32)
        tl.store(at, part.to(ptr.dtype.element_ty), mask=exists)
    elif ADDS:
        # An atomic add, because a load and an add would need the tile's registers twice.
        tl.atomic_add(at, part.to(ptr.dtype.element_ty), mask=exists, sem="relaxed")
    else:
        tl.store(at, part.to(ptr.dtype.element_ty), mask=exists)
