"""Keys and values in a cache: which tiles there are, in which order, and how a block is loaded."""

# Triton's aggregate reads annotations as types, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.device.tiles import longest_first
from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.device.parts import load
from flashtile.backends.hopper.forward.paged.gather import gather_block
from flashtile.backends.hopper.forward.paged.pages import cached_keys


@aggregate
class PagedKeys:
    """The methods of ``forward.roles.KeyTensors`` for a cache.

    ``GATHERS``: whether threads copy rows, because TMA has no boxes for the pages.
    """

    GATHERS: gl.constexpr

    @gluon.jit
    def order(self, index, num_tiles, UNEVEN: gl.constexpr, call):
        """As there, in turns for a mixed batch."""
        return longest_first(_by_turns(index, num_tiles, call), num_tiles, UNEVEN)

    @gluon.jit
    def takes(self, is_tile, b, seqlen_q, call):
        """As there: few rows over many keys are left to the kernel for decodes."""
        return is_tile & _is_own(b, seqlen_q, call)

    @gluon.jit
    def start_and_length(self, b, call):
        """As there; the start is an entry of the cache, or the first page's place in a list."""
        return entry_and_length(b, call)

    @gluon.jit
    def right(self, b, call):
        """The band's right bound for a sequence, if ``Keys.OWN_RIGHTS``."""
        is_causal = gl.load(call.keys.cache.causal + b, mask=b < call.queries.count, other=1) != 0
        return gl.where(is_causal, 0, call.mods.band.right)

    @gluon.jit
    def start_keys(self, rings, use, records, tiles, n_block, call, schedule):
        """As there."""
        self.start(call.k, rings, use, records, tiles, n_block, call, schedule)

    @gluon.jit
    def start_values(self, rings, use, records, tiles, n_block, call, schedule):
        """As there."""
        self.start(call.v, rings, use, records, tiles, n_block, call, schedule)

    @gluon.jit
    def start(self, operand, rings, use, records, tiles, n_block, call, schedule):
        """Starts the load of a block of a tile's keys or values, ``operand``."""
        if self.GATHERS:
            gather_block(operand, rings, use, records, tiles, n_block, call, schedule)
        else:
            rows = cached_keys(records, tiles, n_block, call, schedule, operand.PACKED)
            load(operand.desc, rings, use, rows, operand.BLOCK_DIM)


@gluon.jit
def entry_and_length(b, call):
    """A sequence's entry of the cache, or its first page's place in a list, and its number of keys; 0 past the last."""
    exists = b < call.queries.count
    cached, num_new = gl.load(call.keys.cache.cached + b, mask=exists, other=-1), call.keys.cache.num_new
    if call.keys.cache.cu_seqlens_new is not None:
        num_new = gl.load(call.keys.cache.cu_seqlens_new + b + 1, mask=exists, other=0)
        num_new -= gl.load(call.keys.cache.cu_seqlens_new + b, mask=exists, other=0)
    entry = b
    if call.keys.cache.entries is not None:
        entry = gl.load(call.keys.cache.entries + b, mask=exists, other=0)
    if call.keys.cache.indptr is not None:
        entry = gl.load(call.keys.cache.indptr + b, mask=exists, other=0)
    return entry, gl.where(cached < 0, 0, gl.minimum(cached + num_new, call.keys.length))


@gluon.jit
def _by_turns(index, num_tiles, call):
    """A place in a mixed batch's order, which takes tiles from both ends in turn, unless the tiles at the end are long.

    Servers put decodes before prompts. A decode's tile waits for memory, a prompt's tile computes: side by side each
    has more of the resource that it needs. But a tile over many more keys than others, started late, runs alone at the
    end.
    """
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    _, keys = entry_and_length(gl.where(lanes == 31, call.queries.count - 1, lanes * call.queries.count // 32), call)
    is_long = gl.max(gl.where(lanes == 31, keys, 0), 0) > gl.sum(keys, 0) // 16
    other = gl.where((index & 1) == 0, index >> 1, num_tiles - 1 - (index >> 1))
    return gl.where((call.keys.cache.mixed == 0) | is_long, index, other)


@gluon.jit
def _is_own(b, length, call):
    """Whether this launch computes a sequence of a cached call."""
    cache = call.keys.cache
    is_own = length * call.heads.group_size > cache.few_rows
    if not is_own:
        _, keys = entry_and_length(b, call)
        is_own = keys <= cache.long_keys
    return is_own
