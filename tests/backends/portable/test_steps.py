"""Calls in steps, in Triton's interpreter: what each adds to, and parts of sequences."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashtile.backends import portable
from flashtile.backends.portable import config as tiles
from flashtile.backends.portable.config import Config
from flashtile.masks import Band
from tests.cases import Case
from tests.origins import judge_parts
from tests.partials import BANDS, CHAINS, judge_rows_without_keys
from tests.poison import poisoned_memory
from tests.slow import slow_but
from tests.sums import judge_sums

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("case", "cuts"), slow_but(CHAINS, lambda each: each in (CHAINS[1], CHAINS[3], CHAINS[5])), ids=str)
def test_gradients_of_pieces_add_up_in_float32(case: Case, cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    with poisoned_memory():
        judge_sums(portable.BACKEND, case, cuts, dtype)


def test_sums_of_kernels_apart_and_by_descriptors() -> None:
    case = Case("apart", batch=1, seqlen_q=50, seqlen_k=70, kv_heads=1, head_dim=24, causal=True, lse_grad=True)
    tall = Config(16, 32, 4, 1, tma=True, one_loop=True)
    with tiles.override(dk=tall, dv=dataclasses.replace(tall, tma=False), dq=tall), poisoned_memory():
        judge_sums(portable.BACKEND, case, (33,), torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_rows_without_keys_keep_what_they_start_from(band: Band, dtype: torch.dtype) -> None:
    with poisoned_memory():
        judge_rows_without_keys(portable.BACKEND.plan_forward, dtype, band)


@pytest.mark.parametrize(("dropout", "alibi"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_parts_are_drawn_and_sloped_as_in_the_whole(dtype: torch.dtype, dropout: bool, alibi: bool) -> None:
    with poisoned_memory():
        judge_parts(portable.BACKEND, dtype, dropout=dropout, alibi=alibi)
