"""How the programs of a launch divide the work of all sequences: each gets a run of blocks of equal cost.

The tiles of all sequences stand on a line, one after another, each as long as its blocks of keys and a fixed cost. A
team takes its share of the line, whatever tiles it begins and ends in; so a tile has as many states as teams that its
blocks are divided among, mostly one or two, and none at all is stored of a tile that one team has. Where a share would
begin within a few blocks of a tile's edge it begins there. Which teams have a tile follows from where it stands, so
nothing is looked up. Results depend in their last bits on how a tile is divided, and so on the batch.

A team is as many programs as there are LANES, each with a tile of its own of the same sequence: what stands on the line
are groups of so many neighbouring tiles. They read the same keys at the same time, which so come from memory once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Line(NamedTuple):
    """The tiles of all sequences.

    Attributes:
        sequences: Their numbers.
        blocks: Blocks of keys of a tile of each, at least 1; a group of LANES tiles is as long.
        ends: The cost of each and of all before it, in blocks: int32 holds the cost of 10^11 keys.
        total: The cost of all.
        teams: Teams that have a share.
        least: The least share.
        longer: So many teams, the first, have one more.
        near: A share that would begin so near to a group's edge begins with it.
    """

    sequences: Any
    blocks: Any
    ends: Any
    total: Any
    teams: Any
    least: Any
    longer: Any
    near: Any


class Group(NamedTuple):
    """Tiles on the line.

    Attributes:
        b: Their sequence.
        number: Which of its groups they are.
        blocks: Blocks of keys of each.
        start: Where they begin on the line.
        end: Where they end.
        near: ``Line.near``; of a group of few blocks all of it, so that each share has a block, and it is not divided.
    """

    b: Any
    number: Any
    blocks: Any
    start: Any
    end: Any
    near: Any


class Even(NamedTuple):
    """A team's share where all groups are of nearly the same length, found without the line.

    Attributes:
        b: Its sequence.
        number: Which of its groups it is.
        split: Its number among the teams of the group.
        splits: Teams of each group, 0 if there are more groups than teams.
        count: Groups.
        teams: That there are.
    """

    b: Any
    number: Any
    split: Any
    splits: Any
    count: Any
    teams: Any


@triton.jit
def even_share(team, call, latent):
    """The ``Even`` of a team, of queries that are not packed; b may be beyond the last sequence."""
    tiles = (call.queries.length * call.GROUP + call.schedule.BLOCK_M - 1) // call.schedule.BLOCK_M
    groups = (tiles * call.num_heads_kv + latent.LANES - 1) // latent.LANES
    count, teams = call.queries.count * groups, tl.minimum(tl.num_programs(0) // latent.LANES, 240)
    splits = tl.minimum(teams // tl.maximum(count, 1), 128)
    group = team // tl.maximum(splits, 1)
    b = group // groups
    return Even(b, group - b * groups, team - group * splits, splits, count, teams)


@triton.jit
def are_even(spans, even, call, latent):
    """Whether the groups' blocks of keys are nearly as many, and most teams would have some of them."""
    blocks = tl.maximum((spans.high + call.schedule.BLOCK_N - 1) // call.schedule.BLOCK_N, 1) + latent.fixed_cost
    blocks = tl.where(spans.num_tiles > 0, blocks, 0)
    alike = tl.max(blocks, 0) * call.queries.count * 8 <= tl.sum(blocks, 0) * 9
    return alike & (even.splits > 0) & (even.count * even.splits * 8 >= even.teams * 7)


@triton.jit
def even_part(even, high, call, latent):
    """The first block and the end of an even share, and the states of its group; teams past those have none of it."""
    blocks = (tl.maximum(high, 1) + call.schedule.BLOCK_N - 1) // call.schedule.BLOCK_N
    states = tl.minimum(even.splits, tl.maximum(blocks // latent.fewest_blocks, 1))
    return even.split * blocks // states, (even.split + 1) * blocks // states, states


@triton.jit
def line_of(spans, sequences, call, latent):
    """The ``Line`` of a call; ``sequences`` are numbered, at least as many as there are, packed ones' rest included."""
    groups = (spans.num_tiles * call.num_heads_kv + latent.LANES - 1) // latent.LANES
    return lined_up(sequences, groups, (spans.high + call.schedule.BLOCK_N - 1) // call.schedule.BLOCK_N, latent)


@triton.jit
def lined_up(sequences, groups, blocks, latent):
    """The ``Line`` of so many groups of each sequence, each of so many blocks of keys."""
    blocks = tl.maximum(blocks, 1)
    each = tl.where(groups > 0, blocks + latent.fixed_cost, 0)
    cost = groups * each
    ends = tl.cumsum(cost, 0)
    total, count, most = tl.sum(cost, 0), tl.sum(groups, 0), tl.max(each, 0)
    teams = teams_of(total, count, most, latent)
    least = total // teams
    return Line(sequences, blocks, ends, total, teams, least, total - least * teams, tl.maximum(least // 16, 2))


@triton.jit
def teams_of(total, count, most, latent):
    """How many teams share the line.

    Tiles that cost nearly the same are divided alike, or not at all, if that leaves few programs without work.
    """
    teams = tl.maximum(tl.minimum(tl.num_programs(0) // latent.LANES, total // latent.fewest_blocks), 1)
    # At most 128 states of one tile, as raced: docs/tuning-notes.md.
    teams = tl.where(2 * most > total, tl.minimum(teams, 128), tl.minimum(teams, 240))
    count = tl.maximum(count, 1)
    rounds = (count + teams - 1) // teams
    even = tl.where(count <= teams, teams // count * count, (count + rounds - 1) // rounds)
    is_even = (most.to(tl.int64) * count * 8 <= total.to(tl.int64) * 9) & (even * 8 >= teams * 7)
    return tl.where(is_even, even, teams)


@triton.jit
def group_at(at, line, latent):
    """The ``Group`` that a place before the line's end is in."""
    is_before = line.ends <= at
    b = tl.sum(is_before.to(tl.int32), 0)
    before = tl.max(tl.where(is_before, line.ends, 0), 0)
    blocks = tl.sum(tl.where(line.sequences == b, line.blocks, 0), 0)
    each = tl.maximum(blocks + latent.fixed_cost, 1)
    number = (at - before) // each
    start = before + number * each
    near = tl.where(blocks > latent.fixed_cost, line.near, each)
    return Group(b, number, blocks, start, start + each, near)


@triton.jit
def begin_of(team, line, latent):
    """Where the share of a team begins on the line; its end for the one past the last."""
    team = tl.minimum(team, line.teams)
    at = team * line.least + tl.minimum(team, line.longer)
    group = group_at(tl.minimum(at, tl.maximum(line.total - 1, 0)), line, latent)
    at_end = tl.where(group.end - at <= group.near, group.end, at)
    return tl.where(at < line.total, tl.where(at - group.start <= group.near, group.start, at_end), line.total)


@triton.jit
def teams_at(group, line):
    """The first and the last team that have blocks of a group."""
    # The shares that begin there or before, and those that begin before its end, as ``begin_of`` moves them.
    first = tl.minimum(group.start + group.near, group.end - 1)
    last = tl.minimum(tl.maximum(group.end - group.near - 1, first), group.end - 1)
    return last_before(first, line), last_before(last, line)


@triton.jit
def last_before(at, line):
    """The last team with a share that would begin at a place or before, were it not moved."""
    after = at - line.longer * (line.least + 1)
    is_longer = after < 0
    team = tl.where(is_longer, at, after) // tl.maximum(tl.where(is_longer, line.least + 1, line.least), 1)
    return tl.minimum(team + tl.where(is_longer, 0, line.longer), line.teams - 1)
