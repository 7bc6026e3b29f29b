"""Blocks of keys and values from pages that TMA has no boxes for: the producer's threads copy them.

A copy moves 16 bytes of a row from global to shared memory, to their place in the swizzle. It takes no register while
it is under way, so a few threads keep all buffers' copies in flight. Each lane finds the beginning of one row, and
passes it to the lanes that copy the row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.device.gluon_compat import copy_async
from flashtile.backends.hopper.device.parts import append, box_of, start_of, tiles_at, width_of
from flashtile.backends.hopper.forward.paged.pages import place_in_pages


@gluon.jit
def gather_block(operand, rings, use, records, tiles, n_block, call, schedule):
    """Starts the copies of a block of a tile's keys or values, ``operand``; rows past the last key become zeros.

    A warp copies 16 rows in each pass: the addresses of more rows would take registers that the producer does not
    have. The numbers of pages are loaded before the wait for a buffer.
    """
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = min(16 * WARPS, schedule.BLOCK_N)
    PASSES: gl.constexpr = schedule.BLOCK_N // ROWS
    # The added zero hides that lanes are loop invariant: the compiler would keep multiples of them in registers.
    keys = n_block * schedule.BLOCK_N + gl.arange(0, ROWS, one_a_lane(ROWS, WARPS)) + (n_block >> 30)
    starts = ()
    for i in gl.static_range(PASSES):
        starts = append(starts, starts_of(operand, records, tiles, keys + i * ROWS, call))
    head = records.get(tiles, "head_kv").to(gl.int64) * (operand.stride_head // operand.VECTOR) * operand.VECTOR
    rings[0].claim(use)
    parts = tiles_at(rings, use)
    for i in gl.static_range(PASSES):
        pieces = ()
        for j in gl.static_range(len(parts)):
            pieces = append(pieces, box_of(parts[j], i * ROWS, ROWS, 0))
        copy_rows(operand, operand.ptr + head, starts[i], pieces)
    rings[0].publish_copies(use)


@gluon.jit
def starts_of(operand, records, tiles, keys, call):
    """Where rows of some of a tile's keys begin, in units of ``operand.VECTOR`` elements; -1 past the last key."""
    page, row = place_in_pages(records, tiles, keys, call)
    start = page * (operand.stride_b // operand.VECTOR) + row * (operand.stride_row // operand.VECTOR)
    return gl.where(keys < records.get(tiles, "seqlen_k"), start, -1)


@gluon.jit
def copy_rows(operand, ptr, starts, parts):
    """Starts the copies of rows into a tile's parts, one box of columns at a time."""
    COLS: gl.constexpr = operand.BLOCK_DIM
    BOX: gl.constexpr = min(width_of(COLS, -1), 64)
    layout: gl.constexpr = rows_by_lanes(parts[0].shape[0], BOX, gl.num_warps())
    starts = gl.convert_layout(starts, gl.SliceLayout(1, layout))
    exists, rows = (starts >= 0)[:, None], ptr + (starts.to(gl.int64) * operand.VECTOR)[:, None]
    for i in gl.static_range(len(parts)):
        for j in gl.static_range(parts[i].shape[1] // BOX):
            copy_box(operand, rows, exists, box_of(parts[i], j * BOX, BOX), start_of(COLS, i) + j * BOX, layout)


@gluon.jit
def copy_box(operand, rows, exists, box, FIRST: gl.constexpr, layout: gl.constexpr):
    """Starts the copies of some columns of rows, from FIRST on; zeros for rows that do not exist."""
    cols = FIRST + gl.arange(0, box.shape[1], gl.SliceLayout(0, layout))[None, :]
    if FIRST + box.shape[1] > operand.DIM:
        exists = exists & (cols < operand.DIM)
    copy_async(box, rows + cols, mask=exists)


@gluon.constexpr_function
def one_a_lane(rows, warps):
    """A layout with consecutive rows in a warp, one a lane; further lanes repeat the first ones."""
    own = rows // warps
    lanes = [[1 << bit if 1 << bit < own else 0] for bit in range(5)]
    return gl.DistributedLinearLayout([], lanes, [[own << bit] for bit in range(warps.bit_length() - 1)], [], [rows])


@gluon.constexpr_function
def rows_by_lanes(rows, cols, warps):
    """A layout [rows, cols]: a warp has the rows of ``one_a_lane``, a thread 16 bytes of every fourth or eighth row.

    So neighbouring lanes read a whole line of a row, and the differences between a thread's addresses are known when
    the kernel is compiled.
    """
    own, bits = rows // warps, (cols // 8).bit_length() - 1
    lanes = [[0, 8 << bit] for bit in range(bits)] + [[1 << bit, 0] for bit in range(5 - bits)]
    registers = [[0, 1], [0, 2], [0, 4]] + [[1 << bit, 0] for bit in range(5 - bits, own.bit_length() - 1)]
    shares = [[own << bit, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, shares, [], [rows, cols])
