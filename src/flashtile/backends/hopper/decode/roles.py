"""The roles of the decode for wide groups: a scheduler and a producer, a warp each, and consumers, a warpgroup each."""

# Triton's aggregate reads annotations as types, so they must not be turned into strings.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from flashtile.backends.gpu.decode import states, work
from flashtile.backends.gpu.decode.kernel import TilePlace, finish
from flashtile.backends.gpu.device import softmax
from flashtile.backends.hopper.device.fragments import from_thread_column, keep_columns, row_tops, thread_sums
from flashtile.backends.hopper.device.gluon_compat import aggregate, as_box, thread_barrier, tma_load
from flashtile.backends.hopper.device.inline_ptx import compute_before_wait
from flashtile.backends.hopper.device.parts import (
    HeadRows,
    add_products,
    append,
    as_row_layout,
    box_of,
    rescale_rows,
    start_scores,
    wait_for_products,
    zero_accumulators,
)
from flashtile.backends.hopper.device.ring import Records

# A part of a tile: its place and lengths, its states, and its blocks of keys; in the order of ``scheduler``. The entry
# is the sequence's first page where pages are a list.
FIELDS = gl.constexpr(
    "is_part b entry h_kv first num_rows high state stop_state num_states state_splits item_states split_blocks "
    "first_block stop_block slot counter waits first_row"
)
RECORD_SIZE = gl.constexpr(32)


@aggregate
class DecodeChannels:
    """What producer and consumers hand each other: records of parts, and rings of queries, keys and values.

    ``queries`` belong to one consumer, which loads them itself.
    """

    parts: Records
    queries: gl.tuple
    keys: gl.tuple
    values: gl.tuple


@gluon.jit
def scheduler(records, call):
    """Finds this program's parts, as ``kernel.cache_attention`` does, and publishes them."""
    SEARCH: gl.constexpr = call.schedule.SEARCH
    if SEARCH == 1:
        spans = work.span_of(gl.to_tensor(0), call)
    else:
        width: gl.constexpr = max(SEARCH // 32, 1)
        spans = work.span_of(gl.arange(0, SEARCH, gl.BlockedLayout([width], [32], [1], [0])), call)
    sizing, at, stop = work.share_of(spans, call)
    parts = 0
    while at < stop:
        exists, at, b, slots, tiles, shape, h_kv, first, state, stop_state = work.next_part(
            at, stop, spans, sizing, call
        )
        if exists:
            # Rows past the last packed sequence have no keys, but addresses must exist for them too.
            valid_b = gl.minimum(b, call.queries.count - 1)
            first_block, stop_block = work.blocks_of(valid_b, first, state, stop_state, shape, call)
            slots += h_kv.to(gl.int64) * shape.num_states * shape.num_rows * call.GROUP + first
            tiles += h_kv * shape.num_tiles + first // call.schedule.BLOCK_M
            # A tile without keys loads one block of zeros, which is masked.
            entry = work.entry_of(valid_b, call)
            if call.cache.indptr is not None:
                entry = work.first_page_of(valid_b, call)
            publish(records, parts, (
                1, b, entry, h_kv, first, shape.num_rows, shape.high, state, stop_state, shape.num_states,
                shape.state_splits, shape.item_states, shape.chunk // call.schedule.BLOCK_N, first_block,
                gl.maximum(stop_block, first_block + 1), slots.to(gl.int32), tiles,
                (at >= stop).to(gl.int32), shape.first_row,
            ))  # fmt: skip
            parts += 1
    publish(records, parts, (0,))


@gluon.jit
def publish(records, use, numbers):
    """Writes a record, one number a thread, and publishes it."""
    at = gl.arange(0, RECORD_SIZE, gl.BlockedLayout([1], [32], [1], [0]))
    record = at * 0
    for i in gl.static_range(len(numbers)):
        record = gl.where(at == i, numbers[i], record)
    records.ring.claim(use)
    records.ring.at(use).store(record)
    records.ring.publish(use)


@gluon.jit
def producer(maps, channels, call):
    """Loads the blocks of keys and values of each part, a block's values after the keys of the block after it."""
    records = channels.parts
    parts, used = 0, 0
    records.ring.wait(parts)
    while records.get(parts, "is_part") > 0:
        n, stop = records.get(parts, "first_block"), records.get(parts, "stop_block")
        load_block(maps.k, channels.keys[0], used, records, parts, n, maps.k_entry_rows, call)
        while n + 1 < stop:
            load_block(maps.k, channels.keys[0], used + 1, records, parts, n + 1, maps.k_entry_rows, call)
            load_block(maps.v, channels.values[0], used, records, parts, n, maps.v_entry_rows, call)
            n += 1
            used += 1
        load_block(maps.v, channels.values[0], used, records, parts, n, maps.v_entry_rows, call)
        used += 1
        records.ring.release(parts)
        parts += 1
        records.ring.wait(parts)


@gluon.jit
def load_block(desc, ring, use, records, parts, n, entry_rows, call):
    """Starts the load of block n of a part's keys or values, as zeros from the end of the keys on."""
    ROWS: gl.constexpr = desc.block_type.shape[2]
    COLS: gl.constexpr = desc.block_type.shape[4]
    NUM_BOXES: gl.constexpr = call.schedule.BLOCK_N // ROWS
    PAGE_SIZE: gl.constexpr = call.cache.PAGE_SIZE
    tile, h_kv, high = ring.at(use), records.get(parts, "h_kv"), records.get(parts, "high")
    first, boxes = n * call.schedule.BLOCK_N, ()
    for i in gl.static_range(NUM_BOXES):
        row, entry, length = first + i * ROWS, records.get(parts, "entry"), high
        if call.cache.pages is not None:
            # All page ids are loaded before one is used, and none past the last page that has keys.
            table = call.cache.pages
            if call.cache.indptr is None:
                table += records.get(parts, "b").to(gl.int64) * call.cache.pages_pitch
            else:
                table += entry
            entry = gl.load(table + row // PAGE_SIZE, mask=row < high, other=0)
            length, row = gl.minimum(gl.maximum(high - row // PAGE_SIZE * PAGE_SIZE, 0), PAGE_SIZE), row % PAGE_SIZE
        boxes = append(boxes, (HeadRows(entry, h_kv, entry * entry_rows, length, True), row))
    full = ring.acquire(use, call.schedule.BLOCK_N * call.q.BLOCK_DIM * 2)
    for i in gl.static_range(NUM_BOXES):
        for j in gl.static_range(call.q.BLOCK_DIM // COLS):
            box = tile if NUM_BOXES == 1 else tile.slice(i * ROWS, ROWS, 0)
            tma_load(desc, boxes[i][0].at(boxes[i][1], j * COLS), full, as_box(box_of(box, j * COLS, COLS), desc))


@gluon.jit
def consumer(channels, call, WARPGROUP: gl.constexpr):
    """One warpgroup: 64 rows of every part."""
    records = channels.parts
    BLOCK_N: gl.constexpr = call.schedule.BLOCK_N
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zeros = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    parts, used = 0, 0
    records.ring.wait(parts)
    while records.get(parts, "is_part") > 0:
        load_queries(channels, parts, call, WARPGROUP)
        used = attend(channels, parts, used, zeros, call, WARPGROUP)
        records.ring.release(parts)
        parts += 1
        records.ring.wait(parts)


@gluon.jit
def load_queries(channels, parts, call, WARPGROUP: gl.constexpr):
    """Copies this warpgroup's rows of a part's queries to shared memory; rows that do not exist are 0."""
    records = channels.parts
    DIM: gl.constexpr = call.q.BLOCK_DIM
    lanes: gl.constexpr = min(call.q.BLOCK_DIM // 8, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    packed = records.get(parts, "first") + 64 * WARPGROUP + gl.arange(0, 64, gl.SliceLayout(1, layout))
    row, h, exists = work.rows_of_tile(packed, records.get(parts, "h_kv"), records.get(parts, "num_rows"), call.GROUP)
    if not call.q.PACKED:
        start = records.get(parts, "b").to(gl.int64) * call.q.stride_b
    else:
        start = records.get(parts, "first_row").to(gl.int64) * call.q.stride_row
    at = start + row.to(gl.int64) * call.q.stride_row + h.to(gl.int64) * call.q.stride_head
    col = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    q = gl.load(call.q.ptr + at[:, None] + col[None, :], mask=exists[:, None], other=0.0)
    # All warps have read the last part's queries.
    thread_barrier()
    channels.queries[0].buffers.index(0).store(q)
    fence_async_shared()
    thread_barrier()


@gluon.jit
def attend(channels, parts, used, zeros, call, WARPGROUP: gl.constexpr):
    """Computes the states of a part, stores them and folds them if they are the last; returns the uses of channels.

    A block's scores are computed under the values of the block before, even across splits. A part that is a whole tile
    folds each run into a running total in global memory, which only the same thread reads. At head_dim 256 a split is a
    run and registers for a second state would spill: all states are stored, then folded.
    """
    records, scale = channels.parts, call.mods.scale * softmax.LOG2_E
    none = zero_accumulators(64, channels.values)
    a_row: gl.constexpr = gl.SliceLayout(1, none[0].type.layout)
    s_row: gl.constexpr = gl.SliceLayout(1, zeros.type.layout)
    n, stop = records.get(parts, "first_block"), records.get(parts, "stop_block")
    last_keys, clear_blocks = last_keys_of(records, parts, zeros, call, WARPGROUP)
    pitch = records.get(parts, "num_rows") * call.GROUP
    slot = records.get(parts, "slot") + records.get(parts, "state") * pitch + 64 * WARPGROUP
    num_states = records.get(parts, "num_states")
    is_whole = records.get(parts, "stop_state") - records.get(parts, "state") == num_states
    if call.schedule.splitting.RUN == 1:
        is_whole = num_states == 1
    splits = records.get(parts, "state_splits")
    if is_whole:
        splits, pitch = gl.to_tensor(call.schedule.splitting.RUN), gl.to_tensor(0)
    run, run_sum = none[0], gl.zeros([64], gl.float32, a_row)
    run_max = gl.full([64], float("-inf"), gl.float32, a_row)
    total_max, total_sum, runs = run_max, run_sum, 0

    channels.keys[0].wait(used)
    s = warpgroup_mma_wait(0, deps=[start_scores(channels.queries, 0, channels.keys, used, zeros, ())])
    channels.keys[0].release(used)
    s = masked(s, n, last_keys, clear_blocks, call)
    row_max = gl.full([64], float("-inf"), gl.float32, s_row)
    row_max, finite_max, factor = softmax.raise_max(row_max, gl.max(s, 1) * scale, True)
    e = softmax.exponentials(s, scale, finite_max)
    row_sum, probs = thread_sums(e), operand(e, channels, zeros)
    accs, n, blocks_left = none, n + 1, records.get(parts, "split_blocks") - 1
    splits_left = splits
    while n < stop:
        channels.keys[0].wait(used + 1)
        s = start_scores(channels.queries, 0, channels.keys, used + 1, zeros, ())
        accs = rescale_rows(accs, factor)
        channels.values[0].wait(used)
        accs = add_products(probs, channels.values, used, accs)
        s = warpgroup_mma_wait(len(accs), deps=[s])
        channels.keys[0].release(used + 1)
        s = masked(s, n, last_keys, clear_blocks, call)
        # After a split's last block row_max restarts at -inf, so the new factor is 0 and clears the sums.
        split_max, split_sum = row_max, row_sum
        row_max = gl.where(blocks_left == 0, float("-inf"), row_max)
        row_max, finite_max, factor = softmax.raise_max(row_max, row_tops(s, row_max, scale, ()), True)
        e = softmax.exponentials(s, scale, finite_max)
        sum_factor = gl.convert_layout(factor, gl.SliceLayout(1, row_sum.type.layout))
        row_sum = compute_before_wait(row_sum * sum_factor[:, None] + thread_sums(e))
        probs = operand(e, channels, zeros)
        accs = wait_for_products(accs)
        channels.values[0].release(used)
        if blocks_left == 0:
            run, run_max, run_sum = end_split(accs[0], split_max, split_sum, run, run_max, run_sum, call)
            splits_left -= 1
            if splits_left == 0:
                run, run_max, run_sum = fold_to_stored(
                    is_whole & (runs > 0), total_max, total_sum, run, run_max, run_sum, slot, records, parts, call,
                    WARPGROUP,
                )  # fmt: skip
                total_max, total_sum, runs = run_max, run_sum, runs + 1
                store_state(run, run_max, run_sum, slot, records, parts, call, WARPGROUP)
                run, run_sum = none[0], gl.zeros([64], gl.float32, a_row)
                run_max = gl.full([64], float("-inf"), gl.float32, a_row)
                splits_left, slot = splits, slot + pitch
            accs, blocks_left = none, records.get(parts, "split_blocks")
        blocks_left -= 1
        used += 1
        n += 1
    accs = rescale_rows(accs, factor)
    channels.values[0].wait(used)
    accs = wait_for_products(add_products(probs, channels.values, used, accs))
    channels.values[0].release(used)
    run, run_max, run_sum = end_split(accs[0], row_max, row_sum, run, run_max, run_sum, call)
    end_part(run, run_max, run_sum, total_max, total_sum, runs, slot, is_whole, records, parts, call, WARPGROUP)
    return used + 1


@gluon.jit
def last_keys_of(records, parts, zeros, call, WARPGROUP: gl.constexpr):
    """The last key that each row of a part sees, for ``keep_columns``, and how many blocks all rows see whole.

    The position of rows that do not exist is past all others.
    """
    row: gl.constexpr = gl.SliceLayout(1, zeros.type.layout)
    high, first = records.get(parts, "high"), records.get(parts, "first") + 64 * WARPGROUP
    last, clear_last = gl.full([64], high - 1, gl.int32, row), high - 1
    if call.mods.band.right is not None:
        right = work.right_of(gl.minimum(records.get(parts, "b"), call.queries.count - 1), call)
        shift = high - records.get(parts, "num_rows") + right
        last = gl.minimum(last, (first + gl.arange(0, 64, row)) // call.GROUP + shift)
        clear_last = gl.minimum(clear_last, first // call.GROUP + shift)
    return from_thread_column(last, zeros), (clear_last + 1) // call.schedule.BLOCK_N


@gluon.jit
def end_part(
    run, run_max, run_sum, total_max, total_sum, runs, slot, is_whole, records, parts, call, WARPGROUP: gl.constexpr
):
    """Finishes a tile that one part has; else stores the part's last state and folds the tile's if it is the last."""
    first = records.get(parts, "first")
    place = TilePlace(records.get(parts, "b"), 0, records.get(parts, "h_kv"), first)
    shape = work.SequenceWork(
        records.get(parts, "first_row"), records.get(parts, "num_rows"), 0, records.get(parts, "high"), 0, 0, 0,
        records.get(parts, "num_states"), records.get(parts, "state_splits"),
    )  # fmt: skip
    if is_whole:
        run, run_max, run_sum = fold_to_stored(
            runs > 0, total_max, total_sum, run, run_max, run_sum, slot, records, parts, call, WARPGROUP
        )
        row = first + 64 * WARPGROUP + gl.arange(0, 64, gl.SliceLayout(1, run.type.layout))
        col = gl.arange(0, call.out.BLOCK_DIM, gl.SliceLayout(0, run.type.layout))[None, :]
        finish(run, run_max, run_sum, place.b, place, row, col, shape, call)
    else:
        store_state(run, run_max, run_sum, slot, records, parts, call, WARPGROUP)
        share_tile(records, parts, place, shape, call, WARPGROUP)


@gluon.jit
def operand(e, channels, zeros):
    """Probabilities as the left operand of the product with the values."""
    layout: gl.constexpr = gl.DotOperandLayout(0, zeros.type.layout, 2)
    return gl.convert_layout(e.to(channels.keys[0].buffers.dtype), layout)


@gluon.jit
def end_split(acc, row_max, row_sum, run, run_max, run_sum, call):
    """The state of a run after a split of it; the split's sums are each thread's."""
    row_max = as_row_layout(row_max, acc)
    row_sum = as_row_layout(gl.sum(row_sum, 1), acc)
    if call.schedule.splitting.RUN == 1:
        run, run_max, run_sum = acc, row_max, row_sum
    else:
        run, run_max, run_sum = states.fold(run, run_max, run_sum, acc, row_max, row_sum)
    return run, run_max, run_sum


@gluon.jit
def masked(s, n, last_keys, clear_blocks, call):
    """Scores of block n, -inf where a row does not see a key."""
    if n >= clear_blocks:
        s = keep_columns(s, last_keys, last_keys - n * call.schedule.BLOCK_N, float("-inf"), False, True)
    return s


@gluon.jit
def store_state(acc, row_max, row_sum, slot, records, parts, call, WARPGROUP: gl.constexpr):
    """Stores the softmax state of a warpgroup's rows of a part, as ``states.store_state``."""
    row = gl.arange(0, 64, row_max.type.layout)
    col = gl.arange(0, call.out.BLOCK_DIM, gl.SliceLayout(0, acc.type.layout))[None, :]
    count = records.get(parts, "num_rows") * call.GROUP - records.get(parts, "first") - 64 * WARPGROUP
    exists, at = row < count, (slot + row).to(gl.int64)
    gl.store(call.results.acc + at[:, None] * call.out.DIM + col, acc, mask=exists[:, None])
    gl.store(call.results.stats + 2 * at, row_max, mask=exists)
    gl.store(call.results.stats + 2 * at + 1, row_sum, mask=exists)


@gluon.jit
def fold_to_stored(
    has_stored, total_max, total_sum, run, run_max, run_sum, slot, records, parts, call, WARPGROUP: gl.constexpr
):
    """Folds a run into the running total in global memory, if there is one; each thread reads its own stores."""
    if call.schedule.splitting.RUN > 1 and has_stored:
        row = gl.arange(0, 64, run_max.type.layout)
        col = gl.arange(0, call.out.BLOCK_DIM, gl.SliceLayout(0, run.type.layout))[None, :]
        count = records.get(parts, "num_rows") * call.GROUP - records.get(parts, "first") - 64 * WARPGROUP
        at = call.results.acc + (slot + row).to(gl.int64)[:, None] * call.out.DIM + col
        total = gl.load(at, mask=(row < count)[:, None], other=0.0, cache_modifier=".cg")
        run, run_max, run_sum = states.fold(total, total_max, total_sum, run, run_max, run_sum)
    return run, run_max, run_sum


@gluon.jit
def load_state(slot, pitch, number, num_states, exists, call):
    """A stored state, as ``states.load_state``."""
    width: gl.constexpr = fold_width(call.out.BLOCK_DIM)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // width, width], [4, 1], [1, 0])
    col = gl.arange(0, call.out.BLOCK_DIM, gl.SliceLayout(0, layout))[None, :]
    at, there = slot + gl.to_tensor(number).to(gl.int64) * pitch, exists & (number < num_states)
    top = gl.load(call.results.stats + 2 * at, mask=there, other=float("-inf"), cache_modifier=".cg")
    part_sum = gl.load(call.results.stats + 2 * at + 1, mask=there, other=0.0, cache_modifier=".cg")
    at = call.results.acc + at[:, None] * call.out.DIM + col
    return gl.load(at, mask=there[:, None], other=0.0, cache_modifier=".cg"), top, part_sum


@gluon.constexpr_function
def fold_width(dim):
    """Threads of a row of a stored state."""
    return min(dim // 4, 32)


@gluon.jit
def share_tile(records, parts, place, shape, call, WARPGROUP: gl.constexpr):
    """Finishes a tile of several states once all have been stored, as ``kernel.share_tile``; warpgroups share rows."""
    WARPGROUPS: gl.constexpr = call.schedule.BLOCK_M // 64
    AHEAD: gl.constexpr = call.schedule.AHEAD
    width: gl.constexpr = fold_width(call.out.BLOCK_DIM)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // width, width], [4, 1], [1, 0])
    ROWS: gl.constexpr = 4 * (32 // width)
    pitch = shape.num_rows * call.GROUP
    count = gl.minimum(pitch - place.first, call.schedule.BLOCK_M)
    counter = call.results.counters + 2 * records.get(parts, "counter")
    state = records.get(parts, "state")
    member = state // records.get(parts, "item_states") * WARPGROUPS + WARPGROUP
    folds, rank, step = states.arrive(
        counter, records.get(parts, "stop_state") - state, member, shape.num_states * WARPGROUPS,
        shape.num_states * count * call.out.DIM, records.get(parts, "waits") > 0, call.schedule.PATIENCE,
    )  # fmt: skip
    if folds:
        row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        col = gl.arange(0, call.out.BLOCK_DIM, gl.SliceLayout(0, layout))[None, :]
        for group in range(rank, (count + ROWS - 1) // ROWS, step):
            first = group * ROWS
            slot, exists = (records.get(parts, "slot") + first + row).to(gl.int64), first + row < count
            none = (
                gl.zeros([ROWS, call.out.BLOCK_DIM], gl.float32, layout),
                gl.full([ROWS], float("-inf"), gl.float32, row.type.layout),
                row * 0.0,
            )
            acc, row_max, row_sum = states.fold_states(none, slot, pitch, shape, exists, call, load_state, AHEAD)
            finish(acc, row_max, row_sum, place.b, place, place.first + first + row, col, shape, call)
