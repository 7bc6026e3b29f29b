"""Masks by their definition, and which pairs dropout keeps."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from flashtile.core import philox
from flashtile.core.masks import Band

LENGTHS = st.integers(0, 9)
BOUNDS = st.one_of(st.none(), st.integers(-4, 11))
CHUNKS = st.one_of(st.none(), st.integers(1, 12))


@given(LENGTHS, LENGTHS, BOUNDS, BOUNDS, CHUNKS, st.integers(0, 8), st.integers(1, 9))
def test_ranges_and_counts_agree_with_the_dense_mask(
    seqlen_q: int, seqlen_k: int, left: int | None, right: int | None, chunk: int | None, first: int, rows: int
) -> None:
    band = Band(left, right, chunk)
    dense = band.dense(seqlen_q, seqlen_k)
    assert band.count(seqlen_q, seqlen_k) == int(dense.sum())
    kept = dense.any(1).nonzero().flatten().tolist()
    outermost = range(*band.any_rows(seqlen_q, seqlen_k))
    # With bounds that leave out a row's own position, rows in the middle of chunks may keep nothing.
    assert kept == list(outermost) if chunk is None else set(kept) <= set(outermost)
    last = min(first + rows, seqlen_q)
    if last <= first:
        return
    block = dense[first:last]
    start, stop = band.any_keys(first, last, seqlen_q, seqlen_k)
    assert set(block.any(0).nonzero().flatten().tolist()) <= set(range(start, stop))
    assert block.all(0).nonzero().flatten().tolist() == list(range(*band.all_keys(first, last, seqlen_q, seqlen_k)))
    part = band.dense(seqlen_q, seqlen_k, rows=(first, last), keys=(0, seqlen_k))
    assert part.equal(block)


def test_causal_aligns_the_last_query_with_the_last_key() -> None:
    assert Band(None, 0).dense(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]
    assert Band(1, 0).dense(4, 2).tolist() == [[False, False], [False, False], [True, False], [True, True]]


def test_chunks_are_counted_from_the_first_key() -> None:
    assert Band(chunk=2).dense(2, 5).tolist() == [[False, False, True, True, False], [False] * 4 + [True]]
    assert Band(None, 0, 2).dense(5, 3).int().tolist() == [[0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 0, 1]]
    # No row sees further than its chunk is long.
    assert Band(9, None, 4) == Band(3, 3, 4) and Band(None, 0, 4) == Band(3, 0, 4)


def test_prints_as_people_say_it() -> None:
    assert [str(b) for b in (Band(), Band(None, 0), Band(3, 0), Band(None, 2), Band(None, 0, 8))] == [
        "full",
        "causal",
        "window(3, 0)",
        "window(inf, 2)",
        "window(7, 0) in chunks of 8",
    ]


def plain_philox(counter: list[int], key: list[int], rounds: int) -> list[int]:
    """Philox4x32 with Python's own integers, from the paper's definition."""
    mask = 2**32 - 1
    for _ in range(rounds):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & mask,
            (first >> 32) ^ counter[3] ^ key[1],
            first & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter


def plain_philox_of_two(counter: list[int], key: int, rounds: int) -> list[int]:
    """Philox2x32, likewise."""
    for _ in range(rounds):
        product = 0xD256D193 * counter[0]
        counter = [(product >> 32) ^ key ^ counter[1], product & (2**32 - 1)]
        key = (key + 0x9E3779B9) & (2**32 - 1)
    return counter


def test_what_is_kept_follows_the_definition() -> None:
    state, threshold = torch.tensor([0x123456789ABCDEF, 2**61 + 77]), round(0.3 * 2**16)
    kept = philox.keep(state, 0.3, range(2, 3), 5, (40, 60), (2**20 + 3, 2**20 + 40))[0]
    for head, row, key in itertools.product((0, 4), (40, 47, 48, 59), (2**20 + 3, 2**20 + 8, 2**20 + 23, 2**20 + 39)):
        cipher, a, b, _ = plain_philox([0, 0, 10 + head, 77], [0x89ABCDEF, 0x1234567], philox.ROUNDS)
        counter = [a ^ (row // 16 * 8 + row % 8), b ^ (key // 16 * 8 + key % 8)]
        word = plain_philox_of_two(counter, cipher, philox.ROUNDS)[row // 8 % 2]
        number = word >> 16 if key // 8 % 2 else word & 0xFFFF
        assert kept[head, row - 40, key - 2**20 - 3] == (number >= threshold)


def test_ten_rounds_of_the_oracle_give_the_published_answer() -> None:
    """The known-answer vectors of Random123 for philox4x32-10 and philox2x32-10 with counter and key of all ones."""
    ones = 2**32 - 1
    assert plain_philox_of_two([ones] * 2, ones, 10) == [0x2C3F628B, 0xAB4FD7AD]
    assert plain_philox([ones] * 4, [ones] * 2, 10) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_keep_does_not_depend_on_how_the_scores_are_cut() -> None:
    state = torch.tensor([5, 9])
    whole = philox.keep(state, 0.4, range(3), 2, (0, 20), (0, 30))
    part = philox.keep(state, 0.4, range(1, 3), 2, (4, 11), (7, 22))
    assert torch.equal(part, whole[1:, :, 4:11, 7:22])


def test_keep_rate_and_independence() -> None:
    kept = philox.keep(torch.tensor([1, 2]), 0.3, range(4), 4, (0, 128), (0, 128)).double()
    n = kept.numel()
    assert abs(kept.mean().item() - 0.7) < 4 * (0.21 / n) ** 0.5
    flat = kept - kept.mean()
    # Neighbours, and those that share a counter or a word.
    for dim, apart in ((0, 1), (1, 1), (2, 1), (2, 8), (2, 16), (3, 1), (3, 8), (3, 16)):
        size = flat.shape[dim] - apart
        together = (flat.narrow(dim, apart, size) * flat.narrow(dim, 0, size)).mean()
        assert abs(together.item()) < 5 * 0.21 / n**0.5
    four = flat.view(4, 4, 8, 2, 8, 8, 2, 8)
    assert abs((four[:, :, :, 0, ..., 0, :] * four[:, :, :, 1, ..., 1, :]).mean().item()) < 5 * 0.21 * (4 / n) ** 0.5


def test_rows_keys_heads_and_seeds_have_numbers_of_their_own() -> None:
    """Sums over all the others, of 2048 numbers each, spread as independent ones do."""
    kept = philox.keep(torch.tensor([-7, 1]), 0.5, range(2), 8, (0, 128), (0, 128)).double() - 0.5
    for dim in (1, 2, 3):
        sums = kept.sum([d for d in range(4) if d != dim])
        spread = sums.square().mean().item() / (kept.numel() / kept.shape[dim] / 4)
        assert abs(spread - 1) < 5 * (2 / len(sums)) ** 0.5
    for state in ((-7, 2), (-6, 1), (-7 + 2**32, 1)):
        other = philox.keep(torch.tensor(state), 0.5, range(2), 8, (0, 128), (0, 128)).double() - 0.5
        assert abs((kept * other).mean().item()) < 5 * 0.25 / kept.numel() ** 0.5
