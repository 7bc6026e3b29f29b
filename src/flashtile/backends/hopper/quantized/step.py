"""One block of keys in the Hopper forward for 8-bit tensors: its scales, its softmax, and its product with values."""

# Triton's aggregate reads annotations as types, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flashtile.backends.gpu.device import softmax
from flashtile.backends.hopper.device.fragments import row_tops, thread_sums
from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.device.inline_ptx import in_place, packed, pingpong_arrive, pingpong_wait, plus
from flashtile.backends.hopper.device.parts import append, box_of
from flashtile.backends.hopper.forward.roles import SCALE_ROWS, first_scale
from flashtile.backends.hopper.forward.scheduler import query_rows
from flashtile.backends.hopper.forward.softmax_step import block_pairs, is_edge, shape_scores

# log2 of the factor of probabilities: a row's largest probability becomes 256, of e4m3's 448.
PROBS_LOG2 = gl.constexpr(8.0)


@aggregate
class TileScales:
    """The scales for a warpgroup's rows of a tile: the factor of its scores, and the place of its keys' first scale.

    ``num_keys`` is 0 if there is no tile.
    """

    score: gl.tensor
    k: gl.tensor
    v: gl.tensor
    num_keys: gl.tensor


@gluon.jit
def scales_at(scale, b, head, first):
    """The address of a sequence's first scale; ``first`` is the number of its first block."""
    return b * scale.batch_step + head * scale.head_step + first * scale.block_step


@gluon.jit
def scale_of(scale, start, row, exists):
    """The scale of a row; 1 if the row does not exist."""
    return gl.load(scale.ptr + start + row // SCALE_ROWS * scale.block_step, mask=exists, other=1.0)


@gluon.jit
def tile_scales(channels, tiles, scales, loop, call, schedule, WARPGROUP: gl.constexpr):
    """The ``TileScales`` of a warpgroup."""
    records = channels.tiles
    b, head = records.get(tiles, "sequence"), records.get(tiles, "head")
    head_kv, num_keys = records.get(tiles, "head_kv"), call.keys.length
    first_q, first_k, own_b = gl.to_tensor(0), gl.to_tensor(0), b
    if call.q.PACKED:
        first_q, first_k = first_scale(records.get(tiles, "start_q"), b), first_scale(records.get(tiles, "start_k"), b)
        num_keys, own_b = records.get(tiles, "seqlen_k"), gl.to_tensor(0)
    num_keys = gl.where(loop.is_tile, num_keys, 0)
    row = records.get(tiles, "row") + WARPGROUP * schedule.BLOCK_M
    # With three warpgroups, the last one's rows may have no scale.
    exists = (num_keys > 0) & (row < query_rows(records, tiles, call).length)
    q_scale = scale_of(scales.q, scales_at(scales.q, own_b, head, first_q), row, exists)
    k_at, v_at = scales_at(scales.k, own_b, head_kv, first_k), scales_at(scales.v, own_b, head_kv, first_k)
    return TileScales(q_scale, k_at, v_at, num_keys)


@gluon.jit
def fetch_block(scales, own, n_block, schedule, CHECKED: gl.constexpr):
    """The scale of a block's products, and its values' scale; before block 0 the scales of block 0.

    CHECKED: there may be no tile, or the block may be past the end of the keys, as for rows without keys.
    """
    row = gl.maximum(n_block, 0) * schedule.BLOCK_N
    exists = row < own.num_keys if CHECKED else True
    return own.score * scale_of(scales.k, own.k, row, exists), scale_of(scales.v, own.v, row, exists)


@gluon.jit
def raise_max(channels, at, row_max, block, call, schedule, mod, MASKED: gl.constexpr, WARPGROUP: gl.constexpr):
    """(scores, scale, row_max, finite_max, factor): a block's scores, their factor, and ``softmax.raise_max``.

    finite_max is 8 less, so that probabilities are multiplied by 2^8. MASKED: the block may need the band's mask.
    """
    loop, n_block = at.loop, at.n_block
    pairs = block_pairs(channels.tiles, at.tiles, 0, loop, n_block, n_block, call, schedule, True, WARPGROUP)
    s, scale = block.s, mod.scale_log2
    if mod.has_softcap or mod.scale_first:
        s = s * block.score
    else:
        scale = scale * block.score
    s, _ = shape_scores(s, mod, pairs, (), call, loop, is_edge(loop, n_block, call), MASKED)
    row_max, finite_max, factor = softmax.raise_max(row_max, row_tops(s, row_max, scale, ()), MASKED)
    return s, scale, row_max, finite_max - PROBS_LOG2, factor


@gluon.jit
def probabilities(s, scale, finite_max, factor, row_sum, schedule, STRICT: gl.constexpr, WARPGROUP: gl.constexpr):
    """(words, row_sum): a block's probabilities, ``packed``, and the sums of the probabilities before rounding.

    Between ping-pong barriers: exponentials of two warpgroups at once take as long as one after the other. STRICT keeps
    all of them between the barriers; else ptxas may move some.
    """
    following: gl.constexpr = (WARPGROUP + 1) % schedule.NUM_WARPGROUPS
    if schedule.PINGPONG:
        finite_max = pingpong_wait(finite_max, WARPGROUP, STRICT)
    e = softmax.exponentials(s, scale, finite_max)
    sum_factor = gl.convert_layout(factor, gl.SliceLayout(1, row_sum.type.layout))
    row_sum = row_sum * sum_factor[:, None] + thread_sums(e)
    if schedule.PINGPONG:
        row_sum = pingpong_arrive(row_sum, following, STRICT)
    return packed(e), row_sum


@gluon.jit
def zero_parts(M: gl.constexpr, DIM_V: gl.constexpr, WIDTH: gl.constexpr):
    """Zero accumulators [M, DIM_V] in tensors of WIDTH columns: a product beside them must fit the registers."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    accs = ()
    for _ in gl.static_range(DIM_V // WIDTH):
        accs = append(accs, gl.zeros([M, WIDTH], gl.float32, layout))
    return accs


@gluon.jit
def start_products(probs, values, accs, factor):
    """(accs, t): the products for all accumulators except the last are added; the last product, t, is under way."""
    t = start_product(probs, box_of(values, 0, accs[0].shape[1], 0), accs[0])
    done = ()
    for i in gl.static_range(1, len(accs)):
        t = warpgroup_mma_wait(0, deps=[t])
        following = start_product(probs, box_of(values, i * accs[0].shape[1], accs[0].shape[1], 0), accs[i])
        done = append(done, in_place(plus(accs[i - 1], factor, t)))
        t = following
    return append(done, accs[len(accs) - 1]), t


@gluon.jit
def start_product(probs, values, layout_like):
    """Starts the product of probabilities and values, from 0."""
    layout: gl.constexpr = layout_like.type.layout
    zeros = gl.zeros([layout_like.shape[0], layout_like.shape[1]], gl.float32, layout)
    return warpgroup_mma(probs, values.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def add_product(t, accs, factor):
    """The accumulators, with t added to the last one."""
    LAST: gl.constexpr = len(accs) - 1
    done = ()
    for i in gl.static_range(LAST):
        done = append(done, accs[i])
    return append(done, plus(accs[LAST], factor, t))
