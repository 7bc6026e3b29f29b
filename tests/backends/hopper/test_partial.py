"""A forward that starts from a result over other keys, in the emulator and as compiled."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from flashtile.backends import hopper
from flashtile.backends.hopper.backward import workspace
from flashtile.core.masks import Band
from tests.backends.hopper.emulated import BACKWARD_TILES, on_cpu
from tests.cases import Case
from tests.partials import BANDS, CHAINS, judge_chain, judge_rows_without_keys
from tests.poison import poisoned_memory
from tests.slow import slow_but
from tests.sums import judge_gaps, judge_sums

BACKWARD_CHAINS = [each for each in CHAINS if each[0].head_dim_v is None]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("case", "cuts"), CHAINS, ids=str)
def test_a_chain_of_partial_results_is_the_whole(case: Case, cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    with on_cpu(len(cuts), 2), poisoned_memory(), torch.no_grad():
        judge_chain(hopper.BACKEND, case, cuts, dtype)


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_rows_without_keys_keep_what_they_start_from(band: Band) -> None:
    with on_cpu(3, 2), poisoned_memory():
        judge_rows_without_keys(hopper.BACKEND, torch.bfloat16, band)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("case", "cuts"), BACKWARD_CHAINS, ids=str)
def test_gradients_of_pieces_add_up_in_float32(case: Case, cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    with on_cpu(len(cuts), 2), poisoned_memory():
        judge_sums(hopper.BACKEND, case, cuts, dtype, exact=False)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("case", "cuts"), [BACKWARD_CHAINS[1], BACKWARD_CHAINS[2], BACKWARD_CHAINS[5]], ids=str)
def test_a_share_in_a_fixed_order_is_added_with_one_rounding(case: Case, cuts: tuple[int, ...]) -> None:
    with on_cpu(len(cuts), 2), poisoned_memory():
        judge_sums(hopper.BACKEND, case, cuts, torch.bfloat16, deterministic=True)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", slow_but(BACKWARD_TILES, list(BACKWARD_TILES)[::3].__contains__))
def test_every_variant_adds(name: str) -> None:
    config = BACKWARD_TILES[name]
    case = Case("varlen", batch=2, lengths=((200, 130), (70, 260)), head_dim=config.block_d - 8,
                head_dim_v=config.block_dv - 8, kv_heads=1, causal=True, lse_grad=True)  # fmt: skip
    with on_cpu(5, 2, backward=config), poisoned_memory():
        judge_sums(hopper.BACKEND, case, (70,), torch.bfloat16, exact=False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gqa_splits_add(deterministic: bool) -> None:
    case = Case(
        "varlen", batch=2, lengths=((100, 130), (70, 60)), head_dim=64, heads=3, kv_heads=1, causal=True, lse_grad=True
    )
    with mock.patch.object(workspace, "gqa_splits", lambda *args: 2), on_cpu(6, 2), poisoned_memory():
        judge_sums(hopper.BACKEND, case, (70,), torch.bfloat16, exact=False, deterministic=deterministic)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("head_dim", "band"), zip((128, 256, 64), BANDS, strict=True), ids=str)
def test_gaps_keep_their_sums(band: Band, head_dim: int) -> None:
    with on_cpu(7, 2), poisoned_memory():
        judge_gaps(hopper.BACKEND, torch.float16, band, head_dim=head_dim)


@pytest.mark.long
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_gaps_keep_their_sums_of_gqa_splits(band: Band) -> None:
    with mock.patch.object(workspace, "gqa_splits", lambda *args: 2), on_cpu(8, 2), poisoned_memory():
        judge_gaps(hopper.BACKEND, torch.float16, band, head_dim=64)
