"""Which packed calls have sequences short enough for one tile each, and that tile."""

from __future__ import annotations

from flashtile.backends.portable.config import PortableTiles, padded
from flashtile.call.problem import Problem

# Rows and keys of the longest sequence. With 16 rows this backward takes 0.11 of the time of Hopper's other one, which
# computes tiles of 128 rows and keys and zeroes and adds sums of dq for them; with 64 rows 0.6, with 128, which that
# one pads no more, 0.88. From 129 on sequences have several tiles.
MOST = 128
# Programs of query heads one after another: with fewer than multiprocessors, others split a group's heads.
FEWEST = 132


def choose(problem: Problem) -> PortableTiles:
    """The tile of a call's sequences, the same for all."""
    rows = padded(max(problem.seqlen_q, problem.seqlen_k))
    return PortableTiles(rows, rows, {16: 1, 128: 8}.get(rows, 4), 1)


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
