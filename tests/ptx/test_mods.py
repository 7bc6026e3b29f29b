"""Users' functions in the Hopper kernels as compiled, against the oracle."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from tests.cases import Case, judge
from tests.mods.calls import with_functions
from tests.ptx import hopper
from tests.ptx.machine import Options

DENSE = Case("mods", batch=1, seqlen_q=130, seqlen_k=150, heads=1, kv_heads=1, head_dim=64, causal=True)
CALLS = (
    (DENSE, "by_distance", "documents"),
    (Case("mods", batch=1, seqlen_q=140, seqlen_k=200, heads=2, kv_heads=1, head_dim=128), "gated", None),
    (Case("varlen_mods", batch=2, lengths=((70, 130), (30, 20)), heads=2, kv_heads=1, head_dim=64), "capped", "prefix"),
    (Case("mods", batch=1, seqlen_q=70, seqlen_k=100, heads=1, kv_heads=1, head_dim=256), "squared", "dilated"),
)


LISTS = (
    (Case("mods", batch=1, seqlen_q=190, seqlen_k=260, heads=1, kv_heads=1, head_dim=64), None, "documents"),
    (Case("varlen_mods", batch=2, lengths=((70, 130), (150, 20)), heads=2, kv_heads=1, head_dim=128), None, "prefix"),
    (Case("mods", batch=1, seqlen_q=130, seqlen_k=260, heads=1, kv_heads=1, head_dim=64), "gated", "neighbourhood"),
)


@pytest.mark.long
@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("number", range(len(LISTS)))
def test_lists_as_compiled(number: int, bits: bool) -> None:
    case, score, mask = LISTS[number]
    call = with_functions(case, score, mask, torch.bfloat16, number, frozen=True, listed=(128, 128), bits=bits)
    with hopper.on_cpu(Options(seed=number, product_at_wait=number % 2 == 0), 2):
        judge(call, "hopper")


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(CALLS)))
def test_functions_as_compiled(number: int) -> None:
    case, score, mask = CALLS[number]
    call = with_functions(case, score, mask, torch.bfloat16, frozen=True)
    with hopper.on_cpu(Options(seed=number, product_at_wait=number % 2 == 0), 2):
        judge(call, "hopper")


@pytest.mark.long
def test_slopes_past_256_as_compiled() -> None:
    """On Triton 3.6 too, whose front end took the constant that says that there is a slope for None."""
    case = Case("mods", batch=1, seqlen_q=70, seqlen_k=70, heads=1, kv_heads=1, head_dim=64, head_dim_v=264)
    call = with_functions(case, "learned_temperature", None, torch.bfloat16, frozen=True)
    with hopper.on_cpu(Options(), 2):
        judge(call, "hopper")
