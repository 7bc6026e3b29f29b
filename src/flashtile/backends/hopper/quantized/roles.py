"""The producer and the consumers of the Hopper forward of 8-bit tensors; the scheduler is ``forward.roles``'s."""

# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flashtile.backends.hopper.device.gluon_compat import aggregate, as_box, tma_load, tma_store_wait
from flashtile.backends.hopper.device.head_dim_parts import also, load, start_scores
from flashtile.backends.hopper.device.wgmma_fragments import row_tops, thread_sums
from flashtile.backends.hopper.forward.roles import epilogue, load_block
from flashtile.backends.hopper.forward.scheduler import lse_offset, query_rows
from flashtile.backends.hopper.forward.softmax_step import (
    KeyLoop,
    block_pairs,
    is_edge,
    open_tile,
    shape_scores,
    start_first_scores,
)
from flashtile.backends.vocab import softmax

# Rows that share a scale.
SCALE_ROWS = gl.constexpr(128)
# log2 of the factor of probabilities: the largest of a row become 256 of e4m3's 448.
PROBS_LOG2 = gl.constexpr(8.0)
# A column past the end of any tensor: TMA loads zeros.
_NOWHERE = gl.constexpr(2**30)


@aggregate
class Scale:
    """float32 scales by sequence, head and block; a stride is 0 where one serves several."""

    ptr: gl.tensor
    stride_b: gl.tensor
    stride_head: gl.tensor
    stride_block: gl.tensor

    @gluon.jit
    def start(self, b, head, first):
        """Where a sequence's scales begin: ``first`` is the number of its first block."""
        return b * self.stride_b + head * self.stride_head + first * self.stride_block

    @gluon.jit
    def fetch(self, start, row, exists):
        """The scale of a row, 1 if it does not exist."""
        return gl.load(self.ptr + start + row // SCALE_ROWS * self.stride_block, mask=exists, other=1.0)


@aggregate
class Scales:
    """Those of q, k and v; ``shift_ptr`` and its factor restore what smoothing took off the scores of a row."""

    q: Scale
    k: Scale
    v: Scale
    shift_ptr: gl.tensor | gl.constexpr
    shift_scale: gl.tensor


@aggregate
class TileScales:
    """The scales of a warpgroup's rows of a tile: the factor of its scores, and where those of its keys begin.

    ``num_keys`` is 0 where there is no tile.
    """

    score: gl.tensor
    k: gl.tensor
    v: gl.tensor
    num_keys: gl.tensor


@aggregate
class State:
    """The online softmax of a warpgroup's rows after some blocks of keys.

    ``accs`` [block_m, WIDTH] are in units of ``unit``, the last block's v_scale; they and ``row_sum`` [block_m, 4],
    each thread's share, are 2^8 times too large. ``row_max`` is in base 2.
    """

    accs: gl.tuple
    row_max: gl.tensor
    row_sum: gl.tensor
    unit: gl.tensor


@aggregate
class Block:
    """A block's products of queries and keys, complete, their scale, and that of its values."""

    s: gl.tensor
    score: gl.tensor
    unit: gl.tensor


@aggregate
class Place:
    """Where a warpgroup is: in which tile, at which use of the rings, and at which block of keys."""

    tiles: gl.tensor
    used: gl.tensor
    n_block: gl.tensor
    loop: KeyLoop
    own: TileScales


@gluon.jit
def producer(q_desc, k_desc, v_desc, channels, sizes, BLOCK_D: gl.constexpr):
    """Loads as ``forward.roles.producer`` does where tiles overlap."""
    records = channels.tiles
    tiles = 0
    used = 0
    records.ring.wait(tiles)
    n_block = records.get(tiles, "n_block_max")
    while n_block > 0:
        n_block_min = records.get(tiles, "n_block_min")
        row = records.get(tiles, "row")
        queries = query_rows(records, tiles, sizes)
        for warpgroup in gl.static_range(sizes.num_warpgroups):
            load(q_desc, channels.queries[warpgroup], tiles, queries, row + warpgroup * sizes.block_m, BLOCK_D)
        n_block -= 1
        load_block(k_desc, channels.keys, used, records, tiles, n_block, sizes, BLOCK_D)
        load_last_values(v_desc, channels, used - 1, tiles - 1, sizes)
        while n_block > n_block_min:
            n_block -= 1
            load_block(k_desc, channels.keys, used + 1, records, tiles, n_block, sizes, BLOCK_D)
            load_values(v_desc, channels, used, tiles, n_block + 1, sizes)
            used += 1
        used += 1
        tiles += 1
        records.ring.wait(tiles)
        n_block = records.get(tiles, "n_block_max")
    load_last_values(v_desc, channels, used - 1, tiles - 1, sizes)


@gluon.jit
def load_last_values(v_desc, channels, use, tiles, sizes):
    """Loads the values that a tile needs last, which ends the use of its record. No tile comes before 0."""
    if tiles >= 0:
        load_values(v_desc, channels, use, tiles, channels.tiles.get(tiles, "n_block_min"), sizes)
        channels.tiles.ring.release(tiles)


@gluon.jit
def load_values(v_desc, channels, use, tiles, n_block, sizes):
    """Starts the load of the columns of a block of values; of zeros where no key is."""
    ring = channels.values[0]
    tile = ring.at(use)
    full = ring.acquire(use, tile.shape[0] * tile.shape[1])
    b, seqlen_k = channels.tiles.get(tiles, "sequence"), sizes.seqlen_k
    column = n_block * sizes.block_n
    exists = column < seqlen_k
    if sizes.varlen:
        seqlen_k = channels.tiles.get(tiles, "seqlen_k")
        exists = column < seqlen_k
        column += first_block(channels.tiles.get(tiles, "start_k"), b) * SCALE_ROWS
        b = gl.to_tensor(0)
    column = gl.where(exists, column, _NOWHERE)
    tma_load(v_desc, (b, channels.tiles.get(tiles, "head_kv"), 0, column), full, as_box(tile, v_desc))


@gluon.jit
def first_block(start, b):
    """The number of the first block of a packed sequence that begins at row ``start``."""
    return start // SCALE_ROWS + b


@gluon.jit
def tile_scales(channels, tiles, scales, loop, sizes, WARPGROUP: gl.constexpr):
    """The ``TileScales`` of a warpgroup."""
    records = channels.tiles
    b, head = records.get(tiles, "sequence"), records.get(tiles, "head")
    head_kv, num_keys = records.get(tiles, "head_kv"), sizes.seqlen_k
    first_q, first_k, own_b = gl.to_tensor(0), gl.to_tensor(0), b
    if sizes.varlen:
        first_q, first_k = first_block(records.get(tiles, "start_q"), b), first_block(records.get(tiles, "start_k"), b)
        num_keys, own_b = records.get(tiles, "seqlen_k"), gl.to_tensor(0)
    num_keys = gl.where(loop.is_tile, num_keys, 0)
    row = records.get(tiles, "row") + WARPGROUP * sizes.block_m
    # Of three warpgroups' rows the last may have no scale.
    exists = (num_keys > 0) & (row < query_rows(records, tiles, sizes).length)
    q_scale = scales.q.fetch(scales.q.start(own_b, head, first_q), row, exists)
    return TileScales(
        q_scale, scales.k.start(own_b, head_kv, first_k), scales.v.start(own_b, head_kv, first_k), num_keys
    )


@gluon.jit
def fetch_block(scales, own, n_block, sizes):
    """The scale of a block's products, and that of its values."""
    row = n_block * sizes.block_n
    exists = (row < own.num_keys) & (own.num_keys > 0)
    return own.score * scales.k.fetch(own.k, row, exists), scales.v.fetch(own.v, row, exists)


@gluon.jit
def operand(e, DIM_V: gl.constexpr):
    """Probabilities as WGMMA's left operand, with no data movement: keys in the order of ``blocks.ORDER``."""
    M: gl.constexpr = e.shape[0]
    N: gl.constexpr = e.shape[1]
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_V, 32])
    probs = e.to(gl.float8e4nv).reshape([M, N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([M, N])
    return gl.convert_layout(probs, gl.DotOperandLayout(0, acc_layout, 4), assert_trivial=True)


@gluon.jit
def consumer(channels, output, sizes, mod, scales, WIDTH: gl.constexpr, EARLY: gl.constexpr, WARPGROUP: gl.constexpr):
    """One warpgroup: ``block_m`` rows of every tile.

    For each block it makes probabilities of the scores, multiplies them with the values, WIDTH columns at a time, and
    adds that to the output; the next block's scores start before the last of these products ends if EARLY, after it
    where registers are short. The other warpgroups' products run under its softmax.
    """
    BLOCK_M: gl.constexpr = sizes.block_m
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.block_n, 32])
    zeros = gl.zeros([BLOCK_M, sizes.block_n], gl.float32, s_layout)
    rows = WARPGROUP * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, s_layout))
    tiles = 0
    used = 0
    loop = open_tile(channels.tiles, tiles, sizes, rows, zeros, WARPGROUP)
    own = tile_scales(channels, tiles, scales, loop, sizes, WARPGROUP)
    block = first_block_of(channels, tiles, used, loop, own, zeros, scales, sizes)
    used += loop.skipped
    while loop.is_tile:
        state = State(
            zero_parts(BLOCK_M, output.block_dv, WIDTH),
            gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout)),
            thread_sums(zeros), gl.to_tensor(1.0),
        )  # fmt: skip
        n_block = loop.n_block
        while n_block > loop.n_block_min:
            at = Place(tiles, used, n_block, loop, own)
            state, block = step(channels, at, state, block, zeros, sizes, mod, scales, EARLY, WARPGROUP)
            n_block -= 1
            used += 1
        at = Place(tiles, used, n_block, loop, own)
        probs, factor, row_max, row_sum = update(channels, at, state, block, sizes, mod, WARPGROUP)
        factor = factor * (state.unit / block.unit)
        last_unit = block.unit
        channels.values[0].wait(used)
        accs = add_first_products(probs, channels, used, state.accs, factor)
        t = start_product(probs, channels, used, accs)
        # The next tile's first scores run under this one's end. After the last tile they are those of stale buffers.
        loop = open_tile(channels.tiles, tiles + 1, sizes, rows, zeros, WARPGROUP)
        own = tile_scales(channels, tiles + 1, scales, loop, sizes, WARPGROUP)
        score, unit = fetch_block(scales, own, loop.n_block, sizes)
        if not EARLY:
            t = warpgroup_mma_wait(0, deps=[t])
            accs = add_product(t, accs, factor)
        s = start_first_scores(channels, tiles + 1, used + 1, loop, zeros, ())
        if EARLY:
            t = warpgroup_mma_wait(1, deps=[t])
            accs = add_product(t, accs, factor)
        channels.values[0].release(used)
        finish_tile(accs, last_unit, row_max, row_sum, channels, tiles, output, sizes, scales, WARPGROUP)
        s = warpgroup_mma_wait(0, deps=[s])
        channels.keys[0].release(used + 1 + loop.skipped, loop.is_tile)
        channels.queries[0].release(tiles)
        channels.values[0].skip(used + 1, loop.skipped, loop.is_tile)
        block = Block(s, score, unit)
        channels.tiles.ring.release(tiles)
        tiles += 1
        used += 1 + loop.skipped
    tma_store_wait(0)


@gluon.jit
def first_block_of(channels, tiles, used, loop, own, zeros, scales, sizes):
    """A tile's first ``Block``, with nothing else under way."""
    score, unit = fetch_block(scales, own, loop.n_block, sizes)
    s = start_first_scores(channels, tiles, used, loop, zeros, ())
    s = warpgroup_mma_wait(0, deps=[s])
    channels.values[0].skip(used, loop.skipped, loop.is_tile)
    channels.keys[0].release(used + loop.skipped, loop.is_tile)
    return Block(s, score, unit)


@gluon.jit
def zero_parts(M: gl.constexpr, DIM_V: gl.constexpr, WIDTH: gl.constexpr):
    """Accumulators [M, DIM_V] in tensors of WIDTH columns, 0: a product beside them must fit the registers."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    accs = ()
    for _ in gl.static_range(DIM_V // WIDTH):
        accs = also(accs, gl.zeros([M, WIDTH], gl.float32, layout))
    return accs


@gluon.jit
def product_with(probs, values, like):
    """Starts the product of probabilities with values, from 0."""
    acc_layout: gl.constexpr = like.type.layout
    zeros = gl.zeros([like.shape[0], like.shape[1]], gl.float32, acc_layout)
    probs = gl.convert_layout(probs, gl.DotOperandLayout(0, acc_layout, 4), assert_trivial=True)
    return warpgroup_mma(probs, values.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def add_first_products(probs, channels, used, accs, factor):
    """The accumulators, all but the last one complete, each product added before the next one starts."""
    done = ()
    width: gl.constexpr = accs[0].shape[1]
    for i in gl.static_range(len(accs) - 1):
        t = product_with(probs, channels.values[0].at(used).slice(i * width, width, 0), accs[i])
        t = warpgroup_mma_wait(0, deps=[t])
        done = also(done, times_rows(accs[i], factor) + t)
    return also(done, accs[len(accs) - 1])


@gluon.jit
def start_product(probs, channels, used, accs):
    """Starts the product for the last accumulator."""
    LAST: gl.constexpr = len(accs) - 1
    width: gl.constexpr = accs[LAST].shape[1]
    values = channels.values[0].at(used)
    if LAST > 0:
        values = values.slice(LAST * width, width, 0)
    return product_with(probs, values, accs[LAST])


@gluon.jit
def add_product(t, accs, factor):
    """The accumulators with that product added to the last one."""
    LAST: gl.constexpr = len(accs) - 1
    done = ()
    for i in gl.static_range(LAST):
        done = also(done, accs[i])
    return also(done, times_rows(accs[LAST], factor) + t)


@gluon.jit
def times_rows(acc, factor):
    """The accumulator, its rows times their factors."""
    return acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def update(channels, at, state, block, sizes, mod, WARPGROUP: gl.constexpr):
    """(probs, factor, row_max, row_sum): a block's probabilities, and what becomes of the softmax's state."""
    loop, n_block = at.loop, at.n_block
    pairs = block_pairs(channels.tiles, at.tiles, 0, loop, n_block, sizes, True, WARPGROUP)
    s, scale = block.s, mod.scale_log2
    if mod.has_softcap or mod.scale_first:
        s = s * block.score
    else:
        scale = scale * block.score
    s, _ = shape_scores(s, mod, pairs, (), sizes, loop, n_block, is_edge(loop, n_block, sizes), True)
    row_max, origin, factor = softmax.raise_max(state.row_max, row_tops(s, state.row_max, scale, ()), True)
    e = softmax.exponentials(s, scale, origin - PROBS_LOG2)
    sum_factor = gl.convert_layout(factor, gl.SliceLayout(1, state.row_sum.type.layout))
    row_sum = state.row_sum * sum_factor[:, None] + thread_sums(e)
    return operand(e, state.accs[0].shape[1]), factor, row_max, row_sum


@gluon.jit
def step(channels, at, state, block, zeros, sizes, mod, scales, EARLY: gl.constexpr, WARPGROUP: gl.constexpr):
    """Adds the block at a ``Place`` to the state; returns that and the block before it, the next use."""
    used = at.used
    probs, factor, row_max, row_sum = update(channels, at, state, block, sizes, mod, WARPGROUP)
    factor = factor * (state.unit / block.unit)
    channels.values[0].wait(used)
    accs = add_first_products(probs, channels, used, state.accs, factor)
    t = start_product(probs, channels, used, accs)
    score, unit = fetch_block(scales, at.own, at.n_block - 1, sizes)
    if not EARLY:
        t = warpgroup_mma_wait(0, deps=[t])
        accs = add_product(t, accs, factor)
    channels.keys[0].wait(used + 1)
    s = start_scores(channels.queries, at.tiles, channels.keys, used + 1, zeros)
    if EARLY:
        t = warpgroup_mma_wait(1, deps=[t])
        accs = add_product(t, accs, factor)
    channels.values[0].release(used)
    s = warpgroup_mma_wait(0, deps=[s])
    channels.keys[0].release(used + 1)
    return State(accs, row_max, row_sum, block.unit), Block(s, score, unit)


@gluon.jit
def finish_tile(accs, unit, row_max, row_sum, channels, tiles, output, sizes, scales, WARPGROUP: gl.constexpr):
    """Stores a tile's output and lse."""
    row_max = row_max - PROBS_LOG2
    if scales.shift_ptr is not None:
        where = query_rows(channels.tiles, tiles, sizes)
        row = channels.tiles.get(tiles, "row") + WARPGROUP * sizes.block_m
        rows = row + gl.arange(0, sizes.block_m, row_max.type.layout)
        # The rows past the last packed sequence have none.
        exists = (rows < where.length) & (where.b < sizes.batch)
        shift = gl.load(scales.shift_ptr + lse_offset(where, sizes) + rows, mask=exists, other=0.0)
        row_max += shift * scales.shift_scale
    scaled_accs = ()
    for i in gl.static_range(len(accs)):
        scaled_accs = also(scaled_accs, accs[i] * unit)
    epilogue(scaled_accs, row_max, row_sum, channels.tiles, tiles, output, sizes, WARPGROUP)
