"""The consumers of the Hopper forward for 8-bit tensors; scheduler and producer are ``forward.roles``'s."""

# Triton's aggregate reads annotations as types, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from flashtile.backends.hopper.device.fragments import thread_sums
from flashtile.backends.hopper.device.gluon_compat import aggregate, tma_store_wait
from flashtile.backends.hopper.device.inline_ptx import packed_operand, pingpong_arrive, pingpong_wait
from flashtile.backends.hopper.device.parts import scale_by, start_scores
from flashtile.backends.hopper.forward.roles import epilogue
from flashtile.backends.hopper.forward.scheduler import lse_offset, query_rows
from flashtile.backends.hopper.forward.softmax_step import KeyLoop, open_tile, start_first_scores
from flashtile.backends.hopper.quantized.step import (
    PROBS_LOG2,
    TileScales,
    add_product,
    fetch_block,
    probabilities,
    raise_max,
    start_products,
    tile_scales,
    zero_parts,
)


@aggregate
class QuantizedState:
    """The online softmax of a warpgroup's rows between two blocks of keys.

    ``words`` are the last block's probabilities (``inline_ptx.packed``), not yet multiplied with its values; ``accs``
    [BLOCK_M, WIDTH] must be multiplied by ``factor`` before that product is added, and are then in units of
    ``value_scale``, the block's v_scale. They and ``row_sum`` [BLOCK_M, 4], each thread's partial sum, are scaled by
    2^8. ``row_max`` is in base 2. ``next_score`` and ``next_value_scale`` are the next block's scales, loaded ahead.
    """

    words: gl.tensor
    accs: gl.tuple
    factor: gl.tensor
    row_max: gl.tensor
    row_sum: gl.tensor
    value_scale: gl.tensor
    next_score: gl.tensor
    next_value_scale: gl.tensor


@aggregate
class ScoreBlock:
    """A block's complete products of queries and keys, their scale, and its values' scale."""

    s: gl.tensor
    score: gl.tensor
    value_scale: gl.tensor


@aggregate
class StepPlace:
    """The place of a warpgroup's work: the tile, the use of the rings, and the block of keys."""

    tiles: gl.tensor
    used: gl.tensor
    n_block: gl.tensor
    loop: KeyLoop
    own: TileScales


@gluon.jit
def consumer(channels, call, scales, output, schedule, mod, WIDTH: gl.constexpr, BEHIND: gl.constexpr,
             WARPGROUP: gl.constexpr):  # fmt: skip
    """One warpgroup: BLOCK_M rows of every tile.

    The probabilities of a block are multiplied with its values WIDTH columns at a time and added to the output. BEHIND:
    the values' product is issued after the next block's scores and runs during their row maxima; else before the
    scores, which takes fewer registers. The other warpgroups' products run during this one's exponentials.
    """
    BLOCK_M: gl.constexpr = schedule.BLOCK_M
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, schedule.BLOCK_N, 32])
    zeros = gl.zeros([BLOCK_M, schedule.BLOCK_N], gl.float32, s_layout)
    rows = WARPGROUP * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, s_layout))
    tiles = 0
    used = 0
    loop = open_tile(channels.tiles, tiles, call, schedule, rows, zeros, mod, WARPGROUP)
    own = tile_scales(channels, tiles, scales, loop, call, schedule, WARPGROUP)
    block = first_block_of(channels, tiles, used, loop, own, zeros, scales, schedule)
    used += loop.skipped
    if schedule.PINGPONG and schedule.NUM_WARPGROUPS - 1 == WARPGROUP:
        pingpong_arrive(thread_sums(zeros), 0, True)
    while loop.is_tile:
        row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        row_sum = thread_sums(zeros)
        # A skipped block still waits at the ping-pong barrier and arrives at the next one.
        if schedule.PINGPONG and call.mods.band.right is not None:  # noqa: SIM102
            if loop.skipped > 0:
                row_sum = pingpong_wait(row_sum, WARPGROUP, True)
                row_sum = pingpong_arrive(row_sum, (WARPGROUP + 1) % schedule.NUM_WARPGROUPS, True)
        accs = zero_parts(BLOCK_M, output.BLOCK_DIM, WIDTH)
        n_block = loop.n_block
        at = StepPlace(tiles, used, n_block, loop, own)
        s, scale, row_max, finite_max, factor = raise_max(
            channels, at, row_max, block, call, schedule, mod, True, WARPGROUP
        )
        words, row_sum = probabilities(s, scale, finite_max, factor, row_sum, schedule, len(accs) == 1, WARPGROUP)
        score, value_scale = fetch_block(scales, own, n_block - 1, schedule, True)
        state = QuantizedState(words, accs, factor, row_max, row_sum, block.value_scale, score, value_scale)
        while n_block > loop.n_block_min:
            n_block -= 1
            at = StepPlace(tiles, used, n_block, loop, own)
            state = step(channels, at, state, zeros, call, schedule, mod, scales, BEHIND, WARPGROUP)
            used += 1
        channels.values[0].wait(used)
        accs, t = start_products(
            packed_operand(state.words, WIDTH), channels.values[0].at(used), state.accs, state.factor
        )
        # The next tile's first scores run during this tile's epilogue; after the last tile, on stale buffers.
        loop = open_tile(channels.tiles, tiles + 1, call, schedule, rows, zeros, mod, WARPGROUP)
        own = tile_scales(channels, tiles + 1, scales, loop, call, schedule, WARPGROUP)
        score, value_scale = fetch_block(scales, own, loop.n_block, schedule, True)
        if not BEHIND:
            t = warpgroup_mma_wait(0, deps=[t])
            accs = add_product(t, accs, state.factor)
        s = start_first_scores(channels, tiles + 1, used + 1, loop, zeros, ())
        if BEHIND:
            t = warpgroup_mma_wait(1, deps=[t])
            accs = add_product(t, accs, state.factor)
        channels.values[0].release(used)
        finish_tile(accs, state, channels, tiles, call, scales, output, schedule, WARPGROUP)
        s = warpgroup_mma_wait(0, deps=[s])
        channels.keys[0].release(used + 1 + loop.skipped, loop.is_tile)
        channels.queries[0].release(tiles)
        channels.values[0].skip(used + 1, loop.skipped, loop.is_tile)
        block = ScoreBlock(s, score, value_scale)
        channels.tiles.ring.release(tiles)
        tiles += 1
        used += 1 + loop.skipped
    if schedule.PINGPONG and WARPGROUP == 0:
        pingpong_wait(thread_sums(zeros), 0, True)
    tma_store_wait(0)


@gluon.jit
def first_block_of(channels, tiles, used, loop, own, zeros, scales, schedule):
    """A tile's first ``ScoreBlock``, with no other product under way."""
    score, value_scale = fetch_block(scales, own, loop.n_block, schedule, True)
    s = start_first_scores(channels, tiles, used, loop, zeros, ())
    s = warpgroup_mma_wait(0, deps=[s])
    channels.values[0].skip(used, loop.skipped, loop.is_tile)
    channels.keys[0].release(used + loop.skipped, loop.is_tile)
    return ScoreBlock(s, score, value_scale)


@gluon.jit
def step(channels, at, state, zeros, call, schedule, mod, scales, BEHIND: gl.constexpr, WARPGROUP: gl.constexpr):
    """Multiplies the probabilities of use ``used`` with its values; scores the next use's block, at a ``StepPlace``."""
    used, accs = at.used, state.accs
    probs = packed_operand(state.words, accs[0].shape[1])
    if BEHIND:
        channels.keys[0].wait(used + 1)
        s = start_scores(channels.queries, at.tiles, channels.keys, used + 1, zeros, ())
        channels.values[0].wait(used)
        accs, t = start_products(probs, channels.values[0].at(used), accs, state.factor)
        score, value_scale = fetch_block(scales, at.own, at.n_block - 1, schedule, False)
        s = warpgroup_mma_wait(1, deps=[s])
    else:
        channels.values[0].wait(used)
        accs, t = start_products(probs, channels.values[0].at(used), accs, state.factor)
        score, value_scale = fetch_block(scales, at.own, at.n_block - 1, schedule, False)
        t = warpgroup_mma_wait(0, deps=[t])
        accs = add_product(t, accs, state.factor)
        channels.values[0].release(used)
        channels.keys[0].wait(used + 1)
        s = start_scores(channels.queries, at.tiles, channels.keys, used + 1, zeros, ())
        s = warpgroup_mma_wait(0, deps=[s])
    channels.keys[0].release(used + 1)
    block = ScoreBlock(s, state.next_score, state.next_value_scale)
    s, scale, row_max, finite_max, factor = raise_max(
        channels, at, state.row_max, block, call, schedule, mod, schedule.HAS_EDGES, WARPGROUP
    )
    if BEHIND:
        t = warpgroup_mma_wait(0, deps=[t])
        channels.values[0].release(used)
        accs = add_product(t, accs, state.factor)
    words, row_sum = probabilities(s, scale, finite_max, factor, state.row_sum, schedule, len(accs) == 1, WARPGROUP)
    factor = factor * (state.value_scale / block.value_scale)
    return QuantizedState(words, accs, factor, row_max, row_sum, block.value_scale, score, value_scale)


@gluon.jit
def finish_tile(accs, state, channels, tiles, call, scales, output, schedule, WARPGROUP: gl.constexpr):
    """Stores a tile's output, of complete ``accs``, and lse."""
    # At 256 columns ptxas would load the shift and the output's scale before the loop over keys, which then spills.
    VOLATILE: gl.constexpr = output.BLOCK_DIM > 128 and scales.out is not None
    row_max = state.row_max - PROBS_LOG2
    if scales.shift is not None:
        where = query_rows(channels.tiles, tiles, call)
        row = channels.tiles.get(tiles, "row") + WARPGROUP * schedule.BLOCK_M
        rows = row + gl.arange(0, schedule.BLOCK_M, row_max.type.layout)
        # Rows past the last packed sequence have no shift.
        exists = (rows < where.length) & (where.b < call.queries.count)
        shift = gl.load(scales.shift + lse_offset(where, call) + rows, mask=exists, other=0.0, volatile=VOLATILE)
        row_max += shift * scales.shift_scale
    value_scale = state.value_scale
    if scales.out is not None:
        value_scale = value_scale / gl.load(scales.out, volatile=VOLATILE)
    epilogue(scale_by(accs, value_scale), row_max, state.row_sum, channels, tiles, call, output, schedule, WARPGROUP)
