"""Arguments of Hopper's kernels besides ``gpu.device.records``, under the same rules.

Steps are distances in elements for which no code is specialised, so their names do not begin with ``stride``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Rows of a forward, or keys of a backward, that share bounds of intervals.
BOUNDS_BLOCK = 64


class Slopes(NamedTuple):
    """ALiBi's slopes by head.

    Attributes:
        ptr: Address of the first slope.
        batch_step: Step from one sequence's slopes to the next one's, 0 if they share slopes.
        ONE_SIDED: Whether no row keeps a key past its position.
    """

    ptr: Any
    batch_step: Any
    ONE_SIDED: Any


class PairTensor(NamedTuple):
    """A bias or a mask over (batch, heads, rows, keys).

    Attributes:
        ptr: Address of the first element; None if TMA loads it.
        desc: Descriptor with boxes of a warpgroup's rows (or of one row for all) by a block of keys; None if threads
            load.
        steps: Step along each dimension, 0 where it broadcasts.
    """

    ptr: Any
    desc: Any
    steps: Any


class Mods(NamedTuple):
    """The steps from products to probabilities: ``gpu.device.records.Mods``; kernels find the mods by their names.

    Attributes:
        scale_log2: The factor that turns scores, after the other steps, into exponents of 2; > 0.
        prescale: The factor of products before the softmax; with a softcap as in ``quick_softcap``.
        scale: softmax_scale, the factor of products before a user's score mod; None without one.
        scores: As in ``gpu.device.records.Mods``; operands are the cap, ``Slopes`` and ``PairTensor``.
        band: As there.
        masks: As there; a mask's operand is a ``PairTensor`` of bytes.
        dropout: As there; None without.
        sinks: As there.
        SCORES: As there.
        MASKS: As there.
        SCALE_FIRST: Whether products are multiplied before the softmax: with a softcap or a score mod, and with a scale
            that is not > 0. With neither a softcap nor such a scale, prescale is None.
        FUNCTIONS: ``functions.user_functions`` with users' functions, else None: a kernel has no code for what is None.
        DROPOUT: ``dropout.drops_of`` with dropout, else None.
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
    FUNCTIONS: Any
    DROPOUT: Any


class CacheScale(NamedTuple):
    """The scales of an 8-bit cache.

    Attributes:
        ptr: float32 (heads,), or (entries or pages, heads); None for 1.
        entry_step: Step from one entry's or page's scales to the next one's; None if all have the same scales.
    """

    ptr: Any
    entry_step: Any


class Paging(NamedTuple):
    """The number of rows of a page, if no code is compiled for it.

    Attributes:
        size: The number of rows.
        multiplier: With shift it divides by size: ``n // size == umulhi(2 * n, multiplier) >> shift`` for any number n
            from 0 to 2**30 (Granlund and Montgomery 1994, Division by invariant integers using multiplication).
        shift: See multiplier.
    """

    size: Any
    multiplier: Any
    shift: Any


class CachedKeys(NamedTuple):
    """The places of a cached call's keys and values; only the device knows the lengths.

    Attributes:
        cached: [batch] int32, keys before the call's new ones; negative if there is no sequence.
        cu_seqlens_new: [batch + 1] int32, bounds of packed new keys, or None.
        num_new: New keys of each sequence, if they are not packed.
        entries: [batch] int32, each sequence's entry of the cache; None if it is the sequence's own number.
        pages: int32, the pages of each sequence; None without pages.
        pages_step: Step from one sequence's pages to the next one's; None if indptr says where they begin.
        indptr: [batch] int32, or None.
        v_pitch: Rows of values from one entry or page to the next; None with ``paging``.
        causal: [batch] bytes, whether a sequence's rows see no key past their own; None if all have the same band.
        paging: ``Paging`` if threads copy rows, from pages of any size, else None.
        PAGE_SIZE: Rows of a page, a power of two; 0 without pages, None with ``paging``.
        mixed: For packed queries, whether many of them count as decodes, 0 or 1; else None.
        few_rows: For packed queries: sequences with at most this many packed rows a key head are left to another launch
            if they have more than long_keys; else None.
        long_keys: See few_rows.
        k_scale: ``CacheScale`` of the keys.
        v_scale: ``CacheScale`` of the values.
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
    """``Sequences`` of the keys; there are as many as for the queries.

    Attributes:
        cu_seqlens: As there.
        length: As there; for a cache its capacity.
        cache: ``CachedKeys``, None if keys and values are tensors of their own.
        OWN_LENGTHS: Whether sequences have different numbers of keys.
        OWN_RIGHTS: Whether sequences have different right bounds of the band.
    """

    cu_seqlens: Any
    length: Any
    cache: Any
    OWN_LENGTHS: Any
    OWN_RIGHTS: Any


class Output(NamedTuple):
    """The tensors for a forward's results, and the partial result that it merges into them.

    Attributes:
        desc: Descriptor of the output; None if it is float32 and written from registers.
        ptr: Without desc the output, contiguous (batch, rows, num_heads_q, head_dim_v), else None.
        lse: Contiguous (batch, num_heads_q, rows) float32.
        partial_out: The output over other keys, in float32 and contiguous, or None.
        partial_lse: The lse over other keys.
        DIM: Columns of tensors read or written from registers; None without such, so that one build serves several
            widths.
        BLOCK_DIM: Columns of a tile.
        PACKED: As in ``Rows``.
        LSE_PARTS: The number of parts of a row's lse, here and in partial_lse: 2 with ``Problem.large_scores``. Kernels
            use the first part alone. A repair then stores the other parts, and the results that these kernels lose.
        max_scores: Like lse: the largest score of each row, in its first part; None unless asked for.
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
    max_scores: Any = None


class ForwardSchedule(NamedTuple):
    """A forward's tiles, with ``ForwardTiles``'s constants, and the division of tiles among programs.

    Attributes:
        counter: A counter of tiles, int32, 0 before and after a launch; None for a static order.
        PACK_GQA: Whether the heads of a group share tiles, which few queries would otherwise leave half empty. A tile
            then holds STRIP query rows of each head of the group, head by head, then the next STRIP rows; else STRIP is
            BLOCK_M.
        HAS_EDGES: Whether a warpgroup may meet an edge of the band after its first block of keys.
        CACHED_ROWS: The number of keys and values that are assumed to fit the L2 cache.
        PASSES_OVER: Whether a warpgroup without rows in a tile passes over the tile's keys, as in a decode.
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
    PASSES_OVER: Any


class Helpers(NamedTuple):
    """What helps the producer of a forward over a cache: the fields of ``PagedTiles``.

    Attributes:
        WIDENS: As there.
        GATHERS: As there.
        WARPS: ``helper_warps``.
        REGISTERS: ``helper_registers``.
    """

    WIDENS: Any
    GATHERS: Any
    WARPS: Any
    REGISTERS: Any


class Columns(NamedTuple):
    """The division of columns in ``big_heads``; see ``BigHeadsTiles``.

    Attributes:
        LEFT: Columns of the output that the scorer computes.
        CHUNK: Columns of keys that are loaded at once.
        KEY_CHUNKS: Buffers for chunks of keys.
        PROB_STAGES: Buffers of probabilities.
    """

    LEFT: Any
    CHUNK: Any
    KEY_CHUNKS: Any
    PROB_STAGES: Any


class Scales(NamedTuple):
    """Further arguments of a call with 8-bit tensors, besides ``Call``.

    Attributes:
        q: ``gpu.device.records.BlockScale`` of q.
        k: ``BlockScale`` of the keys.
        v: ``BlockScale`` of the values.
        shift: Like lse: the amount that smoothing subtracted from a row's scores, or None.
        shift_scale: The factor that turns shift into exponents of 2.
        out: The divisor of the output, or None.
    """

    q: Any
    k: Any
    v: Any
    shift: Any
    shift_scale: Any
    out: Any


class Maps(NamedTuple):
    """The descriptors of the caches for TMA.

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
    """The division of a program's work: STAGES of rings, REGISTERS of a consumer's threads, FEW of other threads."""

    STAGES: Any
    REGISTERS: Any
    FEW: Any


class CopiedRows(NamedTuple):
    """The caches of latent rows that threads copy, in 16-bit columns whatever they hold.

    Attributes:
        k: ``Rows`` of the keys' own columns.
        v: ``Rows`` of the values; two of 8 bits are a column.
        scales: ``Rows`` of the scales of 8-bit values, in float32; None if values have 16 bits.
        paging: ``Paging``.
    """

    k: Any
    v: Any
    scales: Any
    paging: Any


class Latent(NamedTuple):
    """The descriptors of rows, and the division of work.

    Attributes:
        q: Descriptor of the queries' own columns; None if the scorer copies them.
        qv: Descriptor of the queries' columns for values, likewise.
        k: Descriptor of the keys' own columns, with boxes of the rows of a block, or of a smaller page.
        v: Descriptor of the values, likewise.
        scales: Descriptor of the scales of 8-bit values, by row and 128 columns; None if values have 16 bits.
        copied: ``CopiedRows`` if threads copy rows, from pages of any size; then k, v and scales are None. Else None.
        k_entry_rows: Rows from one entry to the next: a sequence, or a page.
        v_entry_rows: Likewise.
        fixed_cost: The fixed cost of a tile, in blocks; see ``shares``.
        fewest_blocks: The fewest blocks of a program; they limit the number of programs that share the work.
        STAGES: Blocks of keys in flight.
        PIECE: Columns of values that are loaded and released together.
        LANES: Programs that work on tiles of the same sequence at the same time.
        REGISTERS: Registers of a summer's threads.
        FEW: Registers of the threads in the warps that load and find work.
        WIDE: Registers of the threads that widen 8 bits to 16; 0 if values have 16.
        COPIERS: Warps that copy rows; 0 if TMA loads them.
        COPYING: Registers of these warps' threads.
    """

    q: Any
    qv: Any
    k: Any
    v: Any
    scales: Any
    copied: Any
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
    COPIERS: Any
    COPYING: Any
