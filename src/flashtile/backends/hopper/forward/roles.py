"""The roles of the Hopper forward: a scheduler and a producer of one warp each, and consumers of a warpgroup each."""

# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from flashtile.backends.gpu.device import softmax
from flashtile.backends.hopper.device.gluon_compat import aggregate, tma_store_wait
from flashtile.backends.hopper.device.head_dim_parts import (
    also,
    load,
    of_rows,
    pieces,
    start_of,
    store,
    wait_for_products,
    zero_accumulators,
)
from flashtile.backends.hopper.device.inline_ptx import compute_before_wait, pingpong_arrive, pingpong_wait
from flashtile.backends.hopper.forward.scheduler import (
    cached_keys,
    key_rows,
    lse_offset,
    next_tile,
    publish_tile,
    queries_of,
    query_rows,
    strips,
)
from flashtile.backends.hopper.forward.softmax_step import (
    State,
    add_last_values,
    first_probs,
    first_scores,
    open_tile,
    operand,
    step,
)


@gluon.jit
def scheduler(records, sizes, cu_seqlens_q_ptr, cu_seqlens_k_ptr, counter_ptr):
    """Finds tiles ahead of the roles that work on them: its divisions take longer than loading a short tile."""
    tiles = 0
    place = 0
    is_end = False
    while not is_end:
        records.ring.claim(tiles)
        tile = next_tile(place, sizes, cu_seqlens_q_ptr, cu_seqlens_k_ptr, counter_ptr)
        place = tile.step
        is_end = tile.is_end
        publish_tile(records, tiles, tile, sizes)
        tiles += 1


@gluon.jit
def producer(q_desc, k_desc, v_desc, channels, score_tiles, sizes, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr):
    """Loads each tile's queries, and its key and value blocks from the last to the first.

    In the order of use: a block's values follow the keys of the block scored after it, which is the next tile's first
    block where tiles overlap.
    """
    records = channels.tiles
    tiles = 0
    used = 0
    records.ring.wait(tiles)
    n_block = records.get(tiles, "n_block_max")
    while n_block > 0:
        n_block_min = records.get(tiles, "n_block_min")
        for warpgroup in gl.static_range(sizes.num_warpgroups):
            load(q_desc, channels.queries[warpgroup], tiles, strips(records, tiles, sizes, warpgroup), BLOCK_D)
        n_block -= 1
        load_block(k_desc, channels.keys, used, records, tiles, n_block, sizes, BLOCK_D)
        if sizes.overlap:
            load_last_values(v_desc, channels, used - 1, tiles - 1, sizes, BLOCK_DV)
        load_score_tiles(score_tiles, records, tiles, used, n_block, sizes)
        while n_block > n_block_min:
            n_block -= 1
            load_block(k_desc, channels.keys, used + 1, records, tiles, n_block, sizes, BLOCK_D)
            load_block(v_desc, channels.values, used, records, tiles, n_block + 1, sizes, BLOCK_DV)
            load_score_tiles(score_tiles, records, tiles, used + 1, n_block, sizes)
            used += 1
        if not sizes.overlap:
            load_last_values(v_desc, channels, used, tiles, sizes, BLOCK_DV)
        used += 1
        tiles += 1
        records.ring.wait(tiles)
        n_block = records.get(tiles, "n_block_max")
    if sizes.overlap:
        load_last_values(v_desc, channels, used - 1, tiles - 1, sizes, BLOCK_DV)


@gluon.jit
def load_last_values(v_desc, channels, use, tiles, sizes, BLOCK_DV: gl.constexpr):
    """Loads a tile's last values and releases its record; does nothing for tile -1."""
    if tiles >= 0:
        n_block = channels.tiles.get(tiles, "n_block_min")
        load_block(v_desc, channels.values, use, channels.tiles, tiles, n_block, sizes, BLOCK_DV)
        channels.tiles.ring.release(tiles)


@gluon.jit
def load_block(desc, rings, use, records, tiles, n_block, sizes, COLS: gl.constexpr):
    """Starts the load of a block of a tile's keys or values."""
    if sizes.cache is None:
        load(desc, rings, use, ((key_rows(records, tiles, sizes), n_block * sizes.block_n),), COLS)
    else:
        # A map of rows as if packed has two dimensions more.
        FILLS: gl.constexpr = len(desc.block_type.shape) == 5
        load(desc, rings, use, cached_keys(records, tiles, n_block, sizes.cache, sizes, FILLS), COLS)


@gluon.jit
def load_score_tiles(score_tiles, records, tiles, use, n_block, sizes):
    """Starts the loads of the bias and the mask of a tile's rows and a block of keys."""
    for i in gl.static_range(len(score_tiles)):
        b, head, row = records.get(tiles, "sequence"), records.get(tiles, "head"), records.get(tiles, "row")
        score_tiles[i].start(b, head, row, n_block * sizes.block_n, use)


@aggregate
class Output:
    """Where a consumer's results go, and what joins them.

    Attributes:
        desc: The output's descriptor, or None: it is float32 and written from registers.
        buffers: Shared memory through which TMA stores it, or None.
        ptr: The output in float32, or None.
        lse_ptr: lse.
        partial_out_ptr: The output over other keys, or None.
        partial_lse_ptr: Its lse.
        sinks_ptr: The sinks or None.
        head_dim_v: Columns of what is read or written from registers; None if nothing is.
        block_dv: Columns of a tile.
    """

    desc: tma.tensor_descriptor | gl.constexpr
    buffers: gl.shared_memory_descriptor | gl.constexpr
    ptr: gl.tensor | gl.constexpr
    lse_ptr: gl.tensor
    partial_out_ptr: gl.tensor | gl.constexpr
    partial_lse_ptr: gl.tensor | gl.constexpr
    sinks_ptr: gl.tensor | gl.constexpr
    head_dim_v: gl.constexpr
    block_dv: gl.constexpr


@gluon.jit
def consumer(channels, output, sizes, mod, WARPGROUP: gl.constexpr):
    """One warpgroup: ``block_m`` rows of every tile."""
    BLOCK_M: gl.constexpr = sizes.block_m
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.block_n, 16])
    zeros = gl.zeros([BLOCK_M, sizes.block_n], gl.float32, s_layout)
    # Gives the dtype and layout of the probabilities.
    like = gl.convert_layout(zeros.to(channels.keys[0].buffers.dtype), gl.DotOperandLayout(0, s_layout, 2))
    rows = WARPGROUP * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, s_layout))
    tiles = 0
    used = 0
    loop = open_tile(channels.tiles, tiles, sizes, rows, zeros, mod, WARPGROUP)
    e, row_max, row_sum = start_tile(channels, tiles, used, loop, zeros, sizes, mod, WARPGROUP)
    probs = operand(e, like)
    used += loop.skipped
    if sizes.pingpong and sizes.num_warpgroups - 1 == WARPGROUP:
        row_max = pingpong_arrive(row_max, 0)
    while loop.is_tile:
        factor = gl.full([BLOCK_M], 1.0, gl.float32, row_max.type.layout)
        # A skipped block still waits at the ping-pong barrier and arrives at the next one.
        if sizes.pingpong and sizes.has_right:  # noqa: SIM102
            if loop.skipped > 0:
                row_max = pingpong_arrive(pingpong_wait(row_max, WARPGROUP), (WARPGROUP + 1) % sizes.num_warpgroups)
        state = State(probs, zero_accumulators(BLOCK_M, channels.values), factor, row_max, row_sum)
        n_block = loop.n_block
        while n_block > loop.n_block_min:
            n_block -= 1
            state = step(channels, tiles, used, state, zeros, loop, n_block, sizes, mod, WARPGROUP)
            used += 1

        if sizes.overlap:
            loop = open_tile(channels.tiles, tiles + 1, sizes, rows, zeros, mod, WARPGROUP)
            # The next tile's first scores run under this one's last values and epilogue. After the last tile they are
            # computed from stale buffers and discarded.
            s, pairs = first_scores(channels, tiles + 1, used + 1, loop, zeros, sizes, mod, WARPGROUP)
            accs = add_last_values(channels, used, state)
            fetched = mod.fetch(pairs, zeros)
            s = warpgroup_mma_wait(len(accs), deps=[s])
            channels.keys[0].release(used + 1 + loop.skipped, loop.is_tile)
            channels.queries[0].release(tiles)
            e, row_max, row_sum = first_probs(s, mod, pairs, fetched, sizes, loop)
            row_sum = compute_before_wait(row_sum)
            accs = wait_for_products(accs)
            channels.values[0].release(used)
            channels.values[0].skip(used + 1, loop.skipped, loop.is_tile)
            probs = operand(e, like)
            epilogue(accs, state.row_max, state.row_sum, channels.tiles, tiles, output, sizes, WARPGROUP)
        else:
            accs = wait_for_products(add_last_values(channels, used, state))
            channels.values[0].release(used)
            epilogue(accs, state.row_max, state.row_sum, channels.tiles, tiles, output, sizes, WARPGROUP)
            loop = open_tile(channels.tiles, tiles + 1, sizes, rows, zeros, mod, WARPGROUP)
            e, row_max, row_sum = start_tile(channels, tiles + 1, used + 1, loop, zeros, sizes, mod, WARPGROUP)
            probs = operand(e, like)
        channels.tiles.ring.release(tiles)
        tiles += 1
        used += 1 + loop.skipped
    if sizes.pingpong and WARPGROUP == 0:
        row_max = pingpong_wait(row_max, 0)
    tma_store_wait(0)


@gluon.jit
def start_tile(channels, tiles, used, loop, zeros, sizes, mod, WARPGROUP: gl.constexpr):
    """The softmax state after a tile's first block, with nothing else under way; see ``first_probs``."""
    s, pairs = first_scores(channels, tiles, used, loop, zeros, sizes, mod, WARPGROUP)
    fetched = mod.fetch(pairs, zeros)
    s = warpgroup_mma_wait(0, deps=[s])
    channels.values[0].skip(used, loop.skipped, loop.is_tile)
    channels.keys[0].release(used + loop.skipped, loop.is_tile)
    if not sizes.overlap:
        channels.queries[0].release(tiles, loop.is_tile & (loop.n_block == loop.n_block_min))
    return first_probs(s, mod, pairs, fetched, sizes, loop)


@gluon.jit
def epilogue(accs, row_max, row_sum, records, tiles, output, sizes, WARPGROUP: gl.constexpr):
    """Normalises a tile's output, merges it with that over other keys, and stores it and lse."""
    rows_layout: gl.constexpr = row_max.type.layout
    where = query_rows(records, tiles, sizes)
    positions, heads = queries_of(records, tiles, gl.arange(0, sizes.block_m, rows_layout), sizes, WARPGROUP)
    total = gl.convert_layout(gl.sum(row_sum, 1), rows_layout)
    if output.sinks_ptr is not None:
        sink = gl.load(output.sinks_ptr + (where.head if not sizes.pack_gqa else where.head + heads))
        sink = sink.to(gl.float32)
        if sizes.varlen:
            # Rows past the last sequence have lse -inf.
            sink = gl.where(where.b < sizes.batch, sink, float("-inf"))
        factor, row_max, total = softmax.add_sink(row_max, total, sink)
        scale, lse = softmax.finalise(row_max, total)
        scale = scale * factor
    else:
        scale, lse = softmax.finalise(row_max, total)
    if output.partial_out_ptr is None and output.desc is not None:
        out = ()
        for i in gl.static_range(len(accs)):
            out = also(out, (accs[i] * of_rows(scale, accs[i])[:, None]).to(output.desc.dtype))
    else:
        row = records.get(tiles, "row") + WARPGROUP * sizes.block_m
        out, lse = join_partial(accs, scale, lse, where, row, output, sizes)
    if output.desc is not None:
        stages: gl.constexpr = output.buffers.shape[0] // sizes.num_warpgroups
        store(output.desc, out, output.buffers, WARPGROUP * stages, stages, strips(records, tiles, sizes, WARPGROUP))
    at = positions
    if sizes.pack_gqa:
        # lse has seqlen_q numbers a head.
        at += heads * sizes.seqlen_q
    gl.store(output.lse_ptr + lse_offset(where, sizes) + at, lse, mask=positions < where.length)


@gluon.jit
def join_partial(accs, scale, lse, where, row, output, sizes):
    """(out, lse): a warpgroup's rows from ``row`` on, merged with the partial result if there is one.

    A few columns at a time, to save registers. An output in float32 is stored here.
    """
    start = where.b.to(gl.int64) * sizes.seqlen_q
    if sizes.varlen:
        start = where.start.to(gl.int64)
    out = ()
    joined_lse = lse
    # As wide as TMA's box if TMA stores the output; the last part is the narrowest.
    most: gl.constexpr = 64 if output.desc is None else output.desc.block_type.shape[4 if sizes.varlen else 3]
    width: gl.constexpr = min(accs[len(accs) - 1].shape[1], most)
    for i in gl.static_range(len(accs)):
        parts = pieces(accs[i] * of_rows(scale, accs[i])[:, None], width)
        for j in gl.static_range(len(parts)):
            x = parts[j]
            rows = row + gl.arange(0, sizes.block_m, gl.SliceLayout(1, x.type.layout))
            cols = start_of(output.block_dv, i) + j * width + gl.arange(0, width, gl.SliceLayout(0, x.type.layout))
            inside = (rows < where.length)[:, None] & (cols < output.head_dim_v)[None, :]
            at = ((start + rows) * sizes.num_heads_q + where.head)[:, None] * output.head_dim_v + cols[None, :]
            if output.partial_out_ptr is not None:
                more_lse_at = output.partial_lse_ptr + lse_offset(where, sizes) + rows
                more_lse = gl.load(more_lse_at, mask=rows < where.length, other=float("-inf"))
                more = gl.load(output.partial_out_ptr + at, mask=inside, other=0.0)
                x, log_sum = softmax.merge(x, of_rows(lse, x), more, more_lse)
                joined_lse = gl.convert_layout(log_sum, lse.type.layout)
            if output.desc is None:
                gl.store(output.ptr + at, x, mask=inside)
            else:
                out = also(out, x.to(output.desc.dtype))
    return out, joined_lse
