"""What becomes of the products of queries and keys before the softmax.

There is one hook for all that is added to a score, and one for masks besides the band. A term is a record with

    fetch(pairs, x)              what it needs of memory for a block like x, loaded while the block's product still runs
    add(x, pairs, fetched, unit) x + unit * term

and a mask has ``fetch`` and ``select``. They see a block through ``Pairs``, so that one implementation serves the
forward, whose blocks have rows along dimension 0, and the backward, whose blocks have keys there. The derivative of a
term is 1. The portable backend has the same rules in ``vocab.scores``.
"""

# ruff: noqa: RET505 - Triton compiles what stands after a return, decided or not.
# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.device.head_dim_parts import also
from flashtile.backends.hopper.device.wgmma_fragments import as_before, by_thread, thread_columns, thread_origin
from flashtile.backends.vocab import quick_scores, softmax

LOG2_E = softmax.LOG2_E


@aggregate
class Pairs:
    """A block of scores in the layout of a WGMMA accumulator: rows by keys, or keys by rows if ``keys_first``.

    Attributes:
        b: Its sequence.
        head: Its query head.
        row: Its first row of the sequence.
        key: Its first key of the sequence.
        seqlen_q: Rows of the sequence.
        seqlen_k: Keys of the sequence.
        keys_first: Whether keys lie along dimension 0.
    """

    b: gl.tensor
    head: gl.tensor
    row: gl.tensor
    key: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    keys_first: gl.constexpr

    @gluon.jit
    def distances(self, x):
        """[M, 4] int32: key minus row position, in each row of ``x``, at the first column that the thread holds."""
        row, col = thread_origin(x)
        shift = self.seqlen_k - self.seqlen_q
        if self.keys_first:
            return (self.key + row) - (self.row + col + shift)
        else:
            return (self.key + col) - (self.row + row + shift)


@aggregate
class Alibi:
    """ALiBi: ``-slope * |row position - key|``.

    Attributes:
        ptr: Slopes of (sequence, head).
        stride_b: 0 if sequences share them.
        batch: Sequences.
        one_sided: Whether no row keeps a key past its position, so that the absolute value is a difference.
    """

    ptr: gl.tensor
    stride_b: gl.tensor
    batch: gl.tensor
    one_sided: gl.constexpr

    @gluon.jit
    def fetch(self, pairs, x):
        """The head's slope. Rows past the last packed sequence have no key, and any slope will do."""
        b = gl.minimum(pairs.b, self.batch - 1)
        return gl.load(self.ptr + gl.cast(b, gl.int64) * self.stride_b + pairs.head).to(gl.float32)

    @gluon.jit
    def add(self, x, pairs, slope, unit):
        """A thread has one number per row, and column numbers that are immediates."""
        start = pairs.distances(x).to(gl.float32)
        cols = thread_columns(x).to(gl.float32)
        if pairs.keys_first:
            cols = -cols
        slope = slope * unit
        if self.one_sided:
            # Not (start + cols) * slope: its 32 sums per row would take registers.
            t = (by_thread(x) + (start * slope)[:, None, :, None]) + cols * slope
        else:
            t = by_thread(x) - gl.abs(start[:, None, :, None] + cols) * slope
        return as_before(t, x)


@aggregate
class PairTensor:
    """A bias or a mask over (batch, heads, rows, keys), in global memory, with stride 0 where it broadcasts.

    Attributes:
        ptr: Its first element.
        stride_b: In elements, like all strides.
        stride_head: Between heads.
        stride_row: Between rows.
        stride_col: Between keys.
    """

    ptr: gl.tensor
    stride_b: gl.tensor
    stride_head: gl.tensor
    stride_row: gl.tensor
    stride_col: gl.tensor | gl.constexpr

    @gluon.jit
    def fetch(self, pairs, x):
        """The block, ``by_thread``, 0 outside the sequence."""
        row, col = thread_origin(x)
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
    def add(self, x, pairs, bias, unit):
        """The block with the bias added."""
        return as_before(by_thread(x) + bias.to(gl.float32) * unit, x)

    @gluon.jit
    def select(self, x, mask, fill):
        """The block, ``fill`` where the mask is False."""
        return as_before(gl.where(mask != 0, by_thread(x), fill), x)


@aggregate
class ScoreMod:
    """How products become scores: softcap, scale, terms and masks; the numbers are those of ``launch.scales``.

    Attributes:
        scale_log2: Turns scores into exponents of 2.
        softcap: The cap.
        prescale: What products are multiplied with before.
        has_softcap: Whether there is a cap.
        scale_first: Whether products are multiplied with ``prescale`` and nothing else, because the scale is not > 0.
        terms: What is added, in natural units, see the module.
        masks: Which pairs are kept, besides the band.
    """

    scale_log2: gl.tensor
    softcap: gl.tensor
    prescale: gl.tensor
    has_softcap: gl.constexpr
    scale_first: gl.constexpr
    terms: gl.tuple
    masks: gl.tuple

    @gluon.jit
    def fetch(self, pairs, x):
        """What terms and masks need of memory for a block like ``x``."""
        fetched = ()
        for i in gl.static_range(len(self.terms)):
            fetched = also(fetched, self.terms[i].fetch(pairs, x))
        for i in gl.static_range(len(self.masks)):
            fetched = also(fetched, self.masks[i].fetch(pairs, x))
        return fetched

    @gluon.jit
    def scores(self, s, pairs, fetched):
        """Products as scores that ``scale_log2`` turns into exponents."""
        if self.has_softcap:
            s = quick_scores.softcap(s, self.softcap, self.prescale)
        if self.scale_first:
            s = s * self.prescale
        return self.add_terms(s, pairs, fetched, LOG2_E / self.scale_log2)

    @gluon.jit
    def add_terms(self, x, pairs, fetched, unit):
        """The block plus ``unit`` times each term."""
        for i in gl.static_range(len(self.terms)):
            x = self.terms[i].add(x, pairs, fetched[i], unit)
        return x

    @gluon.jit
    def select(self, x, fetched, fill):
        """The block, ``fill`` where a mask is False."""
        for i in gl.static_range(len(self.masks)):
            x = self.masks[i].select(x, fetched[len(self.terms) + i], fill)
        return x


@gluon.jit
def make_terms(alibi, bias, batch, ALIBI_ONE_SIDED: gl.constexpr):
    """The terms of kernel arguments: (pointer or None, stride of a sequence), and as ``pair_tensors`` has them."""
    terms = pair_tensors(bias)
    if alibi[0] is not None:
        terms = also(terms, Alibi(alibi[0], alibi[1], batch, ALIBI_ONE_SIDED))
    return terms


@gluon.jit
def pair_tensors(tensor):
    """The ``PairTensor`` of kernel arguments: (pointer or None, strides of a sequence, a head, a row and a key)."""
    ptr, strides = tensor
    if ptr is not None:
        return (PairTensor(ptr, strides[0], strides[1], strides[2], strides[3]),)
    else:
        return ()
