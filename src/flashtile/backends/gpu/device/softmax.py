"""Online softmax in base 2: the running (maximum, sum) of a row, the scale of the accumulated output, and merging.

Mathematics: docs/algorithm.md, "The (max, sum, out) monoid". The state of an empty row is (-inf, 0). Source: Milakov
and Gimelshein 2018, arXiv:1805.02867, algorithm 3; Dao et al. 2022, arXiv:2205.14135, algorithm 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def made_finite(row_max):
    """The maximum to subtract: 0 for a row without a key, where -inf - -inf would be NaN."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def update(row_max, row_sum, scores, scale_log2, MAY_BE_EMPTY: tl.constexpr):
    """Adds a block of scores to the running state.

    Args:
        row_max: [BLOCK_M] float32: maximum of ``scores * scale_log2`` so far.
        row_sum: [BLOCK_M] float32.
        scores: [BLOCK_M, BLOCK_N] float32, -inf where masked.
        scale_log2: Factor that turns scores into base-2 exponents, > 0. Applied after the maximum, so each score costs
            one fused multiply-add.
        MAY_BE_EMPTY: Whether a row may still have no key after this block.

    Returns:
        probs [BLOCK_M, BLOCK_N], unnormalised; rescale [BLOCK_M], the factor of the output accumulated so far; and the
        new row_max and row_sum.
    """
    new_max, finite_max, rescale = raise_max(row_max, tl.max(scores, 1) * scale_log2, MAY_BE_EMPTY)
    probs = exponentials(scores, scale_log2, finite_max)
    return probs, rescale, new_max, row_sum * rescale + tl.sum(probs, 1)


@triton.jit
def raise_max(row_max, top, MAY_BE_EMPTY: tl.constexpr):
    """The part of ``update`` that computes the value subtracted from the scores.

    Args:
        row_max: [BLOCK_M], the maximum so far.
        top: [BLOCK_M], the maximum of a block's ``scores * scale_log2``.
        MAY_BE_EMPTY: As for ``update``.

    Returns:
        The new row_max; finite_max [BLOCK_M], ``made_finite``; rescale [BLOCK_M], as for ``update``.
    """
    new_max = tl.maximum(row_max, top)
    finite_max = new_max
    if MAY_BE_EMPTY:
        finite_max = made_finite(new_max)
    return new_max, finite_max, tl.exp2(row_max - finite_max)


@triton.jit
def exponentials(scores, scale_log2, finite_max):
    """[BLOCK_M, BLOCK_N] probabilities, unnormalised."""
    return tl.exp2(scores * scale_log2 - finite_max[:, None])


@triton.jit
def add_sink(row_max, row_sum, sink):
    """Adds a sink to the softmax denominator.

    Args:
        row_max: [BLOCK_M] float32, base 2.
        row_sum: [BLOCK_M] float32.
        sink: The logit, natural units; -inf adds nothing.

    Returns:
        rescale [BLOCK_M], the factor of the accumulated output; row_max; row_sum.
    """
    sink_log2 = sink * LOG2_E
    new_max = tl.maximum(row_max, sink_log2)
    finite_max = made_finite(new_max)
    rescale = tl.exp2(row_max - finite_max)
    return rescale, new_max, row_sum * rescale + tl.exp2(sink_log2 - finite_max)


@triton.jit
def finalise(row_max, row_sum):
    """The factor that normalises the accumulated output, and the row's log-sum-exp.

    Returns:
        scale [BLOCK_M] float32: 1 / row_sum, 0 for an empty row; lse [BLOCK_M] float32, natural log, -inf for an empty
        row.
    """
    empty = row_sum == 0.0
    total = tl.where(empty, 1.0, row_sum)
    scale = tl.where(empty, 0.0, 1.0 / total)
    lse = tl.where(empty, float("-inf"), (row_max + tl.log2(total)) * LN_2)
    return scale, lse


@triton.jit
def merge(out, lse, more_out, more_lse):
    """Joins the states of two disjoint sets of keys, as ``flashtile.core.states.merge``; (0, -inf) is the empty state.

    Args:
        out: [BLOCK_M, BLOCK_DV] float32, normalised.
        lse: [BLOCK_M] float32, natural log.
        more_out: Like out.
        more_lse: Like lse.

    Returns:
        out and lse of both sets together. An empty state's out is ignored, whatever it contains, and the other state's
        bits are kept.
    """
    finite_max = made_finite(tl.maximum(lse, more_lse))
    weight, more_weight = tl.exp2((lse - finite_max) * LOG2_E), tl.exp2((more_lse - finite_max) * LOG2_E)
    scale, log_total = finalise(0.0, weight + more_weight)
    weight, more_weight = (weight * scale)[:, None], (more_weight * scale)[:, None]
    joined = tl.where(weight == 0.0, 0.0, out * weight) + tl.where(more_weight == 0.0, 0.0, more_out * more_weight)
    return joined, finite_max + log_total


@triton.jit
def lse_log2_of(lse):
    """Lse in base 2, which the backward subtracts from base-2 scores to get normalised probabilities.

    An empty row (lse -inf) gets +inf, so each of its probabilities is exp2(-inf) = 0 without a mask.
    """
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
