"""The roles over latent rows: a scheduler and a producer, a warp each; a scorer and two summers, a warpgroup each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from flashtile.backends.gpu.decode import states, work
from flashtile.backends.gpu.decode.kernel import Place, finish
from flashtile.backends.gpu.device import softmax
from flashtile.backends.hopper.decode.roles import last_keys_of, publish
from flashtile.backends.hopper.device.fragments import keep_columns, row_tops, thread_sums
from flashtile.backends.hopper.device.gluon_compat import as_box, thread_barrier, tma_load
from flashtile.backends.hopper.device.inline_ptx import rescale
from flashtile.backends.hopper.device.parts import HeadRows, also, box_of, wait_for_products, zero_accumulator
from flashtile.backends.hopper.forward.gather import copy_box, rows_by_lanes
from flashtile.backends.hopper.latent import shares


@gluon.jit
def scheduler(records, call, latent):
    """Finds this program's parts and publishes them."""
    SEARCH: gl.constexpr = call.schedule.SEARCH
    sequences = gl.arange(0, SEARCH, gl.BlockedLayout([SEARCH // 32], [32], [1], [0]))
    line = shares.line_of(sequences, call, latent)
    team, lane = gl.program_id(0) // latent.LANES, gl.program_id(0) % latent.LANES
    at, stop = shares.begin_of(team, line, latent), shares.begin_of(team + 1, line, latent)
    stop = gl.where(team < line.teams, stop, at)
    parts = 0
    while at < stop:
        group = shares.group_at(at, line, latent)
        first_team, last_team = shares.teams_at(group, line)
        end = gl.minimum(stop, group.end)
        cost = group.end - group.start
        # Less than the square of a tile's blocks, which int32 holds up to 2 million keys.
        first_block = (at - group.start) * group.blocks // cost
        stop_block = (end - group.start) * group.blocks // cost
        # Rows past the last packed sequence have no keys, but addresses must exist for them too.
        valid_b = gl.minimum(group.b, call.queries.count - 1)
        own = work.span_of(group.b, call)
        entry = work.entry_of(valid_b, call)
        if call.cache.indptr is not None:
            entry = work.first_page_of(valid_b, call)
        num_tiles, tile = gl.maximum(own.num_tiles, 1), group.number * latent.LANES + lane
        if tile < num_tiles * call.num_heads_kv:
            publish(records, parts, (
                1, group.b, entry, tile // num_tiles, tile % num_tiles * call.schedule.BLOCK_M, own.num_rows, own.high,
                own.first_row, first_block, stop_block, team - first_team, last_team - first_team + 1,
                first_team * latent.LANES + lane, (end >= stop).to(gl.int32),
            ))  # fmt: skip
            parts += 1
        at = end
    publish(records, parts, (0,))


@gluon.jit
def producer(channels, call, latent):
    """Loads the latent rows of each part, a block's pages being looked up while those before it are loaded."""
    PIECE: gl.constexpr = latent.PIECE
    records = channels.parts
    parts, used = 0, 0
    records.ring.wait(parts)
    while records.get(parts, "is_part") > 0:
        n, stop, high = records.get(parts, "first_block"), records.get(parts, "stop_block"), records.get(parts, "high")
        b, entry, h_kv = records.get(parts, "b"), records.get(parts, "entry"), records.get(parts, "h_kv")
        pages = pages_of(b, entry, high, n, call, latent)
        while n < stop:
            following = pages_of(b, entry, high, n + 1, call, latent)
            rows, own = boxes_of(pages, high, h_kv, n, latent.v_entry_rows, latent.k_entry_rows, call)
            for i in gl.static_range(len(channels.values)):
                load_piece(latent.v, channels.values[i], used, rows, PIECE * i)
            load_piece(latent.k, channels.keys, used, own, 0)
            pages, n, used = following, n + 1, used + 1
        records.ring.release(parts)
        parts += 1
        records.ring.wait(parts)


@gluon.jit
def pages_of(b, entry, high, n, call, latent):
    """The entry of each box of rows of block n; 0 where its page has no keys, whose number may be anything."""
    ROWS: gl.constexpr = latent.k.block_type.shape[2]
    pages = ()
    for i in gl.static_range(call.schedule.BLOCK_N // ROWS):
        found, row = entry, n * call.schedule.BLOCK_N + i * ROWS
        if call.cache.pages is not None:
            table = call.cache.pages
            if call.cache.indptr is None:
                table += b.to(gl.int64) * call.cache.pages_pitch
            else:
                table += entry
            found = gl.load(table + row // call.cache.PAGE_SIZE, mask=row < high, other=0)
        pages = also(pages, found)
    return pages


@gluon.jit
def boxes_of(pages, high, h_kv, n, v_entry_rows, k_entry_rows, call):
    """((``HeadRows``, first row), ...) of the values and of the keys of block n, a box each.

    Once a block: the pieces are loaded as fast as they are asked for, and small pages have many boxes.
    """
    ROWS: gl.constexpr = call.schedule.BLOCK_N // len(pages)
    PAGE_SIZE: gl.constexpr = call.cache.PAGE_SIZE
    of_values, of_keys = (), ()
    for i in gl.static_range(len(pages)):
        row, length = n * call.schedule.BLOCK_N + i * ROWS, high
        if call.cache.pages is not None:
            first = row // PAGE_SIZE * PAGE_SIZE
            length, row = gl.minimum(gl.maximum(high - first, 0), PAGE_SIZE), row - first
        of_values = also(of_values, (HeadRows(pages[i], h_kv, pages[i] * v_entry_rows, length, True), row))
        of_keys = also(of_keys, (HeadRows(pages[i], h_kv, pages[i] * k_entry_rows, length, True), row))
    return of_values, of_keys


@gluon.jit
def load_piece(desc, ring, use, rows, COL: gl.constexpr):
    """Starts the load of some columns of a block, as zeros from the end of the keys on."""
    ROWS: gl.constexpr = desc.block_type.shape[2]
    BOX: gl.constexpr = desc.block_type.shape[4]
    KEYS: gl.constexpr = ring.buffers.shape[1]
    WIDTH: gl.constexpr = ring.buffers.shape[2]
    full, tile = ring.acquire(use, KEYS * WIDTH * 2), ring.at(use)
    for i in gl.static_range(len(rows)):
        for j in gl.static_range(WIDTH // BOX):
            box = box_of(box_of(tile, i * ROWS, ROWS, 0), j * BOX, BOX)
            tma_load(desc, rows[i][0].at(rows[i][1], COL + j * BOX), full, as_box(box, desc))


@gluon.jit
def load_queries(channels, parts, call):
    """Starts the copies of a part's queries to shared memory, and waits for them; rows that do not exist are 0."""
    records = channels.parts
    LAST: gl.constexpr = len(channels.queries) - 1
    PIECE: gl.constexpr = channels.queries[0].buffers.shape[2]
    layout: gl.constexpr = rows_by_lanes(64, 64, 4)
    packed = records.get(parts, "first") + gl.arange(0, 64, gl.SliceLayout(1, layout))
    row, h, exists = work.rows_of_tile(packed, records.get(parts, "h_kv"), records.get(parts, "num_rows"), call.GROUP)
    channels.queries[0].claim(parts)
    for i in gl.static_range(len(channels.queries)):
        for j in gl.static_range(channels.queries[i].buffers.shape[2] // 64):
            box = box_of(channels.queries[i].at(parts), j * 64, 64)
            if i == LAST:
                copy_queries(call.q, records, parts, row, h, exists, box, 0, layout)
            else:
                copy_queries(call.qv, records, parts, row, h, exists, box, PIECE * i + 64 * j, layout)
    channels.queries[0].publish_copies(parts)
    channels.queries[0].wait(parts)
    # A product reads what other threads have copied: each has fenced its own.
    thread_barrier()


@gluon.jit
def copy_queries(q, records, parts, row, h, exists, box, FIRST: gl.constexpr, layout: gl.constexpr):
    """Starts the copies of 64 columns of ``Rows``."""
    if q.PACKED:
        start = records.get(parts, "first_row").to(gl.int64) * q.stride_row
    else:
        start = records.get(parts, "b").to(gl.int64) * q.stride_b
    at = start + row.to(gl.int64) * q.stride_row + h.to(gl.int64) * q.stride_head
    copy_box(q, q.ptr + at[:, None], exists[:, None], box, FIRST, layout)


@gluon.jit
def scorer(channels, call, latent):
    """The warpgroup that scores: a block's probabilities go where its keys' own columns were, which nobody reads then.

    A summer releases a piece of the values as soon as its product is done, and the scorer begins with those that came.
    """
    N: gl.constexpr = call.schedule.BLOCK_N
    records, scale = channels.parts, call.mods.scale * softmax.LOG2_E
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    zeros = gl.zeros([64, N], gl.float32, layout)
    parts, used = 0, 0
    records.ring.wait(parts)
    while records.get(parts, "is_part") > 0:
        load_queries(channels, parts, call)
        n, stop = records.get(parts, "first_block"), records.get(parts, "stop_block")
        last_keys, clear_blocks = last_keys_of(records, parts, zeros, call, 0)
        row_max, row_sum = gl.full([64], float("-inf"), gl.float32, rows), thread_sums(zeros)
        while n < stop:
            s = warpgroup_mma_wait(0, deps=[start_scores(channels, parts, used, zeros)])
            if n >= clear_blocks:
                s = keep_columns(s, last_keys, last_keys - n * N, float("-inf"), False, True)
            row_max, finite_max, factor = softmax.raise_max(row_max, row_tops(s, row_max, scale, ()), True)
            e = softmax.exponentials(s, scale, finite_max)
            channels.keys.at(used).store(e.to(channels.keys.buffers.dtype))
            channels.factors.at(used).store(factor)
            fence_async_shared()
            thread_barrier()
            channels.factors.publish(used)
            row_sum = row_sum * gl.convert_layout(factor, gl.SliceLayout(1, row_sum.type.layout))[
                :, None
            ] + thread_sums(e)
            n, used = n + 1, used + 1
        channels.queries[0].release(parts)
        channels.results.claim(parts)
        channels.results.part(parts, 0).store(row_max)
        channels.results.part(parts, 1).store(gl.convert_layout(gl.sum(row_sum, 1), rows))
        thread_barrier()
        channels.results.publish(parts)
        records.ring.release(parts)
        parts += 1
        records.ring.wait(parts)


@gluon.jit
def start_scores(channels, parts, used, zeros):
    """Starts the products of the queries with a block, piece after piece as they arrive."""
    s = zeros
    for i in gl.static_range(len(channels.values)):
        channels.values[i].wait(used)
        piece = channels.values[i].at(used).permute((1, 0))
        s = warpgroup_mma(channels.queries[i].at(parts), piece, s, use_acc=i > 0, is_async=True)
    channels.keys.wait(used)
    LAST: gl.constexpr = len(channels.queries) - 1
    return warpgroup_mma(channels.queries[LAST].at(parts), channels.keys.at(used).permute((1, 0)), s, is_async=True)


@gluon.jit
def summer(channels, call, latent, HALF: gl.constexpr):
    """A warpgroup that adds every second piece of the values, weighted, and ends what no other program has a part of.

    So the pieces are released in their order, in which they are loaded again.
    """
    PIECE: gl.constexpr = latent.PIECE
    COUNT: gl.constexpr = 256 // PIECE
    records = channels.parts
    zeros = zero_accumulator(64, PIECE)
    rows: gl.constexpr = gl.SliceLayout(1, zeros.type.layout)
    parts, used = 0, 0
    records.ring.wait(parts)
    while records.get(parts, "is_part") > 0:
        accs, n = (), records.get(parts, "first_block")
        for _ in gl.static_range(COUNT):
            accs = also(accs, zeros)
        while n < records.get(parts, "stop_block"):
            channels.factors.wait(used)
            factor, started = channels.factors.at(used).load(rows), ()
            for i in gl.static_range(COUNT):
                # The columns arrived before the probabilities did, but only who has waited for the copy may read them.
                channels.values[2 * i + HALF].wait(used)
            scaled = ()
            for i in gl.static_range(COUNT):
                scaled = also(scaled, rescale(accs[i], factor, PIECE))
            for i in gl.static_range(COUNT):
                piece = channels.values[2 * i + HALF].at(used)
                started = also(started, warpgroup_mma(channels.keys.at(used), piece, scaled[i], is_async=True))
            for i in gl.static_range(COUNT):
                started = wait_for_products(started, COUNT - 1 - i)
                channels.values[2 * i + HALF].release(used)
            channels.keys.release(used)
            accs, n, used = started, n + 1, used + 1
        channels.results.wait(parts)
        row_max = channels.results.part(parts, 0).load(rows)
        row_sum = channels.results.part(parts, 1).load(rows)
        channels.results.release(parts)
        end_part(accs, row_max, row_sum, records, parts, call, latent, HALF)
        records.ring.release(parts)
        parts += 1
        records.ring.wait(parts)


@gluon.jit
def end_part(accs, row_max, row_sum, records, parts, call, latent, HALF: gl.constexpr):
    """Finishes a tile that one program has; else stores the part's state, and folds the tile's if it is the last."""
    PIECE: gl.constexpr = latent.PIECE
    first, num_rows = records.get(parts, "first"), records.get(parts, "num_rows")
    place = Place(records.get(parts, "b"), 0, records.get(parts, "h_kv"), first)
    shape = work.Shape(records.get(parts, "first_row"), num_rows, 0, records.get(parts, "high"), 0, 0, 0)
    row, count = gl.arange(0, 64, row_max.type.layout), num_rows * call.GROUP - first
    whole = records.get(parts, "num_states") == 1
    slot = slot_of(records.get(parts, "origin"), records.get(parts, "state"), latent) + row
    for i in gl.static_range(len(accs)):
        col = PIECE * (2 * i + HALF) + gl.arange(0, PIECE, gl.SliceLayout(0, accs[i].type.layout))[None, :]
        if whole:
            finish(accs[i], row_max, row_sum, place.b, place, first + row, col, shape, call, HALF + i == 0)
        else:
            at = call.results.acc + slot.to(gl.int64)[:, None] * call.out.DIM + col
            gl.store(at, accs[i], mask=(row < count)[:, None])
    if not whole:
        if HALF == 0:
            at = call.results.stats + 2 * slot.to(gl.int64)
            gl.store(at, row_max, mask=row < count)
            gl.store(at + 1, row_sum, mask=row < count)
        share_tile(records, parts, place, shape, gl.minimum(count, 64), call, latent, HALF)


@gluon.jit
def slot_of(origin, state, latent):
    """The first row's slot of a state of a tile, whose first part is of program ``origin``.

    A program ends with the first part of a tile that it shares, and begins with another part of one.
    """
    return 64 * (2 * (origin + state * latent.LANES) + (state == 0).to(gl.int32))


@gluon.jit
def share_tile(records, parts, place, shape, count, call, latent, HALF: gl.constexpr):
    """Finishes a tile of several states once all have been stored: those who wait for that take 4 rows by 128 columns.

    As ``gpu.decode.kernel.share_tile``; a state is stored when both summers have stored their half.
    """
    origin, num_states = records.get(parts, "origin"), records.get(parts, "num_states")
    folds, rank, step = states.arrive(
        call.results.counters + 2 * origin, 1, 2 * records.get(parts, "state") + HALF, 2 * num_states,
        num_states * count * call.out.DIM, records.get(parts, "waits") > 0, call.schedule.PATIENCE,
    )  # fmt: skip
    if folds:
        for share in range(rank, (count + 3) // 4 * 4, step):
            fold_states(share // 4 * 4, share % 4 * 128, origin, num_states, place, shape, count, call, latent)


@gluon.jit
def fold_states(first, first_col, origin, num_states, place, shape, count, call, latent):
    """Finishes 4 rows of a tile from ``first`` on, 128 of their columns: a row a warp.

    All weights are known before a sum is loaded, and no load waits for another.
    """
    AHEAD: gl.constexpr = call.schedule.AHEAD
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    row, col = first + gl.arange(0, 4, gl.SliceLayout(1, layout)), gl.arange(0, 128, gl.SliceLayout(0, layout))
    exists = row < count
    # One of the 128 states that there may be in place of each column. .cg bypasses L1, which may be stale.
    at = call.results.stats + 2 * (slot_of(origin, col, latent)[None, :] + row[:, None])
    there = exists[:, None] & (col < num_states)[None, :]
    tops = gl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg")
    sums = gl.load(at + 1, mask=there, other=0.0, cache_modifier=".cg")
    row_max = gl.max(tops, 1)
    origin_of_rows = softmax.made_finite(row_max)
    row_sum = gl.sum(sums * gl.exp2(tops - origin_of_rows[:, None]), 1)
    acc = gl.zeros([4, 128], gl.float32, layout)
    for start in range(0, num_states, AHEAD):
        for ahead in gl.static_range(AHEAD):
            state = gl.to_tensor(start + ahead)
            slot, has = slot_of(origin, state, latent) + row, exists & (state < num_states)
            top = gl.load(call.results.stats + 2 * slot, mask=has, other=float("-inf"), cache_modifier=".cg")
            at = call.results.acc + (slot.to(gl.int64) * call.out.DIM + first_col)[:, None] + col[None, :]
            part = gl.load(at, mask=has[:, None], other=0.0, cache_modifier=".cg")
            acc += part * gl.exp2(top - origin_of_rows)[:, None]
    finish(
        acc, row_max, row_sum, place.b, place, place.first + row, first_col + col[None, :], shape, call, first_col == 0
    )
