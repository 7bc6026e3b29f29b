"""The backward's tiles, and which kernels compute dk and dv."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from flashtile.backends.gpu.trial import on_trial
from flashtile.backends.portable import config
from flashtile.backends.portable.config import Config, Tables
from flashtile.backends.portable.tuned import select
from flashtile.call.problem import Problem

# Enough programs for a GPU of some 130 multiprocessors. Not by the device's own number: sums are split by it, and their
# bits would change from device to device.
PROGRAMS = 256
# Float32 numbers of dbias, 24 MB: more do not stay in L2, and adds would read and write main memory.
MOST_SUMS = 6 * 2**20
# dkdv computes dk and dv; a table may have the kernels dk and dv in its place, which compute one each.
Kernel = Literal["dkdv", "dk", "dv", "dq", "dbias", "diagonals"]


def choose(problem: Problem, kernel: Kernel, arch: str | None = None) -> Config:
    """The tiles of a kernel for a problem.

    Args:
        problem: The call.
        kernel: Which kernel; dk and dv only where ``key_kernels`` names them, dkdv only where not.
        arch: Architecture to use instead of the problem's device.
    """
    return select(problem, kernel, TABLES, arch)


def key_kernels(problem: Problem, arch: str | None = None) -> tuple[Kernel, ...]:
    """The kernels that compute dk and dv: one for both, or one each where the table has no tiles for both.

    Separate kernels compute the scores twice, but each holds half the accumulators, so its tiles can be larger.
    """
    arch = arch or config.arch_of(problem)
    tuned = dict(on_trial())
    if "dkdv" in tuned or "dv" in tuned:
        apart = "dkdv" not in tuned
    elif arch == "interpreter" or problem.dtype == torch.float32:
        apart = False
    else:
        apart = config.dim_of(problem) > max(TABLES[config.kind_of(problem, arch)]["dkdv"])
    return ("dk", "dv") if apart else ("dkdv",)


def may_add_bias(problem: Problem) -> bool:
    """Whether the kernel of dq may compute dbias too, by atomic adds, whose order is not repeatable."""
    return problem.grads.bias and problem.grads.q and not problem.deterministic


def heads_per_split(problem: Problem) -> int | None:
    """How many query heads of a group one program sums for dk and dv; None for all.

    Few key heads would leave multiprocessors idle: with gqa_splits a sequence has some 256 programs.
    """
    p = problem
    programs = p.num_heads_kv * -(-p.seqlen_k // 64)
    heads = -(-p.group_size // -(-PROGRAMS // max(1, programs)))
    return heads if heads < p.group_size else None


# Measured and chosen like the forward's (see there), and:
# - dk and dv at d 256 are separate by measurements of similar kernels, not their own: dk is like dq, and dv like the
#   forward, with rows and keys exchanged. Both in one loop, ptxas serialises the WGMMA, with a wait after each.
# - Under a band, one loop instead of three takes the spills out of dkdv's hot loop: 87 reloads at d 128 become 1. With
#   168 registers three programs of dq share a multiprocessor; without that limit Triton 3.6.0 takes 188 under a window.
# - Packed sequences have other tiles of dkdv: lse and delta, which begin anywhere, take registers.
# - Grouped heads under a band: three loops are faster than one at 128, though the compiler reports more bytes spilled.
# - dbias from compiler reports, not timings (Triton 3.7.1): with descriptors 100, 168, 127 and 157 registers at 32 to
#   256 and no spills. From 128 on eight warps, as a multiprocessor holds too few of four. On sm_80 the tiles are the
#   largest without spills.
# - Featured: loops stay separate where a branch around that much code makes ptxas serialise the WGMMA next to it.
_DQ_BANDED = {
    64: Config(64, 64, 4, 3, maxnreg=168),
    96: Config(64, 64, 4, 2, tma=True),
    128: Config(128, 64, 8, 3),
    160: Config(128, 32, 8, 3),
    192: Config(128, 32, 8, 3),
    256: Config(128, 32, 8, 2),
}
_BANDED = {
    "dkdv": {
        64: Config(64, 64, 4, 2, tma=True, one_loop=True),
        96: Config(64, 64, 4, 2, tma=True),
        128: Config(64, 64, 4, 2, tma=True, one_loop=True),
        160: Config(32, 64, 4, 2, tma=True, one_loop=True),
    },
    "dk": {192: Config(32, 64, 4, 2, tma=True, one_loop=True), 256: Config(32, 128, 8, 2, tma=True, one_loop=True)},
    "dv": {256: Config(64, 128, 8, 2, tma=True, one_loop=True)},
    "dq": _DQ_BANDED,
}
_GROUPED = {"dkdv": _BANDED["dkdv"] | {128: Config(64, 64, 4, 2, tma=True)}}
_PACKED = {64: Config(128, 64, 4, 2, tma=True), 128: Config(32, 64, 4, 2, tma=True)}
_DENSE = {
    "dkdv": {
        32: Config(64, 64, 4, 2, tma=True),
        64: Config(128, 64, 4, 2, tma=True),
        96: Config(32, 64, 4, 3),
        128: Config(64, 64, 4, 2, tma=True),
        160: Config(32, 64, 4, 2, tma=True),
    },
    "dk": {192: Config(32, 64, 4, 2, tma=True, one_loop=True), 256: Config(32, 128, 8, 2, tma=True)},
    "dv": {192: Config(64, 128, 8, 2, one_loop=True), 256: Config(64, 128, 8, 2, tma=True)},
    "dq": {
        64: Config(64, 64, 4, 3, tma=True),
        96: Config(64, 64, 4, 3),
        128: Config(128, 64, 8, 3),
        192: Config(128, 32, 8, 3),
        256: Config(128, 32, 8, 2, tma=True),
    },
}
_FEATURED = {
    "dkdv": {
        32: Config(32, 64, 4, 3, tma=True),
        64: Config(64, 64, 4, 2, tma=True),
        128: Config(32, 64, 4, 2, tma=True),
        256: Config(32, 64, 8, 2, tma=True),
    },
    "dq": {
        32: Config(64, 32, 4, 3),
        64: Config(64, 64, 4, 2, tma=True),
        128: Config(64, 32, 4, 2, tma=True),
        256: Config(128, 32, 8, 2, tma=True),
    },
}
_FUNCTIONS = {
    "dkdv": _FEATURED["dkdv"] | {96: Config(32, 64, 4, 2), 128: Config(64, 64, 4, 2, tma=True)},
    "dq": _FEATURED["dq"]
    | {
        64: Config(64, 64, 4, 2, tma=True, maxnreg=168),
        96: Config(64, 32, 4, 2),
        128: Config(64, 64, 4, 2, tma=True),
    },
}
_DBIAS_SM_90 = {
    32: Config(64, 32, 4, 2, tma=True),
    64: Config(64, 64, 4, 2, tma=True, maxnreg=168),
    128: Config(64, 64, 8, 2, tma=True, maxnreg=128),
    256: Config(64, 64, 8, 1, tma=True),
}
# 128 was raced on an H100; the rest is from compiler reports. The larger a tile, the fewer times all is loaded.
_DIAGONALS_SM_90 = {
    32: Config(128, 64, 8, 2, tma=True),
    64: Config(128, 64, 8, 2, tma=True),
    128: Config(128, 64, 8, 2, tma=True),
    256: Config(64, 64, 8, 1, tma=True),
}
_SM_90 = {
    "sm_90 dense": _DENSE,
    "sm_90 dense tile": _DENSE | {"dq": _DENSE["dq"] | {32: Config(64, 64, 4, 1, tma=True)}},
    "sm_90 dense packed": _DENSE | {"dkdv": _DENSE["dkdv"] | {128: Config(64, 64, 4, 2, tma=True, one_loop=True)}},
    "sm_90 banded": _BANDED,
    "sm_90 banded packed": _BANDED | {"dkdv": _BANDED["dkdv"] | _PACKED},
    "sm_90 grouped": _BANDED | _GROUPED,
    "sm_90 window": _BANDED | {"dq": _DQ_BANDED | {128: Config(64, 64, 4, 2, tma=True)}},
    "sm_90 short": _BANDED,
    "sm_90 functions": _FUNCTIONS,
    "sm_90 pairs": _FUNCTIONS,
    "sm_90 featured": _FEATURED,
    "sm_90 featured aligned": _FEATURED,
    "sm_90 featured tile": {
        "dkdv": _FEATURED["dkdv"] | {32: Config(32, 64, 4, 2, tma=True)},
        "dq": _FEATURED["dq"] | {32: Config(64, 32, 4, 2, tma=True)},
    },
}
_DBIAS_SM_80 = dict.fromkeys((16, 32, 64, 128), Config(64, 32, 4, 2)) | {256: Config(32, 32, 8, 2)}
_SM_80 = {
    "dkdv": dict.fromkeys((16, 32, 64), Config(64, 128, 8, 2)) | {128: Config(32, 64, 4, 2), 256: Config(32, 64, 8, 1)},
    "dq": dict.fromkeys((16, 32, 64), Config(128, 32, 4, 2)) | {128: Config(64, 32, 4, 2), 256: Config(64, 32, 8, 1)},
    "dbias": _DBIAS_SM_80,
}
# Chosen from compiler reports, for every head dim up to 128: tiles of the table above would spill up to 1 KB in dkdv.
_FEATURED_SM_80 = {
    "dkdv": dict.fromkeys((16, 32, 64, 128), Config(32, 64, 8, 2)),
    "dq": dict.fromkeys((16, 32, 64, 128), Config(64, 32, 4, 2)),
    "dbias": _DBIAS_SM_80,
}
_KINDS: Tables = {
    **{kind: {**rows, "dbias": _DBIAS_SM_90, "diagonals": _DIAGONALS_SM_90} for kind, rows in _SM_90.items()},
    "sm_80": _SM_80,
    "sm_80 featured": _FEATURED_SM_80,
    "sm_86": {
        "dkdv": _SM_80["dkdv"] | {256: Config(16, 32, 4, 1)},
        "dq": _SM_80["dq"] | {256: Config(32, 16, 4, 1)},
        "dbias": _DBIAS_SM_80,
    },
    "sm_86 featured": _FEATURED_SM_80,
    "gfx942": {
        "dkdv": dict.fromkeys((16, 32, 64, 128), Config(32, 64, 4, 1)) | {256: Config(32, 32, 4, 1)},
        "dq": dict.fromkeys((16, 32, 64, 128), Config(64, 32, 4, 1)) | {256: Config(32, 32, 4, 1)},
        "dbias": dict.fromkeys((16, 32, 64, 128, 256), Config(32, 32, 4, 1)),
    },
}
# Past 256, from compiler reports (Triton 3.7.1): no spills.
_BIG = {
    "sm_90": {"dk": Config(32, 32, 8, 1), "dv": Config(32, 32, 8, 1), "dq": Config(32, 32, 8, 1)},
    "sm_80": {"dk": Config(32, 32, 8, 1), "dv": Config(32, 32, 8, 1), "dq": Config(32, 32, 8, 1)},
    "sm_86": {"dk": Config(16, 32, 8, 1), "dv": Config(32, 32, 8, 1), "dq": Config(32, 16, 8, 1)},
    "gfx942": {"dk": Config(16, 32, 4, 1), "dv": Config(16, 32, 4, 1), "dq": Config(32, 16, 4, 1)},
}


def _with_big(kind: str, rows: Mapping[str, Mapping[int, Config]]) -> Mapping[str, Mapping[int, Config]]:
    big = _BIG[kind.split()[0]]
    rows = {"diagonals": rows["dbias"], **rows}
    more = big | {"dbias": big["dq"], "diagonals": big["dq"]}
    return {**rows, **{kernel: {**rows.get(kernel, {}), 512: tiles} for kernel, tiles in more.items()}}


TABLES: Tables = {kind: _with_big(kind, rows) for kind, rows in _KINDS.items()}
