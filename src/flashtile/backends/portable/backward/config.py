"""The backward's tiles, and which kernels compute dk and dv."""

from __future__ import annotations

from typing import Literal

from flashtile.backends.gpu.trial import on_trial
from flashtile.backends.portable import config, tuned
from flashtile.backends.portable.config import PortableTiles
from flashtile.call.problem import Problem

# Enough programs for a GPU of some 130 multiprocessors. Not by the device's own number: sums are split by it, and their
# bits would change from device to device.
PROGRAMS = 256
# Float32 numbers of dbias, 24 MB: more do not stay in L2, and adds would read and write main memory.
MOST_SUMS = 6 * 2**20
# dkdv computes dk and dv; rows may have the kernels dk and dv in its place, which compute one each.
Kernel = Literal["dkdv", "dk", "dv", "dq", "dbias", "diagonals"]


def choose(problem: Problem, kernel: Kernel, arch: str | None = None) -> PortableTiles:
    """The tiles of a kernel for a problem.

    Args:
        problem: The call.
        kernel: Which kernel; dk and dv only where ``key_kernels`` names them, dkdv only where not.
        arch: Architecture to use instead of the problem's device.
    """
    return tuned.choose(problem, kernel, arch)


def key_kernels(problem: Problem, arch: str | None = None) -> tuple[Kernel, ...]:
    """The kernels that compute dk and dv: one for both, or one each where the tables have no row for both.

    Separate kernels compute the scores twice, but each holds half the accumulators, so its tiles can be larger.
    """
    held = {"dkdv", "dv"} & dict(on_trial()).keys()
    together = "dkdv" in held if held else config.from_rows(problem, "dkdv", arch) is not None
    return ("dkdv",) if together else ("dk", "dv")


def wanted_kernels(problem: Problem) -> dict[Kernel, tuple[bool, bool]]:
    """The kernels of dk and dv that a call needs, and for each whether it computes dk, and whether dv."""
    wanted = problem.grads
    each = {name: (wanted.k and name != "dv", wanted.v and name != "dk") for name in key_kernels(problem)}
    return {name: computes for name, computes in each.items() if any(computes)}


def may_add_bias(problem: Problem) -> bool:
    """Whether the kernel of dq may compute dbias too, by atomic adds in an order that is not repeatable."""
    return problem.grads.bias and problem.grads.q and not problem.deterministic


def heads_per_split(problem: Problem) -> int | None:
    """How many query heads of a group one program sums for dk and dv; None for all.

    Few key heads would leave multiprocessors idle: with gqa_splits a sequence has some 256 programs.
    """
    p = problem
    programs = p.num_heads_kv * -(-p.seqlen_k // 64)
    heads = -(-p.group_size // -(-PROGRAMS // max(1, programs)))
    return heads if heads < p.group_size else None
