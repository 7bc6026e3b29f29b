"""Score transforms: what happens to ``q @ k^T`` between the product and the softmax, and its derivative.

A transform is a value: a ``@triton.jit`` function that a kernel takes as a constexpr. An elementwise one has the form

    transform(scores, param, b, h, i, j) -> scores
    derivative(scores_out, param, b, h, i, j) -> d scores_out / d scores_in, from the output alone

with scores in natural units, ``i`` row positions (``row + seqlen_k - seqlen_q``) and ``j`` keys, broadcastable against
the scores. ``softcap`` is one; a caller's own function can come in the same way. ALiBi and bias are terms added behind
it, whose derivative is 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.vocab import mask, sequence


class ScoreTensor(NamedTuple):
    """A bias or mask over (batch, heads, rows, keys), with stride 0 where it broadcasts."""

    ptr: Any
    stride_b: Any
    stride_head: Any
    stride_row: Any
    stride_col: Any


class Terms(NamedTuple):
    """What becomes of a call's products: the same for all its heads.

    Attributes:
        band: ``mask.Band``.
        scale: softmax_scale.
        param: The score transform's parameter.
        alibi_ptr: ALiBi slopes, or None.
        alibi_stride_b: 0 if sequences share them.
        bias: ``ScoreTensor`` of an additive bias, whose ptr is None without one.
        mask: The same of a boolean mask, True keeps.
    """

    band: Any
    scale: Any
    param: Any
    alibi_ptr: Any
    alibi_stride_b: Any
    bias: Any
    mask: Any


class Pairs(NamedTuple):
    """The rows and keys of one head of one sequence, and what becomes of their products.

    Attributes:
        terms: ``Terms``.
        b: Sequence.
        h: Query head.
        length_q: Rows of the sequence.
        length_k: Keys of the sequence.
        slope: Of ``of_head``, like bias_at.
        bias_at: Where the head's bias begins.
        mask_at: Where its mask begins.
    """

    terms: Any
    b: Any
    h: Any
    length_q: Any
    length_k: Any
    slope: Any
    bias_at: Any
    mask_at: Any


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
def of_head(terms, b, h):
    """(slope, bias_at, mask_at) of a head, 0 for those that ``terms`` does not have."""
    slope, bias_at, mask_at = 0.0, 0, 0
    if terms.alibi_ptr is not None:
        slope = tl.load(terms.alibi_ptr + b * terms.alibi_stride_b + h).to(tl.float32)
    if terms.bias.ptr is not None:
        bias_at = sequence.base(terms.bias.ptr, b, 0, h, terms.bias.stride_b, 0, terms.bias.stride_head)
    if terms.mask.ptr is not None:
        mask_at = sequence.base(terms.mask.ptr, b, 0, h, terms.mask.stride_b, 0, terms.mask.stride_head)
    return slope, bias_at, mask_at


@triton.jit
def load_tile(tensor, at, pairs, rows, cols, other):
    """A tile of a head's bias or mask, ``other`` behind the ends.

    Strides of 0 broadcast: nothing is ever expanded in memory.
    """
    offsets = rows.to(tl.int64) * tensor.stride_row + cols.to(tl.int64) * tensor.stride_col
    return tl.load(at + offsets, mask=(rows < pairs.length_q) & (cols < pairs.length_k), other=other)


@triton.jit
def transform(product, pairs, rows, cols, SCORE_MOD: tl.constexpr, DERIVATIVE: tl.constexpr):
    """Everything that happens to a block of ``q @ k^T`` before masks.

    Args:
        product: The block, rows along either dimension.
        pairs: What it is a block of.
        rows: Rows of the sequence, like cols broadcastable against product.
        cols: Keys of the sequence.
        SCORE_MOD: An elementwise transform, or None.
        DERIVATIVE: Its derivative, or None where none is asked for.

    Returns:
        The scores in natural units, and d scores / d (scale * product): of the block's shape with DERIVATIVE, else 1.
    """
    terms = pairs.terms
    i = rows + (pairs.length_k - pairs.length_q)
    scores = product * terms.scale
    derivative = 1.0
    if SCORE_MOD is not None:
        scores = SCORE_MOD(scores, terms.param, pairs.b, pairs.h, i, cols)
        if DERIVATIVE is not None:
            derivative = DERIVATIVE(scores, terms.param, pairs.b, pairs.h, i, cols)
    if terms.alibi_ptr is not None:
        scores += alibi(pairs.slope, i, cols)
    if terms.bias.ptr is not None:
        scores += load_tile(terms.bias, pairs.bias_at, pairs, rows, cols, 0.0).to(tl.float32)
    return scores, derivative


@triton.jit
def select_band(x, pairs, rows, cols, fill):
    """x, or fill where the band or the end of the keys masks."""
    i = rows + (pairs.length_k - pairs.length_q)
    left, right = pairs.terms.band.left, pairs.terms.band.right
    return mask.band_select(x, i, cols, pairs.length_k, left, right, fill, left is not None, right is not None)


@triton.jit
def select_mask(x, pairs, rows, cols, fill):
    """x, or fill where the boolean mask masks, if there is one."""
    if pairs.terms.mask.ptr is not None:
        kept = load_tile(pairs.terms.mask, pairs.mask_at, pairs, rows, cols, 0)
        x = tl.where(kept != 0, x, fill)
    return x
