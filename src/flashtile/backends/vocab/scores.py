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

from flashtile.backends.vocab import sequence


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
def slope_of(alibi_ptr, alibi_stride_b, b, h):
    """The ALiBi slope of query head h of sequence b, float32, or 0 without slopes; a stride of 0 shares them."""
    slope = 0.0
    if alibi_ptr is not None:
        slope = tl.load(alibi_ptr + b * alibi_stride_b + h).to(tl.float32)
    return slope


@triton.jit
def plane_of(ptr, b, h, stride_b, stride_head):
    """A mask or bias at (b, h, 0, 0), as ``transform`` and ``select_mask`` take it; strides 0 where it broadcasts.

    Not for None, which a Triton function cannot return.
    """
    return sequence.base(ptr, b, 0, h, stride_b, 0, stride_head)


@triton.jit
def load_tile(ptr, rows, cols, stride_row, stride_col, mask, other):
    """A tile of a bias or mask by its strides, 0 for a broadcast dimension: nothing is ever expanded in memory."""
    offsets = rows.to(tl.int64) * stride_row + cols.to(tl.int64) * stride_col
    return tl.load(ptr + offsets, mask=mask, other=other)


@triton.jit
def transform(
    product, scale, param, slope, bias_ptr, bias_stride_row, bias_stride_col, b, h, rows, cols, seqlen_q, seqlen_k,
    SCORE_MOD: tl.constexpr, DERIVATIVE: tl.constexpr, HAS_ALIBI: tl.constexpr,
):  # fmt: skip
    """Everything that happens to a block of ``q @ k^T`` before masks.

    Args:
        product: The block, rows along either dimension.
        scale: softmax_scale.
        param: The score transform's parameter.
        slope: ALiBi slope, read only if HAS_ALIBI.
        bias_ptr: Bias at (b, h, 0, 0), or None.
        bias_stride_row: Its strides.
        bias_stride_col: Its strides.
        b: Sequence.
        h: Query head.
        rows: Rows of the sequence, like cols broadcastable against product.
        cols: Keys of the sequence.
        seqlen_q: Nothing is read at or behind it.
        seqlen_k: Nothing is read at or behind it.
        SCORE_MOD: An elementwise transform, or None.
        DERIVATIVE: Its derivative, or None where none is asked for.
        HAS_ALIBI: Whether slope is given.

    Returns:
        The scores in natural units, and d scores / d (scale * product): of the block's shape with DERIVATIVE, else 1.
    """
    i = rows + (seqlen_k - seqlen_q)
    scores = product * scale
    derivative = 1.0
    if SCORE_MOD is not None:
        scores = SCORE_MOD(scores, param, b, h, i, cols)
        if DERIVATIVE is not None:
            derivative = DERIVATIVE(scores, param, b, h, i, cols)
    if HAS_ALIBI:
        scores += alibi(slope, i, cols)
    if bias_ptr is not None:
        exists = (rows < seqlen_q) & (cols < seqlen_k)
        bias = load_tile(bias_ptr, rows, cols, bias_stride_row, bias_stride_col, exists, 0.0)
        scores += bias.to(tl.float32)
    return scores, derivative


@triton.jit
def select_mask(x, mask_ptr, mask_stride_row, mask_stride_col, rows, cols, seqlen_q, seqlen_k, fill):
    """x, or fill where a boolean mask (at (b, h, 0, 0), True keeps; None for none) masks."""
    if mask_ptr is not None:
        exists = (rows < seqlen_q) & (cols < seqlen_k)
        kept = load_tile(mask_ptr, rows, cols, mask_stride_row, mask_stride_col, exists, 0)
        x = tl.where(kept != 0, x, fill)
    return x
