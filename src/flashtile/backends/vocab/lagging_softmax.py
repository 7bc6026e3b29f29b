"""Online softmax whose maximum lags: the same sums as ``softmax.update``, with most rescaling left out.

The origin that is subtracted from the scores cancels in the end, whatever it is; it only has to be close enough to the
maximum that exponentials neither overflow nor all vanish. So a row keeps its origin until its maximum has risen by
more than ``SLACK`` (base 2): the factor of what was accumulated before is then exactly 1 in most blocks, and a kernel
may skip the multiplication. The result is exact, not an approximation: docs/algorithm.md, "The (max, sum, out) monoid".
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.vocab import softmax

# 2**8 bounds a probability: far inside float16, and 2**8 more summands than before until a float32 sum loses a bit.
SLACK = tl.constexpr(8.0)


@triton.jit
def raise_origin(origin, scores, scale_log2, MAY_BE_EMPTY: tl.constexpr):
    """Moves the rows' origins to their maxima where those have risen by more than SLACK.

    Args:
        origin: [M] float32, base 2; -inf for a row that has seen no key.
        scores: [M, N] float32, -inf where masked.
        scale_log2: What turns scores into base-2 exponents, > 0.
        MAY_BE_EMPTY: Whether a row may still have no key after this block.

    Returns:
        origin: The new state.
        subtrahend: What to subtract from the scaled scores, finite.
        rescale: Factor of what was accumulated before, 1.0 exactly for a row whose origin stays.
    """
    top = tl.max(scores, 1) * scale_log2
    new_origin = tl.where(top > origin + SLACK, top, origin)
    subtrahend = new_origin
    if MAY_BE_EMPTY:
        subtrahend = softmax.finite_origin(new_origin)
    return new_origin, subtrahend, tl.exp2(origin - subtrahend)


@triton.jit
def first_origin(scores, scale_log2, MAY_BE_EMPTY: tl.constexpr):
    """Origin and subtrahend after a row's first block, as ``raise_origin`` returns them."""
    origin = tl.max(scores, 1) * scale_log2
    subtrahend = origin
    if MAY_BE_EMPTY:
        subtrahend = softmax.finite_origin(origin)
    return origin, subtrahend


@triton.jit
def exponentials(scores, scale_log2, subtrahend):
    """[M, N] unnormalised probabilities."""
    return tl.exp2(scores * scale_log2 - subtrahend[:, None])
