"""The forward's tiles."""

from __future__ import annotations

from flashtile.backends.portable.config import Config, Tables
from flashtile.backends.portable.tuned import select
from flashtile.call.problem import Problem


def choose(problem: Problem, arch: str | None = None) -> Config:
    """The forward's tiles for a problem, or for an architecture other than its device's."""
    return select(problem, "forward", TABLES, arch)


# Measured on sm_90, see docs/tuning-notes.md; a row is the best over lengths 512, 2048 and 8192 together.
# - Four warps over 64 rows beat eight over 128: two or three programs share a multiprocessor, so one computes
#   exponentials while another multiplies; within a program these do not overlap.
# - Descriptors free the registers that held addresses, but are slower where tiles are small.
# - Under a band, smaller query tiles waste less of the diagonal.
# - Short: at head_dim 256 one program fills a multiprocessor, so nothing hides the latency of its first loads: with so
#   few key blocks per tile, two smaller programs without a pipeline are faster.
# - Featured (transforms, masks, bias and dropout take registers of their own): chosen from compiler reports, not
#   timings: two programs share a multiprocessor where registers allow it. But at 32, in tiles of 64 keys, rows of a
#   bias or mask that do not begin on 16 bytes change threads through shared memory, with spills: measured.
# - Pairs: a function that reads something for each pair needs registers for it, so its tiles are smaller.
_BANDED = {
    32: Config(64, 64, 4, 3, tma=True),
    64: Config(64, 128, 4, 2, tma=True),
    96: Config(64, 64, 4, 2, tma=True),
    128: Config(64, 64, 4, 3, tma=True),
    160: Config(64, 64, 4, 2),
    192: Config(128, 32, 8, 3),
    256: Config(128, 64, 8, 2, tma=True),
}
_SM_80 = dict.fromkeys((16, 32, 64), Config(128, 64, 4, 3)) | {128: Config(128, 64, 8, 2), 256: Config(64, 32, 4, 2)}
_FEATURED_SM_80 = dict.fromkeys((16, 32, 64, 128), Config(64, 32, 4, 2))
# Where tiles meet few keys: of blocks of 128 more would lie outside the band.
_BANDED_FEW = _BANDED | {64: Config(64, 64, 4, 2, tma=True)}
_DENSE = {
    32: Config(64, 64, 4, 3, tma=True),
    64: Config(64, 128, 4, 2, tma=True),
    96: Config(128, 64, 4, 3, tma=True),
    128: Config(64, 64, 4, 3, tma=True),
    160: Config(64, 64, 4, 2, tma=True),
    192: Config(128, 32, 8, 3),
    256: Config(128, 64, 8, 2, tma=True),
}
_FEATURED = {
    32: Config(64, 32, 4, 2, tma=True),
    64: Config(64, 64, 4, 2, tma=True),
    128: Config(64, 64, 4, 2, tma=True),
    256: Config(64, 32, 4, 2, tma=True),
}
_KINDS = {
    "sm_90 dense": _DENSE,
    "sm_90 dense packed": _DENSE,
    "sm_90 dense tile": _DENSE | {32: Config(64, 64, 4, 1, tma=True), 96: Config(64, 128, 4, 2, tma=True)},
    "sm_90 banded": _BANDED,
    "sm_90 banded packed": _BANDED_FEW,
    "sm_90 grouped": _BANDED,
    "sm_90 window": _BANDED_FEW | {128: Config(64, 64, 4, 1, tma=True)},
    "sm_90 short": _BANDED_FEW | {256: Config(64, 64, 4, 1, tma=True)},
    "sm_90 functions": _FEATURED,
    "sm_90 pairs": _FEATURED | {128: Config(64, 32, 4, 3, tma=True)},
    "sm_90 featured": _FEATURED,
    "sm_90 featured tile": _FEATURED,
    "sm_90 featured aligned": _FEATURED | {32: Config(64, 64, 4, 3, tma=True)},
    "sm_80": _SM_80,
    "sm_80 featured": _FEATURED_SM_80,
    # 99 KB of shared memory: sm_80's tiles (for 163 KB) with a stage fewer or half the size.
    "sm_86": _SM_80 | {256: Config(64, 32, 4, 1)},
    "sm_86 featured": _FEATURED_SM_80,
    # 64 KB of LDS, and 64 threads per warp.
    "gfx942": dict.fromkeys((16, 32, 64, 128), Config(128, 64, 4, 1)) | {256: Config(64, 32, 4, 1)},
}
# Past 256, from compiler reports (Triton 3.7.1): 128 bytes spilled on sm_90.
_BIG = {
    "sm_90": Config(64, 32, 8, 2),
    "sm_80": Config(64, 16, 8, 2),
    "sm_86": Config(64, 16, 8, 1),
    "gfx942": Config(32, 16, 4, 1),
}
TABLES: Tables = {kind: {"forward": tiles | {512: _BIG[kind.split()[0]]}} for kind, tiles in _KINDS.items()}
