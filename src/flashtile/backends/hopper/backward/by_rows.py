"""Dq of lists of small blocks: a program owns 64 rows and loops over the keys in their list.

    S = Q K^T      P = exp2(S * scale - lse_log2)      dP = dO V^T      dS = P * (dP - delta)      dQ += dS K

A program that owns 64 keys adds to dq as often as it reads queries and dout, and lists lead such programs to different
rows, so that dq has to be fetched each time. Here nothing is added: two products of seven are computed twice, and each
gradient is written once. ``kernel.attention_backward`` computes dk and dv. Scheduler and order of tiles are the
forward's, and so is the overlap: the products for dq of one block run under the exponentials of the next.
"""

# Triton's aggregate reads annotations as types, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from flashtile.backends.hopper.backward.scheduler import blocks_per_head, first_block
from flashtile.backends.hopper.device.gluon_compat import aggregate, tma_store_wait
from flashtile.backends.hopper.device.mods import transforms_of
from flashtile.backends.hopper.device.parts import (
    add_products,
    append,
    load_boxes,
    make_rings,
    start_scores,
    store,
    tiles_at,
    wait_for_products,
    width_of,
    with_parts,
    zero_accumulators,
)
from flashtile.backends.hopper.device.ring import Records, make_records, make_ring_beside
from flashtile.backends.hopper.forward.roles import KeyTensors, load_keys, load_values, make_outputs, scheduler
from flashtile.backends.hopper.forward.scheduler import (
    FIELDS,
    OWN_FIELDS,
    RECORD_SIZE,
    block_at,
    query_rows,
    row_segments,
)
from flashtile.backends.hopper.forward.softmax_step import block_pairs, is_edge, open_tile, operand, shape_scores

# The number of a tile's blocks still to load when the next tile is asked for.
_AHEAD = gl.constexpr(2)


@aggregate
class RowChannels:
    """Tile records, and rings of each part of queries, dout, keys and values; dout shares the queries' ``empty``.

    ``outputs`` is shared memory from which TMA stores dq.
    """

    tiles: Records
    queries: gl.tuple
    dout: gl.tuple
    keys: gl.tuple
    values: gl.tuple
    outputs: gl.shared_memory_descriptor


@gluon.jit
def attention_backward_dq(call, output, schedule):
    """Dq of every tile; two programs per SM.

    Args:
        call: As of the forward, with the backward's mods.
        output: ``records.RowGradient``.
        schedule: ``ForwardSchedule`` of one warpgroup.
    """
    dtype: gl.constexpr = call.q.desc.dtype
    BLOCK_M: gl.constexpr = schedule.BLOCK_M
    COLS_V: gl.constexpr = call.v.BLOCK_DIM
    keys = make_rings(dtype, schedule.BLOCK_N, call.q.BLOCK_DIM, schedule.STAGES, 1)
    values = make_rings(dtype, schedule.BLOCK_N, COLS_V, schedule.STAGES, 1)
    tiles = make_records(FIELDS, OWN_FIELDS, RECORD_SIZE, schedule.TILE_STAGES, 2)
    outputs = make_outputs(output, schedule)
    mod, _ = transforms_of(call, schedule)
    queries = make_rings(dtype, BLOCK_M, call.q.BLOCK_DIM, 1, 1)
    dout_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, width_of(COLS_V, -1)], dtype)
    dout = make_ring_beside(queries[0], dtype, [BLOCK_M, width_of(COLS_V, 0)], dout_layout)
    dout = with_parts(dout, dout_layout, COLS_V, 256)
    channels = RowChannels(tiles, queries, dout, keys, values, outputs)
    source = KeyTensors(False)
    gl.warp_specialize([
        (consumer, (channels, call, output, schedule, mod)),
        (producer, (channels, source, call, output, schedule)),
        (scheduler, (tiles, source, call, schedule)),
    ], [1, 1], [32, 32])  # fmt: skip


@gluon.jit
def producer(channels, source, call, output, schedule):
    """Loads each tile's queries and dout, and its key and value blocks from the last to the first."""
    records = channels.tiles
    tiles = 0
    used = 0
    records.ring.wait(tiles)
    n_block = records.get(tiles, "n_block_max")
    while n_block > 0:
        n_block_min = records.get(tiles, "n_block_min")
        load_rows(channels, tiles, call, output, schedule)
        records.ask(tiles, n_block - n_block_min <= _AHEAD)
        while n_block > n_block_min:
            n_block -= 1
            load_keys(channels, used, tiles, n_block, source, call, schedule)
            load_values(channels, used, tiles, n_block, source, call, schedule)
            records.ask(tiles, n_block - n_block_min == _AHEAD)
            used += 1
        records.ring.release(tiles)
        tiles += 1
        records.ring.wait(tiles)
        n_block = records.get(tiles, "n_block_max")


@gluon.jit
def load_rows(channels, tiles, call, output, schedule):
    """Starts the loads of a tile's queries and dout."""
    COLS: gl.constexpr = call.q.BLOCK_DIM
    COLS_V: gl.constexpr = call.v.BLOCK_DIM
    rows, row = row_segments(channels.tiles, tiles, call, schedule, 0)[0]
    full = channels.queries[0].acquire(tiles, schedule.BLOCK_M * COLS * 2)
    load_boxes(call.q.desc, tiles_at(channels.queries, tiles), full, rows, row, COLS)
    of_dout = channels.dout[0].full.index(0)
    mbarrier.expect(of_dout, schedule.BLOCK_M * COLS_V * 2)
    load_boxes(output.dout.desc, tiles_at(channels.dout, tiles), of_dout, rows, row, COLS_V)


@gluon.jit
def numbers_of(channels, tiles, call, output, schedule, layout: gl.constexpr):
    """(lse_log2, delta) of a tile's rows, from the workspace; its order is in ``rows``."""
    M: gl.constexpr = schedule.BLOCK_M
    where = query_rows(channels.tiles, tiles, call)
    count = blocks_per_head(call.queries.length, call.queries.count, M, call.q.PACKED)
    block = first_block(where.b, where.head, call.heads.num_q, where.start, count, M, call.q.PACKED)
    block += channels.tiles.get(tiles, "row") // M
    at = output.rows + block.to(gl.int64) * (2 * M) + gl.arange(0, M, layout)
    return gl.load(at), gl.load(at + M)


@gluon.jit
def consumer(channels, call, output, schedule, mod):
    """Dq of 64 rows of every tile."""
    BLOCK_M: gl.constexpr = schedule.BLOCK_M
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, schedule.BLOCK_N, 16])
    zeros = gl.zeros([BLOCK_M, schedule.BLOCK_N], gl.float32, s_layout)
    # ``layout_like`` has the dtype and layout of the gradients of scores.
    layout_like = gl.convert_layout(zeros.to(channels.keys[0].buffers.dtype), gl.DotOperandLayout(0, s_layout, 2))
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, s_layout))
    tiles = 0
    used = 0
    loop = open_tile(channels.tiles, tiles, call, schedule, rows, zeros, mod, 0)
    while loop.is_tile:
        numbers = numbers_of(channels, tiles, call, output, schedule, gl.SliceLayout(1, s_layout))
        channels.queries[0].wait(tiles)
        channels.dout[0].wait(tiles)
        n_block = loop.n_block
        s, dp = start_block(channels, tiles, used, zeros)
        dscores = score_gradients(channels, tiles, used, s, dp, 0, numbers, loop, n_block, call, schedule, mod)
        dscores = operand(dscores, layout_like)
        dq = zero_accumulators(BLOCK_M, channels.keys)
        while n_block > loop.n_block_min:
            n_block -= 1
            s, dp = start_block(channels, tiles, used + 1, zeros)
            dq = add_products(dscores, channels.keys, used, dq)
            found = score_gradients(
                channels, tiles, used + 1, s, dp, len(dq), numbers, loop, n_block, call, schedule, mod
            )
            dscores = operand(found, layout_like)
            dq = wait_for_products(dq)
            channels.keys[0].release(used)
            used += 1
        channels.queries[0].release(tiles)
        dq = wait_for_products(add_products(dscores, channels.keys, used, dq))
        channels.keys[0].release(used)
        used += 1
        out = ()
        for i in gl.static_range(len(dq)):
            out = append(out, (dq[i] * output.scale).to(output.desc.dtype))
        own = row_segments(channels.tiles, tiles, call, schedule, 0)
        store(output.desc, out, channels.outputs, 0, schedule.OUT_STAGES, own)
        channels.tiles.ring.release(tiles)
        tiles += 1
        loop = open_tile(channels.tiles, tiles, call, schedule, rows, zeros, mod, 0)
    tma_store_wait(0)


@gluon.jit
def start_block(channels, tiles, use, zeros):
    """Starts the products of queries and keys, and of dout and values."""
    channels.keys[0].wait(use)
    s = start_scores(channels.queries, tiles, channels.keys, use, zeros, ())
    channels.values[0].wait(use)
    return s, start_scores(channels.dout, tiles, channels.values, use, zeros, ())


@gluon.jit
def score_gradients(channels, tiles, use, s, dp, LATER: gl.constexpr, numbers, loop, n_block, call, schedule, mod):
    """The gradients of a block's scores, once its products are there; LATER: products that were started after them."""
    lse_log2, delta = numbers
    number = block_at(n_block, call, schedule)
    pairs = block_pairs(channels.tiles, tiles, use, loop, n_block, number, call, schedule, True, 0)
    s = warpgroup_mma_wait(LATER + len(channels.dout), deps=[s])
    s, _ = shape_scores(s, mod, pairs, (), call, loop, is_edge(loop, number, call), schedule.HAS_EDGES)
    probs = gl.exp2(s * mod.scale_log2 - lse_log2[:, None])
    dp = warpgroup_mma_wait(LATER, deps=[dp])
    channels.values[0].release(use)
    return probs * (dp - delta[:, None])
