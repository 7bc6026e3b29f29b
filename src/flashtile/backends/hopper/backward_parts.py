"""What both forms of the Hopper backward are made of: their channels, masks, probabilities, and dq."""

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

from flashtile.backends.hopper.backward_schedule import KEY, M_MAX, M_MIN, SEQLEN_K, SEQLEN_Q, row_blocks_a_head, turn
from flashtile.backends.hopper.gluon_compat import aggregate, thread_barrier, tma_add, tma_store_wait
from flashtile.backends.hopper.lanes import lane_keys
from flashtile.backends.hopper.pipeline import Ring
from flashtile.backends.hopper.schedule import field
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
    groups: gl.constexpr
    dq_width: gl.constexpr
    dq_share: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, block_m, block_d, groups, dq_width):
        self.block_m = gl.constexpr(block_m)
        self.block_d = gl.constexpr(block_d)
        self.groups = gl.constexpr(groups)
        self.dq_width = gl.constexpr(dq_width)
        self.dq_share = gl.constexpr(block_d if block_m == 128 else block_d // 2)


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
def make_parts_ring(dtype: gl.constexpr, tile: gl.constexpr, layout: gl.constexpr, stages: gl.constexpr,
                    parts: gl.constexpr, producers: gl.constexpr, consumers: gl.constexpr):  # fmt: skip
    """A ring whose uses consist of ``parts`` buffers each (``part_of``)."""
    buffers = gl.allocate_shared_memory(dtype, [stages * parts] + tile, layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=producers)
        mbarrier.init(empty.index(stage), count=consumers)
    return Ring(buffers, full, empty, stages)


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
