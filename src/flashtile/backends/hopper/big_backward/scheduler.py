"""Which tile a program of the backward with big heads works on, and which blocks of the other side it visits.

A tile is 64 rows: of keys for dk and dv, of queries for dq. A program has one; the hardware starts them in order.
"""

# ruff: noqa: RET505 - Triton compiles code after a return, even if the condition is decided.
# Triton's aggregate reads annotations as types, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.device import masks, tiles
from flashtile.backends.hopper.backward.scheduler import (
    BOUNDS_BLOCK,
    key_head,
    query_heads,
    row_blocks_per_head,
    sequence_of,
)
from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.device.parts import HeadRows
from flashtile.backends.hopper.device.ring import slot_of

BLOCK = gl.constexpr(64)
# What the program's first warp tells the other roles. is_tile is 0 if there is nothing to do; place is the tile's first
# row of its side, head one of that side's; start and end are the blocks of the other side; row_block is where the
# workspace has the first block of queries that is visited.
FIELDS = gl.constexpr("is_tile place head sequence start end start_q start_k seqlen_q seqlen_k row_block")
RECORD_SIZE = gl.constexpr(16)


@gluon.jit
def _own_tile(own, other, heads, grid):
    """(place, b, head, exists) of this program's tile; own and other: ``Sequences`` of its side, and of the other."""
    index, batch = gl.program_id(0), grid.call.keys.count
    if grid.call.q.PACKED:
        num_blocks = own.length // BLOCK + batch + 1
        block, head = tiles.grouped_tile(index, num_blocks, heads, grid.schedule.heads_at_once)
        if grid.schedule.FALLING:
            block = num_blocks - 1 - block
        b, block = tiles.packed_tile(own.cu_seqlens, batch, block, BLOCK)
        _, length = sequence_of(own, b, grid)
        exists = block * BLOCK < length
        if grid.gradients.ADDS:
            _, others = sequence_of(other, b, grid)
            exists = exists & (others > 0) & (b < batch)
        return block * BLOCK, b, head, exists
    else:
        num_blocks = (own.length + BLOCK - 1) // BLOCK
        block, head = tiles.grouped_tile(index, num_blocks, heads * batch, grid.schedule.heads_at_once)
        if grid.schedule.FALLING:
            block = num_blocks - 1 - block
        b = head // heads
        return block * BLOCK, b, head - b * heads, index >= 0


@gluon.jit
def publish_tile(records, grid):
    """Finds this program's tile and writes its record; each thread has a number of it."""
    OF_ROWS: gl.constexpr = grid.tiles.OF == "q"
    if OF_ROWS:
        place, b, head, exists = _own_tile(grid.call.queries, grid.call.keys, grid.call.heads.num_q, grid)
        first_head = head
    else:
        place, b, head, exists = _own_tile(grid.call.keys, grid.call.queries, grid.schedule.heads, grid)
        first_head, _ = query_heads(head, grid)
    start_q, seqlen_q = sequence_of(grid.call.queries, b, grid)
    start_k, seqlen_k = sequence_of(grid.call.keys, b, grid)
    start_q, start_k = gl.to_tensor(start_q), gl.to_tensor(start_k)
    if OF_ROWS:
        last = gl.minimum(place + BLOCK, seqlen_q) - 1
        if grid.call.q.PACKED:
            # The rows past the last sequence have no keys, and likewise below.
            seqlen_k = gl.where(b < grid.call.keys.count, seqlen_k, 0)
        start, low, high, end = tiles.key_blocks(place, last, seqlen_q, seqlen_k, grid.call.mods.band, BLOCK)
    else:
        last = gl.minimum(place + BLOCK, seqlen_k) - 1
        if grid.call.q.PACKED:
            seqlen_q = gl.where(b < grid.call.keys.count, seqlen_q, 0)
        start, low, high, end = tiles.query_blocks(place, last, seqlen_q, seqlen_k, grid.call.mods.band, BLOCK)
    if grid.call.mods.band.bounds is not None:
        there = b < grid.call.keys.count
        inner = masks.bounds_of(grid.call.mods.band.bounds, b, first_head, place // BOUNDS_BLOCK, there, 1)
        start, low, high, end = masks.narrowed(start, low, high, end, inner, BLOCK)
    row_block = first_head * row_blocks_per_head(grid)
    if grid.call.q.PACKED:
        row_block += start_q // BLOCK + b
    else:
        row_block += b * grid.call.heads.num_q * row_blocks_per_head(grid)
    row_block += place // BLOCK if OF_ROWS else start
    slot = gl.arange(0, RECORD_SIZE, gl.BlockedLayout([1], [32], [1], [0]))
    record = gl.where(slot == slot_of(FIELDS, "place"), place, gl.where(exists, 1, 0))
    record = gl.where(slot == slot_of(FIELDS, "head"), head, record)
    record = gl.where(slot == slot_of(FIELDS, "sequence"), b, record)
    record = gl.where(slot == slot_of(FIELDS, "start"), start, record)
    record = gl.where(slot == slot_of(FIELDS, "end"), end, record)
    record = gl.where(slot == slot_of(FIELDS, "start_q"), start_q, record)
    record = gl.where(slot == slot_of(FIELDS, "start_k"), start_k, record)
    record = gl.where(slot == slot_of(FIELDS, "seqlen_q"), seqlen_q, record)
    record = gl.where(slot == slot_of(FIELDS, "seqlen_k"), seqlen_k, record)
    record = gl.where(slot == slot_of(FIELDS, "row_block"), row_block, record)
    records.ring.claim(0)
    records.ring.at(0).store(record)
    records.ring.publish(0)


@gluon.jit
def num_steps(records, grid):
    """Blocks of the other side that the tile visits; each query head of a group has blocks of its own."""
    steps = records.get(0, "end") - records.get(0, "start")
    if grid.tiles.OF == "q":
        return steps * records.get(0, "is_tile")
    else:
        _, num_heads = query_heads(records.get(0, "head"), grid)
        return steps * (records.get(0, "is_tile") * num_heads)


@aggregate
class Step:
    """One block of the other side.

    Attributes:
        place: Its first row.
        head: The query head, counted from the first that has the tile's keys.
        block: Where the workspace has its queries.
        remaining: Blocks of the head from this one on.
    """

    place: gl.tensor
    head: gl.tensor
    block: gl.tensor
    remaining: gl.tensor


@gluon.jit
def first_step(records, grid):
    """The first ``Step`` of the tile: not the first block, but one that neighbouring tiles do not begin with.

    Else all programs would read the same lines of the cache at the same time.
    """
    start, steps = records.get(0, "start"), records.get(0, "end") - records.get(0, "start")
    skipped = records.get(0, "place") // BLOCK % gl.maximum(steps, 1)
    block = records.get(0, "row_block")
    if grid.tiles.OF != "q":
        block += skipped
    return Step((start + skipped) * BLOCK, gl.to_tensor(0), block, steps)


@gluon.jit
def next_step(step, records, grid):
    """The next one: after the last block comes the first, and after all of a head the same again of the next head."""
    place, head, block, remaining = step.place + BLOCK, step.head, step.block, step.remaining - 1
    if grid.tiles.OF != "q":
        block += 1
    if place == records.get(0, "end") * BLOCK:
        steps = records.get(0, "end") - records.get(0, "start")
        place -= steps * BLOCK
        if grid.tiles.OF != "q":
            block -= steps
    if remaining == 0:
        remaining = records.get(0, "end") - records.get(0, "start")
        head += 1
        block += row_blocks_per_head(grid)
    return Step(place, head, block, remaining)


@gluon.jit
def query_rows(records, step, grid):
    """Where the queries of a step lie, and dout."""
    head = records.get(0, "head")
    if grid.tiles.OF != "q":
        head, _ = query_heads(head, grid)
        head += step.head
    start, length = records.get(0, "start_q"), records.get(0, "seqlen_q")
    return HeadRows(records.get(0, "sequence"), head, start, length, grid.call.q.PACKED)


@gluon.jit
def key_rows(records, grid):
    """Where the keys of the tile or of its steps lie, and the values."""
    head = records.get(0, "head")
    head = head // grid.call.heads.group_size if grid.tiles.OF == "q" else key_head(head, grid)
    start, length = records.get(0, "start_k"), records.get(0, "seqlen_k")
    return HeadRows(records.get(0, "sequence"), head, start, length, grid.call.q.PACKED)


@gluon.jit
def out_rows(records, grid):
    """Where the tile's gradient lies: of dk and dv each of the splits of a key head has one of its own."""
    if grid.tiles.OF == "q":
        return query_rows(records, first_step(records, grid), grid)
    else:
        start, length = records.get(0, "start_k"), records.get(0, "seqlen_k")
        return HeadRows(records.get(0, "sequence"), records.get(0, "head"), start, length, grid.call.q.PACKED)
