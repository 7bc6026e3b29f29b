"""Score transforms: what happens to ``q @ k^T`` between the product and the softmax, and its derivative.

A transform is a value: a ``@triton.jit`` function that a kernel takes as a constexpr. An elementwise one has the form

    transform(scores, param, b, h, i, j) -> scores
    derivative(scores_out, param, b, h, i, j) -> d scores_out / d scores_in, from the output alone

with scores in natural units, ``i`` row positions (``row + seqlen_k - seqlen_q``) and ``j`` keys, broadcastable against
the scores. ``softcap`` is one; a caller's own function can come in the same way. ALiBi and bias are terms added behind
it, whose derivative is 1.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Hyperbolic tangent to float32 rounding, from exp2 alone: neither the interpreter nor every target has a tanh.

    Near 0 the quotient would cancel, so a polynomial in x^2 takes over (Cephes, tanhf, |x| < 0.625).
    """
    square = x * x
    poly = -5.70498872745e-3 * square + 2.06390887954e-2
    poly = poly * square - 5.37397155531e-2
    poly = poly * square + 1.33314422036e-1
    poly = poly * square - 3.33332819422e-1
    near = x + x * square * poly
    magnitude = tl.abs(x)
    # 2 * log2(e) turns exp(2 |x|) into exp2; where that overflows, 2 / inf is 0.
    far = 1.0 - 2.0 / (tl.exp2(magnitude * 2.8853900817779268) + 1.0)
    return tl.where(magnitude < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def softcap(scores, cap, b, h, i, j):
    """``cap * tanh(scores / cap)``."""
    return cap * tanh(scores / cap)


@triton.jit
def softcap_derivative(capped, cap, b, h, i, j):
    """``1 - tanh^2``, from the capped scores."""
    ratio = capped / cap
    return 1.0 - ratio * ratio


@triton.jit
def alibi(slope, i, j):
    """The ALiBi term ``-slope * |i - j|``, natural units."""
    return -slope * tl.abs(i - j).to(tl.float32)


@triton.jit
def load_tile(ptr, rows, cols, stride_row, stride_col, mask, other):
    """A tile of a bias or mask by its strides, 0 for a broadcast dimension: nothing is ever expanded in memory."""
    offsets = rows.to(tl.int64) * stride_row + cols.to(tl.int64) * stride_col
    return tl.load(ptr + offsets, mask=mask, other=other)
