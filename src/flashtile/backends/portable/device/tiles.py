"""The portable kernels' tiles, and the tile that a program works on."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.device.tiles import (
    Sequence,
    grouped_tile,
    longest_first,
    packed_tile,
    packed_tiles,
    sequence_of,
)

# The number of tiles that a program of a repair checks together.
AT_ONCE = tl.constexpr(8)


class Place(NamedTuple):
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
    """The ``Place`` of this program's tile: of query rows, or with ``splits`` of keys for one split of a group.

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
    return Place(b, head, block, queries, keys)
