"""The role that makes 16-bit blocks of keys and values from an 8-bit cache's, for the consumers of the forward.

TMA loads a block of 8 bits into the first half of the 16-bit buffer that it becomes, so it takes no memory of its own.
The role's warps read a part of it into registers, wait until all have, and write the 16-bit numbers over the whole of
it. What a consumer sees is a cache that holds ``8 bits times scale`` rounded to q's dtype.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashtile.backends.hopper.device.gluon_compat import thread_barrier
from flashtile.backends.hopper.device.inline_ptx import from_e4m3
from flashtile.backends.hopper.device.parts import box_of, narrow
from flashtile.backends.hopper.forward.scheduler import pages_of_rows


@gluon.jit
def widener(channels, landings, call, schedule):
    """Widens all blocks in the order in which ``roles.producer`` loads them; ``landings``: (keys', values')."""
    records = channels.tiles
    tiles = 0
    used = 0
    records.ring.wait(tiles)
    n_block = records.get(tiles, "n_block_max")
    while n_block > 0:
        n_block_min = records.get(tiles, "n_block_min")
        n_block -= 1
        widen_keys(channels, landings, used, tiles, n_block, call, schedule)
        if schedule.OVERLAP:
            widen_last_values(channels, landings, used - 1, tiles - 1, call, schedule)
        while n_block > n_block_min:
            n_block -= 1
            widen_keys(channels, landings, used + 1, tiles, n_block, call, schedule)
            widen_values(channels, landings, used, tiles, n_block + 1, call, schedule)
            used += 1
        if not schedule.OVERLAP:
            widen_last_values(channels, landings, used, tiles, call, schedule)
        used += 1
        tiles += 1
        records.ring.wait(tiles)
        n_block = records.get(tiles, "n_block_max")
    if schedule.OVERLAP:
        widen_last_values(channels, landings, used - 1, tiles - 1, call, schedule)


@gluon.jit
def widen_last_values(channels, landings, use, tiles, call, schedule):
    """Widens a tile's last values and releases its record; does nothing for tile -1."""
    if tiles >= 0:
        n_block = channels.tiles.get(tiles, "n_block_min")
        widen_values(channels, landings, use, tiles, n_block, call, schedule)
        channels.tiles.ring.release(tiles)


@gluon.jit
def widen_keys(channels, landings, use, tiles, n_block, call, schedule):
    """Widens a block of a tile's keys."""
    scale = call.keys.cache.k_scale
    widen(channels.keys, landings[0], use, scale, channels.tiles, tiles, n_block, call.k, call, schedule)


@gluon.jit
def widen_values(channels, landings, use, tiles, n_block, call, schedule):
    """Widens a block of a tile's values."""
    scale = call.keys.cache.v_scale
    widen(channels.values, landings[1], use, scale, channels.tiles, tiles, n_block, call.v, call, schedule)


@gluon.jit
def widen(rings, landing, use, scale, records, tiles, n_block, operand, call, schedule):
    """Widens a block once it has landed, and publishes it.

    A pass takes as many rows of a part as registers hold. Each row of a part of 128 columns or more lies within the row
    that it becomes; of other parts it does not, so one pass reads them whole.
    """
    landing[0].wait(use)
    PASSES: gl.constexpr = passes_of(operand.BLOCK_DIM, schedule.WIDEN_PASSES)
    for i in gl.static_range(len(rings)):
        tile = rings[i].at(use)
        raw = narrow(tile, operand.desc.dtype, operand.BLOCK_DIM)
        for j in gl.static_range(PASSES):
            widen_rows(tile, raw, j, schedule.BLOCK_N // PASSES, scale, records, tiles, n_block, call, schedule)
    fence_async_shared()
    thread_barrier()
    rings[0].publish(use)


@gluon.jit
def widen_rows(tile, raw, j: gl.constexpr, ROWS: gl.constexpr, scale, records, tiles, n_block, call, schedule):
    """Widens the j-th ROWS rows of a part, ``raw``, in place."""
    layout: gl.constexpr = rows_layout(tile.shape[1], gl.num_warps())
    numbers = from_e4m3(box_of(raw, j * ROWS, ROWS, 0).load(layout))
    if scale.ptr is not None:
        numbers = numbers * factor_of(scale, records, tiles, n_block, j * ROWS, numbers, call, schedule)
    numbers = numbers.to(tile.dtype)
    thread_barrier()
    box_of(tile, j * ROWS, ROWS, 0).store(numbers)


@gluon.jit
def factor_of(scale, records, tiles, n_block, FIRST: gl.constexpr, like, call, schedule):
    """The factor of a block's rows from FIRST on: one, or [rows, 1]. It is 1 where no key is, lest 0 become NaN."""
    head, seqlen_k = records.get(tiles, "head_kv"), records.get(tiles, "seqlen_k")
    if scale.entry_step is None:
        return gl.load(scale.ptr + head)
    elif call.keys.cache.PAGE_SIZE == 0:
        at = scale.ptr + records.get(tiles, "start_k").to(gl.int64) * scale.entry_step + head
        return gl.load(at, mask=seqlen_k > 0, other=1.0)
    else:
        rows = n_block * schedule.BLOCK_N + FIRST + gl.arange(0, like.shape[0], gl.SliceLayout(1, like.type.layout))
        pages = pages_of_rows(records, tiles, rows, call)
        at = scale.ptr + pages.to(gl.int64) * scale.entry_step + head
        return gl.load(at, mask=rows < seqlen_k, other=1.0)[:, None]


@gluon.constexpr_function
def passes_of(cols, passes):
    """Passes over a part of a tile of so many columns."""
    return passes if cols % 128 == 0 else 1


@gluon.constexpr_function
def rows_layout(width, warps):
    """Eight columns a thread: 8 bytes are read and 16 written, by neighbouring threads at neighbouring addresses."""
    lanes = min(width // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])
