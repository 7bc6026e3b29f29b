"""The rule that cuts a sequence's keys into splits: everything covered once, and the bounds that memory is made by."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashtile.backends.gpu.decode.config import DecodeTiles, SplitRule
from flashtile.backends.gpu.decode.launch import WorkLimits
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import described
from tests.backends.decode.rule import cut

RULES = [SplitRule(), SplitRule(fewest_of_long=256), SplitRule(264, 128, 1024), SplitRule(8, 16, 64, 8),
         SplitRule(132, 64, 2048, 16, 640), SplitRule(8, 128, 512, most_slots=8192, long_keys=2**16)]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_cut_covers_the_keys_and_keeps_its_bound(rule: SplitRule) -> None:
    capacities = (0, 1, 63, 64, 65, 1000, 4096, 70_000, 300_000)
    for rows, heads, capacity in itertools.product((1, 4, 16, 71, 600), (1, 2, 8, 200), capacities):
        block_n, tiles = 64, -(-rows // 64)
        bound = rule.bound(capacity, rows, tiles, heads)
        for keys in {0, 1, capacity // 3, capacity // 2 + 1, max(capacity - 1, 0), capacity}:
            splits, chunk = cut(rule, keys, rows, tiles, heads, block_n)
            assert chunk % block_n == 0
            assert (splits - 1) * chunk < max(keys, 1) <= splits * chunk
            assert 1 <= splits <= bound
            assert splits == 1 or splits * rows * heads <= rule.most_slots


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), min_size=1, max_size=12),
    st.sampled_from([1, 4, 7]),
    st.sampled_from(RULES),
    st.integers(0, 9),
)
def test_packed_calls_stay_within_their_bounds(
    sequences: list[tuple[int, int]], group: int, rule: SplitRule, spare: int
) -> None:
    capacity, heads, config = 300, 2, DecodeTiles(16, 16, 4, 1, splitting=rule)
    total = sum(rows for _, rows in sequences) + spare
    problem = described(
        batch=len(sequences), num_heads_q=heads * group, num_heads_kv=heads, head_dim=16, head_dim_v=16,
        seqlen_q=total, varlen=True, seqlen_k=capacity, cached=True,
    )  # fmt: skip
    q = torch.empty(total, heads * group, 16, device="meta")
    bounds = WorkLimits(problem, CacheTensors(q, q, q, q, q), config)
    items = slots = 0
    for keys, queries in [*sequences, (0, spare)]:
        rows = queries * group
        tiles = -(-rows // config.block_m)
        splits, _ = cut(rule, keys, rows, tiles, heads, config.block_n)
        items += heads * tiles * splits
        slots += heads * rows * splits if splits > 1 else 0
    assert items <= bounds.items
    assert slots <= bounds.slots


def test_a_sequence_decides_alone() -> None:
    """The rule has no argument that another sequence could change."""
    rule = SplitRule()
    counts = [cut(rule, keys, 4, 1, 8, 64)[0] for keys in range(0, 40_000, 500)]
    assert counts[0] == 1
    assert max(counts) > 8
    assert all(cut(rule, n, 4, 1, 8, 64)[0] <= rule.bound(40_000, 4, 1, 8) for n in range(0, 40_000, 777))
