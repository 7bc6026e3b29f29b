"""Scales of blocks of 128 rows in the Hopper forward of 8-bit tensors, and what a tile needs of them."""

# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.forward.scheduler import query_rows

# Rows that share a scale.
SCALE_ROWS = gl.constexpr(128)


@aggregate
class TileScales:
    """The scales of a warpgroup's rows of a tile: the factor of its scores, and where those of its keys begin.

    ``num_keys`` is 0 where there is no tile.
    """

    score: gl.tensor
    k: gl.tensor
    v: gl.tensor
    num_keys: gl.tensor


@gluon.jit
def scales_at(scale, b, head, first):
    """Where a sequence's scales begin: ``first`` is the number of its first block."""
    return b * scale.batch_step + head * scale.head_step + first * scale.block_step


@gluon.jit
def scale_of(scale, start, row, exists):
    """The scale of a row, 1 if it does not exist."""
    return gl.load(scale.ptr + start + row // SCALE_ROWS * scale.block_step, mask=exists, other=1.0)


@gluon.jit
def first_block(start, b):
    """The number of the first block of a packed sequence that begins at row ``start``."""
    return start // SCALE_ROWS + b


@gluon.jit
def tile_scales(channels, tiles, scales, loop, call, schedule, WARPGROUP: gl.constexpr):
    """The ``TileScales`` of a warpgroup."""
    records = channels.tiles
    b, head = records.get(tiles, "sequence"), records.get(tiles, "head")
    head_kv, num_keys = records.get(tiles, "head_kv"), call.keys.length
    first_q, first_k, own_b = gl.to_tensor(0), gl.to_tensor(0), b
    if call.q.PACKED:
        first_q, first_k = first_block(records.get(tiles, "start_q"), b), first_block(records.get(tiles, "start_k"), b)
        num_keys, own_b = records.get(tiles, "seqlen_k"), gl.to_tensor(0)
    num_keys = gl.where(loop.is_tile, num_keys, 0)
    row = records.get(tiles, "row") + WARPGROUP * schedule.BLOCK_M
    # Of three warpgroups' rows the last may have no scale.
    exists = (num_keys > 0) & (row < query_rows(records, tiles, call).length)
    q_scale = scale_of(scales.q, scales_at(scales.q, own_b, head, first_q), row, exists)
    k_at, v_at = scales_at(scales.k, own_b, head_kv, first_k), scales_at(scales.v, own_b, head_kv, first_k)
    return TileScales(q_scale, k_at, v_at, num_keys)


@gluon.jit
def fetch_block(scales, own, n_block, schedule, CHECKED: gl.constexpr):
    """The scale of a block's products, and that of its values; block 0's before block 0.

    CHECKED: there may be no tile, or the block may stand past the end of the keys, as that of rows without keys does.
    """
    row = gl.maximum(n_block, 0) * schedule.BLOCK_N
    exists = row < own.num_keys if CHECKED else True
    return own.score * scale_of(scales.k, own.k, row, exists), scale_of(scales.v, own.v, row, exists)
