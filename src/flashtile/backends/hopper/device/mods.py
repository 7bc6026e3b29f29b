"""The mods of a call, computed for Hopper: the operations on q k^T before the softmax.

``gpu.device.mods`` defines the mods; kernels find them by their names. Softcap comes first. Each summand of a score is
a term, a record with

        fetch(pairs, x)              its loads for a block like x, while the block's product still runs
    add(x, pairs, fetched, unit) x + unit * term

and a mask has ``fetch`` and ``select``. ``Pairs`` says where a block lies, so one implementation serves the forward,
with blocks of rows by keys, and the backward, with blocks of keys by rows. The derivative of a term is 1. In the
forward without softcap the terms are the accumulator's initial value (``early``), so they are not added after the
product.
"""

# ruff: noqa: RET505 - Triton compiles code after a return, even if the condition is decided.
# Triton's aggregate reads annotations as types, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma

from flashtile.backends.gpu.device import softmax
from flashtile.backends.gpu.device.mods import place_of, quick_softcap
from flashtile.backends.hopper.device.fragments import (
    as_before,
    by_thread,
    keep_bits,
    load_bits,
    thread_columns,
    thread_start,
)
from flashtile.backends.hopper.device.gluon_compat import aggregate, as_box, as_row, as_tile, tma_load
from flashtile.backends.hopper.device.inline_ptx import compute_before_barrier, compute_before_fence, keep, widen
from flashtile.backends.hopper.device.parts import append
from flashtile.backends.hopper.device.ring import make_ring

LOG2_E = softmax.LOG2_E


@aggregate
class Pairs:
    """A block of scores in the layout of a WGMMA accumulator: rows by keys, or keys by rows if ``keys_first``.

    Attributes:
        b: The block's sequence.
        head: The block's query head.
        row: The block's first row in the sequence.
        key: The block's first key in the sequence.
        seqlen_q: Rows of the sequence.
        seqlen_k: Keys of the sequence.
        keys_first: Whether keys lie along dimension 0.
        use: The block's use of the rings of ``ScoreTiles``; this and the following attributes are for the forward
            alone.
        is_tile: False after the last tile, where there is no block.
        warpgroup: The warpgroup that computes the block.
        slope: ALiBi's slope.
        read: The result of ``Transforms.of_tile``.
        is_partial: Whether the mask's function or bits decide in the block.
        bits: The bits' place, from ``masks.bits_at``.
    """

    b: gl.tensor
    head: gl.tensor
    row: gl.tensor
    key: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    keys_first: gl.constexpr
    use: gl.tensor | gl.constexpr
    is_tile: gl.tensor | gl.constexpr
    warpgroup: gl.constexpr
    slope: gl.tensor | gl.constexpr
    read: gl.tuple
    is_partial: gl.tensor | gl.constexpr
    bits: gl.tuple

    @gluon.jit
    def distances(self, x):
        """[M, 4] int32: key minus row position, for each row of ``x`` and the thread's first column."""
        row, col = thread_start(x)
        shift = self.seqlen_k - self.seqlen_q
        if self.keys_first:
            return (self.key + row) - (self.row + col + shift)
        else:
            return (self.key + col) - (self.row + row + shift)


@aggregate
class Alibi:
    """ALiBi: ``-slope * |row position - key|``.

    Attributes:
        ptr: Slopes by sequence and head.
        stride_b: 0 if sequences share them.
        batch: Number of sequences.
        one_sided: Whether no row keeps a key past its position; the absolute value is then a difference.
    """

    ptr: gl.tensor
    stride_b: gl.tensor
    batch: gl.tensor
    one_sided: gl.constexpr

    @gluon.jit
    def fetch(self, pairs, x):
        """The head's slope. Rows past the last packed sequence have no key, and any slope is right for them."""
        b = gl.minimum(pairs.b, self.batch - 1)
        return gl.load(self.ptr + gl.cast(b, gl.int64) * self.stride_b + pairs.head).to(gl.float32)

    @gluon.jit
    def add(self, x, pairs, slope, term_scale):
        """Adds the term with one register for a row, and immediates for columns."""
        start = pairs.distances(x).to(gl.float32)
        cols = thread_columns(x).to(gl.float32)
        if pairs.keys_first:
            cols = -cols
        slope = slope * term_scale
        if self.one_sided:
            # Not (start + cols) * slope, because its 32 sums for each row would take registers.
            t = (by_thread(x) + (start * slope)[:, None, :, None]) + cols * slope
        else:
            t = by_thread(x) - gl.abs(start[:, None, :, None] + cols) * slope
        return as_before(t, x)


@aggregate
class AlibiByMma:
    """ALiBi by WGMMA, in the forward: the accumulator starts as slope times column, so a score costs no instruction.

    Attributes:
        alibi: The term.
        columns: [N, 16] bfloat16 in shared memory: all elements of row n are n.
    """

    alibi: Alibi
    columns: gl.shared_memory_descriptor

    @gluon.jit
    def ahead(self, pairs, x):
        """(the block's first key minus its first row, the slope: negative if all keys are past all rows)."""
        first = pairs.key - pairs.row - (pairs.seqlen_k - pairs.seqlen_q)
        slope = pairs.slope if self.alibi.one_sided else gl.where(first < x.shape[0], pairs.slope, -pairs.slope)
        return first, slope

    @gluon.jit
    def start(self, x, pairs, term_scale, ADDS: gl.constexpr):
        """Starts the product of slope and column, and adds ``x`` if it ADDS. The slope is split into three bfloat16."""
        layout: gl.constexpr = gl.DotOperandLayout(0, x.type.layout, 2)
        slope = self.ahead(pairs, x)[1] * term_scale
        high = slope.to(gl.bfloat16).to(gl.float32)
        middle = (slope - high).to(gl.bfloat16).to(gl.float32)
        i = gl.arange(0, 16, gl.SliceLayout(0, layout))
        parts = gl.where(i == 0, high, gl.where(i == 1, middle, gl.where(i == 2, slope - high - middle, 0.0)))
        slopes = compute_before_fence((gl.zeros([x.shape[0], 16], gl.float32, layout) + parts[None, :]).to(gl.bfloat16))
        return warpgroup_mma(slopes, self.columns.permute((1, 0)), x, use_acc=ADDS, is_async=True)

    @gluon.jit
    def rest(self, x, pairs, term_scale):
        """(scores, [M, 4] summands that a row's scores still lack, in base 2, to be added to the maximum)."""
        first, slope = self.ahead(pairs, x)
        start = pairs.distances(x)
        # The first condition is decided when the kernel is compiled, the second when it runs.
        if not self.alibi.one_sided:  # noqa: SIM102
            if (first < x.shape[0]) & (first > -x.shape[1]):
                past = gl.maximum(start[:, None, :, None] + thread_columns(x), 0).to(gl.float32)
                x = as_before(by_thread(x) - past * (2.0 * slope * term_scale), x)
        return x, ((start - thread_start(x)[1]).to(gl.float32) * (slope * LOG2_E),)


@aggregate
class ScoreTensor:
    """A bias or a mask over (batch, heads, rows, keys), in global memory, with stride 0 where it broadcasts.

    Attributes:
        ptr: Address of the first element.
        stride_b: Stride between sequences, in elements, like all strides.
        stride_head: Stride between heads.
        stride_row: Stride between rows.
        stride_col: Stride between keys.
    """

    ptr: gl.tensor
    stride_b: gl.tensor
    stride_head: gl.tensor
    stride_row: gl.tensor
    stride_col: gl.tensor | gl.constexpr

    @gluon.jit
    def fetch(self, pairs, x):
        """The block, ``by_thread``, 0 outside the sequence."""
        row, col = thread_start(x)
        if pairs.keys_first:
            row, col = row + pairs.key, col + pairs.row
            rows, cols, stride_row, stride_col = pairs.seqlen_k, pairs.seqlen_q, self.stride_col, self.stride_row
        else:
            row, col = row + pairs.row, col + pairs.key
            rows, cols, stride_row, stride_col = pairs.seqlen_q, pairs.seqlen_k, self.stride_row, self.stride_col
        base = gl.cast(pairs.b, gl.int64) * self.stride_b + gl.cast(pairs.head, gl.int64) * self.stride_head
        start = base + row.to(gl.int64) * stride_row + col.to(gl.int64) * stride_col
        own = thread_columns(x)
        inside = (row < rows)[:, None, :, None] & (own < (cols - col)[:, None, :, None])
        at = self.ptr + (start[:, None, :, None] + own.to(gl.int64) * stride_col)
        return gl.load(at, mask=inside, other=0)

    @gluon.jit
    def add(self, x, pairs, bias, term_scale):
        """The block with the bias added in a fused operation; see ``backward.roles.exponents``."""
        return as_before(gl.fma(bias.to(gl.float32), term_scale, by_thread(x)), x)

    @gluon.jit
    def select(self, x, mask, fill):
        """The block, ``fill`` where the mask is False."""
        return as_before(gl.where(mask != 0, by_thread(x), fill), x)


@aggregate
class ScoreTiles:
    """A ``ScoreTensor`` that TMA loads into shared memory, for a tile's rows and a block of keys.

    Attributes:
        desc: Boxes of a warpgroup's rows and a block of keys, or of one row for all.
        rings: A ring for each warpgroup, or one for all if rows share it; uses have the numbers of the keys' uses.
        stride_b: 0 if sequences share it.
        stride_head: 0 if heads share it.
    """

    desc: tma.tensor_descriptor
    rings: gl.tuple
    stride_b: gl.tensor
    stride_head: gl.tensor

    @gluon.jit
    def ring(self, WARPGROUP: gl.constexpr):
        """The ring for a warpgroup's rows."""
        return self.rings[min(WARPGROUP, len(self.rings) - 1)]

    @gluon.jit
    def start(self, b, head, row, key, use):
        """Starts the load of a block; the producer calls it."""
        M: gl.constexpr = self.desc.block_type.shape[2]
        N: gl.constexpr = self.desc.block_type.shape[3]
        b, head = gl.where(self.stride_b == 0, 0, b), gl.where(self.stride_head == 0, 0, head)
        for i in gl.static_range(len(self.rings)):
            full = self.rings[i].acquire(use, M * N * (self.desc.dtype.primitive_bitwidth // 8))
            box = as_box(self.rings[i].at(use), self.desc)
            tma_load(self.desc, (b, head, 0 if M == 1 else row + i * M, key), full, box)

    @gluon.jit
    def fetch(self, pairs, x):
        """The block, [M, N], or [1, N] if all rows share it; for a mask each number holds two keys."""
        ring = self.ring(pairs.warpgroup)
        ring.wait(pairs.use, pairs.is_tile)
        N: gl.constexpr = x.shape[1]
        if self.desc.dtype == gl.uint8:
            # A mask's keys are read two at a time.
            even, _ = gl.split(by_thread(x))
            layout_like = gl.reshape(even, [x.shape[0], N // 2])
            dtype: gl.constexpr = gl.int16
            COLS: gl.constexpr = N // 2
        else:
            layout_like = x
            dtype: gl.constexpr = self.desc.dtype
            COLS: gl.constexpr = N
        ROWS: gl.constexpr = self.desc.block_type.shape[2]
        buffer = ring.at(pairs.use)
        block = as_row(buffer, dtype, COLS) if ROWS == 1 else as_tile(buffer, dtype, COLS)
        layout: gl.constexpr = layout_like.type.layout
        numbers = gl.zeros([ROWS, COLS], dtype, layout)
        if pairs.is_tile:
            numbers = block.load(layout)
        return numbers

    @gluon.jit
    def add(self, x, pairs, bias, term_scale):
        """The block with the bias added."""
        return x + widen(bias) * term_scale

    @gluon.jit
    def select(self, x, mask, fill):
        """The block, ``fill`` where the mask is False."""
        even, odd = gl.split(by_thread(x))
        mask = gl.convert_layout(gl.reshape(mask, [mask.shape[0], even.shape[1], 4]), even.type.layout).to(gl.int32)
        even, odd = keep(even, mask, fill, 0xFF), keep(odd, mask, fill, 0xFF00)
        return as_before(gl.join(even, odd), x)


@aggregate
class Transforms:
    """The steps from products to scores: softcap, scale, terms and masks, with the numbers of ``records.Mods``.

    Attributes:
        scale_log2: The factor that turns scores into exponents of 2.
        softcap: The cap; None, as is prescale, if it has no effect.
        prescale: The factor of products before the softcap.
        has_softcap: Whether there is a cap.
        scale_first: Whether products are multiplied with ``prescale`` and nothing else, because the scale is not > 0.
        terms: The summands, in natural units; see the module.
        masks: Masks besides the band.
        early: Terms that are in the accumulator before the product.
        alibi_by_mma: ALiBi as an early term, or ().
        early_tiles: The ``ScoreTiles`` among early.
        late_tiles: The ``ScoreTiles`` among terms and masks.
        functions: The result of ``Mods.FUNCTIONS``, or ().
        dropout: The result of ``Mods.DROPOUT``, or ().
    """

    scale_log2: gl.tensor
    softcap: gl.tensor | gl.constexpr
    prescale: gl.tensor | gl.constexpr
    has_softcap: gl.constexpr
    scale_first: gl.constexpr
    terms: gl.tuple
    masks: gl.tuple
    early: gl.tuple
    alibi_by_mma: gl.tuple
    early_tiles: gl.tuple
    late_tiles: gl.tuple
    functions: gl.tuple
    dropout: gl.tuple

    @gluon.jit
    def of_tile(self, mods, b, head, rows):
        """What users' functions load for a head and for its rows."""
        read = ()
        for i in gl.static_range(len(self.functions)):
            read = self.functions[i].of_tile(mods, b, head, rows)
        return read

    @gluon.jit
    def fetch(self, pairs, x, mods):
        """The loads of terms, masks, functions and lists' bits for a block like ``x``."""
        fetched = ()
        for i in gl.static_range(len(self.terms)):
            fetched = append(fetched, self.terms[i].fetch(pairs, x))
        for i in gl.static_range(len(self.masks)):
            fetched = append(fetched, self.masks[i].fetch(pairs, x))
        for i in gl.static_range(len(self.functions)):
            fetched = fetched + self.functions[i].fetch(mods, pairs, x)
        if mods.band.lists is not None:  # noqa: SIM102 compile-time conditions
            if mods.band.lists.BITS:
                fetched = append(fetched, load_bits(mods.band.lists, pairs, x))
        return fetched

    @gluon.jit
    def scores(self, s, pairs, fetched, mods):
        """(scores, shift): ``scale_log2`` turns scores into exponents; ``shift``, () or ([M, 4],), is then added."""
        if place_of(mods.SCORES, "score_mod") >= 0:
            s = self.functions[0].score(s * mods.scale, mods, pairs, fetched[len(self.terms) + len(self.masks)])
        if self.has_softcap:
            s = quick_softcap(s, self.softcap, self.prescale)
        if self.scale_first:
            s = s * self.prescale
        term_scale = LOG2_E / self.scale_log2
        s = self.add_terms(s, pairs, fetched, term_scale)
        if len(self.alibi_by_mma) > 0:
            return self.alibi_by_mma[0].rest(s, pairs, term_scale)
        else:
            return s, ()

    @gluon.jit
    def initial(self, x, pairs):
        """The accumulator before the product, from zeros ``x``: the early terms; ALiBi's product is started."""
        term_scale = LOG2_E / self.scale_log2
        for i in gl.static_range(len(self.early)):
            x = self.early[i].add(x, pairs, self.early[i].fetch(pairs, x), term_scale)
        for i in gl.static_range(len(self.alibi_by_mma)):
            x = self.alibi_by_mma[i].start(x, pairs, term_scale, len(self.early) > 0)
        return x

    @gluon.jit
    def release_early(self, pairs):
        """Releases the tiles that ``initial`` loaded, after its product was started; see ``release``."""
        for i in gl.static_range(len(self.early_tiles)):
            self.early_tiles[i].ring(pairs.warpgroup).release(pairs.use, pairs.is_tile)

    @gluon.jit
    def release(self, pairs, row_max):
        """Releases the other tiles; returns the row maxima, which depend on everything loaded from them.

        An mbarrier arrive does not wait for outstanding ld.shared, so TMA could overwrite data that is still being
        read, and did. This forces the loads to retire first.
        """
        if len(self.late_tiles) > 0:
            row_max = compute_before_barrier(row_max)
        for i in gl.static_range(len(self.late_tiles)):
            self.late_tiles[i].ring(pairs.warpgroup).release(pairs.use, pairs.is_tile)
        return row_max

    @gluon.jit
    def add_terms(self, x, pairs, fetched, term_scale):
        """The block, plus each term multiplied by ``term_scale``."""
        for i in gl.static_range(len(self.terms)):
            x = self.terms[i].add(x, pairs, fetched[i], term_scale)
        return x

    @gluon.jit
    def select(self, x, pairs, fetched, fill, mods):
        """The block, ``fill`` where a mask is False."""
        for i in gl.static_range(len(self.masks)):
            x = self.masks[i].select(x, fetched[len(self.terms) + i], fill)
        if mods.band.lists is not None:  # noqa: SIM102 compile-time conditions
            if mods.band.lists.BITS:  # noqa: SIM102
                if pairs.is_partial:
                    x = keep_bits(x, fetched[len(fetched) - 1], fill)
        for i in gl.static_range(len(self.functions)):
            x = self.functions[i].select(x, mods, pairs, fetched, fill)
        return x

    @gluon.jit
    def philox_key(self, call, where):
        """The key of random numbers for ``where``'s sequence b and head; () without dropout."""
        key = ()
        for i in gl.static_range(len(self.dropout)):
            key = self.dropout[i].key_of(call, where.b, where.head)
        return key

    @gluon.jit
    def draw(self, pairs, x, philox_key):
        """The random words of a block like ``x``; () without dropout."""
        words = ()
        for i in gl.static_range(len(self.dropout)):
            words = self.dropout[i].draw(pairs, x, philox_key)
        return words

    @gluon.jit
    def drop(self, x, pairs, words, fill):
        """The block, ``fill`` where dropout drops a pair, by the result of ``draw``."""
        for i in gl.static_range(len(self.dropout)):
            x = self.dropout[i].drop(x, pairs, words, fill)
        return x


@gluon.jit
def transforms_of(call, schedule):
    """(the ``Transforms`` of a forward, its ``ScoreTiles``, which the producer loads)."""
    BIAS: gl.constexpr = place_of(call.mods.SCORES, "bias")
    MASK: gl.constexpr = place_of(call.mods.MASKS, "mask")
    bias_tiles = score_tiles(call.mods.scores, BIAS, schedule.SCORE_STAGES, schedule.NUM_WARPGROUPS)
    mask_tiles = score_tiles(call.mods.masks, MASK, schedule.SCORE_STAGES, schedule.NUM_WARPGROUPS)
    by_tma = bias_tiles + mask_tiles
    biases = bias_tiles + score_tensors(call.mods.scores, BIAS)
    masks = mask_tiles + score_tensors(call.mods.masks, MASK)
    alibi = alibi_terms(call.mods, call.queries.count)
    # Softcap, and a scale that is not > 0, apply to the products alone: terms are then added after them.
    HAS_SOFTCAP: gl.constexpr = place_of(call.mods.SCORES, "softcap") >= 0
    softcap = None
    if HAS_SOFTCAP:
        softcap = call.mods.scores[place_of(call.mods.SCORES, "softcap")].operands
    IS_LATE: gl.constexpr = call.mods.SCALE_FIRST
    mod = Transforms(call.mods.scale_log2, softcap, call.mods.prescale, HAS_SOFTCAP,
                     call.mods.prescale is not None and not HAS_SOFTCAP, biases + alibi if IS_LATE else (), masks,
                     () if IS_LATE else biases, () if IS_LATE else alibi_by_mma(alibi, schedule.BLOCK_N),
                     () if IS_LATE else bias_tiles, by_tma if IS_LATE else mask_tiles,
                     made(call.mods.FUNCTIONS, call.mods), made(call.mods.DROPOUT, call.mods))  # fmt: skip
    return mod, by_tma


@gluon.jit
def made(make, mods):
    """What a function of ``records.Mods`` makes of them, in a tuple; () without the function."""
    if make is None:
        return ()
    else:
        return (make(mods),)


@gluon.jit
def alibi_terms(mods, batch):
    """ALiBi from ``records.Mods`` as a term; none without slopes."""
    N: gl.constexpr = place_of(mods.SCORES, "alibi")
    if N >= 0:
        # Records with constants must not be kept in variables.
        return (
            Alibi(
                mods.scores[N].operands.ptr, mods.scores[N].operands.batch_step, batch,
                mods.scores[N].operands.ONE_SIDED,
            ),
        )  # fmt: skip
    else:
        return ()


@gluon.jit
def alibi_by_mma(terms, N: gl.constexpr):
    """The terms of ``alibi_terms`` by WGMMA, for blocks of N keys."""
    if len(terms) > 0:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
        rows = gl.arange(0, N, gl.SliceLayout(1, layout)).to(gl.float32)
        shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, 16], gl.bfloat16)
        columns = gl.allocate_shared_memory(gl.bfloat16, [N, 16], shared)
        columns.store((rows[:, None] + gl.zeros([N, 16], gl.float32, layout)).to(gl.bfloat16))
        fence_async_shared()
        return (AlibiByMma(terms[0], columns),)
    else:
        return ()


@gluon.jit
def score_tensors(some, N: gl.constexpr):
    """The ``ScoreTensor`` of the N-th mod; none for -1, and if TMA loads it."""
    if N < 0:
        return ()
    elif some[N].operands.ptr is not None:
        steps = some[N].operands.steps
        return (ScoreTensor(some[N].operands.ptr, steps[0], steps[1], steps[2], steps[3]),)
    else:
        return ()


@gluon.jit
def score_tiles(some, N: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr):
    """The ``ScoreTiles`` of the N-th mod; none for -1, and if threads load it."""
    if N < 0:
        return ()
    elif some[N].operands.desc is not None:
        desc, steps = some[N].operands.desc, some[N].operands.steps
        ROWS: gl.constexpr = desc.block_type.shape[2]
        # Buffers have at least eight rows, so that TMA may write to their addresses.
        tile: gl.constexpr = [max(ROWS, 8), desc.block_type.shape[3]]
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(tile, desc.dtype)
        rings = ()
        for _ in gl.static_range(1 if ROWS == 1 else WARPGROUPS):
            rings = append(rings, make_ring(desc.dtype, tile, layout, STAGES, WARPGROUPS if ROWS == 1 else 1))
        return (ScoreTiles(desc, rings, gl.to_tensor(steps[0]), gl.to_tensor(steps[1])),)
    else:
        return ()
