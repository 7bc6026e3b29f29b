"""Which tile a persistent program works on next, where its rows and keys lie, and which key blocks it visits."""

# ruff: noqa: RET505 - Triton compiles what stands behind a return, decided or not.
# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.gluon_compat import aggregate
from flashtile.backends.vocab import balanced, blocks, scheduler, sequence

# TMA bounds every dimension of a tensor, but knows nothing of the sequences packed into one. A descriptor of a packed
# tensor has two dimensions more, whose strides cancel modulo 2**64, so that the row coordinate runs into its bound,
# PACKED_ROWS, exactly where the sequence ends: loads are filled with zeros there and stores are dropped.
PACKED_ROWS = gl.constexpr(2**30)


@aggregate
class Sizes:
    """What is the same for every tile of a call. Lengths are those of a packed tensor's rows if ``varlen``.

    ``has_edges``: a warpgroup may meet an edge of the band behind its first block of keys. ``in_turns``: warpgroups
    take turns in starting products. ``cached_rows`` keys and values are taken to fit into the L2 cache.
    """

    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    batch: gl.tensor
    num_heads_q: gl.tensor
    group_size: gl.tensor
    left: gl.tensor
    right: gl.tensor
    has_left: gl.constexpr
    has_right: gl.constexpr
    has_edges: gl.constexpr
    varlen: gl.constexpr
    block_m: gl.constexpr
    block_n: gl.constexpr
    groups: gl.constexpr
    in_turns: gl.constexpr
    cached_rows: gl.constexpr


@aggregate
class Tile:
    """One tile: ``groups * block_m`` rows of one head of one sequence, from ``row`` on; ``step`` comes after it."""

    step: gl.tensor
    is_end: gl.tensor
    b: gl.tensor
    head: gl.tensor
    row: gl.tensor
    start_q: gl.tensor
    seqlen_q: gl.tensor
    start_k: gl.tensor
    seqlen_k: gl.tensor


@gluon.jit
def _deal(step, num_places, counter_ptr):
    """(place, is_end): where in the order of all tiles this program's step stands; with a counter, the next free place.

    Every program draws until it has drawn one place behind the last. So the last draw of all can be told by its number,
    and its program leaves the counter as it found it, for the next launch.
    """
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    if counter_ptr is not None:
        place = program
        if step > 0:
            place = num_programs + gl.atomic_add(counter_ptr, 1, sem="relaxed")
            if place == num_places + num_programs - 1:
                gl.store(counter_ptr, 0)
    else:
        place = step * num_programs + program
    return place, place >= num_places


@gluon.jit
def _place(step, sizes, cu_seqlens_q_ptr, counter_ptr):
    """(block, b, head, is_tile, is_end) of a step of this program."""
    rows: gl.constexpr = sizes.groups * sizes.block_m
    if sizes.varlen:
        num_tiles = sizes.seqlen_q // rows + sizes.batch + 1
        place, is_end = _deal(step, num_tiles * sizes.num_heads_q, counter_ptr)
        place = gl.where(is_end, 0, place)
        index = place // sizes.num_heads_q
        head = place - index * sizes.num_heads_q
        index = scheduler.longest_first(index, num_tiles, sizes.has_right)
        b, block = scheduler.packed_tile(cu_seqlens_q_ptr, sizes.batch, index, rows)
        _, length = sequence.sequence(cu_seqlens_q_ptr, b, sizes.batch, sizes.seqlen_q, True)
        return block, b, head, block * rows < length, is_end
    else:
        num_blocks = (sizes.seqlen_q + rows - 1) // rows
        num_heads = sizes.batch * sizes.num_heads_q
        if sizes.has_right and counter_ptr is None:
            program, num_programs = gl.program_id(0), gl.num_programs(0)
            block, head, is_tile, is_end = balanced.paired(step, program, num_programs, num_blocks, num_heads)
        else:
            place, is_end = _deal(step, num_blocks * num_heads, counter_ptr)
            is_tile = step >= 0
            if sizes.has_right:
                span = gl.maximum(sizes.cached_rows // sizes.seqlen_k, 1) * sizes.group_size
                block, head = balanced.longest_first_by_spans(place, num_blocks, num_heads, span)
            else:
                head = place // num_blocks
                block = place - head * num_blocks
        b = head // sizes.num_heads_q
        if not sizes.has_right:
            # The same, without a product that the compiler would compute ahead of all roles.
            is_end = b >= sizes.batch
        return block, b, head - b * sizes.num_heads_q, is_tile, is_end


@gluon.jit
def next_tile(step, sizes, cu_seqlens_q_ptr, cu_seqlens_k_ptr, counter_ptr):
    """The first tile of this program at ``step`` or behind it."""
    step = gl.to_tensor(step)
    block, b, head, is_tile, is_end = step, step, step, step < 0, step < 0
    while not (is_tile | is_end):
        block, b, head, is_tile, is_end = _place(step, sizes, cu_seqlens_q_ptr, counter_ptr)
        step += 1
    start_q, seqlen_q = sequence.sequence(cu_seqlens_q_ptr, b, sizes.batch, sizes.seqlen_q, sizes.varlen)
    start_k, seqlen_k = sequence.sequence(cu_seqlens_k_ptr, b, sizes.batch, sizes.seqlen_k, sizes.varlen)
    if sizes.varlen:
        # The rows behind the last sequence have no keys.
        seqlen_k = gl.where(b < sizes.batch, seqlen_k, 0)
    row = block * (sizes.groups * sizes.block_m)
    start_q, start_k = gl.to_tensor(start_q), gl.to_tensor(start_k)
    return Tile(step, is_end, b, head, row, start_q, seqlen_q, start_k, seqlen_k)


@gluon.jit
def key_blocks(tile, sizes):
    """The key blocks [n_block_min, n_block_max) that a tile loads: at least one.

    A tile without keys gets a block behind the end of the keys, which TMA fills with zeros: nothing that the tensors
    hold can reach its rows.
    """
    last = gl.minimum(tile.row + sizes.groups * sizes.block_m, tile.seqlen_q) - 1
    n_block_min, _, _, n_block_max = blocks.key_blocks(
        tile.row, last, tile.seqlen_q, tile.seqlen_k, sizes.left, sizes.right, sizes.has_left, sizes.has_right,
        sizes.block_n,
    )  # fmt: skip
    is_empty = n_block_min >= n_block_max
    n_block_min = gl.where(is_empty, (tile.seqlen_k + sizes.block_n - 1) // sizes.block_n, n_block_min)
    return n_block_min, gl.where(is_empty, n_block_min + 1, n_block_max)


@gluon.jit
def group_blocks(tile, group, n_block_min, n_block_max, sizes):
    """What one warpgroup of a tile, or each of several, makes of the tile's key blocks [n_block_min, n_block_max).

    Returns:
        (n_full_min, n_full_max, skipped): blocks outside [n_full_min, n_full_max) need a mask. The warpgroup leaves
        out ``skipped`` blocks at the upper end, 0 or 1: the producer goes through a tile from above, and waits for the
        value block before last.
    """
    first = tile.row + group * sizes.block_m
    last = gl.minimum(first + sizes.block_m, tile.seqlen_q) - 1
    _, n_full_min, n_full_max, own_max = blocks.key_blocks(
        first, last, tile.seqlen_q, tile.seqlen_k, sizes.left, sizes.right, sizes.has_left, sizes.has_right,
        sizes.block_n,
    )  # fmt: skip
    skipped = gl.where((own_max < n_block_max) & (n_block_max - n_block_min > 1), 1, 0)
    return n_full_min, n_full_max, skipped


# What the scheduler tells the other roles of a tile, in this order, as int32. n_block_max is 0 behind the last tile;
# POSITION is the key position of the first row. Read from shared memory when needed, a tile costs the consumers no
# registers.
RECORD_SIZE = gl.constexpr(32)
N_BLOCK_MIN, N_BLOCK_MAX, ROW, HEAD, SEQUENCE = (gl.constexpr(i) for i in range(5))
START_Q, SEQLEN_Q, START_K, SEQLEN_K, HEAD_KV, POSITION = (gl.constexpr(i) for i in range(5, 11))
# From GROUPS_AT on, four numbers a warpgroup.
GROUPS_AT = gl.constexpr(16)
N_FULL_MIN, N_FULL_MAX, SKIPPED = (gl.constexpr(i) for i in range(3))


@gluon.jit
def publish_tile(ring, use, tile, sizes):
    """Writes a tile's record into a claimed buffer; each lane has a number of it."""
    n_block_min, n_block_max = key_blocks(tile, sizes)
    lane = gl.arange(0, RECORD_SIZE, gl.BlockedLayout([1], [32], [1], [0]))
    record = gl.where(lane == N_BLOCK_MIN, n_block_min, gl.where(tile.is_end, 0, n_block_max))
    record = gl.where(lane == ROW, tile.row, record)
    record = gl.where(lane == HEAD, tile.head, record)
    record = gl.where(lane == SEQUENCE, tile.b, record)
    record = gl.where(lane == START_Q, tile.start_q, record)
    record = gl.where(lane == SEQLEN_Q, tile.seqlen_q, record)
    record = gl.where(lane == START_K, tile.start_k, record)
    record = gl.where(lane == SEQLEN_K, tile.seqlen_k, record)
    record = gl.where(lane == HEAD_KV, tile.head // sizes.group_size, record)
    record = gl.where(lane == POSITION, tile.row + tile.seqlen_k - tile.seqlen_q, record)
    if sizes.has_left or sizes.has_right or sizes.varlen:
        n_full_min, n_full_max, skipped = group_blocks(tile, (lane - GROUPS_AT) // 4, n_block_min, n_block_max, sizes)
        which = lane % 4
        of_group = gl.where(which == N_FULL_MIN, n_full_min, gl.where(which == N_FULL_MAX, n_full_max, skipped))
        record = gl.where(lane < GROUPS_AT, record, of_group)
    ring.at(use).store(record)
    ring.publish(use)


@gluon.jit
def field(ring, use, FIELD: gl.constexpr, WARPS: gl.constexpr = 4):
    """One number of a tile's record, for a role of so many warps."""
    one = ring.at(use).slice(FIELD, 1).load(gl.BlockedLayout([1], [32], [WARPS], [0]))
    return gl.max(one, 0)


@gluon.jit
def coordinates(b, start, length, row, head, col, VARLEN: gl.constexpr):
    """TMA coordinates of a row and column of one head of a sequence."""
    if VARLEN:
        return PACKED_ROWS, start + length, PACKED_ROWS - length + row, head, col
    else:
        return b, row, head, col


@gluon.jit
def lse_of(b, head, start_q, sizes):
    """Where in lse a sequence's rows of one head begin."""
    if sizes.varlen:
        return head * sizes.seqlen_q + start_q
    else:
        return (b * sizes.num_heads_q + head) * sizes.seqlen_q
