"""A kernel's arguments as records, and which tile a program works on."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.device import mask, scheduler, scores, sequence
from flashtile.backends.gpu.device.mask import MaskMod
from flashtile.backends.gpu.device.scores import ScoreMod, Terms
from flashtile.backends.gpu.device.sequence import Operand, SequenceLayout


class Call(NamedTuple):
    """The arguments that all kernels share; holds constants, so it is only passed as an argument, never assigned.

    Attributes:
        q: ``sequence.Operand``, like k and v.
        k: Keys.
        v: Values.
        num_heads: Query heads.
        group_size: Query heads for each key head.
        terms: ``scores.Terms``.
        heads_at_once: Heads whose tiles run at the same time.
        BLOCK_M: As in ``portable.config.Config``, like the constants that follow.
    """

    q: Any
    k: Any
    v: Any
    num_heads: Any
    group_size: Any
    terms: Any
    heads_at_once: Any
    BLOCK_M: Any
    BLOCK_N: Any
    ONE_LOOP: Any
    MASK_ALL: Any


class Place(NamedTuple):
    """A tile: a block of one head of one sequence, with the ``sequence.Sequence`` of its queries and of its keys.

    ``b == batch`` means rows past the last packed sequence, which have no keys (or keys that have no rows).
    """

    b: Any
    head: Any
    block: Any
    queries: Any
    keys: Any


@triton.jit
def with_call(tensors, dims, sides, scoring, score_mods, masks, dropout, tiling, BODY: tl.constexpr, results):
    """Builds the ``Call`` and runs ``BODY(call, results)``.

    Triton turns the constants of a record that is assigned, or (3.6) returned, into tensors; so the ``Call`` is
    constructed in the argument list.

    Args:
        tensors: ``sequence.Strided`` of q, k and v.
        dims: HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, UNIT.
        sides: cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, seqlen_q, seqlen_k, group_size.
        scoring: The first fields of ``scores.Terms``.
        score_mods: ``scores.ScoreMod`` with functions of its own, ``scores.Alibi``, ``mask.ScoreTensor`` of the bias.
        masks: ``mask.Band``, ``mask.ScoreTensor`` of the boolean mask.
        dropout: ``dropout.Dropout``.
        tiling: The last fields of ``Call``.
        BODY: The kernel's own part, a ``@triton.jit`` function.
        results: Passed to BODY unchanged.
    """
    queries, keys = SequenceLayout(sides[0], sides[2], sides[3]), SequenceLayout(sides[1], sides[2], sides[4])
    slopes, bias, pairs_mask = score_mods[1], score_mods[2], masks[1]
    PARTS: tl.constexpr = dropout.origins_ptr is not None
    BODY(
        Call(
            Operand(tensors[0], queries, dims[0], dims[2], dims[4]),
            Operand(tensors[1], keys, dims[0], dims[2], dims[4]),
            Operand(tensors[2], keys, dims[1], dims[3], dims[4]),
            dropout.num_heads, sides[5],
            Terms(
                scoring[0], scoring[1], scoring[2],
                (
                    score_mods[0],
                    ScoreMod(
                        None if slopes.ptr is None else scores.alibi_of_part if PARTS else scores.alibi, None,
                        scores.slope_of_part if PARTS else scores.slope_of_head,
                        (slopes, dropout.origins_ptr, sides[2]) if PARTS else slopes,
                    ),
                    ScoreMod(None if bias.ptr is None else scores.bias, None, mask.tensor_of_head, bias),
                ),
                masks[0],
                (
                    MaskMod(mask.select_band, None, masks[0], True),
                    MaskMod(
                        None if pairs_mask.ptr is None else mask.select_tensor, mask.tensor_of_head, pairs_mask, False
                    ),
                ),
                dropout,
            ),
            *tiling,
        ),
        results,
    )  # fmt: skip


@triton.jit
def locate(call, splits):
    """The ``Place`` of this program's tile: of query rows, or, given ``splits``, of keys for one split of a group.

    Programs of packed sequences are numbered by block first, then by head. Dense ones process heads_at_once heads
    (counted over all sequences) at a time, which share the cache; of those, the longest blocks of all heads first.
    """
    layout, num_heads = call.q.layout, call.num_heads
    OVER_KEYS: tl.constexpr = splits is not None
    BLOCK: tl.constexpr = call.BLOCK_N if OVER_KEYS else call.BLOCK_M
    if OVER_KEYS:
        layout, num_heads = call.k.layout, call.num_heads // call.group_size * splits
    PACKED: tl.constexpr = layout.cu_seqlens_ptr is not None
    pid = tl.program_id(0)
    if PACKED:
        num_tiles = layout.total // BLOCK + layout.num_sequences + 1
        b, block = scheduler.packed_tile(layout.cu_seqlens_ptr, layout.num_sequences, pid % num_tiles, BLOCK)
        head = pid // num_tiles
    else:
        num_tiles = (layout.total + BLOCK - 1) // BLOCK
        block, head = scheduler.grouped_tile(pid, num_tiles, layout.num_sequences * num_heads, call.heads_at_once)
        b = head // num_heads
        head = head % num_heads
    queries, keys = sequence.sequence_of(call.q.layout, b), sequence.sequence_of(call.k.layout, b)
    if PACKED:
        # Rows past the last query sequence see no keys; keys past the last key sequence see no rows.
        within = b < layout.num_sequences
        if OVER_KEYS:
            queries = sequence.Sequence(queries.batch_index, queries.start, tl.where(within, queries.length, 0))
        else:
            keys = sequence.Sequence(keys.batch_index, keys.start, tl.where(within, keys.length, 0))
    if call.terms.band.right is not None and not OVER_KEYS:
        # A tile past the end of a packed sequence keeps its block number.
        num_blocks = (queries.length + BLOCK - 1) // BLOCK
        block = tl.where(block < num_blocks, scheduler.longest_first(block, num_blocks, True), block)
    return Place(b, head, block, queries, keys)
