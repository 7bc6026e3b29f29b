"""How each sequence of a call is computed: by PyTorch's kernel or by tiles, the batch at once or one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.backends.cpu import plan
from flashtile.backends.cpu.plan import Kind, Rectangle, Sequence
from flashtile.call.problem import Problem, Tensors

# Below this many rows the kernel's scratch memory is not a multiple of a cache line, and the rounding of its matrix
# products depends on where a thread's part begins, so results would depend on the number of sequences in the call.
FEW_ROWS = 32
# Below this many keys the kernel treats a row whose scores are all NaN as one without keys.
FEW_KEYS = 16
# Beyond this the kernel's lse, in one number, is off by more than 2**-15, and so are the shares that it gives.
LARGE_LSE = 2.0**9


@dataclass(frozen=True, eq=False)
class Path:
    """A sequence and how it is computed.

    Attributes:
        seq: The sequence, or the whole dense batch.
        blocks: Blocks of rows, each as its rectangles.
        kernel: Whether PyTorch's kernel computes it; else tiles.
    """

    seq: Sequence
    blocks: list[list[Rectangle]]
    kernel: bool

    def whole(self) -> Rectangle | None:
        """The rectangle, if it is the only one and covers a whole dense call."""
        rectangles = self.blocks[0] if len(self.blocks) == 1 else []
        everything = (0, self.seq.seqlen_q), (0, self.seq.seqlen_k)
        if len(rectangles) != 1 or (rectangles[0].rows, rectangles[0].keys) != everything:
            return None
        alone = self.seq.place == (slice(None),)
        return rectangles[0] if self.kernel and alone and not self.seq.has_tile_bias else None


def kernel_fits(problem: Problem) -> bool:
    """Whether PyTorch's kernel can compute this problem's scores, given tiles of biases.

    The kernel multiplies -inf by the scale, so the scale must be positive.
    """
    plain = (
        problem.score_function is None and problem.softcap == 0 and problem.dropout_p == 0 and problem.softmax_scale > 0
    )
    return plain and problem.head_dim == problem.head_dim_v


def has_large(lse: Tensor) -> bool:
    """Whether some row's scores are so large that PyTorch's kernel cannot hold their lse; of rows with keys."""
    return bool(((lse.abs() > LARGE_LSE) & (lse.abs() != torch.inf)).any())


def adds_tiles(problem: Problem) -> bool:
    """Whether something besides the band is added to the scores."""
    has_tensor = problem.mask or problem.alibi or problem.bias_dtype is not None or problem.intervals
    return has_tensor or problem.mask_function is not None or problem.listed != ()


def one_by_one(problem: Problem, kernel: bool) -> bool:
    """Whether a dense batch is computed one sequence at a time: to bound tiles, or for ``FEW_ROWS``."""
    return problem.batch > 1 and (not kernel or adds_tiles(problem) or problem.seqlen_q < FEW_ROWS)


def paths(
    problem: Problem, tensors: Tensors, kernel: bool, *, keep_local: bool = False, first: int = 0
) -> Iterator[Path]:
    """The path of every sequence of a call.

    Args:
        problem: The call.
        tensors: Its tensors.
        kernel: Whether PyTorch's kernel can compute the call.
        keep_local: Whether a NaN of k must reach the rows that keep its key, and no other, as in the forward.
        first: As which its first sequence counts.

    Yields:
        Paths; together they hold every row that keeps a key.
    """
    for seq in plan.sequences(problem, tensors, one_by_one=one_by_one(problem, kernel), first=first):
        path = _path(problem, seq, kernel, keep_local)
        if path.kernel or not kernel or len(seq.batch) <= 1:
            yield path
            continue
        for single in plan.sequences(problem, tensors, one_by_one=True, first=first):
            yield _path(problem, single, kernel, keep_local)


def _path(problem: Problem, seq: Sequence, kernel: bool, keep_local: bool) -> Path:
    rows = plan.tile_rows(problem.num_heads_q)
    tile_rows = rows if seq.has_tile_bias or not kernel else None
    blocks = list(plan.blocks_of(problem.band, seq, tile_rows=tile_rows))
    if not (kernel and keep_local):
        return Path(seq, blocks, kernel)
    rectangles = [rectangle for block in blocks for rectangle in block]
    few_keys = any(r.keys[1] - r.keys[0] < FEW_KEYS for r in rectangles)
    # The kernel adds -inf where a pair is masked, and NaN plus -inf is NaN; tiles use a select.
    added = seq.has_tile_bias or any(r.kind is Kind.EDGE for r in rectangles)
    if (few_keys or added) and not plan.all_finite(seq.q, seq.k):
        return Path(seq, list(plan.blocks_of(problem.band, seq, tile_rows=rows)), False)
    return Path(seq, blocks, True)
