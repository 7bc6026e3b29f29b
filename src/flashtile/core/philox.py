"""Dropout's random numbers: whether (batch, head, row, key) is kept is a pure function of a seed and these indices.

Philox4x32 with 7 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 4.3: the fewest
rounds that pass BigCrush). One evaluation yields four 32-bit words, used for four neighbouring keys:

    counter = (key // 4, row, batch * num_heads_q + head, offset)      key of the cipher = seed
    kept if word[key % 4] >= round(dropout_p * 2**32)

Rows and keys count from the start of their own sequence, so packing does not change which elements are dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.core.masks import Origin

ROUNDS = 7
_MASK = 0xFFFFFFFF
_MULTIPLY_A, _MULTIPLY_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85


def threshold(dropout_p: float) -> int:
    """The 32-bit threshold: elements with a smaller word are dropped."""
    return min(round(dropout_p * 2**32), _MASK)


def words(rng_state: Tensor, blocks: Tensor, rows: Tensor, heads: Tensor) -> list[Tensor]:
    """The four words of each counter, as int64 in [0, 2**32).

    Args:
        rng_state: ``(2,)`` int64: seed, offset.
        blocks: ``key // 4``; int64 like rows and heads, and all three broadcast.
        rows: Row in the sequence.
        heads: ``batch * num_heads_q + head``.

    Returns:
        Four tensors of the broadcast shape.
    """
    seed, offset = rng_state[0], rng_state[1]
    key_a, key_b = seed & _MASK, (seed >> 32) & _MASK
    a, b, c, d = torch.broadcast_tensors(blocks, rows, heads, offset & _MASK)
    for _ in range(ROUNDS):
        # The products wrap modulo 2**64, which leaves the bits of the unsigned product.
        product_a, product_b = a * _MULTIPLY_A, c * _MULTIPLY_B
        a, c = (product_b >> 32) & _MASK ^ b ^ key_a, (product_a >> 32) & _MASK ^ d ^ key_b
        b, d = product_b & _MASK, product_a & _MASK
        key_a, key_b = (key_a + _WEYL_A) & _MASK, (key_b + _WEYL_B) & _MASK
    return [a, b, c, d]


def keep(
    rng_state: Tensor,
    dropout_p: float,
    batch: range,
    num_heads_q: int,
    rows: tuple[int, int],
    keys: tuple[int, int],
    origin: Origin | None = None,
) -> Tensor:
    """Which probabilities are kept, for a rectangle of the score matrix.

    Args:
        rng_state: ``(2,)`` int64: seed, offset.
        dropout_p: Probability of dropping.
        batch: The sequences.
        num_heads_q: Query heads, all of them.
        rows: Half-open range of rows.
        keys: Half-open range of keys.
        origin: Of the one sequence, whose rows and keys are part of a longer one.

    Returns:
        ``(len(batch), num_heads_q, rows, keys)`` bool, True where kept.
    """
    device = rng_state.device
    first = keys[0] // 4
    blocks = torch.arange(first, -(-keys[1] // 4), device=device)
    sequences = torch.arange(batch.start, batch.stop, device=device)
    heads = sequences[:, None, None, None] * num_heads_q + torch.arange(num_heads_q, device=device)[:, None, None]
    row = torch.arange(rows[0], rows[1], device=device)[:, None]
    place = slice(keys[0] - 4 * first, keys[1] - 4 * first)
    if origin is not None:
        key = origin.key + origin.key_step * torch.arange(*keys, device=device)
        blocks, block_of_key = torch.unique_consecutive(key // 4, return_inverse=True)
        heads, row = heads + (origin.head - batch.start * num_heads_q), origin.row + origin.row_step * row
        place = 4 * block_of_key + key % 4
    limit = threshold(dropout_p)
    kept = torch.stack([word >= limit for word in words(rng_state, blocks, row, heads)], dim=-1).flatten(-2)
    return kept[..., place]
