"""A row block's dq in the Hopper backward: its products, and adding them up in the workspace.

The two warpgroups that have the keys compute it, 64 of 128 rows each or half the columns of 64 rows, or a third one.
"""

# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from flashtile.backends.hopper.backward.channels import WIDEST
from flashtile.backends.hopper.backward.scheduler import (
    dq_order_of,
    first_rows,
    next_rows,
    query_heads,
    steps_of_a_head,
)
from flashtile.backends.hopper.device.gluon_compat import thread_barrier, tma_add, tma_store_wait
from flashtile.backends.hopper.device.parts import num_parts, part_at, start_of, width_of, zero_accumulator


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
    """Adds what ``in_order`` has made from element ``offset`` on, four of a thread's numbers at once."""
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
        out.buffer.store(gl.reshape(t, [WIDTH // 2, 128]))
        fence_async_shared()
        tma_add(out.desc, [(offset // 128).to(gl.int32), 0], out.buffer)
    else:
        add_from_registers(out.ptr, offset, t)


@gluon.jit
def wait_for_dq_order(channels, grid):
    """A warp that waits on the dq_order semaphores of its program's steps, a few steps ahead."""
    keep_dq_order(channels, grid, False)


@gluon.jit
def advance_dq_order(channels, grid):
    """A warp that increments a row block's semaphore once its step has added to dq."""
    keep_dq_order(channels, grid, True)


@gluon.jit
def keep_dq_order(channels, grid, ENDS: gl.constexpr):
    """One of two warps: waiting and incrementing each take about as long as a step, so both run beside the products.

    The acquire follows the adds of earlier tiles, the release precedes those of later ones; the rings extend that order
    to the warps that add.
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
    """Adds this warpgroup's share of dq to row block ``block``, of which ``dq`` is the first piece, in dq_order."""
    share: gl.constexpr = grid.tiles.DQ_SHARE
    most: gl.constexpr = grid.tiles.DQ_WIDTH
    out = channels.dq
    offset = block.to(gl.int64) * (grid.tiles.BLOCK_M * grid.call.q.BLOCK_DIM) + WARPGROUP * (64 * share)
    count: gl.constexpr = num_parts(share, most)
    for piece in gl.static_range(count):
        if piece > 0:
            # Keeps the adds ahead of the next product, which reuses their registers.
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
    """A third warpgroup: what every tile adds to dq, while the other two go on."""
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
