"""Calls in steps and over split keys, in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from flashtile.backends import portable
from flashtile.backends.gpu import table
from flashtile.backends.gpu.decode import split_forward
from flashtile.backends.gpu.trial import trial
from flashtile.backends.portable.config import PortableTiles
from flashtile.call.problem import described
from flashtile.core.masks import Band
from flashtile.core.states import Partial
from flashtile.ops import dispatch
from tests.backends.hopper.emulated import forget_plans
from tests.cases import Case, build, judge
from tests.origins import judge_parts
from tests.partials import BANDS, CHAINS, judge_rows_without_keys
from tests.poison import poisoned_memory
from tests.slow import slow_but
from tests.sums import judge_gaps, judge_sums

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


# The interpreter takes seconds for the shared cases.
SMALL: tuple[tuple[Case, tuple[int, ...]], ...] = (
    (Case("causal", seqlen_q=40, seqlen_k=50, kv_heads=1, head_dim=24, causal=True, lse_grad=True), (20, 7)),
    (Case("wide_v", seqlen_q=30, seqlen_k=40, head_dim=16, head_dim_v=40, softcap=5.0, mask="bqk", bias="hk"), (13,)),
    (Case("varlen", batch=3, lengths=((20, 40), (0, 16), (33, 21)), causal=True, spare=5, sinks=True), (11,)),
)  # fmt: skip
CASES = [
    (case, cuts, dtype)
    for (case, cuts), dtype in zip(SMALL, (torch.float16, torch.float32, torch.bfloat16), strict=True)
]
EVERY = [(case, cuts, dtype) for case, cuts in CHAINS for dtype in (torch.bfloat16, torch.float16, torch.float32)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("case", "cuts", "dtype"), slow_but([*CASES, *EVERY], CASES.__contains__), ids=str)
def test_gradients_of_pieces_add_up_in_float32(case: Case, cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    with poisoned_memory():
        judge_sums(portable.BACKEND, case, cuts, dtype)


def test_sums_of_kernels_apart_and_by_descriptors() -> None:
    case = Case("apart", batch=1, seqlen_q=50, seqlen_k=70, kv_heads=1, head_dim=24, causal=True, lse_grad=True)
    tall = PortableTiles(16, 32, 4, 1, tma=True, one_loop=True)
    with trial(dk=tall, dv=dataclasses.replace(tall, tma=False), dq=tall), poisoned_memory():
        judge_sums(portable.BACKEND, case, (33,), torch.float16)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_rows_without_keys_keep_what_they_start_from(band: Band) -> None:
    with poisoned_memory():
        judge_rows_without_keys(portable.BACKEND, torch.float16, band)


@pytest.mark.long
@pytest.mark.parametrize(
    ("dropout", "alibi", "dtype"),
    [(True, False, torch.float32), (False, True, torch.float32), (True, True, torch.float16)],
)
def test_parts_are_drawn_and_sloped_as_in_the_whole(dropout: bool, alibi: bool, dtype: torch.dtype) -> None:
    with poisoned_memory():
        judge_parts(portable.BACKEND, dtype, dropout=dropout, alibi=alibi)


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [24])
@pytest.mark.parametrize("band", slow_but(BANDS, BANDS[-1:].__contains__), ids=str)
def test_gaps_keep_their_sums(band: Band, head_dim: int) -> None:
    with poisoned_memory():
        judge_gaps(portable.BACKEND, torch.float16, band, head_dim=head_dim)


# The interpreter's splits have at most 64 keys.
SPLIT_CASES = (
    Case("one", seqlen_q=1, seqlen_k=200, heads=4, kv_heads=2, head_dim=24),
    Case("causal", seqlen_q=5, seqlen_k=150, kv_heads=1, causal=True, sinks=True, lse_grad=True, layout="sliced"),
    Case("window", seqlen_q=7, seqlen_k=300, window=(90, 3), head_dim=16, head_dim_v=40),
    Case("scores", seqlen_q=3, seqlen_k=140, softcap=3.0, alibi="bh", layout="transposed"),
    Case("rows", batch=1, seqlen_q=100, seqlen_k=128, heads=1, kv_heads=1, causal=True),
)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", SPLIT_CASES, ids=str)
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
