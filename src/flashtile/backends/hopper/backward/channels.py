"""What the roles of the Hopper backward hand each other, and where dq goes."""

# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.device.ring import Records, Ring

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
        turns_ptr: Whose turn it is to add to each row block, or None: in any order.
    """

    ptr: gl.tensor
    desc: tma.tensor_descriptor | gl.constexpr
    buffer: gl.shared_memory_descriptor | gl.constexpr
    turns_ptr: gl.tensor | gl.constexpr


@aggregate
class Channels:
    """Tile records, and rings: of queries, dout, keys and values one for each part of their columns.

    Queries, what belongs to their rows, and dout are claimed and released as one.

    Attributes:
        tiles: One record per tile.
        queries: Of a row block.
        rows: [stages, 2, block_m] float32 of a row block, see ``workspace``.
        dout: Of a row block.
        keys: Of a tile, in parts of 64 keys.
        values: The same; None for dv alone.
        dscores: Their gradients, handed to the warpgroups that compute dq, a part for 64 keys; None without dq.
        probs: What the first warpgroup hands over where gradients are split (``split_by_gradient``), else None.
        dq: Where this warpgroup adds to dq; None for those that do not.

    Where gradients are split, dk leaves through the buffers of dscores and dv through those of probs: they exist for
    that even if nothing is handed over, as rings without barriers.
    """

    tiles: Records
    queries: gl.tuple
    rows: gl.shared_memory_descriptor
    dout: gl.tuple
    keys: gl.tuple
    values: gl.tuple | gl.constexpr
    dscores: Ring | gl.constexpr
    probs: Ring | gl.constexpr
    dq: DqOutput | gl.constexpr
