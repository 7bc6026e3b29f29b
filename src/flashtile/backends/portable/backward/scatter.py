"""Gradients of what a score mod loads: dscores times the derivative by the load, summed over what reads a place.

Where places depend on the row or on the key alone, or are an entry for each pair, the kernel of dbias computes them.
Here are two more. By diagonals: a program owns some, walks over the tiles that cross them and sums in a fixed order. By
place: atomic adds, in float32, or repeatable: first the greatest magnitude of each place, then adds of 64-bit integers
in its units.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device import mods
from flashtile.backends.gpu.device.tiles import sequence_of
from flashtile.backends.portable.backward.dbias import keeps_some, listed_gradient
from flashtile.backends.portable.device.tiles import locate


@triton.jit
def keeps_diagonal(lowest, greatest, shift, band):
    """Whether the band keeps a pair with its row from ``lowest`` to ``greatest`` past its key."""
    keeps = lowest <= greatest
    if band.left is not None:
        keeps = keeps & (lowest + shift <= band.left)
    if band.right is not None:
        keeps = keeps & (greatest + shift >= -band.right)
    return keeps


@triton.jit
def attention_backward_diagonals(call, douts, of_rows, partial, diagonals, tiles):
    """Sums the gradients of ``dbias.Derivative`` by distance, of one head, over the tiles of one block of diagonals.

    All of its tiles are as far from the diagonal, so what they have at one place in a tile is summed as it is; only the
    last sum is turned, so that diagonals become columns. BLOCK_M is a multiple of BLOCK_N.
    """
    BLOCK_M: tl.constexpr = tiles.BLOCK_M
    BLOCK_N: tl.constexpr = tiles.BLOCK_N
    RATIO: tl.constexpr = BLOCK_M // BLOCK_N
    pid = tl.program_id(0)
    count = diagonals.before + diagonals.after
    block, head_index = pid % count, pid // count
    b, h = head_index // call.heads.num_q, head_index % call.heads.num_q
    queries, keys = sequence_of(call.queries, b), sequence_of(call.keys, b)
    head = mods.head_of(call.mods, b, h, queries.length, keys.length)
    # Tile m of rows meets tile RATIO * m - k of keys.
    k = block - diagonals.before
    n_blocks = (keys.length + BLOCK_N - 1) // BLOCK_N
    first = (tl.maximum(k, 0) + RATIO - 1) // RATIO
    stop = tl.minimum((queries.length + BLOCK_M - 1) // BLOCK_M, (n_blocks + k + RATIO - 1) // RATIO)
    if not keeps_diagonal((k - 1) * BLOCK_N + 1, k * BLOCK_N + BLOCK_M - 1, head.shift, call.mods.band):
        stop = first
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for m in tl.range(first, stop):
        m_first, n_first = m * BLOCK_M, (m * RATIO - k) * BLOCK_N
        acc = listed_gradient(acc, head, queries, keys, m_first, n_first, call, douts, of_rows, partial, tiles)
    row, col = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    # Column c of the turned tile has the distances c, in rows from c on, and c - BLOCK_N, in rows before it, of each
    # BLOCK_N rows.
    acc = tl.gather(acc, (row - col + BLOCK_M) % BLOCK_N, 1)
    place = row // BLOCK_N + tl.where(row % BLOCK_N >= col, 1, 0)
    at = tl.cast(pid, tl.int64) * ((RATIO + 1) * BLOCK_N) + tl.arange(0, BLOCK_N)
    for s in tl.static_range(RATIO + 1):
        tl.store(diagonals.ptr + at + s * BLOCK_N, tl.sum(tl.where(place == s, acc, 0.0), 0))


@triton.jit
def attention_backward_places(call, douts, of_rows, partial, places, tiles):
    """Adds the gradients of ``dbias.Derivative`` of BLOCK_M rows of one head to their ``Places``."""
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
