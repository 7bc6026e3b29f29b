from __future__ import annotations

import torch

from flashtile.core import philox


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


def test_words_follow_the_definition() -> None:
    seed, offset = 0x123456789ABCDEF, 2**61 + 77
    for block, row, head in ((0, 0, 0), (3, 2**31 - 1, 5), (1000, 17, 2**20)):
        got = philox.words(torch.tensor([seed, offset]), *(torch.tensor(x) for x in (block, row, head)))
        key = [seed & 0xFFFFFFFF, seed >> 32]
        assert [int(w) for w in got] == plain_philox([block, row, head, offset & 0xFFFFFFFF], key, philox.ROUNDS)


def test_ten_rounds_of_the_oracle_give_the_published_answer() -> None:
    """The known-answer vector of Random123 for philox4x32-10 with counter and key of all ones."""
    ones = 2**32 - 1
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
    for dim in range(4):
        neighbours = (flat.narrow(dim, 1, flat.shape[dim] - 1) * flat.narrow(dim, 0, flat.shape[dim] - 1)).mean()
        assert abs(neighbours.item()) < 5 * 0.21 / n**0.5
