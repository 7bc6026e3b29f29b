"""Dropout on the fragments of WGMMA accumulators, rows first or keys first.

One thread holds the rows and keys that share a counter, eight apart (``core.philox``): no number moves between threads.
"""

# ruff: noqa: RET505 - Triton compiles code after a return, even if the condition is decided.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.device.dropout import philox_key_of, words
from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.device.inline_ptx import select_at_least


@gluon.jit
def drops_of(mods):
    """The ``Drops`` of ``records.Mods`` with dropout."""
    return Drops(mods.dropout.threshold)


@aggregate
class Drops:
    """Dropout's choice of pairs.

    Attributes:
        threshold: ``threshold_bits`` of the probability.
    """

    threshold: gl.tensor

    @gluon.jit
    def key_of(self, call, b, head):
        """The Philox key of a head; b may be past the last packed sequence."""
        return philox_key_of(call, b, head)

    @gluon.jit
    def draw(self, pairs, layout_like, philox_key):
        """The words of all counters of a block. This takes the time, and needs no product."""
        layout: gl.constexpr = quarter(layout_like).type.layout
        along = gl.arange(0, layout_like.shape[0] // 2, gl.SliceLayout(1, layout))[:, None]
        across = gl.arange(0, layout_like.shape[1] // 2, gl.SliceLayout(0, layout))[None, :]
        if pairs.keys_first:
            return words(philox_key, pairs.row // 2 + across, pairs.key // 2 + along, True)
        else:
            return words(philox_key, pairs.row // 2 + along, pairs.key // 2 + across, True)

    @gluon.jit
    def drop(self, x, pairs, drawn, fill):
        """A float32 block with ``fill`` where dropout drops; drawn: results of ``draw``."""
        return select_at_least(x, numbers(drawn, x, pairs.keys_first), self.threshold, fill)


@gluon.jit
def numbers(drawn, layout_like, KEYS_FIRST: gl.constexpr):
    """One 16-bit random number per score, in an int32's high half (low half undefined), in ``layout_like``'s layout."""
    M: gl.constexpr = layout_like.shape[0]
    N: gl.constexpr = layout_like.shape[1]
    first, second = drawn
    # The order, along and across, by the bits of value 8: 00, 10, 01, 11.
    if KEYS_FIRST:
        four = gl.join(gl.join(first << 16, first), gl.join(second << 16, second))
    else:
        four = gl.join(gl.join(first << 16, second << 16), gl.join(first, second))
    eights = gl.permute(gl.reshape(four, [M // 16, 8, N // 16, 8, 2, 2]), (0, 4, 1, 2, 5, 3))
    return gl.convert_layout(gl.reshape(eights, [M, N]), layout_like.type.layout)


@gluon.jit
def quarter(x):
    """[M, N] -> [M // 2, N // 2], without places that have the bit of value 8 set."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    eights = gl.permute(gl.reshape(x, [M // 16, 2, 8, N // 16, 2, 8]), (0, 2, 3, 5, 1, 4))
    even, _ = gl.split(gl.reshape(eights, [M // 2, N // 2, 2, 2]))
    found, _ = gl.split(even)
    return found
