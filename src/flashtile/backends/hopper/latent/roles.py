"""The roles over latent rows: a scheduler and a producer, a warp each; a scorer and two summers, a warpgroup each."""

# ruff: noqa: RET505 - Triton compiles code after a return, even if the condition is decided.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from flashtile.backends.gpu.decode import work
from flashtile.backends.gpu.device import softmax
from flashtile.backends.hopper.decode.roles import last_keys_of, publish
from flashtile.backends.hopper.device.fragments import keep_columns, row_tops, thread_sums
from flashtile.backends.hopper.device.gluon_compat import as_box, thread_barrier, tma_load
from flashtile.backends.hopper.device.inline_ptx import rescale
from flashtile.backends.hopper.device.parts import (
    HeadRows,
    append,
    box_of,
    narrow,
    wait_for_products,
    zero_accumulator,
)
from flashtile.backends.hopper.forward.paged.gather import copy_box, rows_by_lanes
from flashtile.backends.hopper.latent import shares
from flashtile.backends.hopper.latent.folds import end_part
from flashtile.backends.hopper.latent.gather import copy_block, pages_by_lane, table_of


@gluon.jit
def scheduler(records, call, latent):
    """Finds this program's parts and publishes them."""
    SEARCH: gl.constexpr = call.schedule.SEARCH
    sequences = gl.arange(0, SEARCH, gl.BlockedLayout([SEARCH // 32], [32], [1], [0]))
    spans = work.span_of(sequences, call)
    team, lane = gl.program_id(0) // latent.LANES, gl.program_id(0) % latent.LANES
    parts, is_even = 0, False
    if call.queries.cu_seqlens is None:
        even = shares.even_share(team, call, latent)
        own = work.span_of(even.b, call)
        is_even = shares.are_even(spans, even, call, latent)
        if is_even:
            first_block, stop_block, states = shares.even_part(even, own.high, call, latent)
            tile = even.number * latent.LANES + lane
            if (even.b < call.queries.count) & (even.split < states) & (tile < own.num_tiles * call.num_heads_kv):
                publish_part(
                    records, parts, even.b, tile, own, (first_block, stop_block), even.split, states,
                    (team - even.split) * latent.LANES + lane, gl.to_tensor(1), call, latent,
                )  # fmt: skip
                parts += 1
    if not is_even:
        line = shares.line_of(spans, sequences, call, latent)
        at, stop = shares.begin_of(team, line, latent), shares.begin_of(team + 1, line, latent)
        stop = gl.where(team < line.teams, stop, at)
        while at < stop:
            group = shares.group_at(at, line, latent)
            first_team, last_team = shares.teams_at(group, line)
            end = gl.minimum(stop, group.end)
            cost = group.end - group.start
            # Less than the square of a tile's blocks, which int32 holds up to 2 million keys.
            first_block = (at - group.start) * group.blocks // cost
            stop_block = (end - group.start) * group.blocks // cost
            own, tile = work.span_of(group.b, call), group.number * latent.LANES + lane
            if tile < gl.maximum(own.num_tiles, 1) * call.num_heads_kv:
                publish_part(
                    records, parts, group.b, tile, own, (first_block, stop_block), team - first_team,
                    last_team - first_team + 1, first_team * latent.LANES + lane, (end >= stop).to(gl.int32), call,
                    latent,
                )  # fmt: skip
                parts += 1
            at = end
    publish(records, parts, (0,))


@gluon.jit
def publish_part(records, parts, b, tile, own, blocks, state, num_states, origin, waits, call, latent):
    """Publishes a part of a tile, from the first of its ``blocks`` to before the second."""
    # Rows past the last packed sequence have no keys, but addresses must exist for them too.
    valid_b = gl.minimum(b, call.queries.count - 1)
    entry, num_tiles = work.entry_of(valid_b, call), gl.maximum(own.num_tiles, 1)
    if call.cache.indptr is not None:
        entry = work.first_page_of(valid_b, call)
    publish(records, parts, (
        1, b, entry, tile // num_tiles, tile % num_tiles * call.schedule.BLOCK_M, own.num_rows, own.high,
        own.first_row, blocks[0], blocks[1], state, num_states, origin, waits,
    ))  # fmt: skip


@gluon.jit
def producer(channels, call, latent):
    """Loads the latent rows of each part, a block's pages being looked up while those before it are loaded."""
    records = channels.parts
    parts, used = 0, 0
    records.ring.wait(parts)
    while records.get(parts, "is_part") > 0:
        n, stop, high = records.get(parts, "first_block"), records.get(parts, "stop_block"), records.get(parts, "high")
        b, entry, h_kv = records.get(parts, "b"), records.get(parts, "entry"), records.get(parts, "h_kv")
        pages = pages_of_block(b, entry, high, n, call, latent)
        # Queries go before keys, behind which they would arrive. Where TMA loads keys, the first block's buffers are
        # free before the queries' are.
        if (parts == 0) | (latent.COPIERS > 0):
            load_queries(channels, parts, call, latent)
        start = n
        while n < stop:
            following = pages_of_block(b, entry, high, n + 1, call, latent)
            if latent.COPIERS > 0:
                copy_block(channels, used, pages, high, h_kv, n, call, latent)
            else:
                load_block(channels, used, pages, high, h_kv, n, call, latent)
            if (n == start) & (parts > 0) & (latent.COPIERS == 0):
                load_queries(channels, parts, call, latent)
            pages, n, used = following, n + 1, used + 1
        if latent.COPIERS > 0:
            # All warps have read the record before one thread releases it.
            thread_barrier()
        records.ring.release(parts)
        parts += 1
        records.ring.wait(parts)


@gluon.jit
def pages_of_block(b, entry, high, n, call, latent):
    """The pages of block n as those who load take them."""
    if latent.COPIERS > 0:
        return pages_by_lane(b, entry, high, n, call, latent)
    else:
        return pages_by_box(b, entry, high, n, call, latent)


@gluon.jit
def load_block(channels, used, pages, high, h_kv, n, call, latent):
    """Starts the loads of block n by TMA."""
    rows, own = boxes_of(pages, high, h_kv, n, latent.v_entry_rows, latent.k_entry_rows, call)
    if latent.scales is not None:
        load_scales(latent.scales, channels.scales, used, rows)
    for i in gl.static_range(len(channels.values)):
        load_piece(latent.v, channels.landings[i], used, rows, latent.PIECE * i)
    load_piece(latent.k, channels.keys, used, own, 0)


@gluon.jit
def pages_by_box(b, entry, high, n, call, latent):
    """The entry of each box of rows of block n; 0 where its page has no keys, and so may have any number."""
    ROWS: gl.constexpr = latent.k.block_type.shape[2]
    pages = ()
    for i in gl.static_range(call.schedule.BLOCK_N // ROWS):
        found, row = entry, n * call.schedule.BLOCK_N + i * ROWS
        if call.cache.pages is not None:
            found = gl.load(table_of(b, entry, call) + row // call.cache.PAGE_SIZE, mask=row < high, other=0)
        pages = append(pages, found)
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
        of_values = append(of_values, (HeadRows(pages[i], h_kv, pages[i] * v_entry_rows, length, True), row))
        of_keys = append(of_keys, (HeadRows(pages[i], h_kv, pages[i] * k_entry_rows, length, True), row))
    return of_values, of_keys


@gluon.jit
def load_piece(desc, ring, use, rows, COL: gl.constexpr):
    """Starts the load of some columns of a block, as zeros from the end of the keys on."""
    ROWS: gl.constexpr = desc.block_type.shape[2]
    BOX: gl.constexpr = desc.block_type.shape[4]
    KEYS: gl.constexpr = ring.buffers.shape[1]
    WIDTH: gl.constexpr = ring.buffers.shape[2]
    BITS: gl.constexpr = desc.dtype.primitive_bitwidth
    full, tile = ring.acquire(use, KEYS * WIDTH * BITS // 8), ring.at(use)
    if BITS == 8:
        tile = narrow(tile, desc.dtype, WIDTH)
    for i in gl.static_range(len(rows)):
        for j in gl.static_range(WIDTH // BOX):
            box = box_of(box_of(tile, i * ROWS, ROWS, 0), j * BOX, BOX)
            tma_load(desc, rows[i][0].at(rows[i][1], COL + j * BOX), full, as_box(box, desc))


@gluon.jit
def load_scales(desc, ring, use, rows):
    """Starts the load of a block's scales."""
    ROWS: gl.constexpr = desc.block_type.shape[2]
    full, tile = ring.acquire(use, ring.buffers.shape[1] * ring.buffers.shape[2] * 4), ring.at(use)
    for i in gl.static_range(len(rows)):
        tma_load(desc, rows[i][0].at(rows[i][1], 0), full, as_box(box_of(tile, i * ROWS, ROWS, 0), desc))


@gluon.jit
def load_queries(channels, parts, call, latent):
    """Starts the loads of a part's queries; rows past a sequence's are another's, and nobody reads what they give.

    Without their map the scorer copies them.
    """
    if latent.q is not None:
        records = channels.parts
        PIECE: gl.constexpr = channels.queries[0].buffers.shape[2]
        LAST: gl.constexpr = len(channels.queries) - 1
        b, row = records.get(parts, "b"), records.get(parts, "first")
        if call.qv.PACKED:
            b, row = b * 0, row + records.get(parts, "first_row") * call.GROUP
        full = channels.queries[0].acquire(parts, 64 * (call.qv.DIM + call.q.DIM) * 2)
        for i in gl.static_range(LAST):
            for j in gl.static_range(PIECE // 64):
                box = box_of(channels.queries[i].at(parts), 64 * j, 64)
                tma_load(latent.qv, [b, row, PIECE * i + 64 * j], full, as_box(box, latent.qv))
        tma_load(latent.q, [b, row, 0], full, as_box(channels.queries[LAST].at(parts), latent.q))


@gluon.jit
def copy_queries(channels, parts, call):
    """Starts copies of a part's queries that TMA cannot load; rows that do not exist are 0."""
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
                copy_columns(call.q, records, parts, row, h, exists, box, 0, layout)
            else:
                copy_columns(call.qv, records, parts, row, h, exists, box, PIECE * i + 64 * j, layout)
    channels.queries[0].publish_copies(parts)


@gluon.jit
def copy_columns(q, records, parts, row, h, exists, box, FIRST: gl.constexpr, layout: gl.constexpr):
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
        if latent.q is None:
            copy_queries(channels, parts, call)
        channels.queries[0].wait(parts)
        if latent.q is None:
            # A product reads what other threads have copied: each has fenced its own.
            thread_barrier()
        n, stop = records.get(parts, "first_block"), records.get(parts, "stop_block")
        last_keys, clear_blocks = last_keys_of(records, parts, zeros, call, 0)
        row_max, row_sum = gl.full([64], float("-inf"), gl.float32, rows), thread_sums(zeros)
        while n < stop:
            s = warpgroup_mma_wait(0, deps=[start_scores(channels, parts, used, zeros)])
            channels.queries[0].release(parts, n + 1 == stop)
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
            accs = append(accs, zeros)
        while n < records.get(parts, "stop_block"):
            channels.factors.wait(used)
            factor, started = channels.factors.at(used).load(rows), ()
            for i in gl.static_range(COUNT):
                # The columns arrived before the probabilities did, but only who has waited for the copy may read them.
                channels.values[2 * i + HALF].wait(used)
            scaled = ()
            for i in gl.static_range(COUNT):
                scaled = append(scaled, rescale(accs[i], factor, PIECE))
            for i in gl.static_range(COUNT):
                piece = channels.values[2 * i + HALF].at(used)
                started = append(started, warpgroup_mma(channels.keys.at(used), piece, scaled[i], is_async=True))
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
