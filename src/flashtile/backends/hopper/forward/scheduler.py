"""Chooses the next tile of a persistent program, its rows and keys, and the key blocks that it visits."""

# ruff: noqa: RET505 - Triton compiles code after a return, even if the condition is decided.
# Triton's aggregate reads annotations as types, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.device import masks, tiles
from flashtile.backends.gpu.device.records import KeyBand
from flashtile.backends.hopper.device import records
from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.device.parts import HeadRows, append
from flashtile.backends.hopper.device.ring import FIRST_OWN, OWN_SLOTS, slot_of

# The number of rows that share bounds of intervals.
BOUNDS_BLOCK = gl.constexpr(records.BOUNDS_BLOCK)
# Sentinel position for an empty block list. It maps to key _LAST_KEY, which is out of bounds, so TMA loads zeros.
NOWHERE = gl.constexpr(2**30)
_LAST_KEY = gl.constexpr(2**28)


@gluon.constexpr_function
def has_own_blocks(left, right, bounds, own_lengths):
    """Whether warpgroups mask different blocks."""
    return left is not None or right is not None or bounds is not None or own_lengths


@aggregate
class Tile:
    """``NUM_WARPGROUPS * BLOCK_M`` rows of a sequence from ``row`` on, for ``head`` or its group's heads from it on.

    ``step`` is the step after the tile's. ``right`` is the band's right bound for the sequence.
    """

    step: gl.tensor
    is_end: gl.tensor
    b: gl.tensor
    head: gl.tensor
    row: gl.tensor
    start_q: gl.tensor
    seqlen_q: gl.tensor
    start_k: gl.tensor
    seqlen_k: gl.tensor
    right: gl.tensor | gl.constexpr


@gluon.jit
def num_rows(seqlen_q, call, schedule):
    """The number of rows of a sequence's tiles: its queries, or with PACK_GQA a group's, rounded up to whole strips."""
    if schedule.PACK_GQA:
        return (seqlen_q + schedule.STRIP - 1) // schedule.STRIP * schedule.STRIP * call.heads.group_size
    else:
        return seqlen_q


@gluon.jit
def query_of(row, call, schedule):
    """(position, head within the group) of a row of a tile."""
    if schedule.PACK_GQA:
        strip = row // schedule.STRIP
        place = strip // call.heads.group_size
        return place * schedule.STRIP + row % schedule.STRIP, strip - place * call.heads.group_size
    else:
        return row, row * 0


@gluon.jit
def positions_of(row, ROWS: gl.constexpr, seqlen_q, call, schedule):
    """The first and the last position of ROWS rows; ``row`` is a strip's first row."""
    first, _ = query_of(row, call, schedule)
    last, _ = query_of(row + (ROWS - 1), call, schedule)
    return first, gl.minimum(last, seqlen_q - 1)


@gluon.jit
def _deal(step, num_places, counter_ptr):
    """(place, is_end): the index of this program's next tile, static or from an atomic counter.

    Each program fetches one index past the end, so the highest index that is fetched is known. The program that gets it
    resets the counter for the next launch.
    """
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    if counter_ptr is not None:
        place = program
        if step > 0:
            place = num_programs + gl.atomic_add(counter_ptr, 1, sem="relaxed")
            if place == num_places + num_programs - 1:
                gl.atomic_xchg(counter_ptr, 0, sem="relaxed")
    else:
        place = step * num_programs + program
    return place, place >= num_places


@gluon.jit
def _place(step, source, call, schedule):
    """(block, b, head, is_tile, is_end) for a step of this program."""
    rows: gl.constexpr = schedule.NUM_WARPGROUPS * schedule.BLOCK_M
    # The number of heads (with PACK_GQA groups) with tiles of their own, and the number of heads in each.
    own_heads, packed = call.heads.num_q, 1
    if schedule.PACK_GQA:
        own_heads, packed = call.heads.num_q // call.heads.group_size, call.heads.group_size
    SPARE: gl.constexpr = schedule.STRIP - 1 if schedule.PACK_GQA else 0
    # Lists may have any form, but most are made from causal masks.
    UNEVEN: gl.constexpr = call.mods.band.right is not None or call.mods.band.lists is not None
    if call.q.PACKED:
        num_tiles = tiles.first_packed_tile(call.queries.length, call.queries.count + 1, rows, packed, SPARE)
        place, is_end = _deal(step, num_tiles * own_heads, schedule.counter)
        place = gl.where(is_end, 0, place)
        index = place // own_heads
        head = place - index * own_heads
        index = source.order(index, num_tiles, UNEVEN, call)
        b, block = tiles.packed_tile(call.queries.cu_seqlens, call.queries.count, index, rows, packed, SPARE)
        _, length = tiles.sequence(call.queries.cu_seqlens, b, call.queries.count, call.queries.length, True)
        is_tile = source.takes(block * rows < num_rows(length, call, schedule), b, length, call)
        return block, b, head * packed, is_tile, is_end
    else:
        num_blocks = (num_rows(call.queries.length, call, schedule) + rows - 1) // rows
        num_heads = call.queries.count * own_heads
        if call.mods.band.right is not None and schedule.counter is None:
            program, num_programs = gl.program_id(0), gl.num_programs(0)
            block, head, is_tile, is_end = tiles.paired(step, program, num_programs, num_blocks, num_heads)
        else:
            place, is_end = _deal(step, num_blocks * num_heads, schedule.counter)
            is_tile = step >= 0
            if UNEVEN:
                most = gl.maximum(schedule.CACHED_ROWS // call.keys.length, 1) * (call.heads.group_size // packed)
                num_programs = gl.num_programs(0)
                block, head = tiles.longest_first_by_spans(place, num_blocks, num_heads, most, num_programs)
            else:
                head = place // num_blocks
                block = place - head * num_blocks
        b = head // own_heads
        if not UNEVEN:
            # This equals place >= num_places, without a product that the compiler would hoist above warp_specialize.
            is_end = b >= call.queries.count
        return block, b, (head - b * own_heads) * packed, is_tile, is_end


@gluon.jit
def next_tile(step, source, call, schedule):
    """The first tile of this program at ``step`` or after it; ``source``: where keys are, as ``roles.KeyTensors``."""
    step = gl.to_tensor(step)
    block, b, head, is_tile, is_end = step, step, step, step < 0, step < 0
    while not (is_tile | is_end):
        block, b, head, is_tile, is_end = _place(step, source, call, schedule)
        step += 1
    batch = call.queries.count
    start_q, seqlen_q = tiles.sequence(call.queries.cu_seqlens, b, batch, call.queries.length, call.q.PACKED)
    start_k, seqlen_k = source.start_and_length(b, call)
    row = block * (schedule.NUM_WARPGROUPS * schedule.BLOCK_M)
    start_q, start_k = gl.to_tensor(start_q), gl.to_tensor(start_k)
    right = call.mods.band.right
    if call.keys.OWN_RIGHTS:
        right = source.right(b, call)
    return Tile(step, is_end, b, head, row, start_q, seqlen_q, start_k, seqlen_k, right)


@gluon.jit
def _blocks_of(first, last, tile, call, schedule):
    """``tiles.key_blocks`` for rows at positions in a tile's sequence."""
    return tiles.key_blocks(
        first, last, tile.seqlen_q, tile.seqlen_k, KeyBand(call.mods.band.left, tile.right, call.mods.band.chunk),
        schedule.BLOCK_N,
    )  # fmt: skip


@gluon.jit
def within_bounds(found, tile, entry, call, schedule, COUNT: gl.constexpr):
    """The results of ``_blocks_of``, narrowed to the bounds of COUNT entries from ``entry`` on."""
    exists = (tile.b < call.queries.count) & (entry >= 0)
    inner = masks.bounds_of(call.mods.band.bounds, tile.b, tile.head, entry, exists, COUNT)
    return masks.narrowed(found[0], found[1], found[2], found[3], inner, schedule.BLOCK_N)


@gluon.jit
def listed_blocks(tile, call, schedule):
    """(n_block_min, n_partial_max, n_block_max, bits) for a tile with a list of its blocks, as positions in the list.

    In blocks before n_partial_max the mask's function or bits (``masks.bits_of``) decide.
    """
    SPLIT: gl.constexpr = call.mods.band.lists.OTHER // schedule.BLOCK_N
    exists = (tile.b < call.queries.count) & (tile.row >= 0)
    start, full_start, stop = masks.list_bounds(call.mods.band.lists, tile.b, tile.head, tile.row, exists)
    is_empty = start >= stop
    n_block_min = gl.where(is_empty, NOWHERE, start * SPLIT)
    n_partial_max, bits = full_start * SPLIT, gl.to_tensor(0)
    if call.mods.band.lists.BITS:
        n_partial_max = gl.where(is_empty | tile.is_end, -1, n_partial_max)
        bits = masks.bits_of(call.mods.band.lists, tile.b, tile.head, tile.row, start, exists)
    return n_block_min, n_partial_max, gl.where(is_empty, NOWHERE + 1, stop * SPLIT), bits


@gluon.jit
def block_at(n_block, call, schedule):
    """The number of the block of keys at a position of a tile's loop, which runs over a list or over all blocks.

    After the last tile the position is -1.
    """
    if call.mods.band.lists is not None:
        is_listed = (n_block >= 0) & (n_block < NOWHERE)
        number = masks.block_at(gl.where(is_listed, n_block, 0), call.mods.band.lists, schedule.BLOCK_N)
        return gl.where(is_listed, number, _LAST_KEY // schedule.BLOCK_N)
    else:
        return n_block


@gluon.jit
def key_blocks(tile, call, schedule):
    """The key blocks [n_block_min, n_block_max) that a tile loads; there is at least one.

    A tile without keys gets a block past the end of the keys, which TMA fills with zeros.
    """
    first, last = positions_of(tile.row, schedule.NUM_WARPGROUPS * schedule.BLOCK_M, tile.seqlen_q, call, schedule)
    n_block_min, n_full_min, n_full_max, n_block_max = _blocks_of(first, last, tile, call, schedule)
    if call.mods.band.bounds is not None:
        n_block_min, n_full_min, n_full_max, n_block_max = within_bounds(
            (n_block_min, n_full_min, n_full_max, n_block_max), tile, tile.row // BOUNDS_BLOCK, call, schedule,
            schedule.NUM_WARPGROUPS * schedule.BLOCK_M // BOUNDS_BLOCK,
        )  # fmt: skip
    is_empty = n_block_min >= n_block_max
    n_block_min = gl.where(is_empty, (tile.seqlen_k + schedule.BLOCK_N - 1) // schedule.BLOCK_N, n_block_min)
    return n_block_min, gl.where(is_empty, n_block_min + 1, n_block_max)


@gluon.jit
def warpgroup_blocks(tile, warpgroup, n_block_min, n_block_max, call, schedule):
    """The blocks of a tile's [n_block_min, n_block_max) that a warpgroup masks or skips; also for several warpgroups.

    Returns:
        (n_full_min, n_full_max, skipped): blocks outside [n_full_min, n_full_max) need a mask. The warpgroup skips
        ``skipped`` blocks, 0 or 1, at the upper end, where the tile begins.
    """
    first, last = positions_of(tile.row + warpgroup * schedule.BLOCK_M, schedule.BLOCK_M, tile.seqlen_q, call, schedule)
    own_min, n_full_min, n_full_max, own_max = _blocks_of(first, last, tile, call, schedule)
    if call.mods.band.bounds is not None:
        entry = tile.row // BOUNDS_BLOCK + warpgroup
        own_min, n_full_min, n_full_max, own_max = within_bounds(
            (own_min, n_full_min, n_full_max, own_max), tile, entry, call, schedule, 1
        )
    skipped = gl.where((own_max < n_block_max) & (n_block_max - n_block_min > 1), 1, 0)
    return n_full_min, n_full_max, skipped


# The record of a tile, from the scheduler to the other roles. n_block_max is 0 after the last tile. With lists,
# n_block_min, n_block_max and n_partial_max are positions in them. start_k is where the sequence's keys begin, as the
# source of the keys counts. position is the key position of the tile's first row, with PACK_GQA of the sequence's first
# query. right is the band's right bound, if sequences have their own. With PACK_GQA, a warpgroup's own query and head
# are the position, and the head within the group, of its first row.
FIELDS = gl.constexpr(
    "n_block_min n_block_max row head head_kv sequence start_q seqlen_q start_k seqlen_k position right"
)  # fmt: skip
OWN_FIELDS = gl.constexpr("n_full_min n_full_max skipped query head n_partial_max")
RECORD_SIZE = gl.constexpr(32)


@gluon.jit
def publish_tile(records, use, tile, call, schedule):
    """Writes a tile's record into a claimed buffer; each thread writes one number."""
    if call.mods.band.lists is not None:
        n_block_min, n_partial_max, n_block_max, bits = listed_blocks(tile, call, schedule)
    else:
        n_block_min, n_block_max = key_blocks(tile, call, schedule)
    slot = gl.arange(0, RECORD_SIZE, gl.BlockedLayout([1], [32], [1], [0]))
    record = gl.where(slot == slot_of(FIELDS, "n_block_min"), n_block_min, gl.where(tile.is_end, 0, n_block_max))
    record = gl.where(slot == slot_of(FIELDS, "row"), tile.row, record)
    record = gl.where(slot == slot_of(FIELDS, "head"), tile.head, record)
    record = gl.where(slot == slot_of(FIELDS, "head_kv"), tile.head // call.heads.group_size, record)
    record = gl.where(slot == slot_of(FIELDS, "sequence"), tile.b, record)
    record = gl.where(slot == slot_of(FIELDS, "start_q"), tile.start_q, record)
    record = gl.where(slot == slot_of(FIELDS, "seqlen_q"), tile.seqlen_q, record)
    record = gl.where(slot == slot_of(FIELDS, "start_k"), tile.start_k, record)
    record = gl.where(slot == slot_of(FIELDS, "seqlen_k"), tile.seqlen_k, record)
    position = tile.seqlen_k - tile.seqlen_q
    if not schedule.PACK_GQA:
        position += tile.row
    record = gl.where(slot == slot_of(FIELDS, "position"), position, record)
    if call.keys.OWN_RIGHTS:
        record = gl.where(slot == slot_of(FIELDS, "right"), tile.right, record)
    warpgroup = (slot - FIRST_OWN) // OWN_SLOTS
    own = gl.where(slot < FIRST_OWN, -1, slot % OWN_SLOTS)
    if has_own_blocks(call.mods.band.left, call.mods.band.right, call.mods.band.bounds, call.keys.OWN_LENGTHS):
        n_full_min, n_full_max, skipped = warpgroup_blocks(tile, warpgroup, n_block_min, n_block_max, call, schedule)
        record = gl.where(own == slot_of(OWN_FIELDS, "n_full_min"), n_full_min, record)
        record = gl.where(own == slot_of(OWN_FIELDS, "n_full_max"), n_full_max, record)
        record = gl.where(own == slot_of(OWN_FIELDS, "skipped"), skipped, record)
    if call.mods.band.lists is not None:
        record = gl.where(own == slot_of(OWN_FIELDS, "n_partial_max"), n_partial_max, record)
        record = gl.where(slot == slot_of(FIELDS, "right"), bits, record)
    if schedule.PACK_GQA:
        query, head = query_of(tile.row + warpgroup * schedule.BLOCK_M, call, schedule)
        record = gl.where(own == slot_of(OWN_FIELDS, "query"), query, record)
        record = gl.where(own == slot_of(OWN_FIELDS, "head"), head, record)
    records.ring.at(use).store(record)
    records.ring.publish(use)


@gluon.jit
def query_rows(records, use, call):
    """The ``HeadRows`` of a tile's queries and output."""
    start, length = gl.to_tensor(0), call.queries.length
    if call.q.PACKED:
        start, length = records.get(use, "start_q"), records.get(use, "seqlen_q")
    return HeadRows(records.get(use, "sequence"), records.get(use, "head"), start, length, call.q.PACKED)


@gluon.jit
def key_rows(records, use, call):
    """The ``HeadRows`` of a tile's keys and values."""
    start, length = gl.to_tensor(0), call.keys.length
    if call.q.PACKED:
        start, length = records.get(use, "start_k"), records.get(use, "seqlen_k")
    return HeadRows(records.get(use, "sequence"), records.get(use, "head_kv"), start, length, call.q.PACKED)


@gluon.jit
def lse_offset(rows, call):
    """The offset in lse of the ``query_rows`` of a tile's sequence and head."""
    if call.q.PACKED:
        return rows.head * call.queries.length + rows.start
    else:
        return (rows.b * call.heads.num_q + rows.head) * call.queries.length


@gluon.jit
def lse_at(ptr, where, rows, call, PARTS: gl.constexpr):
    """The addresses of some rows' lse, from ``ptr``, with PARTS numbers a row; ``where``: ``query_rows``."""
    if PARTS == 1:
        return ptr + lse_offset(where, call) + rows
    else:
        return ptr + (lse_offset(where, call) + rows) * PARTS


@gluon.jit
def queries_of(records, use, rows, call, schedule, WARPGROUP: gl.constexpr):
    """(position, head within the group) for some of a warpgroup's rows, which are counted from 0."""
    if schedule.PACK_GQA:
        position = records.get_own(use, "query", WARPGROUP) + rows % schedule.STRIP
        head = records.get_own(use, "head", WARPGROUP) + rows // schedule.STRIP
        # A group has at least two heads, so a warpgroup's strips wrap around it at most this often.
        for _ in gl.static_range(schedule.BLOCK_M // schedule.STRIP // 2):
            is_past = head >= call.heads.group_size
            position += gl.where(is_past, schedule.STRIP, 0)
            head -= gl.where(is_past, call.heads.group_size, 0)
        return position, head
    else:
        return records.get(use, "row") + WARPGROUP * schedule.BLOCK_M + rows, rows * 0


@gluon.jit
def row_segments(records, use, call, schedule, WARPGROUP: gl.constexpr):
    """A warpgroup's rows in a tile, by head: ((``HeadRows``, first position), ...)."""
    rows = query_rows(records, use, call)
    if schedule.PACK_GQA:
        position = records.get_own(use, "query", WARPGROUP)
        head = records.get_own(use, "head", WARPGROUP)
        found = ()
        for i in gl.static_range(schedule.BLOCK_M // schedule.STRIP):
            if i > 0:
                head += 1
                is_first = head == call.heads.group_size
                head = gl.where(is_first, 0, head)
                position += gl.where(is_first, schedule.STRIP, 0)
            found = append(found, (HeadRows(rows.b, rows.head + head, rows.start, rows.length, rows.varlen), position))
        return found
    else:
        return ((rows, records.get(use, "row") + WARPGROUP * schedule.BLOCK_M),)
