"""How programs share the tiles of calls over latent rows, in Triton's interpreter."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from flashtile.backends.hopper.latent import shares


class Rule(NamedTuple):
    """The fields of ``records.Latent`` that say how work is shared."""

    fixed_cost: Any
    fewest_blocks: Any
    LANES: Any


@triton.jit
def _share(groups_ptr, blocks_ptr, bounds_ptr, owners_ptr, fixed_cost, fewest_blocks, LANES: tl.constexpr,
           N: tl.constexpr):  # fmt: skip
    """A program's bounds on the line; the first also says which teams have each group."""
    rule, b, team = Rule(fixed_cost, fewest_blocks, LANES), tl.arange(0, N), tl.program_id(0)
    line = shares.lined_up(b, tl.load(groups_ptr + b), tl.load(blocks_ptr + b), rule)
    tl.store(bounds_ptr + team, shares.begin_of(team // LANES, line, rule))
    tl.store(bounds_ptr + tl.num_programs(0), line.total)
    tl.store(bounds_ptr + tl.num_programs(0) + 1, line.teams)
    if team == 0:
        at, number = line.total * 0, 0
        while at < line.total:
            group = shares.group_at(at, line, rule)
            first, last = shares.teams_at(group, line)
            found = (first, last, group.start, group.end, group.blocks, group.b)
            for i in tl.static_range(6):
                tl.store(owners_ptr + 6 * number + i, found[i])
            at, number = group.end, number + 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("programs", "lanes"), [(1, 1), (7, 1), (132, 1), (132, 2), (132, 4), (5, 2)])
@pytest.mark.parametrize("rule", [(1, 2), (5, 2), (3, 8)])
def test_every_block_once_and_owners_know_one_another(programs: int, lanes: int, rule: tuple[int, int]) -> None:
    make = torch.Generator().manual_seed(programs + lanes)
    for kind in ("equal", "near", "any", "few", "empty"):
        n, most = (32, {"equal": 64, "near": 64, "any": 300, "few": 3, "empty": 1}[kind])
        blocks = torch.randint(1, most + 1, (n,), generator=make)
        blocks = {"equal": blocks * 0 + 64, "near": 60 + blocks % 5}.get(kind, blocks).int()
        groups = torch.randint(0, 4, (n,), generator=make).int() if kind != "equal" else torch.ones(n).int()
        groups[5:] *= programs > 7
        if kind == "empty":
            groups *= 0
        count = int(groups.sum())
        bounds, owners = torch.full((programs + 2,), -1).int(), torch.full((max(count, 1), 6), -1).int()
        _share[(programs,)](groups, blocks, bounds, owners, *rule, lanes, n)
        total, teams = bounds[programs].item(), bounds[programs + 1].item()
        assert total == int((groups * (blocks + rule[0])).sum())
        assert 1 <= teams <= max(programs // lanes, 1)
        begins = [*bounds[:programs:lanes].tolist()[:teams], total]
        assert begins == sorted(begins) and begins[0] == 0
        for first, last, start, end, own, b in owners[:count].tolist():
            assert own == blocks[b] and end - start == own + rule[0]
            have = [t for t in range(teams) if max(begins[t], start) < min(begins[t + 1], end)]
            assert have == list(range(first, last + 1)), (kind, start, end, have, first, last)
            assert len(have) <= 127
            parts = [(max(begins[t], start) - start, min(begins[t + 1], end) - start) for t in have]
            cut = [(low * own // (end - start), high * own // (end - start)) for low, high in parts]
            # Neighbours meet, and each has a block.
            assert cut[0][0] == 0 and cut[-1][1] == own and all(low < high for low, high in cut), (kind, cut)
            assert all(one[1] == other[0] for one, other in pairwise(cut))
        most = programs // lanes
        if kind == "equal" and 8 * (even := most // count * count) >= 7 * most > 0:
            assert teams == even
