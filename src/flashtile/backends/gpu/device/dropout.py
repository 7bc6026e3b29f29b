"""Dropout's keep mask: Philox4x32-7, bitwise equal to ``flashtile.core.philox``."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)


class Dropout(NamedTuple):
    """The dropout arguments of a call.

    Attributes:
        rng_state_ptr: As ``keep`` takes it, None without dropout.
        threshold: As ``keep`` takes it.
        keep_scale: Factor of the probabilities that are kept.
        origins_ptr: (num_sequences, 6) int32, ``Origin`` of each sequence, None where none is part of another.
    """

    rng_state_ptr: Any
    threshold: Any
    keep_scale: Any
    origins_ptr: Any


@triton.jit
def keep_tile(dropout, b, h, num_heads, rows, first_key_block, BLOCK_N: tl.constexpr):
    """``keep`` for one of num_heads heads of a sequence: BLOCK_N keys starting at key ``4 * first_key_block``."""
    if dropout.origins_ptr is not None:
        at = dropout.origins_ptr + b * 6
        keys = tl.load(at + 3) + tl.load(at + 4) * (first_key_block * 4 + tl.arange(0, BLOCK_N)[None, :])
        rows = tl.load(at + 1) + tl.load(at + 2) * rows
        # Neighbours need not be neighbours in the whole, so each key takes a word of a counter of its own.
        words_a, words_b, words_c, words_d = words(dropout.rng_state_ptr, tl.load(at) + h, rows, keys // 4)
        place = keys % 4
        low, high = tl.where(place == 0, words_a, words_b), tl.where(place == 2, words_c, words_d)
        kept = tl.where(place < 2, low, high) >= dropout.threshold.to(tl.uint32, bitcast=True)
    else:
        key_blocks = first_key_block + tl.arange(0, BLOCK_N // 4)[None, :]
        kept = keep(dropout.rng_state_ptr, dropout.threshold, b * num_heads + h, rows, key_blocks)
    return kept


@triton.jit
def keep(rng_state_ptr, threshold, head, rows, key_blocks):
    """Which probabilities of a tile are kept.

    Args:
        rng_state_ptr: (2,) int64: seed, offset.
        threshold: ``philox.threshold(dropout_p)``, its 32 bits as int32.
        head: ``batch * num_heads_q + head``.
        rows: [BLOCK_M, 1] row in the sequence.
        key_blocks: [1, BLOCK_N // 4] ``key // 4`` for each group of four neighbouring keys.

    Returns:
        [BLOCK_M, BLOCK_N] bool.
    """
    a, b, c, d = words(rng_state_ptr, head, rows, key_blocks)
    # Joined so that the words of one counter are adjacent: [BLOCK_M, BLOCK_N // 4, 2, 2] read in order is a b c d.
    joined = tl.join(tl.join(a, c), tl.join(b, d)).reshape(a.shape[0], a.shape[1] * 4)
    return joined >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def words(rng_state_ptr, head, rows, key_blocks):
    """The four words of each counter; arguments as above."""
    seed = tl.load(rng_state_ptr)
    offset = tl.load(rng_state_ptr + 1)
    rows, key_blocks = tl.broadcast(rows, key_blocks)
    zero = rows * 0
    counter_a, counter_b = key_blocks.to(tl.uint32), rows.to(tl.uint32)
    counter_c, counter_d = (zero + head).to(tl.uint32), (zero + offset.to(tl.int32)).to(tl.uint32)
    return tl.philox_impl(
        counter_a, counter_b, counter_c, counter_d, seed.to(tl.uint32), (seed >> 32).to(tl.uint32), ROUNDS
    )


def threshold_bits(threshold: int) -> int:
    """A 32-bit threshold as the int32 of the same bits, so that every value has one argument type."""
    return threshold - 2**32 if threshold >= 2**31 else threshold
