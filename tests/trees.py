"""Draft trees for tests, by their parents."""

from __future__ import annotations

import random

import torch
from torch import Tensor

# shuffled: a random forest whose rows are in any order.
KINDS = ("chain", "star", "binary", "random", "forest", "shuffled")


def parents(kind: str, rows: int, seed: object) -> list[int]:
    """The parent of each row, -1 for a root."""
    draw = random.Random(repr(seed))
    made = {
        "chain": lambda t: t - 1,
        "star": lambda t: min(t, 1) - 1,
        "binary": lambda t: (t + 1) // 2 - 1,
        "random": lambda t: draw.randrange(t) if t else -1,
        "forest": lambda t: draw.randrange(-1, t),
        "shuffled": lambda t: draw.randrange(-1, t),
    }[kind]
    found = [made(t) for t in range(rows)]
    if kind == "shuffled":
        place = draw.sample(range(rows), rows)
        moved = [-1] * rows
        for t, parent in enumerate(found):
            moved[place[t]] = -1 if parent < 0 else place[parent]
        found = moved
    return found


def ancestors(of: list[int]) -> Tensor:
    """Which rows each row sees: its ancestors and itself; bool ``(rows, rows)``."""
    seen = torch.zeros(len(of), len(of), dtype=torch.bool)
    for t in range(len(of)):
        u = t
        while u >= 0:
            seen[t, u] = True
            u = of[u]
    return seen


def masks(kind: str, counts: list[int], rows: int) -> Tensor:
    """Trees of so many rows each in a mask ``(batch, rows, rows)``; the rest is true, and belongs to no tree."""
    made = torch.ones(len(counts), rows, rows, dtype=torch.bool)
    for b, count in enumerate(counts):
        if count <= rows:
            made[b, :count, :count] = ancestors(parents(kind, count, (b, count)))
    return made
