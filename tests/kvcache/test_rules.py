"""Rules of cached calls that a comparison of numbers alone would not show."""

from __future__ import annotations

import pytest
import torch

import flashtile
from tests.kvcache.alone import invariance_cases, judge_alone
from tests.kvcache.cases import CacheCase


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", invariance_cases(), ids=str)
def test_a_sequence_gives_the_same_bits_in_any_batch(case: CacheCase, dtype: torch.dtype) -> None:
    judge_alone(case, dtype, "cpu")


def test_bits_do_not_depend_on_where_rows_lie() -> None:
    """PyTorch's products of float32 round otherwise where rows are not on 64 bytes, as behind others of odd width."""
    sequences = ((64, 3, 0), (64, 34, 0), (129, 1, 0), (70, 39, 0))
    judge_alone(CacheCase("odd", sequences, packed=True, heads=2, kv_heads=1, head_dim=193), torch.float32, "cpu")


def test_sequences_may_share_pages_and_entries() -> None:
    """A prefix that two sequences have in common is there once; new keys go to pages of their own."""
    pages, new = torch.randn(4, 4, 2, 8), torch.randn(2, 1, 2, 8)
    q, lengths = torch.randn(2, 1, 4, 8), torch.tensor([5, 6], dtype=torch.int32)
    table = torch.tensor([[2, 0], [2, 3]], dtype=torch.int32)
    k_pages, v_pages = pages.clone(), pages.clone()
    got = flashtile.attention_with_kvcache(q, k_pages, v_pages, cache_seqlens=lengths, page_table=table, k=new, v=new)
    for b, last in enumerate((0, 3)):
        keys = torch.cat([pages[2], pages[last][: int(lengths[b]) - 4], new[b]])[None]
        torch.testing.assert_close(got[b : b + 1], flashtile.attention(q[b : b + 1], keys, keys))
    entry = torch.zeros(2, dtype=torch.int32)
    twice = flashtile.attention_with_kvcache(q, pages, pages, cache_seqlens=lengths // 2, cache_batch_idx=entry)
    for b in range(2):
        keys = pages[:1, : int(lengths[b]) // 2]
        torch.testing.assert_close(twice[b : b + 1], flashtile.attention(q[b : b + 1], keys, keys))


@pytest.mark.parametrize("where", ["k", "v", "k_cache", "v_cache", "q"])
def test_a_nan_that_is_seen_is_not_lost(where: str) -> None:
    data = {"q": torch.randn(2, 1, 4, 8), "k_cache": torch.randn(2, 9, 2, 8), "v_cache": torch.randn(2, 9, 2, 8)}
    data |= {"k": torch.randn(2, 1, 2, 8), "v": torch.randn(2, 1, 2, 8)}
    for dtype in (torch.float32, torch.float8_e4m3fn):
        mine = {name: x.clone() for name, x in data.items()}
        mine[where][0, 0, 1, 2] = torch.nan
        caches = [mine.pop(name).to(dtype) for name in ("k_cache", "v_cache")]
        out = flashtile.attention_with_kvcache(mine.pop("q"), *caches, cache_seqlens=5, **mine)
        assert out[0, 0, 1 if where == "q" else 2 :, 2].isnan().any() and out[1].isfinite().all()
