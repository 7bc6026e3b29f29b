"""Few queries over many keys without a cache, in Triton's interpreter: numbers, gradients, and what takes what."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from flashtile.backends.gpu import table
from flashtile.backends.gpu.decode import split_forward
from flashtile.call.problem import described
from flashtile.core.masks import Band
from flashtile.core.states import Partial
from flashtile.ops import dispatch
from tests.backends.hopper.emulated import forget_plans
from tests.cases import Case, build, judge

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

# The interpreter's splits have at most 64 keys.
CASES = (
    Case("one", seqlen_q=1, seqlen_k=200, heads=4, kv_heads=2, head_dim=24),
    Case("causal", seqlen_q=5, seqlen_k=150, kv_heads=1, causal=True, sinks=True, lse_grad=True, layout="sliced"),
    Case("window", seqlen_q=7, seqlen_k=300, window=(90, 3), head_dim=16, head_dim_v=40),
    Case("scores", seqlen_q=3, seqlen_k=140, softcap=3.0, alibi="bh", layout="transposed"),
    Case("rows", batch=1, seqlen_q=100, seqlen_k=128, heads=1, kv_heads=1, causal=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_and_gradients(case: Case) -> None:
    dtype = torch.float32 if case.seqlen_q < 10 else torch.float16
    forget_plans()
    fewest = mock.patch.object(table, "_SPLIT_KEYS", 100)
    splits = mock.patch.object(split_forward, "cached_tensors", wraps=split_forward.cached_tensors)
    with fewest, splits as run:
        judge(build(case, dtype), "portable")
        assert run.called
    forget_plans()


def test_a_result_over_other_keys_is_merged_by_the_regular_kernel() -> None:
    made = build(Case("few", seqlen_q=3, seqlen_k=64), torch.float16)
    problem, t = made.problem, made.tensors
    regular = dispatch.backend("portable").plan("forward", problem, t)
    before = Partial(*(x.float() for x in regular(t)))
    expected = regular(t, before)
    with mock.patch.object(table, "_SPLIT_KEYS", 64):
        plan = dispatch.backend("portable").plan("forward", problem, t)
        assert isinstance(plan, split_forward.SplitForwardPlan)
        assert all(map(torch.equal, plan(t, before), expected))


def test_which_calls_are_split() -> None:
    """By a sequence's own lengths, never by how many there are; of packed calls none."""
    call = described(batch=1, seqlen_q=4, seqlen_k=4096, num_heads_q=32, num_heads_kv=8, dtype=torch.bfloat16)
    assert table.is_split(call) and table.is_split(call.but(batch=512, band=Band(None, 0)))
    assert table.is_split(call.but(seqlen_q=32)) and not table.is_split(call.but(seqlen_q=33))
    assert table.is_split(call.but(dtype=torch.float32)) and not table.is_split(
        call.but(dtype=torch.float32, seqlen_q=5)
    )
    for other in (
        {"seqlen_k": 2047}, {"varlen": True}, {"mask": True}, {"bias_dtype": torch.bfloat16}, {"dropout_p": 0.1},
        {"out_dtype": torch.float32}, {"batch": 0}, {"seqlen_q": 0},
    ):  # fmt: skip
        assert not table.is_split(call.but(**other)), other
