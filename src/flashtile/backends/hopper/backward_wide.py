"""The computing roles of the Hopper backward for head dims whose dK and dV fill the registers of two warpgroups.

Both warpgroups see the same 64 keys, and each owns one gradient. The first one makes P^T, hands it over through shared
memory, rounded as it is for dV, and adds to dV. The second one makes dP^T and dS^T and adds to dK. Each makes half the
columns of dQ, the second one at once and the first one a step later: so it is ahead, and the exponentials and the
handing over of a block run under the products of the one before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from flashtile.backends.hopper.backward_parts import (
    GROUP_KEYS,
    finish_dq,
    fixed_part_of,
    is_cut,
    keep_rows,
    my_turn,
    next_rows,
    pass_turn,
    probabilities,
    rows_of_keys,
    start_dq,
)
from flashtile.backends.hopper.backward_schedule import (
    HEAD,
    IS_TILE,
    KEY,
    M_MAX,
    M_MIN,
    ROW_BLOCK,
    SEQLEN_K,
    SEQLEN_Q,
    SEQUENCE,
    START_K,
)
from flashtile.backends.hopper.gluon_compat import as_box, tma_store, tma_store_wait
from flashtile.backends.hopper.schedule import coordinates, field


@gluon.jit
def values_step(channels, probs, used, seen, dv, zeros, dq_out, last_block, last_turn, held, start, key_rows, grid,
                transform, form, IS_FIRST: gl.constexpr):  # fmt: skip
    """What one row block adds to dv, and what the one before, ``last_block``, adds to the first half of dq."""
    dtype: gl.constexpr = channels.queries.buffers.dtype
    operand: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    rows = channels.rows.index(used % channels.queries.stages)
    if IS_FIRST:
        channels.keys.wait(seen)
    channels.queries.wait(used)
    k_tile = fixed_part_of(channels.keys, seen, 0, used, 1)
    q_tile = channels.queries.at(used)
    s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    p, factor = probabilities(s, rows.slice(0, 1).load(zeros.type.layout), transform)
    if is_cut(start, key_rows, grid):
        p = keep_rows(p, start, key_rows, grid)
    p = p.to(dtype)
    # Without a softcap they are the same; with one, the mask of dscores does for the factor too.
    factor = factor.to(dtype) if transform.has_softcap else p
    if IS_FIRST:
        tma_store_wait(0)
    probs.claim(used)
    probs.at(used).store(factor)
    probs.publish(used)
    channels.dout.wait(used)
    dv = warpgroup_mma(gl.convert_layout(p, operand), channels.dout.at(used), dv, is_async=True)
    if IS_FIRST:
        dv = warpgroup_mma_wait(0, deps=[dv])
        channels.queries.release(used)
    else:
        channels.dscores.wait(used - 1)
        dq = start_dq(channels, used - 1, seen, form, 0, 0)
        dv = warpgroup_mma_wait(1, deps=[dv])
        channels.queries.release(used)
        finish_dq(dq, dq_out, last_block, last_turn, held, channels, used - 1, seen, form, 0)
    return dv


@gluon.jit
def keys_step(channels, probs, used, seen, dk, zeros, dq_out, block, turn, held, start, key_rows, grid,
              transform, form, is_last, IS_FIRST: gl.constexpr):  # fmt: skip
    """What one row block adds to dk, and what it adds to the second half of its dq."""
    dtype: gl.constexpr = channels.queries.buffers.dtype
    layout: gl.constexpr = zeros.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    rows = channels.rows.index(used % channels.queries.stages)
    if IS_FIRST:
        channels.values.wait(seen)
    channels.dout.wait(used)
    v_tile = fixed_part_of(channels.values, seen, 0, used, 1)
    dout_tile = channels.dout.at(used)
    dp = warpgroup_mma(v_tile, dout_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma_wait(0, deps=[dp])
    # The next tile's are loaded under what is left of this one.
    channels.values.release(seen, is_last)
    channels.queries.wait(used)
    probs.wait(used)
    factor = probs.at(used).load(layout).to(gl.float32)
    probs.release(used)
    ds = factor * (dp - rows.slice(1, 1).load(layout))
    if is_cut(start, key_rows, grid):
        # A pair that is masked may have NaN in dp, from a value that no row keeps or from dout of a row without it.
        ds = keep_rows(ds, start, key_rows, grid)
    ds = ds.to(dtype)
    if IS_FIRST:
        channels.keys.wait(seen)
        tma_store_wait(0)
    channels.dscores.claim(used)
    channels.dscores.at(used).store(ds)
    fence_async_shared()
    channels.dscores.publish(used)
    dk = warpgroup_mma(gl.convert_layout(ds, operand), channels.queries.at(used), dk, is_async=True)
    channels.dscores.wait(used)
    dq = start_dq(channels, used, seen, form, 0, 1)
    dk = warpgroup_mma_wait(1, deps=[dk])
    channels.queries.release(used)
    finish_dq(dq, dq_out, block, turn, held, channels, used, seen, form, 1)
    return dk


@gluon.jit
def halves(x):
    """The left and the right half of [M, N]."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, [M, 2, N // 2]), (0, 2, 1)))


@gluon.jit
def store_gradient(desc, grad, tile_ring, tiles, ring, used, grid, form):
    """Stores 64 keys of dk or dv in four parts, through the buffers in which this warpgroup hands over its blocks.

    They are claimed as for uses ``used`` and the next one, but not published: those uses are still to come. Before the
    first one comes, ``tma_store_wait`` says that the buffers are free again.
    """
    width: gl.constexpr = form.block_d // 4
    key, b, head = field(tile_ring, tiles, KEY), field(tile_ring, tiles, SEQUENCE), field(tile_ring, tiles, HEAD)
    start_k, seqlen_k = field(tile_ring, tiles, START_K), field(tile_ring, tiles, SEQLEN_K)
    left, right = halves(grad.to(desc.dtype))
    for half in gl.static_range(2):
        parts = halves(right if half == 1 else left)
        for i in gl.static_range(2):
            ring.claim(used + i)
            tma_store_wait(1)
            ring.at(used + i).store(parts[i])
            fence_async_shared()
            at = coordinates(b, start_k, seqlen_k, key, head, (2 * half + i) * width, grid.varlen)
            tma_store(desc, at, as_box(ring.at(used + i), desc))


@gluon.jit
def owner(desc, dq_out, channels, probs, grid, transform, form, GROUP: gl.constexpr):
    """One warpgroup: dv of every tile's keys, or dk."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_m, 16])
    grad_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_d, 16])
    zeros = gl.zeros([GROUP_KEYS, form.block_m], gl.float32, s_layout)
    tile_ring = channels.tiles
    tiles = 0
    used = 0
    seen = 0
    tile_ring.wait(tiles)
    while field(tile_ring, tiles, IS_TILE) > 0:
        grad = gl.zeros([GROUP_KEYS, form.block_d], gl.float32, grad_layout)
        seqlen_q, seqlen_k = field(tile_ring, tiles, SEQLEN_Q), field(tile_ring, tiles, SEQLEN_K)
        key_rows = rows_of_keys(field(tile_ring, tiles, KEY), zeros, seqlen_q, seqlen_k, grid)
        left = field(tile_ring, tiles, M_MAX) - field(tile_ring, tiles, M_MIN)
        end = used + grid.group_size * left
        if end > used:
            start = field(tile_ring, tiles, M_MIN) * form.block_m
            block = field(tile_ring, tiles, ROW_BLOCK)
            mine = my_turn(start, tile_ring, tiles, grid, dq_out[3])
            held = gl.to_tensor(-1)
            if GROUP == 1:
                grad = keys_step(
                    channels, probs, used, seen, grad, zeros, dq_out, block, mine, held, start, key_rows, grid,
                    transform, form, used + 1 == end, True,
                )  # fmt: skip
            else:
                grad = values_step(
                    channels, probs, used, seen, grad, zeros, dq_out, block, mine, held, start, key_rows, grid,
                    transform, form, True,
                )  # fmt: skip
            used += 1
            while used < end:
                last_block, last_turn = block, mine
                start, block, left = next_rows(start, block, left, tile_ring, tiles, grid)
                mine = my_turn(start, tile_ring, tiles, grid, dq_out[3])
                if GROUP == 1:
                    grad = keys_step(
                        channels, probs, used, seen, grad, zeros, dq_out, block, mine, last_block, start, key_rows,
                        grid, transform, form, used + 1 == end, False,
                    )  # fmt: skip
                else:
                    grad = values_step(
                        channels, probs, used, seen, grad, zeros, dq_out, last_block, last_turn, held, start, key_rows,
                        grid, transform, form, False,
                    )  # fmt: skip
                held = last_block
                used += 1
            if GROUP == 0:
                channels.dscores.wait(used - 1)
                dq = start_dq(channels, used - 1, seen, form, 0, 0)
                finish_dq(dq, dq_out, block, mine, held, channels, used - 1, seen, form, 0)
            pass_turn(dq_out[3], block)
            channels.keys.release(seen)
            seen += 1
        if GROUP == 1:
            grad = grad * transform.softmax_scale
            store_gradient(desc, grad, tile_ring, tiles, channels.dscores, used, grid, form)
        else:
            store_gradient(desc, grad, tile_ring, tiles, probs, used, grid, form)
        tile_ring.release(tiles)
        tiles += 1
        tile_ring.wait(tiles)
    tma_store_wait(0)
