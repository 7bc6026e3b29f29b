"""Attention forward for Hopper: a warp finds tiles, a warp loads by TMA, warpgroups of 64 rows compute with WGMMA.

The mathematics is in docs/algorithm.md. For each block of keys a warpgroup starts the scores of the next block, then
multiplies the probabilities of this block with its values; with two warpgroups the softmax of the next scores runs
under that product, with three it runs under the products of the others.
At the end of a tile the first scores of the next tile stand in for the next block's, so the tensor cores have work
while a tile's output is normalised and stored. Source of the schedule: Shah et al. 2024, FlashAttention-3,
arXiv:2407.08608, section 3 (warp specialisation, intra-warpgroup overlap).
"""

# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from flashtile.backends.hopper.columns import (
    add_products,
    also,
    load,
    make_rings,
    of_rows,
    rescale_rows,
    start_scores,
    store,
    wait_for_products,
    zero_accumulators,
)
from flashtile.backends.hopper.gluon_compat import tma_store_wait
from flashtile.backends.hopper.inline_asm import after_stores, hold, pass_turn, take_turn
from flashtile.backends.hopper.lanes import keep_keys, lane_keys, lane_sums, row_tops
from flashtile.backends.hopper.mend import is_suspect, mend
from flashtile.backends.hopper.pipeline import make_ring
from flashtile.backends.hopper.schedule import (
    GROUPS_AT,
    HEAD,
    HEAD_KV,
    N_BLOCK_MAX,
    N_BLOCK_MIN,
    N_FULL_MAX,
    N_FULL_MIN,
    POSITION,
    RECORD_SIZE,
    ROW,
    SEQLEN_K,
    SEQLEN_Q,
    SEQUENCE,
    SKIPPED,
    START_K,
    START_Q,
    Sizes,
    field,
    lse_of,
    next_tile,
    publish_tile,
)  # fmt: skip
from flashtile.backends.hopper.transform import Transform
from flashtile.backends.vocab import mask, softmax

LOG2_E = softmax.LOG2_E
# Keys and values that are worked on at the same time: the L2 cache has 50 MB, and queries and outputs pass through it.
CACHED_BYTES = gl.constexpr(2**25)


@gluon.jit
def scheduler(tile_ring, sizes, cu_seqlens_q_ptr, cu_seqlens_k_ptr, counter_ptr):
    """Finds the tiles, ahead of the roles that work on them: its divisions take longer than loading a short tile."""
    tiles = 0
    step = 0
    is_end = False
    while not is_end:
        tile_ring.claim(tiles)
        tile = next_tile(step, sizes, cu_seqlens_q_ptr, cu_seqlens_k_ptr, counter_ptr)
        step = tile.step
        is_end = tile.is_end
        publish_tile(tile_ring, tiles, tile, sizes)
        tiles += 1


@gluon.jit
def producer(q_desc, k_desc, v_desc, tile_ring, groups, k_rings, v_rings, sizes, BLOCK_D: gl.constexpr,
             BLOCK_DV: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Loads each tile's queries, and its key and value blocks from the last to the first.

    In the order in which they are needed: a block's values come behind the keys of the block after it, which are scored
    first. With OVERLAP that block may be the next tile's. ``groups`` holds each warpgroup's queries.
    """
    tiles = 0
    used = 0
    tile_ring.wait(tiles)
    n_block = field(tile_ring, tiles, N_BLOCK_MAX, 1)
    while n_block > 0:
        n_block_min = field(tile_ring, tiles, N_BLOCK_MIN, 1)
        row = field(tile_ring, tiles, ROW, 1)
        head = field(tile_ring, tiles, HEAD, 1)
        b = field(tile_ring, tiles, SEQUENCE, 1)
        start_q, seqlen_q = 0, 0
        if sizes.varlen:
            start_q = field(tile_ring, tiles, START_Q, 1)
            seqlen_q = field(tile_ring, tiles, SEQLEN_Q, 1)
        for group in gl.static_range(sizes.groups):
            first = row + group * sizes.block_m
            load(q_desc, groups[group], tiles, b, start_q, seqlen_q, first, head, BLOCK_D, sizes.varlen)
        n_block -= 1
        load_block(k_desc, k_rings, used, tile_ring, tiles, n_block, sizes, BLOCK_D)
        if OVERLAP:
            load_last_values(v_desc, v_rings, used - 1, tile_ring, tiles - 1, sizes, BLOCK_DV)
        while n_block > n_block_min:
            n_block -= 1
            load_block(k_desc, k_rings, used + 1, tile_ring, tiles, n_block, sizes, BLOCK_D)
            load_block(v_desc, v_rings, used, tile_ring, tiles, n_block + 1, sizes, BLOCK_DV)
            used += 1
        if not OVERLAP:
            load_last_values(v_desc, v_rings, used, tile_ring, tiles, sizes, BLOCK_DV)
        used += 1
        tiles += 1
        tile_ring.wait(tiles)
        n_block = field(tile_ring, tiles, N_BLOCK_MAX, 1)
    if OVERLAP:
        load_last_values(v_desc, v_rings, used - 1, tile_ring, tiles - 1, sizes, BLOCK_DV)


@gluon.jit
def load_last_values(v_desc, v_rings, use, tile_ring, tiles, sizes, BLOCK_DV: gl.constexpr):
    """Loads the values that a tile needs last, which ends the use of its record. No tile comes before 0."""
    if tiles >= 0:
        n_block = field(tile_ring, tiles, N_BLOCK_MIN, 1)
        load_block(v_desc, v_rings, use, tile_ring, tiles, n_block, sizes, BLOCK_DV)
        tile_ring.release(tiles)


@gluon.jit
def load_block(desc, rings, use, tile_ring, tiles, n_block, sizes, COLS: gl.constexpr):
    """Starts the load of a block of a tile's keys or values."""
    b = field(tile_ring, tiles, SEQUENCE, 1)
    head = field(tile_ring, tiles, HEAD_KV, 1)
    start_k, seqlen_k = 0, 0
    if sizes.varlen:
        start_k = field(tile_ring, tiles, START_K, 1)
        seqlen_k = field(tile_ring, tiles, SEQLEN_K, 1)
    load(desc, rings, use, b, start_k, seqlen_k, n_block * sizes.block_n, head, COLS, sizes.varlen)


@gluon.jit
def shape_scores(s, transform, sizes, n_block, is_edge, first_keys, last_keys, MASKED: gl.constexpr):
    """Softcap and mask: what happens to the scores before the softmax."""
    s = transform.scores(s)
    # MASKED is decided when the kernel is compiled, is_edge when it runs.
    if MASKED:  # noqa: SIM102
        if is_edge:
            start = n_block * sizes.block_n
            s = keep_keys(s, start, first_keys, last_keys, sizes.has_left, sizes.block_m, sizes.block_n)
    return s


@gluon.jit
def operand(probs, dtype: gl.constexpr, layout: gl.constexpr):
    """Probabilities as the left operand of the product with the values."""
    return gl.convert_layout(probs.to(dtype), layout)


@gluon.jit
def step(q_rings, tiles, k_rings, v_rings, used, probs, accs, factor, row_max, row_sum, zeros, sizes, transform,
         n_block, is_edge, is_last, first_keys, last_keys, GROUP: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Multiplies the probabilities of use ``used`` with its values while block ``n_block``, the next use, is scored.

    What was accumulated before is due for ``factor``: under the scores' product, or before the warpgroup's turn.

    One loop runs over masked and unmasked blocks: where packed probabilities are carried from one loop into another,
    they are taken apart and put together by 64 byte permutes a step.
    """
    p_layout: gl.constexpr = probs.type.layout
    k_rings[0].wait(used + 1)
    if sizes.in_turns:
        accs = rescale_rows(accs, factor)
        row_max = take_turn(row_max, GROUP)
    s = start_scores(q_rings, tiles, k_rings, used + 1, zeros)
    if not sizes.in_turns:
        accs = rescale_rows(accs, factor)
    v_rings[0].wait(used)
    accs = add_products(probs, v_rings, used, accs)
    if sizes.in_turns:
        row_max = pass_turn(row_max, (GROUP + 1) % sizes.groups)
    s = warpgroup_mma_wait(len(accs), deps=[s])
    k_rings[0].release(used + 1)
    if not OVERLAP:
        # The only buffer of the queries: the next tile's are loaded while this one ends.
        q_rings[0].release(tiles, is_last)

    s = shape_scores(s, transform, sizes, n_block, is_edge, first_keys, last_keys, sizes.has_edges)
    row_max, origin, factor = softmax.raise_max(row_max, row_tops(s, row_max) * transform.scale_log2, sizes.has_edges)
    e = softmax.exponentials(s, transform.scale_log2, origin)
    sum_factor = gl.convert_layout(factor, gl.SliceLayout(1, row_sum.type.layout))
    row_sum = row_sum * sum_factor[:, None] + lane_sums(e, sizes.block_m, sizes.block_n)
    if sizes.groups == 2:
        # Two others keep the tensor cores busy where there are three; then an early wait costs less than a late one.
        row_sum = hold(row_sum)
    probs = operand(e, probs.dtype, p_layout)

    accs = wait_for_products(accs)
    v_rings[0].release(used)
    return probs, accs, factor, row_max, row_sum


@gluon.jit
def first_scores(q_rings, tiles, k_rings, used, skipped, is_tile, zeros):
    """Starts a tile's first scores; without a tile, those of whatever the buffers hold."""
    k_rings[0].skip(used, skipped, is_tile)
    q_rings[0].wait(tiles, is_tile)
    k_rings[0].wait(used + skipped, is_tile)
    return start_scores(q_rings, tiles, k_rings, used + skipped, zeros)


@gluon.jit
def first_probs(s, transform, sizes, n_block, is_edge, first_keys, last_keys):
    """The softmax state after a tile's first block: (probs, row_max, row_sum)."""
    s = shape_scores(s, transform, sizes, n_block, is_edge, first_keys, last_keys, True)
    nothing = gl.full([sizes.block_m], float("-inf"), gl.float32, gl.SliceLayout(1, s.type.layout))
    # A tile may have no key at all, whatever the mask.
    row_max, origin, _ = softmax.raise_max(nothing, gl.max(s, 1) * transform.scale_log2, True)
    e = softmax.exponentials(s, transform.scale_log2, origin)
    return e, row_max, lane_sums(e, sizes.block_m, sizes.block_n)


@gluon.jit
def epilogue(accs, row_max, row_sum, tile_ring, tiles, sizes, transform, out_desc, lse_ptr, sinks_ptr, out_s,
             left, GROUP: gl.constexpr):  # fmt: skip
    """Normalises a tile's output, and stores it and lse; returns the rows that are left, see mend.py."""
    rows_layout: gl.constexpr = row_max.type.layout
    if sizes.has_left or sizes.has_right:
        suspect = is_suspect(accs, row_max)
    head = field(tile_ring, tiles, HEAD)
    total = gl.convert_layout(gl.sum(row_sum, 1), rows_layout)
    if sinks_ptr is not None:
        sink = gl.load(sinks_ptr + head).to(gl.float32)
        if sizes.varlen:
            # Rows behind the last sequence belong to nobody.
            sink = gl.where(field(tile_ring, tiles, SEQUENCE) < sizes.batch, sink, float("-inf"))
        factor, row_max, total = softmax.add_sink(row_max, total, sink)
        scale, lse = softmax.finalise(row_max, total)
        scale = scale * factor
    else:
        scale, lse = softmax.finalise(row_max, total)
    out = ()
    for i in gl.static_range(len(accs)):
        out = also(out, (accs[i] * of_rows(scale, accs[i])[:, None]).to(out_desc.dtype))
    row = field(tile_ring, tiles, ROW) + GROUP * sizes.block_m
    b = field(tile_ring, tiles, SEQUENCE)
    start_q, seqlen_q = 0, sizes.seqlen_q
    if sizes.varlen:
        start_q, seqlen_q = field(tile_ring, tiles, START_Q), field(tile_ring, tiles, SEQLEN_Q)
    rows = row + gl.arange(0, sizes.block_m, rows_layout)
    place = lse_of(b, head, start_q, sizes)
    if sizes.has_left or sizes.has_right:
        # A note is a number, not a float: floats may come out with other bits.
        lse = gl.where(suspect, left, lse.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
        left = gl.where(suspect & (row < seqlen_q), place + row, left)
    stages: gl.constexpr = out_s.shape[0] // sizes.groups
    store(out_desc, out, out_s, GROUP * stages, stages, b, start_q, seqlen_q, row, head, sizes.varlen)
    gl.store(lse_ptr + place + rows, lse, mask=rows < seqlen_q)
    return left


@gluon.jit
def open_tile(tile_ring, tiles, sizes, rows, like, GROUP: gl.constexpr):
    """Waits for a tile's record and reads what its loop needs."""
    tile_ring.wait(tiles)
    n_block_max = field(tile_ring, tiles, N_BLOCK_MAX)
    n_block_min = field(tile_ring, tiles, N_BLOCK_MIN)
    skipped, n_full_min = 0, 0
    positions, seqlen_k = rows, sizes.seqlen_k
    # Without a band, all blocks are full but the one in which the keys end.
    n_full_max = n_block_max - gl.where((seqlen_k & (sizes.block_n - 1)) > 0, 1, 0)
    if sizes.has_left:
        n_full_min = field(tile_ring, tiles, GROUPS_AT + 4 * GROUP + N_FULL_MIN)
    if sizes.has_right:
        skipped = field(tile_ring, tiles, GROUPS_AT + 4 * GROUP + SKIPPED)
    if sizes.has_left or sizes.has_right or sizes.varlen:
        n_full_max = field(tile_ring, tiles, GROUPS_AT + 4 * GROUP + N_FULL_MAX)
        positions += field(tile_ring, tiles, POSITION)
        seqlen_k = field(tile_ring, tiles, SEQLEN_K)
    n_block = n_block_max - skipped - 1
    first_keys = mask.first_key(positions, sizes.left, sizes.has_left)
    last_keys = mask.last_key(positions, seqlen_k, sizes.right, sizes.has_right)
    first_keys = lane_keys(first_keys, like, sizes.block_m, sizes.block_n)
    last_keys = lane_keys(last_keys, like, sizes.block_m, sizes.block_n)
    return n_block_max > 0, n_block, n_block_min, n_full_min, n_full_max, skipped, first_keys, last_keys


@gluon.jit
def consumer(out_desc, lse_ptr, sinks_ptr, tile_ring, q_rings, k_rings, v_rings, out_s, left_s, sizes, transform,
             GROUP: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """One warpgroup: 64 rows of every tile."""
    BLOCK_M: gl.constexpr = sizes.block_m
    BLOCK_N: gl.constexpr = sizes.block_n
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    dtype: gl.constexpr = out_desc.dtype
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, s_layout)
    rows = GROUP * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, s_layout))

    tiles = 0
    used = 0
    is_tile, n_block, n_block_min, n_full_min, n_full_max, skipped, first_keys, last_keys = open_tile(
        tile_ring, tiles, sizes, rows, zeros, GROUP
    )
    s = first_scores(q_rings, tiles, k_rings, used, skipped, is_tile, zeros)
    s = warpgroup_mma_wait(0, deps=[s])
    v_rings[0].skip(used, skipped, is_tile)
    used += skipped
    k_rings[0].release(used, is_tile)
    if not OVERLAP:
        q_rings[0].release(tiles, is_tile & (n_block == n_block_min))
    is_edge = (n_block < n_full_min) | (n_block >= n_full_max)
    e, row_max, row_sum = first_probs(s, transform, sizes, n_block, is_edge, first_keys, last_keys)
    probs = operand(e, dtype, p_layout)

    left = gl.full([BLOCK_M], -1, gl.int32, rows.type.layout)
    if sizes.in_turns and sizes.groups - 1 == GROUP:
        row_max = pass_turn(row_max, 0)
    while is_tile:
        accs = zero_accumulators(BLOCK_M, v_rings)
        factor = gl.full([BLOCK_M], 1.0, gl.float32, row_max.type.layout)
        # A turn a block, also of the one that this warpgroup leaves out.
        if sizes.in_turns and sizes.has_right:  # noqa: SIM102
            if skipped > 0:
                row_max = pass_turn(take_turn(row_max, GROUP), (GROUP + 1) % sizes.groups)
        while n_block > n_block_min:
            n_block -= 1
            is_edge = (n_block < n_full_min) | (n_block >= n_full_max)
            probs, accs, factor, row_max, row_sum = step(
                q_rings, tiles, k_rings, v_rings, used, probs, accs, factor, row_max, row_sum, zeros, sizes, transform,
                n_block, is_edge, n_block == n_block_min, first_keys, last_keys, GROUP, OVERLAP,
            )  # fmt: skip
            used += 1

        if OVERLAP:
            is_tile, n_block, n_block_min, n_full_min, n_full_max, skipped, first_keys, last_keys = open_tile(
                tile_ring, tiles + 1, sizes, rows, zeros, GROUP
            )
            is_edge = (n_block < n_full_min) | (n_block >= n_full_max)
            # The next tile's first scores, under the last values and the epilogue of this one. Behind the last tile
            # they are those of stale buffers, and nobody reads them.
            s = first_scores(q_rings, tiles + 1, k_rings, used + 1, skipped, is_tile, zeros)
            accs = rescale_rows(accs, factor)
            v_rings[0].wait(used)
            accs = add_products(probs, v_rings, used, accs)
            s = warpgroup_mma_wait(len(accs), deps=[s])
            k_rings[0].release(used + 1 + skipped, is_tile)
            q_rings[0].release(tiles)
            e, next_max, next_sum = first_probs(s, transform, sizes, n_block, is_edge, first_keys, last_keys)
            next_sum = hold(next_sum)
            accs = wait_for_products(accs)
            v_rings[0].release(used)
            v_rings[0].skip(used + 1, skipped, is_tile)
            probs = operand(e, dtype, p_layout)
            left = epilogue(accs, row_max, row_sum, tile_ring, tiles, sizes, transform, out_desc, lse_ptr, sinks_ptr,
                            out_s, left, GROUP)  # fmt: skip
        else:
            accs = rescale_rows(accs, factor)
            v_rings[0].wait(used)
            accs = add_products(probs, v_rings, used, accs)
            accs = wait_for_products(accs)
            v_rings[0].release(used)
            left = epilogue(accs, row_max, row_sum, tile_ring, tiles, sizes, transform, out_desc, lse_ptr, sinks_ptr,
                            out_s, left, GROUP)  # fmt: skip
            is_tile, n_block, n_block_min, n_full_min, n_full_max, skipped, first_keys, last_keys = open_tile(
                tile_ring, tiles + 1, sizes, rows, zeros, GROUP
            )
            is_edge = (n_block < n_full_min) | (n_block >= n_full_max)
            s = first_scores(q_rings, tiles + 1, k_rings, used + 1, skipped, is_tile, zeros)
            s = warpgroup_mma_wait(0, deps=[s])
            v_rings[0].skip(used + 1, skipped, is_tile)
            k_rings[0].release(used + 1 + skipped, is_tile)
            q_rings[0].release(tiles + 1, is_tile & (n_block == n_block_min))
            e, next_max, next_sum = first_probs(s, transform, sizes, n_block, is_edge, first_keys, last_keys)
            probs = operand(e, dtype, p_layout)
        tile_ring.release(tiles)
        row_max, row_sum = next_max, next_sum
        tiles += 1
        used += 1 + skipped
    if sizes.in_turns and GROUP == 0:
        row_max = take_turn(row_max, 0)
    if sizes.has_left or sizes.has_right:
        left_s.store(gl.max(gl.reshape(after_stores(left), [4, BLOCK_M // 4]), 1))
    tma_store_wait(0)


# No run-time argument is specialised, so that the compile-time arguments and the dtypes alone decide which build runs.
_RUN_TIME = [
    "q_ptr", "k_ptr", "v_ptr", "out_ptr", "lse_ptr", "sinks_ptr", "cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "counter_ptr",
    "scale_log2", "softcap", "prescale", "seqlen_q", "seqlen_k", "batch", "num_heads_q", "group_size", "left", "right",
]  # fmt: skip


@gluon.jit(do_not_specialize=_RUN_TIME)
def attention_forward(
    q_desc, k_desc, v_desc, out_desc, q_ptr, k_ptr, v_ptr, out_ptr,
    lse_ptr, sinks_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, counter_ptr,
    scale_log2, softcap, prescale, seqlen_q, seqlen_k, batch, num_heads_q, group_size, left, right,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, TILE_STAGES: gl.constexpr,
    OUT_STAGES: gl.constexpr, OVERLAP: gl.constexpr, IN_TURNS: gl.constexpr, REGISTERS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_EDGES: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    SCALE_FIRST: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """Attention of every tile; a program an SM.

    Arguments, in groups: descriptors of the tensors, with boxes as ``launch.box`` says, and pointers to them, None
    without a band; pointers to lse (float32, natural log, as the backend returns it), sinks, cu_seqlens, and a counter
    of tiles (int32, 0 before and after), the last four None if absent; the numbers of ``launch.scales``; sizes, whose
    lengths are rows of the tensors if VARLEN; the band; then ``tiles.Config`` and what the call has.
    """
    dtype: gl.constexpr = q_desc.dtype
    record_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_rings = make_rings(dtype, BLOCK_N, BLOCK_D, STAGES, GROUPS)
    v_rings = make_rings(dtype, BLOCK_N, BLOCK_DV, STAGES, GROUPS)
    tile_ring = make_ring(gl.int32, [RECORD_SIZE], record_layout, TILE_STAGES, GROUPS + 1)
    # The output leaves in pieces, through fewer buffers than pieces where it does not fit beside the rest.
    OUT_WIDTH: gl.constexpr = out_desc.block_type.shape[4 if VARLEN else 3]
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, OUT_WIDTH], dtype)
    out_s = gl.allocate_shared_memory(dtype, [GROUPS * OUT_STAGES, BLOCK_M, OUT_WIDTH], out_layout)
    sizes = Sizes(seqlen_q, seqlen_k, batch, num_heads_q, group_size, left, right,
                  HAS_LEFT, HAS_RIGHT, HAS_EDGES, VARLEN, BLOCK_M, BLOCK_N, GROUPS, IN_TURNS,
                  CACHED_BYTES // (2 * (BLOCK_D + BLOCK_DV)))  # fmt: skip
    transform = Transform(scale_log2, softcap, prescale, HAS_SOFTCAP, SCALE_FIRST)
    # Registers of a thread that does not compute. 32 leave the first of two computing warpgroups 8 fewer than the other
    # one has, which the widest loop bodies of packed calls cannot spare; then no counter deals out tiles.
    IS_WIDE: gl.constexpr = HAS_LEFT or HAS_SOFTCAP
    LOADER: gl.constexpr = 24 if VARLEN and IS_WIDE and GROUPS == 2 else 32
    left_s = gl.allocate_shared_memory(gl.int32, [GROUPS, 4], record_layout)
    q0 = make_rings(dtype, BLOCK_M, BLOCK_D, Q_STAGES, 1)
    q1 = make_rings(dtype, BLOCK_M, BLOCK_D, Q_STAGES, 1)
    if GROUPS == 2:
        gl.warp_specialize([
            (consumer, (out_desc, lse_ptr, sinks_ptr, tile_ring, q0, k_rings, v_rings, out_s, left_s.index(0), sizes,
                        transform, 0, OVERLAP)),
            (consumer, (out_desc, lse_ptr, sinks_ptr, tile_ring, q1, k_rings, v_rings, out_s, left_s.index(1), sizes,
                        transform, 1, OVERLAP)),
            (producer, (q_desc, k_desc, v_desc, tile_ring, (q0, q1), k_rings, v_rings, sizes, BLOCK_D, BLOCK_DV,
                        OVERLAP)),
            (scheduler, (tile_ring, sizes, cu_seqlens_q_ptr, cu_seqlens_k_ptr, counter_ptr)),
        ], [4, 1, 1], [REGISTERS, LOADER, LOADER])  # fmt: skip
    else:
        q2 = make_rings(dtype, BLOCK_M, BLOCK_D, Q_STAGES, 1)
        gl.warp_specialize([
            (consumer, (out_desc, lse_ptr, sinks_ptr, tile_ring, q0, k_rings, v_rings, out_s, left_s.index(0), sizes,
                        transform, 0, OVERLAP)),
            (consumer, (out_desc, lse_ptr, sinks_ptr, tile_ring, q1, k_rings, v_rings, out_s, left_s.index(1), sizes,
                        transform, 1, OVERLAP)),
            (consumer, (out_desc, lse_ptr, sinks_ptr, tile_ring, q2, k_rings, v_rings, out_s, left_s.index(2), sizes,
                        transform, 2, OVERLAP)),
            (producer, (q_desc, k_desc, v_desc, tile_ring, (q0, q1, q2), k_rings, v_rings, sizes, BLOCK_D, BLOCK_DV,
                        OVERLAP)),
            (scheduler, (tile_ring, sizes, cu_seqlens_q_ptr, cu_seqlens_k_ptr, counter_ptr)),
        ], [4, 4, 1, 1], [REGISTERS, REGISTERS, LOADER, LOADER])  # fmt: skip
    if HAS_LEFT or HAS_RIGHT:
        tensors = ((q_ptr, k_ptr, v_ptr, out_ptr), (q_desc, k_desc, v_desc, out_desc))
        for group in range(GROUPS):
            mend(left_s.index(group), tensors, lse_ptr, sinks_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, sizes, transform,
                 BLOCK_DV)  # fmt: skip
