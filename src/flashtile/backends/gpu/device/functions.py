"""Functions that printed mods call: indices that stay inside their tensors, integer division as in PyTorch, and tables.

T5 and similar models look up a learned number by a bucket of the distance. A tile of 64 rows and 64 keys has 127
distances, but would compute the number 4,096 times. Before a kernel starts, ``tabulate`` computes what of a score mod
depends on the distance alone, for all distances and heads of the call. The kernel then reads it (``by_distance``), from
addresses that differ by constants.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device.mods import At

# This is more than the number of distances in a block of pairs.
_DISTANCES = tl.constexpr(256)


@triton.jit
def filled(value, like):
    """A value repeated for each element of ``like``, in like's layout if tensors have one."""
    return tl.where(like == like, value, value)


@triton.jit
def apart(at):
    """``i - j`` for an ``At``."""
    if len(at.apart) > 0:  # noqa: SIM108 - a compile-time condition
        distance = at.apart[0]
    else:
        distance = at.i - at.j
    return distance


@triton.jit
def table_of_head(table, value, b, h):
    """Address of a value's first number for a sequence and a head; any address for a tile past the last one."""
    b, h = tl.minimum(tl.maximum(b, 0), table.batch - 1), tl.minimum(tl.maximum(h, 0), table.heads - 1)
    return table.ptr + tl.cast((table.batch * value + b) * table.heads + h, tl.int64) * table.size


@triton.jit
def place_in_table(table, distance, MARGIN: tl.constexpr):
    """A distance's place in a head's numbers, at least MARGIN from their ends, since lengths of a call may be wrong."""
    return tl.minimum(tl.maximum(distance + table.before, MARGIN), table.size - 1 - MARGIN)


@triton.jit
def by_distance(table, value: tl.constexpr, at):
    """A value of a ``DistanceTable`` for each pair; no distance is read from outside of it."""
    base = table_of_head(table, value, at.b, at.h)
    if len(at.apart) > 0:
        # Constants are added last: they become part of the instruction that loads.
        first = place_in_table(table, at.apart[1], _DISTANCES)
        found = tl.load(base + first + at.apart[2].to(tl.int64) + at.apart[3].to(tl.int64))
    else:
        found = tl.load(base + place_in_table(table, at.i - at.j, 0))
    return found


@triton.jit
def tabulate(mod, table, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Fills a ``DistanceTable`` with COUNT values. A program computes BLOCK distances of one head.

    ``mod`` is ``Tabulated``.
    """
    pid = tl.program_id(0)
    blocks = (table.size + BLOCK - 1) // BLOCK
    place, which = pid % blocks * BLOCK + tl.arange(0, BLOCK), pid // blocks
    b, h = which // table.heads, which % table.heads
    distance = place - table.before
    at = At(b, h, tl.maximum(distance, 0), None, tl.maximum(-distance, 0), None, None, ())
    head = mod.of_head(mod.operands, at)
    found = mod.of_distance(mod.operands, head, at)
    for n in tl.static_range(COUNT):
        tl.store(table_of_head(table, n, b, h) + place, found[n], mask=place < table.size)


@triton.jit
def inside(x, size):
    """An index in range, from the end if negative as in Python, as 64 bits: no function reads outside its tensors."""
    x = tl.where(x < 0, x + size, x)
    return tl.minimum(tl.maximum(x, 0), size - 1).to(tl.int64)


@triton.jit
def inside_by_key(x, size, j):
    """``inside`` for loads by key or pair, so that neighbouring threads load for neighbouring keys.

    For clamped indices Triton 3.6 would order threads along rows first, 32 in a warp. ``max_contiguous`` tells it that
    indices are consecutive like keys j. If they are not, that is safe: addresses are not known to be aligned
    (``gpu.functions``), so each element is loaded by itself. ``inside`` is written out here, since a hint on a call's
    result is lost once the call is inlined.
    """
    x = tl.where(x < 0, x + size, x)
    x = tl.minimum(tl.maximum(x, 0), size - 1).to(tl.int64)
    if len(x.shape) == 2:
        x = tl.max_contiguous(x, [x.shape[0] if j.shape[0] > 1 else 1, x.shape[1] if j.shape[1] > 1 else 1])
    return x


@triton.jit
def inside_from_start(x, size):
    """``inside`` for a constant that is not negative."""
    return tl.minimum(size - 1, x).to(tl.int64)


@triton.jit
def inside_from_end(x, size):
    """``inside`` for the constant -x."""
    return tl.maximum(size - x, 0).to(tl.int64)


@triton.jit
def floor_div(a, b):
    """The quotient rounded down, as PyTorch's ``//``."""
    q = a // b
    return tl.where((q * b != a) & ((a < 0) != (b < 0)), q - 1, q)


@triton.jit
def remainder(a, b):
    """Remainder with the sign of the divisor, as in PyTorch. Reuses the quotient if the graph also has ``//``."""
    return a - floor_div(a, b) * b


@triton.jit
def divisor(b):
    """Numbers to divide many indices by one number: (multiplier, shift, number to add, sign, -|b|).

    The multiplier is the least m with m |b| >= 2^(31 + shift), where 2^shift >= |b|. A float32 estimate of it is off by
    at most 2^11, and an estimate of the remaining error by at most 1.
    """
    size = tl.maximum(tl.abs(b), 1).to(tl.int64)
    shift = ((size - 1).to(tl.float64).to(tl.int64, bitcast=True) >> 52).to(tl.int32) - 1022
    shift = tl.where(size == 1, 0, shift)
    inverse = 1.0 / size.to(tl.float32)
    whole = tl.cast(1, tl.int64) << (31 + shift).to(tl.int64)
    m = (inverse * whole.to(tl.float32)).to(tl.int64)
    left = whole - m * size
    more = (left.to(tl.float32) * inverse).to(tl.int64)
    m, left = m + more, left - more * size
    m = m + (left > 0).to(tl.int64) + (left > size).to(tl.int64) - (left <= -size).to(tl.int64)
    extra = tl.where(b < 0, 2 * (size - 1), 0)
    return m.to(tl.uint32), shift, extra.to(tl.int32), tl.where(b < 0, -1, 1), (-size).to(tl.int32)


@triton.jit
def index_div(a, m, shift, extra, sign, minus):
    """``floor_div`` of an index, which is not negative, by a number b, from ``divisor(b)``; a + |b| < 2^30."""
    return (tl.umulhi((2 * a + extra).to(tl.uint32), m).to(tl.int32) >> shift) * sign


@triton.jit
def index_rem(a, m, shift, extra, sign, minus):
    """``remainder`` of an index by a number b, with the arguments of ``index_div``."""
    return (tl.umulhi((2 * a + extra).to(tl.uint32), m).to(tl.int32) >> shift) * minus + a


@triton.jit
def is_within(first, second, most):
    """``abs(first - second) <= most`` for integers, in one sum and one comparison if ``most - second`` is known.

    For unsigned numbers 0 <= x <= 2 n is one comparison. Reduced by 2^31, as here, they have the order of signed
    numbers.
    """
    least = -2147483648
    room = tl.where(most < 0, least, 2 * most + 1 + least)
    return first + (most - second + least) < room


@triton.jit
def trunc(x):
    """Rounds towards 0."""
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))


@triton.jit
def sign(x):
    """-1, 0 or 1; NaN for NaN."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, x))


@triton.jit
def sign_of(x):
    """``sign`` of an integer."""
    return (x > 0).to(tl.int32) - (x < 0).to(tl.int32)


@triton.jit
def log1p(x):
    """``log(1 + x)``, accurate also if 1 + x rounds."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * (x / (y - 1.0)))


@triton.jit
def power(x, y):
    """``x ** y``; for a negative x defined if y has no fraction."""
    y = x * 0.0 + y
    size = tl.where(y == 0.0, 1.0, tl.exp2(y * tl.log2(tl.abs(x))))
    half = y * 0.5
    signed = tl.where(tl.floor(half) == half, size, -size)
    return tl.where(x >= 0.0, size, tl.where(tl.floor(y) == y, signed, float("nan")))
