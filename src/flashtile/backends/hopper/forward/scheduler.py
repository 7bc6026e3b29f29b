"""Which tile a persistent program works on next, where its rows and keys lie, and which key blocks it visits."""

# ruff: noqa: RET505 - Triton compiles what stands after a return, decided or not.
# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.device.coordinates import HeadRows
from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.device.ring import FIRST_OWN, OWN_SLOTS, slot_of
from flashtile.backends.vocab import balanced, blocks, scheduler, sequence


@aggregate
class Sizes:
    """What is the same for every tile of a call. Lengths are those of a packed tensor's rows if ``varlen``.

    ``has_edges``: a warpgroup may meet an edge of the band after its first block of keys. ``overlap``: a tile's first
    scores are started before the end of the one before. ``in_turns``: warpgroups take turns in starting products.
    ``cached_rows`` keys and values are taken to fit into the L2 cache.
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
    num_warpgroups: gl.constexpr
    overlap: gl.constexpr
    in_turns: gl.constexpr
    cached_rows: gl.constexpr


@aggregate
class Tile:
    """``num_warpgroups * block_m`` rows of one head of one sequence, from ``row`` on; ``step`` comes after it."""

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

    Each program fetches one place past the end; the last fetch of all can be told by its number, and its program resets
    the counter for the next launch.
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
    rows: gl.constexpr = sizes.num_warpgroups * sizes.block_m
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
            # The same, without a product that the compiler would hoist above warp_specialize.
            is_end = b >= sizes.batch
        return block, b, head - b * sizes.num_heads_q, is_tile, is_end


@gluon.jit
def next_tile(step, sizes, cu_seqlens_q_ptr, cu_seqlens_k_ptr, counter_ptr):
    """The first tile of this program at ``step`` or after it."""
    step = gl.to_tensor(step)
    block, b, head, is_tile, is_end = step, step, step, step < 0, step < 0
    while not (is_tile | is_end):
        block, b, head, is_tile, is_end = _place(step, sizes, cu_seqlens_q_ptr, counter_ptr)
        step += 1
    start_q, seqlen_q = sequence.sequence(cu_seqlens_q_ptr, b, sizes.batch, sizes.seqlen_q, sizes.varlen)
    start_k, seqlen_k = sequence.sequence(cu_seqlens_k_ptr, b, sizes.batch, sizes.seqlen_k, sizes.varlen)
    if sizes.varlen:
        # The rows past the last sequence have no keys.
        seqlen_k = gl.where(b < sizes.batch, seqlen_k, 0)
    row = block * (sizes.num_warpgroups * sizes.block_m)
    start_q, start_k = gl.to_tensor(start_q), gl.to_tensor(start_k)
    return Tile(step, is_end, b, head, row, start_q, seqlen_q, start_k, seqlen_k)


@gluon.jit
def key_blocks(tile, sizes):
    """The key blocks [n_block_min, n_block_max) that a tile loads: at least one.

    A tile without keys gets a block past the end of the keys, which TMA fills with zeros: nothing that the tensors hold
    can reach its rows.
    """
    last = gl.minimum(tile.row + sizes.num_warpgroups * sizes.block_m, tile.seqlen_q) - 1
    n_block_min, _, _, n_block_max = blocks.key_blocks(
        tile.row, last, tile.seqlen_q, tile.seqlen_k, sizes.left, sizes.right, sizes.has_left, sizes.has_right,
        sizes.block_n,
    )  # fmt: skip
    is_empty = n_block_min >= n_block_max
    n_block_min = gl.where(is_empty, (tile.seqlen_k + sizes.block_n - 1) // sizes.block_n, n_block_min)
    return n_block_min, gl.where(is_empty, n_block_min + 1, n_block_max)


@gluon.jit
def warpgroup_blocks(tile, warpgroup, n_block_min, n_block_max, sizes):
    """What one warpgroup of a tile, or each of several, makes of the tile's key blocks [n_block_min, n_block_max).

    Returns:
        (n_full_min, n_full_max, skipped): blocks outside [n_full_min, n_full_max) need a mask. The warpgroup leaves
        out ``skipped`` blocks at the upper end, 0 or 1: the producer goes through a tile from above, and waits for the
        value block before last.
    """
    first = tile.row + warpgroup * sizes.block_m
    last = gl.minimum(first + sizes.block_m, tile.seqlen_q) - 1
    _, n_full_min, n_full_max, own_max = blocks.key_blocks(
        first, last, tile.seqlen_q, tile.seqlen_k, sizes.left, sizes.right, sizes.has_left, sizes.has_right,
        sizes.block_n,
    )  # fmt: skip
    skipped = gl.where((own_max < n_block_max) & (n_block_max - n_block_min > 1), 1, 0)
    return n_full_min, n_full_max, skipped


# What the scheduler tells the other roles of a tile. n_block_max is 0 after the last tile; position is the key position
# of the first row.
FIELDS = gl.constexpr(
    "n_block_min n_block_max row head head_kv sequence start_q seqlen_q start_k seqlen_k position"
)  # fmt: skip
OWN_FIELDS = gl.constexpr("n_full_min n_full_max skipped")
RECORD_SIZE = gl.constexpr(32)


@gluon.jit
def publish_tile(records, use, tile, sizes):
    """Writes a tile's record into a claimed buffer; each thread has a number of it."""
    n_block_min, n_block_max = key_blocks(tile, sizes)
    slot = gl.arange(0, RECORD_SIZE, gl.BlockedLayout([1], [32], [1], [0]))
    record = gl.where(slot == slot_of(FIELDS, "n_block_min"), n_block_min, gl.where(tile.is_end, 0, n_block_max))
    record = gl.where(slot == slot_of(FIELDS, "row"), tile.row, record)
    record = gl.where(slot == slot_of(FIELDS, "head"), tile.head, record)
    record = gl.where(slot == slot_of(FIELDS, "head_kv"), tile.head // sizes.group_size, record)
    record = gl.where(slot == slot_of(FIELDS, "sequence"), tile.b, record)
    record = gl.where(slot == slot_of(FIELDS, "start_q"), tile.start_q, record)
    record = gl.where(slot == slot_of(FIELDS, "seqlen_q"), tile.seqlen_q, record)
    record = gl.where(slot == slot_of(FIELDS, "start_k"), tile.start_k, record)
    record = gl.where(slot == slot_of(FIELDS, "seqlen_k"), tile.seqlen_k, record)
    record = gl.where(slot == slot_of(FIELDS, "position"), tile.row + tile.seqlen_k - tile.seqlen_q, record)
    if sizes.has_left or sizes.has_right or sizes.varlen:
        warpgroup = (slot - FIRST_OWN) // OWN_SLOTS
        n_full_min, n_full_max, skipped = warpgroup_blocks(tile, warpgroup, n_block_min, n_block_max, sizes)
        own = slot % OWN_SLOTS
        number = gl.where(own == slot_of(OWN_FIELDS, "n_full_max"), n_full_max, skipped)
        number = gl.where(own == slot_of(OWN_FIELDS, "n_full_min"), n_full_min, number)
        record = gl.where(slot < FIRST_OWN, record, number)
    records.ring.at(use).store(record)
    records.ring.publish(use)


@gluon.jit
def query_rows(records, use, sizes):
    """Where a tile's queries and its output lie."""
    start, length = gl.to_tensor(0), sizes.seqlen_q
    if sizes.varlen:
        start, length = records.get(use, "start_q"), records.get(use, "seqlen_q")
    return HeadRows(records.get(use, "sequence"), records.get(use, "head"), start, length, sizes.varlen)


@gluon.jit
def key_rows(records, use, sizes):
    """Where a tile's keys and values lie."""
    start, length = gl.to_tensor(0), sizes.seqlen_k
    if sizes.varlen:
        start, length = records.get(use, "start_k"), records.get(use, "seqlen_k")
    return HeadRows(records.get(use, "sequence"), records.get(use, "head_kv"), start, length, sizes.varlen)


@gluon.jit
def lse_offset(rows, sizes):
    """Where in lse the ``query_rows`` of a tile's sequence and head begin."""
    if sizes.varlen:
        return rows.head * sizes.seqlen_q + rows.start
    else:
        return (rows.b * sizes.num_heads_q + rows.head) * sizes.seqlen_q
