"""Score transforms: what happens to ``q @ k^T`` between the product and the softmax, and its derivative.

A ``ScoreMod`` is one transform, made of two ``@triton.jit`` functions and their operands:

    function(scores, operands, b, h, i, j) -> scores
    derivative(scores_out, operands, b, h, i, j) -> d scores_out / d scores_in, from the output alone

with scores in natural units, ``i`` row positions (``row + seqlen_k - seqlen_q``) and ``j`` keys, broadcastable against
the scores. softcap, ALiBi and bias are three of them, applied in this order; a caller's own function is a fourth.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.device import mask, softmax

# Slots per call, empty ones included. Triton 3.6 has no len() of a tuple that holds None.
NUM_SCORE_MODS = tl.constexpr(3)
NUM_MASK_MODS = tl.constexpr(1)


class ScoreMod(NamedTuple):
    """One transform of a call's scores; holds constants, so it is only passed as an argument, never assigned.

    Attributes:
        function: See the module's docstring; None for a transform that the call does not have.
        derivative: See the module's docstring; None where it is 1.
        of_head: ``of_head(operands, b, h, seqlen_q, seqlen_k)`` reads once per head what the functions take as
            operands; None where those are the same for all heads.
        operands: The argument of of_head; without of_head, the functions' own.
    """

    function: Any
    derivative: Any
    of_head: Any
    operands: Any


class Alibi(NamedTuple):
    """ALiBi slopes by head; ptr is None without any, stride_b 0 if sequences share them."""

    ptr: Any
    stride_b: Any


class PartSlope(NamedTuple):
    """What ``alibi_of_part`` takes: i and j are ``|offset + row_step * i - key_step * j|`` apart."""

    slope: Any
    offset: Any
    row_step: Any
    key_step: Any


class Terms(NamedTuple):
    """How a call's products become probabilities, the same for all heads; only passed as an argument, never assigned.

    Attributes:
        scale: softmax_scale.
        SCALE_FIRST: Whether scores are scaled before the softmax takes their maximum. Needed with any transform, and
            with a scale that is not positive; otherwise the scale is folded into the exponential's argument.
        INPUT_PRECISION: That of the matrix products.
        score_mods: Tuple of ``ScoreMod``, in their order.
        band: ``mask.Band``, applied to edge blocks alone.
        mask_mods: Tuple of ``mask.MaskMod``, applied to all blocks.
        dropout: ``dropout.Dropout``.
        sinks: (num_heads_q,), or None.
    """

    scale: Any
    SCALE_FIRST: Any
    INPUT_PRECISION: Any
    score_mods: Any
    band: Any
    mask_mods: Any
    dropout: Any
    sinks: Any = None


class Head(NamedTuple):
    """One head of one sequence; shift is the position of row 0, operands are what the mods' ``of_head`` returned."""

    b: Any
    h: Any
    shift: Any
    seqlen_k: Any
    score_operands: Any
    mask_operands: Any


class Pairs(NamedTuple):
    """The rows and keys of a ``Head`` and the ``Terms`` of their products; only passed on, never assigned."""

    terms: Any
    head: Any


@triton.jit
def tanh(x):
    """Hyperbolic tangent to float32 rounding, from exp2 alone: the interpreter and some targets have no tanh.

    Near 0 the quotient would cancel, so a polynomial in x^2 is used there (Cephes, tanhf, |x| < 0.625).
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
def slope_of_head(slopes, b, h, seqlen_q, seqlen_k):
    """The slope that ``alibi`` takes, of ``Alibi``."""
    return tl.load(slopes.ptr + b * slopes.stride_b + h).to(tl.float32)


@triton.jit
def alibi(scores, slope, b, h, i, j):
    """``scores - slope * |i - j|``."""
    return scores + -slope * tl.abs(i - j).to(tl.float32)


@triton.jit
def slope_of_part(parts, b, h, seqlen_q, seqlen_k):
    """The ``PartSlope`` of ``Alibi``, origins (``masks.Origin``) and the number of sequences."""
    slopes, origins_ptr, num_sequences = parts
    exists, at = b < num_sequences, origins_ptr + b * 6
    slope = tl.load(slopes.ptr + b * slopes.stride_b + h, mask=exists, other=0.0).to(tl.float32)
    row_step, key_step = tl.load(at + 2, mask=exists, other=1), tl.load(at + 4, mask=exists, other=1)
    row = tl.load(at + 1, mask=exists, other=0) + tl.load(at + 5, mask=exists, other=0)
    first_key = tl.load(at + 3, mask=exists, other=0)
    return PartSlope(slope, row - row_step * (seqlen_k - seqlen_q) - first_key, row_step, key_step)


@triton.jit
def alibi_of_part(scores, part, b, h, i, j):
    """``alibi`` with the positions of a whole sequence."""
    return scores + -part.slope * tl.abs(part.offset + part.row_step * i - part.key_step * j).to(tl.float32)


@triton.jit
def bias(scores, tensor, b, h, i, j):
    """Scores plus a tile of ``mask.HeadTensor``."""
    return scores + mask.load_tile(tensor, i, j, 0.0).to(tl.float32)


@triton.jit
def head_of(terms, b, h, seqlen_q, seqlen_k):
    """The ``Head`` of a sequence and a query head."""
    # Written out: in Triton 3.6 adding tuples loses the field names of the records in them.
    score_operands = (
        _operands(terms.score_mods[0], b, h, seqlen_q, seqlen_k),
        _operands(terms.score_mods[1], b, h, seqlen_q, seqlen_k),
        _operands(terms.score_mods[2], b, h, seqlen_q, seqlen_k),
    )
    mask_operands = (_operands(terms.mask_mods[0], b, h, seqlen_q, seqlen_k),)
    return Head(b, h, seqlen_k - seqlen_q, seqlen_k, score_operands, mask_operands)


@triton.jit
def _operands(mod, b, h, seqlen_q, seqlen_k):
    operands = 0
    if mod.function is not None and mod.of_head is not None:
        operands = mod.of_head(mod.operands, b, h, seqlen_q, seqlen_k)
    return operands


@triton.jit
def transform(product, pairs, i, j, WITH_DERIVATIVE: tl.constexpr):
    """Everything that happens to a block of ``q @ k^T`` before masks.

    Args:
        product: The block, rows along either dimension.
        pairs: The rows and keys it is a block of.
        i: Row positions, like j broadcastable against product.
        j: Keys.
        WITH_DERIVATIVE: Whether to compute the derivative.

    Returns:
        scores; scale_log2, the factor that turns them into base-2 exponents; and d scores / d (scale * product), of the
        block's shape if a transform has one, else 1.
    """
    scores, scale_log2 = product, pairs.terms.scale * softmax.LOG2_E
    derivative = 1.0
    if pairs.terms.SCALE_FIRST:
        scores, scale_log2 = product * pairs.terms.scale, softmax.LOG2_E
        for n in tl.static_range(NUM_SCORE_MODS):
            if pairs.terms.score_mods[n].function is not None:
                operands = pairs.terms.score_mods[n].operands
                if pairs.terms.score_mods[n].of_head is not None:
                    operands = pairs.head.score_operands[n]
                scores = pairs.terms.score_mods[n].function(scores, operands, pairs.head.b, pairs.head.h, i, j)
                if WITH_DERIVATIVE and pairs.terms.score_mods[n].derivative is not None:
                    derivative *= pairs.terms.score_mods[n].derivative(
                        scores, operands, pairs.head.b, pairs.head.h, i, j
                    )
    return scores, scale_log2, derivative


@triton.jit
def select(x, pairs, i, j, fill, edge):
    """x, or fill where a mask excludes the pair, the band's only if ``edge``, a constant or not."""
    if edge:
        x = mask.select_band(x, pairs.terms.band, pairs.head, i, j, fill)
    for n in tl.static_range(NUM_MASK_MODS):
        if pairs.terms.mask_mods[n].function is not None:
            operands = pairs.terms.mask_mods[n].operands
            if pairs.terms.mask_mods[n].of_head is not None:
                operands = pairs.head.mask_operands[n]
            x = pairs.terms.mask_mods[n].function(x, operands, pairs.head, i, j, fill)
    return x


@triton.jit
def score_gradient(probs, dprobs, delta, derivative, pairs, edge):
    """The gradient of a block of scores, before the score mods.

    With masks, 0 wherever the probability is 0: a masked pair's derivative may be infinite. edge as for ``select``.
    """
    dscores = probs * (dprobs - delta) * derivative
    if pairs.terms.mask_mods[0].function is not None or edge:
        dscores = tl.where(probs == 0.0, 0.0, dscores)
    return dscores
