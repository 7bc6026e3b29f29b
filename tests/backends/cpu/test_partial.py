"""A CPU forward that starts from a result over other keys, and a backward that adds to what others left."""

from __future__ import annotations

import pytest
import torch

from flashtile.backends import cpu
from flashtile.core.masks import Band
from flashtile.core.states import Partial
from tests.cases import Case
from tests.partials import BANDS, CHAINS, judge_chain, judge_rows_without_keys
from tests.poison import poisoned_memory
from tests.sums import judge_gaps, judge_sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("case", "cuts"), CHAINS, ids=str)
def test_a_chain_of_partial_results_is_the_whole(case: Case, cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    with poisoned_memory(), torch.no_grad():
        judge_chain(cpu.BACKEND, case, cuts, dtype)


def test_a_result_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        Partial(torch.zeros(1, 2, 3, 4).transpose(1, 2), torch.zeros(1, 2, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("case", "cuts"), CHAINS, ids=str)
def test_gradients_of_pieces_add_up_in_float32(case: Case, cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    # PyTorch's kernel and blocks of rows add to the sums as they come.
    with poisoned_memory():
        judge_sums(cpu.BACKEND, case, cuts, dtype, exact=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_rows_without_keys_keep_what_they_start_from(band: Band, dtype: torch.dtype) -> None:
    with poisoned_memory():
        judge_rows_without_keys(cpu.BACKEND, dtype, band)


@pytest.mark.parametrize("head_dim", [64])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_gaps_keep_their_sums(band: Band, head_dim: int) -> None:
    with poisoned_memory():
        judge_gaps(cpu.BACKEND, torch.float16, band, head_dim=head_dim)
