"""Which tile a persistent program works on next, where its rows and keys lie, and which key blocks it visits."""

# ruff: noqa: RET505 - Triton compiles what stands after a return, decided or not.
# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.device import balanced, blocks, scheduler, sequence
from flashtile.backends.hopper.device.coordinates import HeadRows
from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.device.head_dim_parts import also
from flashtile.backends.hopper.device.ring import FIRST_OWN, OWN_SLOTS, slot_of


@aggregate
class Cache:
    """Where the keys and values of a cached call lie, whose lengths the device alone knows.

    Attributes:
        cached_ptr: [batch] int32, keys before the call's new ones; negative where there is no sequence.
        cu_seqlens_new_ptr: [batch + 1] int32, bounds of packed new keys, or None.
        num_new: New keys of each sequence where they are not packed.
        entries_ptr: [batch] int32, the entry of the cache that is a sequence's; None for its own number.
        pages_ptr: [batch, pages] int32, the pages of each sequence; None without pages.
        pages_stride: Elements from one sequence's pages to the next one's.
        v_pitch: Rows of values from one entry or page to the next.
        page_size: Rows of a page, a power of two; 0 without pages.
        few_rows: Of packed queries, sequences with so many packed rows a key head at most are left to another launch if
            they have more than ``long_keys``; None for none.
        long_keys: See few_rows.
    """

    cached_ptr: gl.tensor
    cu_seqlens_new_ptr: gl.tensor | gl.constexpr
    num_new: gl.tensor
    entries_ptr: gl.tensor | gl.constexpr
    pages_ptr: gl.tensor | gl.constexpr
    pages_stride: gl.tensor
    v_pitch: gl.tensor
    page_size: gl.constexpr
    few_rows: gl.constexpr
    long_keys: gl.constexpr


@aggregate
class Sizes:
    """What is the same for every tile of a call. Lengths are those of a packed tensor's rows if ``varlen``.

    ``has_edges``: a warpgroup may meet an edge of the band after its first block of keys. ``overlap``: a tile's first
    scores are started before the end of the one before. ``pingpong``: a barrier makes warpgroups start their products
    one after another. ``cached_rows`` keys and values are taken to fit into the L2 cache. ``own_lengths``: sequences
    have different numbers of keys. ``cache`` is None if keys and values are tensors of their own; else ``seqlen_k`` is
    the cache's capacity.

    ``pack_gqa``: the heads of a group share tiles, which few queries would leave half empty. A tile then holds
    ``strip`` query rows of each head of the group, head by head, then the next ``strip`` rows; else strip == block_m.
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
    strip: gl.constexpr
    pack_gqa: gl.constexpr
    block_n: gl.constexpr
    num_warpgroups: gl.constexpr
    overlap: gl.constexpr
    pingpong: gl.constexpr
    cached_rows: gl.constexpr
    own_lengths: gl.constexpr
    cache: Cache | gl.constexpr


@aggregate
class Tile:
    """``num_warpgroups * block_m`` rows of a sequence, from ``row`` on, of ``head`` or of its group's heads from it on.

    ``step`` comes after it.
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
def num_rows(seqlen_q, sizes):
    """Rows of a sequence's tiles: its queries, or with pack_gqa those of each head of a group, in whole strips."""
    if sizes.pack_gqa:
        return (seqlen_q + sizes.strip - 1) // sizes.strip * sizes.strip * sizes.group_size
    else:
        return seqlen_q


@gluon.jit
def query_of(row, sizes):
    """(position, head within the group) of a row of a tile."""
    if sizes.pack_gqa:
        strip = row // sizes.strip
        place = strip // sizes.group_size
        return place * sizes.strip + row % sizes.strip, strip - place * sizes.group_size
    else:
        return row, row * 0


@gluon.jit
def positions_of(row, ROWS: gl.constexpr, seqlen_q, sizes):
    """The first and the last position of ROWS rows; ``row`` is the first of a strip."""
    first, _ = query_of(row, sizes)
    last, _ = query_of(row + (ROWS - 1), sizes)
    return first, gl.minimum(last, seqlen_q - 1)


@gluon.jit
def _deal(step, num_places, counter_ptr):
    """(place, is_end): the index of this program's next tile, static or from an atomic counter.

    Each program fetches one index past the end, so the highest index fetched is known: whoever gets it resets the
    counter for the next launch.
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
def _place(step, sizes, cu_seqlens_q_ptr, counter_ptr):
    """(block, b, head, is_tile, is_end) of a step of this program."""
    rows: gl.constexpr = sizes.num_warpgroups * sizes.block_m
    # Heads or, with pack_gqa, groups that have tiles; and the heads of each.
    own_heads, packed = sizes.num_heads_q, 1
    if sizes.pack_gqa:
        own_heads, packed = sizes.num_heads_q // sizes.group_size, sizes.group_size
    SPARE: gl.constexpr = sizes.strip - 1 if sizes.pack_gqa else 0
    if sizes.varlen:
        num_tiles = scheduler.first_packed_tile(sizes.seqlen_q, sizes.batch + 1, rows, packed, SPARE)
        place, is_end = _deal(step, num_tiles * own_heads, counter_ptr)
        place = gl.where(is_end, 0, place)
        index = place // own_heads
        head = place - index * own_heads
        index = scheduler.longest_first(index, num_tiles, sizes.has_right)
        b, block = scheduler.packed_tile(cu_seqlens_q_ptr, sizes.batch, index, rows, packed, SPARE)
        _, length = sequence.sequence(cu_seqlens_q_ptr, b, sizes.batch, sizes.seqlen_q, True)
        is_tile = block * rows < num_rows(length, sizes)
        if sizes.cache is not None:  # noqa: SIM102 a compile-time condition
            if sizes.cache.few_rows is not None:
                _, keys = entry_and_length(b, sizes.cache, sizes)
                is_left = (length * sizes.group_size <= sizes.cache.few_rows) & (keys > sizes.cache.long_keys)
                is_tile = is_tile & (not is_left)
        return block, b, head * packed, is_tile, is_end
    else:
        num_blocks = (num_rows(sizes.seqlen_q, sizes) + rows - 1) // rows
        num_heads = sizes.batch * own_heads
        if sizes.has_right and counter_ptr is None:
            program, num_programs = gl.program_id(0), gl.num_programs(0)
            block, head, is_tile, is_end = balanced.paired(step, program, num_programs, num_blocks, num_heads)
        else:
            place, is_end = _deal(step, num_blocks * num_heads, counter_ptr)
            is_tile = step >= 0
            if sizes.has_right:
                span = gl.maximum(sizes.cached_rows // sizes.seqlen_k, 1) * (sizes.group_size // packed)
                block, head = balanced.longest_first_by_spans(place, num_blocks, num_heads, span)
            else:
                head = place // num_blocks
                block = place - head * num_blocks
        b = head // own_heads
        if not sizes.has_right:
            # As place >= num_places, without a product that the compiler would hoist above warp_specialize.
            is_end = b >= sizes.batch
        return block, b, (head - b * own_heads) * packed, is_tile, is_end


@gluon.jit
def next_tile(step, sizes, cu_seqlens_q_ptr, cu_seqlens_k_ptr, counter_ptr):
    """The first tile of this program at ``step`` or after it."""
    step = gl.to_tensor(step)
    block, b, head, is_tile, is_end = step, step, step, step < 0, step < 0
    while not (is_tile | is_end):
        block, b, head, is_tile, is_end = _place(step, sizes, cu_seqlens_q_ptr, counter_ptr)
        step += 1
    start_q, seqlen_q = sequence.sequence(cu_seqlens_q_ptr, b, sizes.batch, sizes.seqlen_q, sizes.varlen)
    if sizes.cache is None:
        start_k, seqlen_k = sequence.sequence(cu_seqlens_k_ptr, b, sizes.batch, sizes.seqlen_k, sizes.varlen)
        if sizes.varlen:
            # The rows past the last sequence have no keys.
            seqlen_k = gl.where(b < sizes.batch, seqlen_k, 0)
    else:
        start_k, seqlen_k = entry_and_length(b, sizes.cache, sizes)
    row = block * (sizes.num_warpgroups * sizes.block_m)
    start_q, start_k = gl.to_tensor(start_q), gl.to_tensor(start_k)
    return Tile(step, is_end, b, head, row, start_q, seqlen_q, start_k, seqlen_k)


@gluon.jit
def entry_and_length(b, cache, sizes):
    """A sequence's entry of the cache and how many keys it has there; none past the last sequence."""
    exists = b < sizes.batch
    cached, num_new = gl.load(cache.cached_ptr + b, mask=exists, other=-1), cache.num_new
    if cache.cu_seqlens_new_ptr is not None:
        num_new = gl.load(cache.cu_seqlens_new_ptr + b + 1, mask=exists, other=0)
        num_new -= gl.load(cache.cu_seqlens_new_ptr + b, mask=exists, other=0)
    entry = b
    if cache.entries_ptr is not None:
        entry = gl.load(cache.entries_ptr + b, mask=exists, other=0)
    return entry, gl.where(cached < 0, 0, gl.minimum(cached + num_new, sizes.seqlen_k))


@gluon.jit
def key_blocks(tile, sizes):
    """The key blocks [n_block_min, n_block_max) that a tile loads: at least one.

    A tile without keys gets a block past the end of the keys, which TMA fills with zeros.
    """
    first, last = positions_of(tile.row, sizes.num_warpgroups * sizes.block_m, tile.seqlen_q, sizes)
    n_block_min, _, _, n_block_max = blocks.key_blocks(
        first, last, tile.seqlen_q, tile.seqlen_k, sizes.left, sizes.right, sizes.has_left, sizes.has_right,
        sizes.block_n,
    )  # fmt: skip
    is_empty = n_block_min >= n_block_max
    n_block_min = gl.where(is_empty, (tile.seqlen_k + sizes.block_n - 1) // sizes.block_n, n_block_min)
    return n_block_min, gl.where(is_empty, n_block_min + 1, n_block_max)


@gluon.jit
def warpgroup_blocks(tile, warpgroup, n_block_min, n_block_max, sizes):
    """Which of a tile's key blocks [n_block_min, n_block_max) a warpgroup masks and skips; also for several at once.

    Returns:
        (n_full_min, n_full_max, skipped): blocks outside [n_full_min, n_full_max) need a mask. The warpgroup skips
        ``skipped`` blocks, 0 or 1, at the upper end, where the tile begins.
    """
    first, last = positions_of(tile.row + warpgroup * sizes.block_m, sizes.block_m, tile.seqlen_q, sizes)
    _, n_full_min, n_full_max, own_max = blocks.key_blocks(
        first, last, tile.seqlen_q, tile.seqlen_k, sizes.left, sizes.right, sizes.has_left, sizes.has_right,
        sizes.block_n,
    )  # fmt: skip
    skipped = gl.where((own_max < n_block_max) & (n_block_max - n_block_min > 1), 1, 0)
    return n_full_min, n_full_max, skipped


# What the scheduler tells the other roles of a tile. n_block_max is 0 after the last tile; start_k is the entry of a
# cache; position is the key position of the tile's first row, with pack_gqa of the sequence's first query. With
# pack_gqa, a warpgroup's own query and head are the position and the head within the group of its first row.
FIELDS = gl.constexpr(
    "n_block_min n_block_max row head head_kv sequence start_q seqlen_q start_k seqlen_k position"
)  # fmt: skip
OWN_FIELDS = gl.constexpr("n_full_min n_full_max skipped query head")
RECORD_SIZE = gl.constexpr(32)


@gluon.jit
def publish_tile(records, use, tile, sizes):
    """Writes a tile's record into a claimed buffer; each thread writes one number."""
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
    position = tile.seqlen_k - tile.seqlen_q
    if not sizes.pack_gqa:
        position += tile.row
    record = gl.where(slot == slot_of(FIELDS, "position"), position, record)
    warpgroup = (slot - FIRST_OWN) // OWN_SLOTS
    own = gl.where(slot < FIRST_OWN, -1, slot % OWN_SLOTS)
    if sizes.has_left or sizes.has_right or sizes.own_lengths:
        n_full_min, n_full_max, skipped = warpgroup_blocks(tile, warpgroup, n_block_min, n_block_max, sizes)
        record = gl.where(own == slot_of(OWN_FIELDS, "n_full_min"), n_full_min, record)
        record = gl.where(own == slot_of(OWN_FIELDS, "n_full_max"), n_full_max, record)
        record = gl.where(own == slot_of(OWN_FIELDS, "skipped"), skipped, record)
    if sizes.pack_gqa:
        query, head = query_of(tile.row + warpgroup * sizes.block_m, sizes)
        record = gl.where(own == slot_of(OWN_FIELDS, "query"), query, record)
        record = gl.where(own == slot_of(OWN_FIELDS, "head"), head, record)
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
def cached_keys(records, use, n_block, cache, sizes, FILLS: gl.constexpr):
    """Where a tile's block of keys or values lies in a cache: ((``HeadRows``, first row), ...), of as many rows each.

    Pages smaller than a block are a box each; each lane of the warp loads the number of one page, up to the last that
    has keys. FILLS: the map treats a page as a packed sequence, so TMA fills rows past the keys with zeros. Values need
    that, as 0 times NaN is NaN. Else the map has entries or pages, and rows past the keys hold whatever the cache has:
    their scores are masked.
    """
    PAGE: gl.constexpr = cache.page_size
    BLOCK_N: gl.constexpr = sizes.block_n
    head, seqlen_k = records.get(use, "head_kv"), records.get(use, "seqlen_k")
    if PAGE == 0:
        entry = records.get(use, "start_k")
        return ((_rows_of(entry, seqlen_k, head, cache, FILLS), n_block * BLOCK_N),)
    elif PAGE >= BLOCK_N:
        table = _table(records, use, cache)
        # Blocks are not negative, which the compiler does not know: masks and shifts are cheaper.
        PER_PAGE: gl.constexpr = PAGE // BLOCK_N
        place, row = n_block >> log2(PER_PAGE), (n_block & (PER_PAGE - 1)) * BLOCK_N
        length = gl.minimum(gl.maximum(seqlen_k - place * PAGE, 0), PAGE)
        page = gl.load(table + place, mask=length > 0, other=0)
        return ((_rows_of(page, length, head, cache, FILLS), row),)
    else:
        # The added zero hides that lanes are loop invariant: the compiler would keep multiples of them in registers.
        lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) + (n_block >> 30)
        lengths = gl.minimum(gl.maximum(seqlen_k - n_block * BLOCK_N - lanes * PAGE, 0), PAGE)
        table = _table(records, use, cache) + n_block * (BLOCK_N // PAGE)
        pages = gl.load(table + lanes, mask=(lanes < BLOCK_N // PAGE) & (lengths > 0), other=0)
        found = ()
        for i in gl.static_range(BLOCK_N // PAGE):
            page, length = _of_lane(pages, lanes, i), gl.to_tensor(0)
            if FILLS:
                length = _of_lane(lengths, lanes, i)
            found = also(found, (_rows_of(page, length, head, cache, FILLS), gl.to_tensor(0)))
        return found


@gluon.jit
def _table(records, use, cache):
    """Where the pages of a tile's sequence are listed."""
    return cache.pages_ptr + records.get(use, "sequence").to(gl.int64) * cache.pages_stride


@gluon.jit
def _rows_of(entry, length, head, cache, FILLS: gl.constexpr):
    """``HeadRows`` of an entry or a page, of which ``length`` rows have keys."""
    return HeadRows(gl.to_tensor(entry), head, entry * cache.v_pitch, length, FILLS)


@gluon.jit
def _of_lane(x, lanes, i: gl.constexpr):
    """The number that lane i holds, of numbers >= 0."""
    return gl.max(gl.where(lanes == i, x, 0), 0)


@gluon.constexpr_function
def log2(power):
    """Of a power of two."""
    return power.bit_length() - 1


@gluon.jit
def lse_offset(rows, sizes):
    """Where in lse the ``query_rows`` of a tile's sequence and head begin."""
    if sizes.varlen:
        return rows.head * sizes.seqlen_q + rows.start
    else:
        return (rows.b * sizes.num_heads_q + rows.head) * sizes.seqlen_q


@gluon.jit
def queries_of(records, use, rows, sizes, WARPGROUP: gl.constexpr):
    """(position, head within the group) of some of a warpgroup's rows, which are counted from 0."""
    if sizes.pack_gqa:
        position = records.get_own(use, "query", WARPGROUP) + rows % sizes.strip
        head = records.get_own(use, "head", WARPGROUP) + rows // sizes.strip
        # A group has at least two heads, so the strips of a warpgroup wrap around it that often at most.
        for _ in gl.static_range(sizes.block_m // sizes.strip // 2):
            is_past = head >= sizes.group_size
            position += gl.where(is_past, sizes.strip, 0)
            head -= gl.where(is_past, sizes.group_size, 0)
        return position, head
    else:
        return records.get(use, "row") + WARPGROUP * sizes.block_m + rows, rows * 0


@gluon.jit
def strips(records, use, sizes, WARPGROUP: gl.constexpr):
    """A warpgroup's rows of a tile by head: ((``HeadRows``, first position), ...)."""
    rows = query_rows(records, use, sizes)
    if sizes.pack_gqa:
        position = records.get_own(use, "query", WARPGROUP)
        head = records.get_own(use, "head", WARPGROUP)
        found = ()
        for i in gl.static_range(sizes.block_m // sizes.strip):
            if i > 0:
                head += 1
                is_first = head == sizes.group_size
                head = gl.where(is_first, 0, head)
                position += gl.where(is_first, sizes.strip, 0)
            found = also(found, (HeadRows(rows.b, rows.head + head, rows.start, rows.length, rows.varlen), position))
        return found
    else:
        return ((rows, records.get(use, "row") + WARPGROUP * sizes.block_m),)
