"""Where the rows of a tile's keys and values lie in a cache."""

# ruff: noqa: RET505 - Triton compiles code after a return, even if the condition is decided.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.device.parts import HeadRows, append


@gluon.jit
def cached_keys(records, use, n_block, call, schedule, FILLS: gl.constexpr):
    """The place of a tile's block of keys or values in a cache: ((``HeadRows``, first row), ...), of equally many rows.

    Pages smaller than a block are a box each; each lane of the warp loads the number of one page, up to the last page
    with keys. FILLS: the map treats a page as a packed sequence, so TMA fills rows past the keys with zeros. Values
    need this, because 0 times NaN is NaN. Otherwise the map has entries or pages, and rows past the keys have the
    cache's contents: their scores are masked.
    """
    PAGE: gl.constexpr = call.keys.cache.PAGE_SIZE
    BLOCK_N: gl.constexpr = schedule.BLOCK_N
    head, seqlen_k = records.get(use, "head_kv"), records.get(use, "seqlen_k")
    if PAGE == 0:
        entry = records.get(use, "start_k")
        return ((_rows_of(entry, seqlen_k, head, call, FILLS), n_block * BLOCK_N),)
    elif PAGE >= BLOCK_N:
        table = _table(records, use, call)
        # Block numbers are not negative, which the compiler does not know: masks and shifts are cheaper.
        PER_PAGE: gl.constexpr = PAGE // BLOCK_N
        place, row = n_block >> log2(PER_PAGE), (n_block & (PER_PAGE - 1)) * BLOCK_N
        length = gl.minimum(gl.maximum(seqlen_k - place * PAGE, 0), PAGE)
        page = gl.load(table + place, mask=length > 0, other=0)
        return ((_rows_of(page, length, head, call, FILLS), row),)
    else:
        # The added zero hides that lanes are loop invariant: the compiler would keep multiples of them in registers.
        lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) + (n_block >> 30)
        lengths = gl.minimum(gl.maximum(seqlen_k - n_block * BLOCK_N - lanes * PAGE, 0), PAGE)
        table = _table(records, use, call) + n_block * (BLOCK_N // PAGE)
        pages = gl.load(table + lanes, mask=(lanes < BLOCK_N // PAGE) & (lengths > 0), other=0)
        found = ()
        for i in gl.static_range(BLOCK_N // PAGE):
            page, length = _of_lane(pages, lanes, i), gl.to_tensor(0)
            if FILLS:
                length = _of_lane(lengths, lanes, i)
            found = append(found, (_rows_of(page, length, head, call, FILLS), gl.to_tensor(0)))
        return found


@gluon.jit
def pages_of_rows(records, use, rows, call):
    """The pages of some of a tile's keys; 0 for rows past the keys."""
    place = rows >> log2(call.keys.cache.PAGE_SIZE)
    return gl.load(_table(records, use, call) + place, mask=rows < records.get(use, "seqlen_k"), other=0)


@gluon.jit
def place_in_pages(records, use, keys, call):
    """(page, row in the page) for some of a tile's keys, with pages of any number of rows; page 0 past the last key."""
    paging = call.keys.cache.paging
    number = gl.umulhi(2 * keys, paging.multiplier) >> paging.shift
    page = gl.load(_table(records, use, call) + number, mask=keys < records.get(use, "seqlen_k"), other=0)
    return page, keys - number * paging.size


@gluon.jit
def _table(records, use, call):
    """The address of the list of pages of a tile's sequence."""
    if call.keys.cache.indptr is not None:
        return call.keys.cache.pages + records.get(use, "start_k")
    else:
        return call.keys.cache.pages + records.get(use, "sequence").to(gl.int64) * call.keys.cache.pages_step


@gluon.jit
def _rows_of(entry, length, head, call, FILLS: gl.constexpr):
    """``HeadRows`` of an entry or a page; its first ``length`` rows have keys."""
    return HeadRows(gl.to_tensor(entry), head, entry * call.keys.cache.v_pitch, length, FILLS)


@gluon.jit
def _of_lane(x, lanes, i: gl.constexpr):
    """The number that lane i holds; all numbers are >= 0."""
    return gl.max(gl.where(lanes == i, x, 0), 0)


@gluon.constexpr_function
def log2(power):
    """The logarithm of a power of two."""
    return power.bit_length() - 1
