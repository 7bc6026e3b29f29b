"""Probabilities of a block of scores in 8 bits."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.device import inline_ptx
from flashtile.backends.hopper.device.wgmma_fragments import row_tops, thread_sums
from flashtile.backends.hopper.forward.softmax_step import block_pairs, is_edge, shape_scores
from flashtile.backends.hopper.quantized.inline_ptx import packed, pass_turn, take_turn
from flashtile.backends.vocab import softmax

# log2 of the factor of probabilities: the largest of a row become 256 of e4m3's 448.
PROBS_LOG2 = gl.constexpr(8.0)


@gluon.jit
def raise_max(channels, at, row_max, block, sizes, mod, MASKED: gl.constexpr, WARPGROUP: gl.constexpr):
    """(scores, scale, row_max, origin, factor): a block's scores, their factor, and what ``softmax.raise_max`` returns.

    Exponentials of an origin that is 8 less are probabilities of 2^8 times their size. MASKED: the block may be cut.
    """
    loop, n_block = at.loop, at.n_block
    pairs = block_pairs(channels.tiles, at.tiles, 0, loop, n_block, sizes, True, WARPGROUP)
    s, scale = block.s, mod.scale_log2
    if mod.has_softcap or mod.scale_first:
        s = s * block.score
    else:
        scale = scale * block.score
    s, _ = shape_scores(s, mod, pairs, (), sizes, loop, n_block, is_edge(loop, n_block, sizes), MASKED)
    row_max, origin, factor = softmax.raise_max(row_max, row_tops(s, row_max, scale, ()), MASKED)
    return s, scale, row_max, origin - PROBS_LOG2, factor


@gluon.jit
def probabilities(s, scale, origin, factor, row_sum, sizes, STRICT: gl.constexpr, WARPGROUP: gl.constexpr):
    """(words, row_sum): a block's probabilities, ``packed``, and the sums of what they were before they were rounded.

    In turns, as the unit of exponentials serves one warpgroup as fast as two. If STRICT no exponential leaves its turn;
    else ptxas may move arithmetic, and warpgroups merely keep in step.
    """
    following: gl.constexpr = (WARPGROUP + 1) % sizes.num_warpgroups
    if sizes.in_turns:
        origin = take_turn(origin, WARPGROUP) if STRICT else inline_ptx.take_turn(origin, WARPGROUP)
    e = softmax.exponentials(s, scale, origin)
    sum_factor = gl.convert_layout(factor, gl.SliceLayout(1, row_sum.type.layout))
    row_sum = row_sum * sum_factor[:, None] + thread_sums(e)
    if sizes.in_turns:
        row_sum = pass_turn(row_sum, following) if STRICT else inline_ptx.pass_turn(row_sum, following)
    return packed(e), row_sum
