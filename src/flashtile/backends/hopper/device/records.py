"""What Hopper's kernels take as arguments besides ``gpu.device.records``, whose rules are these records' too.

Steps are distances in elements that no code is compiled for, so their names do not begin with ``stride``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Rows of a forward, and keys of a backward, for which there are bounds of intervals.
BOUNDS_BLOCK = 64


class Slopes(NamedTuple):
    """ALiBi's slopes by head.

    Attributes:
        ptr: The first.
        batch_step: From one sequence's to the next one's, 0 if they share them.
        ONE_SIDED: Whether no row keeps a key past its position.
    """

    ptr: Any
    batch_step: Any
    ONE_SIDED: Any


class PairTensor(NamedTuple):
    """A bias or a mask over (batch, heads, rows, keys).

    Attributes:
        ptr: Its first element, None where TMA loads it.
        desc: Boxes of a warpgroup's rows, or of one for all, and a block of keys; None where threads load elements.
        steps: Along each dimension, 0 where it broadcasts.
    """

    ptr: Any
    desc: Any
    steps: Any


class Mods(NamedTuple):
    """How products become probabilities: ``gpu.device.records.Mods``, with mods that the kernels know by their names.

    Attributes:
        scale_log2: Turns scores, after what follows, into exponents of 2; > 0.
        prescale: What products are multiplied with before the softmax, with a softcap as ``quick_softcap`` has it.
        scale: softmax_scale, with which products are multiplied before a user's score mod; None without one.
        scores: As there; operands are the cap, ``Slopes`` and ``PairTensor``.
        band: As there.
        masks: As there; a mask's operand is a ``PairTensor`` of bytes.
        dropout: As there.
        sinks: As there.
        SCORES: As there.
        MASKS: As there.
        SCALE_FIRST: Whether products are multiplied before the softmax: with a softcap or a score mod, and with a scale
            that is not > 0. Without the first and the last prescale is None.
    """

    scale_log2: Any
    prescale: Any
    scale: Any
    scores: Any
    band: Any
    masks: Any
    dropout: Any
    sinks: Any
    SCORES: Any
    MASKS: Any
    SCALE_FIRST: Any


class CacheScale(NamedTuple):
    """The factors of a cache of 8 bits.

    Attributes:
        ptr: float32 (heads,), or (entries or pages, heads); None for 1.
        entry_step: From one entry's or page's heads to the next one's; None where all have the same.
    """

    ptr: Any
    entry_step: Any


class Paging(NamedTuple):
    """How many rows a page has, where no code is compiled for that number.

    Attributes:
        size: The number.
        multiplier: With shift, what divides by it: ``n // size == umulhi(2 * n, multiplier) >> shift`` for any number n
            from 0 to 2**30 (Granlund and Montgomery 1994, Division by invariant integers using multiplication).
        shift: See multiplier.
    """

    size: Any
    multiplier: Any
    shift: Any


class Cache(NamedTuple):
    """Where the keys and values of a cached call lie, whose lengths the device alone knows.

    Attributes:
        cached: [batch] int32, keys before the call's new ones; negative where there is no sequence.
        cu_seqlens_new: [batch + 1] int32, bounds of packed new keys, or None.
        num_new: New keys of each sequence where they are not packed.
        entries: [batch] int32, the entry of the cache that is a sequence's; None for its own number.
        pages: int32, the pages of each sequence; None without pages.
        pages_step: From one sequence's pages to the next one's; None where indptr says where they begin.
        indptr: [batch] int32, or None.
        v_pitch: Rows of values from one entry or page to the next, None with ``paging``.
        causal: [batch] bytes, whether a sequence's rows see no key past their own; None where the band is that of all.
        paging: ``Paging`` where threads copy rows, of pages of any size, else None.
        PAGE_SIZE: Rows of a page, a power of two; 0 without pages, None with ``paging``.
        mixed: Of packed queries, whether many are taken for decodes, 0 or 1; else None.
        few_rows: Of packed queries, sequences with so many packed rows a key head at most are left to another launch if
            they have more than long_keys; else None.
        long_keys: See few_rows.
        k_scale: ``CacheScale`` of the keys.
        v_scale: Of the values.
    """

    cached: Any
    cu_seqlens_new: Any
    num_new: Any
    entries: Any
    pages: Any
    pages_step: Any
    indptr: Any
    v_pitch: Any
    causal: Any
    mixed: Any
    paging: Any
    PAGE_SIZE: Any
    few_rows: Any
    long_keys: Any
    k_scale: Any
    v_scale: Any


class Keys(NamedTuple):
    """``Sequences`` of the keys, of which there are as many as of the queries.

    Attributes:
        cu_seqlens: As there.
        length: As there; of a cache, its capacity.
        cache: ``Cache``, None if keys and values are tensors of their own.
        CACHED: Whether they are in a cache (``gpu.device``: flags).
        OWN_LENGTHS: Whether sequences have different numbers of keys.
    """

    cu_seqlens: Any
    length: Any
    cache: Any
    CACHED: Any
    OWN_LENGTHS: Any


class Output(NamedTuple):
    """Where a forward stores its results, and what it merges into them.

    Attributes:
        desc: The output's boxes; None if it is float32 and written from registers.
        ptr: Then it, contiguous (batch, rows, num_heads_q, head_dim_v), else None.
        lse: Contiguous (batch, num_heads_q, rows) float32.
        partial_out: The output over other keys, in float32 and contiguous, or None.
        partial_lse: Its lse.
        DIM: Columns of what is read or written from registers; None if nothing is, so that one build serves several.
        BLOCK_DIM: Columns of a tile.
        PACKED: As of ``Rows``.
        LSE_PARTS: Numbers of a row's lse, here and in partial_lse, of which kernels know the first alone: 2 with
            ``Problem.large_scores``. A repair then stores the others, and what these kernels lose.
    """

    desc: Any
    ptr: Any
    lse: Any
    partial_out: Any
    partial_lse: Any
    DIM: Any
    BLOCK_DIM: Any
    PACKED: Any
    LSE_PARTS: Any = 1


class Schedule(NamedTuple):
    """A forward's tiles, with ``forward.config.Config``'s constants, and how programs share them.

    Attributes:
        counter: Of tiles, int32, 0 before and after; None for a static order.
        PACK_GQA: Whether the heads of a group share tiles, which few queries would leave half empty. A tile then holds
            STRIP query rows of each head of the group, head by head, then the next STRIP rows; else STRIP == BLOCK_M.
        HAS_EDGES: Whether a warpgroup may meet an edge of the band after its first block of keys.
        CACHED_ROWS: Keys and values that are taken to fit into the L2 cache.
    """

    counter: Any
    BLOCK_M: Any
    STRIP: Any
    PACK_GQA: Any
    BLOCK_N: Any
    NUM_WARPGROUPS: Any
    STAGES: Any
    Q_STAGES: Any
    TILE_STAGES: Any
    OUT_STAGES: Any
    SCORE_STAGES: Any
    OVERLAP: Any
    PINGPONG: Any
    IN_TURN: Any
    REGISTERS: Any
    HAS_EDGES: Any
    CACHED_ROWS: Any
    WIDENS: Any
    GATHERS: Any
    HELPER_WARPS: Any
    HELPER_REGISTERS: Any


class Columns(NamedTuple):
    """How ``big_heads`` shares columns, see ``big_heads.config.Config``.

    Attributes:
        LEFT: Columns of the output that the scorer computes.
        CHUNK: Columns of keys that are loaded at once.
        KEY_CHUNKS: Buffers for them.
        PROB_STAGES: Buffers of probabilities.
    """

    LEFT: Any
    CHUNK: Any
    KEY_CHUNKS: Any
    PROB_STAGES: Any


class Scales(NamedTuple):
    """What a call of 8-bit tensors has besides ``Call``.

    Attributes:
        q: ``gpu.device.records.Scale``, like k and v.
        k: Of the keys.
        v: Of the values.
        shift: Like lse: what smoothing took off the scores of a row, or None.
        shift_scale: Turns it into exponents of 2.
        out: What the output is divided by, or None.
    """

    q: Any
    k: Any
    v: Any
    shift: Any
    shift_scale: Any
    out: Any


class Maps(NamedTuple):
    """The caches as TMA reads them.

    Attributes:
        k: A descriptor with boxes of the rows of a block, or of a smaller page.
        v: Likewise.
        k_entry_rows: Rows from one entry to the next: a sequence, or a page.
        v_entry_rows: Likewise.
    """

    k: Any
    v: Any
    k_entry_rows: Any
    v_entry_rows: Any


class Warps(NamedTuple):
    """How warps share a program's work: STAGES of the rings, REGISTERS of a consumer's threads, FEW of the others'."""

    STAGES: Any
    REGISTERS: Any
    FEW: Any


class Latent(NamedTuple):
    """How rows are read and work is shared.

    Attributes:
        q: A descriptor of the queries' own columns, None where the scorer copies them.
        qv: Likewise of those of the values.
        k: A descriptor of the keys' own columns, with boxes of the rows of a block, or of a smaller page.
        v: Likewise of the values.
        scales: Likewise of the scales of 8-bit values, by row and 128 columns; None where values are of 16 bits.
        k_entry_rows: Rows from one entry to the next: a sequence, or a page.
        v_entry_rows: Likewise.
        fixed_cost: Of a tile, in blocks: ``shares``.
        fewest_blocks: Of a program, so that so many programs share the work.
        STAGES: Blocks of keys in flight.
        PIECE: Columns of values that are loaded and released at once.
        LANES: Programs with tiles of the same sequence at the same time.
        REGISTERS: Of a summer's threads.
        FEW: Of the threads of the warps that load and find work.
        WIDE: Of the threads that make 16 bits of 8.
    """

    q: Any
    qv: Any
    k: Any
    v: Any
    scales: Any
    k_entry_rows: Any
    v_entry_rows: Any
    fixed_cost: Any
    fewest_blocks: Any
    STAGES: Any
    PIECE: Any
    LANES: Any
    REGISTERS: Any
    FEW: Any
    WIDE: Any
