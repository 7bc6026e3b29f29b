"""Dropout's random numbers: whether (batch, head, row, key) is kept is a pure function of a seed and these indices.

Each head has its own key, made by Philox4x32. One Philox2x32 evaluation returns two words. Their 16-bit halves are
the numbers for two rows and two keys, eight apart (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; 7
rounds of either pass BigCrush). The counter is made of rows and keys without their bit of value 8:

    key, a, b = first words of Philox4x32-7, counter (0, 0, batch * num_heads_q + head, offset), cipher key seed
    words = Philox2x32-7, counter (a ^ without_8(row), b ^ without_8(key)), cipher key ``key``
    kept if half (key // 8 % 2, the lower first) of words[row // 8 % 2] >= round(dropout_p * 2**16)

In tensor cores' accumulators one thread holds these four elements, whether rows or keys come first. Rows and keys count
from the start of their own sequence, so packing does not change which elements are dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.core.masks import Origin

ROUNDS = 7
_MASK = 0xFFFFFFFF
_MULTIPLY_A, _MULTIPLY_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_MULTIPLY = 0xD256D193


def threshold(dropout_p: float) -> int:
    """The 16-bit threshold. Elements with a smaller number are dropped."""
    return min(round(dropout_p * 2**16), 2**16 - 1)


def philox_keys(rng_state: Tensor, heads: Tensor) -> list[Tensor]:
    """The Philox key of each head: key, a and b, as int64 in [0, 2**32).

    Args:
        rng_state: ``(2,)`` int64: seed, offset.
        heads: ``batch * num_heads_q + head``, int64.
    """
    seed, offset = rng_state[0], rng_state[1]
    key_a, key_b = seed & _MASK, (seed >> 32) & _MASK
    a, b, c, d = torch.broadcast_tensors(heads * 0, heads * 0, heads, offset & _MASK)
    for _ in range(ROUNDS):
        # Products wrap modulo 2**64, which leaves the low 64 bits of the unsigned product.
        product_a, product_b = a * _MULTIPLY_A, c * _MULTIPLY_B
        a, c = (product_b >> 32) & _MASK ^ b ^ key_a, (product_a >> 32) & _MASK ^ d ^ key_b
        b, d = product_b & _MASK, product_a & _MASK
        key_a, key_b = (key_a + _WEYL_A) & _MASK, (key_b + _WEYL_B) & _MASK
    return [a, b, c]


def words(philox_key: list[Tensor], rows: Tensor, keys: Tensor) -> list[Tensor]:
    """The two words of each counter, as int64 in [0, 2**32).

    Args:
        philox_key: The result of ``philox_keys``.
        rows: ``without_8`` of rows in the sequence; int64. All arguments broadcast.
        keys: ``without_8`` of keys; int64.
    """
    key, a, b = philox_key[0], philox_key[1] ^ rows, philox_key[2] ^ keys
    for _ in range(ROUNDS):
        low, high = a * _MULTIPLY, b
        a = (low >> 32).bitwise_and_(_MASK).bitwise_xor_(key)
        # In place, once the first round has broadcast the tensor to all counters.
        a = a.bitwise_xor_(high) if a.shape == high.shape else a ^ high
        b = low.bitwise_and_(_MASK)
        key = (key + _WEYL_A) & _MASK
    return [a, b]


def without_8(places: Tensor) -> Tensor:
    """Numbers without their bit of value 8; the bits above it move down."""
    return places // 16 * 8 + places % 8


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
        num_heads_q: Number of all query heads.
        rows: Half-open range of rows.
        keys: Half-open range of keys.
        origin: The place of the one sequence, if it is part of a longer one.

    Returns:
        ``(len(batch), num_heads_q, rows, keys)`` bool, True where kept.
    """
    device = rng_state.device
    sequences = torch.arange(batch.start, batch.stop, device=device)
    heads = sequences[:, None, None, None] * num_heads_q + torch.arange(num_heads_q, device=device)[:, None, None]
    if origin is None:
        return _keep_all(rng_state, threshold(dropout_p), heads, rows, keys)
    row, key = torch.arange(*rows, device=device), torch.arange(*keys, device=device)
    heads = heads + (origin.head - batch.start * num_heads_q)
    row, key = origin.row + origin.row_step * row, origin.key + origin.key_step * key
    # Each counter is evaluated once.
    own_rows, at_row = torch.unique(without_8(row), return_inverse=True)
    own_keys, at_key = torch.unique(without_8(key), return_inverse=True)
    found, limit = words(philox_keys(rng_state, heads), own_rows[:, None], own_keys), threshold(dropout_p)
    halves = [torch.stack([word & 0xFFFF, word >> 16], dim=-1) >= limit for word in found]
    kept = torch.stack(halves, dim=3).flatten(2, 3).flatten(-2)
    return kept[..., 2 * at_row + row // 8 % 2, :][..., 2 * at_key + key // 8 % 2]


def _keep_all(rng_state: Tensor, limit: int, heads: Tensor, rows: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """``keep`` for consecutive rows and keys: the counters are a rectangle, and views place their halves."""
    if rows[0] == rows[1] or keys[0] == keys[1]:
        return heads.new_zeros(*heads.shape[:2], rows[1] - rows[0], keys[1] - keys[0], dtype=torch.bool)
    # Sixteen rows or keys have eight counters; the range begins with the sixteen that contains the first.
    firsts = rows[0] // 16, keys[0] // 16
    counts = [-(-stop // 16) - first for (_, stop), first in zip((rows, keys), firsts, strict=True)]
    used = [8 * count - max(0, 7 - (stop - 1) % 16) for (_, stop), count in zip((rows, keys), counts, strict=True)]
    places = [8 * first + torch.arange(n, device=rng_state.device) for first, n in zip(firsts, used, strict=True)]
    found = words(philox_keys(rng_state, heads), places[0][:, None], places[1])
    kept = torch.zeros(*heads.shape[:2], 2, 2, 8 * counts[0], 8 * counts[1], dtype=torch.bool, device=rng_state.device)
    for n, word in enumerate(found):
        kept[:, :, n, 0, : used[0], : used[1]] = (word & 0xFFFF) >= limit
        kept[:, :, n, 1, : used[0], : used[1]] = word.bitwise_right_shift_(16) >= limit
    # The bytes of eight keys are moved at once.
    whole = kept.view(torch.int64).unflatten(-2, (-1, 8)).permute(0, 1, 4, 2, 5, 6, 3)
    whole = whole.reshape(*heads.shape[:2], 16 * counts[0], 2 * counts[1]).view(torch.bool)
    start, first = rows[0] - 16 * firsts[0], keys[0] - 16 * firsts[1]
    return whole[..., start : start + rows[1] - rows[0], first : first + keys[1] - keys[0]]
