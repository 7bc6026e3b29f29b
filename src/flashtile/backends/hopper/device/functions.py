"""Users' functions on a block of ``mods.Pairs``: printed mods, with the protocol of ``flashtile.mods.printed``.

A score mod is the first transform of the scores, and a mask mod is the last mask. Their loads by head and by row happen
once a tile if all blocks of a tile have the same rows, as in the forward. Their loads by key or pair happen while the
block's product runs. With lists, however, a mask mod loads only in partial blocks, when it is called.
"""

# ruff: noqa: RET505, RUF005 - Triton compiles code after a return, even if it is decided; for tuples see fetch.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.device.mods import At, place_of
from flashtile.backends.hopper.device.gluon_compat import aggregate


@gluon.jit
def user_functions(mods):
    """The ``UserFunctions`` of ``records.Mods``, which has a score mod or a mask mod."""
    HAS_SCORE: gl.constexpr = place_of(mods.SCORES, "score_mod") >= 0
    return UserFunctions(HAS_SCORE, place_of(mods.MASKS, "mask_mod"), mods.band.lists is not None)


@aggregate
class UserFunctions:
    """Users' functions, which ``records.Mods`` has.

    Attributes:
        has_score: Whether there is a score mod, which is the first transform.
        mask: Place of the mask mod among the masks; negative without one.
        is_listed: Whether lists say in which blocks the mask mod is called.
    """

    has_score: gl.constexpr
    mask: gl.constexpr
    is_listed: gl.constexpr

    @gluon.jit
    def of_tile(self, mods, b, h, i):
        """Each function's loads for a head and for its rows i: ((of the head, of the rows), ...)."""
        read = ()
        if self.has_score:
            read = read + (_of_tile(mods.scores[0], At(b, h, i, i, None, None, None, ())),)
        if self.mask >= 0 and not self.is_listed:
            read = read + (_of_tile(mods.masks[self.mask], At(b, h, i, i, None, None, None, ())),)
        return read

    @gluon.jit
    def fetch(self, mods, pairs, x):
        """Each function's loads for a block like ``x``.

        Tuples are added here, not by ``parts.append`` (``gpu.device``: tuples).
        """
        fetched = ()
        if self.has_score:
            fetched = fetched + (_fetch(mods.scores[0], pairs.read[0], pairs, x),)
        if self.mask >= 0 and not self.is_listed:
            fetched = fetched + (_fetch(mods.masks[self.mask], pairs.read[len(pairs.read) - 1], pairs, x),)
        return fetched

    @gluon.jit
    def score(self, s, mods, pairs, fetched):
        """The score mod applied to scores, in natural units."""
        head, rows = pairs.read[0]
        return mods.scores[0].function(s, fetched, mods.scores[0].operands, head, rows, at_pairs(pairs, s))

    @gluon.jit
    def linear(self, s, mods, pairs, fetched):
        """(``score``, its derivative by s), for a score mod with a derivative other than 1."""
        head, rows = pairs.read[0]
        return mods.scores[0].linear(s, fetched, mods.scores[0].operands, head, rows, at_pairs(pairs, s))

    @gluon.jit
    def select(self, x, mods, pairs, fetched, fill):
        """The block, ``fill`` where the mask mod drops a pair; its loads are fetched's last."""
        if self.mask >= 0:
            if not self.is_listed:
                of_mask = fetched[len(fetched) - 1]
                x = _select(x, mods.masks[self.mask], of_mask, pairs.read[len(pairs.read) - 1], pairs, fill)
            else:
                if pairs.is_partial:
                    i, _ = positions(pairs, x)
                    read = _of_tile(mods.masks[self.mask], At(pairs.b, pairs.head, i, i, None, None, None, ()))
                    of_mask = _fetch(mods.masks[self.mask], read, pairs, x)
                    x = _select(x, mods.masks[self.mask], of_mask, read, pairs, fill)
        return x


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
def _of_tile(mod, at):
    head = mod.of_head(mod.operands, at)
    return head, mod.of_rows(mod.operands, head, at)


@gluon.jit
def _fetch(mod, read, pairs, x):
    return mod.fetch(mod.operands, read[0], read[1], at_pairs(pairs, x))


@gluon.jit
def _select(x, mod, fetched, read, pairs, fill):
    return mod.function(x, fetched, mod.operands, read[0], read[1], at_pairs(pairs, x), fill)
