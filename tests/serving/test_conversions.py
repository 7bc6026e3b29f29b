"""Lists of pages and draft trees of other libraries as keywords of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import InvalidInputError, serving
from flashtile.serving import page_list_from_table, page_table_from_list, pages_from_flashinfer
from tests import trees

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


def requests(seed: int, rows: int, same: bool) -> tuple[list[Tensor], list[int]]:
    """Ancestors of four requests' drafts, and the keys before them."""
    counts = [rows] * 4 if same else [rows, 1, max(rows // 2, 1), max(rows - 1, 1)]
    seen = [trees.ancestors(trees.parents("forest", n, (seed, b))) for b, n in enumerate(counts)]
    return seen, [13, 0, 250, 7]


def flat(seen: list[Tensor], before: list[int]) -> list[Tensor]:
    """Each request's queries times keys."""
    return [torch.cat([x.new_ones(len(x), n), x], dim=1).flatten() for x, n in zip(seen, before, strict=True)]


def packed_bits(x: Tensor) -> Tensor:
    """Bytes of bits, the lowest first."""
    padded = torch.nn.functional.pad(x.long(), (0, -len(x) % 8)).view(-1, 8)
    return (padded << torch.arange(8)).sum(-1).to(torch.uint8)


def assert_words(words: Tensor, seen: list[Tensor], rows: int) -> None:
    assert words.shape == (len(seen), rows) and words.dtype == torch.int64
    for got, want in zip(words.tolist(), seen, strict=True):
        for t, row in enumerate(want.tolist()):
            assert [got[t] >> u & 1 for u in range(rows)] == [int(x) for x in row] + [0] * (rows - len(row))


@pytest.mark.parametrize("rows", [1, 5, 8, 33, 64])
@pytest.mark.parametrize("same", [True, False])
def test_flashinfer(rows: int, same: bool) -> None:
    seen, before = requests(0, rows, same)
    counts = torch.tensor([len(x) for x in seen])
    bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    kv_lens = (counts + torch.tensor(before)).int()
    bools = flat(seen, before)
    of_bits = torch.cat([packed_bits(x) for x in bools])
    assert_words(serving.tree_from_flashinfer(of_bits, bounds, kv_lens, rows), seen, rows)
    assert_words(serving.tree_from_flashinfer(torch.cat(bools), bounds, kv_lens, rows), seen, rows)


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 16, 17, 32, 64])
def test_sglang(rows: int) -> None:
    seen, before = requests(1, rows, True)
    full, square = torch.cat(flat(seen, before)), torch.stack(seen).flatten()
    assert_words(serving.tree_from_sglang(full, rows, torch.tensor(before)), seen, rows)
    longer = torch.cat([full, full.new_ones(9)])  # a buffer of a graph
    assert_words(serving.tree_from_sglang(longer, rows, torch.tensor(before)), seen, rows)
    assert_words(serving.tree_from_sglang(square, rows), seen, rows)
    if rows <= 32:
        dtype = torch.uint8 if rows <= 8 else torch.uint16 if rows <= 16 else torch.uint32
        assert_words(
            serving.tree_from_sglang(serving.tree_words(torch.stack(seen)).flatten().to(dtype), rows), seen, rows
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vllm(dtype: torch.dtype) -> None:
    seen = trees.ancestors(trees.parents("binary", 12, 0))
    bias = torch.where(seen, 0.0, -torch.inf).to(dtype)
    assert_words(serving.tree_from_vllm(bias, 3), [seen] * 3, 12)


WRONG: dict[str, Callable[[], Any]] = {
    "mask: is torch.int32 of 2 dimensions, must be int64 of 2": lambda: serving.tree_words(
        torch.ones(1, 2, dtype=torch.int32)
    ),
    r"mask: has shape \(1, 2, 3\), must be \(batch, T, T\)": lambda: serving.tree_words(torch.ones(1, 2, 3) > 0),
    "parents: is of trees of 65 rows, at most 64": lambda: serving.tree_from_parents(torch.zeros(1, 65).long()),
    "mask: has 7 elements, must be a multiple of 4": lambda: serving.tree_from_sglang(torch.ones(7) > 0, 2),
    "mask: is torch.uint8 of 1 dimensions, must be bool of 1": lambda: serving.tree_from_sglang(
        torch.ones(4).byte(), 2, torch.tensor([0, 0])
    ),
    "rows: is of trees of 65 rows": lambda: serving.tree_from_sglang(torch.ones(65) > 0, 65),
    "bias: is torch.float32 of 3 dimensions, must be float32 or .* of 2": lambda: serving.tree_from_vllm(
        torch.zeros(1, 2, 2), 1
    ),
    "mask: is of type list": lambda: serving.tree_words([1]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("text", WRONG)
def test_refusals(text: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{text}"):
        WRONG[text]()
