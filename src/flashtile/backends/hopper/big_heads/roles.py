"""The roles of the forward with big heads: a producer of one warp, a scorer and a follower of a warpgroup each."""

# Triton's aggregate reads annotations as types, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from flashtile.backends.gpu.device import softmax
from flashtile.backends.hopper.device.fragments import row_tops, thread_sums
from flashtile.backends.hopper.device.gluon_compat import aggregate, as_box, tma_load, tma_store, tma_store_wait
from flashtile.backends.hopper.device.inline_ptx import compute_before_fence, compute_before_wait
from flashtile.backends.hopper.device.parts import (
    add_products,
    append,
    as_row_layout,
    box_of,
    pieces,
    rescale_rows,
    start_of,
    tiles_at,
    wait_for_products,
    zero_accumulators,
)
from flashtile.backends.hopper.device.ring import Records, Ring
from flashtile.backends.hopper.forward.roles import join_partial, row_results, store_max_scores
from flashtile.backends.hopper.forward.scheduler import key_rows, lse_at, queries_of, query_rows, row_segments
from flashtile.backends.hopper.forward.softmax_step import (
    KeyLoop,
    block_pairs,
    exponentials,
    first_probs,
    is_edge,
    open_tile,
    operand,
    shape_scores,
)


@aggregate
class BigHeadsChannels:
    """The channels between the roles.

    A tile of queries is one use of ``queries``, with several chunks, which later hold the output. Each chunk of a block
    of keys is a separate use of ``keys``. A block of values is a use of ``left``, for the scorer, and of ``right``.
    Block i of a program is use i + t of ``probs``, with t tiles before it, because each tile's last use passes on the
    factor of its output. Each use of ``probs`` has ``factors``, and each tile's last use has ``lse``.
    """

    tiles: Records
    queries: Ring
    keys: Ring
    left: gl.tuple
    right: gl.tuple
    probs: Ring
    factors: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor


@gluon.jit
def producer(rings, call, schedule, columns):
    """Loads each tile's queries, and its key and value blocks from the first to the last: values after the next keys.

    So programs with tiles that end at different keys, under a causal mask, read the same keys at the same time.
    """
    RIGHT: gl.constexpr = call.v.BLOCK_DIM - columns.LEFT
    records = rings.tiles
    tiles = 0
    used = 0
    records.ring.wait(tiles)
    n_block_max = records.get(tiles, "n_block_max")
    while n_block_max > 0:
        n_block = records.get(tiles, "n_block_min")
        load_queries(rings, tiles, call, schedule)
        load_keys(rings, used, tiles, n_block, call, schedule)
        while n_block < n_block_max:
            if n_block + 1 < n_block_max:
                load_keys(rings, used + 1, tiles, n_block + 1, call, schedule)
            load_values(rings.right, used, rings, tiles, n_block, call, schedule, columns.LEFT, RIGHT)
            load_values(rings.left, used, rings, tiles, n_block, call, schedule, 0, columns.LEFT)
            n_block += 1
            used += 1
        records.ring.release(tiles)
        tiles += 1
        records.ring.wait(tiles)
        n_block_max = records.get(tiles, "n_block_max")


@gluon.jit
def load_queries(rings, tiles, call, schedule):
    """Starts the load of a tile's queries, which signals one barrier."""
    M: gl.constexpr = schedule.BLOCK_M
    ring = rings.queries
    WIDTH: gl.constexpr = ring.buffers.shape[2]
    full = ring.acquire(tiles, M * call.q.BLOCK_DIM * (call.q.desc.dtype.primitive_bitwidth // 8))
    own = row_segments(rings.tiles, tiles, call, schedule, 0)
    ROWS: gl.constexpr = M // len(own)
    for c in gl.static_range(ring.parts):
        chunk = ring.part(tiles, c)
        for i in gl.static_range(len(own)):
            for j in gl.static_range(WIDTH // 64):
                box = box_of(box_of(chunk, i * ROWS, ROWS, 0), j * 64, 64)
                at = own[i][0].at(own[i][1], c * WIDTH + j * 64)
                tma_load(call.q.desc, at, full, as_box(box, call.q.desc))


@gluon.jit
def load_keys(rings, used, tiles, n_block, call, schedule):
    """Starts the loads of a block of keys, a chunk of columns at a time."""
    ring = rings.keys
    WIDTH: gl.constexpr = ring.buffers.shape[2]
    CHUNKS: gl.constexpr = rings.queries.parts
    rows = key_rows(rings.tiles, tiles, call)
    for c in gl.static_range(CHUNKS):
        use = used * CHUNKS + c
        full = ring.acquire(use, schedule.BLOCK_N * WIDTH * (call.k.desc.dtype.primitive_bitwidth // 8))
        for j in gl.static_range(WIDTH // 64):
            at = rows.at(n_block * schedule.BLOCK_N, c * WIDTH + j * 64)
            tma_load(call.k.desc, at, full, as_box(box_of(ring.at(use), j * 64, 64), call.k.desc))


@gluon.jit
def load_values(half, used, rings, tiles, n_block, call, schedule, FIRST: gl.constexpr, COLS: gl.constexpr):
    """Starts the load of COLS columns of a block of values, from FIRST on."""
    rows = key_rows(rings.tiles, tiles, call)
    full = half[0].acquire(used, schedule.BLOCK_N * COLS * (call.v.desc.dtype.primitive_bitwidth // 8))
    parts = tiles_at(half, used)
    for i in gl.static_range(len(parts)):
        for j in gl.static_range(parts[i].shape[1] // 64):
            at = rows.at(n_block * schedule.BLOCK_N, FIRST + start_of(COLS, i) + j * 64)
            tma_load(call.v.desc, at, full, as_box(box_of(parts[i], j * 64, 64), call.v.desc))


@gluon.jit
def start_chunks(rings, tiles, used, x):
    """Starts the products of queries with the chunks of a block of keys, as they arrive."""
    CHUNKS: gl.constexpr = rings.queries.parts
    for c in gl.static_range(CHUNKS):
        use = used * CHUNKS + c
        rings.keys.wait(use)
        chunk = rings.keys.at(use).permute((1, 0))
        x = warpgroup_mma(rings.queries.part(tiles, c), chunk, x, use_acc=c > 0, is_async=True)
    return x


@gluon.jit
def finish_chunks(s, rings, used, PENDING: gl.constexpr):
    """The scores, if PENDING products were started after them. Each chunk is released once its product is complete."""
    CHUNKS: gl.constexpr = rings.queries.parts
    for c in gl.static_range(CHUNKS):
        s = warpgroup_mma_wait(PENDING + CHUNKS - 1 - c, deps=[s])
        rings.keys.release(used * CHUNKS + c)
    return s


@gluon.jit
def hand_over(rings, use, probs, factor):
    """Leaves a block's probabilities and the factors of its rows for the follower."""
    rings.probs.claim(use)
    rings.probs.at(use).store(probs)
    rings.factors.index(rings.probs.stage(use)).store(factor)
    fence_async_shared()
    rings.probs.publish(use)


@gluon.jit
def scorer(rings, call, output, schedule, columns, mod):
    """The warpgroup that scores: every tile's softmax, and the left columns of its output."""
    M: gl.constexpr = schedule.BLOCK_M
    records = rings.tiles
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, schedule.BLOCK_N, 16])
    zeros = gl.zeros([M, schedule.BLOCK_N], gl.float32, layout)
    layout_like = gl.convert_layout(zeros.to(rings.keys.buffers.dtype), gl.DotOperandLayout(0, layout, 2))
    rows = gl.arange(0, M, gl.SliceLayout(1, layout))
    tiles = 0
    used = 0
    loop = rising(open_tile(records, tiles, call, schedule, rows, zeros, mod, 0))
    while loop.is_tile:
        n_block = loop.n_block
        pairs = block_pairs(records, tiles, used, loop, n_block, n_block, call, schedule, True, 0)
        rings.queries.wait(tiles)
        s = start_chunks(rings, tiles, used, zeros)
        fetched = mod.fetch(pairs, zeros, call.mods)
        words = mod.draw(pairs, zeros, loop.philox_key)
        s = finish_chunks(s, rings, used, 0)
        e, row_max, row_sum = first_probs(s, mod, pairs, fetched, words, call, schedule, loop)
        p = e.to(layout_like.dtype)
        factor = gl.full([M], 1.0, gl.float32, row_max.type.layout)
        hand_over(rings, used + tiles, p, factor)
        probs = compute_before_fence(operand(p, layout_like))
        accs = zero_accumulators(M, rings.left)
        while n_block < loop.n_block_min:
            n_block += 1
            edge = is_edge(loop, n_block, call)
            pairs = block_pairs(records, tiles, used + 1, loop, n_block, n_block, call, schedule, True, 0)
            s = start_chunks(rings, tiles, used + 1, zeros)
            accs = rescale_rows(accs, factor)
            rings.left[0].wait(used)
            accs = add_products(probs, rings.left, used, accs)
            fetched = mod.fetch(pairs, zeros, call.mods)
            words = mod.draw(pairs, zeros, loop.philox_key)
            s = finish_chunks(s, rings, used + 1, len(accs))
            s, shift = shape_scores(s, mod, pairs, fetched, call, loop, edge, True)
            row_max, finite_max, factor = softmax.raise_max(row_max, row_tops(s, row_max, mod.scale_log2, shift), True)
            e = exponentials(s, mod.scale_log2, finite_max, shift)
            p = mod.drop(e, pairs, words, 0.0).to(layout_like.dtype)
            hand_over(rings, used + 1 + tiles, p, factor)
            sum_factor = gl.convert_layout(factor, gl.SliceLayout(1, row_sum.type.layout))
            row_sum = compute_before_wait(row_sum * sum_factor[:, None] + thread_sums(e))
            accs = wait_for_products(accs)
            rings.left[0].release(used)
            # This must not come earlier: the product under way still reads the registers of the last probabilities.
            probs = compute_before_fence(operand(p, layout_like))
            used += 1
        accs = rescale_rows(accs, factor)
        rings.left[0].wait(used)
        accs = add_products(probs, rings.left, used, accs)
        where = query_rows(records, tiles, call)
        _, heads = queries_of(records, tiles, rows, call, schedule, 0)
        scale, lse = row_results(row_max, row_sum, where, heads, call, schedule)
        store_max_scores(row_max, row_sum, records, tiles, call, output, schedule, 0)
        rings.probs.claim(used + 1 + tiles)
        rings.factors.index(rings.probs.stage(used + 1 + tiles)).store(scale)
        rings.lse.store(lse)
        rings.probs.publish(used + 1 + tiles)
        accs = wait_for_products(accs)
        rings.left[0].release(used)
        lse = store_half(rings, accs, scale, lse, tiles, call, output, schedule, 0, columns.LEFT)
        store_lse(lse, records, tiles, call, output, schedule)
        records.ring.release(tiles)
        used += 1
        tiles += 1
        loop = rising(open_tile(records, tiles, call, schedule, rows, zeros, mod, 0))


@gluon.jit
def rising(loop):
    """A loop over the same blocks from the first to the last: ``n_block`` and ``n_block_min`` are exchanged."""
    return KeyLoop(
        loop.is_tile, loop.n_block_min, loop.n_block, loop.n_full_min, loop.n_full_max, loop.skipped, loop.first_keys,
        loop.last_keys, loop.slope, loop.read, loop.n_partial_max, loop.philox_key, loop.bits,
    )  # fmt: skip


@gluon.jit
def follower(rings, call, output, schedule, columns):
    """The warpgroup that computes the right columns."""
    RIGHT: gl.constexpr = call.v.BLOCK_DIM - columns.LEFT
    records = rings.tiles
    tiles = 0
    used = 0
    records.ring.wait(tiles)
    n_block = records.get(tiles, "n_block_max")
    while n_block > 0:
        n_block_min = records.get(tiles, "n_block_min")
        accs = zero_accumulators(schedule.BLOCK_M, rings.right)
        rows_layout: gl.constexpr = gl.SliceLayout(1, accs[0].type.layout)
        while n_block > n_block_min:
            use = used + tiles
            rings.probs.wait(use)
            factor = rings.factors.index(rings.probs.stage(use)).load(rows_layout)
            accs = rescale_rows(accs, factor)
            rings.right[0].wait(used)
            accs = wait_for_products(add_shared(rings.probs.at(use), rings.right, used, accs))
            rings.right[0].release(used)
            rings.probs.release(use)
            n_block -= 1
            used += 1
        rings.probs.wait(used + tiles)
        scale = rings.factors.index(rings.probs.stage(used + tiles)).load(rows_layout)
        lse = rings.lse.load(rows_layout)
        rings.probs.release(used + tiles)
        store_half(rings, accs, scale, lse, tiles, call, output, schedule, columns.LEFT, RIGHT)
        records.ring.release(tiles)
        tiles += 1
        records.ring.wait(tiles)
        n_block = records.get(tiles, "n_block_max")


@gluon.jit
def add_shared(probs, v_rings, use, accs):
    """Starts the products of probabilities in shared memory and values, one for each part."""
    started = ()
    for i in gl.static_range(len(accs)):
        started = append(started, warpgroup_mma(probs, v_rings[i].at(use), accs[i], is_async=True))
    return started


@gluon.jit
def store_half(rings, accs, scale, lse, tiles, call, output, schedule, FIRST: gl.constexpr, COLS: gl.constexpr):
    """Writes COLS columns of a tile's output from FIRST on; returns lse, merged with a partial result if there is one.

    They are stored from the buffers of the tile's queries, which are no longer read: the scorer's from the first
    buffers and the follower's from the others, in turn if there are more pieces than buffers.
    """
    records = rings.tiles
    where = query_rows(records, tiles, call)
    if output.partial_out is None and output.desc is not None:
        out = ()
        for i in gl.static_range(len(accs)):
            out = append(out, (accs[i] * as_row_layout(scale, accs[i])[:, None]).to(output.desc.dtype))
    else:
        out, lse = join_partial(accs, scale, lse, where, records.get(tiles, "row"), call, output, schedule, FIRST, COLS)
    if output.desc is not None:
        # The number of the first 64 columns of queries that are the follower's buffers.
        MIDDLE: gl.constexpr = max(call.q.BLOCK_DIM // 64 * (FIRST or COLS) // call.v.BLOCK_DIM, 1)
        START: gl.constexpr = MIDDLE if FIRST else 0
        OWN: gl.constexpr = call.q.BLOCK_DIM // 64 - MIDDLE if FIRST else MIDDLE
        own = row_segments(records, tiles, call, schedule, 0)
        ROWS: gl.constexpr = schedule.BLOCK_M // len(own)
        parts = ()
        for i in gl.static_range(len(out)):
            parts = parts + pieces(out[i], 64)
        for i in gl.static_range(len(parts)):
            buffer = column_box(rings.queries, tiles, START + i % OWN)
            if i >= OWN:
                tma_store_wait(OWN - 1)
            buffer.store(parts[i])
            fence_async_shared()
            for j in gl.static_range(len(own)):
                at = own[j][0].at(own[j][1], FIRST + i * 64)
                tma_store(output.desc, at, as_box(box_of(buffer, j * ROWS, ROWS, 0), output.desc))
        tma_store_wait(0)
    rings.queries.release(tiles)
    return lse


@gluon.jit
def column_box(ring, use, i: gl.constexpr):
    """The i-th 64 columns of a use of several parts."""
    WIDTH: gl.constexpr = ring.buffers.shape[2]
    return box_of(ring.part(use, i * 64 // WIDTH), i * 64 % WIDTH, 64)


@gluon.jit
def store_lse(lse, records, tiles, call, output, schedule):
    """Writes a tile's lse."""
    where = query_rows(records, tiles, call)
    positions, heads = queries_of(records, tiles, gl.arange(0, schedule.BLOCK_M, lse.type.layout), call, schedule, 0)
    at = positions
    if schedule.PACK_GQA:
        # lse has seqlen_q numbers for each head.
        at += heads * call.queries.length
    gl.store(lse_at(output.lse, where, at, call, output.LSE_PARTS), lse, mask=positions < where.length)
