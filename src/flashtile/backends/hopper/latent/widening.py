"""The role that makes 16-bit values of latent rows' 8 bits, for the scorer and the summers: as ``paged.widening``."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashtile.backends.hopper.device.gluon_compat import seen_as, thread_barrier
from flashtile.backends.hopper.device.inline_ptx import from_e4m3
from flashtile.backends.hopper.device.parts import box_of, narrow
from flashtile.backends.hopper.forward.paged.widening import rows_layout


@gluon.jit
def widener(channels, call, latent):
    """Widens all blocks, piece by piece, in the order in which they are loaded."""
    records = channels.parts
    parts, used = 0, 0
    records.ring.wait(parts)
    while records.get(parts, "is_part") > 0:
        n, stop = records.get(parts, "first_block"), records.get(parts, "stop_block")
        while n < stop:
            channels.scales.wait(used)
            for i in gl.static_range(len(channels.values)):
                channels.landings[i].wait(used)
                widen_piece(channels, used, i)
                fence_async_shared()
                thread_barrier()
                channels.values[i].publish(used)
            channels.scales.release(used)
            n, used = n + 1, used + 1
        records.ring.release(parts)
        parts += 1
        records.ring.wait(parts)


@gluon.jit
def widen_piece(channels, used, NUMBER: gl.constexpr):
    """Widens a piece, which has landed in the first half of what it becomes."""
    tile = channels.values[NUMBER].at(used)
    PIECE: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = rows_layout(PIECE, 4)
    # As TMA leaves the scales, in rows of 16 bytes.
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    scales = channels.scales.at(used)
    SHAPE: gl.constexpr = scales.shape
    scales = box_of(seen_as(scales, gl.float32, SHAPE, plain), NUMBER * PIECE // 128, 1)
    numbers = narrow(tile, gl.float8e4nv, PIECE).load(layout)
    factors = scales.load(layout)
    # All that is overwritten has been read.
    thread_barrier()
    tile.store((from_e4m3(numbers) * factors).to(tile.dtype))
