"""Sequences of different lengths, packed one after another: no padding, and none sees another.

Run it: python examples/02_varlen.py
"""

import time
from itertools import pairwise

import torch

import flashtile

LENGTHS = (700, 33, 1, 290, 512, 64, 128, 320)


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
    for name, call in (
        (f"packed, {total} tokens", lambda: flashtile.attention_varlen(q, k, v, bounds, bounds, longest, longest)),
        (f"padded, {padded} tokens", lambda: flashtile.attention(wide, wide, wide)),
    ):
        call()
        start_s = time.perf_counter()
        call()
        print(f"{name}: {(time.perf_counter() - start_s) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
