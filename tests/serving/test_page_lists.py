"""Lists of pages and tables of them say the same."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile import InvalidInputError
from flashtile.serving import page_list_from_table, page_table_from_list, pages_from_flashinfer

INDPTR, INDICES = torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.tensor([7, 3, 0, 5, 1], dtype=torch.int32)
LAST = torch.tensor([4, 0, 1], dtype=torch.int32)


def test_flashinfers_tensors_are_keywords() -> None:
    given = pages_from_flashinfer(INDPTR, INDICES, LAST, 4)
    assert given["cache_seqlens"].tolist() == [8, 0, 9] and given["cache_seqlens"].dtype == torch.int32
    pages, q = torch.randn(2, 8, 4, 2, 16), torch.randn(3, 1, 4, 16)
    out = flashtile.attention_with_kvcache(q, *pages, **given)
    table = page_table_from_list(INDPTR, INDICES, 4)
    want = flashtile.attention_with_kvcache(q, *pages, page_table=table, cache_seqlens=given["cache_seqlens"])
    assert torch.equal(out, want)
    keys, values = (x[[0, 5, 1]].flatten(0, 1)[None, :9] for x in pages)
    torch.testing.assert_close(out[2:], flashtile.attention(q[2:], keys, values))


@pytest.mark.parametrize("size", [1, 4, 5])
def test_there_and_back(size: int) -> None:
    lengths = torch.tensor([3 * size, 0, 1, -1, 2 * size + 1], dtype=torch.int32)
    table = torch.randperm(20).view(5, 4).int()
    indptr, indices = page_list_from_table(table, lengths, size)
    counts = [3, 0, 1, 0, 2 + (size >= 1)]
    assert indptr.diff().tolist() == counts and indices.shape == (20,) and (indices[sum(counts) :] == -1).all()
    back = page_table_from_list(indptr, indices, 4)
    for row, old, count in zip(back, table, counts, strict=True):
        assert torch.equal(row[:count], old[:count]) and (row[count:] == -1).all()


def test_no_pages_at_all() -> None:
    nothing = torch.zeros(0, dtype=torch.int32)
    assert page_table_from_list(torch.zeros(3, dtype=torch.int32), nothing, 2).tolist() == [[-1, -1]] * 2
    indptr, indices = page_list_from_table(torch.zeros(2, 0, dtype=torch.int32), LAST[1:] * 0, 4)
    assert indptr.tolist() == [0, 0, 0] and not len(indices)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="^indptr: has shape"):
        pages_from_flashinfer(INDPTR[1:], INDICES, LAST, 4)
    with pytest.raises(InvalidInputError, match="^page_size: "):
        pages_from_flashinfer(INDPTR, INDICES, LAST, 0)
