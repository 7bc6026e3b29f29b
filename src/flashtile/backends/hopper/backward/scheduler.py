"""Chooses the next block of keys of a persistent program in the backward, and the row blocks that it visits.

On the host: the number of tiles that share the query heads of a key head, so that few such heads fill the GPU.
"""

# ruff: noqa: RET505 - Triton compiles code after a return, even if the condition is decided.
# Triton's aggregate reads annotations as types, so they must not be turned into strings.

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.device import masks
from flashtile.backends.gpu.device.tiles import grouped_tile, key_blocks, packed_tile, query_blocks, sequence
from flashtile.backends.hopper.device import records
from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.device.parts import HeadRows
from flashtile.backends.hopper.device.ring import slot_of

# The number of keys that share bounds of intervals.
BOUNDS_BLOCK = gl.constexpr(records.BOUNDS_BLOCK)


@triton.jit
def blocks_per_head(seqlen, batch, BLOCK: tl.constexpr, VARLEN: tl.constexpr):
    """The number of blocks for one head of a sequence, or of all packed sequences."""
    num_blocks = tl.cdiv(seqlen, BLOCK)
    if VARLEN:
        # As in tiles.packed_tile, every sequence starts a block of its own.
        num_blocks = seqlen // BLOCK + batch + 1
    return num_blocks


@triton.jit
def first_block(b, head, heads, start, count, BLOCK: tl.constexpr, VARLEN: tl.constexpr):
    """The block of row 0 of one of ``heads`` with ``count`` blocks each, of a sequence: see ``rows``."""
    return head * count + start // BLOCK + b if VARLEN else (b * heads + head) * count


@gluon.jit
def key_head(head, grid):
    """The key head of a tile's head."""
    if grid.schedule.splits is not None:
        return head // grid.schedule.splits.count
    else:
        return head


@gluon.jit
def query_heads(head, grid):
    """(first, number) of the query heads of a tile's head."""
    group_size = grid.call.heads.group_size
    if grid.schedule.splits is not None:
        count, heads = grid.schedule.splits.count, grid.schedule.splits.heads
        place = head % count * heads
        return head // count * group_size + place, gl.minimum(group_size - place, heads)
    else:
        return head * group_size, group_size


@aggregate
class KeyTile:
    """One tile: keys of one head of one sequence, from ``key`` on, and the row blocks that see them.

    With lists, the row blocks are at positions in a list; in those before ``m_partial_max`` the mask's function
    decides.
    """

    is_end: gl.tensor
    b: gl.tensor
    head: gl.tensor
    key: gl.tensor
    start_q: gl.tensor
    seqlen_q: gl.tensor
    start_k: gl.tensor
    seqlen_k: gl.tensor
    m_min: gl.tensor
    m_max: gl.tensor
    m_partial_max: gl.tensor
    bits: gl.tensor


@gluon.jit
def sequence_of(sequences, b, grid):
    """(start, length) of a sequence of queries or keys; both sides have one number of sequences."""
    return sequence(sequences.cu_seqlens, b, grid.call.keys.count, sequences.length, grid.call.q.PACKED)


@gluon.jit
def _place(index, grid):
    """(block, b, head, is_tile, is_end) for a place in the order of all tiles.

    Sequences without rows have no tiles if gradients are added to present contents.
    """
    batch, heads = grid.call.keys.count, grid.schedule.all_heads
    if grid.call.q.PACKED:
        num_blocks = grid.call.keys.length // grid.tiles.KEYS + batch + 1
        is_end = index >= num_blocks * heads
        index = gl.where(is_end, 0, index)
        place, head = grouped_tile(index, num_blocks, heads, grid.schedule.heads_at_once)
        if grid.schedule.CHAINED:
            head += grid.schedule.first_head
        if grid.schedule.FALLING:
            place = num_blocks - 1 - place
        b, block = packed_tile(grid.call.keys.cu_seqlens, batch, place, grid.tiles.KEYS)
        _, length = sequence_of(grid.call.keys, b, grid)
        is_tile = block * grid.tiles.KEYS < length
        if grid.gradients.ADDS:
            _, rows = sequence_of(grid.call.queries, b, grid)
            is_tile = is_tile & (rows > 0) & (b < batch)
        return block, b, head, is_tile, is_end
    else:
        num_blocks = (grid.call.keys.length + grid.tiles.KEYS - 1) // grid.tiles.KEYS
        is_end = index >= num_blocks * heads
        index = gl.where(is_end, 0, index)
        block, head = grouped_tile(index, num_blocks, heads, grid.schedule.heads_at_once)
        if grid.schedule.FALLING:
            block = num_blocks - 1 - block
        b = head // grid.schedule.heads
        return block, b, head - b * grid.schedule.heads, index >= 0, is_end


@gluon.jit
def next_tile(grid):
    """The next tile that no program has taken. Tiles are taken in order, so a program may wait for an earlier tile."""
    index = gl.to_tensor(0)
    block, b, head, is_tile, is_end = index, index, index, index < 0, index < 0
    while not (is_tile | is_end):
        index = gl.atomic_add(grid.work.counter, 1, sem="relaxed")
        block, b, head, is_tile, is_end = _place(index, grid)
    return tile_at(block, b, head, is_end, grid)


@gluon.jit
def tile_at(block, b, head, is_end, grid):
    """The ``KeyTile`` of a block of keys."""
    start_q, seqlen_q = sequence_of(grid.call.queries, b, grid)
    start_k, seqlen_k = sequence_of(grid.call.keys, b, grid)
    if grid.call.q.PACKED:
        # Keys past the last sequence have no rows.
        seqlen_q = gl.where(b < grid.call.keys.count, seqlen_q, 0)
    key = block * grid.tiles.KEYS
    last = gl.minimum(key + grid.tiles.KEYS, seqlen_k) - 1
    m_partial_max, bits = gl.to_tensor(0), gl.to_tensor(0)
    if grid.call.mods.band.lists is not None:
        m_min, m_partial_max, m_max, bits = listed_rows(b, head, key, is_end, grid)
    else:
        m_min, m_max = row_blocks_of(key, last, seqlen_q, seqlen_k, grid.call.mods.band, grid.tiles.BLOCK_M)
    if grid.call.mods.band.bounds is not None:
        inner = bounds_of(b, head, key, grid, grid.tiles.KEYS // BOUNDS_BLOCK)
        m_min, _, _, m_max = masks.narrowed(m_min, m_min, m_max, m_max, inner, grid.tiles.BLOCK_M)
    start_q, start_k = gl.to_tensor(start_q), gl.to_tensor(start_k)
    return KeyTile(is_end, b, head, key, start_q, seqlen_q, start_k, seqlen_k, m_min, m_max, m_partial_max, bits)


@gluon.jit
def pair_tile(rank, grid):
    """The tile of a program of a pair: 64 keys of its own, and the row blocks that see any of both programs' keys."""
    block, b, head, _, is_end = _place(gl.program_id(0) // 2, grid)
    t = tile_at(block, b, head, is_end, grid)
    key = t.key + rank * (grid.tiles.KEYS // 2)
    return KeyTile(
        is_end, t.b, t.head, key, t.start_q, t.seqlen_q, t.start_k, t.seqlen_k, t.m_min, t.m_max, t.m_partial_max,
        t.bits,
    )  # fmt: skip


@gluon.jit
def listed_rows(b, head, key, is_end, grid):
    """(m_min, m_partial_max, m_max, bits): positions of row blocks in the list for keys at ``key``, and its bits."""
    SPLIT: gl.constexpr = grid.call.mods.band.lists.OTHER // grid.tiles.BLOCK_M
    first, _ = query_heads(head, grid)
    exists = (b < grid.call.keys.count) & ~is_end
    start, full_start, stop = masks.list_bounds(grid.call.mods.band.lists, b, first, key, exists)
    bits = gl.to_tensor(0)
    if grid.call.mods.band.lists.BITS:
        bits = masks.bits_of(grid.call.mods.band.lists, b, first, key, start, exists)
    return start * SPLIT, full_start * SPLIT, stop * SPLIT, bits


@gluon.jit
def block_at(position, seqlen_q, grid):
    """(number, place) of a head's row block at a position of a tile's loop: in the sequence, and in the workspace.

    A list may have blocks past the sequence's end, without any pair: they get the place of the last block.
    """
    if grid.call.mods.band.lists is not None:
        BLOCK: gl.constexpr = grid.tiles.BLOCK_M
        number = masks.block_at(position, grid.call.mods.band.lists, BLOCK)
        return number, gl.maximum(gl.minimum(number, (seqlen_q + BLOCK - 1) // BLOCK - 1), 0)
    else:
        return position, position


@gluon.jit
def bounds_of(b, head, key, grid, COUNT: gl.constexpr):
    """Bounds of the rows that keep keys from ``key`` on, for COUNT entries: ``masks.bounds_of``."""
    first, _ = query_heads(head, grid)
    entry, exists = key // BOUNDS_BLOCK, b < grid.call.keys.count
    return masks.bounds_of(grid.call.mods.band.bounds, b, first, entry, exists, COUNT)


@gluon.jit
def row_blocks_of(key, last, seqlen_q, seqlen_k, band, BLOCK: gl.constexpr):
    """(first, end) of the row blocks that see some of the keys from ``key`` to ``last``."""
    m_min, _, _, m_max = query_blocks(key, last, seqlen_q, seqlen_k, band, BLOCK)
    return m_min, m_max


@gluon.jit
def row_blocks_per_head(grid):
    """The number of row blocks of one head in the workspace, for a sequence or for all packed ones."""
    VARLEN: gl.constexpr = grid.call.q.PACKED and not grid.schedule.CHAINED
    return blocks_per_head(grid.call.queries.length, grid.call.keys.count, grid.tiles.BLOCK_M, VARLEN)


@gluon.jit
def first_row_block(tile, grid):
    """The workspace's row block for row 0 of the tile's sequence and of its first query head."""
    head, _ = query_heads(tile.head, grid)
    if grid.schedule.splits is not None:
        heads = grid.call.heads.num_q
    else:
        heads = grid.schedule.heads * grid.call.heads.group_size
    # A chain's workspace has all packed sequences as one.
    b = 0 if grid.call.q.PACKED and grid.schedule.CHAINED else tile.b
    count = row_blocks_per_head(grid)
    return first_block(b, head, heads, tile.start_q, count, grid.tiles.BLOCK_M, grid.call.q.PACKED)


@gluon.jit
def key_blocks_of(first, last, seqlen_q, seqlen_k, band, BLOCK: gl.constexpr):
    """(first, end) of the blocks of keys that some of the rows from ``first`` to ``last`` see."""
    n_min, _, _, n_max = key_blocks(first, last, seqlen_q, seqlen_k, band, BLOCK)
    return n_min, n_max


# The record of a tile, from the producer to the consumers. is_tile is 0 after the last tile; row_block is the
# workspace's number of the first row block that the tile visits, with lists of the sequence's first.
FIELDS = gl.constexpr("is_tile m_min m_max key head sequence start_k seqlen_q seqlen_k row_block m_partial_max bits")
RECORD_SIZE = gl.constexpr(16)


@gluon.jit
def publish_tile(records, use, tile, grid):
    """Writes a tile's record; each thread writes one number."""
    records.ring.claim(use)
    slot = gl.arange(0, RECORD_SIZE, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    record = gl.where(slot == slot_of(FIELDS, "m_min"), tile.m_min, gl.where(tile.is_end, 0, 1))
    record = gl.where(slot == slot_of(FIELDS, "m_max"), tile.m_max, record)
    record = gl.where(slot == slot_of(FIELDS, "key"), tile.key, record)
    record = gl.where(slot == slot_of(FIELDS, "head"), tile.head, record)
    record = gl.where(slot == slot_of(FIELDS, "sequence"), tile.b, record)
    record = gl.where(slot == slot_of(FIELDS, "start_k"), tile.start_k, record)
    record = gl.where(slot == slot_of(FIELDS, "seqlen_q"), tile.seqlen_q, record)
    record = gl.where(slot == slot_of(FIELDS, "seqlen_k"), tile.seqlen_k, record)
    row_block = first_row_block(tile, grid)
    if grid.call.mods.band.lists is None:
        row_block += tile.m_min
    else:
        record = gl.where(slot == slot_of(FIELDS, "m_partial_max"), tile.m_partial_max, record)
        record = gl.where(slot == slot_of(FIELDS, "bits"), tile.bits, record)
    record = gl.where(slot == slot_of(FIELDS, "row_block"), row_block, record)
    records.ring.at(use).store(record)
    records.ring.publish(use)


@gluon.jit
def key_rows(records, use, grid):
    """The ``HeadRows`` of a tile's gradients of keys and values."""
    start, length = records.get(use, "start_k"), records.get(use, "seqlen_k")
    return HeadRows(records.get(use, "sequence"), records.get(use, "head"), start, length, grid.call.q.PACKED)


@gluon.jit
def sums_block(records, use, grid):
    """The block of a tile's keys in the sums of dk and dv, which have dq's layout."""
    head, b, block = records.get(use, "head"), records.get(use, "sequence"), records.get(use, "key") // grid.tiles.KEYS
    count, sums_each = grid.schedule.splits.count, grid.schedule.splits.sums_each
    head = head // count * sums_each + gl.minimum(head % count, sums_each - 1)
    VARLEN: gl.constexpr = grid.call.q.PACKED
    of_head = blocks_per_head(grid.call.keys.length, grid.call.keys.count, grid.tiles.KEYS, VARLEN)
    start, heads = records.get(use, "start_k"), grid.schedule.splits.sums
    return block + first_block(b, head, heads, start, of_head, grid.tiles.KEYS, VARLEN)


@aggregate
class RowBlock:
    """One row block that a tile visits.

    Attributes:
        start: The block's first row.
        head: The block's query head, counted from the first one that shares the tile's keys.
        block: The block's place in the workspace.
        remaining: The number of the head's row blocks from this one to the last that the tile visits.
    """

    start: gl.tensor
    head: gl.tensor
    block: gl.tensor
    remaining: gl.tensor


@gluon.jit
def first_rows(records, tiles, grid):
    """The first ``RowBlock`` of a tile, if it visits any."""
    steps, m_min = steps_of_a_head(records, tiles), records.get(tiles, "m_min")
    if grid.call.mods.band.lists is not None:
        return listed_row_block(gl.to_tensor(0), steps, records, tiles, grid)
    else:
        first = records.get(tiles, "row_block")
        return RowBlock(m_min * grid.tiles.BLOCK_M, gl.to_tensor(0), first, steps)


@gluon.jit
def listed_row_block(head, remaining, records, tiles, grid):
    """A tile's ``RowBlock`` with ``remaining`` blocks left in its head's list; any block for an empty list."""
    position = gl.where(remaining > 0, records.get(tiles, "m_max") - remaining, 0)
    number, place = block_at(position, records.get(tiles, "seqlen_q"), grid)
    block = records.get(tiles, "row_block") + head * row_blocks_per_head(grid) + place
    return RowBlock(number * grid.tiles.BLOCK_M, head, block, remaining)


@gluon.jit
def steps_of_a_head(records, tiles):
    """The number of row blocks that a tile visits for each query head."""
    return records.get(tiles, "m_max") - records.get(tiles, "m_min")


@gluon.jit
def next_rows(rows, records, tiles, grid):
    """The next ``RowBlock``: after a head's last one comes the first of the next head that shares the keys."""
    if grid.call.mods.band.lists is not None:
        is_last = rows.remaining == 1
        remaining = gl.where(is_last, steps_of_a_head(records, tiles), rows.remaining - 1)
        return listed_row_block(rows.head + gl.where(is_last, 1, 0), remaining, records, tiles, grid)
    else:
        start, head = rows.start + grid.tiles.BLOCK_M, rows.head
        block = rows.block + 1
        remaining = rows.remaining - 1
        if remaining == 0:
            remaining = steps_of_a_head(records, tiles)
            start -= remaining * grid.tiles.BLOCK_M
            head += 1
            block += row_blocks_per_head(grid) - remaining
        return RowBlock(start, head, block, remaining)


@gluon.jit
def dq_order_of(first, records, tiles, grid):
    """The number of tiles that add to dq's rows from ``first`` on before this one: its place in their order."""
    seqlen_q, seqlen_k = records.get(tiles, "seqlen_q"), records.get(tiles, "seqlen_k")
    last = gl.minimum(first + grid.tiles.BLOCK_M, seqlen_q) - 1
    n_min, n_max = key_blocks_of(first, last, seqlen_q, seqlen_k, grid.call.mods.band, grid.tiles.KEYS)
    n = records.get(tiles, "key") // grid.tiles.KEYS
    if grid.schedule.FALLING:
        return n_max - 1 - n
    else:
        return n - n_min
