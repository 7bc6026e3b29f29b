"""Probabilities of a block of the Hopper backward, keys by rows, and which pairs the band keeps."""

# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.device import mask, quick_scores, softmax
from flashtile.backends.hopper.backward.channels import PART_KEYS
from flashtile.backends.hopper.backward.scheduler import query_heads
from flashtile.backends.hopper.device.fragments import from_thread_column, keep_columns
from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.device.score_mod import Pairs

LOG2_E = softmax.LOG2_E
# Past every row.
FAR = gl.constexpr(2**30)


@aggregate
class KeyRows:
    """64 keys of a sequence, and which rows keep each of them.

    ``first`` and ``last`` are those of each key, as ``from_thread_column`` counts them. Rows from ``clear_from`` on and
    before ``clear_to`` keep all 64.
    """

    b: gl.tensor
    head: gl.tensor
    key: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    first: gl.tensor
    last: gl.tensor
    clear_from: gl.tensor
    clear_to: gl.tensor


@gluon.jit
def first_keeping(position, band):
    """The first row that keeps the key at a position: as a row keeps keys, with the sides exchanged."""
    return mask.first_key(position, band.right, band.right is not None)


@gluon.jit
def last_keeping(position, end, band):
    """The last row that does, of those before ``end``."""
    return mask.last_key(position, end, band.left, band.left is not None)


@gluon.jit
def rows_of_keys(records, tiles, like, grid, PART: gl.constexpr):
    """The ``KeyRows`` of a part of a tile."""
    key = records.get(tiles, "key") + PART * PART_KEYS
    seqlen_q, seqlen_k = records.get(tiles, "seqlen_q"), records.get(tiles, "seqlen_k")
    keys = key + gl.arange(0, PART_KEYS, gl.SliceLayout(1, like.type.layout))
    shift = seqlen_k - seqlen_q
    first = gl.where(keys < seqlen_k, first_keeping(keys - shift, grid.call.terms.band), FAR)
    last = last_keeping(keys - shift, seqlen_q, grid.call.terms.band)
    clear_from = first_keeping(key + (PART_KEYS - 1) - shift, grid.call.terms.band)
    clear_from = gl.where(key + PART_KEYS > seqlen_k, FAR, clear_from)
    clear_to = last_keeping(key - shift, FAR, grid.call.terms.band) + 1
    first, last = from_thread_column(first, like), from_thread_column(last, like)
    head, _ = query_heads(records.get(tiles, "head"), grid)
    return KeyRows(records.get(tiles, "sequence"), head, key, seqlen_q, seqlen_k, first, last, clear_from, clear_to)


@gluon.jit
def pairs_of(kept, rows):
    """Where the block of 64 keys by a ``RowBlock`` lies."""
    return Pairs(kept.b, kept.head + rows.head, rows.start, kept.key, kept.seqlen_q, kept.seqlen_k, True, 0, True, 0, 0)


@gluon.jit
def is_cut(start, kept, grid):
    """Whether some row of the block from ``start`` on does not keep some of the keys."""
    cut = start < kept.clear_from
    if grid.call.terms.band.left is not None:
        cut = cut | (start + grid.tiles.BLOCK_M > kept.clear_to)
    return cut


@gluon.jit
def keep_rows(x, start, kept, grid):
    """What [64, block_m] is in rows ``start ...``, 0 where a row does not keep a key."""
    return keep_columns(x, kept.first - start, kept.last - start, 0.0, True, grid.call.terms.band.left is not None)


@gluon.jit
def probabilities(s, lse_log2, kept, grid, mod, pairs, fetched):
    """Normalised probabilities, 0 where a row does not keep a key, and the factor of ``dprobs - delta`` in dscores.

    So dscores need no mask of their own: where the factor is 0, they are 0 unless dprobs or delta is not finite.
    """
    if mod.has_softcap:
        # In units of the cap.
        s = quick_scores.softcap(s, 1.0, mod.prescale)
        p = gl.exp2(mod.add_terms(s * (mod.softcap * LOG2_E), pairs, fetched, LOG2_E) - lse_log2)
        factor = p * (1.0 - s * s)
    else:
        p = gl.exp2(mod.add_terms(s * mod.scale_log2, pairs, fetched, LOG2_E) - lse_log2)
        factor = p
    if is_cut(pairs.row, kept, grid):
        p = keep_rows(p, pairs.row, kept, grid)
        factor = keep_rows(factor, pairs.row, kept, grid) if mod.has_softcap else p
    p = mod.select(p, fetched, 0.0)
    return p, mod.select(factor, fetched, 0.0) if mod.has_softcap else p
