"""The tiles of second derivatives, by architecture and columns, and where they have kernels at all."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from flashtile.backends.gpu.trial import tried
from flashtile.backends.portable.config import PortableTiles, arch_of, columns_of, readable
from flashtile.call.problem import Problem

# Rows' sums and the gradient of dout; the gradient of q; the gradients of k and v.
Kernel = Literal["second_rows", "second_dq", "second_dkdv"]
# The most columns -> tiles of rows and dq, and of dkdv. Measured on H200: docs/tuning-notes.md.
_HOPPER = {64: ("64x64x4x2 T", "32x64x4x1"), 128: ("64x32x4x2 T", "32x64x4x2 T"), 256: ("64x32x4x1 T", "32x64x8x1")}
# By compiler reports: they spill least.
_OTHERS = {64: ("64x32x4x1",) * 2, 128: ("64x32x8x1",) * 2, 256: ("32x16x4x1",) * 2}
_FLOAT32 = {128: ("32x16x4x1",) * 2}
_SMALLEST = PortableTiles(16, 16, 4, 1)


def choose(problem: Problem, kernel: Kernel) -> PortableTiles:
    """The tiles of a kernel for a problem."""
    held: PortableTiles | None = tried(kernel)
    if held is not None:
        return held
    arch, columns = arch_of(problem), columns_of(problem)
    rows = _FLOAT32 if problem.dtype == torch.float32 else _HOPPER if arch in ("sm_90", "sm_100") else _OTHERS
    found = next((each for most, each in rows.items() if columns <= most), None)
    if arch == "interpreter" or found is None:
        # ptxas would take 32 registers, and spill all others.
        return _SMALLEST if arch in ("interpreter", "gfx942") else dataclasses.replace(_SMALLEST, maxnreg=255)
    return readable(problem, PortableTiles.parse(found[kernel == "second_dkdv"]))


def reasons(problem: Problem) -> list[str]:
    """What keeps a call from the kernels: PyTorch computes it then."""
    widest, arch = columns_of(problem), arch_of(problem)
    why = []
    if problem.dtype == torch.float32 and widest > max(_FLOAT32):
        why.append(f"float32 of more than {max(_FLOAT32)} columns")
    if arch == "sm_86" and widest > max(_OTHERS):
        why.append(f"more than {max(_OTHERS)} columns")
    if problem.deterministic and problem.bias_dtype is not None:
        why.append("deterministic=True beside a bias, which has its gradient from atomic adds")
    return why
