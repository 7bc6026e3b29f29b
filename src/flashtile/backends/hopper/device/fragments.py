"""Operations on a WGMMA accumulator's fragments, without data movement between threads.

Four threads hold a row, and thread c // 2 % 4 of them holds column c. Seen as [M, N // 8, 4, 2], an accumulator
has its threads along dimension 2 and each thread's own columns along 1 and 3.
"""

# ruff: noqa: RET505 - Triton compiles code after a return, even if the condition is decided.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.device import masks
from flashtile.backends.hopper.device.inline_ptx import keep_by_bits, least_integers


@gluon.jit
def thread_sums(x):
    """[M, N] -> [M, 4]: each thread's sums of its columns; the four sums are added at the end of a tile."""
    return gl.sum(gl.sum(by_thread(x), 3), 1)


@gluon.jit
def row_tops(x, row_max, scale, shift):
    """[M, N] -> [M]: the maximum of ``x * scale + shift``, meaningful only above ``row_max`` (-inf: none so far).

    ``scale`` > 0; ``shift`` is () or ([M, 4],), one for each thread.

    The maximum is taken over int32 bits: Hopper has an integer maximum of three inputs and none for floats. This is
        right if
    a row has a number >= 0, now or in ``row_max``. Rows with only negative numbers use the integer minimum, which is
    computed on demand.
    """
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    bits = by_thread(x.to(gl.int32, bitcast=True))
    even, odd = gl.split(bits)
    numbers = unstacked(even) + unstacked(odd)
    tops = gl.max(gl.reshape(gl.permute(bits, (0, 1, 3, 2)), [M, N // 4, 4]), 1)
    layout: gl.constexpr = numbers[0].type.layout
    tops = gl.convert_layout(tops, layout)
    signs = gl.convert_layout(row_max, gl.SliceLayout(1, layout))[:, None] + gl.zeros([M, 4], gl.float32, layout)
    if len(shift) > 0:
        signs -= gl.convert_layout(shift[0], layout)
    least = least_integers(numbers, signs)
    tops = gl.where((signs < 0) & (tops < 0), least, tops).to(gl.float32, bitcast=True)
    if len(shift) > 0:
        tops = tops * scale + gl.convert_layout(shift[0], layout)
    tops = gl.convert_layout(gl.max(tops, 1), gl.SliceLayout(1, x.type.layout))
    return tops * scale if len(shift) == 0 else tops


@gluon.jit
def unstacked(x):
    """[M, n, 4] -> n tensors [M, 4], all in one layout."""
    if x.shape[1] == 1:
        return (gl.max(x, 1),)
    else:
        low, high = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2, 4]), (0, 2, 3, 1)))
        return unstacked(low) + unstacked(high)


@gluon.jit
def by_thread(x):
    """[M, N] as [M, N // 8, 4, 2]."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def as_before(t, x):
    """[M, N // 8, 4, 2] converted to the shape and layout of ``x``."""
    return gl.convert_layout(gl.reshape(t, x.shape), x.type.layout)


@gluon.jit
def thread_start(x):
    """([M, 1] row, [1, 4] first column) for a thread's fragment of ``x``."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, by_thread(x).type.layout))
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    return rows[:, None], 2 * gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def from_thread_column(numbers, x):
    """[M] column numbers -> [M, 4]: the same columns, counted from the first column of ``x`` that the thread holds."""
    _, first = thread_start(x)
    layout: gl.constexpr = gl.SliceLayout(1, first.type.layout)
    return gl.convert_layout(numbers, layout)[:, None] - first


@gluon.jit
def thread_columns(x):
    """[1, N // 8, 1, 2]: columns of ``x``, counted from the thread's first column; they become immediates."""
    layout: gl.constexpr = by_thread(x).type.layout
    eights = gl.arange(0, x.shape[1] // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    pairs = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    return 8 * eights[None, :, None, None] + pairs[None, None, None, :]


@gluon.jit
def keep_columns(x, first, last, fill, HAS_FIRST: gl.constexpr, HAS_LAST: gl.constexpr):
    """[M, N] x, ``fill`` outside the columns ``first`` to ``last`` of each row (``from_thread_column``).

    A thread compares one number for each row and bound with immediates.
    """
    t = by_thread(x)
    cols = thread_columns(x)
    if HAS_LAST:
        t = gl.where(cols <= last[:, None, :, None], t, fill)
    if HAS_FIRST:
        t = gl.where(cols >= first[:, None, :, None], t, fill)
    return as_before(t, x)


@gluon.jit
def keep_intervals(x, interval, pairs, count, first_column, first_row, fill):
    """[M, N] x, ``fill`` where a row's element is not in the interval of a column's element.

    Args:
        x: A block of ``Pairs``, rows or keys first.
        interval: ``gpu.device.records.Interval`` for the columns' elements.
        pairs: The block's ``Pairs``, with the sequence and the head.
        count: Number of sequences; rows past the last packed sequence belong to none.
        first_column: The element of the first column.
        first_row: The element of the first row.
        fill: The number outside of intervals.
    """
    t = by_thread(x)
    row, col = thread_start(x)
    element = (first_column + col)[:, None, :, None] + thread_columns(x)
    exists = (element >= 0) & (pairs.b < count)
    start, end = masks.ends_of(interval, pairs.b, pairs.head, element, exists)
    other = (first_row + row)[:, None, :, None]
    t = gl.where(other < end, t, fill)
    return as_before(gl.where(other >= start, t, fill), x)


@gluon.jit
def load_bits(lists, pairs, x):
    """[M, 4]: the bits of each thread's elements; 0 except in partial blocks."""
    row, col = thread_start(x)
    return gl.load(lists.items + pairs.bits[0] + (row * 4 + col // 2), mask=pairs.is_partial, other=0) >> pairs.bits[1]


@gluon.jit
def keep_bits(x, bits, fill: gl.constexpr):
    """[M, N] x, ``fill`` where the bits of ``load_bits`` are 0."""
    FILL: gl.constexpr = "0f00000000" if fill == 0.0 else "0fFF800000"
    return as_before(keep_by_bits(by_thread(x), bits, x.shape[1] // 2, FILL), x)
