"""Tile sizes of the Hopper kernels: what they must fit into, and which are chosen. Measured: docs/tuning-notes.md."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashtile.call.problem import Problem
from flashtile.mods.places import EXPENSIVE, tabulated

SHARED_BYTES = 227 * 1024
# Registers of a thread of each warpgroup, added up.
WARPGROUP_REGISTERS = 64 * 1024 // 128
PRODUCER_REGISTERS = 32
# Shared memory for barriers, tile records and what the compiler needs.
OTHER_BYTES = 1024


@dataclass(frozen=True, kw_only=True)
class ForwardTiles:
    """One configuration of the forward.

    Attributes:
        block_d: Columns of a tile of queries or keys: head_dim, padded to one of WIDTHS; TMA fills the difference with
            zeros.
        block_dv: The same of head_dim_v, for values and the output.
        block_m: Rows per warpgroup.
        strip: Neighbouring rows of one head in a tile; fewer than block_m with pack_gqa.
        block_n: Keys per block.
        num_warpgroups: Warpgroups that compute, so a tile has ``num_warpgroups * block_m`` rows.
        stages: Buffers each for keys and values.
        q_stages: Buffers for queries.
        tile_stages: How many tiles a program finds ahead of working on them.
        dynamic: Whether programs take tiles from a shared counter, not in a static order.
        overlap: Whether the next tile's first scores are started before a tile's end; takes two buffers for queries, or
            one if warpgroups hold its queries in registers.
        pingpong: Whether a barrier makes warpgroups start a step's products one after another.
        in_turn: Whether a step's softmax waits for all of its products: to measure what running under them saves.
        out_cols: Columns of the pieces in which the output leaves.
        out_stages: Buffers for such pieces.
        registers: What setmaxnreg gives a computing warpgroup's threads.
        max_registers: What the compiler gives every thread at the start: all of them together fill the register file.
        score_stages: Buffers for bias and mask tiles; 0 if each thread loads its elements from global memory.
        score_bytes: Bytes of an element of bias and mask together: of those with rows of their own, and with one row.
        programs: Programs that share a multiprocessor: two of one warpgroup each load what their own rows need, where
            two warpgroups of one program load the same blocks.
    """

    block_d: int
    block_dv: int
    out_cols: int
    block_m: int = 64
    strip: int = 64
    block_n: int = 128
    num_warpgroups: int = 2
    stages: int = 2
    q_stages: int = 2
    tile_stages: int = 4
    dynamic: bool = False
    overlap: bool = True
    pingpong: bool = False
    in_turn: bool = False
    out_stages: int = 1
    registers: int = 240
    max_registers: int = 168
    score_stages: int = 0
    score_bytes: tuple[int, int] = (0, 0)
    programs: int = 1

    def __post_init__(self) -> None:
        if self.overlap and self.q_stages < 2 and self.block_d != 96:
            raise ValueError(f"overlap needs two buffers for queries, or at head_dim 96 registers: {self}")
        if (self.num_warpgroups - 1) * self.block_m > self.block_n:
            raise ValueError(f"a warpgroup may leave out one key block of a tile, no more: {self}")
        if self.programs * (self.num_warpgroups * self.registers + self.other_registers) > WARPGROUP_REGISTERS:
            raise ValueError(f"more registers than there are: {self}")
        if self.block_m % self.strip or (self.pack_gqa and self.out_cols > 64):
            raise ValueError(f"pack_gqa needs whole strips, whose boxes have 64 columns at most: {self}")
        if self.shared_bytes > shared_bytes_of(self.programs):
            raise ValueError(f"more shared memory than there is, {self.shared_bytes} bytes: {self}")

    @property
    def pack_gqa(self) -> bool:
        """Whether a tile has rows of all heads of a group."""
        return self.strip < self.block_m

    @property
    def other_registers(self) -> int:
        """Registers of a thread of each warpgroup that does not compute, added up."""
        return PRODUCER_REGISTERS

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the tiles and of what else needs any."""
        keys = self.stages * self.block_n * (self.block_d + self.block_dv)
        rows = self.num_warpgroups * self.block_m
        score_tensors = self.score_stages * buffer_bytes(self.block_n, rows, self.score_bytes)
        rows_bytes = 2 * rows * (self.q_stages * self.block_d + self.out_stages * self.out_cols)
        return score_tensors + 2 * keys + rows_bytes + OTHER_BYTES

    def __str__(self) -> str:
        rows = f"{self.num_warpgroups} x {self.block_m}" + (" of a group's heads" if self.pack_gqa else "")
        overlap = "" if self.overlap else ", one after the other"
        dims = f"{self.block_d}" if self.block_d == self.block_dv else f"{self.block_d} and {self.block_dv}"
        return f"tiles {rows} x {self.block_n}, head_dim {dims}, {self.stages} stages{overlap}"


def shared_bytes_of(programs: int) -> int:
    """Shared memory of each of some programs that share a multiprocessor; the system keeps 1 KiB of each."""
    return (SHARED_BYTES + 1024) // programs - 1024


# Widths of tiles; their parts are powers of two (``device/parts.py``). Each takes less time than the next.
WIDTHS = (64, 96, 128, 160, 192, 256)
# More buffers than these gain nothing.
MOST_STAGES = 4


def narrowest(width: int) -> int:
    """Columns of the narrowest part of a tile."""
    return width & -width


def buffer_bytes(block_n: int, rows: int, score_bytes: tuple[int, int]) -> int:
    """Bytes of a block of bias and mask tiles in shared memory; one row for all takes eight."""
    return block_n * (score_bytes[0] * rows + score_bytes[1] * 8)


@functools.cache
def two_warpgroups(
    block_d: int, block_dv: int, block_n: int | None = None, score_bytes: tuple[int, int] = (0, 0)
) -> ForwardTiles:
    """Two warpgroups of 64 rows; registers allow no third where a row is long.

    Shared memory goes to the overlap of tiles first, then to buffers for all of the output, then to a third and fourth
    stage. Blocks of 64 keys leave room for the overlap where q and k are wide, and registers where v is.
    """
    block_n = block_n or (128 if max(block_d, block_dv) <= 128 else 64)
    score_tensors = buffer_bytes(block_n, 128, score_bytes)
    # An output that leaves in narrow pieces, through one buffer, makes room for bias and mask tiles.
    out_cols = min(narrowest(block_dv), 64 if score_tensors else 128)
    most = 1 if score_tensors else block_dv // out_cols
    # A second buffer of such tiles is worth more than the overlap, for which there is rarely room too.
    ways = [(not score_bytes[0], 2), (False, 2), (False, 1)] if score_tensors else []
    ways += [(True, 0), (False, 0)]
    for (overlap, score_stages), out_stages in itertools.product(ways, range(most, 0, -1)):
        q_stages = 2 if overlap else 1
        rows = 2 * 128 * (q_stages * block_d + out_stages * out_cols) + score_stages * score_tensors
        stages = (SHARED_BYTES - OTHER_BYTES - rows) // (2 * block_n * (block_d + block_dv))
        if stages >= 2:
            return ForwardTiles(
                block_d=block_d, block_dv=block_dv, out_cols=out_cols, block_n=block_n, stages=min(stages, MOST_STAGES),
                q_stages=q_stages, overlap=overlap, out_stages=out_stages, score_stages=score_stages,
                score_bytes=score_bytes,
            )  # fmt: skip
    raise ValueError(f"no tiles of {block_d} and {block_dv} columns fit into shared memory")


TWO_WARPGROUPS = {(block_d, block_dv): two_warpgroups(block_d, block_dv) for block_d in WIDTHS for block_dv in WIDTHS}
# Here 128 keys a block are worth more than the overlap.
TWO_WARPGROUPS[192, 128] = replace(TWO_WARPGROUPS[192, 128], block_n=128, q_stages=1, overlap=False, out_cols=64)
TWO_WARPGROUPS[160, 160] = replace(TWO_WARPGROUPS[160, 160], block_n=128, q_stages=1, overlap=False, out_stages=1)
# With blocks of 64 keys a step is short, and its products are most of it: ping-pong pays.
TWO_WARPGROUPS |= {dims: replace(TWO_WARPGROUPS[dims], pingpong=True) for dims in ((192, 192), (256, 256))}
# Queries in registers leave shared memory for a third stage.
HELD_96 = replace(TWO_WARPGROUPS[96, 128], q_stages=1, stages=3)
# All of a head_dim agree in block_m and block_n, see choose.
THREE_WARPGROUPS_64 = ForwardTiles(
    block_d=64, block_dv=64, out_cols=64, num_warpgroups=3, stages=3, overlap=False, registers=160, max_registers=128
)  # fmt: skip

# Two programs, each of one tile's rows, load and store what the other multiplies.
ONE_WARPGROUP_64 = ForwardTiles(
    block_d=64, block_dv=64, out_cols=64, num_warpgroups=1, q_stages=1, overlap=False, registers=224, max_registers=128,
    programs=2,
)  # fmt: skip


@functools.cache
def one_warpgroup(block_d: int, block_dv: int) -> ForwardTiles:
    """One warpgroup of 64 rows and blocks of 64 keys, for lists of such blocks: two programs, where there is room."""
    out_cols = min(narrowest(block_dv), 64)
    for programs, (overlap, most) in itertools.product((2, 1), ((True, MOST_STAGES), (False, MOST_STAGES))):
        q_stages = 2 if overlap else 1
        rows = 2 * 64 * (q_stages * block_d + out_cols)
        stages = (shared_bytes_of(programs) - OTHER_BYTES - rows) // (2 * 64 * (block_d + block_dv))
        if stages >= 2:
            return ForwardTiles(
                block_d=block_d, block_dv=block_dv, out_cols=out_cols, block_n=64, num_warpgroups=1,
                stages=min(stages, most), q_stages=q_stages, overlap=overlap, programs=programs,
                registers=224 if programs == 2 else 240, max_registers=128 if programs == 2 else 255,
            )  # fmt: skip
    raise ValueError(f"no tiles of {block_d} and {block_dv} columns fit into shared memory")


@functools.cache
def three_warpgroups_64(score_bytes: tuple[int, int]) -> ForwardTiles:
    """``THREE_WARPGROUPS_64``, with two buffers of a mask if there is one."""
    if score_bytes == (0, 0):
        return THREE_WARPGROUPS_64
    return replace(THREE_WARPGROUPS_64, score_stages=2, score_bytes=score_bytes)


# A band's tiles differ in length. Up to this sequence length there are many, and a tile counter shortens the tail of a
# launch, when the last tiles run alone; beyond it a static order is faster, and for wide rows beyond twice as much.
SHORT = 1024
# Rows and keys of packed sequences for ``ONE_WARPGROUP_64``; longer ones and groups of heads were not raced.
SHORT_PACKED = 256


def width(head_dim: int) -> int:
    """The narrowest tile that holds a row."""
    return next(each for each in WIDTHS if head_dim <= each)


def block_d(head_dim: int) -> int:
    """The same for tiles that are one part."""
    return next(width for width in (64, 128, 256) if head_dim <= width)


@functools.cache
def widths(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Columns of a problem's tiles of queries or keys, and of values."""
    block_dv = width(head_dim_v)
    # A part of 32 columns makes products at half the rate, so 128 columns of values take less time than 96.
    return width(head_dim), 128 if block_dv == 96 else block_dv


# The cost of tiles beside their rows, fitted to times of 76 shapes: the loads and the store of a strip, in blocks of
# keys; the time of a row of three warpgroups' tiles over one of two's, and what is added to it, divided by a tile's
# blocks of keys; what is added over a cache.
_STRIP_BLOCKS, _THIRD_WARPGROUP, _THIRD_WARPGROUP_BLOCKS, _THIRD_WARPGROUP_CACHED_BLOCKS = 5 / 64, 0.87, 0.25, 0.6
# pack_gqa is used where its estimated cost is below this share of the other's. Each of the two strips takes a build;
# packed sequences use the longer one, and so does head_dim 256, where the producer would spill with eight strips a
# warpgroup.
_WORTH_PACKING = 0.97
_STRIPS = (32, 8)


def strip_and_cost(problem: Problem, config: Any, rows: int) -> tuple[int, float]:
    """The cheapest strip, and its estimated cost in rows of two warpgroups' tiles of one head.

    Args:
        problem: A call.
        config: Its tiles, each of one head.
        rows: Rows of the queries' tensor: of all sequences if they are packed.
    """
    tile, group, longest = config.num_warpgroups * config.block_m, problem.group_size, max(problem.seqlen_q, 1)
    varlen, left, right = problem.varlen, problem.band.left, problem.band.right
    mean = rows / problem.batch if varlen else longest
    # Most packed queries are in sequences longer than the mean: halfway to the longest, if nothing else is known.
    keys = (problem.seqlen_k - (0 if right is None else longest / 2)) * (mean / longest + 1) / 2
    if left is not None:
        keys = min(keys, left + (right or 0) + 1)
    blocks = max(keys, 1) / config.block_n + 0.5
    more = _THIRD_WARPGROUP_CACHED_BLOCKS if problem.cached else _THIRD_WARPGROUP_BLOCKS
    a_row = 1.0 if config.num_warpgroups == 2 else _THIRD_WARPGROUP + more / blocks

    def rows_of(unit: int, heads: int) -> float:
        if varlen:
            # Where sequences end is not known: half a unit and half a tile are empty.
            return max((mean + unit / 2) * heads + tile / 2, tile) * a_row
        return -(-(-(-longest // unit) * unit * heads) // tile) * tile * a_row

    alone = rows_of(1, 1) * group
    by_head = problem.mask or problem.bias_dtype is not None or problem.alibi or problem.intervals
    by_head = by_head or problem.score_function is not None or problem.mask_function is not None
    by_head = by_head or problem.listed != () or problem.dropout_p > 0
    # Positions times heads are counted in 32 bits, and a float32 output leaves from registers, row by row.
    is_far = (rows + problem.batch * config.block_m) * group >= 2**30
    if group == 1 or by_head or is_far or problem.out_dtype == torch.float32:
        return config.block_m, alone
    # A server's packed queries are mostly single rows, which would leave most of a strip of 32 empty.
    is_packed = varlen and not problem.cached
    costs = {
        strip: rows_of(strip, group) * (1 + _STRIP_BLOCKS * config.block_m / strip / blocks)
        for strip in (_STRIPS[:1] if is_packed or max(config.block_d, config.block_dv) > 192 else _STRIPS)
    }
    best = min(costs, key=costs.__getitem__)
    return (best, costs[best]) if costs[best] < _WORTH_PACKING * alone else (config.block_m, alone)


def with_pack_gqa(config: ForwardTiles, strip: int) -> ForwardTiles:
    """The configuration with pack_gqa, in boxes of 64 columns."""
    cols = min(config.out_cols, 64)
    return _variant(config, strip=strip, out_cols=cols, out_stages=config.out_stages * config.out_cols // cols)


def choose(
    problem: Problem, score_bytes: tuple[int, int] | None = None, rows: int | None = None, most_warpgroups: int = 3
) -> ForwardTiles:
    """The configuration of a problem, from its head_dims, the kind of mask and the lengths.

    A row's result depends on the widths, ``block_m`` and ``block_n`` alone, the same for all calls of two head_dims
    with the same of bias and mask: each row meets the same blocks of keys in the same order, and one that is masked for
    all of a row adds exact zeros. So the choice may differ between a sequence alone and in a batch, packed or dense,
    and the bits do not.

    Args:
        problem: A call.
        score_bytes: What TMA can read of biases and masks, as in ``ForwardTiles``; by default all, rows of their own.
        rows: Rows of the queries' tensor; by default all packed sequences are taken for long ones.
        most_warpgroups: Warpgroups for which there are registers.
    """
    problem = by_bits(problem)
    rows = problem.seqlen_q * (problem.batch if problem.varlen else 1) if rows is None else rows
    dims = widths(problem.head_dim, problem.head_dim_v)
    config = _two_warpgroups_of(problem, dims)
    bias_bytes = 0 if problem.bias_dtype is None else problem.bias_dtype.itemsize
    takes_more = (
        has_slope(problem) or is_expensive(problem) or (problem.softcap > 0 and problem.score_function is not None)
    )
    if takes_more or (problem.listed and dims == (128, 128) and _loads_by_key(problem.mask_function)):
        config = _variant(two_warpgroups(*dims, 64), pingpong=config.pingpong)
    if problem.mask or bias_bytes:
        # Their elements take registers: one of them leaves room for 128 keys a block, both for 64.
        block_n = 64 if max(dims) > 128 or (problem.mask and bias_bytes) or takes_more else 128
        score_bytes = (bias_bytes + problem.mask, 0) if score_bytes is None else score_bytes
        pingpong = dims == (256, 256) and score_bytes[0] >= bias_bytes > 0
        config = _variant(two_warpgroups(*dims, block_n, score_bytes), pingpong=pingpong)
    config = _of_small_blocks(problem, dims) or _of_short_packed(problem, dims) or config
    is_causal, has_left = problem.band.right is not None, problem.band.left is not None or problem.intervals
    is_listed, is_short, ways = problem.listed != (), problem.seqlen_q <= SHORT, []
    if dims == (64, 64):
        # The third warpgroup leaves 160 registers a thread, too few for wider loop bodies: they would spill. A bias
        # leaves them room for one buffer; two warpgroups with two take less time. No list is of blocks of 192 rows.
        loads_score_tensors = bias_bytes > 0 or (problem.mask and config.score_stages == 0)
        wide = problem.softcap > 0 or has_left or loads_score_tensors or config.block_n < 128 or is_listed
        wide = wide or problem.score_function is not None or problem.dropout_p > 0 or config.programs > 1
        if not wide and most_warpgroups == 3:
            ways.append(three_warpgroups_64(config.score_bytes))
    strip, least = strip_and_cost(problem, config, rows)
    for other in ways:
        other_strip, other_cost = strip_and_cost(problem, other, rows)
        if other_cost < least:
            config, strip, least = other, other_strip, other_cost
        elif problem.cached:
            # Timed so: over a cache two warpgroups have run only with the strip that suits three.
            strip = other_strip
    if strip < config.block_m:
        config = with_pack_gqa(config, strip)
    if is_causal and is_short and dims == (64, 64) and not problem.cached:
        # With few blocks a tile, the overlap makes both warpgroups wait on each other; over a cache it pays even so.
        config = _variant(config, overlap=False)
    if problem.varlen:
        # With these, the scheduler has no registers for a counter (see ``kernel``).
        is_fixed = has_left or problem.softcap > 0
    else:
        is_counted = has_left or is_listed or problem.cached or dims == (64, 64)
        is_fixed = is_causal and not is_counted and problem.seqlen_q > (SHORT if max(dims) <= 128 else 2 * SHORT)
    if not is_fixed:
        # A tile found ahead is one that no idle program can take. But the shortest take less time than finding one.
        # Packed tiles over a cache are found when a producer asks.
        if problem.varlen and problem.cached:
            ahead = 2
        elif min(problem.seqlen_q, 2 * problem.seqlen_k) <= SHORT // 2 and max(dims) <= 128:
            ahead = 3 if is_causal else 4
            is_plain = config.num_warpgroups == 2 and not (problem.varlen or config.score_stages)
            if config.shared_bytes + 256 * config.block_d <= SHARED_BYTES and problem.band.unbounded and is_plain:
                config = _variant(config, q_stages=3)
        else:
            ahead = 3 if is_causal and is_short and dims == (128, 128) else 2
        config = _variant(config, dynamic=True, tile_stages=ahead)
    for out_cols in (64, 32) if problem.alibi else ():
        # Room for ``mods.AlibiByMma``: 32 bytes a key, and some to align it.
        if config.shared_bytes + 40 * config.block_n > SHARED_BYTES:
            config = _variant(config, out_cols=min(config.out_cols, out_cols), out_stages=1)
    return config


def _of_short_packed(problem: Problem, dims: tuple[int, int]) -> ForwardTiles | None:
    """``ONE_WARPGROUP_64`` for packed sequences with few blocks of keys a tile, or None.

    Two programs overlap such tiles better than one. Nothing that takes more registers or buffers goes with it.
    """
    p = problem
    is_short = p.varlen and not p.cached and p.group_size == 1 and max(p.seqlen_q, p.seqlen_k) <= SHORT_PACKED
    takes_more = p.mask or p.bias_dtype is not None or p.alibi or p.intervals or p.listed != () or p.softcap > 0
    takes_more = takes_more or p.band.left is not None or p.dropout_p > 0
    takes_more = takes_more or p.score_function is not None or p.mask_function is not None
    return ONE_WARPGROUP_64 if dims == (64, 64) and is_short and not takes_more else None


def _of_small_blocks(problem: Problem, dims: tuple[int, int]) -> ForwardTiles | None:
    """The configuration for lists of blocks that 128 does not divide, where rows of one list share a tile; or None."""
    if not any(n % 128 for n in problem.listed[:2]):
        return None
    return one_warpgroup(*dims) if problem.listed[0] % 128 else two_warpgroups(*dims, 64)


def _two_warpgroups_of(problem: Problem, dims: tuple[int, int]) -> ForwardTiles:
    """``TWO_WARPGROUPS``; at head_dim 128 one warpgroup draws what is dropped while the other multiplies.

    Long calls without a mask or anything else have registers for queries; up to 80 columns that is not timed.
    """
    config, p = TWO_WARPGROUPS[dims], problem
    if dims == (96, 128) and p.head_dim > 80 and p.seqlen_q > SHORT and p.band.unbounded:
        takes_more = p.softcap > 0 or p.alibi or p.intervals or p.listed or p.dropout_p > 0 or p.cached
        has_functions = p.score_function is not None or p.mask_function is not None
        config = config if takes_more or has_functions else HELD_96
    return _variant(config, pingpong=True) if problem.dropout_p > 0 and dims == (128, 128) else config


def has_slope(problem: Problem) -> bool:
    """Whether a user's score mod is more than a sum: what decides tiles and bits is its graph alone."""
    key = problem.score_function
    return key is not None and not key.graph.is_const(key.graph.slope, 1.0)


def is_expensive(problem: Problem) -> bool:
    """Whether users' functions load something for each pair or compute much for it, or twice for each key.

    Not what is read from a table of distances, which takes an address for each diagonal of a block. With lists a mask's
    loads are of partial blocks alone, and blocks of fewer keys cost the others more.
    """
    of_keys = 0
    for graph in [key.graph for key in (problem.score_function, problem.mask_function) if key is not None]:
        given = tabulated(graph) if not problem.cached else ()
        for n in graph.needed([graph.result, *(() if graph.slope is None else (graph.slope,))], given):
            node = graph.nodes[n]
            if n not in given and (node.op == "load" or node.op in EXPENSIVE):
                inputs = {graph.nodes[x].op for x in graph.needed([n])}
                is_rare = node.op == "load" and graph.what == "mask" and problem.listed != ()
                if {"i", "j"} <= inputs and not is_rare:
                    return True
                of_keys += node.op != "load" and "j" in inputs
    return of_keys > 1


def _loads_by_key(function: Any) -> bool:
    """Whether a user's mask loads what keys alone decide, as a mask of documents does: 128 a block take registers."""
    if function is None:
        return False
    graph = function.graph
    inputs = [{graph.nodes[x].op for x in graph.needed([n])} for n, each in enumerate(graph.nodes) if each.op == "load"]
    return any("j" in each and "i" not in each for each in inputs)


@functools.cache
def _variant(config: ForwardTiles, **changes: Any) -> ForwardTiles:
    """``replace``, cached, since its checks take longer than all else that a new length costs here."""
    return replace(config, **changes)


def by_bits(problem: Problem) -> Problem:
    """The call without its mask's function where lists have bits of what that keeps."""
    return problem.but(mask_function=None) if problem.has_bits else problem
