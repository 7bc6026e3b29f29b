"""The consumers of the Hopper backward for head dims whose dK and dV fill the registers of two warpgroups.

Both warpgroups see the same 64 keys, and each owns one gradient. The first one makes P^T, hands it over through shared
memory, rounded as it is for dV, and adds to dV. The second one makes dP^T and dS^T and adds to dK. Each makes half the
columns of dQ, the second one at once and the first one a step later: so it is ahead, and the exponentials and the
handing over of a block run under the products of the one before.
"""

# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from flashtile.backends.hopper.backward.dq import add_dq, adds_to, advance_turn, start_dq
from flashtile.backends.hopper.backward.probabilities import pairs_of, probabilities, rows_of_keys
from flashtile.backends.hopper.backward.roles import gradient_zeros, score_zeros
from flashtile.backends.hopper.backward.scheduler import first_rows, key_rows, next_rows, query_heads
from flashtile.backends.hopper.device.gluon_compat import as_box, as_tile, tma_put, tma_store_wait
from flashtile.backends.hopper.device.head_dim_parts import pieces


@gluon.jit
def values_step(channels, used, key_use, dv, rows, kept, adds, grid, mod, IS_FIRST: gl.constexpr):
    """What a row block adds to dv, and what the one before adds to the first half of dq; and its probabilities."""
    zeros = score_zeros(grid)
    dtype: gl.constexpr = channels.queries.buffers.dtype
    operand: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    origin = channels.rows.index(used % channels.queries.stages).slice(0, 1)
    if IS_FIRST:
        channels.keys.wait(key_use)
    channels.queries.wait(used)
    k_tile = channels.keys.fixed_part(key_use, 0, used)
    q_tile = channels.queries.at(used)
    s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    pairs = pairs_of(kept, rows)
    fetched = mod.fetch(pairs, zeros)
    s = warpgroup_mma_wait(0, deps=[s])
    p, factor = probabilities(s, origin.load(zeros.type.layout), kept, grid, mod, pairs, fetched)
    p = p.to(dtype)
    # Without a softcap they are the same.
    factor = factor.to(dtype) if mod.has_softcap else p
    if IS_FIRST:
        tma_store_wait(0)
    if grid.has_dscores:
        channels.probs.claim(used)
        channels.probs.at(used).store(factor)
        channels.probs.publish(used)
    if grid.has_dv:
        channels.dout.wait(used)
        dv = warpgroup_mma(gl.convert_layout(p, operand), channels.dout.at(used), dv, is_async=True)
    adds_dq: gl.constexpr = grid.has_dq and not IS_FIRST
    if adds_dq:
        channels.dscores.wait(used - 1)
        dq = start_dq(channels, used - 1, key_use, grid, 0, 0)
    if grid.has_dv:
        dv = warpgroup_mma_wait(1 if adds_dq else 0, deps=[dv])
    channels.queries.release(used)
    if adds_dq:
        add_dq(dq, adds, channels, used - 1, key_use, grid, 0)
    return dv


@gluon.jit
def keys_step(channels, used, key_use, dk, adds, grid, is_last, IS_FIRST: gl.constexpr):
    """What a row block adds to dk, and what it adds to the second half of its dq."""
    zeros = score_zeros(grid)
    dtype: gl.constexpr = channels.queries.buffers.dtype
    layout: gl.constexpr = zeros.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    delta = channels.rows.index(used % channels.queries.stages).slice(1, 1)
    if IS_FIRST:
        channels.values.wait(key_use)
    channels.dout.wait(used)
    v_tile = channels.values.fixed_part(key_use, 0, used)
    dout_tile = channels.dout.at(used)
    dp = warpgroup_mma(v_tile, dout_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma_wait(0, deps=[dp])
    # The next tile's are loaded under what is left of this one.
    channels.values.release(key_use, is_last)
    channels.queries.wait(used)
    channels.probs.wait(used)
    factor = channels.probs.at(used).load(layout).to(gl.float32)
    channels.probs.release(used)
    ds = (factor * (dp - delta.load(layout))).to(dtype)
    if IS_FIRST:
        channels.keys.wait(key_use)
        tma_store_wait(0)
    if grid.has_dq:
        channels.dscores.claim(used)
        channels.dscores.at(used).store(ds)
        fence_async_shared()
        channels.dscores.publish(used)
    if grid.has_dk:
        dk = warpgroup_mma(gl.convert_layout(ds, operand), channels.queries.at(used), dk, is_async=True)
    if grid.has_dq:
        channels.dscores.wait(used)
        dq = start_dq(channels, used, key_use, grid, 0, 1)
    if grid.has_dk:
        dk = warpgroup_mma_wait(1 if grid.has_dq else 0, deps=[dk])
    channels.queries.release(used)
    if grid.has_dq:
        add_dq(dq, adds, channels, used, key_use, grid, 1)
    return dk


@gluon.jit
def store_in_pieces(desc, grad, records, tiles, ring, used, grid):
    """Stores 64 keys of dk or dv, if they are wanted, 64 columns at a time, in float32 32.

    They leave through the buffers in which this warpgroup hands over blocks, if it does. Those are claimed as for uses
    ``used`` and the next one, but not published: those uses are still to come. Before the first one comes,
    ``tma_store_wait`` says that the buffers are free again.
    """
    if desc is not None:
        keys, key = key_rows(records, tiles, grid), records.get(tiles, "key")
        width: gl.constexpr = grid.block_m // 2 if desc.dtype == gl.float32 else grid.block_m
        parts = pieces(grad.to(desc.dtype), width)
        for i in gl.static_range(len(parts)):
            if ring.empty is not None:
                ring.claim(used + i % 2)
            tma_store_wait(1)
            as_tile(ring.at(used + i % 2), desc.dtype, width).store(parts[i])
            fence_async_shared()
            tma_put(desc, keys.at(key, i * width), as_box(ring.at(used + i % 2), desc), grid.adds)


@gluon.jit
def gradient_consumer(desc, channels, grid, mod, WARPGROUP: gl.constexpr):
    """One warpgroup: dv of every tile's keys, or dk, and its share of dq; those that are wanted."""
    # For dv alone the second warpgroup has nothing to do.
    if WARPGROUP == 0 or grid.has_dscores:
        gradient_tiles(desc, channels, grid, mod, WARPGROUP)


@gluon.jit
def gradient_tiles(desc, channels, grid, mod, WARPGROUP: gl.constexpr):
    """The tiles of a warpgroup, one after another."""
    records = channels.tiles
    tiles = 0
    used = 0
    key_use = 0
    records.ring.wait(tiles)
    while records.get(tiles, "is_tile") > 0:
        grad = gradient_zeros(grid)
        kept = rows_of_keys(records, tiles, score_zeros(grid), grid, 0)
        rows = first_rows(records, tiles, grid)
        _, num_heads = query_heads(records.get(tiles, "head"), grid)
        end = used + num_heads * rows.remaining
        if end > used:
            adds = adds_to(rows, -1, channels, tiles, grid)
            if WARPGROUP == 1:
                grad = keys_step(channels, used, key_use, grad, adds, grid, used + 1 == end, True)
            else:
                grad = values_step(channels, used, key_use, grad, rows, kept, adds, grid, mod, True)
            used += 1
            while used < end:
                rows = next_rows(rows, records, tiles, grid)
                own = adds_to(rows, adds.block, channels, tiles, grid)
                if WARPGROUP == 1:
                    grad = keys_step(channels, used, key_use, grad, own, grid, used + 1 == end, False)
                else:
                    grad = values_step(channels, used, key_use, grad, rows, kept, adds, grid, mod, False)
                adds = own
                used += 1
            if grid.has_dq:
                if WARPGROUP == 0:
                    channels.dscores.wait(used - 1)
                    dq = start_dq(channels, used - 1, key_use, grid, 0, 0)
                    add_dq(dq, adds, channels, used - 1, key_use, grid, 0)
                advance_turn(channels.dq.turns_ptr, adds.block)
            channels.keys.release(key_use)
            key_use += 1
        if WARPGROUP == 1:
            store_in_pieces(desc, grad * grid.softmax_scale, records, tiles, channels.dscores, used, grid)
        else:
            store_in_pieces(desc, grad, records, tiles, channels.probs, used, grid)
        records.ring.release(tiles)
        tiles += 1
        records.ring.wait(tiles)
    tma_store_wait(0)
