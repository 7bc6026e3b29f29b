"""What each thread makes of its part of a block of scores.

In a WGMMA accumulator four threads share a row, and column c belongs to thread c // 2 % 4 of them: seen as
[M, N // 8, 4, 2], an accumulator has its threads along dimension 2 and each thread's own columns along 1 and 3.
"""

# ruff: noqa: RET505 - Triton compiles what stands behind a return, decided or not.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.inline_asm import least_integers


@gluon.jit
def lane_sums(x, M: gl.constexpr, N: gl.constexpr):
    """[M, N] -> [M, 4]: each thread's sums of the columns it holds; the four are added at the end of a tile."""
    return gl.sum(gl.sum(gl.reshape(x, [M, N // 8, 4, 2]), 3), 1)


@gluon.jit
def row_tops(x, row_max):
    """[M, N] -> [M]: the greatest of each row where it is above ``row_max``, which is < 0 if there was none before.

    Hopper has an instruction for the greatest of three integers, and none for floats. Floats are in the order of the
    integers with the same bits, but negative ones the other way round: of those alone the greatest is the least
    integer. It matters to no row that has seen a number >= 0.
    """
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    bits = gl.reshape(x.to(gl.int32, bitcast=True), [M, N // 8, 4, 2])
    even, odd = gl.split(bits)
    numbers = of_lanes(even) + of_lanes(odd)
    tops = gl.max(gl.reshape(gl.permute(bits, (0, 1, 3, 2)), [M, N // 4, 4]), 1)
    layout: gl.constexpr = numbers[0].type.layout
    tops = gl.convert_layout(tops, layout)
    signs = gl.convert_layout(row_max, gl.SliceLayout(1, layout))[:, None] + gl.zeros([M, 4], gl.float32, layout)
    least = least_integers(numbers, signs)
    tops = gl.where((signs < 0) & (tops < 0), least, tops).to(gl.float32, bitcast=True)
    return gl.convert_layout(gl.max(tops, 1), gl.SliceLayout(1, x.type.layout))


@gluon.jit
def of_lanes(x):
    """[M, n, 4] -> n tensors [M, 4], all in one layout."""
    if x.shape[1] == 1:
        return (gl.max(x, 1),)
    else:
        low, high = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2, 4]), (0, 2, 3, 1)))
        return of_lanes(low) + of_lanes(high)


@gluon.jit
def lane_keys(keys, like, M: gl.constexpr, N: gl.constexpr):
    """[M] -> [M, 4]: each row's key, counted from the first column of a block that the thread holds."""
    layout: gl.constexpr = gl.reshape(like, [M, N // 8, 4, 2]).type.layout
    flat: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, layout))
    lane = gl.arange(0, 4, gl.SliceLayout(0, flat))
    return gl.convert_layout(keys, gl.SliceLayout(1, flat))[:, None] - 2 * lane[None, :]


@gluon.jit
def keep_keys(s, start, first_keys, last_keys, HAS_LEFT: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """The scores of keys ``start ...``, -inf outside the rows' first and last keys (``lane_keys``).

    A thread compares one number a row with its column numbers, which are immediates.
    """
    t = gl.reshape(s, [M, N // 8, 4, 2])
    layout: gl.constexpr = t.type.layout
    tens = gl.arange(0, N // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    ones = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    cols = 8 * tens[None, :, None, None] + ones[None, None, None, :]
    t = gl.where(cols <= (last_keys - start)[:, None, :, None], t, float("-inf"))
    if HAS_LEFT:
        t = gl.where(cols >= (first_keys - start)[:, None, :, None], t, float("-inf"))
    return gl.convert_layout(gl.reshape(t, [M, N]), s.type.layout)
