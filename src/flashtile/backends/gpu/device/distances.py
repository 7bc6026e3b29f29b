"""What a score mod computes of a pair's distance alone, once for each distance and head instead of once for each pair.

T5 and its like look up a learned number by a bucket of the distance: for a tile of 64 rows and 64 keys, which have 127
distances, that is computed 4,096 times. Before a kernel starts, ``tabulate`` computes it for all distances of the call;
the kernel then reads, from addresses that differ by constants.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device.mods import At

# More than the distances in a block of pairs.
TILE = tl.constexpr(256)


@triton.jit
def of_head(table, value, b, h):
    """Where the first number of a value is, of a sequence and a head; any if there is none, as after the last tile."""
    b, h = tl.minimum(tl.maximum(b, 0), table.batch - 1), tl.minimum(tl.maximum(h, 0), table.heads - 1)
    return table.ptr + tl.cast((table.batch * value + b) * table.heads + h, tl.int64) * table.size


@triton.jit
def within(table, distance, MARGIN: tl.constexpr):
    """Where a distance is in a head's numbers, at least MARGIN from their ends: lengths of a call may be wrong."""
    return tl.minimum(tl.maximum(distance + table.before, MARGIN), table.size - 1 - MARGIN)


@triton.jit
def tabulate(mod, table, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Fills a ``Table`` with COUNT values: a program has BLOCK distances of one head.

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
        tl.store(of_head(table, n, b, h) + place, found[n], mask=place < table.size)
