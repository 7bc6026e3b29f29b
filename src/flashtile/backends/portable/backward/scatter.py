"""Gradients of what a score mod loads: dscores times the derivative by the load, summed over what reads a place.

Where places depend on the row or on the key alone, or are an entry for each pair, the kernel of dbias computes them.
Here are two more. By diagonals: a program owns some, walks over the tiles that cross them and sums in a fixed order. By
place: atomic adds, in float32, or repeatable: first the greatest magnitude of each place, then adds of 64-bit integers
in its units.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.device import mods, sequence
from flashtile.backends.portable.backward.dbias import keeps_some, listed_gradient
from flashtile.backends.portable.device.tiles import locate


class Places(NamedTuple):
    """Where gradients of loads are summed by place; holds constants, so it is only passed as an argument.

    Attributes:
        of_loads: The printed ``places``.
        operands: ``Operands`` of contiguous gradients, whose addresses are not used.
        ptr: The sums: float32; or int64, with the greatest magnitudes.
        greatest: int32, the bits of each place's greatest magnitude; None for sums in float32.
        NUM: Which load's place it is.
        FIRST: Whether to find the greatest magnitudes, and add nothing.
        ROOM: So many bits of an integer are left for the number of terms.
    """

    of_loads: Any
    operands: Any
    ptr: Any
    greatest: Any
    NUM: Any
    FIRST: Any
    ROOM: Any


class Diagonals(NamedTuple):
    """Sums by ``i - j``, contiguous ``(batch, num_heads_q, (before + after) * BLOCK)`` float32.

    Attributes:
        ptr: The sums; the first is that of ``-before * BLOCK``.
        before: Blocks of keys.
        after: Blocks of rows.
    """

    ptr: Any
    before: Any
    after: Any


@triton.jit
def attention_backward_diagonals(call, douts, of_rows, partial, diagonals, tiles):
    """Sums the gradients of ``dbias.Partial`` over BLOCK diagonals of one head; tiles are square."""
    BLOCK: tl.constexpr = tiles.BLOCK_M
    pid = tl.program_id(0)
    count = diagonals.before + diagonals.after
    block, head_index = pid % count, pid // count
    b, h = head_index // call.heads.num_q, head_index % call.heads.num_q
    k = block - diagonals.before
    queries, keys = sequence.sequence_of(call.queries, b), sequence.sequence_of(call.keys, b)
    head = mods.head_of(call.mods, b, h, queries.length, keys.length)
    row, col = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    # Column c of the turned tile has the diagonals c, in rows from c on, and c - BLOCK, in rows before it.
    turned = (row - col + BLOCK) % BLOCK
    acc = tl.zeros([BLOCK], tl.float32)
    m_blocks = (queries.length + BLOCK - 1) // BLOCK
    n_blocks = (keys.length + BLOCK - 1) // BLOCK
    for side in tl.static_range(2):
        # Tiles on the diagonal k of blocks have these diagonals after their own, those on k + 1 before it.
        first = tl.maximum(k + side, 0)
        for m in tl.range(first, tl.minimum(m_blocks, n_blocks + k + side)):
            m_first, n_first = m * BLOCK, (m - k - side) * BLOCK
            if keeps_some(queries, keys, m_first, n_first, call, tiles):
                zero = tl.zeros([BLOCK, BLOCK], tl.float32)
                tile = listed_gradient(
                    zero, head, queries, keys, m_first, n_first, call, douts, of_rows, partial, tiles
                )
                tile = tl.gather(tile, turned, 1)
                acc += tl.sum(tl.where((row < col) == (side == 1), tile, 0.0), 0)
    at = (tl.cast(head_index, tl.int64) * count + block) * BLOCK + tl.arange(0, BLOCK)
    tl.store(diagonals.ptr + at, acc)


@triton.jit
def attention_backward_places(call, douts, of_rows, partial, places, tiles):
    """Adds the gradients of ``dbias.Partial`` of BLOCK_M rows of one head to their ``Places``."""
    BLOCK_M: tl.constexpr = tiles.BLOCK_M
    BLOCK_N: tl.constexpr = tiles.BLOCK_N
    place = locate(call, tiles, None)
    queries, keys = place.queries, place.keys
    m_first = place.block * BLOCK_M
    if m_first >= queries.length:
        return
    head = mods.head_of(call.mods, place.b, place.head, queries.length, keys.length)
    rows = m_first + tl.arange(0, BLOCK_M)[:, None]
    for n in tl.range(0, (keys.length + BLOCK_N - 1) // BLOCK_N):
        n_first = n * BLOCK_N
        if keeps_some(queries, keys, m_first, n_first, call, tiles):
            zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            tile = listed_gradient(zero, head, queries, keys, m_first, n_first, call, douts, of_rows, partial, tiles)
            at = mods.pairs_of(head, rows + head.shift, n_first + tl.arange(0, BLOCK_N)[None, :])
            offset = mods.place_of_load(call.mods, head, at, places) + tl.zeros([BLOCK_M, BLOCK_N], tl.int64)
            add_to_places(places, offset, tile)


@triton.jit
def add_to_places(places, offset, tile):
    """Adds a tile of gradients; what is 0 is left out."""
    there = tile != 0.0
    if places.greatest is None:
        tl.atomic_add(places.ptr + offset, tile, mask=there, sem="relaxed")
    elif places.FIRST:
        # Floats that are not negative are ordered as their bits are.
        bits = tl.abs(tile).to(tl.int32, bitcast=True)
        tl.atomic_max(places.greatest + offset, bits, mask=there, sem="relaxed")
    else:
        exponent = (tl.load(places.greatest + offset, mask=there, other=0) >> 23) - 127
        unit = tl.exp2((61 - places.ROOM - exponent).to(tl.float64))
        added = (tile.to(tl.float64) * unit).to(tl.int64)
        tl.atomic_add(places.ptr + offset, added, mask=there, sem="relaxed")
