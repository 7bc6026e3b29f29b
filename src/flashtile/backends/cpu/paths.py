"""Chooses how each sequence of a call is computed: by PyTorch's kernel or by tiles, and how many at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.backends.cpu import plan
from flashtile.backends.cpu.plan import DenseSequences, KeptPairs, Rectangle
from flashtile.call.problem import Problem, Tensors
from flashtile.core.masks import Band

# The most scores of several sequences at once, which fit a core's cache; the most added numbers for PyTorch's kernel.
MANY_NUMBERS, ADDED_NUMBERS = 2**18, 2**22
# With fewer keys than this the kernel treats a row with only NaN as scores as a row without keys.
FEW_KEYS = 16
# Above this the kernel's lse, in one number, is off by more than 2**-15, and so are its results.
LARGE_LSE = 2.0**9


@dataclass(frozen=True, eq=False)
class Path:
    """A sequence, and the way in which it is computed.

    Attributes:
        seq: The sequence, or several at once.
        blocks: Blocks of rows, each as its rectangles.
        kernel: Whether PyTorch's kernel computes it; otherwise tiles do.
    """

    seq: DenseSequences
    blocks: list[list[Rectangle]]
    kernel: bool

    def whole(self) -> Rectangle | None:
        """The rectangle, if it is the only one and covers all scores of a whole dense call."""
        rectangles = self.blocks[0] if len(self.blocks) == 1 else []
        everything = (0, self.seq.seqlen_q), (0, self.seq.seqlen_k)
        if len(rectangles) != 1 or (rectangles[0].rows, rectangles[0].keys) != everything:
            return None
        return rectangles[0] if self.seq.place == (slice(None),) else None


def kernel_fits(problem: Problem) -> bool:
    """Whether PyTorch's kernel can compute this problem's scores, given tiles of biases.

    The kernel multiplies -inf by the scale, so the scale must be positive.
    """
    plain = (
        problem.score_function is None and problem.softcap == 0 and problem.dropout_p == 0 and problem.softmax_scale > 0
    )
    return plain and problem.head_dim == problem.head_dim_v


def are_large(lse: Tensor) -> Tensor:
    """The rows with scores too large for the lse of PyTorch's kernel; rows without keys are not among them."""
    size = lse.abs()
    return (size > LARGE_LSE) & (size != torch.inf)


def adds_tiles(problem: Problem) -> bool:
    """Whether something besides the band is added to the scores."""
    has_tensor = problem.mask or problem.alibi or problem.bias_dtype is not None or problem.intervals
    return has_tensor or problem.mask_function is not None or problem.listed != ()


def at_once(problem: Problem, tensors: Tensors, kernel: bool, rows: int, keys: int) -> int:
    """The number of sequences, of ``rows`` rows and ``keys`` keys each, to compute at once, so that tiles stay small.

    Each sequence is computed as it would be alone: if its contents decide, as intervals and lists do where rectangles
        are
    cut, one is computed at a time.
    """
    t = tensors
    if kernel and not adds_tiles(problem):
        return problem.batch
    if problem.intervals or problem.listed or problem.origins:
        return 1
    if rows >= plan.tile_rows(problem.num_heads_q) + plan.SHORTEST_ROWS or keys > plan.TILE_KEYS:
        return 1
    numbers = problem.num_heads_q * max(rows * keys, 1)
    if not kernel:
        return MANY_NUMBERS // numbers
    added = [plan.four_dimensional(x).shape[:2] for x in (t.attn_mask, t.attn_bias) if x is not None]
    slopes_differ = t.alibi_slopes is not None and t.alibi_slopes.dim() == 2
    by_head = t.alibi_slopes is not None or problem.mask_function is not None or any(heads > 1 for _, heads in added)
    if not slopes_differ and problem.mask_function is None and all(batch == 1 for batch, _ in added):
        return problem.batch
    return ADDED_NUMBERS // (numbers if by_head else max(rows * keys, 1))


def paths(
    problem: Problem, tensors: Tensors, kernel: bool, *, keep_local: bool = False, first: int = 0
) -> Iterator[Path]:
    """The path of every sequence of a call.

    Args:
        problem: The call.
        tensors: Its tensors.
        kernel: Whether PyTorch's kernel can compute the call.
        keep_local: Whether a NaN of k must reach the rows that keep its key, and no other, as in the forward.
        first: The number of the first sequence.

    Yields:
        Paths; together they hold every row that keeps a key.
    """
    checks = kernel and keep_local
    is_finite = functools.cache(lambda: plan.all_finite(tensors.q, tensors.k))
    tile_rows = plan.tile_rows(problem.num_heads_q)
    added = adds_tiles(problem)

    def most(rows: int, keys: int) -> int:
        count = at_once(problem, tensors, kernel, rows, keys)
        # The contents of a sequence with a NaN decide how it is computed.
        is_odd = checks and count > 1 and _blocks(problem.band, rows, keys, tile_rows if added else None, added)[1]
        return 1 if is_odd and not is_finite() else count

    for seq in plan.sequences(problem, tensors, most, first):
        if kernel and not added:
            blocks, is_odd = _blocks(problem.band, seq.seqlen_q, seq.seqlen_k, None, False)
        else:
            blocks = list(plan.blocks_of(problem.band, seq, tile_rows=tile_rows))
            is_odd = _hides_nan(blocks, added)
        if not (checks and is_odd) or is_finite() or plan.all_finite(seq.q, seq.k):
            yield Path(seq, blocks, kernel)
        else:
            yield Path(seq, list(plan.blocks_of(problem.band, seq, tile_rows=tile_rows)), False)


@functools.lru_cache(maxsize=256)
def _blocks(band: Band, rows: int, keys: int, tile_rows: int | None, added: bool) -> tuple[list[list[Rectangle]], bool]:
    """Blocks of whole sequences of these lengths, and whether they may hide a NaN."""
    blocks = list(plan.row_blocks(band, rows, keys, tile_rows=tile_rows))
    return blocks, _hides_nan(blocks, added)


def _hides_nan(blocks: list[list[Rectangle]], added: bool) -> bool:
    """Whether PyTorch's kernel may lose a NaN score, or spread it unnoticed to rows that mask it.

    The kernel adds -inf to masked pairs, and NaN plus -inf is NaN; tiles use a select. If something is ``added`` to
    the scores, the forward looks for NaN in lse.
    """
    rectangles = [rectangle for block in blocks for rectangle in block]
    few_keys = any(r.keys[1] - r.keys[0] < FEW_KEYS for r in rectangles)
    return few_keys or (not added and any(r.kind is KeptPairs.EDGE for r in rectangles))
