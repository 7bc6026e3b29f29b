"""Lists of chosen blocks: the kernels, under Triton's interpreter, against PyTorch."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from flashtile.backends.portable import selected_lists as kernels
from flashtile.core import settings
from flashtile.mods.block_mask import selected_lists

pytestmark = pytest.mark.skipif(not settings.TRITON_INTERPRET.enabled(), reason="needs Triton's interpreter")


def chosen(batch: int, heads: int, rows: int, most: int, keys: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Numbers of blocks, among them some that are named again, -1, and some that are past the last one."""
    return torch.randint(-1, keys + 2, (batch, heads, rows, most), dtype=dtype)


def same_lists(indices: Tensor, counts: Tensor | None, keys: int) -> None:
    """The kernels' lists are PyTorch's, bit by bit, where lists say something."""
    assert kernels.why_not(indices, keys) is None
    got, want = kernels.selected_lists(indices, counts, keys), selected_lists(indices, counts, keys)
    for number, (x, y) in enumerate(zip(got, want, strict=True)):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if number < 3:  # row_items too: places without a block say so
            assert torch.equal(x, y)
    for start, _, stop in want[2].flatten(0, -2).tolist():
        assert torch.equal(got[3][start:stop], want[3][start:stop])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter sorts number by number."""
    monkeypatch.setattr(kernels, "_LIMITS", kernels.Limits(tile=64))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("most", [1, 3, 16, 64, 100])
@pytest.mark.parametrize("rows", [1, 37, 200])
def test_random_sizes(most: int, rows: int) -> None:
    draw = random.Random(1000 * most + rows)
    torch.manual_seed(most + rows)
    rows = min(rows, max(1, 600 // most))
    batch, heads, keys = draw.randint(1, 2), draw.randint(1, 3), draw.randint(1, 150)
    indices = chosen(batch, heads, rows, most, keys, draw.choice([torch.int32, torch.int64]))
    counts = torch.randint(-1, most + 2, (batch, heads, rows), dtype=draw.choice([torch.int32, torch.int64]))
    same_lists(indices, draw.choice([None, counts]), keys)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (1, 1, 2100, 1, 2), (1, 1, 5, 3, 1040), (2, 1, 70, 1, 1)], ids=str)
def test_tiles_and_loops_over_them(sizes: tuple[int, int, int, int, int]) -> None:
    """The second has more words than a tile, the third more keys than are summed at once."""
    torch.manual_seed(0)
    same_lists(chosen(*sizes), None, sizes[4])


def test_tiles_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_LIMITS", kernels.Limits())
    torch.manual_seed(0)
    same_lists(chosen(1, 2, 90, 5, 40), None, 40)


def test_all_rows_name_the_same_blocks() -> None:
    indices = torch.tensor([7, 0, 7, 31]).expand(1, 2, 70, 4)
    same_lists(indices, None, 32)
    same_lists(indices, torch.arange(5, dtype=torch.int32).repeat(14).expand(1, 2, 70), 32)


def test_bits_of_some_keys_after_others(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "_LIMITS", kernels.Limits(tile=64, bits=3 * 16 * 4 * 8))  # 8 keys
    same_lists(chosen(1, 3, 33, 4, 20), None, 20)


def test_views_and_numbers_of_64_bits() -> None:
    torch.manual_seed(0)
    indices = chosen(1, 2, 33, 8, 20, torch.int64).mT.contiguous().mT
    indices[0, 0, :4] = 2**32 + torch.arange(8)
    same_lists(indices, None, 20)
    same_lists(chosen(1, 2, 33, 8, 20)[:, 1:, 1:, 3:], None, 20)


def test_the_first_item_is_a_block_without_any_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *size, **given: torch.full(size, 10**9, **given))
    got = kernels.selected_lists(torch.full((1, 2, 3, 2), -1), None, 4)
    assert (got[0][..., 2] == got[0][..., 0]).all() and (got[2][..., 2] == got[2][..., 0]).all()
    assert got[3][0] == 0 and (got[1] == 4).all()


def test_what_no_kernel_takes() -> None:
    assert kernels.why_not(torch.zeros(1, 1, 4, 0), 5)
    assert kernels.why_not(torch.zeros(1, 1, 4, 5), 0)
    assert "at most 2048" in str(kernels.why_not(torch.zeros(1, 1, 4, 2049), 5))
