"""Calls in steps, in Triton's interpreter: what each adds to, and parts of sequences."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashtile.backends import portable
from flashtile.backends.gpu.trial import trial
from flashtile.backends.portable.config import Config
from flashtile.core.masks import Band
from tests.cases import Case
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
    tall = Config(16, 32, 4, 1, tma=True, one_loop=True)
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
