"""The roles of the Hopper backward: a producer of one warp, and two consumers of a warpgroup with 64 keys each.

If dK and dV of 64 keys for each would fill the registers of two warpgroups, both take the same 64 keys, and each owns
one gradient (``by_gradient``). The first warpgroup computes P^T, passes it on through shared memory and adds to dV. The
second computes dP^T and dS^T and adds to dK. A third one computes dQ from dS. None waits for a later one, so the
exponentials and the passing on of a block run during the products of the blocks before.

P^T is passed on in float16, multiplied by ``PROBS_SCALE``: rounding it to bfloat16, before dS^T is rounded, would make
the errors of dK and dQ 1.2 times as large. If it is multiplied by a user's slope, which has no bound, it is bfloat16.
"""

# ruff: noqa: RET505 - Triton compiles code after a return, even if the condition is decided.
# Triton's aggregate reads annotations as types, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from flashtile.backends.gpu.device import masks, mods
from flashtile.backends.gpu.device.mods import place_of
from flashtile.backends.gpu.device.softmax import LOG2_E
from flashtile.backends.hopper.backward.dq import PART_KEYS, WIDEST, add_dq, add_from_registers, in_order, start_dq
from flashtile.backends.hopper.backward.scheduler import (
    block_at,
    bounds_of,
    first_row_block,
    first_rows,
    key_head,
    key_rows,
    next_rows,
    next_tile,
    publish_tile,
    query_heads,
    row_blocks_per_head,
    steps_of_a_head,
    sums_block,
)
from flashtile.backends.hopper.device.fragments import from_thread_column, keep_columns, keep_intervals
from flashtile.backends.hopper.device.gluon_compat import aggregate, as_box, as_tile, tma_load, tma_put, tma_store_wait
from flashtile.backends.hopper.device.mods import Pairs
from flashtile.backends.hopper.device.parts import (
    HeadRows,
    add_products,
    append,
    load_boxes,
    pieces,
    scale_by,
    start_of,
    start_sum,
    tiles_at,
    wait_for_products,
    width_of,
    zero_accumulators,
)

# A number past every row.
FAR = gl.constexpr(2**30)
# Scaled probabilities, which are at most about 1 before, stay finite, and down to 4e-9 keep all digits of float16.
PROBS_SCALE = gl.constexpr(2.0**14)


@gluon.constexpr_function
def probs_scale(dtype):
    """The factor of probabilities that are passed on, in float16 or bfloat16."""
    return PROBS_SCALE.value if dtype == gl.float16 else 1.0


@gluon.jit
def key_tile(rings, use, part, step):
    """64 keys or values of a tile: ``Ring.fixed_part`` for each part of their columns."""
    tile = ()
    for i in gl.static_range(len(rings)):
        tile = append(tile, rings[i].fixed_part(use, part, step))
    return tile


@gluon.jit
def load_keys(tensor, tile, grid, rings, use):
    """Starts the load of a tile's keys or values (``records.Rows``), 64 at a time, if there are rings for them."""
    if rings is not None:
        COLS: gl.constexpr = tensor.BLOCK_DIM
        full = rings[0].acquire(use, grid.tiles.PARTS * PART_KEYS * COLS * 2)
        rows = HeadRows(tile.b, key_head(tile.head, grid), tile.start_k, tile.seqlen_k, grid.call.q.PACKED)
        for part in gl.static_range(grid.tiles.PARTS):
            key = tile.key + part * PART_KEYS
            load_boxes(tensor.desc, key_tile(rings, use, part, 0), full, rows, key, COLS, WIDEST)


@gluon.jit
def producer(channels, grid):
    """Takes tiles and loads their operands, in the order in which these are used and buffers become free."""
    BLOCK_M: gl.constexpr = grid.tiles.BLOCK_M
    COLS: gl.constexpr = grid.call.q.BLOCK_DIM
    COLS_V: gl.constexpr = grid.call.v.BLOCK_DIM
    q_bytes: gl.constexpr = BLOCK_M * COLS * 2
    row_bytes: gl.constexpr = 2 * BLOCK_M * 4
    stages: gl.constexpr = channels.queries[0].stages
    # With two buffers for keys, one is free before the values' buffer is; a single one is free last.
    keys_first: gl.constexpr = channels.keys[0].stages > 1
    tiles = 0
    used = 0
    key_use = 0
    is_end = False
    while not is_end:
        tile = next_tile(grid)
        is_end = tile.is_end
        publish_tile(channels.tiles, tiles, tile, grid)
        if not is_end:
            tiles += 1
            head_blocks = row_blocks_per_head(grid)
            row_blocks = first_row_block(tile, grid)
            m = tile.m_min
            head, num_heads = query_heads(tile.head, grid)
            steps = num_heads * (tile.m_max - tile.m_min)
            for i in range(steps):
                rows = HeadRows(tile.b, head, tile.start_q, tile.seqlen_q, grid.call.q.PACKED)
                block, place = block_at(m, tile.seqlen_q, grid)
                first = block * BLOCK_M
                full = channels.queries[0].acquire(used, q_bytes + row_bytes)
                load_boxes(grid.call.q.desc, tiles_at(channels.queries, used), full, rows, first, COLS, WIDEST)
                tma_load(grid.work.rows, [2 * (row_blocks + place), 0], full, channels.rows.index(used % stages))
                if i == 0:
                    if keys_first:
                        load_keys(grid.call.k, tile, grid, channels.keys, key_use)
                    else:
                        load_keys(grid.call.v, tile, grid, channels.values, key_use)
                full = channels.dout[0].full.index(used % stages)
                mbarrier.expect(full, BLOCK_M * COLS_V * 2)
                dout_tiles = tiles_at(channels.dout, used)
                load_boxes(grid.gradients.dout.desc, dout_tiles, full, rows, first, COLS_V, WIDEST)
                if i == 0:
                    if keys_first:
                        load_keys(grid.call.v, tile, grid, channels.values, key_use)
                    else:
                        load_keys(grid.call.k, tile, grid, channels.keys, key_use)
                used += 1
                m += 1
                if m == tile.m_max:
                    m = tile.m_min
                    head += 1
                    row_blocks += head_blocks
            key_use += gl.where(steps > 0, 1, 0)


@gluon.jit
def score_zeros(grid):
    """[64, block_m] float32 zeros in WGMMA's layout: keys by rows, so that probabilities are left operands."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, grid.tiles.BLOCK_M, 16])
    return gl.zeros([PART_KEYS, grid.tiles.BLOCK_M], gl.float32, layout)


@aggregate
class KeyRows:
    """64 keys of a sequence, and the rows that keep each key.

    ``first`` and ``last`` bound the rows of each key, as ``from_thread_column`` counts them. Rows from ``clear_from``
    up to ``clear_to`` keep all 64 keys. ``listed``: the number of full row blocks at a list's end, the position of that
    end, and ``masks.bits_of``; () without lists.
    """

    b: gl.tensor
    head: gl.tensor
    key: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    first: gl.tensor
    last: gl.tensor
    clear_from: gl.tensor
    clear_to: gl.tensor
    listed: gl.tuple


@gluon.jit
def rows_of_keys(records, tiles, layout_like, grid, PART: gl.constexpr):
    """The ``KeyRows`` of a part of a tile."""
    key = records.get(tiles, "key") + PART * PART_KEYS
    seqlen_q, seqlen_k = records.get(tiles, "seqlen_q"), records.get(tiles, "seqlen_k")
    head, _ = query_heads(records.get(tiles, "head"), grid)
    b = records.get(tiles, "sequence")
    cleared = (gl.to_tensor(0), gl.to_tensor(FAR))
    if grid.call.mods.band.bounds is not None:
        _, _, all_start, all_stop = bounds_of(b, records.get(tiles, "head"), key, grid, 1)
        cleared = (all_start, all_stop)
    listed = ()
    if grid.call.mods.band.lists is not None:
        stop = records.get(tiles, "m_max")
        num_full = stop - records.get(tiles, "m_partial_max")
        listed = (num_full, stop, records.get(tiles, "bits"))  # type: ignore[assignment]
    return kept_rows(key, seqlen_q, seqlen_k, b, head, cleared, listed, layout_like, grid)


@gluon.jit
def kept_rows(key, seqlen_q, seqlen_k, b, head, cleared, listed, layout_like, grid):
    """The ``KeyRows`` of 64 keys; by intervals, rows from ``cleared[0]`` up to ``cleared[1]`` keep all of them."""
    keys = key + gl.arange(0, PART_KEYS, gl.SliceLayout(1, layout_like.type.layout))
    shift = seqlen_k - seqlen_q
    first = gl.where(keys < seqlen_k, mods.first_row(keys - shift, shift, grid.call.mods.band), FAR)
    last = mods.last_row(keys - shift, seqlen_q, shift, grid.call.mods.band)
    clear_from = mods.first_row(key + (PART_KEYS - 1) - shift, shift, grid.call.mods.band)
    clear_from = gl.where(key + PART_KEYS > seqlen_k, FAR, clear_from)
    clear_to = mods.last_row(key - shift, FAR, shift, grid.call.mods.band) + 1
    if grid.call.mods.band.bounds is not None:
        clear_from, clear_to = gl.maximum(clear_from, cleared[0]), gl.minimum(clear_to, cleared[1])
    if grid.call.mods.band.key_rows is not None:
        exists = (keys < seqlen_k) & (b < grid.call.keys.count)
        start, end = masks.ends_of(grid.call.mods.band.key_rows, b, head, keys, exists)
        first, last = gl.maximum(first, start), gl.minimum(last, end - 1)
    first, last = from_thread_column(first, layout_like), from_thread_column(last, layout_like)
    return KeyRows(b, head, key, seqlen_q, seqlen_k, first, last, clear_from, clear_to, listed)


@gluon.jit
def pairs_of(kept, rows, layout_like, grid, mod):
    """The ``Pairs`` of a block of 64 keys by a ``RowBlock``, in the layout of ``layout_like``."""
    across = gl.arange(0, layout_like.shape[1], gl.SliceLayout(0, layout_like.type.layout))[None, :]
    read = mod.of_tile(grid.call.mods, kept.b, kept.head + rows.head, rows.start + across)
    head = kept.head + rows.head
    is_partial, bits = True, (0, 0)
    if grid.call.mods.band.lists is not None:
        num_full, stop, first = kept.listed
        is_partial = rows.remaining > num_full
        if grid.call.mods.band.lists.BITS:
            position = stop - rows.remaining
            bits = masks.bits_at(grid.call.mods.band.lists, first, position, kept.key, grid.tiles.BLOCK_M)
    return Pairs(
        kept.b, head, rows.start, kept.key, kept.seqlen_q, kept.seqlen_k, True, 0, True, 0, 0, read, is_partial, bits
    )


@gluon.jit
def is_cut(start, kept, grid):
    """Whether some row of the block at ``start`` drops some of the keys."""
    cut = start < kept.clear_from
    if grid.call.mods.band.left is not None or grid.call.mods.band.bounds is not None:
        cut = cut | (start + grid.tiles.BLOCK_M > kept.clear_to)
    if grid.call.mods.band.lists is not None:
        cut = cut | (start >= kept.seqlen_q)
    return cut


@gluon.jit
def keep_rows(x, pairs, kept, grid):
    """A block [64, block_m] with 0 where a row does not keep a key."""
    IS_GIVEN: gl.constexpr = grid.call.mods.band.key_rows is not None or grid.call.mods.band.lists is not None
    HAS_LAST: gl.constexpr = grid.call.mods.band.left is not None or IS_GIVEN
    x = keep_columns(x, kept.first - pairs.row, kept.last - pairs.row, 0.0, True, HAS_LAST)
    if grid.call.mods.band.row_keys is not None:
        x = keep_intervals(x, grid.call.mods.band.row_keys, pairs, grid.call.keys.count, pairs.row, pairs.key, 0.0)
    return x


@gluon.jit
def probabilities(s, lse_log2, kept, grid, mod, pairs, fetched):
    """Normalised probabilities, 0 where a row drops a key, and the factor of ``dprobs - delta`` in dscores.

    So dscores need no separate mask: where the factor is 0, they are 0 unless dprobs or delta is not finite.
    """
    if place_of(grid.call.mods.SCORES, "score_mod") >= 0:
        return mod_probabilities(s, lse_log2, kept, grid, mod, pairs, fetched)
    if mod.has_softcap:
        # The scores are here in units of the cap.
        s = mods.quick_softcap(s, 1.0, mod.prescale)
        p = gl.exp2(exponents(s, mod.softcap * LOG2_E, lse_log2, pairs, fetched, grid, mod))
        factor = p * (1.0 - s * s)
    else:
        p = gl.exp2(exponents(s, mod.scale_log2, lse_log2, pairs, fetched, grid, mod))
        factor = p
    return kept_of(p, factor, kept, grid, mod, pairs, fetched, mod.has_softcap)


@gluon.jit
def exponents(s, scale, lse_log2, pairs, fetched, grid, mod):
    """Exponents of probabilities: ``s * scale`` plus terms minus lse_log2 (+inf for rows with probabilities of 0).

    A bias or a function may be so large that its product overflows, and +inf minus +inf is NaN. It is not if the
    product is never rounded: fused with an addition to -inf it stays -inf.
    """
    if place_of(grid.call.mods.SCORES, "bias") >= 0 or place_of(grid.call.mods.SCORES, "score_mod") >= 0:
        return mod.add_terms(gl.fma(s, scale, -lse_log2), pairs, fetched, LOG2_E)
    else:
        return mod.add_terms(s * scale, pairs, fetched, LOG2_E) - lse_log2


@gluon.jit
def kept_of(p, factor, kept, grid, mod, pairs, fetched, TWO: gl.constexpr):
    """(p, factor), 0 where the band, a mask or lists' bits drop a pair; factor is p unless they are TWO."""
    if grid.call.mods.band.lists is None:
        p, factor = cut(p, factor, kept, grid, pairs, TWO)
    else:
        # Bits of lists also contain the end of a sequence.
        if not grid.call.mods.band.lists.BITS or grid.call.mods.band.lists.EDGES:
            p, factor = cut(p, factor, kept, grid, pairs, TWO)
    p = mod.select(p, pairs, fetched, 0.0, grid.call.mods)
    return p, mod.select(factor, pairs, fetched, 0.0, grid.call.mods) if TWO else p


@gluon.jit
def cut(p, factor, kept, grid, pairs, TWO: gl.constexpr):
    """``kept_of`` for the band, in one branch for p and factor: two branches would spill more."""
    if is_cut(pairs.row, kept, grid):
        p = keep_rows(p, pairs, kept, grid)
        factor = keep_rows(factor, pairs, kept, grid) if TWO else p
    return p, factor


@gluon.jit
def mod_probabilities(s, lse_log2, kept, grid, mod, pairs, fetched):
    """``probabilities`` with a user's score mod; a dropped pair's slope may be any number."""
    of_mod = fetched[len(mod.terms) + len(mod.masks)]
    s = s * grid.call.mods.scale
    slope = 1.0
    if grid.gradients.HAS_SLOPE:
        s, slope = mod.functions[0].linear(s, grid.call.mods, pairs, of_mod)
    else:
        s = mod.functions[0].score(s, grid.call.mods, pairs, of_mod)
    if mod.has_softcap:
        s = mods.quick_softcap(s, 1.0, mod.prescale)
        slope = slope * (1.0 - s * s)
        p = gl.exp2(exponents(s, mod.softcap * LOG2_E, lse_log2, pairs, fetched, grid, mod))
    else:
        p = gl.exp2(exponents(s, LOG2_E, lse_log2, pairs, fetched, grid, mod))
    p, factor = kept_of(p, p, kept, grid, mod, pairs, fetched, False)
    if grid.gradients.HAS_SLOPE or mod.has_softcap:
        factor = gl.where(p == 0.0, 0.0, p * slope)
    return p, factor


@gluon.jit
def with_dropout(p, factor, pairs, words, mod):
    """Probabilities, 0 where dropout drops, and their factors, negated there: without dropout none is negative.

    So random numbers are drawn once, and the kept pairs take no registers. Dropout's own factor is applied to
    gradients.
    """
    return mod.drop(p, pairs, words, 0.0), mod.drop(factor, pairs, words, -factor)


@gluon.jit
def of_kept(dv, grid):
    """Dv multiplied by dropout's own factor."""
    if grid.call.mods.DROPOUT is None:
        return dv
    else:
        return scale_by(dv, grid.call.mods.dropout.keep_scale)


@gluon.jit
def score_gradients(factor, dp, delta, grid):
    """Dscores, from the factors of ``with_dropout``, without dropout's own factor."""
    if grid.call.mods.DROPOUT is None:
        return factor * (dp - delta)
    else:
        own = 1.0 / grid.call.mods.dropout.keep_scale
        return gl.maximum(factor, 0.0) * dp - gl.abs(factor) * (delta * own)


@gluon.jit
def step(channels, used, key_use, dk, dv, rows, kept, block, grid, mod, ADDS_DQ: gl.constexpr,
         WARPGROUP: gl.constexpr):  # fmt: skip
    """Adds a row block's share to dk and dv, and the share of the block before to dq, if there is one and dq is wanted.

    So the warpgroups may be almost a step apart before one waits for the other's dscores: the products of one run while
    the other computes.
    """
    zeros = score_zeros(grid)
    # With wider accumulators, scores and dprobs must share registers.
    together: gl.constexpr = grid.call.q.BLOCK_DIM + grid.call.v.BLOCK_DIM <= 256
    dtype: gl.constexpr = channels.queries[0].buffers.dtype
    layout: gl.constexpr = zeros.type.layout
    q_tile, dout_tile = tiles_at(channels.queries, used), tiles_at(channels.dout, used)
    k_tile = key_tile(channels.keys, key_use, WARPGROUP, used)
    if grid.gradients.HAS_DSCORES:
        v_tile = key_tile(channels.values, key_use, WARPGROUP, used)
    numbers = channels.rows.index(used % channels.queries[0].stages)
    channels.queries[0].wait(used)
    s = start_sum(k_tile, q_tile, zeros)
    channels.dout[0].wait(used)
    if grid.gradients.HAS_DSCORES and together:
        dp = start_sum(v_tile, dout_tile, zeros)
    pairs = pairs_of(kept, rows, zeros, grid, mod)
    fetched = mod.fetch(pairs, zeros, grid.call.mods)
    words = mod.draw(pairs, zeros, mod.philox_key(grid.call, pairs))
    s = warpgroup_mma_wait(len(channels.dout) if grid.gradients.HAS_DSCORES and together else 0, deps=[s])
    p, factor = probabilities(s, numbers.slice(0, 1).load(layout), kept, grid, mod, pairs, fetched)
    p, factor = with_dropout(p, factor, pairs, words, mod)
    if grid.gradients.HAS_DV:
        dv = add_products(p.to(dtype), channels.dout, used, dv)
    if grid.gradients.HAS_DSCORES:
        if not together:
            dv = wait_for_products(dv)
            dp = start_sum(v_tile, dout_tile, zeros)
        dp = warpgroup_mma_wait(len(dv) if grid.gradients.HAS_DV and together else 0, deps=[dp])
        ds = score_gradients(factor, dp, numbers.slice(1, 1).load(layout), grid).to(dtype)
        if grid.gradients.HAS_DK:
            dk = add_products(ds, channels.queries, used, dk)
    if grid.gradients.HAS_DQ:
        if ADDS_DQ:
            channels.dscores.wait(used - 1)
            dq = start_dq(channels, used - 1, key_use, grid, 0, WARPGROUP)
        channels.dscores.claim(used)
        channels.dscores.part(used, WARPGROUP).store(ds)
        fence_async_shared()
        channels.dscores.publish(used)
    dk, dv = wait_for_gradients(dk, dv, grid, 1 if ADDS_DQ else 0)
    channels.queries[0].release(used)
    if ADDS_DQ:
        add_dq(dq, block, channels, used - 1, key_use, grid, WARPGROUP)
    return dk, dv


@gluon.jit
def wait_for_gradients(dk, dv, grid, PENDING: gl.constexpr):
    """Waits for all except PENDING products; returns dk and dv. One of the two may not be computed."""
    if grid.gradients.HAS_DK and grid.gradients.HAS_DV:
        both = wait_for_products(dk + dv, PENDING)
        dk, dv = both[: len(dk)], both[len(dk) :]
    elif grid.gradients.HAS_DK:
        dk = wait_for_products(dk, PENDING)
    elif grid.gradients.HAS_DV:
        dv = wait_for_products(dv, PENDING)
    return dk, dv


@gluon.jit
def blank_step(channels, used, grid, WARPGROUP: gl.constexpr):
    """A step for a row block that adds nothing to dk and dv, and only the other warpgroup's keys to dq."""
    channels.dscores.claim(used)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    blank = gl.zeros([PART_KEYS, grid.tiles.BLOCK_M], channels.queries[0].buffers.dtype, layout)
    channels.dscores.part(used, WARPGROUP).store(blank)
    fence_async_shared()
    channels.dscores.publish(used)
    channels.queries[0].release(used)


@gluon.jit
def boxes(desc, grad, grid):
    """The parts of dk or dv, divided into pieces as wide as a descriptor's box."""
    width: gl.constexpr = desc.block_type.shape[4 if grid.call.q.PACKED else 3]
    found = ()
    for i in gl.static_range(len(grad)):
        found = found + pieces(grad[i].to(desc.dtype), width)
    return found


@gluon.jit
def add_to_sums(sums_ptr, grad, records, tiles, grid, COLS: gl.constexpr, PART: gl.constexpr):
    """Adds a warpgroup's 64 keys of dk or dv, with COLS columns, to PART of the tile's sums in the workspace."""
    offset = sums_block(records, tiles, grid).to(gl.int64) * (grid.tiles.KEYS * COLS) + PART * (PART_KEYS * COLS)
    for i in gl.static_range(len(grad)):
        numbers = in_order(grad[i], width_of(COLS, i, WIDEST))
        add_from_registers(sums_ptr, offset + PART_KEYS * start_of(COLS, i, WIDEST), numbers)


@gluon.jit
def store_gradient(out, grad, records, tiles, out_s, grid, COLS: gl.constexpr, WARPGROUP: gl.constexpr):
    """Stores a warpgroup's 64 keys of dk or dv by TMA, if wanted, once earlier stores have left its buffers.

    In float32 it stores half the columns at a time, which is the buffers' size. With gqa_splits it adds them to sums.
    """
    if out is not None:
        if grid.schedule.splits is not None:
            add_to_sums(out, grad, records, tiles, grid, COLS, WARPGROUP)
        else:
            keys = key_rows(records, tiles, grid)
            key = records.get(tiles, "key") + WARPGROUP * PART_KEYS
            count: gl.constexpr = out_s.shape[0] // grid.tiles.PARTS
            parts = boxes(out, grad, grid)
            width: gl.constexpr = parts[0].shape[1]
            for i in gl.static_range(len(parts)):
                if i % count == 0:
                    tma_store_wait(0)
                # tiles >> 30 as in Ring.fixed_part: otherwise invariant addresses would be kept in registers, and
                # spill.
                buffer = out_s.index(WARPGROUP * count + i % count + (tiles >> 30))
                as_tile(buffer, out.dtype, width).store(parts[i])
                fence_async_shared()
                tma_put(out, keys.at(key, i * width), as_box(buffer, out), grid.gradients.ADDS)


@gluon.jit
def consumer(channels, grid, mod, WARPGROUP: gl.constexpr):
    """One warpgroup: dk and dv of 64 keys of every tile, and its share of dq, as far as they are wanted."""
    # It is possible that no row of a tile's first row block keeps any of the second 64 keys.
    HAS_RIGHT: gl.constexpr = grid.call.mods.band.right is not None
    may_be_blank: gl.constexpr = HAS_RIGHT and WARPGROUP == 1 and grid.tiles.BLOCK_M < grid.tiles.KEYS
    computes_dq: gl.constexpr = grid.gradients.HAS_DQ and grid.tiles.DQ_WARPGROUPS == 2
    records = channels.tiles
    tiles = 0
    used = 0
    key_use = 0
    records.ring.wait(tiles)
    while records.get(tiles, "is_tile") > 0:
        dk, dv = zero_accumulators(PART_KEYS, channels.queries), zero_accumulators(PART_KEYS, channels.dout)
        kept = rows_of_keys(records, tiles, score_zeros(grid), grid, WARPGROUP)
        rows = first_rows(records, tiles, grid)
        _, num_heads = query_heads(records.get(tiles, "head"), grid)
        end = used + num_heads * steps_of_a_head(records, tiles)
        if end > used:
            channels.keys[0].wait(key_use)
            if grid.gradients.HAS_DSCORES:
                channels.values[0].wait(key_use)
            if computes_dq:
                # The row block with a share of dq that is still to be added.
                block = rows.block
                is_blank = False
                if may_be_blank:
                    # The first row that keeps a key is after the first row block.
                    first = kept.key - (kept.seqlen_k - kept.seqlen_q) - grid.call.mods.band.right
                    is_blank = rows.start + grid.tiles.BLOCK_M <= first
                if is_blank:
                    blank_step(channels, used, grid, WARPGROUP)
                else:
                    dk, dv = step(channels, used, key_use, dk, dv, rows, kept, block, grid, mod, False, WARPGROUP)
                used += 1
                while used < end:
                    rows = next_rows(rows, records, tiles, grid)
                    dk, dv = step(channels, used, key_use, dk, dv, rows, kept, block, grid, mod, True, WARPGROUP)
                    block = rows.block
                    used += 1
            else:
                while used < end:
                    dk, dv = step(channels, used, key_use, dk, dv, rows, kept, None, grid, mod, False, WARPGROUP)
                    rows = next_rows(rows, records, tiles, grid)
                    used += 1
            if grid.gradients.HAS_DSCORES:
                channels.values[0].release(key_use)
            if computes_dq:
                channels.dscores.wait(used - 1)
                dq = start_dq(channels, used - 1, key_use, grid, 0, WARPGROUP)
            # dv is stored during the last product.
            dv = of_kept(dv, grid)
            store_gradient(grid.gradients.dv, dv, records, tiles, channels.out, grid, grid.call.v.BLOCK_DIM, WARPGROUP)
            if computes_dq:
                add_dq(dq, block, channels, used - 1, key_use, grid, WARPGROUP)
            channels.keys[0].release(key_use)
            key_use += 1
        else:
            dv = of_kept(dv, grid)
            store_gradient(grid.gradients.dv, dv, records, tiles, channels.out, grid, grid.call.v.BLOCK_DIM, WARPGROUP)
        dk = scale_by(dk, grid.gradients.scale)
        store_gradient(grid.gradients.dk, dk, records, tiles, channels.out, grid, grid.call.q.BLOCK_DIM, WARPGROUP)
        tiles = records.next(tiles)
    tma_store_wait(0)


@gluon.jit
def values_step(channels, used, key_use, dv, rows, kept, grid, mod, IS_FIRST: gl.constexpr):
    """Adds a row block's share to dv, and passes on its probabilities."""
    zeros = score_zeros(grid)
    lse_log2 = channels.rows.index(used % channels.queries[0].stages).slice(0, 1)
    if IS_FIRST:
        channels.keys[0].wait(key_use)
    channels.queries[0].wait(used)
    s = start_sum(key_tile(channels.keys, key_use, 0, used), tiles_at(channels.queries, used), zeros)
    pairs = pairs_of(kept, rows, zeros, grid, mod)
    fetched = mod.fetch(pairs, zeros, grid.call.mods)
    words = mod.draw(pairs, zeros, mod.philox_key(grid.call, pairs))
    s = warpgroup_mma_wait(0, deps=[s])
    p, factor = probabilities(s, lse_log2.load(zeros.type.layout), kept, grid, mod, pairs, fetched)
    p, factor = with_dropout(p, factor, pairs, words, mod)
    if IS_FIRST:
        tma_store_wait(0)
    if grid.gradients.HAS_DSCORES:
        channels.probs.claim(used)
        of_probs: gl.constexpr = channels.probs.buffers.dtype
        channels.probs.at(used).store((factor * probs_scale(of_probs)).to(of_probs))
        channels.probs.publish(used)
    if grid.gradients.HAS_DV:
        channels.dout[0].wait(used)
        dv = add_products(p.to(channels.dout[0].buffers.dtype), channels.dout, used, dv)
        dv = wait_for_products(dv)
    channels.queries[0].release(used)
    return dv


@gluon.jit
def keys_step(channels, used, key_use, dk, grid, is_last, IS_FIRST: gl.constexpr):
    """Adds a row block's share to dk, and passes on the gradients of its scores."""
    zeros = score_zeros(grid)
    layout: gl.constexpr = zeros.type.layout
    delta = channels.rows.index(used % channels.queries[0].stages).slice(1, 1)
    if IS_FIRST:
        channels.values[0].wait(key_use)
    channels.dout[0].wait(used)
    dp = start_sum(key_tile(channels.values, key_use, 0, used), tiles_at(channels.dout, used), zeros)
    dp = warpgroup_mma_wait(0, deps=[dp])
    # The next tile's values are loaded during the rest of this tile.
    channels.values[0].release(key_use, is_last)
    channels.queries[0].wait(used)
    channels.probs.wait(used)
    factor = channels.probs.at(used).load(layout).to(gl.float32)
    channels.probs.release(used)
    INVERSE_SCALE: gl.constexpr = 1 / probs_scale(channels.probs.buffers.dtype)
    ds = score_gradients(factor, dp * INVERSE_SCALE, delta.load(layout) * INVERSE_SCALE, grid)
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
    """Stores 64 keys of dk or dv, if they are wanted, at most 64 columns at a time (32 in float32).

    The TMA store borrows the next two stages of the ring through which this warpgroup passes on blocks: they are
        claimed,
    but never published. ``tma_store_wait`` frees them before their own use begins. With gqa_splits dk and dv are added
    to sums, from registers.
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
                # After a tile without rows, that tile's last piece may still be leaving the first buffer.
                tma_store_wait(1 if i > 0 else 0)
                as_tile(ring.at(used + i % 2), out.dtype, width).store(parts[i])
                fence_async_shared()
                tma_put(out, keys.at(key, i * width), as_box(ring.at(used + i % 2), out), grid.gradients.ADDS)


@gluon.jit
def gradient_consumer(channels, grid, mod, WARPGROUP: gl.constexpr):
    """One warpgroup: dv or dk of every tile's keys, if it is wanted, and the operands for the next warpgroup."""
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
            grad = scale_by(grad, grid.gradients.scale)
            ring = channels.dscores
            store_in_pieces(grid.gradients.dk, grad, records, tiles, ring, used, grid, grid.call.q.BLOCK_DIM)
        else:
            grad = of_kept(grad, grid)
            store_in_pieces(grid.gradients.dv, grad, records, tiles, channels.probs, used, grid, grid.call.v.BLOCK_DIM)
        tiles = records.next(tiles)
    tma_store_wait(0)
