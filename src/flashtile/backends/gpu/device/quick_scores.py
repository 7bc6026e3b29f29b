"""Score transforms as accurate as a softmax needs: an absolute error of a few float32 roundings of the cap."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softcap(scores, cap, twice_log2e_over_cap):
    """``cap * tanh(scores / cap)`` as ``cap - 2 cap / (exp(2 scores / cap) + 1)``.

    Near 0 the difference cancels, so the relative error is large there; a softmax depends on absolute errors alone, and
    that one stays under ``cap * 2e-7``. Where the exponential overflows, the quotient is 0.

    Args:
        scores: float32, natural units.
        cap: The cap, > 0.
        twice_log2e_over_cap: ``2 * LOG2_E / cap``, times any factor not yet applied to the scores.
    """
    return cap - 2.0 * cap / (tl.exp2(scores * twice_log2e_over_cap) + 1.0)
