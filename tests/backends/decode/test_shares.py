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


@pytest.mark.one_in(9)
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


class Calls(NamedTuple):
    """The fields of ``call.DecodeCall`` that say how work is shared; ``Queries`` and ``Tiles`` are its own."""

    queries: Any
    schedule: Any
    num_heads_kv: Any
    GROUP: Any


class Queries(NamedTuple):
    """As ``call.Sequences``."""

    length: Any
    count: Any


class Tiles(NamedTuple):
    """As ``call.DecodeSchedule``."""

    BLOCK_M: Any
    BLOCK_N: Any


class Spans(NamedTuple):
    """As ``work.SequenceWork``."""

    high: Any
    num_tiles: Any


@triton.jit
def _even_share(lengths_ptr, found_ptr, count, rows, heads, GROUP: tl.constexpr, fixed_cost, fewest_blocks,
                LANES: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """A program's share as ``roles.scheduler`` finds it, where groups are of nearly the same length."""
    call, rule = Calls(Queries(rows, count), Tiles(64, 64), heads, GROUP), Rule(fixed_cost, fewest_blocks, LANES)
    team, b = tl.program_id(0) // LANES, tl.arange(0, N)
    tiles = (rows * GROUP + 63) // 64
    spans = Spans(tl.load(lengths_ptr + b, mask=b < count, other=0), tl.where(b < count, tiles, 0))
    even = shares.even_share(team, call, rule)
    high = tl.load(lengths_ptr + even.b, mask=even.b < count, other=0)
    first, stop, states = shares.even_part(even, high, call, rule)
    is_even = shares.are_even(spans, even, call, rule)
    found = (is_even.to(tl.int32), even.b, even.number, even.split, first, stop, states)
    for i in tl.static_range(7):
        tl.store(found_ptr + 7 * tl.program_id(0) + i, found[i])


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("count", "rows", "group", "heads", "lanes"),
                         [(1, 1, 16, 1, 1), (1, 1, 128, 1, 2), (3, 2, 64, 1, 2), (16, 1, 16, 1, 1), (16, 2, 128, 2, 8),
                          (31, 1, 64, 1, 1), (25, 1, 256, 1, 4)])  # fmt: skip
def test_even_shares_have_every_block_once(count: int, rows: int, group: int, heads: int, lanes: int) -> None:
    make = torch.Generator().manual_seed(count + lanes)
    tiles, programs = -(-rows * group // 64) * heads, 132
    groups, teams = -(-tiles // lanes), programs // lanes
    for kind in ("equal", "near", "short", "empty", "mixed"):
        noise = torch.randint(0, 200, (count,), generator=make)
        lengths = {"equal": 4096 + noise * 0, "near": 4000 + noise, "short": 1 + noise // 40, "empty": noise * 0,
                   "mixed": 1 + 90 * noise}[kind].int()  # fmt: skip
        found = torch.full((programs, 7), -1).int()
        _even_share[(programs,)](lengths, found, count, rows, heads, group, 5, 2, lanes, 32)
        assert (found[:, 0] == found[0, 0]).all()
        spread = (lengths.max() / lengths.float().mean()).item() if kind != "empty" else 1.0
        most = min(teams // (count * groups), 128)
        assert found[0, 0] == (
            most > 0 and 8 * count * groups * most >= 7 * teams and (spread < 1.1 or kind == "short")
        )
        if not found[0, 0]:
            continue
        parts: dict[tuple[int, int], list[tuple[int, int, int, int, int]]] = {}
        for team, (_, b, number, split, first, stop, states) in enumerate(found[::lanes].tolist()):
            if b < count and split < states:
                parts.setdefault((b, number), []).append((team - split, split, first, stop, states))
        assert sorted(parts) == [(b, number) for b in range(count) for number in range(groups)]
        for (b, _), have in parts.items():
            blocks = max(-(-int(lengths[b]) // 64), 1)
            # All know the group's first team and its states, neighbours meet, and each has as many blocks as it must.
            assert len({(one[0], one[4]) for one in have}) == 1 and have[0][4] == len(have) <= 128
            assert [one[1] for one in have] == list(range(len(have)))
            assert have[0][2] == 0 and have[-1][3] == blocks
            assert all(one[3] == other[2] for one, other in pairwise(have))
            assert all(stop - first >= min(2, blocks) for _, _, first, stop, _ in have)
