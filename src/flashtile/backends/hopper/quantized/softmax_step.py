"""Probabilities of a block of scores in 8 bits."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.device import softmax
from flashtile.backends.hopper.device import inline_ptx
from flashtile.backends.hopper.device.fragments import row_tops, thread_sums
from flashtile.backends.hopper.forward.softmax_step import block_pairs, is_edge, shape_scores
from flashtile.backends.hopper.quantized.inline_ptx import packed, pingpong_arrive, pingpong_wait

# log2 of the factor of probabilities: the largest of a row become 256 of e4m3's 448.
PROBS_LOG2 = gl.constexpr(8.0)


@gluon.jit
def raise_max(channels, at, row_max, block, call, schedule, mod, MASKED: gl.constexpr, WARPGROUP: gl.constexpr):
    """(scores, scale, row_max, finite_max, factor): a block's scores, their factor, and ``softmax.raise_max``.

    finite_max is 8 less, so that probabilities come out times 2^8. MASKED: the block may need the band's mask.
    """
    loop, n_block = at.loop, at.n_block
    pairs = block_pairs(channels.tiles, at.tiles, 0, loop, n_block, call, schedule, True, WARPGROUP)
    s, scale = block.s, mod.scale_log2
    if mod.has_softcap or mod.scale_first:
        s = s * block.score
    else:
        scale = scale * block.score
    s, _ = shape_scores(s, mod, pairs, (), call, schedule, loop, n_block, is_edge(loop, n_block, call), MASKED)
    row_max, finite_max, factor = softmax.raise_max(row_max, row_tops(s, row_max, scale, ()), MASKED)
    return s, scale, row_max, finite_max - PROBS_LOG2, factor


@gluon.jit
def probabilities(s, scale, finite_max, factor, row_sum, schedule, STRICT: gl.constexpr, WARPGROUP: gl.constexpr):
    """(words, row_sum): a block's probabilities, ``packed``, and the sums of what they were before they were rounded.

    Between ping-pong barriers: exponentials of two warpgroups at once take as long as one after the other. STRICT keeps
    all of them between the barriers; else ptxas may move some.
    """
    following: gl.constexpr = (WARPGROUP + 1) % schedule.NUM_WARPGROUPS
    if schedule.PINGPONG:
        finite_max = pingpong_wait(finite_max, WARPGROUP) if STRICT else inline_ptx.pingpong_wait(finite_max, WARPGROUP)
    e = softmax.exponentials(s, scale, finite_max)
    sum_factor = gl.convert_layout(factor, gl.SliceLayout(1, row_sum.type.layout))
    row_sum = row_sum * sum_factor[:, None] + thread_sums(e)
    if schedule.PINGPONG:
        row_sum = pingpong_arrive(row_sum, following) if STRICT else inline_ptx.pingpong_arrive(row_sum, following)
    return packed(e), row_sum
