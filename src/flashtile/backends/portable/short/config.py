"""Which packed calls have sequences short enough for one tile each, and that tile."""

from __future__ import annotations

from flashtile.backends.portable.config import PortableTiles, padded
from flashtile.call.problem import Problem

# Rows and keys of the longest sequence: a count, not raced yet. A sequence of 16 rows costs Hopper's other backward a
# tile of 128 rows and 128 keys, 10.5 MFLOP a head of 64 columns, and sums of dq of 128 rows, 32 KB that are zeroed,
# added to and read again. This one moves the sequence's own eight tensors, 16 KB, and its products take less time than
# that. From 128 rows on the other pads nothing.
MOST = 64
# Programs of query heads one after another: with fewer than multiprocessors, others split a group's heads.
FEWEST = 132


def choose(problem: Problem) -> PortableTiles:
    """The tile of a call's sequences, the same for all; a warp has 16 rows of up to 64 columns."""
    rows = padded(max(problem.seqlen_q, problem.seqlen_k))
    wide = max(problem.head_dim, problem.head_dim_v) > 64
    return PortableTiles(rows, rows, min(8, rows // 16 * (1 + wide)), 1)


def is_short(problem: Problem) -> bool:
    """Whether one program has a whole sequence, and nothing is asked that it does not compute.

    Not where bits must repeat, as they are then a sequence's own, whatever the longest of its batch.
    """
    p = problem
    if not p.varlen or max(p.seqlen_q, p.seqlen_k) > MOST or max(p.head_dim, p.head_dim_v) > 128 or p.batch == 0:
        return False
    if p.group_size > 1 and p.batch * p.num_heads_kv < FEWEST:
        return False
    others = p.bias_dtype is not None or p.mask or p.intervals or p.listed != () or p.origins or p.dropout_p > 0
    others = others or p.score_function is not None or p.mask_function is not None or p.grads.sinks
    wanted = p.grads.q and p.grads.k and p.grads.v and p.grad_dtype == p.dtype
    return wanted and not others and not p.deterministic
