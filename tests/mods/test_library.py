"""The ready-made functions: masks against their pairs counted one by one, scores against their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashtile
from flashtile import mods
from flashtile.mods import record
from flashtile.mods.graph import evaluate, parse

N = 24
IDS = torch.tensor([0] * 7 + [1] * 9 + [2] * 8)
PARENTS = [-1, 0, 0, 1, 1, 2, *range(5, 23)]


def _ancestors(row: int) -> set[int]:
    found = {row}
    while PARENTS[row] >= 0:
        row = PARENTS[row]
        found.add(row)
    return found


MASKS: dict[str, tuple[Any, Callable[[int, int], bool]]] = {
    "causal": (mods.causal, lambda i, j: j <= i),
    "window": (mods.window(3, 1), lambda i, j: i - 3 <= j <= i + 1),
    "prefix_lm": (mods.prefix_lm(torch.tensor([5])), lambda i, j: j <= i or j < 5),
    "documents": (mods.documents(IDS), lambda i, j: bool(IDS[i] == IDS[j])),
    "documents_of_batch": (mods.documents(IDS[None]), lambda i, j: bool(IDS[i] == IDS[j])),
    "dilated": (mods.dilated(3), lambda i, j: (i - j) % 3 == 0),
    "neighbourhood_2d": (
        mods.neighbourhood_2d(6, 1), lambda i, j: max(abs(i % 6 - j % 6), abs(i // 6 - j // 6)) <= 1,
    ),
    "neighbourhood_3d": (
        mods.neighbourhood_3d(3, 4, 1),
        lambda i, j: max(abs(i % 4 - j % 4), abs(i // 4 % 3 - j // 4 % 3), abs(i // 12 - j // 12)) <= 1,
    ),
    "tree": (mods.tree(PARENTS), lambda i, j: j in _ancestors(i)),
    "chunked": (mods.chunked(7), lambda i, j: i // 7 == j // 7),
    "block_diffusion": (
        mods.block_diffusion(12, 4),
        lambda i, j: (
            (i % 12 // 4 == j % 12 // 4 and i // 12 == j // 12) or (j >= 12 and j % 12 // 4 < i % 12 // 4)
        ),
    ),
    "shared_prefix": (mods.shared_prefix(7, IDS), lambda i, j: j <= i and (j < 7 or bool(IDS[i] == IDS[j]))),
    "and": (mods.and_masks(mods.causal, mods.dilated(2)), lambda i, j: j <= i and (i - j) % 2 == 0),
    "or": (mods.or_masks(mods.causal, mods.chunked(5)), lambda i, j: j <= i or i // 5 == j // 5),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    mask, keeps = MASKS[name]
    q, k, v = (torch.randn(1, N, 2, 8, dtype=torch.float64) for _ in range(3))
    want = torch.tensor([[keeps(i, j) for j in range(N)] for i in range(N)])
    got = flashtile.attention(q, k, v, mask_mod=mask)
    torch.testing.assert_close(got, flashtile.attention(q, k, v, attn_mask=want))


def _bucket(apart: int, buckets: int, most: int, bidirectional: bool) -> int:
    found = 0
    if bidirectional:
        buckets //= 2
        found, apart = (buckets if apart > 0 else 0), abs(apart)
    else:
        apart = max(-apart, 0)
    exact = buckets // 2
    if apart < exact:
        return found + apart
    return found + min(exact + int(math.log(apart / exact) / math.log(most / exact) * (buckets - exact)), buckets - 1)


def test_scores() -> None:
    score, table = torch.randn(2, N, N, dtype=torch.float64), torch.randn(2, 11, dtype=torch.float64)
    buckets, distances = torch.randn(8, 2, dtype=torch.float64), torch.randint(0, 11, (1, N, N))
    i, j, h = torch.arange(N)[:, None], torch.arange(N), torch.arange(2)[:, None, None]
    both, one = (
        torch.tensor([[_bucket(b - a, 8, 16, way) for b in range(N)] for a in range(N)]) for way in (True, False)
    )
    cases = [
        (mods.alibi(table[:, 0]), score - table[:, 0][:, None, None] * (i - j).abs()),
        (mods.relative(table), score + table[h, (j - i).clamp(-5, 5) + 5]),
        (mods.t5(buckets, 16), score + buckets[both].movedim(-1, 0)),
        (mods.t5(buckets, 16, False), score + buckets[one].movedim(-1, 0)),
        (mods.graphormer(table, distances), score + table[h, distances[0]]),
        (mods.softcap(2.0), 2 * torch.tanh(score / 2)),
        (mods.temperature(table[:, 1]), score * table[:, 1][:, None, None]),
    ]
    for f, want in cases:
        found = record.lowered(f, "score_mod", "score", False)
        graph = parse(found.text)
        at = {"score": score, "b": torch.tensor(0), "h": h, "i": i, "j": j}
        (got,) = evaluate(graph, [graph.result], at, found.operands, found.numbers, torch.float64)
        torch.testing.assert_close(got, want)


def test_the_code_of_a_function_can_be_read() -> None:
    one, two = (mods.source(mods.alibi(torch.rand(n))) for n in (2, 5))
    assert one == two and "@triton.jit" in one and "def linear(" in one
    assert "tl.where" in mods.source(mods.causal)
    assert set(mods.__all__) >= {"t5", "source"} and callable(mods.t5)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mods.nothing  # noqa: B018
