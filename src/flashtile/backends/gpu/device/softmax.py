"""Online softmax in base 2: the running (maximum, sum) of a row, the scale of the accumulated output, and merging.

Mathematics: docs/algorithm.md, "The (max, sum, out) monoid". The state of an empty row is (-inf, 0). Source: Milakov
and Gimelshein 2018, arXiv:1805.02867, algorithm 3; Dao et al. 2022, arXiv:2205.14135, algorithm 1.

With LARGE, for calls with ``Problem.large_scores``, the maximum is kept in natural units and subtracted before
anything is multiplied: a score times LOG2_E might overflow, and next to 1e9 the log of a sum is lost. So lse is then a
pair, as in ``flashtile.core.states.in_parts``: the rounded number, and its rounding error.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device import records

LOG2_E = tl.constexpr(records.LOG2_E)
LN_2 = tl.constexpr(0.6931471805599453)
# From this size on, float32 holds too few digits of an lse in base 2 for the log of a sum: see ``is_lost``.
MOST = tl.constexpr(records.MOST_LSE)


@triton.jit
def made_finite(row_max):
    """The maximum to subtract: 0 for a row without a key, where -inf - -inf would be NaN."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def update(row_max, row_sum, scores, scale_log2, MAY_BE_EMPTY: tl.constexpr, LARGE: tl.constexpr = False):
    """Adds a block of scores to the running state.

    Args:
        row_max: [BLOCK_M] float32: maximum of ``scores * scale_log2`` so far; with LARGE maximum of the scores.
        row_sum: [BLOCK_M] float32.
        scores: [BLOCK_M, BLOCK_N] float32, -inf where masked.
        scale_log2: Factor that turns scores into base-2 exponents, > 0. Applied after the maximum, so each score costs
            one fused multiply-add. With LARGE it must be LOG2_E, and a score costs one instruction more.
        MAY_BE_EMPTY: Whether a row may still have no key after this block.
        LARGE: See the module.

    Returns:
        probs [BLOCK_M, BLOCK_N], unnormalised; rescale [BLOCK_M], the factor of the output accumulated so far; and the
        new row_max and row_sum.
    """
    if LARGE:
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        finite_max = made_finite(new_max)
        rescale = tl.exp2((row_max - finite_max) * LOG2_E)
        probs = tl.exp2((scores - finite_max[:, None]) * LOG2_E)
    else:
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
def add_sink(row_max, row_sum, sink, LARGE: tl.constexpr = False):
    """Adds a sink to the softmax denominator.

    Which products are fused with a sum is written out, since the compiler chooses otherwise in other builds: a row
    would have other bits in a packed call.

    Args:
        row_max: [BLOCK_M] float32, base 2; with LARGE in natural units.
        row_sum: [BLOCK_M] float32.
        sink: The logit, natural units; -inf adds nothing.
        LARGE: See the module.

    Returns:
        rescale [BLOCK_M], the factor of the accumulated output; row_max; row_sum.
    """
    top = sink if LARGE else sink * LOG2_E
    new_max = tl.maximum(row_max, top)
    finite_max = made_finite(new_max)
    if LARGE:
        rescale, weight = tl.exp2((row_max - finite_max) * LOG2_E), tl.exp2((top - finite_max) * LOG2_E)
    else:
        rescale, weight = tl.exp2(row_max - finite_max), tl.exp2(tl.fma(sink, LOG2_E, -finite_max))
    return rescale, new_max, tl.fma(row_sum, rescale, weight)


@triton.jit
def finalise(row_max, row_sum, LARGE: tl.constexpr = False):
    """The factor that normalises the accumulated output, and the row's log-sum-exp.

    Returns:
        scale [BLOCK_M] float32: 1 / row_sum, 0 for an empty row; lse [BLOCK_M] float32, natural log, -inf for an empty
        row; with LARGE a pair.
    """
    empty = row_sum == 0.0
    total = tl.where(empty, 1.0, row_sum)
    scale = tl.where(empty, 0.0, 1.0 / total)
    if LARGE:
        lse = in_parts(row_max, tl.log2(total) * LN_2, empty)
    else:
        lse = tl.where(empty, float("-inf"), (row_max + tl.log2(total)) * LN_2)
    return scale, lse


@triton.jit
def largest(row_max, row_sum, LARGE: tl.constexpr = False):
    """The largest score of each row [BLOCK_M] in natural units, from its state without a sink; -inf for an empty row.

    NaN for a row with a score of NaN or infinity: maxima pass over NaN, sums do not.
    """
    top = row_max if LARGE else row_max * LN_2
    return tl.where(row_sum == row_sum, top, row_sum)


@triton.jit
def in_parts(top, log_sum, empty):
    """``flashtile.core.states.in_parts``."""
    lse = top + log_sum
    return tl.where(empty, float("-inf"), lse), tl.where(empty, 0.0, log_sum - (lse - top))


@triton.jit
def merge(out, lse, more_out, more_lse):
    """Merges the states of two disjoint sets of keys, as ``flashtile.core.states.merge``; (0, -inf) is the empty state.

    Args:
        out: [BLOCK_M, BLOCK_DV] float32, normalised.
        lse: [BLOCK_M] float32, natural log.
        more_out: Like out.
        more_lse: Like lse.

    Returns:
        out and lse for both sets together. An empty state's out is ignored, whatever it contains, and the other state's
        bits are kept.
    """
    finite_max = made_finite(tl.maximum(lse, more_lse))
    weight, more_weight = tl.exp2((lse - finite_max) * LOG2_E), tl.exp2((more_lse - finite_max) * LOG2_E)
    scale, log_total = finalise(0.0, weight + more_weight)
    weight, more_weight = (weight * scale)[:, None], (more_weight * scale)[:, None]
    joined = tl.where(weight == 0.0, 0.0, out * weight) + tl.where(more_weight == 0.0, 0.0, more_out * more_weight)
    return joined, finite_max + log_total


@triton.jit
def merge_in_parts(out, lse, more_out, more_lse):
    """``merge`` for two states with LARGE; lse and more_lse are pairs."""
    finite_max = made_finite(tl.maximum(lse[0], more_lse[0]))
    own, other = lse[0] - finite_max + lse[1], more_lse[0] - finite_max + more_lse[1]
    # The larger state's weight is exactly 1, so that its bits are kept if the other state is empty.
    top = made_finite(tl.maximum(own, other))
    weight, more_weight = tl.exp2((own - top) * LOG2_E), tl.exp2((other - top) * LOG2_E)
    total = weight + more_weight
    scale, _ = finalise(0.0, total)
    joined_lse = in_parts(finite_max, top + tl.log2(tl.where(total == 0.0, 1.0, total)) * LN_2, total == 0.0)
    weight, more_weight = (weight * scale)[:, None], (more_weight * scale)[:, None]
    joined = tl.where(weight == 0.0, 0.0, out * weight) + tl.where(more_weight == 0.0, 0.0, more_out * more_weight)
    return joined, joined_lse


@triton.jit
def is_lost(lse):
    """Whether float32 may not hold lse, or multiplying scores with LOG2_E before the softmax may have overflowed.

    It is also true for rows without keys, and for NaN.
    """
    return (tl.abs(lse) < MOST) == 0


@triton.jit
def load_lse(ptr, at, exists, LARGE: tl.constexpr):
    """Lse of rows; (-inf, 0) or -inf for rows that do not exist. ``at`` is the rows' indices."""
    if LARGE:
        lse = (
            tl.load(ptr + 2 * at, mask=exists, other=float("-inf")),
            tl.load(ptr + 2 * at + 1, mask=exists, other=0.0),
        )
    else:
        lse = tl.load(ptr + at, mask=exists, other=float("-inf"))
    return lse


@triton.jit
def store_lse(ptr, at, lse, exists, LARGE: tl.constexpr):
    """Stores lse of rows; arguments as in ``load_lse``."""
    if LARGE:
        tl.store(ptr + 2 * at, lse[0], mask=exists)
        tl.store(ptr + 2 * at + 1, lse[1], mask=exists)
    else:
        tl.store(ptr + at, lse, mask=exists)


@triton.jit
def lse_log2_of(lse):
    """Lse in base 2. The backward subtracts it from base-2 scores to get normalised probabilities.

    An empty row (lse -inf) gets +inf, so each of its probabilities is exp2(-inf) = 0 without a mask.
    """
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
