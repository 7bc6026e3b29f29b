"""Which way each sequence of a call goes: PyTorch's kernel or tiles, the batch at once or one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from flashtile.backends.cpu import plan
from flashtile.backends.cpu.plan import Kind, Rectangle, Sequence
from flashtile.problem import Problem, Tensors

# Under so many rows the kernel's scratch memory is no multiple of a cache line, and its matrix products round by where
# a thread's share begins: how many sequences share the call would show in the bits.
FEW_ROWS = 32
# Under so many keys the kernel takes a row whose scores are all NaN for one without keys.
FEW_KEYS = 16


@dataclass(frozen=True, eq=False)
class Path:
    """A sequence and how it is computed.

    Attributes:
        seq: The sequence, or the whole dense batch.
        blocks: Blocks of rows, each as its rectangles.
        kernel: By PyTorch's kernel; else by tiles.
        finite: Whether every input is known to be finite where something is masked; else products have to select.
    """

    seq: Sequence
    blocks: list[list[Rectangle]]
    kernel: bool
    finite: bool

    def whole(self) -> Rectangle | None:
        """The one rectangle that is the whole of a dense call, if it is."""
        rectangles = self.blocks[0] if len(self.blocks) == 1 else []
        everything = (0, self.seq.seqlen_q), (0, self.seq.seqlen_k)
        if len(rectangles) != 1 or (rectangles[0].rows, rectangles[0].keys) != everything:
            return None
        alone = self.seq.place == (slice(None),)
        return rectangles[0] if self.kernel and alone and not self.seq.has_tile_bias else None


def kernel_fits(problem: Problem) -> bool:
    """Whether PyTorch's kernel knows the scores of this problem, tiles of biases given.

    It multiplies -inf by the scale, so that scale has to be positive.
    """
    plain = problem.softcap == 0 and problem.dropout_p == 0 and problem.softmax_scale > 0
    return plain and problem.head_dim == problem.head_dim_v


def one_by_one(problem: Problem, kernel: bool) -> bool:
    """Whether the sequences of a dense batch go one by one: tiles are bounded for one, and few rows round by place."""
    tiled = not kernel or problem.mask or problem.alibi or problem.bias_dtype is not None
    return problem.batch > 1 and (tiled or problem.seqlen_q < FEW_ROWS)


def paths(
    problem: Problem,
    tensors: Tensors,
    kernel: bool,
    inputs: Callable[[Sequence], tuple[Tensor, ...]],
    *,
    most_rows: int | None = None,
) -> Iterator[Path]:
    """Every sequence of a call with its path.

    Args:
        problem: The call.
        tensors: Its tensors.
        kernel: Whether PyTorch's kernel can do what is asked, finite inputs given.
        inputs: The tensors of a sequence whose infinities and NaN must not spread.
        most_rows: Rows that PyTorch's kernel may get at once, None for any number.

    Yields:
        Paths; together they hold every row that keeps a key.
    """
    for seq in plan.sequences(problem, tensors, one_by_one=one_by_one(problem, kernel)):
        path = _path(problem, seq, kernel, inputs(seq), most_rows)
        if path.finite or len(seq.batch) <= 1:
            yield path
            continue
        for single in plan.sequences(problem, tensors, one_by_one=True):
            yield _path(problem, single, kernel, inputs(single), most_rows)


def _path(problem: Problem, seq: Sequence, kernel: bool, inputs: tuple[Tensor, ...], most_rows: int | None) -> Path:
    rows = plan.tile_rows(problem.num_heads_q)
    lengths = seq.seqlen_q, seq.seqlen_k
    tile_rows = rows if seq.has_tile_bias or not kernel else None
    blocks = list(plan.row_blocks(problem.band, *lengths, tile_rows=tile_rows, most_rows=most_rows))
    # A masked pair has probability 0, and 0 times NaN is NaN: what a row does not attend to would reach it.
    masked = seq.mask is not None or seq.bias is not None
    rectangles = [rectangle for block in blocks for rectangle in block]
    masked = masked or any(r.kind is not Kind.FULL for r in rectangles)
    trusted = not masked and all(r.keys[1] - r.keys[0] >= FEW_KEYS for r in rectangles)
    finite = trusted or plan.all_finite(*inputs)
    if kernel and not finite and not seq.has_tile_bias:
        blocks = list(plan.row_blocks(problem.band, *lengths, tile_rows=rows))
    return Path(seq, blocks, kernel and finite, finite)
