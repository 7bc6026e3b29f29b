"""Blocks of latent rows in pages that TMA has no boxes for: the producer's threads copy them, as ``paged.gather``'s do.

Each lane looks up the page of one row of a block, and passes the row's place to the lanes that copy it. A block's
places are found once. Its pieces are copied and published one after another, so that each fills its buffer as soon as
that is free.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.device.gluon_compat import as_tile, copy_async, seen_as
from flashtile.backends.hopper.device.parts import box_of, narrow
from flashtile.backends.hopper.forward.paged.gather import one_a_lane, rows_by_lanes


@gluon.jit
def table_of(b, entry, call):
    """The address of the first page of a sequence, which ``entry`` counts where pages are a list."""
    table = call.cache.pages
    if call.cache.indptr is None:
        table += b.to(gl.int64) * call.cache.pages_pitch
    else:
        table += entry
    return table


@gluon.jit
def keys_of_block(n, call):
    """The keys of block n, one a lane. Lanes must not be loop invariant: the compiler would keep multiples of them."""
    N: gl.constexpr = call.schedule.BLOCK_N
    return n * N + gl.arange(0, N, one_a_lane(N, gl.num_warps())) + (n >> 30)


@gluon.jit
def number_of(keys, paging):
    """Which of a sequence's pages keys are in: see ``Paging``."""
    return gl.umulhi(2 * keys, paging.multiplier) >> paging.shift


@gluon.jit
def pages_by_lane(b, entry, high, n, call, latent):
    """The pages of the keys of block n; 0 past the last key, where the table may have any number."""
    keys = keys_of_block(n, call)
    return gl.load(table_of(b, entry, call) + number_of(keys, latent.copied.paging), mask=keys < high, other=0)


@gluon.jit
def copy_block(channels, use, pages, high, h_kv, n, call, latent):
    """Starts the copies of block n; rows past the last key become zeros.

    Most blocks have no such rows, and then no copy asks: for a predicate of each row there are not enough registers.
    """
    keys = keys_of_block(n, call)
    row = keys - number_of(keys, latent.copied.paging) * latent.copied.paging.size
    of_values, of_keys = pages * latent.v_entry_rows + row, pages * latent.k_entry_rows + row
    if (n + 1) * call.schedule.BLOCK_N <= high:
        copy_pieces(channels, use, of_values, of_keys, h_kv, call, latent, True)
    else:
        of_values, of_keys = gl.where(keys < high, of_values, -1), gl.where(keys < high, of_keys, -1)
        copy_pieces(channels, use, of_values, of_keys, h_kv, call, latent, False)


@gluon.jit
def copy_pieces(channels, use, of_values, of_keys, h_kv, call, latent, WHOLE: gl.constexpr):
    """Starts the copies of a block's scales, values and keys, given the rows of both; WHOLE: as for ``copy_piece``."""
    if latent.WIDE > 0:
        copy_scales(latent.copied.scales, channels.scales, use, of_values, h_kv, WHOLE)
    for i in gl.static_range(len(channels.values)):
        copy_piece(latent.copied.v, channels.landings[i], use, of_values, h_kv, latent.PIECE * i, call.out.DIM, WHOLE)
    copy_piece(latent.copied.k, channels.keys, use, of_keys, h_kv, 0, call.q.DIM, WHOLE)


@gluon.jit
def copy_piece(operand, ring, use, rows, h_kv, FIRST: gl.constexpr, COLS: gl.constexpr, WHOLE: gl.constexpr):
    """Starts the copies of a piece of some rows.

    Args:
        operand: ``Rows`` of COLS columns, or of half as many, each of two numbers of 8 bits.
        ring: The piece's.
        use: Its use.
        rows: [rows] int32, rows of all entries, one a lane; -1 stands for a row of zeros.
        h_kv: The key head.
        FIRST: The piece's first column of the COLS.
        COLS: Columns.
        WHOLE: Whether no row is -1.
    """
    WIDTH: gl.constexpr = in_16_bits(ring.buffers.shape[2], operand.DIM, COLS)
    BOX: gl.constexpr = min(WIDTH, 64)
    layout: gl.constexpr = rows_by_lanes(rows.shape[0], BOX, gl.num_warps())
    ring.claim(use)
    tile = ring.at(use)
    if tile.shape[1] > WIDTH:
        tile = as_tile(narrow(tile, gl.float8e4nv, tile.shape[1]), tile.dtype, WIDTH)
    at, rows = places_of(operand, rows, h_kv, in_16_bits(FIRST, operand.DIM, COLS), BOX, layout)
    for j in gl.static_range(WIDTH // BOX):
        copy(box_of(tile, j * BOX, BOX), at + j * BOX, rows, WHOLE)
    publish(ring, use)


@gluon.jit
def copy_scales(operand, ring, use, rows, h_kv, WHOLE: gl.constexpr):
    """Starts the copies of the scales of some rows, 16 bytes of each; rows and WHOLE: as for ``copy_piece``."""
    layout: gl.constexpr = whole_rows(rows.shape[0], operand.DIM, gl.num_warps())
    SHAPE: gl.constexpr = [rows.shape[0], operand.DIM]
    # In rows of 16 bytes, as they are read.
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ring.claim(use)
    at, rows = places_of(operand, rows, h_kv, 0, operand.DIM, layout)
    copy(seen_as(ring.at(use), operand.ptr.dtype.element_ty, SHAPE, plain), at, rows, WHOLE)
    publish(ring, use)


@gluon.jit
def publish(ring, use):
    """Publishes copies, with ``arrivals``.

    Who widens values in place, or leaves probabilities where keys were, must know that nobody reads what was there
    before. Copies' arrivals tell of copies alone, so one thread, which has waited for those readers, arrives as well.
    """
    ring.publish_copies(use)
    ring.publish(use)


@gluon.constexpr_function
def arrivals(warps):
    """The arrivals by which so many warps publish what they copy; 0 without them."""
    return 32 * warps + 1 if warps else 0


@gluon.jit
def copy(tile, at, rows, WHOLE: gl.constexpr):
    """Starts the copies of the elements at some addresses, of rows of -1 as zeros."""
    if WHOLE:
        copy_async(tile, at)
    else:
        copy_async(tile, at, mask=(rows >= 0)[:, None])


@gluon.jit
def places_of(operand, rows, h_kv, FIRST: gl.constexpr, COLS: gl.constexpr, layout: gl.constexpr):
    """(Addresses of COLS columns of rows from FIRST on, the rows), in the layout of those who copy.

    The compiler must see that strides are multiples of 16 bytes.
    """
    VECTOR: gl.constexpr = operand.VECTOR
    rows = gl.convert_layout(rows, gl.SliceLayout(1, layout))
    units = rows.to(gl.int64) * (operand.stride_row // VECTOR) + h_kv.to(gl.int64) * (operand.stride_head // VECTOR)
    starts = operand.ptr + (units * VECTOR)[:, None]
    return starts + (FIRST + gl.arange(0, COLS, gl.SliceLayout(0, layout)))[None, :], rows


@gluon.constexpr_function
def in_16_bits(count, dim, cols):
    """How many of ``dim`` 16-bit columns so many of a row's ``cols`` columns are."""
    return count * dim // cols


@gluon.constexpr_function
def whole_rows(rows, cols, warps):
    """A layout [rows, cols] with the rows of ``one_a_lane``: a thread has all columns of one row."""
    own = rows // warps
    lanes = [[1 << bit if 1 << bit < own else 0, 0] for bit in range(5)]
    columns = [[0, 1 << bit] for bit in range(cols.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        columns, lanes, [[own << bit, 0] for bit in range(warps.bit_length() - 1)], [], [rows, cols]
    )
