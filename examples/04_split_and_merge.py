"""Attention over parts of the keys, merged into attention over all of them: what makes it tile, and distribute.

Run it: python examples/04_split_and_merge.py
"""

from functools import reduce
from itertools import pairwise

import torch

import flashtile


def main() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 8, 4, 64)
    k, v = torch.randn(1, 3000, 4, 64), torch.randn(1, 3000, 4, 64)
    whole, whole_lse = flashtile.attention(q, k, v, return_lse=True)

    # Split the keys anywhere, an empty part included; each part yields an output and the log of its denominator.
    cuts = [0, 1000, 1000, 1717, 3000]
    parts = [
        flashtile.attention(q, k[:, start:stop], v[:, start:stop], return_lse=True) for start, stop in pairwise(cuts)
    ]

    for name, order in (("left to right", parts), ("right to left", parts[::-1])):
        out, lse = reduce(lambda a, b: flashtile.merge_states(*a, *b), order)
        print(f"{name}: out differs by {(out - whole).abs().max():.1e}, lse by {(lse - whole_lse).abs().max():.1e}")

    # Associative, so the parts may as well be merged as a tree.
    left, right = flashtile.merge_states(*parts[0], *parts[1]), flashtile.merge_states(*parts[2], *parts[3])
    out, _ = flashtile.merge_states(*left, *right)
    print(f"as a tree: out differs by {(out - whole).abs().max():.1e}")


if __name__ == "__main__":
    main()
