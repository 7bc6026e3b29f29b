"""Attention backward by pairs of programs: two of a cluster walk the same rows, each with 64 keys of its own.

The first program loads the queries of both, the second dout. Each computes dK and dV of its keys as
``roles.gradient_consumer`` does, hands its dscores to the other, and adds one half of dQ's columns, over the keys of
both: half the reads and half the adds of two programs apart, where L2 bounds these (docs/tuning-notes.md). A program
has one tile. ``config.choose`` says for which calls: sequences are not packed, all three gradients are wanted, none is
added to, and there are no lists, no functions of users and no dropout.
"""

# Triton's aggregate reads annotations as types, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtile.backends.hopper.backward.dq import PART_KEYS, WIDEST, add_from_registers, in_order
from flashtile.backends.hopper.backward.kernel import score_mod
from flashtile.backends.hopper.backward.roles import (
    boxes,
    pairs_of,
    probabilities,
    probs_scale,
    rows_of_keys,
    score_gradients,
    score_zeros,
)
from flashtile.backends.hopper.backward.scheduler import (
    FIELDS,
    RECORD_SIZE,
    first_row_block,
    first_rows,
    key_rows,
    next_rows,
    pair_tile,
    publish_tile,
    query_heads,
    row_blocks_per_head,
    steps_of_a_head,
)
from flashtile.backends.hopper.device.cluster import (
    address_of,
    arrive_at_other,
    barrier_address,
    cluster_sync,
    copy_to_other,
    fill_with_addresses,
    multicast_box,
)
from flashtile.backends.hopper.device.gluon_compat import (
    aggregate,
    as_box,
    seen_as,
    thread_barrier,
    tma_add,
    tma_load,
    tma_store,
    tma_store_wait,
)
from flashtile.backends.hopper.device.parts import (
    HeadRows,
    add_product,
    append,
    box_of,
    num_parts,
    scale_by,
    start_of,
    wait_for_products,
    width_of,
    zero_accumulator,
)
from flashtile.backends.hopper.device.ring import Records, make_records

KERNEL = gl.constexpr("attention_backward_pairs")
# The columns of a box that TMA loads, of a block of keys or values, and of dq's widest piece.
BOX = gl.constexpr(64)


@aggregate
class PairChannels:
    """What the roles of a program share. Blocks are of ``BOX`` columns; addresses are those in shared memory.

    Attributes:
        tiles: The record of the program's tile.
        queries: Queries of a row block, in parts [stages, rows, columns].
        dout: dout of a row block, likewise.
        rows: [stages, 2, rows] float32 of a row block, see ``rows``.
        keys: The keys, in blocks.
        values: The values, in blocks, but for those that the second warpgroup holds in registers.
        dq_keys: Blocks of the half of the columns that this program's dq has: of its own keys, unless ``keys`` has
            them alone, and of the other's.
        probs: The probabilities that the first warpgroup hands to the second; at first the values that it holds.
        own: The gradients of the scores of this program.
        others: Those that the other program has copied here.
        sums: Buffers that TMA adds dq from, lines of 128 numbers for each of its pieces; or None.
        rows_full: Barriers [stages, 1] of queries and rows.
        dout_full: Barriers of dout.
        empty: Barriers of both: each of the two warpgroups of both programs has read them.
        keys_full: The barrier of keys and values.
        held_full: The barrier of the values that go to registers, in ``probs``; None if none do.
        probs_full: The barriers [1, 1] of ``probs``, ``own`` and ``others``. Two third warpgroups free ``own``: this
            program's, and the other program's once it has the copy; the other program's frees ``others`` there.
        rank: The program's number in its cluster.
    """

    tiles: Records
    queries: gl.tuple
    dout: gl.tuple
    rows: gl.shared_memory_descriptor
    keys: gl.shared_memory_descriptor
    values: gl.shared_memory_descriptor
    dq_keys: gl.shared_memory_descriptor
    probs: gl.shared_memory_descriptor
    own: gl.shared_memory_descriptor
    others: gl.shared_memory_descriptor
    sums: gl.tuple | gl.constexpr
    rows_full: gl.shared_memory_descriptor
    dout_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    held_full: gl.shared_memory_descriptor | gl.constexpr
    probs_full: gl.shared_memory_descriptor
    probs_free: gl.shared_memory_descriptor
    own_full: gl.shared_memory_descriptor
    own_free: gl.shared_memory_descriptor
    others_full: gl.shared_memory_descriptor
    others_free: gl.shared_memory_descriptor
    queries_at: gl.tuple
    dout_at: gl.tuple
    own_at: gl.tensor
    others_at: gl.tensor
    rows_full_at: gl.tensor
    dout_full_at: gl.tensor
    empty_at: gl.tensor
    own_free_at: gl.tensor
    others_full_at: gl.tensor
    others_free_at: gl.tensor
    rank: gl.tensor


@gluon.jit
def make_barriers(stages: gl.constexpr):
    """Barriers [stages, 1], not yet initialised."""
    return gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())


@gluon.jit
def init(barriers, count: gl.constexpr):
    """Initialises barriers that await ``count`` arrivals."""
    COUNT: gl.constexpr = barriers.shape[0]
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=count)


@gluon.jit
def make_blocks(dtype: gl.constexpr, COUNT: gl.constexpr, COLS: gl.constexpr):
    """[COUNT, 64, COLS]: blocks of 64 keys, by columns or by rows that see them."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART_KEYS, COLS], dtype)
    return gl.allocate_shared_memory(dtype, [COUNT, PART_KEYS, COLS], layout)


@gluon.jit
def make_parts(dtype: gl.constexpr, COLS: gl.constexpr, grid):
    """A row block's tile of COLS columns for each stage, in parts [stages, rows, columns]."""
    ROWS: gl.constexpr = grid.tiles.BLOCK_M
    stages: gl.constexpr = grid.tiles.STAGES
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BOX], dtype)
    parts = ()
    for i in gl.static_range(num_parts(COLS, WIDEST)):
        tile = gl.allocate_shared_memory(dtype, [stages, ROWS, width_of(COLS, i, WIDEST)], layout)
        parts = append(parts, tile)
    return parts


@gluon.jit
def make_lines(COUNT: gl.constexpr, grid):
    """[COUNT, 128] float32, for one piece of dq."""
    return gl.allocate_shared_memory(gl.float32, [COUNT, 128], grid.work.dq_desc.layout)


@gluon.jit
def addresses_of(parts):
    """The address of each part."""
    found = ()
    for i in gl.static_range(len(parts)):
        found = append(found, address_of(parts[i]))
    return found


@gluon.constexpr_function
def keeps_own(cols):
    """Whether the blocks of half of the columns are whole blocks of all of them."""
    return cols // 2 % BOX.value == 0


@gluon.jit
def make_pair_channels(grid):
    """The channels of a program; the first partition's warps call it before the others start."""
    dtype: gl.constexpr = grid.call.q.desc.dtype
    ROWS: gl.constexpr = grid.tiles.BLOCK_M
    COLS: gl.constexpr = grid.call.q.BLOCK_DIM
    COLS_V: gl.constexpr = grid.call.v.BLOCK_DIM
    stages: gl.constexpr = grid.tiles.STAGES
    halves: gl.constexpr = (1 if keeps_own(COLS) else 2) * num_parts(COLS // 2, BOX)
    queries, dout = make_parts(dtype, COLS, grid), make_parts(dtype, COLS_V, grid)
    keys = make_blocks(dtype, COLS // BOX, BOX)
    values = make_blocks(dtype, (COLS_V - grid.tiles.HELD) // BOX, BOX)
    dq_keys = make_blocks(dtype, halves, BOX)
    probs = make_blocks(dtype, 1, ROWS)
    own = make_blocks(dtype, 1, ROWS)
    others = make_blocks(dtype, 1, ROWS)
    sums = None
    if grid.work.dq_desc is not None:
        sums = ()
        for i in gl.static_range(num_parts(COLS // 2, BOX)):
            sums = append(sums, make_lines(width_of(COLS // 2, i, BOX) // 2, grid))
    rows = gl.allocate_shared_memory(gl.float32, [stages, 2, ROWS], grid.work.rows.layout)
    rows_full, dout_full, empty = make_barriers(stages), make_barriers(stages), make_barriers(stages)
    keys_full, held_full = make_barriers(1), None
    if grid.tiles.HELD > 0:
        held_full = make_barriers(1)
    probs_full, probs_free = make_barriers(1), make_barriers(1)
    own_full, own_free = make_barriers(1), make_barriers(1)
    others_full, others_free = make_barriers(1), make_barriers(1)
    fill_with_addresses()
    thread_barrier()
    queries_at, dout_at = addresses_of(queries), addresses_of(dout)
    own_at, others_at = address_of(own), address_of(others)
    rows_full_at, dout_full_at = barrier_address(rows_full), barrier_address(dout_full)
    empty_at, own_free_at = barrier_address(empty), barrier_address(own_free)
    others_full_at, others_free_at = barrier_address(others_full), barrier_address(others_free)
    fence_async_shared()
    thread_barrier()
    tiles = make_records(FIELDS, "", RECORD_SIZE, 2, 3)
    init(rows_full, 1)
    init(dout_full, 1)
    init(empty, 4)
    init(keys_full, 1)
    if held_full is not None:
        init(held_full, 1)
    init(probs_full, 1)
    init(probs_free, 1)
    init(own_full, 1)
    init(own_free, 2)
    init(others_full, 1)
    init(others_free, 1)
    return PairChannels(
        tiles, queries, dout, rows, keys, values, dq_keys, probs, own, others, sums, rows_full, dout_full, empty,
        keys_full, held_full, probs_full, probs_free, own_full, own_free, others_full, others_free, queries_at, dout_at,
        own_at, others_at, rows_full_at, dout_full_at, empty_at, own_free_at, others_full_at, others_free_at,
        gl.program_id(0) & 1,
    )  # fmt: skip


@gluon.jit
def attention_backward_pairs(grid, Q_MAP, DOUT_MAP):
    """Computes dk and dv of the tiles of all programs, and adds to dq; two programs of a cluster for 128 keys.

    The first argument is ``records.KeyGrid``; the others are the numbers of the parameters that are the maps of q and
    dout. ``rows.prepare_rows`` must have run.
    """
    REGISTERS: gl.constexpr = grid.tiles.REGISTERS
    DQ_REGISTERS: gl.constexpr = grid.tiles.DQ_REGISTERS
    mod = score_mod(grid.call.mods, gl.to_tensor(2**30))
    channels = make_pair_channels(grid)
    # All warps take part in cluster_sync, so the producer has a warpgroup's.
    gl.warp_specialize([
        (values_consumer, (channels, grid, mod)), (keys_consumer, (channels, grid)), (dq_adder, (channels, grid)),
        (pair_producer, (channels, grid, Q_MAP, DOUT_MAP)),
    ], [4, 4, 4], [REGISTERS, DQ_REGISTERS, 24])  # fmt: skip


@gluon.jit
def pair_producer(ch, grid, Q_MAP: gl.constexpr, DOUT_MAP: gl.constexpr):
    """Loads the program's keys and values, and row by row block the queries of both programs, or dout."""
    BLOCK_M: gl.constexpr = grid.tiles.BLOCK_M
    COLS: gl.constexpr = grid.call.q.BLOCK_DIM
    COLS_V: gl.constexpr = grid.call.v.BLOCK_DIM
    stages: gl.constexpr = grid.tiles.STAGES
    tile = pair_tile(ch.rank, grid)
    publish_tile(ch.tiles, 0, tile, grid)
    head_blocks = row_blocks_per_head(grid)
    row_blocks = first_row_block(tile, grid)
    m = tile.m_min
    head, num_heads = query_heads(tile.head, grid)
    steps = num_heads * (tile.m_max - tile.m_min)
    if steps > 0:
        load_keys(ch, tile, grid)
    # The other program has its barriers from here on.
    cluster_sync()
    if steps > 0:
        for use in range(steps):
            stage = use & (stages - 1)
            mbarrier.wait(ch.empty.index(stage), ((use // stages) & 1) ^ 1)
            mbarrier.expect(ch.rows_full.index(stage), BLOCK_M * (2 * COLS + 8))
            mbarrier.expect(ch.dout_full.index(stage), BLOCK_M * 2 * COLS_V)
            tma_load(grid.work.rows, [2 * (row_blocks + m), 0], ch.rows_full.index(stage), ch.rows.index(stage))
            rows = HeadRows(tile.b, head, tile.start_q, tile.seqlen_q, grid.call.q.PACKED)
            if ch.rank == 0:
                full = ch.rows_full_at + stage * 8
                load_for_both(grid.call.q.desc, Q_MAP, ch.queries, ch.queries_at, stage, full, rows, m * BLOCK_M, COLS)
            else:
                desc, full = grid.gradients.dout.desc, ch.dout_full_at + stage * 8
                load_for_both(desc, DOUT_MAP, ch.dout, ch.dout_at, stage, full, rows, m * BLOCK_M, COLS_V)
            m += 1
            if m == tile.m_max:
                m = tile.m_min
                head += 1
                row_blocks += head_blocks
    cluster_sync()


@gluon.jit
def load_keys(ch, tile, grid):
    """Starts the loads of a tile's keys and values, and of those keys' columns that this program's dq needs."""
    COLS: gl.constexpr = grid.call.q.BLOCK_DIM
    HELD: gl.constexpr = grid.tiles.HELD
    BYTES: gl.constexpr = PART_KEYS * BOX * 2
    count: gl.constexpr = ch.keys.shape[0] + ch.values.shape[0] + ch.dq_keys.shape[0]
    keys = HeadRows(tile.b, tile.head, tile.start_k, tile.seqlen_k, grid.call.q.PACKED)
    full = ch.keys_full.index(0)
    mbarrier.expect(full, count * BYTES)
    load_blocks(grid.call.k.desc, ch.keys, 0, ch.keys.shape[0], full, keys, tile.key, 0)
    if HELD > 0:
        held_full = ch.held_full.index(0)
        mbarrier.expect(held_full, BYTES)
        load_blocks(grid.call.v.desc, ch.probs, 0, 1, held_full, keys, tile.key, 0)
    load_blocks(grid.call.v.desc, ch.values, 0, ch.values.shape[0], full, keys, tile.key, HELD)
    half: gl.constexpr = num_parts(COLS // 2, BOX)
    first = ch.rank * (COLS // 2)
    if ch.dq_keys.shape[0] > half:
        load_blocks(grid.call.k.desc, ch.dq_keys, 0, half, full, keys, tile.key, first)
    others = tile.key + PART_KEYS - 2 * PART_KEYS * ch.rank
    load_blocks(grid.call.k.desc, ch.dq_keys, ch.dq_keys.shape[0] - half, half, full, keys, others, first)


@gluon.jit
def load_blocks(desc, blocks, first, COUNT: gl.constexpr, full, rows, row, col):
    """Starts the loads of COUNT blocks of columns from ``col`` on, into those from ``first`` on."""
    for i in gl.static_range(COUNT):
        tma_load(desc, rows.at(row, col + i * BOX), full, as_box(blocks.index(first + i), desc))


@gluon.jit
def load_for_both(desc, MAP: gl.constexpr, parts, parts_at, stage, full, rows, row, COLS: gl.constexpr):
    """Starts the load of a row block's tile into a stage of both programs; ``full`` is the barrier's address."""
    ROWS: gl.constexpr = parts[0].shape[1]
    for i in gl.static_range(len(parts)):
        for j in gl.static_range(parts[i].shape[2] // BOX):
            to = parts_at[i] + (stage * parts[i].shape[2] + j * BOX) * (ROWS * 2)
            at = rows.at(row, start_of(COLS, i, WIDEST) + j * BOX)
            multicast_box(desc, MAP, KERNEL, to, full, at)


@gluon.jit
def columns_of(parts, COL: gl.constexpr, WIDTH: gl.constexpr, stage):
    """WIDTH columns of a stage, from COL on."""
    return box_of(parts[COL // WIDEST].index(stage), COL % WIDEST, WIDTH)


@gluon.jit
def sum_of_blocks(blocks, FIRST: gl.constexpr, parts, stage, x, used, ADDS: gl.constexpr):
    """Starts the product of blocks of 64 keys and the rows of a stage, from its columns' block FIRST on.

    used >> 30 is 0 and hides that an address is the same in all steps.
    """
    COUNT: gl.constexpr = blocks.shape[0]
    for i in gl.static_range(COUNT):
        tile = columns_of(parts, (FIRST + i) * BOX, BOX, stage).permute((1, 0))
        x = warpgroup_mma(blocks.index(i + (used >> 30)), tile, x, use_acc=ADDS or i > 0, is_async=True)
    return x


@gluon.jit
def release_rows(ch, stage):
    """Says to both programs' producers that a warpgroup has read a stage."""
    mbarrier.arrive(ch.empty.index(stage), count=1)
    arrive_at_other(ch.empty_at + stage * 8, ch.rank ^ 1)


@gluon.jit
def add_rows(x, parts, stage, accs):
    """Starts the product of probabilities or dscores and a stage's rows, one for each part."""
    started = ()
    for i in gl.static_range(len(accs)):
        started = append(started, add_product(x, parts[i].index(stage), accs[i]))
    return started


@gluon.jit
def zeros_of(parts):
    """An accumulator for 64 keys, one for each part."""
    accs = ()
    for i in gl.static_range(len(parts)):
        accs = append(accs, zero_accumulator(PART_KEYS, parts[i].shape[2]))
    return accs


@gluon.jit
def number_of_steps(records, grid):
    """How many row blocks the program's tile visits, for all heads."""
    _, num_heads = query_heads(records.get(0, "head"), grid)
    return num_heads * steps_of_a_head(records, 0)


@gluon.jit
def values_consumer(ch, grid, mod):
    """The first warpgroup: probabilities, for the second one too, and dv."""
    stages: gl.constexpr = grid.tiles.STAGES
    cluster_sync()
    records = ch.tiles
    records.ring.wait(0)
    dv = zeros_of(ch.dout)
    kept = rows_of_keys(records, 0, score_zeros(grid), grid, 0)
    rows = first_rows(records, 0, grid)
    end = number_of_steps(records, grid)
    mbarrier.wait(ch.keys_full.index(0), 0, pred=end > 0)
    used = 0
    while used < end:
        stage = used & (stages - 1)
        parity = (used // stages) & 1
        zeros = score_zeros(grid)
        mbarrier.wait(ch.rows_full.index(stage), parity)
        s = sum_of_blocks(ch.keys, 0, ch.queries, stage, zeros, used, False)
        pairs = pairs_of(kept, rows, zeros, grid, mod)
        fetched = mod.fetch(pairs, zeros, grid.call.mods)
        s = warpgroup_mma_wait(0, deps=[s])
        lse_log2 = ch.rows.index(stage).slice(0, 1).load(zeros.type.layout)
        p, factor = probabilities(s, lse_log2, kept, grid, mod, pairs, fetched)
        mbarrier.wait(ch.probs_free.index(0), used & 1)
        as_probs(ch).store((factor * probs_scale(gl.float16)).to(gl.float16))
        mbarrier.arrive(ch.probs_full.index(0), count=1)
        mbarrier.wait(ch.dout_full.index(stage), parity)
        dv = add_rows(p.to(ch.own.dtype), ch.dout, stage, dv)
        dv = wait_for_products(dv)
        release_rows(ch, stage)
        rows = next_rows(rows, records, 0, grid)
        used += 1
    store_pair_gradient(grid.gradients.dv, dv, ch, ch.dout, end, grid)
    cluster_sync()


@gluon.jit
def keys_consumer(ch, grid):
    """The second warpgroup: gradients of scores, for dq of both programs too, and dk."""
    stages: gl.constexpr = grid.tiles.STAGES
    INVERSE_SCALE: gl.constexpr = 1 / probs_scale(gl.float16)
    HELD: gl.constexpr = grid.tiles.HELD
    layout: gl.constexpr = score_zeros(grid).type.layout
    cluster_sync()
    records = ch.tiles
    records.ring.wait(0)
    dk = zeros_of(ch.queries)
    end = number_of_steps(records, grid)
    mbarrier.wait(ch.keys_full.index(0), 0, pred=end > 0)
    if HELD > 0:
        mbarrier.wait(ch.held_full.index(0), 0, pred=end > 0)
        held = ch.probs.index(0).load(gl.DotOperandLayout(0, layout, 2))
    mbarrier.arrive(ch.probs_free.index(0), count=1)
    used = 0
    while used < end:
        stage = used & (stages - 1)
        parity = (used // stages) & 1
        dp = score_zeros(grid)
        mbarrier.wait(ch.dout_full.index(stage), parity)
        if HELD > 0:
            first = columns_of(ch.dout, 0, HELD, stage).permute((1, 0))
            dp = warpgroup_mma(held, first, dp, use_acc=False, is_async=True)
        dp = sum_of_blocks(ch.values, HELD // BOX, ch.dout, stage, dp, used, HELD > 0)
        mbarrier.wait(ch.rows_full.index(stage), parity)
        delta = ch.rows.index(stage).slice(1, 1)
        mbarrier.wait(ch.probs_full.index(0), used & 1)
        factor = as_probs(ch).load(layout)
        dp = warpgroup_mma_wait(0, deps=[dp])
        factor, delta = factor.to(gl.float32), delta.load(layout) * INVERSE_SCALE
        ds = score_gradients(factor, dp * INVERSE_SCALE, delta, grid).to(ch.own.dtype)
        mbarrier.arrive(ch.probs_free.index(0), count=1)
        mbarrier.wait(ch.own_free.index(0), (used & 1) ^ 1)
        # Ahead of the barrier behind the stores: the copy of one warp may end the next phase of others_free, and no
        # warp may then still wait for this one.
        mbarrier.wait(ch.others_free.index(0), (used & 1) ^ 1)
        ch.own.index(0).store(ds)
        fence_async_shared()
        mbarrier.arrive(ch.own_full.index(0), count=1)
        dk = add_rows(ds, ch.queries, stage, dk)
        copy_to_other(ch.others_at, ch.own_at, ch.others_full_at, ch.rank ^ 1, PART_KEYS * grid.tiles.BLOCK_M * 2)
        dk = wait_for_products(dk)
        release_rows(ch, stage)
        used += 1
    dk = scale_by(dk, grid.gradients.scale)
    store_pair_gradient(grid.gradients.dk, dk, ch, ch.queries, end, grid)
    cluster_sync()


@gluon.jit
def store_pair_gradient(desc, grad, ch, parts, end, grid):
    """Stores 64 keys of dk or dv through the stage that no row block has at the end."""
    stages: gl.constexpr = grid.tiles.STAGES
    stage = end & (stages - 1)
    mbarrier.wait(ch.empty.index(stage), ((end // stages) & 1) ^ 1)
    keys, key = key_rows(ch.tiles, 0, grid), ch.tiles.get(0, "key")
    found = boxes(desc, grad, grid)
    width: gl.constexpr = found[0].shape[1]
    for i in gl.static_range(len(found)):
        box = columns_of(parts, i * width, width, stage)
        box.store(found[i])
        fence_async_shared()
        tma_store(desc, keys.at(key, i * width), as_box(box, desc))
    tma_store_wait(0)


@gluon.jit
def dq_product(ch, col, used, COLS: gl.constexpr, WIDTH: gl.constexpr):
    """Starts the product for WIDTH of this program's columns of dq, from both programs' dscores."""
    BLOCK: gl.constexpr = col // BOX
    half: gl.constexpr = num_parts(COLS // 2, BOX)
    own, others = ch.own.index(used >> 30), ch.others.index(used >> 30)
    if keeps_own(COLS):
        k = ch.keys.index(ch.rank * half + BLOCK + (used >> 30))
    else:
        k = ch.dq_keys.index(BLOCK + (used >> 30))
    dq = zero_accumulator(64, WIDTH)
    dq = warpgroup_mma(own.permute((1, 0)), box_of(k, 0, WIDTH), dq, use_acc=False, is_async=True)
    k = ch.dq_keys.index(ch.dq_keys.shape[0] - half + BLOCK + (used >> 30))
    return warpgroup_mma(others.permute((1, 0)), box_of(k, 0, WIDTH), dq, is_async=True)


@gluon.jit
def release_dscores(ch):
    """Says that both programs' dscores have been read here."""
    mbarrier.arrive(ch.own_free.index(0), count=1)
    arrive_at_other(ch.others_free_at, ch.rank ^ 1)


@gluon.jit
def dq_adder(ch, grid):
    """The third warpgroup: half of dq's columns of each row block, from the keys of both programs."""
    COLS: gl.constexpr = grid.call.q.BLOCK_DIM
    half: gl.constexpr = COLS // 2
    count: gl.constexpr = num_parts(half, BOX)
    BYTES: gl.constexpr = PART_KEYS * grid.tiles.BLOCK_M * 2
    cluster_sync()
    records = ch.tiles
    records.ring.wait(0)
    rows = first_rows(records, 0, grid)
    end = number_of_steps(records, grid)
    mbarrier.wait(ch.keys_full.index(0), 0, pred=end > 0)
    used = 0
    while used < end:
        mbarrier.expect(ch.others_full.index(0), BYTES)
        mbarrier.wait(ch.own_full.index(0), used & 1)
        mbarrier.wait(ch.others_full.index(0), used & 1)
        # The copy that the other program made here has been read there.
        arrive_at_other(ch.own_free_at, ch.rank ^ 1)
        offset = rows.block.to(gl.int64) * (grid.tiles.BLOCK_M * COLS) + ch.rank * (64 * half)
        if ch.sums is not None:
            dq = ()
            for i in gl.static_range(count):
                dq = append(dq, dq_product(ch, i * BOX, used, COLS, width_of(half, i, BOX)))
            dq = wait_for_products(dq)
            release_dscores(ch)
            add_by_tma(ch.sums, dq, offset, grid)
        else:
            # A piece at a time, for want of registers.
            for i in gl.static_range(count):
                if i > 0:
                    thread_barrier()
                dq = warpgroup_mma_wait(0, deps=[dq_product(ch, i * BOX, used, COLS, width_of(half, i, BOX))])
                if i == count - 1:
                    release_dscores(ch)
                add_from_registers(grid.work.dq, offset + 64 * BOX * i, in_order(dq, width_of(half, i, BOX)))
        rows = next_rows(rows, records, 0, grid)
        used += 1
    tma_store_wait(0)
    cluster_sync()


@gluon.jit
def add_by_tma(sums, dq, offset, grid):
    """Adds pieces [64, columns] to dq, from element ``offset`` on, through a buffer for each."""
    LINES: gl.constexpr = grid.work.dq_desc.block_type.shape[0]
    line = (offset // 128).to(gl.int32)
    tma_store_wait(0)
    for i in gl.static_range(len(dq)):
        sums[i].store(gl.reshape(in_order(dq[i], dq[i].shape[1]), sums[i].shape))
    fence_async_shared()
    for i in gl.static_range(len(dq)):
        for j in gl.static_range(sums[i].shape[0] // LINES):
            tma_add(grid.work.dq_desc, [line + i * (BOX // 2) + j * LINES, 0], box_of(sums[i], j * LINES, LINES, 0))


@gluon.jit
def as_probs(ch):
    """The buffer of probabilities, in float16."""
    tile = ch.probs.index(0)
    layout: gl.constexpr = tile.type.layout
    shape: gl.constexpr = [PART_KEYS, tile.shape[1]]
    return seen_as(tile, gl.float16, shape, layout)
