"""The consumers of the Hopper backward for head dims whose dK and dV fill the registers of two warpgroups.

Both warpgroups see the same 64 keys, and each owns one gradient. The first one makes P^T, hands it over through shared
memory and adds to dV. The second one makes dP^T and dS^T and adds to dK. A third one makes dQ of dS. None waits for
those after it, so the exponentials and the handing over of a block run under the products of those before.

P^T is handed over in float16 times ``PROBS_SCALE``: rounding it to bfloat16, before dS^T is rounded, would make the
errors of dK and dQ 1.2 times as large.
"""

# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from flashtile.backends.hopper.backward.channels import PART_KEYS
from flashtile.backends.hopper.backward.probabilities import pairs_of, probabilities, rows_of_keys
from flashtile.backends.hopper.backward.roles import add_to_sums, boxes, key_tile, score_zeros, times
from flashtile.backends.hopper.backward.scheduler import first_rows, key_rows, next_rows, query_heads, steps_of_a_head
from flashtile.backends.hopper.device.gluon_compat import as_box, as_tile, tma_put, tma_store_wait
from flashtile.backends.hopper.device.parts import (
    add_products,
    start_sum,
    tiles_at,
    wait_for_products,
    zero_accumulators,
)

# Probabilities, which are at most about 1, stay finite, and those down to 4e-9 keep all digits of float16.
PROBS_SCALE = gl.constexpr(2.0**14)


@gluon.jit
def values_step(channels, used, key_use, dv, rows, kept, grid, mod, IS_FIRST: gl.constexpr):
    """What a row block adds to dv; and its probabilities."""
    zeros = score_zeros(grid)
    lse_log2 = channels.rows.index(used % channels.queries[0].stages).slice(0, 1)
    if IS_FIRST:
        channels.keys[0].wait(key_use)
    channels.queries[0].wait(used)
    s = start_sum(key_tile(channels.keys, key_use, 0, used), tiles_at(channels.queries, used), zeros)
    pairs = pairs_of(kept, rows)
    fetched = mod.fetch(pairs, zeros)
    s = warpgroup_mma_wait(0, deps=[s])
    p, factor = probabilities(s, lse_log2.load(zeros.type.layout), kept, grid, mod, pairs, fetched)
    if IS_FIRST:
        tma_store_wait(0)
    if grid.gradients.HAS_DSCORES:
        channels.probs.claim(used)
        channels.probs.at(used).store((factor * PROBS_SCALE).to(gl.float16))
        channels.probs.publish(used)
    if grid.gradients.HAS_DV:
        channels.dout[0].wait(used)
        dv = add_products(p.to(channels.dout[0].buffers.dtype), channels.dout, used, dv)
        dv = wait_for_products(dv)
    channels.queries[0].release(used)
    return dv


@gluon.jit
def keys_step(channels, used, key_use, dk, grid, is_last, IS_FIRST: gl.constexpr):
    """What a row block adds to dk; and the gradients of its scores."""
    zeros = score_zeros(grid)
    layout: gl.constexpr = zeros.type.layout
    delta = channels.rows.index(used % channels.queries[0].stages).slice(1, 1)
    if IS_FIRST:
        channels.values[0].wait(key_use)
    channels.dout[0].wait(used)
    dp = start_sum(key_tile(channels.values, key_use, 0, used), tiles_at(channels.dout, used), zeros)
    dp = warpgroup_mma_wait(0, deps=[dp])
    # The next tile's are loaded under what is left of this one.
    channels.values[0].release(key_use, is_last)
    channels.queries[0].wait(used)
    channels.probs.wait(used)
    factor = channels.probs.at(used).load(layout).to(gl.float32)
    channels.probs.release(used)
    ds = factor * (dp * (1 / PROBS_SCALE) - delta.load(layout) * (1 / PROBS_SCALE))
    ds = ds.to(channels.queries[0].buffers.dtype)
    if IS_FIRST:
        tma_store_wait(0)
    if grid.gradients.HAS_DQ:
        channels.dscores.claim(used)
        channels.dscores.at(used).store(ds)
        fence_async_shared()
        channels.dscores.publish(used)
    if grid.gradients.HAS_DK:
        dk = wait_for_products(add_products(ds, channels.queries, used, dk))
    channels.queries[0].release(used)
    return dk


@gluon.jit
def store_in_pieces(out, grad, records, tiles, ring, used, grid, COLS: gl.constexpr):
    """Stores 64 keys of dk or dv, if they are wanted, at most 64 columns at a time, in float32 32.

    The TMA store borrows the next two stages of the ring through which this warpgroup hands over blocks: claimed, never
    published. ``tma_store_wait`` frees them before their own use begins. With gqa_splits dk and dv are added to sums,
    from registers.
    """
    if out is not None:
        if grid.schedule.splits is not None:
            add_to_sums(out, grad, records, tiles, grid, COLS, 0)
        else:
            keys, key = key_rows(records, tiles, grid), records.get(tiles, "key")
            parts = boxes(out, grad, grid)
            width: gl.constexpr = parts[0].shape[1]
            for i in gl.static_range(len(parts)):
                if ring.empty is not None:
                    ring.claim(used + i % 2)
                # After a tile without rows, that tile's last piece may still leave the first buffer.
                tma_store_wait(1 if i > 0 else 0)
                as_tile(ring.at(used + i % 2), out.dtype, width).store(parts[i])
                fence_async_shared()
                tma_put(out, keys.at(key, i * width), as_box(ring.at(used + i % 2), out), grid.gradients.ADDS)


@gluon.jit
def gradient_consumer(channels, grid, mod, WARPGROUP: gl.constexpr):
    """One warpgroup: dv of every tile's keys, or dk, if it is wanted, and what the next one needs."""
    # For dv alone the second warpgroup has nothing to do.
    if WARPGROUP == 0 or grid.gradients.HAS_DSCORES:
        gradient_tiles(channels, grid, mod, WARPGROUP)


@gluon.jit
def gradient_tiles(channels, grid, mod, WARPGROUP: gl.constexpr):
    """The tiles of a warpgroup, one after another."""
    records = channels.tiles
    tiles = 0
    used = 0
    key_use = 0
    records.ring.wait(tiles)
    while records.get(tiles, "is_tile") > 0:
        grad = zero_accumulators(PART_KEYS, channels.queries if WARPGROUP == 1 else channels.dout)
        kept = rows_of_keys(records, tiles, score_zeros(grid), grid, 0)
        rows = first_rows(records, tiles, grid)
        _, num_heads = query_heads(records.get(tiles, "head"), grid)
        end = used + num_heads * steps_of_a_head(records, tiles)
        if end > used:
            if WARPGROUP == 1:
                grad = keys_step(channels, used, key_use, grad, grid, used + 1 == end, True)
            else:
                grad = values_step(channels, used, key_use, grad, rows, kept, grid, mod, True)
            used += 1
            while used < end:
                rows = next_rows(rows, records, tiles, grid)
                if WARPGROUP == 1:
                    grad = keys_step(channels, used, key_use, grad, grid, used + 1 == end, False)
                else:
                    grad = values_step(channels, used, key_use, grad, rows, kept, grid, mod, False)
                used += 1
            if WARPGROUP == 0:
                channels.keys[0].release(key_use)
            key_use += 1
        if WARPGROUP == 1:
            grad = times(grad, grid.gradients.scale)
            ring = channels.dscores
            store_in_pieces(grid.gradients.dk, grad, records, tiles, ring, used, grid, grid.call.q.BLOCK_DIM)
        else:
            store_in_pieces(grid.gradients.dv, grad, records, tiles, channels.probs, used, grid, grid.call.v.BLOCK_DIM)
        tiles = records.next(tiles)
    tma_store_wait(0)
