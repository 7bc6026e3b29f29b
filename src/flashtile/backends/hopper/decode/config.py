"""The tiles of the decode kernel for wide groups."""

from __future__ import annotations

from flashtile.backends.gpu.decode.config import DecodeTiles, SplitRule, hopper_rows
from flashtile.backends.gpu.trial import tried
from flashtile.call.problem import Problem


def choose(problem: Problem) -> DecodeTiles:
    """The tiles of a call that the kernel covers.

    Measured: docs/tuning-notes.md. Above long_keys 64 splits beat 32 for one sequence and lose for many.
    """
    if (held := tried("decode")) is not None:
        return held
    dim, block_m = problem.head_dim, 64 if hopper_rows(problem) <= 64 else 128
    block_n, stages, run = {64: (128, 4, 4), 128: (64, 5, 4), 256: (64, 2, 1)}[dim]
    programs = 8 * problem.num_heads_kv
    rule = SplitRule(programs, fewest_keys=128, most_keys=512, most_slots=8192, run=run, long_keys=2**16)
    return DecodeTiles(block_m, block_n, 4, stages, 1, rule, specialised=True)
