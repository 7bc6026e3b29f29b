"""Chooses the next tile of a persistent program, its rows and keys, and the key blocks that it visits."""

# ruff: noqa: RET505 - Triton compiles code after a return, even if the condition is decided.
# Triton's aggregate reads annotations as types, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.device import masks, tiles
from flashtile.backends.gpu.device.records import Band
from flashtile.backends.hopper.device import records
from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.device.parts import HeadRows, also
from flashtile.backends.hopper.device.ring import FIRST_OWN, OWN_SLOTS, slot_of

# The number of rows of an 8-bit tensor that share a scale.
SCALE_ROWS = gl.constexpr(128)

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

    ``step`` is the step after the tile's.
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
def _place(step, call, schedule):
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
        if call.keys.CACHED:
            index = _by_turns(index, num_tiles, call)
        index = tiles.longest_first(index, num_tiles, UNEVEN)
        b, block = tiles.packed_tile(call.queries.cu_seqlens, call.queries.count, index, rows, packed, SPARE)
        _, length = tiles.sequence(call.queries.cu_seqlens, b, call.queries.count, call.queries.length, True)
        is_tile = block * rows < num_rows(length, call, schedule)
        if call.keys.CACHED:
            is_tile = is_tile & _is_own(b, length, call)
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
def _by_turns(index, num_tiles, call):
    """A place in a mixed batch's order, which takes tiles from both ends in turn, unless the tiles at the end are long.

    Servers put decodes before prompts. A decode's tile waits for memory, a prompt's tile computes: side by side each
    has more of the resource that it needs. But a tile over many more keys than others, started late, runs alone at the
    end.
    """
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    _, keys = entry_and_length(gl.where(lanes == 31, call.queries.count - 1, lanes * call.queries.count // 32), call)
    is_long = gl.max(gl.where(lanes == 31, keys, 0), 0) > gl.sum(keys, 0) // 16
    other = gl.where((index & 1) == 0, index >> 1, num_tiles - 1 - (index >> 1))
    return gl.where((call.keys.cache.mixed == 0) | is_long, index, other)


@gluon.jit
def _is_own(b, length, call):
    """Whether this launch computes a sequence of a cached call."""
    cache = call.keys.cache
    is_own = length * call.heads.group_size > cache.few_rows
    if not is_own:
        _, keys = entry_and_length(b, call)
        is_own = keys <= cache.long_keys
    return is_own


@gluon.jit
def next_tile(step, call, schedule):
    """The first tile of this program at ``step`` or after it."""
    step = gl.to_tensor(step)
    block, b, head, is_tile, is_end = step, step, step, step < 0, step < 0
    while not (is_tile | is_end):
        block, b, head, is_tile, is_end = _place(step, call, schedule)
        step += 1
    batch = call.queries.count
    start_q, seqlen_q = tiles.sequence(call.queries.cu_seqlens, b, batch, call.queries.length, call.q.PACKED)
    if not call.keys.CACHED:
        start_k, seqlen_k = tiles.sequence(call.keys.cu_seqlens, b, batch, call.keys.length, call.q.PACKED)
        if call.q.PACKED:
            # The rows past the last sequence have no keys.
            seqlen_k = gl.where(b < batch, seqlen_k, 0)
    else:
        start_k, seqlen_k = entry_and_length(b, call)
    row = block * (schedule.NUM_WARPGROUPS * schedule.BLOCK_M)
    start_q, start_k = gl.to_tensor(start_q), gl.to_tensor(start_k)
    return Tile(step, is_end, b, head, row, start_q, seqlen_q, start_k, seqlen_k)


@gluon.jit
def entry_and_length(b, call):
    """A sequence's entry of the cache, or its first page's place in a list, and its number of keys; 0 past the last."""
    exists = b < call.queries.count
    cached, num_new = gl.load(call.keys.cache.cached + b, mask=exists, other=-1), call.keys.cache.num_new
    if call.keys.cache.cu_seqlens_new is not None:
        num_new = gl.load(call.keys.cache.cu_seqlens_new + b + 1, mask=exists, other=0)
        num_new -= gl.load(call.keys.cache.cu_seqlens_new + b, mask=exists, other=0)
    entry = b
    if call.keys.cache.entries is not None:
        entry = gl.load(call.keys.cache.entries + b, mask=exists, other=0)
    if call.keys.cache.indptr is not None:
        entry = gl.load(call.keys.cache.indptr + b, mask=exists, other=0)
    return entry, gl.where(cached < 0, 0, gl.minimum(cached + num_new, call.keys.length))


@gluon.jit
def _blocks_of(first, last, tile, call, schedule):
    """``tiles.key_blocks`` for rows at positions in a tile's sequence."""
    right = call.mods.band.right
    if call.keys.CACHED:  # noqa: SIM102 a compile-time condition
        if call.keys.cache.causal is not None:
            right = right_of(tile.b, call)
    return tiles.key_blocks(
        first, last, tile.seqlen_q, tile.seqlen_k, Band(call.mods.band.left, right, call.mods.band.chunk),
        schedule.BLOCK_N,
    )  # fmt: skip


@gluon.jit
def within_bounds(found, tile, entry, call, schedule, COUNT: gl.constexpr):
    """The results of ``_blocks_of``, narrowed to the bounds of COUNT entries from ``entry`` on."""
    exists = (tile.b < call.queries.count) & (entry >= 0)
    inner = masks.bounds_of(call.mods.band.bounds, tile.b, tile.head, entry, exists, COUNT)
    return masks.narrowed(found[0], found[1], found[2], found[3], inner, schedule.BLOCK_N)


@gluon.jit
def right_of(b, call):
    """The right bound of a sequence's rows, if sequences have different ones."""
    is_causal = gl.load(call.keys.cache.causal + b, mask=b < call.queries.count, other=1) != 0
    return gl.where(is_causal, 0, call.mods.band.right)


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
def number_of(n_block, call, schedule):
    """The number of the block of keys at a position of a tile's loop, which runs over a list or over all blocks.

    After the last tile the position is -1.
    """
    if call.mods.band.lists is not None:
        is_listed = (n_block >= 0) & (n_block < NOWHERE)
        number = masks.number_of(gl.where(is_listed, n_block, 0), call.mods.band.lists, schedule.BLOCK_N)
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
# n_block_min, n_block_max and n_partial_max are positions in them. start_k may be an entry of a cache. position is the
# key position of the tile's first row, with PACK_GQA of the sequence's first query. right is the band's right bound, if
# sequences of a cache have their own. With PACK_GQA, a warpgroup's own query and head are the position, and the head
# within the group, of its first row.
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
    if call.keys.CACHED:  # noqa: SIM102 a compile-time condition
        if call.keys.cache.causal is not None:
            record = gl.where(slot == slot_of(FIELDS, "right"), right_of(tile.b, call), record)
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
def cached_keys(records, use, n_block, call, schedule, FILLS: gl.constexpr):
    """The place of a tile's block of keys or values in a cache: ((``HeadRows``, first row), ...), of equally many rows.

    Pages smaller than a block are a box each; each lane of the warp loads the number of one page, up to the last page
    with keys. FILLS: the map treats a page as a packed sequence, so TMA fills rows past the keys with zeros. Values
    need this, because 0 times NaN is NaN. Otherwise the map has entries or pages, and rows past the keys have the
    cache's
    contents: their scores are masked.
    """
    PAGE: gl.constexpr = call.keys.cache.PAGE_SIZE
    BLOCK_N: gl.constexpr = schedule.BLOCK_N
    head, seqlen_k = records.get(use, "head_kv"), records.get(use, "seqlen_k")
    if PAGE == 0:
        entry = records.get(use, "start_k")
        return ((_rows_of(entry, seqlen_k, head, call, FILLS), n_block * BLOCK_N),)
    elif PAGE >= BLOCK_N:
        table = _table(records, use, call)
        # Block numbers are not negative, which the compiler does not know: masks and shifts are cheaper.
        PER_PAGE: gl.constexpr = PAGE // BLOCK_N
        place, row = n_block >> log2(PER_PAGE), (n_block & (PER_PAGE - 1)) * BLOCK_N
        length = gl.minimum(gl.maximum(seqlen_k - place * PAGE, 0), PAGE)
        page = gl.load(table + place, mask=length > 0, other=0)
        return ((_rows_of(page, length, head, call, FILLS), row),)
    else:
        # The added zero hides that lanes are loop invariant: the compiler would keep multiples of them in registers.
        lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) + (n_block >> 30)
        lengths = gl.minimum(gl.maximum(seqlen_k - n_block * BLOCK_N - lanes * PAGE, 0), PAGE)
        table = _table(records, use, call) + n_block * (BLOCK_N // PAGE)
        pages = gl.load(table + lanes, mask=(lanes < BLOCK_N // PAGE) & (lengths > 0), other=0)
        found = ()
        for i in gl.static_range(BLOCK_N // PAGE):
            page, length = _of_lane(pages, lanes, i), gl.to_tensor(0)
            if FILLS:
                length = _of_lane(lengths, lanes, i)
            found = also(found, (_rows_of(page, length, head, call, FILLS), gl.to_tensor(0)))
        return found


@gluon.jit
def pages_of_rows(records, use, rows, call):
    """The pages of some of a tile's keys; 0 for rows past the keys."""
    place = rows >> log2(call.keys.cache.PAGE_SIZE)
    return gl.load(_table(records, use, call) + place, mask=rows < records.get(use, "seqlen_k"), other=0)


@gluon.jit
def place_in_pages(records, use, keys, call):
    """(page, row in the page) for some of a tile's keys, with pages of any number of rows; page 0 past the last key."""
    paging = call.keys.cache.paging
    number = gl.umulhi(2 * keys, paging.multiplier) >> paging.shift
    page = gl.load(_table(records, use, call) + number, mask=keys < records.get(use, "seqlen_k"), other=0)
    return page, keys - number * paging.size


@gluon.jit
def first_scale(start, b):
    """The number of the first scale of a packed sequence that begins at row ``start``."""
    return start // SCALE_ROWS + b


@gluon.jit
def _table(records, use, call):
    """The address of the list of pages of a tile's sequence."""
    if call.keys.cache.indptr is not None:
        return call.keys.cache.pages + records.get(use, "start_k")
    else:
        return call.keys.cache.pages + records.get(use, "sequence").to(gl.int64) * call.keys.cache.pages_step


@gluon.jit
def _rows_of(entry, length, head, call, FILLS: gl.constexpr):
    """``HeadRows`` of an entry or a page; its first ``length`` rows have keys."""
    return HeadRows(gl.to_tensor(entry), head, entry * call.keys.cache.v_pitch, length, FILLS)


@gluon.jit
def _of_lane(x, lanes, i: gl.constexpr):
    """The number that lane i holds; all numbers are >= 0."""
    return gl.max(gl.where(lanes == i, x, 0), 0)


@gluon.constexpr_function
def log2(power):
    """The logarithm of a power of two."""
    return power.bit_length() - 1


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
def strips(records, use, call, schedule, WARPGROUP: gl.constexpr):
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
            found = also(found, (HeadRows(rows.b, rows.head + head, rows.start, rows.length, rows.varlen), position))
        return found
    else:
        return ((rows, records.get(use, "row") + WARPGROUP * schedule.BLOCK_M),)
