"""Latent rows (MLA): the ways to say that values are the keys' first columns, what is written, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import InvalidInputError
from flashtile import attention_with_kvcache as attend
from tests.rule import assert_close

LENGTHS = torch.tensor([37, 0, 50], dtype=torch.int32)
DIM, DIM_V = 24, 16


def tensors(dtype: torch.dtype = torch.float32, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of 4 heads, a cache of latent rows in pages of 8, what no sequence has being NaN, and their table."""
    make = torch.Generator().manual_seed(0)
    q = torch.randn(3, rows, 4, DIM, generator=make).to(dtype)
    cache, table = torch.full((14, 8, 1, DIM), torch.nan, dtype=dtype), torch.full((3, 8), -1, dtype=torch.int32)
    order = iter(torch.randperm(14, generator=make).tolist())
    for b, length in enumerate(LENGTHS.tolist()):
        for j in range(length):
            table[b, j // 8] = next(order) if j % 8 == 0 else table[b, j // 8]
            cache[table[b, j // 8], j % 8] = torch.randn(1, DIM, generator=make).to(dtype)
    return q, cache, table


def by_definition(q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Out and lse of a causal call, written out."""
    outs, lses = [], []
    for b, length in enumerate(lengths.tolist()):
        rows = cache[table[b, : -(-length // 8)].long()].flatten(0, 2)[:length].to(dtype)
        scores = torch.einsum("qhd,kd->hqk", q[b].to(dtype), rows) * DIM**-0.5
        i, j = torch.arange(q.shape[1])[:, None] + length - q.shape[1], torch.arange(length)
        scores = scores.masked_fill(j > i, -torch.inf)
        lse = scores.logsumexp(-1) if length else scores.new_full(scores.shape[:2], -torch.inf)
        probs = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
        outs.append(torch.einsum("hqk,kd->qhd", probs, rows[:, :DIM_V]))
        lses.append(lse)
    return {"out": torch.stack(outs), "lse": torch.stack(lses)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_whole_in_two_parts_and_with_other_keys(dtype: torch.dtype) -> None:
    """Three ways to say one call give the same bits, and they are right."""
    q, cache, table = tensors(dtype)
    options = {"cache_seqlens": LENGTHS, "page_table": table, "return_lse": True}
    whole = attend(q, cache, cache[..., :DIM_V], **options)
    parts = q[..., :DIM_V].contiguous(), q[..., DIM_V:].contiguous()
    found = attend(parts, cache, cache[..., :DIM_V], **options)
    assert all(map(torch.equal, whole, found))
    own = cache[..., DIM_V:].clone(), cache[..., :DIM_V].clone()
    found = attend(parts[1], *own, qv=parts[0], **options)
    assert all(map(torch.equal, whole, found))
    assert_close(
        dict(zip(("out", "lse"), whole, strict=True)),
        lambda: by_definition(q, cache, table, LENGTHS, torch.float64),
        by_definition(q, cache, table, LENGTHS, dtype),
        dtype,
    )


def test_values_that_are_apart_are_values() -> None:
    """What is no view of the keys is not taken for their columns, nor is a view of other columns."""
    q, cache, table = tensors()
    options = {"cache_seqlens": LENGTHS, "page_table": table}
    other = attend(q, cache, (2 * cache)[..., :DIM_V].contiguous(), **options)
    torch.testing.assert_close(other, 2 * attend(q, cache, cache[..., :DIM_V], **options))
    last = attend(q, cache, cache[..., DIM - DIM_V :], **options)
    torch.testing.assert_close(last, attend(q, cache, cache[..., DIM - DIM_V :].clone(), **options))


@pytest.mark.parametrize("given", ["alone", "with values", "parts"])
def test_new_rows_are_written_once(given: str) -> None:
    q, cache, table = tensors()
    before, new = cache.clone(), torch.randn(3, 2, 1, DIM)
    lengths = (LENGTHS - 2).clamp(min=-1)  # the second sequence is not there
    queries = (q[..., :DIM_V], q[..., DIM_V:]) if given == "parts" else q
    values = {"v": new[..., :DIM_V]} if given == "with values" else {}
    out = attend(queries, cache, cache[..., :DIM_V], cache_seqlens=lengths, page_table=table, k=new, **values)
    for b in (0, 2):
        for i in range(2):
            j = LENGTHS[b] - 2 + i
            assert torch.equal(cache[table[b, j // 8], j % 8], new[b, i])
            before[table[b, j // 8], j % 8] = new[b, i]
    torch.testing.assert_close(cache, before, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(out, by_definition(q, cache, table, LENGTHS, torch.float64)["out"].float())


def test_rotary_turns_the_last_columns_where_queries_are_in_parts() -> None:
    q, cache, table = tensors()
    angles = torch.rand(64, (DIM - DIM_V) // 2)
    turned = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    new, lengths, apart = torch.randn(3, 2, 1, DIM), (LENGTHS - 2).clamp(min=-1), cache.clone()
    options = {"cache_seqlens": lengths, "page_table": table, **turned}
    parts = q[..., :DIM_V], q[..., DIM_V:]
    out = attend(parts, cache, cache[..., :DIM_V], k=new, **options)
    caches = apart[..., DIM_V:].clone(), apart[..., :DIM_V].clone()
    of_two = attend(parts[1], *caches, qv=parts[0], k=new[..., DIM_V:], v=new[..., :DIM_V], **options)
    assert torch.equal(out, of_two)
    torch.testing.assert_close(cache, torch.cat(caches[::-1], dim=-1), rtol=0, atol=0, equal_nan=True)
    with pytest.raises(InvalidInputError, match=r"^rotary_cos: .*q_nope, q_pe"):
        attend(q, cache, cache[..., :DIM_V], k=new, **options)


BAD = {
    "other new values": ("v", lambda q, c, t: attend(
        q, c, c[..., :DIM_V], cache_seqlens=LENGTHS, page_table=t, k=q[:, :, :1], v=q[:, :, 1:2, :DIM_V])),
    "parts of other widths": ("q", lambda q, c, t: attend(
        (q[..., :8], q[..., 8:]), c, c[..., :DIM_V], cache_seqlens=LENGTHS, page_table=t)),
    "parts and values apart": ("v_cache", lambda q, c, t: attend(
        (q[..., :DIM_V], q[..., DIM_V:]), c, c[..., :DIM_V].clone(), cache_seqlens=LENGTHS, page_table=t)),
    "parts and qv": ("qv", lambda q, c, t: attend(
        (q[..., :DIM_V], q[..., DIM_V:]), c, c[..., :DIM_V], cache_seqlens=LENGTHS, page_table=t, qv=q[..., :DIM_V])),
    "three parts": ("q", lambda q, c, t: attend((q, q, q), c, c[..., :DIM_V], cache_seqlens=LENGTHS, page_table=t)),
    "qv of another width": ("qv", lambda q, c, t: attend(
        q, c, c[..., :DIM_V].clone(), cache_seqlens=LENGTHS, page_table=t, qv=q)),
    "qv of another dtype": ("qv", lambda q, c, t: attend(
        q, c, c[..., :DIM_V].clone(), cache_seqlens=LENGTHS, page_table=t, qv=q[..., :DIM_V].double())),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_calls_name_their_argument(case: str) -> None:
    argument, call = BAD[case]
    with pytest.raises(InvalidInputError, match=f"^{argument}: "):
        call(*tensors())


def test_it_is_explained() -> None:
    q, cache, table = tensors()
    for queries in (q, (q[..., :DIM_V], q[..., DIM_V:])):
        said = flashtile.explain(
            queries, k_cache=cache, v_cache=cache[..., :DIM_V], cache_seqlens=LENGTHS, page_table=table
        )
        assert "queries of values" in said and f"head_dim {DIM - DIM_V} (v {DIM_V})" in said


def test_compiled_calls_are_the_same() -> None:
    q, cache, table = tensors()
    new, options = torch.randn(3, 2, 1, DIM), {"cache_seqlens": (LENGTHS - 2).clamp(min=-1), "page_table": table}

    def call(q: Tensor, cache: Tensor, new: Tensor) -> Tensor:
        return attend(q, cache, cache[..., :DIM_V], k=new, **options)

    caches = cache.clone(), cache.clone()
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(q, caches[0], new)
    assert torch.equal(found, call(q, caches[1], new))
    torch.testing.assert_close(caches[0], caches[1], rtol=0, atol=0, equal_nan=True)
