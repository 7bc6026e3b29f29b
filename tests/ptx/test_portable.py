"""The portable kernels as compiled for two architectures, against the oracle: forward and gradients."""

from __future__ import annotations

import pytest
import torch

from tests.cases import Case, build, judge
from tests.ptx import portable
from tests.ptx.machine import Options
from tests.slow import slow_but

CASES = (
    Case("causal", batch=1, seqlen_q=140, seqlen_k=160, heads=2, kv_heads=1, head_dim=128, causal=True, lse_grad=True),
    Case("window", batch=1, seqlen_q=90, seqlen_k=150, head_dim=72, head_dim_v=40, window=(60, 9), softcap=5.0),
    Case("varlen", batch=3, lengths=((70, 130), (0, 5), (100, 90)), heads=2, kv_heads=1, head_dim=64, causal=True),
    Case("everything", batch=1, seqlen_q=60, seqlen_k=70, heads=2, kv_heads=1, head_dim=32, causal=True,
         window=(40, 0), softcap=5.0, alibi="bh", mask="bqk", bias="hk", sinks=True, dropout=0.2),
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "arch"),
    slow_but(
        [(case, arch) for case in CASES for arch in ("sm_90", "sm_80")],
        lambda each: (each[0].name, each[1]) in (("causal", "sm_80"), ("everything", "sm_90")),
    ),
    ids=str,
)
def test_compiled_kernels_under_the_rule(case: Case, arch: str) -> None:
    with portable.on_cpu(Options(seed=len(case.name)), arch):
        judge(build(case, torch.bfloat16), "portable")
