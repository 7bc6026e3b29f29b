"""One block of keys in the Hopper forward: its scores, its softmax, and the values of the block before it."""

# ruff: noqa: RET505 - Triton compiles code after a return, even if the condition is decided.
# Triton's aggregate reads annotations as types, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from flashtile.backends.gpu.device import masks, mods, softmax
from flashtile.backends.gpu.device.records import KeyBand
from flashtile.backends.hopper.device.fragments import (
    as_before,
    by_thread,
    from_thread_column,
    keep_columns,
    keep_intervals,
    row_tops,
    thread_sums,
)
from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.device.inline_ptx import compute_before_wait, pingpong_arrive, pingpong_wait
from flashtile.backends.hopper.device.mods import Pairs
from flashtile.backends.hopper.device.parts import (
    add_products,
    held_tiles,
    rescale_rows,
    start_scores,
    wait_for_products,
)
from flashtile.backends.hopper.device.ring import Records
from flashtile.backends.hopper.forward.scheduler import block_at, queries_of, query_rows


@aggregate
class ForwardChannels:
    """The channels between producer and consumers: tile records, and rings of each part of queries, keys and values.

    ``queries`` belong to one warpgroup; the producer has a tuple for all warpgroups. ``outputs`` is shared memory from
    which TMA stores the output; None without it, and for the producer.
    """

    tiles: Records
    queries: gl.tuple
    keys: gl.tuple
    values: gl.tuple
    outputs: gl.shared_memory_descriptor | gl.constexpr


@aggregate
class KeyLoop:
    """A warpgroup's key blocks of a tile, from ``n_block`` down to ``n_block_min``.

    Blocks outside [n_full_min, n_full_max) need a mask. ``skipped`` blocks, 0 or 1, above ``n_block`` are skipped.
    With lists, blocks are positions, blocks before ``n_partial_max`` are partial, and [n_full_min, n_full_max) are
    block numbers. ``first_keys`` and ``last_keys`` bound the keys that each row keeps, as ``from_thread_column`` counts
    them. ``slope`` is ALiBi's, ``read`` and ``philox_key`` are from methods of ``Transforms``.
    """

    is_tile: gl.tensor
    n_block: gl.tensor
    n_block_min: gl.tensor
    n_full_min: gl.tensor
    n_full_max: gl.tensor
    skipped: gl.tensor
    first_keys: gl.tensor
    last_keys: gl.tensor
    slope: gl.tensor
    read: gl.tuple
    n_partial_max: gl.tensor
    philox_key: gl.tuple
    bits: gl.tensor


@aggregate
class SoftmaxState:
    """The online softmax of a warpgroup's rows between two blocks of keys.

    ``probs`` belong to the last block and are not yet multiplied with its values. ``accs`` [BLOCK_M, ...], one for each
    part of the values' columns, must be multiplied by ``factor`` first. ``row_max`` is in base 2, ``row_sum`` [BLOCK_M,
    4] has each thread's partial sum.
    """

    probs: gl.tensor
    accs: gl.tuple
    factor: gl.tensor
    row_max: gl.tensor
    row_sum: gl.tensor
    q: gl.tuple


@gluon.jit
def open_tile(records, tiles, call, schedule, rows, layout_like, mod, WARPGROUP: gl.constexpr):
    """Waits for a tile's record, and reads the numbers that its loop needs."""
    records.ring.wait(tiles)
    n_block_max = records.get(tiles, "n_block_max")
    n_block_min = records.get(tiles, "n_block_min")
    skipped, n_full_min = gl.to_tensor(0), gl.to_tensor(0)
    positions, seqlen_k = rows, call.keys.length
    # Without a band, all blocks are full except the block in which the keys end.
    LISTED: gl.constexpr = call.mods.band.lists is not None
    n_partial_max, bits = gl.to_tensor(0), gl.to_tensor(0)
    if LISTED:
        n_full_max = seqlen_k // schedule.BLOCK_N
        n_partial_max = records.get_own(tiles, "n_partial_max", WARPGROUP)
        bits = records.get(tiles, "right")
    else:
        n_full_max = n_block_max - gl.where((seqlen_k & (schedule.BLOCK_N - 1)) > 0, 1, 0)
    HAS_BOUNDS: gl.constexpr = call.mods.band.bounds is not None
    if call.mods.band.left is not None or HAS_BOUNDS:
        n_full_min = records.get_own(tiles, "n_full_min", WARPGROUP)
    if call.mods.band.right is not None and not LISTED:
        skipped = records.get_own(tiles, "skipped", WARPGROUP)
    if call.mods.band.left is not None or call.mods.band.right is not None or HAS_BOUNDS or call.keys.OWN_LENGTHS:
        n_full_max = records.get_own(tiles, "n_full_max", WARPGROUP)
        if schedule.PACK_GQA:
            positions, _ = queries_of(records, tiles, rows - WARPGROUP * schedule.BLOCK_M, call, schedule, WARPGROUP)
        positions += records.get(tiles, "position")
        seqlen_k = records.get(tiles, "seqlen_k")
    n_block = n_block_max - skipped - 1
    right = call.mods.band.right
    if call.keys.OWN_RIGHTS:
        right = records.get(tiles, "right")
    first_keys = from_thread_column(mods.first_key(positions, call.mods.band), layout_like)
    last = mods.last_key(positions, seqlen_k, KeyBand(None, right, call.mods.band.chunk))
    last_keys = from_thread_column(last, layout_like)
    if call.mods.band.row_keys is not None:
        where = query_rows(records, tiles, call)
        exists = (where.b < call.queries.count) & (n_block_max > 0)
        start, end = masks.ends_of(
            call.mods.band.row_keys, where.b, where.head, records.get(tiles, "row") + rows, exists
        )
        first_keys = gl.maximum(first_keys, from_thread_column(start, layout_like))
        last_keys = gl.minimum(last_keys, from_thread_column(end - 1, layout_like))
    slope = gl.to_tensor(0.0)
    if len(mod.alibi_by_mma) > 0:
        slope = mod.alibi_by_mma[0].alibi.fetch(query_rows(records, tiles, call), rows)
    where = query_rows(records, tiles, call)
    read = mod.of_tile(call.mods, where.b, where.head, (records.get(tiles, "row") + rows)[:, None])
    philox_key = mod.philox_key(call, query_rows(records, tiles, call))
    return KeyLoop(
        n_block_max > 0, n_block, n_block_min, n_full_min, n_full_max, skipped, first_keys, last_keys, slope, read,
        n_partial_max, philox_key, bits,
    )  # fmt: skip


@gluon.jit
def block_pairs(records, tiles, use, loop, n_block, number, call, schedule, is_tile, WARPGROUP: gl.constexpr):
    """The ``Pairs`` of a warpgroup's block; ``number`` is from ``block_at``. Without a tile the block has no rows."""
    where = query_rows(records, tiles, call)
    row = records.get(tiles, "row") + WARPGROUP * schedule.BLOCK_M
    seqlen_k = call.keys.length
    if call.keys.OWN_LENGTHS:
        seqlen_k = records.get(tiles, "seqlen_k")
    # After the last tile a record's row is arbitrary.
    seqlen_q = gl.where(loop.is_tile, where.length, -(2**30))
    is_partial, bits = True, (0, 0)
    if call.mods.band.lists is not None:
        is_partial = n_block < loop.n_partial_max
        if call.mods.band.lists.BITS:
            bits = masks.bits_at(call.mods.band.lists, loop.bits, n_block, row, schedule.BLOCK_N)
    return Pairs(
        where.b, where.head, row, number * schedule.BLOCK_N, seqlen_q, seqlen_k, False, use, is_tile, WARPGROUP,
        loop.slope, loop.read, is_partial, bits,
    )  # fmt: skip


@gluon.jit
def is_edge(loop, number, call):
    """Whether a block needs the band's mask."""
    edge = number >= loop.n_full_max
    if call.mods.band.left is not None or call.mods.band.bounds is not None:
        edge = edge | (number < loop.n_full_min)
    return edge


@gluon.jit
def shape_scores(s, mod, pairs, fetched, call, loop, edge, MASKED: gl.constexpr):
    """Applies score and mask mods and the band to a block; returns (scores, shift) as ``Transforms.scores``."""
    s, shift = mod.scores(s, pairs, fetched, call.mods)
    # MASKED is decided when the kernel is compiled, and edge when it runs.
    if MASKED:  # noqa: SIM102
        if edge:
            first, last = loop.first_keys - pairs.key, loop.last_keys - pairs.key
            HAS_FIRST: gl.constexpr = call.mods.band.left is not None or call.mods.band.row_keys is not None
            s = keep_columns(s, first, last, float("-inf"), HAS_FIRST, True)
            if call.mods.band.key_rows is not None:
                count = call.queries.count
                s = keep_intervals(s, call.mods.band.key_rows, pairs, count, pairs.key, pairs.row, float("-inf"))
    return mod.select(s, pairs, fetched, float("-inf"), call.mods), shift


@gluon.jit
def exponentials(s, scale_log2, finite_max, shift):
    """Unnormalised probabilities of scores with their shift."""
    if len(shift) == 0:
        return softmax.exponentials(s, scale_log2, finite_max)
    else:
        layout: gl.constexpr = gl.SliceLayout(1, shift[0].type.layout)
        finite_max = gl.convert_layout(finite_max, layout)[:, None] - shift[0]
        return as_before(gl.exp2(by_thread(s) * scale_log2 - finite_max[:, None, :, None]), s)


@gluon.jit
def operand(probs, layout_like):
    """Probabilities as the left operand of their product with values."""
    return gl.convert_layout(probs.to(layout_like.dtype), layout_like.type.layout)


@gluon.jit
def start_first_scores(channels, tiles, used, loop, x, q, ADDS: gl.constexpr = False, DIM: gl.constexpr = None):
    """Starts a tile's first scores, added to ``x`` if it ADDS; without a tile, the scores of stale buffers.

    q, DIM: as in ``start_scores``.
    """
    keys = channels.keys[0]
    keys.skip(used, loop.skipped, loop.is_tile)
    if len(q) == 0:
        channels.queries[0].wait(tiles, loop.is_tile)
    keys.wait(used + loop.skipped, loop.is_tile)
    return start_scores(channels.queries, tiles, channels.keys, used + loop.skipped, x, q, ADDS, DIM)


@gluon.jit
def first_scores(channels, tiles, used, loop, zeros, call, schedule, mod, WARPGROUP: gl.constexpr):
    """(``start_first_scores`` added to the early terms, the block's ``Pairs``, the queries: see ``SoftmaxState``)."""
    score_tiles = mod.early_tiles + mod.late_tiles
    for i in gl.static_range(len(score_tiles)):
        score_tiles[i].ring(WARPGROUP).skip(used, loop.skipped, loop.is_tile)
    number = block_at(loop.n_block, call, schedule)
    pairs = block_pairs(
        channels.tiles, tiles, used + loop.skipped, loop, loop.n_block, number, call, schedule, loop.is_tile, WARPGROUP
    )
    x = mod.initial(zeros, pairs)
    ADDS: gl.constexpr = len(mod.early) + len(mod.alibi_by_mma) > 0
    DIM: gl.constexpr = call.q.DIM
    q = ()
    if schedule.OVERLAP and schedule.Q_STAGES == 1:
        channels.queries[0].wait(tiles, loop.is_tile)
        q = held_tiles(channels.queries, tiles, zeros, DIM)
        channels.queries[0].release(tiles, loop.is_tile)
    s = start_first_scores(channels, tiles, used, loop, x, q, ADDS, DIM)
    mod.release_early(pairs)
    return s, pairs, q


@gluon.jit
def first_probs(s, mod, pairs, fetched, words, call, schedule, loop):
    """The softmax state after a tile's first block: (probs, row_max, row_sum)."""
    edge = is_edge(loop, block_at(loop.n_block, call, schedule), call)
    s, shift = shape_scores(s, mod, pairs, fetched, call, loop, edge, True)
    nothing = gl.full([schedule.BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, s.type.layout))
    # MAY_BE_EMPTY: a tile may have no key at all, under any mask.
    tops = gl.max(s, 1) * mod.scale_log2 if len(shift) == 0 else row_tops(s, nothing, mod.scale_log2, shift)
    tops = mod.release(pairs, tops)
    row_max, finite_max, _ = softmax.raise_max(nothing, tops, True)
    e = exponentials(s, mod.scale_log2, finite_max, shift)
    return mod.drop(e, pairs, words, 0.0), row_max, thread_sums(e)


@gluon.jit
def step(channels, tiles, used, state, zeros, loop, n_block, call, schedule, mod, WARPGROUP: gl.constexpr):
    """Multiplies the probabilities of use ``used`` with its values while block ``n_block``, the next use, is scored.

    ``accs`` are rescaled during the scores' product, with ping-pong before the barrier. One loop runs over masked and
    unmasked blocks: if packed probabilities were carried from one loop into another, each step would unpack and repack
    them, with 64 byte permutes (a loop of its own for masked blocks took 1.2 to 1.3 times as long:
    docs/tuning-notes.md).
    """
    row_max, accs = state.row_max, state.accs
    number = block_at(n_block, call, schedule)
    edge = is_edge(loop, number, call)
    pairs = block_pairs(channels.tiles, tiles, used + 1, loop, n_block, number, call, schedule, True, WARPGROUP)
    x = mod.initial(zeros, pairs)
    channels.keys[0].wait(used + 1)
    if schedule.PINGPONG:
        accs = rescale_rows(accs, state.factor)
        row_max = pingpong_wait(row_max, WARPGROUP)
    ADDS: gl.constexpr = len(mod.early) + len(mod.alibi_by_mma) > 0
    DIM: gl.constexpr = call.q.DIM
    s = start_scores(channels.queries, tiles, channels.keys, used + 1, x, state.q, ADDS, DIM)
    mod.release_early(pairs)
    if not schedule.PINGPONG:
        accs = rescale_rows(accs, state.factor)
    channels.values[0].wait(used)
    accs = add_products(state.probs, channels.values, used, accs)
    if schedule.PINGPONG:
        row_max = pingpong_arrive(row_max, (WARPGROUP + 1) % schedule.NUM_WARPGROUPS)
    # Three warpgroups have fewer registers, so tiles in shared memory, which load fast, are read after the wait.
    LATE: gl.constexpr = schedule.NUM_WARPGROUPS > 2 and len(mod.late_tiles) > 0
    fetched = () if LATE else mod.fetch(pairs, zeros, call.mods)
    words = mod.draw(pairs, zeros, loop.philox_key)
    s = warpgroup_mma_wait(0 if schedule.IN_TURN else len(accs), deps=[s])
    if LATE:
        fetched = mod.fetch(pairs, zeros, call.mods)
    channels.keys[0].release(used + 1)
    if not schedule.OVERLAP:
        # Queries have a single buffer: the next tile's queries are loaded while this tile ends.
        channels.queries[0].release(tiles, n_block == loop.n_block_min)

    s, shift = shape_scores(s, mod, pairs, fetched, call, loop, edge, schedule.HAS_EDGES)
    # A bias, or a function's result, may also be -inf.
    terms: gl.constexpr = len(mod.terms) + len(mod.early) + len(mod.alibi_by_mma)
    listed: gl.constexpr = call.mods.band.lists is not None
    may_be_empty: gl.constexpr = schedule.HAS_EDGES or listed or terms + len(mod.masks) + len(mod.functions) > 0
    tops = mod.release(pairs, row_tops(s, row_max, mod.scale_log2, shift))
    row_max, finite_max, factor = softmax.raise_max(row_max, tops, may_be_empty)
    e = exponentials(s, mod.scale_log2, finite_max, shift)
    sum_factor = gl.convert_layout(factor, gl.SliceLayout(1, state.row_sum.type.layout))
    row_sum = state.row_sum * sum_factor[:, None] + thread_sums(e)
    if schedule.NUM_WARPGROUPS == 2:
        # With three warpgroups the other two keep the tensor cores busy, and ptxas's early wait costs less.
        row_sum = compute_before_wait(row_sum)
    probs = operand(mod.drop(e, pairs, words, 0.0), state.probs)

    accs = wait_for_products(accs)
    channels.values[0].release(used)
    return SoftmaxState(probs, accs, factor, row_max, row_sum, state.q)


@gluon.jit
def add_last_values(channels, used, state):
    """Starts the product of a tile's last probabilities and their values."""
    accs = rescale_rows(state.accs, state.factor)
    channels.values[0].wait(used)
    return add_products(state.probs, channels.values, used, accs)
