"""Tile sizes of the Hopper backward: what they must fit into, and which are chosen. Measured: docs/tuning-notes.md."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashtile.backends.hopper.forward.config import (
    PRODUCER_REGISTERS,
    SHARED_BYTES,
    WARPGROUP_REGISTERS,
    ForwardTiles,
    by_bits,
    is_expensive,
    narrowest,
    shared_bytes_of,
)
from flashtile.backends.hopper.forward.config import width as width_of_tiles
from flashtile.call.problem import Problem

PART_KEYS = 64


def box_cols(width: int) -> int:
    """Columns of the narrowest part of a tile; see ``dq.WIDEST``."""
    return min(narrowest(width), 128)


@dataclass(frozen=True, kw_only=True)
class PairTiles:
    """What two programs of a cluster have that share a pass over the rows: ``pairs``.

    Attributes:
        held: Columns of values that the second warpgroup holds in registers, for want of shared memory; 0 or 64.
        dq_tma: As in ``BackwardTiles``.
        registers: What setmaxnreg gives a thread of the second warpgroup; the first has what the others leave.
        dq_registers: The same for the third, which adds dq.
    """

    held: int = 0
    dq_tma: bool = False
    registers: int
    dq_registers: int

    def shared_bytes(self, block_d: int) -> int:
        """Shared memory of the tiles, and 2 KiB for barriers, the tile's record and what the compiler needs."""
        half = block_d // 2
        blocks = half // PART_KEYS if half % PART_KEYS == 0 else 2 * (half // PART_KEYS + 1)
        keys = PART_KEYS * (2 * block_d - self.held + blocks * PART_KEYS)
        rows = 2 * PART_KEYS * 2 * block_d
        return 2 * (keys + rows + 3 * PART_KEYS * PART_KEYS) + 4 * self.dq_tma * PART_KEYS * half + 2048


@dataclass(frozen=True, kw_only=True)
class BackwardTiles:
    """One configuration of the backward.

    Two or three warpgroups compute, a warp loads.

    Attributes:
        block_d: Columns of a tile of queries or keys: head_dim, padded to one of the forward's WIDTHS; TMA fills the
            difference with zeros.
        block_dv: The same of head_dim_v, for values and dout.
        block_m: Queries a step.
        by_gradient: Whether both warpgroups see the same 64 keys and one owns their dv, the other their dk;
            otherwise each has 64 keys of its own, and both gradients of them.
        stages: Buffers for queries with what belongs to their rows, and as many for dout.
        k_stages: Buffers for a tile's keys: with two, the next tile's are loaded under this one.
        v_stages: Buffers for a tile's values, which are free a little before a tile's end.
        ds_stages: Buffers for the gradients of the scores, which the warpgroups exchange for dq, and as many for
            the probabilities that one hands over.
        dq_width: Columns of dq that a warpgroup computes at once.
        dq_tma: Whether dq is added by TMA, through shared memory, instead of from registers. Sums in a fixed order are
            always added from registers.
        registers: What setmaxnreg gives a computing thread.
        dq_registers: The same for a third warpgroup, which computes dq; 0: there is none, and the two compute dq.
        alone: Whether one warpgroup has 64 keys and both gradients of them, and dq is of ``by_rows``; two programs then
            share a multiprocessor.
        pairs: What pairs of programs have in place of this, each program as ``by_gradient`` says; None: there are none.
    """

    block_d: int
    block_dv: int
    block_m: int = 64
    by_gradient: bool = False
    stages: int = 2
    k_stages: int = 2
    v_stages: int = 1
    ds_stages: int = 2
    dq_width: int = 64
    dq_tma: bool = False
    registers: int = 240
    dq_registers: int = 0
    alone: bool = False
    pairs: PairTiles | None = None

    def __post_init__(self) -> None:
        if self.block_m not in (64, 128):
            raise ValueError(f"a row block has 64 or 128 queries: {self}")
        if self.ds_stages < 2:
            raise ValueError(f"a step writes its dscores before the last ones are read: {self}")
        share = self.block_d if self.block_m == 128 else self.block_d // 2
        if self.dq_registers == 0 and not self.alone and (share % self.dq_width or 128 % self.dq_width):
            raise ValueError(f"a warpgroup has {share} columns of dq: {self}")
        if self.by_gradient and self.dq_registers == 0:
            raise ValueError(f"a warpgroup with one gradient has no registers for dq: {self}")
        if self.dq_registers > 0 and (self.block_m != 64 or narrowest(self.dq_width) != self.dq_width):
            raise ValueError(f"a third warpgroup adds dq of 64 queries: {self}")
        if (self.by_gradient or self.dq_registers > 0) and self.alone:
            raise ValueError(f"one warpgroup has both gradients, and no dq: {self}")
        if 2 * self.registers + self.dq_registers + PRODUCER_REGISTERS * self.programs > WARPGROUP_REGISTERS:
            raise ValueError(f"more registers than there are: {self}")
        if self.shared_bytes > shared_bytes_of(self.programs):
            raise ValueError(f"more shared memory than there is, {self.shared_bytes} bytes: {self}")
        if self.pairs is not None and self.pairs.shared_bytes(self.block_d) > SHARED_BYTES:
            raise ValueError(f"pairs of programs need more shared memory than there is: {self}")

    @property
    def block_n(self) -> int:
        """Keys of a tile."""
        return PART_KEYS if self.by_gradient or self.alone else 2 * PART_KEYS

    @property
    def programs(self) -> int:
        """Programs that share a multiprocessor."""
        return 2 if self.alone else 1

    @property
    def max_registers(self) -> int:
        """What the compiler gives every thread at the start: all of them together fill the register file."""
        return 128 if self.dq_registers or self.alone else 168

    @property
    def out_cols(self) -> int:
        """Columns of the buffers through which dk and dv leave, half as many in float32."""
        narrow = min(box_cols(self.block_d), box_cols(self.block_dv))
        return min(narrow, self.block_m) if self.by_gradient or self.alone else narrow

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the tiles, and 1 KiB for barriers, tile records and what the compiler needs."""
        keys = self.block_n * (self.k_stages * self.block_d + self.v_stages * self.block_dv)
        rows = self.stages * self.block_m * (self.block_d + self.block_dv)
        dscores = self.ds_stages * self.block_n * self.block_m * (not self.alone)
        # What leaves one gradient at a time leaves through the probabilities' or the dscores' buffers.
        out = (
            PART_KEYS * self.out_cols
            if self.alone
            else self.block_n * (self.ds_stages * self.block_m if self.by_gradient else min(self.block_d, 128))
        )
        dq = (1 if self.dq_registers else 2) * 64 * self.dq_width if self.dq_tma else 0
        return 2 * (keys + rows + dscores + out) + 4 * dq + self.stages * 2 * self.block_m * 4 + 1024

    def __str__(self) -> str:
        dims = f"{self.block_d}" if self.block_d == self.block_dv else f"{self.block_d} and {self.block_dv}"
        programs = "" if self.pairs is None else " by each of a pair of programs"
        return f"tiles {self.block_m} x {self.block_n}{programs}, head_dim {dims}, {self.stages} stages"


# 128 queries: a left operand read from shared memory then serves 128 columns and not 64.
WIDE_64 = BackwardTiles(block_d=64, block_dv=64, block_m=128, v_stages=2)
BY_TMA_64 = replace(WIDE_64, k_stages=1, v_stages=1, dq_tma=True)
NARROW_64 = BackwardTiles(block_d=64, block_dv=64, block_m=64, stages=3, v_stages=2, dq_width=32)
# A third warpgroup for dq needs few registers: 64 beat 80. Head_dim 96 takes less time in parts of 64 and
# 32 than in 128 columns or with a gradient a warpgroup.
BASE_96 = BackwardTiles(block_d=96, block_dv=96, stages=3, ds_stages=3, registers=208, dq_registers=64)
BY_TMA_96 = replace(BASE_96, ds_stages=2, dq_tma=True)
# Shared memory has room for no buffer of the next tile's keys.
ALONE = {
    dim: BackwardTiles(block_d=dim, block_dv=dim, alone=True, k_stages=1, stages=3 if dim == 64 else 2, registers=224)
    for dim in (64, 96, 128)
}
BASE_128 = BackwardTiles(block_d=128, block_dv=128)
BY_GRADIENT_128 = replace(BASE_128, by_gradient=True, stages=3, v_stages=2, registers=208, dq_registers=64)
BASE_160 = replace(BY_GRADIENT_128, block_d=160, block_dv=160, v_stages=1)
# A second buffer for keys is worth more than a third one for queries.
BASE_192 = replace(BASE_160, block_d=192, block_dv=192, stages=2, registers=192)
BASE_192_128 = replace(BASE_160, block_d=192, block_dv=128)
# Twice the keys a tile add half as often to dq, which bounds the kernels with 64: that pays, but not in a fixed order
# without a mask.
KEYS_192_128 = BackwardTiles(block_d=192, block_dv=128, k_stages=1, dq_width=32)
BASE_256 = replace(BASE_192, block_d=256, block_dv=256, k_stages=1, registers=208)
PAIRS_192 = replace(BASE_192, pairs=PairTiles(dq_tma=True, registers=184, dq_registers=120))
PAIRS_256 = replace(BASE_256, pairs=PairTiles(held=64, registers=216, dq_registers=64))
# Rows and keys from which on a pair gains more than its start takes.
LONG = 8192
# Bias and mask take registers in the first warpgroup, which has what the others leave.
SCORES_256 = replace(BASE_256, registers=192)
THREE_STAGES_128 = replace(BASE_128, stages=3, k_stages=1)
BY_TMA_128 = replace(BASE_128, k_stages=1, dq_tma=True)
# Up to this length a tile has few steps, and loading the next tile's keys under it is worth most. Beyond it a third
# buffer of queries is; under a causal mask, for packed sequences and lists with bits, adding to dq by TMA, which frees
# registers early.
SHORT = 1024


def in_chain(config: BackwardTiles) -> BackwardTiles:
    """The configuration of a chain's calls in its place, which take less time with it."""
    of_one = {BY_TMA_96: BASE_96, BY_TMA_128: THREE_STAGES_128, PAIRS_192: BASE_192, PAIRS_256: BASE_256}
    return of_one.get(config, config)


def choose(problem: Problem) -> BackwardTiles:
    """The configuration of a problem, from head_dims, transform, mask and length: never from the batch."""
    problem = by_bits(problem)
    width = width_of_tiles(max(problem.head_dim, problem.head_dim_v))
    reads_score_tensors = problem.mask or problem.bias_dtype is not None
    two_sided = problem.alibi and (problem.band.right is None or problem.band.right > 0)
    has_functions = problem.score_function is not None or problem.mask_function is not None
    if any(n % 128 for n in problem.listed[:2]) and width <= 128:
        return of_small_blocks(problem, width)
    if width == 64:
        # Softcap, bias, mask, dropout, rows' intervals, distances on both sides of the diagonal and users' score mods
        # take registers of their own.
        reads_intervals = problem.row_keys and not problem.mirrored
        takes_more = problem.softcap > 0 or reads_score_tensors or reads_intervals or two_sided
        takes_more = takes_more or problem.dropout_p > 0 or problem.score_function is not None or is_expensive(problem)
        of_lists = BY_TMA_64 if problem.has_bits and problem.seqlen_q > SHORT else WIDE_64
        return NARROW_64 if takes_more else of_lists
    if width == 192 and problem.head_dim_v <= 128:
        takes_more = problem.softcap > 0 or reads_score_tensors or problem.alibi or has_functions
        return BASE_192_128 if takes_more or (problem.deterministic and problem.band.unbounded) else KEYS_192_128
    if width > 128:
        takes_more = reads_score_tensors or has_functions
        if width != 160 and not takes_more and _in_pairs(problem):
            return PAIRS_192 if width == 192 else PAIRS_256
        wide = SCORES_256 if takes_more else BASE_256
        return BASE_160 if width == 160 else BASE_192 if width == 192 else wide
    if reads_score_tensors or (width == 96 and two_sided) or (problem.softcap > 0 and problem.dropout_p > 0):
        return BY_GRADIENT_128
    if width == 96:
        return BASE_96 if problem.deterministic else BY_TMA_96
    if problem.seqlen_q <= SHORT or problem.softcap > 0:
        return BASE_128
    if problem.deterministic or (problem.band.right is None and not (problem.varlen or problem.has_bits)):
        return THREE_STAGES_128
    return BY_TMA_128


@dataclass(frozen=True, kw_only=True)
class RowTiles(ForwardTiles):
    """The tiles of ``by_rows``, which has dout beside the queries."""

    num_warpgroups: int = 1
    block_n: int = PART_KEYS
    q_stages: int = 1
    overlap: bool = False
    dynamic: bool = True
    tile_stages: int = 2
    programs: int = 2
    registers: int = 224
    max_registers: int = 128

    @property
    def shared_bytes(self) -> int:
        """As the forward's, with dout."""
        return super().shared_bytes + 2 * self.block_m * self.block_dv


def rows_tiles(problem: Problem) -> RowTiles:
    """The tiles of a call that is ``ALONE``."""
    width = width_of_tiles(max(problem.head_dim, problem.head_dim_v))
    cols = min(narrowest(width), 64)
    return RowTiles(block_d=width, block_dv=width, out_cols=cols, stages=4 if width == 64 else 2)


def of_small_blocks(problem: Problem, width: int) -> BackwardTiles:
    """Tiles that divide listed blocks of 64 rows or keys; wider ones than 128 columns have such tiles anyway."""
    if is_alone(problem):
        return ALONE[width]
    return replace(BY_GRADIENT_128, block_d=width, block_dv=width)


def is_alone(problem: Problem) -> bool:
    """Whether programs with rows of their own compute dq: of plain scores of lists of blocks of 64 rows or keys."""
    p = problem
    if not any(n % 128 for n in p.listed[:2]) or max(p.head_dim, p.head_dim_v) > 128 or p.grad_dtype != p.dtype:
        return False
    takes_more = p.softcap > 0 or p.mask or p.bias_dtype is not None or p.alibi or p.dropout_p > 0
    return not takes_more and p.score_function is None and p.mask_function is None


def _in_pairs(problem: Problem) -> bool:
    """Whether pairs of programs have all that a call of 192 or 256 columns needs, and take less time.

    Heads of queries are not split among tiles of pairs, so calls of few key heads are not for them.
    """
    p = problem
    others = p.varlen or p.listed or p.intervals or p.deterministic or p.band.left is not None or p.band.chunk
    others = others or p.dropout_p > 0
    wanted = p.grads.q and p.grads.k and p.grads.v and p.grad_dtype == p.dtype
    has_heads = p.group_size == 1 or p.num_heads_kv >= 4
    return bool(wanted and has_heads and not others and min(p.seqlen_q, p.seqlen_k) >= LONG)
