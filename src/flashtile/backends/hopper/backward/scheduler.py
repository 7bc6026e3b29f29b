"""Which block of keys a persistent program of the backward works on next, and which row blocks it visits."""

# ruff: noqa: RET505 - Triton compiles what stands after a return, decided or not.
# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.device import blocks, scheduler, sequence
from flashtile.backends.hopper.backward.workspace import blocks_per_head
from flashtile.backends.hopper.device.coordinates import HeadRows
from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.device.ring import slot_of


@aggregate
class KeyGrid:
    """What is the same for every tile of a call. Lengths are those of a packed tensor's rows if ``varlen``.

    Tiles are handed out with keys rising, or falling if ``falling``. A tile has ``parts`` of 64 keys each. Each of
    ``dq_warpgroups`` has ``dq_share`` columns of 64 rows of a row block's dq, and computes ``dq_width`` at once.
    ``has_dq`` and its like say which gradients are computed; dq and dk need those of the scores, ``has_dscores``. If
    ``adds``, dk and dv are added to what is there. If ``chained``, the workspace has the rows of all packed sequences
    as those of one.

    ``first_head`` and ``heads`` are of a chain's: the key heads of which there are tiles.

    ``splits_gqa``: the query heads of a key head are cut into ``gqa_splits`` of ``heads_per_split`` heads (the last may
    have fewer), and a tile visits one split: its ``head`` is ``key head * gqa_splits + split``. Its dk and dv are added
    to sums, ``sum_heads`` of them a key head: one, or one for each split.
    """

    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    batch: gl.tensor
    num_heads_kv: gl.tensor
    group_size: gl.tensor
    gqa_splits: gl.tensor
    heads_per_split: gl.tensor
    sum_heads: gl.tensor
    left: gl.tensor
    right: gl.tensor
    heads_at_once: gl.tensor
    first_head: gl.tensor
    heads: gl.tensor
    softmax_scale: gl.tensor
    has_left: gl.constexpr
    has_right: gl.constexpr
    varlen: gl.constexpr
    falling: gl.constexpr
    block_m: gl.constexpr
    block_n: gl.constexpr
    block_d: gl.constexpr
    block_dv: gl.constexpr
    parts: gl.constexpr
    dq_warpgroups: gl.constexpr
    dq_share: gl.constexpr
    dq_width: gl.constexpr
    has_dscores: gl.constexpr
    has_dq: gl.constexpr
    has_dk: gl.constexpr
    has_dv: gl.constexpr
    adds: gl.constexpr
    chained: gl.constexpr
    splits_gqa: gl.constexpr


@gluon.jit
def num_heads_of_tiles(grid):
    """Heads of tiles in each sequence: key heads, or the splits of all of them."""
    if grid.splits_gqa:
        return grid.num_heads_kv * grid.gqa_splits
    elif grid.chained:
        return grid.heads
    else:
        return grid.num_heads_kv


@gluon.jit
def key_head(head, grid):
    """The key head of a tile's head."""
    if grid.splits_gqa:
        return head // grid.gqa_splits
    else:
        return head


@gluon.jit
def query_heads(head, grid):
    """(first, number) of the query heads of a tile's head."""
    if grid.splits_gqa:
        place = head % grid.gqa_splits * grid.heads_per_split
        first = head // grid.gqa_splits * grid.group_size + place
        return first, gl.minimum(grid.group_size - place, grid.heads_per_split)
    else:
        return head * grid.group_size, grid.group_size


@aggregate
class KeyTile:
    """One tile: ``block_n`` keys of one head of one sequence, from ``key`` on, and the row blocks that see them."""

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


@gluon.jit
def _place(index, grid, cu_seqlens_q_ptr, cu_seqlens_k_ptr):
    """(block, b, head, is_tile, is_end) of a place in the order of all tiles.

    Sequences without rows have no tiles where gradients are added to what is there.
    """
    if grid.varlen:
        num_blocks = grid.seqlen_k // grid.block_n + grid.batch + 1
        num_heads = num_heads_of_tiles(grid)
        is_end = index >= num_blocks * num_heads
        index = gl.where(is_end, 0, index)
        place, head = scheduler.grouped_tile(index, num_blocks, num_heads, grid.heads_at_once)
        if grid.chained:
            head += grid.first_head
        if grid.falling:
            place = num_blocks - 1 - place
        b, block = scheduler.packed_tile(cu_seqlens_k_ptr, grid.batch, place, grid.block_n)
        _, length = sequence.sequence(cu_seqlens_k_ptr, b, grid.batch, grid.seqlen_k, True)
        is_tile = block * grid.block_n < length
        if grid.adds:
            _, rows = sequence.sequence(cu_seqlens_q_ptr, b, grid.batch, grid.seqlen_q, True)
            is_tile = is_tile & (rows > 0) & (b < grid.batch)
        return block, b, head, is_tile, is_end
    else:
        num_blocks = (grid.seqlen_k + grid.block_n - 1) // grid.block_n
        heads_each = num_heads_of_tiles(grid)
        num_heads = grid.batch * heads_each
        is_end = index >= num_blocks * num_heads
        index = gl.where(is_end, 0, index)
        block, head = scheduler.grouped_tile(index, num_blocks, num_heads, grid.heads_at_once)
        if grid.falling:
            block = num_blocks - 1 - block
        b = head // heads_each
        return block, b, head - b * heads_each, index >= 0, is_end


@gluon.jit
def next_tile(counter_ptr, grid, cu_seqlens_q_ptr, cu_seqlens_k_ptr):
    """The next tile that no program has taken. Tiles are taken in order, so whoever waits for an earlier one may."""
    index = gl.to_tensor(0)
    block, b, head, is_tile, is_end = index, index, index, index < 0, index < 0
    while not (is_tile | is_end):
        index = gl.atomic_add(counter_ptr, 1, sem="relaxed")
        block, b, head, is_tile, is_end = _place(index, grid, cu_seqlens_q_ptr, cu_seqlens_k_ptr)
    start_q, seqlen_q = sequence.sequence(cu_seqlens_q_ptr, b, grid.batch, grid.seqlen_q, grid.varlen)
    start_k, seqlen_k = sequence.sequence(cu_seqlens_k_ptr, b, grid.batch, grid.seqlen_k, grid.varlen)
    if grid.varlen:
        # The keys past the last sequence have no rows.
        seqlen_q = gl.where(b < grid.batch, seqlen_q, 0)
    key = block * grid.block_n
    last = gl.minimum(key + grid.block_n, seqlen_k) - 1
    m_min, _, _, m_max = blocks.query_blocks(
        key, last, seqlen_q, seqlen_k, grid.left, grid.right, grid.has_left, grid.has_right, grid.block_m
    )
    start_q, start_k = gl.to_tensor(start_q), gl.to_tensor(start_k)
    return KeyTile(is_end, b, head, key, start_q, seqlen_q, start_k, seqlen_k, m_min, m_max)


@gluon.jit
def row_blocks_per_head(grid):
    """Row blocks of one head in the workspace of a sequence, or of all packed ones."""
    return blocks_per_head(grid.seqlen_q, grid.batch, grid.block_m, grid.varlen and not grid.chained)


@gluon.jit
def first_row_block(tile, grid):
    """The workspace's row block of the tile's sequence and of its first head of queries, row 0."""
    head, _ = query_heads(tile.head, grid)
    if grid.varlen:
        first = head * row_blocks_per_head(grid) + tile.start_q // grid.block_m
        if not grid.chained:
            first += tile.b
        return first
    else:
        return (tile.b * grid.num_heads_kv * grid.group_size + head) * row_blocks_per_head(grid)


@gluon.jit
def tiles_before(first, key, seqlen_q, seqlen_k, grid):
    """How many tiles add to dq's rows from ``first`` on before the tile that starts at ``key``."""
    last = gl.minimum(first + grid.block_m, seqlen_q) - 1
    n_min, _, _, n_max = blocks.key_blocks(
        first, last, seqlen_q, seqlen_k, grid.left, grid.right, grid.has_left, grid.has_right, grid.block_n
    )
    n = key // grid.block_n
    if grid.falling:
        return n_max - 1 - n
    else:
        return n - n_min


# What the producer tells the consumers of a tile. is_tile is 0 after the last one; row_block is where the workspace has
# the first row block that the tile visits.
FIELDS = gl.constexpr("is_tile m_min m_max key head sequence start_k seqlen_q seqlen_k row_block")
RECORD_SIZE = gl.constexpr(16)


@gluon.jit
def publish_tile(records, use, tile, grid):
    """Writes a tile's record; each thread has a number of it."""
    records.ring.claim(use)
    slot = gl.arange(0, RECORD_SIZE, gl.BlockedLayout([1], [32], [1], [0]))
    record = gl.where(slot == slot_of(FIELDS, "m_min"), tile.m_min, gl.where(tile.is_end, 0, 1))
    record = gl.where(slot == slot_of(FIELDS, "m_max"), tile.m_max, record)
    record = gl.where(slot == slot_of(FIELDS, "key"), tile.key, record)
    record = gl.where(slot == slot_of(FIELDS, "head"), tile.head, record)
    record = gl.where(slot == slot_of(FIELDS, "sequence"), tile.b, record)
    record = gl.where(slot == slot_of(FIELDS, "start_k"), tile.start_k, record)
    record = gl.where(slot == slot_of(FIELDS, "seqlen_q"), tile.seqlen_q, record)
    record = gl.where(slot == slot_of(FIELDS, "seqlen_k"), tile.seqlen_k, record)
    record = gl.where(slot == slot_of(FIELDS, "row_block"), first_row_block(tile, grid) + tile.m_min, record)
    records.ring.at(use).store(record)
    records.ring.publish(use)


@gluon.jit
def key_rows(records, use, grid):
    """Where a tile's gradients of keys and values lie."""
    start, length = records.get(use, "start_k"), records.get(use, "seqlen_k")
    return HeadRows(records.get(use, "sequence"), records.get(use, "head"), start, length, grid.varlen)


@gluon.jit
def sums_block(records, use, grid):
    """The block of a tile's keys among the sums of dk and dv, which are laid out as dq is."""
    head, b, block = records.get(use, "head"), records.get(use, "sequence"), records.get(use, "key") // grid.block_n
    head = head // grid.gqa_splits * grid.sum_heads + gl.minimum(head % grid.gqa_splits, grid.sum_heads - 1)
    if grid.varlen:
        block += records.get(use, "start_k") // grid.block_n + b
    else:
        head += b * grid.num_heads_kv * grid.sum_heads
    return head * blocks_per_head(grid.seqlen_k, grid.batch, grid.block_n, grid.varlen) + block


@aggregate
class RowBlock:
    """One row block that a tile visits.

    Attributes:
        start: Its first row.
        head: Its query head, counted from the first that shares the tile's keys.
        block: Its place in the workspace.
        remaining: Row blocks of the head from this one on, to the last that the tile visits.
    """

    start: gl.tensor
    head: gl.tensor
    block: gl.tensor
    remaining: gl.tensor


@gluon.jit
def first_rows(records, tiles, grid):
    """The first ``RowBlock`` of a tile."""
    m_min = records.get(tiles, "m_min")
    return RowBlock(
        m_min * grid.block_m, gl.to_tensor(0), records.get(tiles, "row_block"), steps_of_a_head(records, tiles)
    )


@gluon.jit
def steps_of_a_head(records, tiles):
    """Row blocks of each query head that a tile visits."""
    return records.get(tiles, "m_max") - records.get(tiles, "m_min")


@gluon.jit
def next_rows(rows, records, tiles, grid):
    """The next ``RowBlock``: after a head's last one comes the lowest of the next head that shares the keys."""
    start, head = rows.start + grid.block_m, rows.head
    block = rows.block + 1
    remaining = rows.remaining - 1
    if remaining == 0:
        remaining = steps_of_a_head(records, tiles)
        start -= remaining * grid.block_m
        head += 1
        block += row_blocks_per_head(grid) - remaining
    return RowBlock(start, head, block, remaining)


@gluon.jit
def dq_order_of(start, records, tiles, grid):
    """The value of the rows' dq_order semaphore at which this tile may add to their dq."""
    key = records.get(tiles, "key")
    seqlen_q, seqlen_k = records.get(tiles, "seqlen_q"), records.get(tiles, "seqlen_k")
    return tiles_before(start, key, seqlen_q, seqlen_k, grid)
