"""Attention backward for Hopper: a program owns a block of keys and walks over the rows that see it.

    S^T = K Q^T      P^T = exp2(S^T * scale - origin)      dV += P^T dO
    dP^T = V dO^T    dS^T = P^T * (dP^T - delta)           dK += dS^T Q      dQ += dS K

Scores lie keys first, so that P^T and dS^T are left operands straight from registers. Two warpgroups compute, each with
64 keys of its own: its dK and dV stay in registers. Both put dS^T into shared memory, and each makes one half of the dQ
that all 128 keys add to a row block, one step later, and adds it to float32 global memory. One warp loads by TMA. For
head dims whose dK and dV fill the registers, both warpgroups score the same 64 keys and each owns half the columns.
Mathematics: docs/algorithm.md. Sources: Dao et al. 2022, arXiv:2205.14135, algorithm 4; Shah et al. 2024,
FlashAttention-3, arXiv:2407.08608, appendix B.1 (warp specialisation of the backward).
"""

# ruff: noqa: RET505 - Triton compiles what stands behind a return, decided or not.
# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
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
    turn,
)
from flashtile.backends.hopper.forward import lane_keys
from flashtile.backends.hopper.gluon_compat import (
    aggregate,
    as_box,
    thread_barrier,
    tma_add,
    tma_load,
    tma_store,
    tma_store_wait,
)
from flashtile.backends.hopper.pipeline import Ring, make_ring, make_ring_beside
from flashtile.backends.hopper.schedule import coordinates, field
from flashtile.backends.vocab import mask, quick_scores, softmax

LOG2_E = softmax.LOG2_E
GROUP_KEYS = gl.constexpr(64)
# No row is as far off.
FAR = gl.constexpr(2**30)


@aggregate
class Transform:
    """How products become exponents of 2; the same for every block. ``prescale`` is what a softcap's exponent needs."""

    scale_log2: gl.tensor
    softmax_scale: gl.tensor
    softcap: gl.tensor
    prescale: gl.tensor
    has_softcap: gl.constexpr


@aggregate
class Form:
    """What shapes the code: ``backward_tiles.Config`` as the roles need it."""

    block_m: gl.constexpr
    block_d: gl.constexpr
    grad_d: gl.constexpr
    groups: gl.constexpr
    dq_width: gl.constexpr
    dq_share: gl.constexpr
    staged: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, block_m, block_d, groups, dq_width, staged):
        self.block_m = gl.constexpr(block_m)
        self.block_d = gl.constexpr(block_d)
        self.grad_d = gl.constexpr(block_d if groups == 2 else block_d // 2)
        self.groups = gl.constexpr(groups)
        self.dq_width = gl.constexpr(dq_width)
        self.dq_share = gl.constexpr(block_d if block_m == 128 else block_d // 2)
        self.staged = gl.constexpr(staged)


@aggregate
class Channels:
    """What the warps hand each other. Queries, what belongs to their rows, and dout are claimed and released as one."""

    tiles: Ring
    queries: Ring
    rows: gl.shared_memory_descriptor
    dout: Ring
    keys: Ring
    values: Ring
    dscores: Ring


@gluon.jit
def part_of(ring, use, part, PARTS: gl.constexpr):
    """One of the PARTS buffers that a use of a ring consists of."""
    return ring.buffers.index(use % ring.stages * PARTS + part)


@gluon.jit
def fixed_part_of(ring, use, part, step, PARTS: gl.constexpr):
    """``part_of`` for a use that lasts many steps, computed anew in each.

    The compiler does not see that it is the same: it would keep addresses for each product in registers, which spill.
    """
    return ring.buffers.index(use % ring.stages * PARTS + part + (step >> 30))


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


@aggregate
class KeyRows:
    """Which rows keep each of a warpgroup's 64 keys.

    The first and the last ones come as ``lane_keys``: a thread compares one number a key with its column numbers,
    which are immediates. Rows from ``clear_from`` on and before ``clear_to`` keep all 64.
    """

    first: gl.tensor
    last: gl.tensor
    clear_from: gl.tensor
    clear_to: gl.tensor


@gluon.jit
def rows_of_keys(key, like, seqlen_q, seqlen_k, grid):
    """The ``KeyRows`` of 64 keys from ``key`` on. A key's rows are what a row's keys are, with the sides exchanged."""
    keys = key + gl.arange(0, GROUP_KEYS, gl.SliceLayout(1, like.type.layout))
    shift = seqlen_k - seqlen_q
    first = gl.where(keys < seqlen_k, mask.first_key(keys - shift, grid.right, grid.has_right), FAR)
    last = mask.last_key(keys - shift, seqlen_q, grid.left, grid.has_left)
    clear_from = mask.first_key(key + (GROUP_KEYS - 1) - shift, grid.right, grid.has_right)
    clear_from = gl.where(key + GROUP_KEYS > seqlen_k, FAR, clear_from)
    clear_to = mask.last_key(key - shift, FAR, grid.left, grid.has_left) + 1
    first = lane_keys(first, like, GROUP_KEYS, grid.block_m)
    return KeyRows(first, lane_keys(last, like, GROUP_KEYS, grid.block_m), clear_from, clear_to)


@gluon.jit
def is_cut(start, key_rows, grid):
    """Whether some row of the block from ``start`` on does not keep some of the keys."""
    cut = start < key_rows.clear_from
    if grid.has_left:
        cut = cut | (start + grid.block_m > key_rows.clear_to)
    return cut


@gluon.jit
def keep_rows(x, start, key_rows, grid):
    """What [64, block_m] is in rows ``start ...``, 0 where a row does not keep a key."""
    M: gl.constexpr = GROUP_KEYS
    N: gl.constexpr = grid.block_m
    t = gl.reshape(x, [M, N // 8, 4, 2])
    layout: gl.constexpr = t.type.layout
    tens = gl.arange(0, N // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    ones = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    cols = 8 * tens[None, :, None, None] + ones[None, None, None, :]
    t = gl.where(cols >= (key_rows.first - start)[:, None, :, None], t, 0.0)
    if grid.has_left:
        t = gl.where(cols <= (key_rows.last - start)[:, None, :, None], t, 0.0)
    return gl.convert_layout(gl.reshape(t, [M, N]), x.type.layout)


@gluon.jit
def probabilities(s, origin, transform):
    """Normalised probabilities, and what dscores have as factor besides ``dprobs - delta``."""
    if transform.has_softcap:
        # Scores as shares of the cap.
        s = quick_scores.softcap(s, 1.0, transform.prescale)
        p = gl.exp2(s * (transform.softcap * LOG2_E) - origin)
        return p, p * (1.0 - s * s)
    else:
        p = gl.exp2(s * transform.scale_log2 - origin)
        return p, p


# dq of a row block is computed by both warpgroups: each has 64 of 128 rows, or half the columns of 64 rows. Where it
# goes comes as a tuple: dq of the workspace; its descriptor and a buffer, or None: without TMA; the turns, or None.


@gluon.jit
def start_dq(channels, used, seen, form, PIECE: gl.constexpr, GROUP: gl.constexpr):
    """Starts the product for one piece of this warpgroup's share of dq."""
    width: gl.constexpr = form.dq_width
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    row: gl.constexpr = 64 * GROUP if form.block_m == 128 else 0
    col: gl.constexpr = PIECE * width + (0 if form.block_m == 128 else GROUP * form.dq_share)
    dq = gl.zeros([64, width], gl.float32, layout)
    for part in gl.static_range(form.groups):
        ds_tile = part_of(channels.dscores, used, part, form.groups).slice(row, 64, dim=1).permute((1, 0))
        k_tile = fixed_part_of(channels.keys, seen, part, used, form.groups).slice(col, width, dim=1)
        dq = warpgroup_mma(ds_tile, k_tile, dq, use_acc=part > 0, is_async=True)
    return dq


@gluon.jit
def add_accumulators(dq_out, offset, acc, WIDTH: gl.constexpr):
    """Adds [64, WIDTH] to dq of the workspace from element ``offset`` on, in the order of ``backward_rows``."""
    dq_ptr, dq_desc, dq_s, _ = dq_out
    t = gl.reshape(acc, [4, 2, 8, WIDTH // 8, 4, 2])
    t = gl.reshape(gl.permute(t, (3, 0, 2, 4, 1, 5)), [WIDTH // 8, 128, 4])
    if dq_desc is not None:
        tma_store_wait(0)
        dq_s.store(gl.reshape(t, [WIDTH // 2, 128]))
        fence_async_shared()
        tma_add(dq_desc, [(offset // 128).to(gl.int32), 0], dq_s)
    else:
        # Straight from registers, four of a thread's numbers at once.
        layout: gl.constexpr = t.type.layout
        eights = gl.arange(0, WIDTH // 8, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        threads = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        fours = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
        offsets = 512 * eights[:, None, None] + (4 * threads[None, :, None] + fours[None, None, :])
        gl.atomic_add(dq_ptr + offset + offsets, t, sem="relaxed")


@gluon.jit
def pass_turn(turns_ptr, block):
    """Moves a row block's turn on, if there are turns and the block is one: other tiles may add to it."""
    if turns_ptr is not None:
        thread_barrier()
        gl.atomic_add(turns_ptr + block, 1, mask=block >= 0, sem="release")


@gluon.jit
def finish_dq(dq, dq_out, block, mine, held, channels, used, seen, form, GROUP: gl.constexpr):
    """Adds this warpgroup's share of dq to row block ``block``, when its turn ``mine`` has come if there are turns.

    The turn of block ``held``, to which the step before has added (-1: none), is passed on now: its adds have had time
    to finish.
    """
    width: gl.constexpr = form.dq_width
    pieces: gl.constexpr = form.dq_share // width
    turns_ptr = dq_out[3]
    offset = block.to(gl.int64) * (form.block_m * form.block_d) + GROUP * (64 * form.dq_share)
    dq = warpgroup_mma_wait(0, deps=[dq])
    pass_turn(turns_ptr, held)
    if turns_ptr is not None:
        while gl.load(turns_ptr + block, volatile=True) < mine:
            pass
        # An atomic orders what follows it behind the adds of those who moved the turn; the barrier does so for the
        # threads that take no part in it.
        gl.atomic_add(turns_ptr + block, 0, sem="acquire")
        thread_barrier()
    for piece in gl.static_range(1, pieces):
        add_accumulators(dq_out, offset + (piece - 1) * (64 * width), dq, width)
        # Keeps the adds in front of the next product, which takes their registers.
        thread_barrier()
        dq = start_dq(channels, used, seen, form, piece, GROUP)
        dq = warpgroup_mma_wait(0, deps=[dq])
    channels.dscores.release(used)
    add_accumulators(dq_out, offset + (pieces - 1) * (64 * width), dq, width)


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
    own: gl.constexpr = GROUP if form.groups == 2 else 0
    q_tile, dout_tile = channels.queries.at(used), channels.dout.at(used)
    k_tile = fixed_part_of(channels.keys, seen, own, used, form.groups)
    v_tile = fixed_part_of(channels.values, seen, own, used, form.groups)
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
    if form.groups == 1:
        q_tile = q_tile.slice(GROUP * form.grad_d, form.grad_d, dim=1)
        dout_tile = dout_tile.slice(GROUP * form.grad_d, form.grad_d, dim=1)
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
    if form.groups > GROUP:
        channels.dscores.claim(used)
        part_of(channels.dscores, used, GROUP, form.groups).store(ds)
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
    blank = part_of(channels.dscores, used, GROUP % form.groups, form.groups)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    blank.store(gl.zeros([GROUP_KEYS, form.block_m], channels.queries.buffers.dtype, layout))
    fence_async_shared()
    channels.dscores.publish(used)
    channels.queries.release(used)


@gluon.jit
def store(desc, at, buffer, tile):
    """Stores a tile by TMA, once the store before it has left the buffer."""
    tma_store_wait(0)
    buffer.store(tile)
    fence_async_shared()
    tma_store(desc, at, as_box(buffer, desc))


@gluon.jit
def group_key(tile_ring, tiles, form, GROUP: gl.constexpr):
    """The first of a warpgroup's keys of a tile."""
    key = field(tile_ring, tiles, KEY)
    return key + GROUP * GROUP_KEYS if form.groups == 2 else key


@gluon.jit
def store_gradient(desc, grad, tile_ring, tiles, out_s, grid, form, GROUP: gl.constexpr):
    """Stores a warpgroup's 64 keys of dk or dv, or its half of their columns; in two halves if ``staged``."""
    half: gl.constexpr = form.grad_d // 2
    col: gl.constexpr = GROUP * form.grad_d if form.groups == 1 else 0
    key = group_key(tile_ring, tiles, form, GROUP)
    b, head = field(tile_ring, tiles, SEQUENCE), field(tile_ring, tiles, HEAD)
    start_k, seqlen_k = field(tile_ring, tiles, START_K), field(tile_ring, tiles, SEQLEN_K)
    grad = grad.to(desc.dtype)
    # As in fixed_part_of: addresses that the compiler takes for fixed it keeps, and spills.
    out_s = out_s.index(GROUP + (tiles >> 30))
    if form.staged:
        low, high = gl.split(gl.permute(gl.reshape(grad, [GROUP_KEYS, 2, half]), (0, 2, 1)))
        store(desc, coordinates(b, start_k, seqlen_k, key, head, col, grid.varlen), out_s, low)
        store(desc, coordinates(b, start_k, seqlen_k, key, head, col + half, grid.varlen), out_s, high)
    else:
        store(desc, coordinates(b, start_k, seqlen_k, key, head, col, grid.varlen), out_s, grad)


@gluon.jit
def next_rows(start, block, left, tile_ring, tiles, grid):
    """The row block behind one: its first row, its place in the workspace, and how many of the head are left with it.

    Behind a head's last one comes the first one of the next head that shares the keys.
    """
    start += grid.block_m
    block += 1
    left -= 1
    if left == 0:
        left = field(tile_ring, tiles, M_MAX) - field(tile_ring, tiles, M_MIN)
        start -= left * grid.block_m
        block += row_blocks_a_head(grid) - left
    return start, block, left


@gluon.jit
def my_turn(start, tile_ring, tiles, grid, turns_ptr):
    """What the turn of the rows from ``start`` on must have reached: two warpgroups move it on once each a tile.

    0 without turns.
    """
    if turns_ptr is not None:
        key = field(tile_ring, tiles, KEY)
        seqlen_q, seqlen_k = field(tile_ring, tiles, SEQLEN_Q), field(tile_ring, tiles, SEQLEN_K)
        return 2 * turn(start, key, seqlen_q, seqlen_k, grid)
    else:
        return 0


@gluon.jit
def scorer(dk_desc, dv_desc, dq_out, channels, out_s, grid, transform, form, GROUP: gl.constexpr):
    """One warpgroup: dk and dv of 64 keys of every tile, or of half their columns if both have the same keys."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_m, 16])
    grad_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.grad_d, 16])
    zeros = gl.zeros([GROUP_KEYS, form.block_m], gl.float32, s_layout)
    # A tile's first row block may end before its second 64 keys begin to be kept.
    may_be_blank: gl.constexpr = grid.has_right and GROUP == 1 and form.groups == 2 and form.block_m < grid.block_n
    tile_ring = channels.tiles
    tiles = 0
    used = 0
    seen = 0
    tile_ring.wait(tiles)
    while field(tile_ring, tiles, IS_TILE) > 0:
        dk = gl.zeros([GROUP_KEYS, form.grad_d], gl.float32, grad_layout)
        dv = gl.zeros([GROUP_KEYS, form.grad_d], gl.float32, grad_layout)
        key = group_key(tile_ring, tiles, form, GROUP)
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
            store_gradient(dv_desc, dv, tile_ring, tiles, out_s, grid, form, GROUP)
            finish_dq(dq, dq_out, block, mine, held, channels, used - 1, seen, form, GROUP)
            pass_turn(dq_out[3], block)
            channels.keys.release(seen)
            seen += 1
        else:
            store_gradient(dv_desc, dv, tile_ring, tiles, out_s, grid, form, GROUP)
        dk = dk * transform.softmax_scale
        store_gradient(dk_desc, dk, tile_ring, tiles, out_s, grid, form, GROUP)
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
    V_STAGES: gl.constexpr, DS_STAGES: gl.constexpr, DQ_WIDTH: gl.constexpr, STAGED: gl.constexpr,
    REGISTERS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    FALLING: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """Every tile's dk and dv, and what it adds to dq; a program an SM.

    Arguments, in groups: descriptors of the tensors, of the workspace's rows, and of its dq (None: add from registers);
    dq of the workspace, the turns (None: add in any order), the counter of tiles; cu_seqlens, None if dense; numbers of
    ``gradients.scales``; sizes, whose lengths are rows of the tensors if VARLEN; the band; then
    ``backward_tiles.Config`` and what the call has. ``backward_rows.prepare_rows`` must have run.
    """
    dtype: gl.constexpr = q_desc.dtype
    form = Form(BLOCK_M, BLOCK_D, GROUPS, DQ_WIDTH, STAGED)
    out_d: gl.constexpr = form.grad_d // 2 if STAGED else form.grad_d
    row_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D], dtype)
    key_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUP_KEYS, BLOCK_D], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUP_KEYS, BLOCK_M], dtype)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUP_KEYS, out_d], dtype)
    record_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = make_ring(dtype, [BLOCK_M, BLOCK_D], row_layout, STAGES, 2)
    channels = Channels(
        make_ring(gl.int32, [RECORD_SIZE], record_layout, 2, 2),
        queries,
        gl.allocate_shared_memory(gl.float32, [STAGES, 2, BLOCK_M], rows_desc.layout),
        make_ring_beside(queries, dtype, [BLOCK_M, BLOCK_D], row_layout),
        make_parts_ring(dtype, [GROUP_KEYS, BLOCK_D], key_layout, K_STAGES, GROUPS, 1),
        make_parts_ring(dtype, [GROUP_KEYS, BLOCK_D], key_layout, V_STAGES, GROUPS, 1),
        make_parts_ring(dtype, [GROUP_KEYS, BLOCK_M], ds_layout, DS_STAGES, GROUPS, GROUPS),
    )
    out_s = gl.allocate_shared_memory(dtype, [2, GROUP_KEYS, out_d], out_layout)
    grid = KeyGrid(seqlen_q, seqlen_k, batch, num_heads_kv, group_size, left, right, heads_at_once,
                   HAS_LEFT, HAS_RIGHT, VARLEN, FALLING, BLOCK_M, GROUP_KEYS * GROUPS)  # fmt: skip
    transform = Transform(scale_log2, softmax_scale, softcap, prescale, HAS_SOFTCAP)
    if dq_desc is not None:
        dq_s = gl.allocate_shared_memory(gl.float32, [2, DQ_WIDTH // 2, 128], dq_desc.layout)
        dq0, dq1 = (dq_ptr, dq_desc, dq_s.index(0), turns_ptr), (dq_ptr, dq_desc, dq_s.index(1), turns_ptr)
    else:
        dq0, dq1 = (dq_ptr, None, None, turns_ptr), (dq_ptr, None, None, turns_ptr)
    gl.warp_specialize([
        (scorer, (dk_desc, dv_desc, dq0, channels, out_s, grid, transform, form, 0)),
        (scorer, (dk_desc, dv_desc, dq1, channels, out_s, grid, transform, form, 1)),
        (loader, (q_desc, k_desc, v_desc, dout_desc, rows_desc, counter_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
                  channels, grid, form)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


@gluon.jit
def make_parts_ring(dtype: gl.constexpr, tile: gl.constexpr, layout: gl.constexpr, stages: gl.constexpr,
                    parts: gl.constexpr, producers: gl.constexpr):  # fmt: skip
    """A ring whose uses consist of ``parts`` buffers each (``part_of``), released by both warpgroups."""
    buffers = gl.allocate_shared_memory(dtype, [stages * parts] + tile, layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=producers)
        mbarrier.init(empty.index(stage), count=2)
    return Ring(buffers, full, empty, stages)
