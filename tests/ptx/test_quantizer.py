"""The kernels that quantise as compiled, with the GPU's conversion to e4m3, against PyTorch's arithmetic."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from flashtile.backends.portable.rounding import launch
from tests.ptx import portable
from tests.ptx.machine import Options
from tests.quantization.quantizer import CASES, Case, check, inputs
from tests.slow import slow_but

ARCHS = ("sm_80", "sm_90", "sm_89")
# Each on one architecture. Left out is the case whose angles PyTorch applies: its numbers are then float32, whose
# products the interpreter does not know.
COMPILED = [(case, ARCHS[i % 3]) for i, case in enumerate(CASES) if case.name != "few pairs"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "arch"), slow_but(COMPILED, lambda each: each[0].name in ("packed", "some halves")), ids=str
)
def test_compiled_kernels(case: Case, arch: str) -> None:
    capability = {"sm_90": (9, 0), "sm_89": (8, 9), "sm_80": (8, 0)}[arch]
    with (
        portable.on_cpu(Options(seed=len(case.name)), arch),
        mock.patch.object(launch, "compute_capability", lambda device: capability),
    ):
        # Rotated numbers are rounded to 16 bits before, and on sm_89 Triton makes e4m3 numbers of float16 ones.
        check(case, inputs(case, torch.bfloat16), 0.02 if case.rotate else 0.0, 0.02 if arch == "sm_89" else 1e-3)
