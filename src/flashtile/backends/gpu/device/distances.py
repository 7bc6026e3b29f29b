"""Values of a score mod that depend on a pair's distance alone, computed once for each distance and head, not pair.

T5 and similar models look up a learned number by a bucket of the distance. A tile of 64 rows and 64 keys has 127
distances, but would compute the number 4,096 times. Before a kernel starts, ``tabulate`` computes it for all distances
of the call. The kernel then reads it, from addresses that differ by constants.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device.mods import At

# This is more than the number of distances in a block of pairs.
TILE = tl.constexpr(256)


@triton.jit
def of_head(table, value, b, h):
    """Address of a value's first number for a sequence and a head; any address for a tile past the last one."""
    b, h = tl.minimum(tl.maximum(b, 0), table.batch - 1), tl.minimum(tl.maximum(h, 0), table.heads - 1)
    return table.ptr + tl.cast((table.batch * value + b) * table.heads + h, tl.int64) * table.size


@triton.jit
def within(table, distance, MARGIN: tl.constexpr):
    """A distance's place in a head's numbers, at least MARGIN from their ends, since lengths of a call may be wrong."""
    return tl.minimum(tl.maximum(distance + table.before, MARGIN), table.size - 1 - MARGIN)


@triton.jit
def tabulate(mod, table, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Fills a ``Table`` with COUNT values. A program computes BLOCK distances of one head.

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
