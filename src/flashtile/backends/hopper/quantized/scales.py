"""Scales of blocks of 128 rows in the Hopper forward of 8-bit tensors, and what a tile needs of them."""

# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.forward.scheduler import query_rows

# Rows that share a scale.
SCALE_ROWS = gl.constexpr(128)


@aggregate
class Scale:
    """float32 scales by sequence, head and block; a stride is 0 where one serves several."""

    ptr: gl.tensor
    stride_b: gl.tensor
    stride_head: gl.tensor
    stride_block: gl.tensor

    @gluon.jit
    def start(self, b, head, first):
        """Where a sequence's scales begin: ``first`` is the number of its first block."""
        return b * self.stride_b + head * self.stride_head + first * self.stride_block

    @gluon.jit
    def fetch(self, start, row, exists):
        """The scale of a row, 1 if it does not exist."""
        return gl.load(self.ptr + start + row // SCALE_ROWS * self.stride_block, mask=exists, other=1.0)


@aggregate
class Scales:
    """Those of q, k and v; ``shift_ptr`` and its factor restore what smoothing took off the scores of a row."""

    q: Scale
    k: Scale
    v: Scale
    shift_ptr: gl.tensor | gl.constexpr
    shift_scale: gl.tensor


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
def first_block(start, b):
    """The number of the first block of a packed sequence that begins at row ``start``."""
    return start // SCALE_ROWS + b


@gluon.jit
def tile_scales(channels, tiles, scales, loop, sizes, WARPGROUP: gl.constexpr):
    """The ``TileScales`` of a warpgroup."""
    records = channels.tiles
    b, head = records.get(tiles, "sequence"), records.get(tiles, "head")
    head_kv, num_keys = records.get(tiles, "head_kv"), sizes.seqlen_k
    first_q, first_k, own_b = gl.to_tensor(0), gl.to_tensor(0), b
    if sizes.varlen:
        first_q, first_k = first_block(records.get(tiles, "start_q"), b), first_block(records.get(tiles, "start_k"), b)
        num_keys, own_b = records.get(tiles, "seqlen_k"), gl.to_tensor(0)
    num_keys = gl.where(loop.is_tile, num_keys, 0)
    row = records.get(tiles, "row") + WARPGROUP * sizes.block_m
    # Of three warpgroups' rows the last may have no scale.
    exists = (num_keys > 0) & (row < query_rows(records, tiles, sizes).length)
    q_scale = scales.q.fetch(scales.q.start(own_b, head, first_q), row, exists)
    return TileScales(
        q_scale, scales.k.start(own_b, head_kv, first_k), scales.v.start(own_b, head_kv, first_k), num_keys
    )


@gluon.jit
def fetch_block(scales, own, n_block, sizes, CHECKED: gl.constexpr):
    """The scale of a block's products, and that of its values; block 0's before block 0.

    CHECKED: there may be no tile, or the block may stand past the end of the keys, as that of rows without keys does.
    """
    row = gl.maximum(n_block, 0) * sizes.block_n
    exists = row < own.num_keys if CHECKED else True
    return own.score * scales.k.fetch(own.k, row, exists), scales.v.fetch(own.v, row, exists)
