"""Tiles in shared memory, and the rows that TMA moves into and out of them.

Tiles have any multiple of 32 columns, but tensors a power of two, so a tile consists of parts, the widest first: 192
columns are parts of 128 and 64, 96 are 64 and 32, and 128 are one part. A channel of such tiles is a tuple of rings,
one for each part, which share the first ring's barriers. A tensor's descriptor moves boxes as wide as the narrowest
part, several for a wider part, so that one descriptor and one swizzle serve all parts.
"""

# ruff: noqa: RET505 - Triton compiles code after a return, even if the condition is decided.
# Triton's aggregate reads annotations as types, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from flashtile.backends.gpu.device.tiles import PACKED_ROWS
from flashtile.backends.hopper.device.gluon_compat import (
    aggregate,
    as_box,
    seen_as,
    tma_load,
    tma_store,
    tma_store_wait,
)
from flashtile.backends.hopper.device.inline_ptx import rescale
from flashtile.backends.hopper.device.ring import Ring, make_landing, make_ring


@aggregate
class HeadRows:
    """Rows of one head of one sequence. ``start`` and ``length`` are read only if sequences are packed (``varlen``)."""

    b: gl.tensor
    head: gl.tensor
    start: gl.tensor
    length: gl.tensor
    varlen: gl.constexpr

    @gluon.jit
    def at(self, row, col):
        """The TMA coordinates of a row and column."""
        if self.varlen:
            return PACKED_ROWS, self.start + self.length, PACKED_ROWS - self.length + row, self.head, col
        else:
            return self.b, row, self.head, col


@gluon.constexpr_function
def parts_of(cols, most=256):
    """The widths of the parts, powers of two; parts wider than ``most`` are divided."""
    widths = [1 << bit for bit in reversed(range(cols.bit_length())) if cols >> bit & 1]
    return [min(width, most) for width in widths for _ in range(0, width, most)]


@gluon.constexpr_function
def num_parts(cols, most=256):
    """The number of parts of a width."""
    return len(parts_of(cols, most))


@gluon.constexpr_function
def width_of(cols, part, most=256):
    """The width of a part; -1 is the narrowest."""
    return parts_of(cols, most)[part]


@gluon.constexpr_function
def start_of(cols, part, most=256):
    """The first column of a part."""
    return sum(parts_of(cols, most)[:part])


@gluon.constexpr_function
def part_at(cols, col, most=256):
    """The part that contains a column."""
    return sum(start_of(cols, part, most) <= col for part in range(num_parts(cols, most))) - 1


@gluon.jit
def append(parts, part):
    """The parts with one more part."""
    return parts + (part,)  # noqa: RUF005


@gluon.jit
def make_rings(dtype: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, stages: gl.constexpr,
               consumers: gl.constexpr, buffers: gl.constexpr = 1, most: gl.constexpr = 256,
               COPIERS: gl.constexpr = 0):  # fmt: skip
    """A channel of ``stages`` tiles [ROWS, COLS], or of several buffers each. ``consumers`` warpgroups release it.

    COPIERS: as in ``make_ring``.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, width_of(COLS, -1, most)], dtype)
    first = make_ring(dtype, [ROWS, width_of(COLS, 0, most)], layout, stages, consumers, 1, buffers, COPIERS)
    return with_parts(first, layout, COLS, most)


@gluon.jit
def with_parts(first, layout: gl.constexpr, COLS: gl.constexpr, most: gl.constexpr):
    """A channel of tiles of COLS columns, from the ring of their first part."""
    shape: gl.constexpr = first.buffers.shape
    rings = (first,)
    for i in gl.static_range(1, num_parts(COLS, most)):
        buffers = gl.allocate_shared_memory(first.buffers.dtype, [shape[0], shape[1], width_of(COLS, i, most)], layout)
        rings = append(rings, Ring(buffers, first.full, first.empty, first.stages, first.parts, first.COPIED))
    return rings


@gluon.jit
def make_landings(rings, dtype: gl.constexpr, COLS: gl.constexpr, APART: gl.constexpr, most: gl.constexpr = 256):
    """A channel for tiles of a narrower dtype that TMA loads and a role widens into another channel.

    If APART it has a buffer of its own, else the other channel's: ``ring.make_landing``.
    """
    if APART:
        return make_rings(dtype, rings[0].buffers.shape[1], COLS, 1, 1, 1, most)
    else:
        first = make_landing(rings[0])
        landings = (first,)
        for i in gl.static_range(1, len(rings)):
            landings = append(
                landings, Ring(rings[i].buffers, first.full, first.empty, first.stages, first.parts, False)
            )
        return landings


@gluon.jit
def load(desc, rings, use, segments, COLS: gl.constexpr):
    """Starts the load of a tile into a channel: equally many rows from each of ((``HeadRows``, first row), ...).

    An 8-bit tensor may be loaded into a 16-bit channel, into the first half of each part: see ``narrow``.
    """
    BYTES: gl.constexpr = desc.dtype.primitive_bitwidth // 8
    ROWS: gl.constexpr = rings[0].buffers.shape[1] // len(segments)
    # If there are several segments, each must be contiguous in shared memory: at most 128 bytes a row.
    WIDEST: gl.constexpr = desc.block_type.shape[len(desc.block_type.shape) - 1]
    full = rings[0].acquire(use, rings[0].buffers.shape[1] * COLS * BYTES)
    tiles = tiles_at(rings, use)
    if desc.dtype.primitive_bitwidth < rings[0].buffers.dtype.primitive_bitwidth:
        narrowed = ()
        for i in gl.static_range(len(tiles)):
            narrowed = append(narrowed, narrow(tiles[i], desc.dtype, COLS))
        tiles = narrowed
    for i in gl.static_range(len(segments)):
        boxes = ()
        for j in gl.static_range(len(tiles)):
            boxes = append(boxes, box_of(tiles[j], i * ROWS, ROWS, 0))
        load_boxes(desc, boxes, full, segments[i][0], segments[i][1], COLS, rings[0].buffers.shape[2], WIDEST)


@gluon.jit
def load_boxes(desc, tiles, full, rows, row, COLS: gl.constexpr, most: gl.constexpr = 256,
               widest: gl.constexpr = 256):  # fmt: skip
    """Starts the load of a tile, which signals ``full``, by boxes of at most ``widest`` columns."""
    BOX: gl.constexpr = min(width_of(COLS, -1, most), widest)
    for i in gl.static_range(len(tiles)):
        for j in gl.static_range(width_of(COLS, i, most) // BOX):
            at = rows.at(row, start_of(COLS, i, most) + j * BOX)
            tma_load(desc, at, full, as_box(box_of(tiles[i], j * BOX, BOX), desc))


@gluon.jit
def narrow(tile, dtype: gl.constexpr, COLS: gl.constexpr):
    """The first bytes of a part, in a tile of COLS columns, as a part of a narrower dtype with as many elements."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([tile.shape[0], width_of(COLS, -1)], dtype)
    shape: gl.constexpr = [tile.shape[0], tile.shape[1]]
    return seen_as(tile, dtype, shape, layout)


@gluon.jit
def tiles_at(rings, use):
    """The parts of a use."""
    tiles = ()
    for i in gl.static_range(len(rings)):
        tiles = append(tiles, rings[i].at(use))
    return tiles


@gluon.jit
def box_of(tile, start, WIDTH: gl.constexpr, DIM: gl.constexpr = 1):
    """Some columns, or rows, of a part."""
    if tile.shape[DIM] == WIDTH:
        return tile
    else:
        return tile.slice(start, WIDTH, DIM)


@gluon.jit
def start_scores(q_rings, tiles, k_rings, use, x, q, ADDS: gl.constexpr = False, DIM: gl.constexpr = None):
    """Starts the products of queries and keys: a sum over the parts, added to ``x`` if it ADDS.

    q: The queries' parts in registers, or (). DIM: The number of columns that are not 0, a multiple of 16; None: all.
    """
    s = x
    for i in gl.static_range(len(k_rings)):
        k_tile = used_of(k_rings[i].at(use), i * k_rings[0].buffers.shape[2], DIM).permute((1, 0))
        if len(q) > 0:
            s = warpgroup_mma(q[i], k_tile, s, use_acc=ADDS or i > 0, is_async=True)
        else:
            q_tile = used_of(q_rings[i].at(tiles), i * k_rings[0].buffers.shape[2], DIM)
            s = warpgroup_mma(q_tile, k_tile, s, use_acc=ADDS or i > 0, is_async=True)
    return s


@gluon.jit
def used_of(tile, FIRST: gl.constexpr, DIM: gl.constexpr):
    """The columns of a part that a row of DIM columns has; the part begins at column FIRST. None: the whole part."""
    if DIM is None:
        return tile
    else:
        WIDTH: gl.constexpr = min(tile.shape[1], DIM - FIRST)
        return box_of(tile, 0, WIDTH)


@gluon.jit
def held_tiles(rings, use, layout_like, DIM: gl.constexpr):
    """The parts of a use as left operands in registers; DIM as in ``start_scores``."""
    held = ()
    for i in gl.static_range(len(rings)):
        tile = used_of(rings[i].at(use), i * rings[0].buffers.shape[2], DIM)
        held = append(held, tile.load(gl.DotOperandLayout(0, layout_like.type.layout, 2)))
    return held


@gluon.jit
def start_sum(a_tiles, b_tiles, zeros):
    """Starts the product of two tiles' rows: a sum over the parts."""
    s = warpgroup_mma(a_tiles[0], b_tiles[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(a_tiles)):
        s = warpgroup_mma(a_tiles[i], b_tiles[i].permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def zero_accumulators(M: gl.constexpr, rings):
    """A float32 zero accumulator [M, columns] for each part of a channel."""
    accs = ()
    for i in gl.static_range(len(rings)):
        accs = append(accs, zero_accumulator(M, rings[i].buffers.shape[2]))
    return accs


@gluon.jit
def zero_accumulator(M: gl.constexpr, N: gl.constexpr):
    """[M, N] float32 zeros in the layout of a WGMMA accumulator."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    return gl.zeros([M, N], gl.float32, layout)


@gluon.jit
def add_products(probs, v_rings, use, accs):
    """Starts the products of probabilities and values, one for each part."""
    started = ()
    for i in gl.static_range(len(accs)):
        started = append(started, add_product(probs, v_rings[i].at(use), accs[i]))
    return started


@gluon.jit
def add_product(probs, v_tile, acc):
    """Starts the product for one part."""
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return warpgroup_mma(gl.convert_layout(probs, layout), v_tile, acc, is_async=True)


@gluon.jit
def wait_for_products(accs, PENDING: gl.constexpr = 0):
    """The accumulators, after all started products except the last PENDING ones are complete."""
    if len(accs) == 1:
        return (warpgroup_mma_wait(PENDING, deps=[accs[0]]),)
    else:
        return warpgroup_mma_wait(PENDING, deps=accs)


@gluon.jit
def rescale_rows(accs, factor):
    """Accumulators with rows multiplied by their factors."""
    scaled = ()
    for i in gl.static_range(len(accs)):
        scaled = append(scaled, rescale(accs[i], as_row_layout(factor, accs[i]), accs[i].shape[1]))
    return scaled


@gluon.jit
def scale_by(accs, factor):
    """Accumulators multiplied by a number."""
    scaled = ()
    for i in gl.static_range(len(accs)):
        scaled = append(scaled, accs[i] * factor)
    return scaled


@gluon.jit
def as_row_layout(x, layout_like):
    """[M] converted to the layout of ``layout_like``'s rows."""
    layout: gl.constexpr = gl.SliceLayout(1, layout_like.type.layout)
    return gl.convert_layout(x, layout)


@gluon.jit
def pieces(x, WIDTH: gl.constexpr):
    """[M, N] -> N / WIDTH tensors [M, WIDTH]."""
    if x.shape[1] == WIDTH:
        return (x,)
    else:
        low, high = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
        return pieces(low, WIDTH) + pieces(high, WIDTH)


@gluon.jit
def store(desc, tiles, buffers, FIRST: gl.constexpr, STAGES: gl.constexpr, segments):
    """Stores a tile by TMA, box by box: equally many rows to each of ((``HeadRows``, first row), ...).

    The tile passes through STAGES buffers from FIRST on; a buffer is reused once its last store has read it.
    """
    BOX: gl.constexpr = desc.block_type.shape[4 if segments[0][0].varlen else 3]
    ROWS: gl.constexpr = tiles[0].shape[0] // len(segments)
    parts = ()
    for i in gl.static_range(len(tiles)):
        parts = parts + pieces(tiles[i], BOX)
    for i in gl.static_range(len(parts)):
        buffer = buffers.index(FIRST + i % STAGES)
        if i == 0:
            tma_store_wait(0)
        elif i >= STAGES:
            tma_store_wait(STAGES - 1)
        buffer.store(parts[i])
        fence_async_shared()
        for j in gl.static_range(len(segments)):
            at = segments[j][0].at(segments[j][1], i * BOX)
            tma_store(desc, at, as_box(box_of(buffer, j * ROWS, ROWS, 0), desc))
