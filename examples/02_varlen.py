"""Sequences of different lengths, packed one after another: no padding, and none sees another.

Run it: python examples/02_varlen.py
"""

import time
from itertools import pairwise
from statistics import median

import torch

import flashtile

LENGTHS = (700, 33, 1, 290, 512, 64, 128, 320)
ROUNDS = 9


def main() -> None:
    torch.manual_seed(0)
    total = sum(LENGTHS)
    q, k, v = (torch.randn(total, 4, 64) for _ in range(3))
    # Sequence b is rows bounds[b] to bounds[b + 1].
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    longest = max(LENGTHS)

    packed = flashtile.attention_varlen(q, k, v, bounds, bounds, longest, longest, causal=True)

    starts = bounds.tolist()
    for start, stop in pairwise(starts):
        alone = flashtile.attention(q[None, start:stop], k[None, start:stop], v[None, start:stop], causal=True)
        torch.testing.assert_close(packed[start:stop], alone[0])
    print(f"{len(LENGTHS)} sequences, {total} tokens: packed equals one by one")

    padded = len(LENGTHS) * longest
    wide = torch.randn(len(LENGTHS), longest, 4, 64)
    calls = {
        f"packed, {total} tokens": lambda: flashtile.attention_varlen(q, k, v, bounds, bounds, longest, longest),
        f"padded, {padded} tokens": lambda: flashtile.attention(wide, wide, wide),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + 1):
        for name, call in calls.items():
            start_s = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start_s)
    for name, (_, *measured) in times.items():  # without the first round
        print(f"{name}: {median(measured) * 1e3:.1f} ms, the median of {ROUNDS} rounds by turns")


if __name__ == "__main__":
    main()
