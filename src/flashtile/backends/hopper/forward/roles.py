"""The roles of the Hopper forward: a scheduler and a producer of one warp each, and consumers of a warpgroup each."""

# Triton's aggregate reads annotations as types, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from flashtile.backends.gpu.device import softmax
from flashtile.backends.gpu.device.tiles import longest_first, sequence
from flashtile.backends.hopper.device.gluon_compat import aggregate, as_box, tma_load, tma_store_wait
from flashtile.backends.hopper.device.inline_ptx import compute_before_wait, pingpong_arrive, pingpong_wait
from flashtile.backends.hopper.device.parts import (
    append,
    as_row_layout,
    load,
    pieces,
    start_of,
    store,
    wait_for_products,
    zero_accumulators,
)
from flashtile.backends.hopper.forward.scheduler import (
    block_at,
    key_rows,
    lse_at,
    next_tile,
    publish_tile,
    queries_of,
    query_rows,
    row_segments,
)
from flashtile.backends.hopper.forward.softmax_step import (
    SoftmaxState,
    add_last_values,
    first_probs,
    first_scores,
    open_tile,
    operand,
    step,
)

# The number of rows of an 8-bit tensor that share a scale.
SCALE_ROWS = gl.constexpr(128)
# The number of a tile's blocks still to load when a producer asks for the next tile: time to find it.
_AHEAD = gl.constexpr(2)
# A column past the end of any tensor: TMA loads zeros.
_NOWHERE = gl.constexpr(2**30)


@aggregate
class KeyTensors:
    """Keys and values in tensors of their own, of equally long or packed sequences.

    ``paged.keys.PagedKeys`` has the same methods for a cache. ``VALUES_ARE_COLUMNS``: in a quantised call.
    """

    VALUES_ARE_COLUMNS: gl.constexpr

    @gluon.jit
    def order(self, index, num_tiles, UNEVEN: gl.constexpr, call):
        """The tile at a place in the order of tiles of packed sequences."""
        return longest_first(index, num_tiles, UNEVEN)

    @gluon.jit
    def takes(self, is_tile, b, seqlen_q, call):
        """``is_tile``, for a tile of a packed sequence; False if another launch computes the sequence."""
        return is_tile

    @gluon.jit
    def start_and_length(self, b, call):
        """(start_k, seqlen_k) of a sequence."""
        start, length = sequence(call.keys.cu_seqlens, b, call.queries.count, call.keys.length, call.q.PACKED)
        if call.q.PACKED:
            # The rows past the last sequence have no keys.
            length = gl.where(b < call.queries.count, length, 0)
        return start, length

    @gluon.jit
    def start_keys(self, rings, use, records, tiles, n_block, call, schedule):
        """Starts the load of a block of a tile's keys."""
        rows = key_rows(records, tiles, call)
        load(call.k.desc, rings, use, ((rows, n_block * schedule.BLOCK_N),), call.k.BLOCK_DIM)

    @gluon.jit
    def start_values(self, rings, use, records, tiles, n_block, call, schedule):
        """Starts the load of a block of a tile's values."""
        if self.VALUES_ARE_COLUMNS:
            load_columns(rings[0], use, records, tiles, n_block, call, schedule)
        else:
            rows = key_rows(records, tiles, call)
            load(call.v.desc, rings, use, ((rows, n_block * schedule.BLOCK_N),), call.v.BLOCK_DIM)


@gluon.jit
def load_columns(ring, use, records, tiles, n_block, call, schedule):
    """Starts the load of a block of a quantised call's values, which are columns; zeros where there is no key."""
    tile = ring.at(use)
    full = ring.acquire(use, tile.shape[0] * tile.shape[1])
    b, seqlen_k = records.get(tiles, "sequence"), call.keys.length
    column = n_block * schedule.BLOCK_N
    exists = column < seqlen_k
    if call.q.PACKED:
        seqlen_k = records.get(tiles, "seqlen_k")
        exists = column < seqlen_k
        column += first_scale(records.get(tiles, "start_k"), b) * SCALE_ROWS
        b = gl.to_tensor(0)
    column = gl.where(exists, column, _NOWHERE)
    tma_load(call.v.desc, (b, records.get(tiles, "head_kv"), 0, column), full, as_box(tile, call.v.desc))


@gluon.jit
def first_scale(start, b):
    """The number of the first scale of a packed sequence that begins at row ``start``."""
    return start // SCALE_ROWS + b


@gluon.jit
def scheduler(records, source, call, schedule):
    """Finds tiles ahead of the other roles: its divisions take longer than loading a short tile.

    source: where keys and values are, as ``KeyTensors``.
    """
    tiles = 0
    place = 0
    is_end = False
    while not is_end:
        records.claim_asked(tiles)
        tile = next_tile(place, source, call, schedule)
        place = tile.step
        is_end = tile.is_end
        publish_tile(records, tiles, tile, call, schedule)
        tiles += 1


@gluon.jit
def producer(channels, score_tiles, source, call, schedule):
    """Loads each tile's queries, and its key and value blocks from the last to the first.

    It loads in the order of use: a block's values follow the keys of the block scored after it. That is the next tile's
    first block, if tiles overlap.
    """
    records = channels.tiles
    tiles = 0
    used = 0
    records.ring.wait(tiles)
    n_block = records.get(tiles, "n_block_max")
    while n_block > 0:
        n_block_min = records.get(tiles, "n_block_min")
        for warpgroup in gl.static_range(schedule.NUM_WARPGROUPS):
            rows = row_segments(records, tiles, call, schedule, warpgroup)
            load(call.q.desc, channels.queries[warpgroup], tiles, rows, call.q.BLOCK_DIM)
        n_block -= 1
        load_keys(channels, used, tiles, n_block, source, call, schedule)
        if schedule.OVERLAP:
            load_last_values(channels, used - 1, tiles - 1, source, call, schedule)
        load_score_tiles(score_tiles, records, tiles, used, n_block, call, schedule)
        records.ask(tiles, n_block - n_block_min <= _AHEAD)
        while n_block > n_block_min:
            n_block -= 1
            load_keys(channels, used + 1, tiles, n_block, source, call, schedule)
            load_values(channels, used, tiles, n_block + 1, source, call, schedule)
            load_score_tiles(score_tiles, records, tiles, used + 1, n_block, call, schedule)
            records.ask(tiles, n_block - n_block_min == _AHEAD)
            used += 1
        if not schedule.OVERLAP:
            load_last_values(channels, used, tiles, source, call, schedule)
        used += 1
        tiles += 1
        records.ring.wait(tiles)
        n_block = records.get(tiles, "n_block_max")
    if schedule.OVERLAP:
        load_last_values(channels, used - 1, tiles - 1, source, call, schedule)


@gluon.jit
def load_last_values(channels, use, tiles, source, call, schedule):
    """Loads a tile's last values and releases its record; does nothing for tile -1."""
    if tiles >= 0:
        load_values(channels, use, tiles, channels.tiles.get(tiles, "n_block_min"), source, call, schedule)
        channels.tiles.ring.release(tiles)


@gluon.jit
def load_keys(channels, use, tiles, n_block, source, call, schedule):
    """Starts the load of a block of keys."""
    source.start_keys(channels.keys, use, channels.tiles, tiles, block_at(n_block, call, schedule), call, schedule)


@gluon.jit
def load_values(channels, use, tiles, n_block, source, call, schedule):
    """Starts the load of a block of values."""
    source.start_values(channels.values, use, channels.tiles, tiles, block_at(n_block, call, schedule), call, schedule)


@gluon.jit
def load_score_tiles(score_tiles, records, tiles, use, n_block, call, schedule):
    """Starts the loads of the bias and the mask of a tile's rows and a block of keys."""
    if len(score_tiles) > 0:
        key = block_at(n_block, call, schedule) * schedule.BLOCK_N
    for i in gl.static_range(len(score_tiles)):
        b, head, row = records.get(tiles, "sequence"), records.get(tiles, "head"), records.get(tiles, "row")
        score_tiles[i].start(b, head, row, key, use)


@gluon.jit
def make_outputs(output, schedule):
    """The shared memory for the pieces of an output that TMA stores."""
    WIDTH: gl.constexpr = output.desc.block_type.shape[4 if output.PACKED else 3]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([schedule.BLOCK_M, WIDTH], output.desc.dtype)
    shape: gl.constexpr = [schedule.NUM_WARPGROUPS * schedule.OUT_STAGES, schedule.BLOCK_M, WIDTH]
    return gl.allocate_shared_memory(output.desc.dtype, shape, layout)


@gluon.constexpr_function
def few_registers(packed, has_start, scores, num_warpgroups):
    """Registers of a thread of producer and scheduler.

    With 32 the first of two consumers has 8 fewer than the second, and the widest loop bodies of packed calls would
    spill; with 24 the scheduler has no room for the tile counter.

    Args:
        packed: Whether sequences are packed.
        has_start: Whether the keys of a row have a first one.
        scores: ``Mods.SCORES``.
        num_warpgroups: How many compute.
    """
    is_widest = packed and (has_start or "softcap" in scores.split())
    return 24 if is_widest and num_warpgroups == 2 else 32


@gluon.jit
def consumer(channels, call, output, schedule, mod, WARPGROUP: gl.constexpr):
    """One warpgroup: BLOCK_M rows of every tile."""
    BLOCK_M: gl.constexpr = schedule.BLOCK_M
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, schedule.BLOCK_N, 16])
    zeros = gl.zeros([BLOCK_M, schedule.BLOCK_N], gl.float32, s_layout)
    # ``layout_like`` has the dtype and layout of the probabilities.
    layout_like = gl.convert_layout(zeros.to(channels.keys[0].buffers.dtype), gl.DotOperandLayout(0, s_layout, 2))
    rows = WARPGROUP * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, s_layout))
    tiles = 0
    used = 0
    loop = open_tile(channels.tiles, tiles, call, schedule, rows, zeros, mod, WARPGROUP)
    e, row_max, row_sum, q = start_tile(channels, tiles, used, loop, zeros, call, schedule, mod, WARPGROUP)
    probs = operand(e, layout_like)
    used += loop.skipped
    if schedule.PINGPONG and schedule.NUM_WARPGROUPS - 1 == WARPGROUP:
        row_max = pingpong_arrive(row_max, 0)
    while loop.is_tile:
        factor = gl.full([BLOCK_M], 1.0, gl.float32, row_max.type.layout)
        # A skipped block still waits at the ping-pong barrier and arrives at the next one.
        if schedule.PINGPONG and call.mods.band.right is not None:  # noqa: SIM102
            if loop.skipped > 0:
                row_max = pingpong_arrive(pingpong_wait(row_max, WARPGROUP), (WARPGROUP + 1) % schedule.NUM_WARPGROUPS)
        state = SoftmaxState(probs, zero_accumulators(BLOCK_M, channels.values), factor, row_max, row_sum, q)
        n_block = loop.n_block
        if schedule.PASSES_OVER:
            used, n_block = pass_over(channels, tiles, used, n_block, loop, call, schedule, WARPGROUP)
        while n_block > loop.n_block_min:
            n_block -= 1
            state = step(channels, tiles, used, state, zeros, loop, n_block, call, schedule, mod, WARPGROUP)
            used += 1

        if schedule.OVERLAP:
            loop = open_tile(channels.tiles, tiles + 1, call, schedule, rows, zeros, mod, WARPGROUP)
            # The next tile's first scores run during this tile's last values and epilogue. After the last tile they are
            # computed from stale buffers and discarded.
            s, pairs, q = first_scores(channels, tiles + 1, used + 1, loop, zeros, call, schedule, mod, WARPGROUP)
            accs = add_last_values(channels, used, state)
            fetched = mod.fetch(pairs, zeros, call.mods)
            words = mod.draw(pairs, zeros, loop.philox_key)
            s = warpgroup_mma_wait(len(accs), deps=[s])
            channels.keys[0].release(used + 1 + loop.skipped, loop.is_tile)
            if schedule.Q_STAGES > 1:
                channels.queries[0].release(tiles)
            e, row_max, row_sum = first_probs(s, mod, pairs, fetched, words, call, schedule, loop)
            row_sum = compute_before_wait(row_sum)
            accs = wait_for_products(accs)
            channels.values[0].release(used)
            channels.values[0].skip(used + 1, loop.skipped, loop.is_tile)
            probs = operand(e, layout_like)
            epilogue(accs, state.row_max, state.row_sum, channels, tiles, call, output, schedule, WARPGROUP)
        else:
            accs = wait_for_products(add_last_values(channels, used, state))
            channels.values[0].release(used)
            epilogue(accs, state.row_max, state.row_sum, channels, tiles, call, output, schedule, WARPGROUP)
            loop = open_tile(channels.tiles, tiles + 1, call, schedule, rows, zeros, mod, WARPGROUP)
            e, row_max, row_sum, q = start_tile(
                channels, tiles + 1, used + 1, loop, zeros, call, schedule, mod, WARPGROUP
            )
            probs = operand(e, layout_like)
        channels.tiles.ring.release(tiles)
        tiles += 1
        used += 1 + loop.skipped
    if schedule.PINGPONG and WARPGROUP == 0:
        row_max = pingpong_wait(row_max, 0)
    tma_store_wait(0)


@gluon.jit
def pass_over(channels, tiles, used, n_block, loop, call, schedule, WARPGROUP: gl.constexpr):
    """(used, n_block) after all blocks of a tile except the first, if none of its rows are this warpgroup's.

    A decode has at most one warpgroup's rows, and products of another warpgroup would only delay it.
    """
    where = query_rows(channels.tiles, tiles, call)
    first = channels.tiles.get(tiles, "row") + WARPGROUP * schedule.BLOCK_M
    if schedule.PACK_GQA:
        first = channels.tiles.get_own(tiles, "query", WARPGROUP)
    if first >= where.length:
        while n_block > loop.n_block_min:
            n_block -= 1
            channels.keys[0].skip(used + 1, 1, True)
            channels.values[0].skip(used, 1, True)
            used += 1
    return used, n_block


@gluon.jit
def start_tile(channels, tiles, used, loop, zeros, call, schedule, mod, WARPGROUP: gl.constexpr):
    """The softmax state after a tile's first block, with no product under way; see ``first_probs``."""
    s, pairs, q = first_scores(channels, tiles, used, loop, zeros, call, schedule, mod, WARPGROUP)
    fetched = mod.fetch(pairs, zeros, call.mods)
    words = mod.draw(pairs, zeros, loop.philox_key)
    s = warpgroup_mma_wait(0, deps=[s])
    channels.values[0].skip(used, loop.skipped, loop.is_tile)
    channels.keys[0].release(used + loop.skipped, loop.is_tile)
    if not schedule.OVERLAP:
        channels.queries[0].release(tiles, loop.is_tile & (loop.n_block == loop.n_block_min))
    e, row_max, row_sum = first_probs(s, mod, pairs, fetched, words, call, schedule, loop)
    return e, row_max, row_sum, q


@gluon.jit
def epilogue(accs, row_max, row_sum, channels, tiles, call, output, schedule, WARPGROUP: gl.constexpr):
    """Normalises a tile's output, merges it with the output over other keys, and stores it and lse."""
    rows_layout: gl.constexpr = row_max.type.layout
    records = channels.tiles
    where = query_rows(records, tiles, call)
    rows = gl.arange(0, schedule.BLOCK_M, rows_layout)
    positions, heads = queries_of(records, tiles, rows, call, schedule, WARPGROUP)
    scale, lse = row_results(row_max, row_sum, where, heads, call, schedule)
    if output.partial_out is None and output.desc is not None:
        out = ()
        for i in gl.static_range(len(accs)):
            out = append(out, (accs[i] * as_row_layout(scale, accs[i])[:, None]).to(output.desc.dtype))
    else:
        row = records.get(tiles, "row") + WARPGROUP * schedule.BLOCK_M
        out, lse = join_partial(accs, scale, lse, where, row, call, output, schedule)
    if output.desc is not None:
        stages: gl.constexpr = channels.outputs.shape[0] // schedule.NUM_WARPGROUPS
        own = row_segments(records, tiles, call, schedule, WARPGROUP)
        store(output.desc, out, channels.outputs, WARPGROUP * stages, stages, own)
    at = positions
    if schedule.PACK_GQA:
        # lse has seqlen_q numbers for each head.
        at += heads * call.queries.length
    gl.store(lse_at(output.lse, where, at, call, output.LSE_PARTS), lse, mask=positions < where.length)
    store_max_scores(row_max, row_sum, records, tiles, call, output, schedule, WARPGROUP)


@gluon.jit
def store_max_scores(row_max, row_sum, records, tiles, call, output, schedule, WARPGROUP: gl.constexpr):
    """Writes the largest scores of a warpgroup's rows, if the call asks for them."""
    if output.max_scores is not None:
        where = query_rows(records, tiles, call)
        rows = gl.arange(0, schedule.BLOCK_M, row_max.type.layout)
        positions, heads = queries_of(records, tiles, rows, call, schedule, WARPGROUP)
        at = positions
        if schedule.PACK_GQA:
            at += heads * call.queries.length
        top = softmax.largest(row_max, gl.convert_layout(gl.sum(row_sum, 1), row_max.type.layout))
        gl.store(lse_at(output.max_scores, where, at, call, output.LSE_PARTS), top, mask=positions < where.length)


@gluon.jit
def row_results(row_max, row_sum, where, heads, call, schedule):
    """(each row's factor of the output, its lse), with sinks; heads: the rows' heads within the group."""
    total = gl.convert_layout(gl.sum(row_sum, 1), row_max.type.layout)
    if call.mods.sinks is not None:
        sink = gl.load(call.mods.sinks + (where.head if not schedule.PACK_GQA else where.head + heads))
        sink = sink.to(gl.float32)
        if call.q.PACKED:
            # Rows past the last sequence have lse -inf.
            sink = gl.where(where.b < call.queries.count, sink, float("-inf"))
        factor, row_max, total = softmax.add_sink(row_max, total, sink)
        scale, lse = softmax.finalise(row_max, total)
        scale = scale * factor
    else:
        scale, lse = softmax.finalise(row_max, total)
    if call.mods.DROPOUT is not None:
        scale = scale * call.mods.dropout.keep_scale
    return scale, lse


@gluon.jit
def join_partial(accs, scale, lse, where, row, call, output, schedule, FIRST: gl.constexpr = 0,
                 COLS: gl.constexpr = None):  # fmt: skip
    """(out, lse): a warpgroup's rows from ``row`` on, merged with the partial result if there is one.

    The result has all columns, or COLS columns from FIRST on. A few columns are merged at a time, to save registers. A
    float32 output is stored here.
    """
    start = where.b.to(gl.int64) * call.queries.length
    if call.q.PACKED:
        start = where.start.to(gl.int64)
    out = ()
    joined_lse = lse
    # As wide as TMA's box if TMA stores the output; the last part is the narrowest.
    most: gl.constexpr = 64 if output.desc is None else output.desc.block_type.shape[4 if call.q.PACKED else 3]
    width: gl.constexpr = min(accs[len(accs) - 1].shape[1], most)
    own_cols: gl.constexpr = output.BLOCK_DIM if COLS is None else COLS
    for i in gl.static_range(len(accs)):
        parts = pieces(accs[i] * as_row_layout(scale, accs[i])[:, None], width)
        for j in gl.static_range(len(parts)):
            x = parts[j]
            rows = row + gl.arange(0, schedule.BLOCK_M, gl.SliceLayout(1, x.type.layout))
            cols = FIRST + start_of(own_cols, i) + j * width + gl.arange(0, width, gl.SliceLayout(0, x.type.layout))
            inside = (rows < where.length)[:, None] & (cols < output.DIM)[None, :]
            at = ((start + rows) * call.heads.num_q + where.head)[:, None] * output.DIM + cols[None, :]
            if output.partial_out is not None:
                more_lse_at = lse_at(output.partial_lse, where, rows, call, output.LSE_PARTS)
                more_lse = gl.load(more_lse_at, mask=rows < where.length, other=float("-inf"))
                more = gl.load(output.partial_out + at, mask=inside, other=0.0)
                x, log_sum = softmax.merge(x, as_row_layout(lse, x), more, more_lse)
                joined_lse = gl.convert_layout(log_sum, lse.type.layout)
            if output.desc is None:
                gl.store(output.ptr + at, x, mask=inside)
            else:
                out = append(out, x.to(output.desc.dtype))
    return out, joined_lse
