"""Attention backward for Hopper: a program owns a block of keys and walks over the rows that see it.

    S^T = K Q^T      P^T = exp2(S^T * scale - origin)      dV += P^T dO
    dP^T = V dO^T    dS^T = P^T * (dP^T - delta)           dK += dS^T Q      dQ += dS K

Scores lie keys first, so that P^T and dS^T are left operands straight from registers. Two warpgroups compute, each with
64 keys of its own: its dK and dV stay in registers. Both put dS^T into shared memory, and each makes one half of the dQ
that all 128 keys add to a row block, one step later, and adds it to float32 global memory. One warp loads by TMA. For
head dims whose dK and dV are too much for that, two warpgroups share 64 keys: ``backward_wide``.
Mathematics: docs/algorithm.md. Sources: Dao et al. 2022, arXiv:2205.14135, algorithm 4; Shah et al. 2024,
FlashAttention-3, arXiv:2407.08608, appendix B.1 (warp specialisation of the backward).
"""

# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtile.backends.hopper.backward_parts import (
    GROUP_KEYS,
    Channels,
    Form,
    Transform,
    finish_dq,
    fixed_part_of,
    is_cut,
    keep_rows,
    make_parts_ring,
    my_turn,
    next_rows,
    part_of,
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
    RECORD_SIZE,
    ROW_BLOCK,
    SEQLEN_K,
    SEQLEN_Q,
    SEQUENCE,
    START_K,
    KeyGrid,
    first_row_block,
    next_tile,
    publish_tile,
    row_blocks_a_head,
)
from flashtile.backends.hopper.backward_wide import owner
from flashtile.backends.hopper.gluon_compat import (
    as_box,
    tma_load,
    tma_store,
    tma_store_wait,
)
from flashtile.backends.hopper.pipeline import make_ring, make_ring_beside
from flashtile.backends.hopper.schedule import coordinates, field


@gluon.jit
def load_keys(desc, tile, grid, ring, use, form):
    """Starts the load of a tile's keys or values, 64 at a time."""
    full = ring.acquire(use, form.groups * GROUP_KEYS * form.block_d * 2)
    for group in gl.static_range(form.groups):
        key = tile.key + group * GROUP_KEYS
        at = coordinates(tile.b, tile.start_k, tile.seqlen_k, key, tile.head, 0, grid.varlen)
        tma_load(desc, at, full, as_box(part_of(ring, use, group, form.groups), desc))


@gluon.jit
def loader(q_desc, k_desc, v_desc, dout_desc, rows_desc, counter_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, channels,
           grid, form):  # fmt: skip
    """Takes tiles and loads what they need, in the order in which it is used and buffers become free."""
    tile_bytes: gl.constexpr = form.block_m * form.block_d * 2
    row_bytes: gl.constexpr = 2 * form.block_m * 4
    stages: gl.constexpr = channels.queries.stages
    # A second buffer for keys is free long before the values', an only one is free last.
    keys_first: gl.constexpr = channels.keys.stages > 1
    tiles = 0
    used = 0
    seen = 0
    is_end = False
    while not is_end:
        tile = next_tile(counter_ptr, grid, cu_seqlens_q_ptr, cu_seqlens_k_ptr)
        is_end = tile.is_end
        publish_tile(channels.tiles, tiles, tile, grid)
        if not is_end:
            tiles += 1
            head_blocks = row_blocks_a_head(grid)
            row_blocks = first_row_block(tile, grid)
            m = tile.m_min
            head = tile.head * grid.group_size
            steps = grid.group_size * (tile.m_max - tile.m_min)
            for i in range(steps):
                at = coordinates(tile.b, tile.start_q, tile.seqlen_q, m * form.block_m, head, 0, grid.varlen)
                full = channels.queries.acquire(used, tile_bytes + row_bytes)
                tma_load(q_desc, at, full, as_box(channels.queries.at(used), q_desc))
                tma_load(rows_desc, [2 * (row_blocks + m), 0], full, channels.rows.index(used % stages))
                if i == 0:
                    if keys_first:
                        load_keys(k_desc, tile, grid, channels.keys, seen, form)
                    else:
                        load_keys(v_desc, tile, grid, channels.values, seen, form)
                full = channels.dout.full.index(used % stages)
                mbarrier.expect(full, tile_bytes)
                tma_load(dout_desc, at, full, as_box(channels.dout.at(used), dout_desc))
                if i == 0:
                    if keys_first:
                        load_keys(v_desc, tile, grid, channels.values, seen, form)
                    else:
                        load_keys(k_desc, tile, grid, channels.keys, seen, form)
                used += 1
                m += 1
                if m == tile.m_max:
                    m = tile.m_min
                    head += 1
                    row_blocks += head_blocks
            seen += gl.where(steps > 0, 1, 0)


@gluon.jit
def step(channels, used, seen, dk, dv, zeros, dq_out, last_block, last_turn, held, start, key_rows, grid,
         transform, form, IS_FIRST: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """What one row block adds to dk and dv, and what the one before, ``last_block``, adds to dq.

    So the warpgroups may be almost a step apart before one waits for the dscores of the other: the products of one
    run while the other computes.
    """
    dtype: gl.constexpr = channels.queries.buffers.dtype
    layout: gl.constexpr = zeros.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    q_tile, dout_tile = channels.queries.at(used), channels.dout.at(used)
    k_tile = fixed_part_of(channels.keys, seen, GROUP, used, 2)
    v_tile = fixed_part_of(channels.values, seen, GROUP, used, 2)
    rows = channels.rows.index(used % channels.queries.stages)
    channels.queries.wait(used)
    s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    channels.dout.wait(used)
    dp = warpgroup_mma(v_tile, dout_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    p, factor = probabilities(s, rows.slice(0, 1).load(layout), transform)
    is_edge = is_cut(start, key_rows, grid)
    if is_edge:
        p = keep_rows(p, start, key_rows, grid)
        if not transform.has_softcap:
            factor = p
    probs = gl.convert_layout(p.to(dtype), operand)
    dv = warpgroup_mma(probs, dout_tile, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = factor * (dp - rows.slice(1, 1).load(layout))
    if is_edge:
        # A pair that is masked may have NaN in dp, from a value that no row keeps or from dout of a row without it.
        ds = keep_rows(ds, start, key_rows, grid)
    ds = ds.to(dtype)
    dk = warpgroup_mma(gl.convert_layout(ds, operand), q_tile, dk, is_async=True)
    if not IS_FIRST:
        channels.dscores.wait(used - 1)
        dq = start_dq(channels, used - 1, seen, form, 0, GROUP)
    channels.dscores.claim(used)
    part_of(channels.dscores, used, GROUP, 2).store(ds)
    fence_async_shared()
    channels.dscores.publish(used)
    if IS_FIRST:
        dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
        channels.queries.release(used)
    else:
        dk, dv = warpgroup_mma_wait(1, deps=[dk, dv])
        channels.queries.release(used)
        finish_dq(dq, dq_out, last_block, last_turn, held, channels, used - 1, seen, form, GROUP)
    return dk, dv


@gluon.jit
def blank_step(channels, used, form, GROUP: gl.constexpr):
    """A row block that adds nothing to dk and dv, and to dq nothing but the other warpgroup's keys."""
    channels.dscores.claim(used)
    blank = part_of(channels.dscores, used, GROUP, 2)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    blank.store(gl.zeros([GROUP_KEYS, form.block_m], channels.queries.buffers.dtype, layout))
    fence_async_shared()
    channels.dscores.publish(used)
    channels.queries.release(used)


@gluon.jit
def store_gradient(desc, grad, tile_ring, tiles, out_s, grid, GROUP: gl.constexpr):
    """Stores a warpgroup's 64 keys of dk or dv by TMA, once the store before it has left the buffer."""
    key = field(tile_ring, tiles, KEY) + GROUP * GROUP_KEYS
    b, head = field(tile_ring, tiles, SEQUENCE), field(tile_ring, tiles, HEAD)
    start_k, seqlen_k = field(tile_ring, tiles, START_K), field(tile_ring, tiles, SEQLEN_K)
    # As in fixed_part_of: addresses that the compiler takes for fixed it keeps, and spills.
    out_s = out_s.index(GROUP + (tiles >> 30))
    tma_store_wait(0)
    out_s.store(grad.to(desc.dtype))
    fence_async_shared()
    tma_store(desc, coordinates(b, start_k, seqlen_k, key, head, 0, grid.varlen), as_box(out_s, desc))


@gluon.jit
def scorer(dk_desc, dv_desc, dq_out, channels, out_s, grid, transform, form, GROUP: gl.constexpr):
    """One warpgroup: dk and dv of 64 keys of every tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_m, 16])
    grad_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_d, 16])
    zeros = gl.zeros([GROUP_KEYS, form.block_m], gl.float32, s_layout)
    # A tile's first row block may end before its second 64 keys begin to be kept.
    may_be_blank: gl.constexpr = grid.has_right and GROUP == 1 and form.block_m < grid.block_n
    tile_ring = channels.tiles
    tiles = 0
    used = 0
    seen = 0
    tile_ring.wait(tiles)
    while field(tile_ring, tiles, IS_TILE) > 0:
        dk = gl.zeros([GROUP_KEYS, form.block_d], gl.float32, grad_layout)
        dv = gl.zeros([GROUP_KEYS, form.block_d], gl.float32, grad_layout)
        key = field(tile_ring, tiles, KEY) + GROUP * GROUP_KEYS
        seqlen_q, seqlen_k = field(tile_ring, tiles, SEQLEN_Q), field(tile_ring, tiles, SEQLEN_K)
        key_rows = rows_of_keys(key, zeros, seqlen_q, seqlen_k, grid)
        left = field(tile_ring, tiles, M_MAX) - field(tile_ring, tiles, M_MIN)
        end = used + grid.group_size * left
        if end > used:
            channels.keys.wait(seen)
            channels.values.wait(seen)
            start = field(tile_ring, tiles, M_MIN) * form.block_m
            block = field(tile_ring, tiles, ROW_BLOCK)
            mine = my_turn(start, tile_ring, tiles, grid, dq_out[3])
            held = gl.to_tensor(-1)
            is_blank = False
            if may_be_blank:
                # The first row that keeps a key lies behind the first row block.
                is_blank = start + form.block_m <= key - (seqlen_k - seqlen_q) - grid.right
            if is_blank:
                blank_step(channels, used, form, GROUP)
            else:
                dk, dv = step(
                    channels, used, seen, dk, dv, zeros, dq_out, block, mine, held, start, key_rows, grid,
                    transform, form, True, GROUP,
                )  # fmt: skip
            used += 1
            while used < end:
                last_block = block
                start, block, left = next_rows(start, block, left, tile_ring, tiles, grid)
                dk, dv = step(
                    channels, used, seen, dk, dv, zeros, dq_out, last_block, mine, held, start, key_rows, grid,
                    transform, form, False, GROUP,
                )  # fmt: skip
                held = last_block
                mine = my_turn(start, tile_ring, tiles, grid, dq_out[3])
                used += 1
            channels.values.release(seen)
            channels.dscores.wait(used - 1)
            dq = start_dq(channels, used - 1, seen, form, 0, GROUP)
            # dv leaves under the last product.
            store_gradient(dv_desc, dv, tile_ring, tiles, out_s, grid, GROUP)
            finish_dq(dq, dq_out, block, mine, held, channels, used - 1, seen, form, GROUP)
            pass_turn(dq_out[3], block)
            channels.keys.release(seen)
            seen += 1
        else:
            store_gradient(dv_desc, dv, tile_ring, tiles, out_s, grid, GROUP)
        dk = dk * transform.softmax_scale
        store_gradient(dk_desc, dk, tile_ring, tiles, out_s, grid, GROUP)
        tile_ring.release(tiles)
        tiles += 1
        tile_ring.wait(tiles)
    tma_store_wait(0)


# No run-time argument is specialised, so that the compile-time arguments and the dtypes alone decide which build runs.
_RUN_TIME = [
    "turns_ptr", "counter_ptr", "cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "scale_log2", "softmax_scale", "softcap",
    "prescale", "seqlen_q", "seqlen_k", "batch", "num_heads_kv", "group_size", "left", "right", "heads_at_once",
]  # fmt: skip


@gluon.jit(do_not_specialize=_RUN_TIME)
def attention_backward(
    q_desc, k_desc, v_desc, dout_desc, rows_desc, dk_desc, dv_desc, dq_desc, dq_ptr, turns_ptr, counter_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, scale_log2, softmax_scale, softcap, prescale, seqlen_q, seqlen_k, batch,
    num_heads_kv, group_size, left, right, heads_at_once,
    BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, DS_STAGES: gl.constexpr, DQ_WIDTH: gl.constexpr, REGISTERS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr, FALLING: gl.constexpr,
    VARLEN: gl.constexpr,
):  # fmt: skip
    """Every tile's dk and dv, and what it adds to dq; a program an SM.

    Arguments, in groups: descriptors of the tensors, of the workspace's rows, and of its dq (None: add from registers);
    dq of the workspace, the turns (None: add in any order), the counter of tiles; cu_seqlens, None if dense; numbers of
    ``gradients.scales``; sizes, whose lengths are rows of the tensors if VARLEN; the band; then
    ``backward_tiles.Config`` and what the call has. ``backward_rows.prepare_rows`` must have run.
    """
    dtype: gl.constexpr = q_desc.dtype
    form = Form(BLOCK_M, BLOCK_D, GROUPS, DQ_WIDTH)
    row_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D], dtype)
    key_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUP_KEYS, BLOCK_D], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUP_KEYS, BLOCK_M], dtype)
    record_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = make_ring(dtype, [BLOCK_M, BLOCK_D], row_layout, STAGES, 2)
    channels = Channels(
        make_ring(gl.int32, [RECORD_SIZE], record_layout, 2, 2),
        queries,
        gl.allocate_shared_memory(gl.float32, [STAGES, 2, BLOCK_M], rows_desc.layout),
        make_ring_beside(queries, dtype, [BLOCK_M, BLOCK_D], row_layout),
        make_parts_ring(dtype, [GROUP_KEYS, BLOCK_D], key_layout, K_STAGES, GROUPS, 1, 2),
        make_parts_ring(dtype, [GROUP_KEYS, BLOCK_D], key_layout, V_STAGES, GROUPS, 1, GROUPS),
        make_parts_ring(dtype, [GROUP_KEYS, BLOCK_M], ds_layout, DS_STAGES, GROUPS, GROUPS, 2),
    )
    grid = KeyGrid(seqlen_q, seqlen_k, batch, num_heads_kv, group_size, left, right, heads_at_once,
                   HAS_LEFT, HAS_RIGHT, VARLEN, FALLING, BLOCK_M, GROUP_KEYS * GROUPS)  # fmt: skip
    transform = Transform(scale_log2, softmax_scale, softcap, prescale, HAS_SOFTCAP)
    if dq_desc is not None:
        dq_s = gl.allocate_shared_memory(gl.float32, [2, DQ_WIDTH // 2, 128], dq_desc.layout)
        dq0, dq1 = (dq_ptr, dq_desc, dq_s.index(0), turns_ptr), (dq_ptr, dq_desc, dq_s.index(1), turns_ptr)
    else:
        dq0, dq1 = (dq_ptr, None, None, turns_ptr), (dq_ptr, None, None, turns_ptr)
    if GROUPS == 1:
        probs = make_ring(dtype, [GROUP_KEYS, BLOCK_M], ds_layout, DS_STAGES, 1)
        gl.warp_specialize([
            (owner, (dv_desc, dq0, channels, probs, grid, transform, form, 0)),
            (owner, (dk_desc, dq1, channels, probs, grid, transform, form, 1)),
            (loader, (q_desc, k_desc, v_desc, dout_desc, rows_desc, counter_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
                      channels, grid, form)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        out_s = gl.allocate_shared_memory(dtype, [2, GROUP_KEYS, BLOCK_D], key_layout)
        gl.warp_specialize([
            (scorer, (dk_desc, dv_desc, dq0, channels, out_s, grid, transform, form, 0)),
            (scorer, (dk_desc, dv_desc, dq1, channels, out_s, grid, transform, form, 1)),
            (loader, (q_desc, k_desc, v_desc, dout_desc, rows_desc, counter_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
                      channels, grid, form)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
