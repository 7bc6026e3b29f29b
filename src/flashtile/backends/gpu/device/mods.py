"""Mods: the operations on ``q @ k^T`` between the product and the softmax, and the masks of pairs.

A ``Mod`` transforms scores, or selects the scores that a row keeps. Softcap, ALiBi, bias and mask are mods. The band is
not, because it also decides which blocks are visited. A mod consists of ``@triton.jit`` functions and their operands:

        function(scores, operands, at) -> scores               for a transform
    linear(scores, operands, at) -> scores, slope          slope is d scores out / d scores in
        function(x, operands, at, fill) -> x                   for a mask: x where a row keeps the key, fill elsewhere
        of_head(operands, at) -> operands                      the functions' operands for a head, if these differ by
        head

with scores in natural units and ``at`` an ``At``, which has no p and j for ``of_head``. A user's functions, "score_mod"
and "mask_mod", are printed (``flashtile.mods.printed`` describes their protocol); score_mod comes first and mask_mod
last. Softcap, ALiBi and bias are applied in this order, then the band and the masks. In a cached call with draft trees
the mask is "tree". Transforms and the band then take the positions that ``tree_places`` computes for rows and for keys;
the tree's mask takes the keys' indices. A backend may compute a mod in another way, as the Hopper kernels do, and finds
it by its name in ``Mods.SCORES`` or ``Mods.MASKS``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.device import masks, softmax, tiles


class Head(NamedTuple):
    """One head of one sequence. shift is the position of row 0; operands are the results of the mods' ``of_head``."""

    b: Any
    h: Any
    shift: Any
    seqlen_q: Any
    seqlen_k: Any
    scores: Any
    masks: Any


class At(NamedTuple):
    """The pairs of a row and a key in a block. i, p and j broadcast against its scores.

    Attributes:
        b: The sequence.
        h: The query head.
        i: The rows.
        p: The rows' positions among the keys, ``i + seqlen_k - seqlen_q``; in a tree by depth.
        j: The keys.
        seqlen_q: Rows of the sequence.
        seqlen_k: Keys of the sequence.
        apart: If a kernel computes it in another way, (``i - j``, ``i - j`` of the block's first pair, the difference
            by thread, the difference by element), else ().
    """

    b: Any
    h: Any
    i: Any
    p: Any
    j: Any
    seqlen_q: Any
    seqlen_k: Any
    apart: Any


class PartSlope(NamedTuple):
    """The operand of ``alibi_of_part``: the distance of i and j is ``|offset + row_step * i - key_step * j|``."""

    slope: Any
    offset: Any
    row_step: Any
    key_step: Any


class HeadTensor(NamedTuple):
    """A ``ScoreTensor`` for one head: base is the address of row position 0 and key 0."""

    base: Any
    stride_row: Any
    stride_col: Any
    seqlen_k: Any


class TreeRows(NamedTuple):
    """A sequence's tree, and the words of some of its rows.

    Attributes:
        base: Address of the tree's words.
        count: Rows of the tree; 0 for a sequence without a tree.
        shift: Index of the first row's key.
        word: The words of the rows ``At.i``.
    """

    base: Any
    count: Any
    shift: Any
    word: Any


@triton.constexpr_function
def count(names):
    """The number of names in ``Mods.SCORES`` or ``MASKS``."""
    return len(names.split())


@triton.constexpr_function
def place_of(names, name):
    """The place of a name among ``names``; -1 if it is not there."""
    return names.split().index(name) if name in names.split() else -1


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
    # 2 * log2(e) turns exp(2 |x|) into exp2; if it overflows, 2 / inf is 0.
    far = 1.0 - 2.0 / (tl.exp2(magnitude * 2.8853900817779268) + 1.0)
    return tl.where(magnitude < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def softcap(scores, cap, at):
    """``cap * tanh(scores / cap)``."""
    return cap * tanh(scores / cap)


@triton.jit
def softcap_linear(scores, cap, at):
    """``softcap``, and ``1 - tanh^2``."""
    capped = softcap(scores, cap, at)
    ratio = capped / cap
    return capped, 1.0 - ratio * ratio


@triton.jit
def quick_softcap(scores, cap, twice_log2e_over_cap):
    """``softcap`` as accurate as a softmax needs: ``cap - 2 cap / (exp(2 scores / cap) + 1)``.

    Near 0 the difference cancels, so the relative error is large there. A softmax depends on absolute errors alone, and
    the absolute error stays under ``cap * 2e-7``. If the exponential overflows, the quotient is 0.

    Args:
        scores: float32, natural units.
        cap: The cap, > 0.
        twice_log2e_over_cap: ``2 * LOG2_E / cap``, times any factor not yet applied to the scores.
    """
    return cap - 2.0 * cap / (tl.exp2(scores * twice_log2e_over_cap) + 1.0)


@triton.jit
def slope_of_head(slopes, at):
    """The slope for ``alibi``, from ``SlopeTensor``."""
    return tl.load(slopes.ptr + tl.minimum(at.b, slopes.last) * slopes.stride_b + at.h).to(tl.float32)


@triton.jit
def alibi(scores, slope, at):
    """``scores - slope * |p - j|``.

    Scores are a product too: if the compiler chose which of the two products is fused with the sum, a row would have
    other bits in a loop with a mask than in one without.
    """
    return tl.fma(tl.abs(at.p - at.j).to(tl.float32), -slope, scores)


@triton.jit
def slope_of_part(parts, at):
    """The ``PartSlope`` from ``SlopeTensor``, origins (``core.masks.Origin``) and the number of sequences."""
    slopes, origins_ptr, num_sequences = parts
    exists, origin = at.b < num_sequences, origins_ptr + at.b * 6
    slope = tl.load(slopes.ptr + at.b * slopes.stride_b + at.h, mask=exists, other=0.0).to(tl.float32)
    row_step, key_step = tl.load(origin + 2, mask=exists, other=1), tl.load(origin + 4, mask=exists, other=1)
    row = tl.load(origin + 1, mask=exists, other=0) + tl.load(origin + 5, mask=exists, other=0)
    first_key = tl.load(origin + 3, mask=exists, other=0)
    return PartSlope(slope, row - row_step * (at.seqlen_k - at.seqlen_q) - first_key, row_step, key_step)


@triton.jit
def alibi_of_part(scores, part, at):
    """``alibi`` with the positions of a whole sequence."""
    distance = tl.abs(part.offset + part.row_step * at.p - part.key_step * at.j).to(tl.float32)
    return tl.fma(distance, -part.slope, scores)


@triton.jit
def bias(scores, tensor, at):
    """Scores plus a tile of a ``HeadTensor``."""
    return scores + load_tile(tensor, at, 0.0).to(tl.float32)


@triton.jit
def select_tensor(x, tensor, at, fill):
    """A boolean mask, given as bytes."""
    return tl.where(load_tile(tensor, at, 0) != 0, x, fill)


@triton.jit
def first_key(p, band):
    """The first key that position p keeps, inclusive."""
    first = p * 0
    if band.left is not None:
        first = p - band.left
    if band.chunk is not None:
        first = tl.maximum(first, masks.chunk_start(p, band.chunk))
    return first


@triton.jit
def last_key(p, seqlen_k, band):
    """The last key that position p keeps, inclusive."""
    last = p * 0 + (seqlen_k - 1)
    if band.right is not None:
        last = tl.minimum(p + band.right, last)
    if band.chunk is not None:
        last = tl.minimum(masks.chunk_stop(p, band.chunk) - 1, last)
    return last


@triton.jit
def first_row(p, shift, band):
    """The first row that keeps the key ``p + shift``, where row 0 is at position ``shift``."""
    first = p * 0
    if band.right is not None:
        first = p - band.right
    if band.chunk is not None:
        first = tl.maximum(first, masks.chunk_start(p + shift, band.chunk) - shift)
    return first


@triton.jit
def last_row(p, seqlen_q, shift, band):
    """The last row before seqlen_q that keeps the key ``p + shift``."""
    last = p * 0 + (seqlen_q - 1)
    if band.left is not None:
        last = tl.minimum(p + band.left, last)
    if band.chunk is not None:
        last = tl.minimum(masks.chunk_stop(p + shift, band.chunk) - shift - 1, last)
    return last


@triton.jit
def select_band(x, band, at, fill):
    """x, or fill where a row's band or the end of the keys excludes the key.

    The end of the keys and the band's right side fold into one number per row, so a score costs one comparison and one
    select for each bounded side. Selects are chained instead of joining booleans, because packing and unpacking
    booleans costs more than a select.
    """
    x = tl.where(at.j <= last_key(at.p, at.seqlen_k, band), x, fill)
    if band.left is not None:
        x = tl.where(at.j >= first_key(at.p, band), x, fill)
    return x


@triton.jit
def tensor_of_head(tensor, at):
    """The ``HeadTensor`` for a ``ScoreTensor``."""
    stride_b, stride_head = multiple(tensor.stride_b, tensor.VECTOR), multiple(tensor.stride_head, tensor.VECTOR)
    stride_row = multiple(tensor.stride_row, tensor.VECTOR)
    first = tiles.base(tensor.ptr, at.b, 0, at.h, stride_b, 0, stride_head)
    base = first - tl.cast(at.seqlen_k - at.seqlen_q, tl.int64) * stride_row
    return HeadTensor(base, stride_row, tensor.stride_col, multiple(at.seqlen_k, tensor.VECTOR))


@triton.jit
def tree_of_head(tree, at):
    """The ``TreeRows`` for a ``Tree``."""
    base, num_rows = tree.ptr + tl.cast(at.b, tl.int64) * tree.rows, tl.where(at.seqlen_q <= tree.rows, at.seqlen_q, 0)
    return TreeRows(base, num_rows, at.seqlen_k - at.seqlen_q, tree_words(base, num_rows, at.i))


@triton.jit
def tree_words(base, num_rows, i):
    """The words of rows i, without bits past the tree's rows; all bits for rows that are not in the tree."""
    whole = (num_rows == 0) | (num_rows >= 64)
    bits = tl.where(whole, tl.cast(-1, tl.int64), (tl.cast(1, tl.int64) << tl.minimum(num_rows, 63)) - 1)
    return tl.load(base + i, mask=(i >= 0) & (i < num_rows), other=-1) & bits


@triton.jit
def tree_places(base, num_rows, shift, j):
    """The positions of keys j: in a tree by the depths of their rows, otherwise their indices.

    A row's depth is the number of its word's bits, without the row's own bit.
    """
    n = tree_words(base, num_rows, j - shift)
    n -= (n >> 1) & 0x5555555555555555
    n = (n & 0x3333333333333333) + ((n >> 2) & 0x3333333333333333)
    n = (n + (n >> 4)) & 0x0F0F0F0F0F0F0F0F
    depth = ((n * 0x0101010101010101) >> 56).to(tl.int32) - 1
    return tl.where((j >= shift) & (j - shift < num_rows), shift + depth, j)


@triton.jit
def select_tree(x, tree, at, fill):
    """x, or fill where a row does not see a draft's key."""
    u = at.j - tree.shift
    bit = (tree.word >> tl.minimum(tl.maximum(u, 0), 63).to(tl.int64)) & 1
    return tl.where((u < 0) | (bit != 0), x, fill)


@triton.jit
def multiple(x, VECTOR: tl.constexpr):
    """A number that the compiler then treats as a multiple of VECTOR."""
    return x // VECTOR * VECTOR


@triton.jit
def load_tile(tensor, at, other):
    """A tile of a ``HeadTensor``, ``other`` past the last row and the last key. Stride 0 broadcasts without a copy."""
    offsets = at.p.to(tl.int64) * tensor.stride_row + at.j.to(tl.int64) * tensor.stride_col
    return tl.load(tensor.base + offsets, mask=(at.p < tensor.seqlen_k) & (at.j < tensor.seqlen_k), other=other)


@triton.jit
def head_of(mods, b, h, seqlen_q, seqlen_k, i=None):
    """The ``Head`` for a sequence and a query head, and for a tree's rows i."""
    at = At(b, h, i, None, None, seqlen_q, seqlen_k, ())
    # Written out (``gpu.device``: tuples).
    scores, masks = 0, 0
    NUM: tl.constexpr = count(mods.SCORES)
    if NUM == 1:
        scores = (_of_head(mods.scores[0], at),)
    if NUM == 2:
        scores = (_of_head(mods.scores[0], at), _of_head(mods.scores[1], at))
    if NUM == 3:
        scores = (_of_head(mods.scores[0], at), _of_head(mods.scores[1], at), _of_head(mods.scores[2], at))
    if NUM == 4:
        scores = (
            _of_head(mods.scores[0], at), _of_head(mods.scores[1], at), _of_head(mods.scores[2], at),
            _of_head(mods.scores[3], at),
        )  # fmt: skip
    if count(mods.MASKS) == 1:
        masks = (_of_head(mods.masks[0], at),)
    if count(mods.MASKS) == 2:
        masks = (_of_head(mods.masks[0], at), _of_head(mods.masks[1], at))
    return Head(b, h, seqlen_k - seqlen_q, seqlen_q, seqlen_k, scores, masks)


@triton.jit
def _of_head(mod, at):
    operands = 0
    if mod.of_head is not None:
        operands = mod.of_head(mod.operands, at)
    return operands


@triton.jit
def pairs_of(head, p, j):
    """The ``At`` for rows at positions p and keys j, in a ``Head``."""
    return At(head.b, head.h, p - head.shift, p, j, head.seqlen_q, head.seqlen_k, ())


@triton.jit
def block_of(head, first_row, first_key, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """``pairs_of`` for a block, with the differences between its places in a table of distances."""
    down, across = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    i, j = first_row + down, first_key + across
    apart = (i - j, first_row - first_key, down, -across)
    return At(head.b, head.h, i, i + head.shift, j, head.seqlen_q, head.seqlen_k, apart)


@triton.jit
def read(mods, head, at, PARTIAL: tl.constexpr):
    """Loads for a block by the user's score mod and mask mod.

    It must be called before the product: because of loads after it, ptxas makes each WGMMA wait for the one before.

    PARTIAL: as in ``select``, a constant.
    """
    of_score, of_mask = 0, 0
    MASK: tl.constexpr = place_of(mods.MASKS, "mask_mod")
    if place_of(mods.SCORES, "score_mod") >= 0:
        of_score = _read(mods.scores[0], head.scores[0], at)
    if PARTIAL and MASK >= 0:
        of_mask = _read(mods.masks[MASK], head.masks[MASK], at)
    return of_score, of_mask


@triton.jit
def _read(mod, head, at, given=None):
    if given is None:
        rows = mod.of_rows(mod.operands, head, at)
        fetched = mod.fetch(mod.operands, head, rows, at)
    else:
        rows, fetched = given
    return rows, fetched


@triton.jit
def apply(product, mods, head, at, WITH_SLOPE: tl.constexpr, given=None):
    """Applies the scale and all transforms to a block of ``q @ k^T``, before masks.

    Args:
        product: The block, rows along either dimension.
        mods: ``Mods``.
        head: The block's ``Head``.
        at: The block's ``At``.
        WITH_SLOPE: Whether to compute the slope.
        given: The results of ``read``; None if nothing was read yet.

    Returns:
        scores; scale_log2, the factor that turns them into base-2 exponents; and d scores / d (scale * product), of the
        block's shape if a transform has one, else 1.
    """
    scores, scale_log2 = product, mods.scale * softmax.LOG2_E
    slope = 1.0
    if mods.SCALE_FIRST:
        scores, scale_log2 = product * mods.scale, softmax.LOG2_E
        for n in tl.static_range(count(mods.SCORES)):
            if mods.scores[n].fetch is not None:
                rows, fetched = _read(mods.scores[n], head.scores[n], at, None if given is None else given[0])
                if WITH_SLOPE and mods.scores[n].linear is not None:
                    scores, factor = mods.scores[n].linear(
                        scores, fetched, mods.scores[n].operands, head.scores[n], rows, at
                    )
                    slope *= factor
                else:
                    scores = mods.scores[n].function(scores, fetched, mods.scores[n].operands, head.scores[n], rows, at)
            else:
                operands = mods.scores[n].operands
                if mods.scores[n].of_head is not None:
                    operands = head.scores[n]
                if WITH_SLOPE and mods.scores[n].linear is not None:
                    scores, factor = mods.scores[n].linear(scores, operands, at)
                    slope *= factor
                else:
                    scores = mods.scores[n].function(scores, operands, at)
    return scores, scale_log2, slope


@triton.jit
def partial_of_load(product, mods, head, at, partial):
    """The derivative of the user's score mod, the first transform, by one load; see ``dbias.Derivative``."""
    rows, fetched = _read(mods.scores[0], head.scores[0], at)
    found = partial.functions(product * mods.scale, fetched, mods.scores[0].operands, head.scores[0], rows, at)
    return found[partial.NUM]


@triton.jit
def place_of_load(mods, head, at, places):
    """The place that the load reads, as an offset into the contiguous gradient; see ``scatter.Places``."""
    rows, fetched = _read(mods.scores[0], head.scores[0], at)
    # Operands that the places are computed from are read through the call's own operands.
    found = places.of_loads(fetched, mods.scores[0].operands, places.operands, head.scores[0], rows, at)
    return found[places.NUM]


@triton.jit
def select(x, mods, head, at, fill, edge, partial=True, given=None):
    """x, or fill where a mask excludes the pair.

    The band and intervals are applied only if ``edge``, a constant or not, and the user's function only if ``partial``,
    likewise. ``given`` is as in ``apply``.
    """
    if edge:
        x = select_band(x, mods.band, at, fill)
        if mods.band.row_keys is not None:
            x = masks.select(x, mods.band.row_keys, at.b, at.h, at.i, at.j, fill)
        if mods.band.key_rows is not None:
            x = masks.select(x, mods.band.key_rows, at.b, at.h, at.j, at.i, fill)
    for n in tl.static_range(count(mods.MASKS)):
        if mods.masks[n].fetch is not None:
            if partial:
                x = by_function(x, mods.masks[n], head.masks[n], at, fill, None if given is None else given[1])
        else:
            operands = mods.masks[n].operands
            if mods.masks[n].of_head is not None:
                operands = head.masks[n]
            x = mods.masks[n].function(x, operands, at, fill)
    return x


@triton.jit
def by_function(x, mod, head, at, fill, given=None):
    """x, or fill where a printed mask mod excludes the pair. head: its operands in ``Head``."""
    rows, fetched = _read(mod, head, at, given)
    return mod.function(x, fetched, mod.operands, head, rows, at, fill)


@triton.jit
def score_gradient(probs, dprobs, delta, slope, mods, edge):
    """The gradient of a block of scores, before the transforms.

    With masks, or a user's function, it is 0 wherever the probability is 0, because a masked pair's slope may be
    infinite. edge is as in ``select``.
    """
    dscores = probs * (dprobs - delta) * slope
    if count(mods.MASKS) > 0 or place_of(mods.SCORES, "score_mod") >= 0 or edge:
        dscores = tl.where(probs == 0.0, 0.0, dscores)
    return dscores
