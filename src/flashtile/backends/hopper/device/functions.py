"""Users' functions on a block of ``mods.Pairs``: printed mods, with the protocol of ``flashtile.mods.printed``.

A score mod is the first transform of the scores, and a mask mod is the last mask. Their loads by head and by row happen
once a tile if all blocks of a tile have the same rows, as in the forward. Their loads by key or pair happen while the
block's product runs. With lists, however, a mask mod loads only in partial blocks, when it is called.
"""

# ruff: noqa: RET505, RUF005 - Triton compiles code after a return, even if it is decided; for tuples see fetch.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.device.mods import At, count
from flashtile.backends.hopper.device.fragments import as_before, by_thread, thread_start
from flashtile.backends.hopper.device.inline_ptx import keep_by_bits


@gluon.constexpr_function
def has_score_mod(names):
    """Whether a user's score mod is among ``Mods.SCORES``."""
    return "score_mod" in names.split()


@gluon.constexpr_function
def has_mask_mod(names):
    """Whether a mask mod is among ``Mods.MASKS``."""
    return "mask_mod" in names.split()


@gluon.constexpr_function
def reads(scores, masks, lists):
    """Whether some function's loads happen before it is called."""
    return has_score_mod(scores) or (has_mask_mod(masks) and lists is None)


@gluon.jit
def positions(pairs, x):
    """(rows, keys) of a block like ``x``, each along its dimension."""
    layout: gl.constexpr = x.type.layout
    down = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))[:, None]
    across = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
    if pairs.keys_first:
        return pairs.row + across, pairs.key + down
    else:
        return pairs.row + down, pairs.key + across


@gluon.constexpr_function
def along(layout, dim, rank):
    """The layout of one of a tensor's dimensions."""
    for each in reversed(range(rank)):
        layout = layout if each == dim else gl.SliceLayout(each, layout)
    return layout


@gluon.jit
def distances(pairs, x):
    """[M, N] distances ``row - key``; the first pair's distance; and two parts of each difference to the first one.

    The distance is a sum of a thread's own part and constants, so that the compiler finds equal ones: a row and the row
    8 after it have the same distance to a column and the column 8 after it, so values of the distance are computed
    once.
    """
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    layout: gl.constexpr = gl.reshape(x, [M // 16, 2, 8, N // 8, 4, 2]).type.layout
    own_rows = 16 * gl.arange(0, M // 16, along(layout, 0, 6))[:, None, None, None, None, None]
    own_rows = own_rows + gl.arange(0, 8, along(layout, 2, 6))[None, None, :, None, None, None]
    own_cols = 2 * gl.arange(0, 4, along(layout, 4, 6))[None, None, None, None, :, None]
    cols = 8 * gl.arange(0, N // 8, along(layout, 3, 6))[None, None, None, :, None, None]
    cols = cols + gl.arange(0, 2, along(layout, 5, 6))[None, None, None, None, None, :]
    more = 8 * gl.arange(0, 2, along(layout, 1, 6))[None, :, None, None, None, None] - cols
    own = own_rows - own_cols
    if pairs.keys_first:
        own, more = -own, -more
    first = pairs.row - pairs.key
    zeros = gl.zeros([M // 16, 2, 8, N // 8, 4, 2], gl.int32, layout)
    return _as_block(first + own + more, x), first, _as_block(own + zeros, x), _as_block(more + zeros, x)


@gluon.jit
def _as_block(t, x):
    return gl.convert_layout(gl.reshape(t, [x.shape[0], x.shape[1]]), x.type.layout)


@gluon.jit
def at_pairs(pairs, x):
    """The ``At`` of a block like ``x``, for the functions."""
    i, j = positions(pairs, x)
    return At(pairs.b, pairs.head, i, i, j, pairs.seqlen_q, pairs.seqlen_k, distances(pairs, x))


@gluon.jit
def of_tile(mods, b, h, i):
    """Each function's loads for a head and for its rows i: ((of the head, of the rows), ...)."""
    read = ()
    if has_score_mod(mods.SCORES):
        read = read + (_of_tile(mods.scores[0], At(b, h, i, i, None, None, None, ())),)
    LAST: gl.constexpr = count(mods.MASKS) - 1
    if has_mask_mod(mods.MASKS) and mods.band.lists is None:
        read = read + (_of_tile(mods.masks[LAST], At(b, h, i, i, None, None, None, ())),)
    return read


@gluon.jit
def _of_tile(mod, at):
    head = mod.of_head(mod.operands, at)
    return head, mod.of_rows(mod.operands, head, at)


@gluon.jit
def fetch(mods, pairs, x):
    """Each function's loads for a block like ``x``.

    Tuples are added here, not by ``parts.append`` (``gpu.device``: tuples).
    """
    fetched = ()
    if has_score_mod(mods.SCORES):
        fetched = fetched + (_fetch(mods.scores[0], pairs.read[0], pairs, x),)
    LAST: gl.constexpr = count(mods.MASKS) - 1
    if has_mask_mod(mods.MASKS) and mods.band.lists is None:
        fetched = fetched + (_fetch(mods.masks[LAST], pairs.read[len(pairs.read) - 1], pairs, x),)
    if mods.band.lists is not None:  # noqa: SIM102 compile-time conditions
        if mods.band.lists.BITS:
            fetched = fetched + (_load_bits(mods.band.lists, pairs, x),)
    return fetched


@gluon.jit
def bits_at(lists, first, position, own, TILE: gl.constexpr):
    """(the place of the bits for a row of 64 elements by TILE, the number of other elements' low bits in each number).

    Args:
        lists: ``Lists`` with bits.
        first: The result of ``masks.bits_of``.
        position: The position of the other side's tile in its list.
        own: The first element of this side.
        TILE: Elements of the other side's tile.
    """
    SPLIT: gl.constexpr = lists.OTHER // TILE
    at = first + position // SPLIT * (lists.BLOCK * lists.OTHER // 32) + own % lists.BLOCK * 4
    if TILE % 128 == 0:
        return at + position % SPLIT * (TILE // 128 * lists.BLOCK * 4), 0
    else:
        col = position % SPLIT * TILE
        return at + col // 128 * (lists.BLOCK * 4), col % 128 // 4


@gluon.jit
def _load_bits(lists, pairs, x):
    """[M, 4]: the bits of each thread's elements; 0 except in partial blocks."""
    row, col = thread_start(x)
    return gl.load(lists.items + pairs.bits[0] + (row * 4 + col // 2), mask=pairs.is_partial, other=0) >> pairs.bits[1]


@gluon.jit
def _keep_bits(x, bits, fill: gl.constexpr):
    """[M, N] x, ``fill`` where the bits of ``_load_bits`` are 0."""
    FILL: gl.constexpr = "0f00000000" if fill == 0.0 else "0fFF800000"
    return as_before(keep_by_bits(by_thread(x), bits, x.shape[1] // 2, FILL), x)


@gluon.jit
def _fetch(mod, read, pairs, x):
    return mod.fetch(mod.operands, read[0], read[1], at_pairs(pairs, x))


@gluon.jit
def score(s, mods, pairs, fetched):
    """The score mod applied to scores, in natural units."""
    head, rows = pairs.read[0]
    return mods.scores[0].function(s, fetched, mods.scores[0].operands, head, rows, at_pairs(pairs, s))


@gluon.jit
def linear(s, mods, pairs, fetched):
    """(``score``, its derivative by s), for a score mod with a derivative other than 1."""
    head, rows = pairs.read[0]
    return mods.scores[0].linear(s, fetched, mods.scores[0].operands, head, rows, at_pairs(pairs, s))


@gluon.jit
def select(x, mods, pairs, fetched, fill):
    """The block, ``fill`` where the mask mod or bits of lists drop a pair; the mask mod's loads are fetched's last."""
    if mods.band.lists is not None:  # noqa: SIM102 compile-time conditions
        if mods.band.lists.BITS:  # noqa: SIM102
            if pairs.is_partial:
                x = _keep_bits(x, fetched[len(fetched) - 1], fill)
    if has_mask_mod(mods.MASKS):
        LAST: gl.constexpr = count(mods.MASKS) - 1
        if mods.band.lists is None:
            of_mask = fetched[len(fetched) - 1]
            x = _select(x, mods.masks[LAST], of_mask, pairs.read[len(pairs.read) - 1], pairs, fill)
        else:
            if pairs.is_partial:
                i, _ = positions(pairs, x)
                read = _of_tile(mods.masks[LAST], At(pairs.b, pairs.head, i, i, None, None, None, ()))
                of_mask = _fetch(mods.masks[LAST], read, pairs, x)
                x = _select(x, mods.masks[LAST], of_mask, read, pairs, fill)
    return x


@gluon.jit
def _select(x, mod, fetched, read, pairs, fill):
    return mod.function(x, fetched, mod.operands, read[0], read[1], at_pairs(pairs, x), fill)
