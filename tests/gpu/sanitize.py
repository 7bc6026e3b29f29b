"""Small calls of every kernel, to be run under compute-sanitizer; each is checked against the oracle as it goes.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool TOOL python -m tests.gpu.sanitize [BACKEND]

with TOOL memcheck, racecheck or initcheck
"""

from __future__ import annotations

import sys

import torch

from tests.cases import Case, build, judge

CASES = (
    Case("full", seqlen_q=200, seqlen_k=150, head_dim=64),
    Case("causal", seqlen_q=150, seqlen_k=200, head_dim=128, causal=True, heads=4, kv_heads=2),
    Case("wide", seqlen_q=100, seqlen_k=100, head_dim=256, causal=True),
    Case("odd", seqlen_q=61, seqlen_k=77, head_dim=33, head_dim_v=7, window=(20, 5)),
    Case("features", batch=1, seqlen_q=70, seqlen_k=70, head_dim=32, softcap=3.0, alibi="h", bias="hqk", mask="qk",
         sinks=True, dropout=0.2, causal=True),
    Case("varlen", batch=3, lengths=((40, 90), (0, 7), (65, 20)), head_dim=64, causal=True, sinks=True, spare=9),
)  # fmt: skip


def main() -> None:
    """Runs the cases a backend can run, in bfloat16."""
    for name in sys.argv[1:] or ["portable", "hopper"]:
        for case in CASES:
            judge(build(case, torch.bfloat16, "cuda"), name)
            torch.cuda.synchronize()
            print(f"{name} {case}: right", flush=True)


if __name__ == "__main__":
    main()
