"""The channels of the Hopper backward's roles, and a row block's dq: its products, summed in the workspace.

The two warpgroups with the keys compute dq, 64 of 128 rows each or half the columns of 64 rows; or a third one does.
"""

# Triton's aggregate reads annotations as types, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from flashtile.backends.hopper.backward.scheduler import (
    FIELDS,
    RECORD_SIZE,
    dq_order_of,
    first_rows,
    next_rows,
    query_heads,
    steps_of_a_head,
)
from flashtile.backends.hopper.device.gluon_compat import aggregate, thread_barrier, tma_add, tma_store_wait
from flashtile.backends.hopper.device.parts import (
    box_of,
    make_rings,
    num_parts,
    part_at,
    start_of,
    width_of,
    with_parts,
    zero_accumulator,
)
from flashtile.backends.hopper.device.ring import Records, Ring, make_records, make_ring, make_ring_beside

# The number of keys in a part of a tile, which are rows of a warpgroup's products.
PART_KEYS = gl.constexpr(64)
# The columns of the widest part of a tile: a wider product takes more registers than a thread starts with.
WIDEST = gl.constexpr(128)


@aggregate
class DqOutput:
    """The place where one warpgroup adds to dq.

    Attributes:
        ptr: Address of dq in the workspace.
        desc: The descriptor of dq; None if dq is added from registers.
        buffer: The buffer that TMA adds from, or None.
        dq_order: A ring with a use for each step, published when the tile may add to the row block; None for any order.
        added: A ring that each warpgroup publishes after it has added. Releasing it releases ``dq_order``.
    """

    ptr: gl.tensor
    desc: tma.tensor_descriptor | gl.constexpr
    buffer: gl.shared_memory_descriptor | gl.constexpr
    dq_order: Ring | gl.constexpr
    added: Ring | gl.constexpr


@aggregate
class BackwardChannels:
    """Tile records, and rings for queries, dout, keys and values, one for each part of their columns.

    Queries, rows and dout share their ``empty`` barriers: they are claimed and released together.

    Attributes:
        tiles: One record per tile.
        queries: Queries of a row block.
        rows: [stages, 2, block_m] float32 of a row block, see ``rows``.
        dout: dout of a row block.
        keys: Keys of a tile, in parts of 64 keys.
        values: Values of a tile, likewise; None for dv alone.
        dscores: Gradients of scores, for the warpgroups that compute dq, a part for 64 keys; None without dq.
        probs: The first warpgroup's probabilities if each owns one gradient (``by_gradient``), else None.
        out: Buffers from which dk and dv are stored, of 128 columns for each warpgroup; None if each owns one gradient.
        dq: The ``DqOutput`` of this warpgroup; None for warpgroups that do not add to dq.

    ``by_gradient``, dk is stored from the buffers of dscores and dv from the buffers of probs; if nothing is passed on,
    these are rings without barriers.
    """

    tiles: Records
    queries: gl.tuple
    rows: gl.shared_memory_descriptor
    dout: gl.tuple
    keys: gl.tuple
    values: gl.tuple | gl.constexpr
    dscores: Ring | gl.constexpr
    probs: Ring | gl.constexpr
    out: gl.shared_memory_descriptor | gl.constexpr
    dq: DqOutput | gl.constexpr


@gluon.jit
def make_channels(grid):
    """The channels for a ``KeyGrid``, without dq's."""
    dtype: gl.constexpr = grid.call.q.desc.dtype
    ROWS: gl.constexpr = grid.tiles.BLOCK_M
    COLS: gl.constexpr = grid.call.q.BLOCK_DIM
    COLS_V: gl.constexpr = grid.call.v.BLOCK_DIM
    PARTS: gl.constexpr = grid.tiles.PARTS
    stages: gl.constexpr = grid.tiles.STAGES
    ds_stages: gl.constexpr = grid.tiles.DS_STAGES
    by_gradient: gl.constexpr = grid.tiles.BY_GRADIENT
    # With dv alone, the second of two warpgroups that share keys does nothing. A third warpgroup for dq reads the keys.
    both: gl.constexpr = grid.gradients.HAS_DSCORES if by_gradient else PARTS == 2
    consumers: gl.constexpr = 2 if both else 1
    # Two more warps read the tile records if dq has an order.
    in_order: gl.constexpr = 2 if grid.work.dq_order is not None else 0
    third: gl.constexpr = 1 if grid.gradients.HAS_DQ and grid.tiles.DQ_WARPGROUPS == 1 else 0
    dout_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, width_of(COLS_V, -1, WIDEST)], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART_KEYS, ROWS], dtype)
    tiles = make_records(FIELDS, "", RECORD_SIZE, 2, consumers + third + in_order)
    queries = make_rings(dtype, ROWS, COLS, stages, consumers, 1, WIDEST)
    rows = gl.allocate_shared_memory(gl.float32, [stages, 2, ROWS], grid.work.rows.layout)
    dout = make_ring_beside(queries[0], dtype, [ROWS, width_of(COLS_V, 0, WIDEST)], dout_layout)
    dout = with_parts(dout, dout_layout, COLS_V, WIDEST)
    keys = make_rings(dtype, PART_KEYS, COLS, grid.tiles.K_STAGES, PARTS + third, PARTS, WIDEST)
    # Rings are made only if they are used: see make_ring_beside.
    values, dscores, probs, out = None, None, None, None
    if grid.gradients.HAS_DSCORES:
        values = make_rings(dtype, PART_KEYS, COLS_V, grid.tiles.V_STAGES, PARTS, PARTS, WIDEST)
    if grid.gradients.HAS_DQ or (by_gradient and grid.gradients.HAS_DK):
        readers: gl.constexpr = grid.tiles.DQ_WARPGROUPS if grid.gradients.HAS_DQ else 0
        dscores = make_ring(dtype, [PART_KEYS, ROWS], ds_layout, ds_stages, readers, PARTS, PARTS)
    if by_gradient:
        of_probs: gl.constexpr = gl.bfloat16 if grid.gradients.HAS_SLOPE else gl.float16
        probs = make_ring(of_probs, [PART_KEYS, ROWS], ds_layout, ds_stages, 1 if grid.gradients.HAS_DSCORES else 0)
    else:
        cols: gl.constexpr = width_of(COLS, -1, 64 if PARTS == 1 else 256)
        out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART_KEYS, cols], dtype)
        out = gl.allocate_shared_memory(
            dtype, [PARTS * (1 if PARTS == 1 else min(COLS, 128) // cols), PART_KEYS, cols], out_layout
        )
    return BackwardChannels(tiles, queries, rows, dout, keys, values, dscores, probs, out, None)


@gluon.jit
def with_dq(channels, dq):
    """The channels of a warpgroup that adds to dq."""
    c = channels
    return BackwardChannels(c.tiles, c.queries, c.rows, c.dout, c.keys, c.values, c.dscores, c.probs, c.out, dq)


@gluon.jit
def start_dq(channels, used, key_use, grid, PIECE: gl.constexpr, WARPGROUP: gl.constexpr):
    """Starts the product for one piece of this warpgroup's share of dq."""
    width: gl.constexpr = width_of(grid.tiles.DQ_SHARE, PIECE, grid.tiles.DQ_WIDTH)
    row: gl.constexpr = 64 * WARPGROUP if grid.tiles.BLOCK_M == 128 else 0
    first: gl.constexpr = 0 if grid.tiles.BLOCK_M == 128 else WARPGROUP * grid.tiles.DQ_SHARE
    col: gl.constexpr = first + start_of(grid.tiles.DQ_SHARE, PIECE, grid.tiles.DQ_WIDTH)
    col_part: gl.constexpr = part_at(grid.call.q.BLOCK_DIM, col, WIDEST)
    dq = zero_accumulator(64, width)
    for part in gl.static_range(grid.tiles.PARTS):
        ds_tile = channels.dscores.part(used, part).slice(row, 64, dim=1).permute((1, 0))
        k_tile = channels.keys[col_part].fixed_part(key_use, part, used)
        k_tile = k_tile.slice(col - start_of(grid.call.q.BLOCK_DIM, col_part, WIDEST), width, dim=1)
        dq = warpgroup_mma(ds_tile, k_tile, dq, use_acc=part > 0, is_async=True)
    return dq


@gluon.jit
def in_order(acc, WIDTH: gl.constexpr):
    """[64, WIDTH] accumulators as [WIDTH / 8, 128, 4], the workspace's order: nothing moves between threads."""
    t = gl.reshape(acc, [4, 2, 8, WIDTH // 8, 4, 2])
    return gl.reshape(gl.permute(t, (3, 0, 2, 4, 1, 5)), [WIDTH // 8, 128, 4])


@gluon.jit
def add_from_registers(ptr, offset, t):
    """Adds results of ``in_order`` from element ``offset`` on, four of a thread's numbers at once."""
    layout: gl.constexpr = t.type.layout
    eights = gl.arange(0, t.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    threads = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    fours = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    offsets = 512 * eights[:, None, None] + (4 * threads[None, :, None] + fours[None, None, :])
    gl.atomic_add(ptr + offset + offsets, t, sem="relaxed")


@gluon.jit
def add_accumulators(out, offset, acc, WIDTH: gl.constexpr):
    """Adds [64, WIDTH] to dq from element ``offset`` on."""
    t = in_order(acc, WIDTH)
    if out.desc is not None:
        tma_store_wait(0)
        LINES: gl.constexpr = out.desc.block_type.shape[0]
        own = box_of(out.buffer, 0, WIDTH // 2, 0)
        own.store(gl.reshape(t, [WIDTH // 2, 128]))
        fence_async_shared()
        for i in gl.static_range(WIDTH // 2 // LINES):
            tma_add(out.desc, [(offset // 128).to(gl.int32) + i * LINES, 0], box_of(own, i * LINES, LINES, 0))
    else:
        add_from_registers(out.ptr, offset, t)


@gluon.jit
def keep_dq_order(channels, grid, ENDS: gl.constexpr):
    """A warp that waits on the semaphores of its program's steps, a few ahead; ENDS: one that increments them after.

    Each of the two takes about as long as a step, so both run beside the products. The acquire follows the adds of
    earlier tiles, and the release precedes the adds of later tiles; the rings extend that order to the warps that add.
    """
    records, dq_order, added = channels.tiles, channels.dq.dq_order, channels.dq.added
    tiles = 0
    used = 0
    records.ring.wait(tiles)
    while records.get(tiles, "is_tile") > 0:
        rows = first_rows(records, tiles, grid)
        _, num_heads = query_heads(records.get(tiles, "head"), grid)
        end = used + num_heads * steps_of_a_head(records, tiles)
        while used < end:
            if ENDS:
                added.wait(used)
                gl.atomic_add(grid.work.dq_order + rows.block, 1, sem="release")
                added.release(used)
            else:
                dq_order.claim(used)
                before = dq_order_of(rows.start, records, tiles, grid)
                while gl.atomic_add(grid.work.dq_order + rows.block, 0, sem="acquire") < before:
                    pass
                dq_order.publish(used)
            rows = next_rows(rows, records, tiles, grid)
            used += 1
        tiles = records.next(tiles)


@gluon.jit
def add_dq(dq, block, channels, used, key_use, grid, WARPGROUP: gl.constexpr):
    """Adds this warpgroup's share of dq to row block ``block``, in dq_order; ``dq`` is the first piece of the share."""
    share: gl.constexpr = grid.tiles.DQ_SHARE
    most: gl.constexpr = grid.tiles.DQ_WIDTH
    out = channels.dq
    offset = block.to(gl.int64) * (grid.tiles.BLOCK_M * grid.call.q.BLOCK_DIM) + WARPGROUP * (64 * share)
    count: gl.constexpr = num_parts(share, most)
    for piece in gl.static_range(count):
        if piece > 0:
            # This keeps the adds before the next product, which reuses their registers.
            thread_barrier()
            dq = start_dq(channels, used, key_use, grid, piece, WARPGROUP)
        dq = warpgroup_mma_wait(0, deps=[dq])
        if piece == count - 1:
            channels.dscores.release(used)
        if piece == 0 and out.dq_order is not None:
            out.dq_order.wait(used)
        add_accumulators(out, offset + 64 * start_of(share, piece, most), dq, width_of(share, piece, most))
    if out.dq_order is not None:
        thread_barrier()
        out.added.publish(used)


@gluon.jit
def dq_consumer(channels, grid):
    """A third warpgroup: it computes every tile's share of dq, while the other two go on."""
    if grid.gradients.HAS_DQ:
        records = channels.tiles
        tiles = 0
        used = 0
        key_use = 0
        records.ring.wait(tiles)
        while records.get(tiles, "is_tile") > 0:
            rows = first_rows(records, tiles, grid)
            _, num_heads = query_heads(records.get(tiles, "head"), grid)
            end = used + num_heads * steps_of_a_head(records, tiles)
            if end > used:
                channels.keys[0].wait(key_use)
                while used < end:
                    channels.dscores.wait(used)
                    dq = start_dq(channels, used, key_use, grid, 0, 0)
                    add_dq(dq, rows.block, channels, used, key_use, grid, 0)
                    rows = next_rows(rows, records, tiles, grid)
                    used += 1
                channels.keys[0].release(key_use)
                key_use += 1
            tiles = records.next(tiles)
        if channels.dq.desc is not None:
            tma_store_wait(0)
