"""The role that widens blocks of keys and values from an 8-bit cache to 16 bits, for the consumers of the forward.

TMA loads an 8-bit block into the first half of the 16-bit buffer that it becomes, so it takes no memory of its own. The
role's warps read a part of the block into registers, wait until all have read, and write the 16-bit numbers over the
whole part. With three warpgroups the block is loaded into a separate buffer. To consumers the cache holds 8-bit numbers
times their scale, rounded to q's dtype.
"""

# ruff: noqa: RET505 - Triton compiles code after a return, even if the condition is decided.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashtile.backends.hopper.device.gluon_compat import thread_barrier
from flashtile.backends.hopper.device.inline_ptx import from_e4m3
from flashtile.backends.hopper.device.parts import box_of, narrow
from flashtile.backends.hopper.forward.paged.pages import pages_of_rows


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
    """Widens a block after it is loaded, and publishes it.

    A pass widens as many rows of a part as registers can hold. In place, each row of a tile of 128 or 256 columns lies
    within the row that it becomes. For other tiles it does not, so one pass reads a whole part.
    """
    IN_PLACE: gl.constexpr = schedule.NUM_WARPGROUPS == 2
    COLS: gl.constexpr = operand.BLOCK_DIM
    factor = factor_of_block(scale, records, tiles, n_block, call, schedule)
    landing[0].wait(use)
    if not IN_PLACE:
        rings[0].claim(use)
    for i in gl.static_range(len(rings)):
        tile = rings[i].at(use)
        codes = narrow(tile, operand.desc.dtype, COLS) if IN_PLACE else landing[i].at(use)
        widen_part(tile, codes, COLS, factor, scale, records, tiles, n_block, call, schedule)
    fence_async_shared()
    thread_barrier()
    rings[0].publish(use)
    if not IN_PLACE:
        landing[0].release(use)


@gluon.jit
def widen_part(tile, codes, COLS: gl.constexpr, factor, scale, records, tiles, n_block, call, schedule):
    """Widens a part from its 8-bit ``codes``."""
    ROWS: gl.constexpr = rows_of_pass(COLS, tile.shape, gl.num_warps(), schedule.NUM_WARPGROUPS == 2)
    for j in gl.static_range(tile.shape[0] // ROWS):
        widen_rows(tile, codes, j, ROWS, factor, scale, records, tiles, n_block, call, schedule)


@gluon.jit
def widen_rows(
    tile, codes, j: gl.constexpr, ROWS: gl.constexpr, factor, scale, records, tiles, n_block, call, schedule
):
    """Widens the j-th ROWS rows of a part."""
    layout: gl.constexpr = rows_layout(tile.shape[1], gl.num_warps())
    numbers = from_e4m3(box_of(codes, j * ROWS, ROWS, 0).load(layout))
    if scale.ptr is not None:
        if differs_in_block(scale.entry_step, call.keys.cache.PAGE_SIZE, schedule.BLOCK_N):
            rows = n_block * schedule.BLOCK_N + j * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
            numbers = numbers * factor_of_rows(scale, records, tiles, rows, call)[:, None]
        else:
            numbers = numbers * factor
    numbers = numbers.to(tile.dtype)
    if schedule.NUM_WARPGROUPS == 2:
        # In place: after this barrier all bytes that are overwritten have been read.
        thread_barrier()
    box_of(tile, j * ROWS, ROWS, 0).store(numbers)


@gluon.jit
def factor_of_block(scale, records, tiles, n_block, call, schedule):
    """The factor of all rows of a block; 1 without one, and for a block without rows, so that 0 does not become NaN."""
    PAGE_SIZE: gl.constexpr = call.keys.cache.PAGE_SIZE
    if scale.ptr is None or differs_in_block(scale.entry_step, PAGE_SIZE, schedule.BLOCK_N):
        return gl.to_tensor(1.0)
    elif scale.entry_step is None:
        return gl.load(scale.ptr + records.get(tiles, "head_kv"))
    elif PAGE_SIZE == 0:
        at = scale.ptr + records.get(tiles, "start_k").to(gl.int64) * scale.entry_step + records.get(tiles, "head_kv")
        return gl.load(at, mask=records.get(tiles, "seqlen_k") > 0, other=1.0)
    else:
        return factor_of_rows(scale, records, tiles, n_block * schedule.BLOCK_N, call)


@gluon.jit
def factor_of_rows(scale, records, tiles, rows, call):
    """The factors of some rows of a tile's keys, by the rows' pages; 1 past the last key."""
    pages = pages_of_rows(records, tiles, rows, call)
    at = scale.ptr + pages.to(gl.int64) * scale.entry_step + records.get(tiles, "head_kv")
    return gl.load(at, mask=rows < records.get(tiles, "seqlen_k"), other=1.0)


@gluon.constexpr_function
def differs_in_block(entry_step, page_size, block_n):
    """Whether the rows of a block may have several factors, because it has several pages."""
    return entry_step is not None and 0 < page_size < block_n


@gluon.constexpr_function
def rows_of_pass(cols, shape, warps, in_place):
    """The number of rows of a part that are widened at once, in a tile of ``cols`` columns.

    In place it is 64 bytes a thread, and may have to be all rows; elsewhere 16 bytes, because registers are few.
    """
    rows = warps * 32 * (64 if in_place else 16) // shape[1]
    return min(rows, shape[0]) if not in_place or cols % 128 == 0 else shape[0]


@gluon.constexpr_function
def rows_layout(width, warps):
    """Eight columns a thread: 8 bytes are read and 16 written, by neighbouring threads at neighbouring addresses."""
    lanes = min(width // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])
