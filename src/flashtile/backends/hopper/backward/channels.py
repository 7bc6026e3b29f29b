"""What the roles of the Hopper backward hand each other, and where dq goes."""

# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from flashtile.backends.hopper.backward.scheduler import FIELDS, RECORD_SIZE
from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.device.parts import make_rings, width_of, with_parts
from flashtile.backends.hopper.device.ring import Records, Ring, make_records, make_ring, make_ring_beside

# Keys of a part of a tile: rows of a warpgroup's products.
PART_KEYS = gl.constexpr(64)
# Columns of the widest part of a tile: a product with more takes more registers than a thread starts with.
WIDEST = gl.constexpr(128)


@aggregate
class DqOutput:
    """Where one warpgroup adds to dq.

    Attributes:
        ptr: dq of the workspace.
        desc: Its descriptor, or None: added from registers.
        buffer: What TMA adds from, or None.
        dq_order: A use for each step, published when the tile may add to the row block; None: in any order.
        added: Published by each warpgroup that has added. Releasing it releases ``dq_order``.
    """

    ptr: gl.tensor
    desc: tma.tensor_descriptor | gl.constexpr
    buffer: gl.shared_memory_descriptor | gl.constexpr
    dq_order: Ring | gl.constexpr
    added: Ring | gl.constexpr


@aggregate
class Channels:
    """Tile records, and rings: of queries, dout, keys and values one for each part of their columns.

    Queries, rows and dout share their ``empty`` barriers: claimed and released together.

    Attributes:
        tiles: One record per tile.
        queries: Of a row block.
        rows: [stages, 2, block_m] float32 of a row block, see ``workspace``.
        dout: Of a row block.
        keys: Of a tile, in parts of 64 keys.
        values: The same; None for dv alone.
        dscores: Their gradients, handed to the warpgroups that compute dq, a part for 64 keys; None without dq.
        probs: What the first warpgroup hands over where gradients are split (``split_by_gradient``), else None.
        out: Through what dk and dv leave, for each warpgroup buffers of 128 columns; None where gradients are split.
        dq: Where this warpgroup adds to dq; None for those that do not.

    Where gradients are split, dk leaves through the buffers of dscores and dv through those of probs; if nothing is
    handed over, these are rings without barriers.
    """

    tiles: Records
    queries: gl.tuple
    rows: gl.shared_memory_descriptor
    dout: gl.tuple
    keys: gl.tuple
    values: gl.tuple | gl.constexpr
    dscores: Ring | gl.constexpr
    probs: Ring | gl.constexpr
    out: gl.shared_memory_descriptor | gl.constexpr
    dq: DqOutput | gl.constexpr


@gluon.jit
def make_channels(grid):
    """The channels of a ``KeyGrid``, without dq's."""
    dtype: gl.constexpr = grid.call.q.desc.dtype
    ROWS: gl.constexpr = grid.tiles.BLOCK_M
    COLS: gl.constexpr = grid.call.q.BLOCK_DIM
    COLS_V: gl.constexpr = grid.call.v.BLOCK_DIM
    PARTS: gl.constexpr = grid.tiles.PARTS
    stages: gl.constexpr = grid.tiles.STAGES
    ds_stages: gl.constexpr = grid.tiles.DS_STAGES
    by_gradient: gl.constexpr = PARTS == 1
    # With dv alone, the second of two warpgroups that share keys does nothing. A third warpgroup for dq reads the keys.
    consumers: gl.constexpr = 2 if grid.gradients.HAS_DSCORES or not by_gradient else 1
    # Two warps more read the tile records where dq has an order.
    in_order: gl.constexpr = 2 if grid.work.dq_order is not None else 0
    third: gl.constexpr = 1 if grid.gradients.HAS_DQ and grid.tiles.DQ_WARPGROUPS == 1 else 0
    dout_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, width_of(COLS_V, -1, WIDEST)], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART_KEYS, ROWS], dtype)
    tiles = make_records(FIELDS, "", RECORD_SIZE, 2, consumers + third + in_order)
    queries = make_rings(dtype, ROWS, COLS, stages, consumers, 1, WIDEST)
    rows = gl.allocate_shared_memory(gl.float32, [stages, 2, ROWS], grid.work.rows.layout)
    dout = make_ring_beside(queries[0], dtype, [ROWS, width_of(COLS_V, 0, WIDEST)], dout_layout)
    dout = with_parts(dout, dout_layout, COLS_V, WIDEST)
    keys = make_rings(dtype, PART_KEYS, COLS, grid.tiles.K_STAGES, PARTS + third, PARTS, WIDEST)
    # Rings are made only where they are used: see make_ring_beside.
    values, dscores, probs, out = None, None, None, None
    if grid.gradients.HAS_DSCORES:
        values = make_rings(dtype, PART_KEYS, COLS_V, grid.tiles.V_STAGES, PARTS, PARTS, WIDEST)
    if grid.gradients.HAS_DQ or (by_gradient and grid.gradients.HAS_DK):
        readers: gl.constexpr = grid.tiles.DQ_WARPGROUPS if grid.gradients.HAS_DQ else 0
        dscores = make_ring(dtype, [PART_KEYS, ROWS], ds_layout, ds_stages, readers, PARTS, PARTS)
    if by_gradient:
        probs = make_ring(gl.float16, [PART_KEYS, ROWS], ds_layout, ds_stages, 1 if grid.gradients.HAS_DSCORES else 0)
    else:
        cols: gl.constexpr = width_of(COLS, -1)
        out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART_KEYS, cols], dtype)
        out = gl.allocate_shared_memory(dtype, [2 * (min(COLS, 128) // cols), PART_KEYS, cols], out_layout)
    return Channels(tiles, queries, rows, dout, keys, values, dscores, probs, out, None)


@gluon.jit
def with_dq(channels, dq):
    """The channels of a warpgroup that adds to dq."""
    c = channels
    return Channels(c.tiles, c.queries, c.rows, c.dout, c.keys, c.values, c.dscores, c.probs, c.out, dq)
