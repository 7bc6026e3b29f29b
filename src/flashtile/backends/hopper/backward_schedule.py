"""Which block of keys a persistent program of the backward works on next, and which row blocks it visits."""

# ruff: noqa: RET505 - Triton compiles what stands behind a return, decided or not.
# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.gluon_compat import aggregate
from flashtile.backends.vocab import blocks, scheduler, sequence


@aggregate
class KeyGrid:
    """What is the same for every tile of a call. Lengths are those of a packed tensor's rows if ``varlen``.

    Tiles are handed out with keys rising, or falling if ``falling``.
    """

    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    batch: gl.tensor
    num_heads_kv: gl.tensor
    group_size: gl.tensor
    left: gl.tensor
    right: gl.tensor
    heads_at_once: gl.tensor
    has_left: gl.constexpr
    has_right: gl.constexpr
    varlen: gl.constexpr
    falling: gl.constexpr
    block_m: gl.constexpr
    block_n: gl.constexpr


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
def _place(index, grid, cu_seqlens_k_ptr):
    """(block, b, head, is_tile, is_end) of a place in the order of all tiles."""
    if grid.varlen:
        num_blocks = grid.seqlen_k // grid.block_n + grid.batch + 1
        is_end = index >= num_blocks * grid.num_heads_kv
        index = gl.where(is_end, 0, index)
        place, head = scheduler.grouped_tile(index, num_blocks, grid.num_heads_kv, grid.heads_at_once)
        if grid.falling:
            place = num_blocks - 1 - place
        b, block = scheduler.packed_tile(cu_seqlens_k_ptr, grid.batch, place, grid.block_n)
        _, length = sequence.sequence(cu_seqlens_k_ptr, b, grid.batch, grid.seqlen_k, True)
        return block, b, head, block * grid.block_n < length, is_end
    else:
        num_blocks = (grid.seqlen_k + grid.block_n - 1) // grid.block_n
        num_heads = grid.batch * grid.num_heads_kv
        is_end = index >= num_blocks * num_heads
        index = gl.where(is_end, 0, index)
        block, head = scheduler.grouped_tile(index, num_blocks, num_heads, grid.heads_at_once)
        if grid.falling:
            block = num_blocks - 1 - block
        b = head // grid.num_heads_kv
        return block, b, head - b * grid.num_heads_kv, index >= 0, is_end


@gluon.jit
def next_tile(counter_ptr, grid, cu_seqlens_q_ptr, cu_seqlens_k_ptr):
    """The next tile that no program has taken. Tiles are taken in order, so whoever waits for an earlier one may."""
    index = gl.to_tensor(0)
    block, b, head, is_tile, is_end = index, index, index, index < 0, index < 0
    while not (is_tile | is_end):
        index = gl.atomic_add(counter_ptr, 1, sem="relaxed")
        block, b, head, is_tile, is_end = _place(index, grid, cu_seqlens_k_ptr)
    start_q, seqlen_q = sequence.sequence(cu_seqlens_q_ptr, b, grid.batch, grid.seqlen_q, grid.varlen)
    start_k, seqlen_k = sequence.sequence(cu_seqlens_k_ptr, b, grid.batch, grid.seqlen_k, grid.varlen)
    if grid.varlen:
        # The keys behind the last sequence have no rows.
        seqlen_q = gl.where(b < grid.batch, seqlen_q, 0)
    key = block * grid.block_n
    last = gl.minimum(key + grid.block_n, seqlen_k) - 1
    m_min, _, _, m_max = blocks.query_blocks(
        key, last, seqlen_q, seqlen_k, grid.left, grid.right, grid.has_left, grid.has_right, grid.block_m
    )
    start_q, start_k = gl.to_tensor(start_q), gl.to_tensor(start_k)
    return KeyTile(is_end, b, head, key, start_q, seqlen_q, start_k, seqlen_k, m_min, m_max)


@gluon.jit
def row_blocks_a_head(grid):
    """Row blocks of one head in the workspace of a sequence, or of all packed ones."""
    if grid.varlen:
        # As scheduler.packed_tile counts them: every sequence starts a block of its own.
        return grid.seqlen_q // grid.block_m + grid.batch + 1
    else:
        return (grid.seqlen_q + grid.block_m - 1) // grid.block_m


@gluon.jit
def first_row_block(tile, grid):
    """The workspace's row block of the tile's sequence and of its first head of queries, row 0."""
    if grid.varlen:
        return tile.head * grid.group_size * row_blocks_a_head(grid) + tile.start_q // grid.block_m + tile.b
    else:
        return (tile.b * grid.num_heads_kv + tile.head) * grid.group_size * row_blocks_a_head(grid)


@gluon.jit
def turn(first, key, seqlen_q, seqlen_k, grid):
    """How many tiles of this head add to dq's rows from ``first`` on before the tile that starts at ``key``."""
    last = gl.minimum(first + grid.block_m, seqlen_q) - 1
    n_min, _, _, n_max = blocks.key_blocks(
        first, last, seqlen_q, seqlen_k, grid.left, grid.right, grid.has_left, grid.has_right, grid.block_n
    )
    n = key // grid.block_n
    if grid.falling:
        return n_max - 1 - n
    else:
        return n - n_min


# What the loader tells the other roles of a tile, in this order, as int32. IS_TILE is 0 behind the last one; ROW_BLOCK
# is where the workspace has the first row block that the tile visits.
RECORD_SIZE = gl.constexpr(16)
IS_TILE, M_MIN, M_MAX, KEY, HEAD, SEQUENCE, START_K, SEQLEN_Q, SEQLEN_K, ROW_BLOCK = (
    gl.constexpr(i) for i in range(10)
)  # fmt: skip


@gluon.jit
def publish_tile(ring, use, tile, grid):
    """Writes a tile's record."""
    ring.claim(use)
    lane = gl.arange(0, RECORD_SIZE, gl.BlockedLayout([1], [32], [1], [0]))
    record = gl.where(lane == M_MIN, tile.m_min, gl.where(tile.is_end, 0, 1))
    record = gl.where(lane == M_MAX, tile.m_max, record)
    record = gl.where(lane == KEY, tile.key, record)
    record = gl.where(lane == HEAD, tile.head, record)
    record = gl.where(lane == SEQUENCE, tile.b, record)
    record = gl.where(lane == START_K, tile.start_k, record)
    record = gl.where(lane == SEQLEN_Q, tile.seqlen_q, record)
    record = gl.where(lane == SEQLEN_K, tile.seqlen_k, record)
    record = gl.where(lane == ROW_BLOCK, first_row_block(tile, grid) + tile.m_min, record)
    ring.at(use).store(record)
    ring.publish(use)
