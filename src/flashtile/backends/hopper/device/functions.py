"""Users' functions on a block of ``mods.Pairs``: printed mods, whose protocol is that of ``flashtile.mods.printed``.

A score mod is the first of the scores' transforms, a mask mod the last of the masks. What they read of a head and of
rows is read once a tile where a tile has the same rows for all of its blocks, as the forward's do; what they load by
key or pair, while the block's product runs.
"""

# ruff: noqa: RET505 - Triton compiles what stands after a return, decided or not.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.device.mods import At, count
from flashtile.backends.hopper.device.parts import also


@gluon.constexpr_function
def has_score_mod(names):
    """Whether a score mod of the user's is among ``Mods.SCORES``."""
    return "score_mod" in names.split()


@gluon.constexpr_function
def has_mask_mod(names):
    """Whether a mask mod is among ``Mods.MASKS``."""
    return "mask_mod" in names.split()


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


@gluon.jit
def of_tile(mods, b, h, i):
    """What each function reads of a head and of its rows i: ((of the head, of the rows), ...)."""
    read = ()
    if has_score_mod(mods.SCORES):
        read = also(read, _of_tile(mods.scores[0], At(b, h, i, i, None, None, None)))
    LAST: gl.constexpr = count(mods.MASKS) - 1
    if has_mask_mod(mods.MASKS):
        read = also(read, _of_tile(mods.masks[LAST], At(b, h, i, i, None, None, None)))
    return read


@gluon.jit
def _of_tile(mod, at):
    head = mod.of_head(mod.operands, at)
    return head, mod.of_rows(mod.operands, head, at)


@gluon.jit
def fetch(mods, pairs, x):
    """What each function loads for a block like ``x``."""
    fetched = ()
    if has_score_mod(mods.SCORES):
        fetched = also(fetched, _fetch(mods.scores[0], pairs.read[0], pairs, x))
    LAST: gl.constexpr = count(mods.MASKS) - 1
    if has_mask_mod(mods.MASKS):
        fetched = also(fetched, _fetch(mods.masks[LAST], pairs.read[len(pairs.read) - 1], pairs, x))
    return fetched


@gluon.jit
def _fetch(mod, read, pairs, x):
    i, j = positions(pairs, x)
    return mod.fetch(mod.operands, read[0], read[1], At(pairs.b, pairs.head, i, i, j, None, None))


@gluon.jit
def score(s, mods, pairs, fetched):
    """What the score mod makes of scores, in natural units."""
    i, j = positions(pairs, s)
    head, rows = pairs.read[0]
    at = At(pairs.b, pairs.head, i, i, j, None, None)
    return mods.scores[0].function(s, fetched, mods.scores[0].operands, head, rows, at)


@gluon.jit
def linear(s, mods, pairs, fetched):
    """(``score``, its derivative by s), of a score mod whose derivative is not 1."""
    i, j = positions(pairs, s)
    head, rows = pairs.read[0]
    at = At(pairs.b, pairs.head, i, i, j, None, None)
    return mods.scores[0].linear(s, fetched, mods.scores[0].operands, head, rows, at)


@gluon.jit
def select(x, mods, pairs, fetched, fill):
    """The block, ``fill`` where the mask mod drops a pair."""
    LAST: gl.constexpr = count(mods.MASKS) - 1
    i, j = positions(pairs, x)
    head, rows = pairs.read[len(pairs.read) - 1]
    at = At(pairs.b, pairs.head, i, i, j, None, None)
    return mods.masks[LAST].function(x, fetched, mods.masks[LAST].operands, head, rows, at, fill)
