"""Latent rows (MLA): the ways to say that values are the keys' first columns, what is written, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import InvalidInputError
from flashtile import attention_with_kvcache as attend
from flashtile.call.cached_arguments import FLOAT8
from flashtile.serving import latent_rows
from tests.kvcache.cases import EIGHT_BIT_ROWS, CacheCase, build, judge
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


def test_compiled_calls_are_the_same() -> None:
    q, cache, table = tensors()
    new, options = torch.randn(3, 2, 1, DIM), {"cache_seqlens": (LENGTHS - 2).clamp(min=-1), "page_table": table}

    def call(q: Tensor, cache: Tensor, new: Tensor) -> Tensor:
        return attend(q, cache, cache[..., :DIM_V], k=new, **options)

    caches = cache.clone(), cache.clone()
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(q, caches[0], new)
    assert torch.equal(found, call(q, caches[1], new))
    torch.testing.assert_close(caches[0], caches[1], rtol=0, atol=0, equal_nan=True)


def packed(rows: int = 2, kind: torch.dtype = FLOAT8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``tensors`` of 576 columns in bfloat16, the cache in rows of 656 bytes, and those as float64 numbers."""
    make = torch.Generator().manual_seed(1)
    q = torch.randn(3, rows, 4, 576, generator=make).bfloat16()
    cache = latent_rows(torch.randn(14, 8, 1, 576, generator=make) * torch.rand(14, 8, 1, 1, generator=make))
    bits = cache.view(torch.uint8)
    scales = bits[..., 512:528].contiguous().view(torch.float32).double()
    values = (cache[..., :512].double().unflatten(-1, (4, 128)) * scales[..., None]).flatten(-2)
    others = bits[..., 528:].contiguous().view(torch.bfloat16).double()
    return q, cache.view(kind), tensors()[2], torch.cat([values, others], dim=-1)


@pytest.mark.parametrize("kind", [FLOAT8, torch.uint8])
def test_rows_of_656_bytes_are_what_they_stand_for(kind: torch.dtype) -> None:
    """As e4m3 or as bytes, with queries whole or in parts: the same bits, near those of the numbers in float64."""
    q, cache, table, wide = packed(kind=kind)
    options = {"cache_seqlens": LENGTHS, "page_table": table, "return_lse": True}
    out, lse = attend(q, cache, cache[..., :512], **options)
    found = attend((q[..., :512].contiguous(), q[..., 512:].contiguous()), cache, cache[..., :512], **options)
    assert torch.equal(out, found[0]) and torch.equal(lse, found[1])
    exact = attend(q.double(), wide, wide[..., :512], **options)
    rounded = attend(q, wide.bfloat16(), wide.bfloat16()[..., :512], **options)
    assert_close({"out": out, "lse": lse}, lambda: dict(zip(("out", "lse"), exact, strict=True)),
                 dict(zip(("out", "lse"), rounded, strict=True)), torch.bfloat16)  # fmt: skip


@pytest.mark.parametrize("case", EIGHT_BIT_ROWS, ids=str)
def test_calls_over_rows_of_656_bytes(case: CacheCase) -> None:
    judge(build(case, torch.bfloat16), "cpu")


def test_rows_of_656_bytes_are_flashmlas() -> None:
    """512 numbers, the largest of each 128 columns 448 times its scale, four scales, 64 bfloat16 numbers."""
    rows = torch.randn(5, 3, 576)
    rows[0, 0, 128:256] = 0.0
    bits = latent_rows(rows).view(torch.uint8)
    assert bits.shape == (5, 3, 656)
    scales = bits[..., 512:528].contiguous().view(torch.float32)
    top = rows[..., :512].unflatten(-1, (4, 128)).abs().amax(-1)
    torch.testing.assert_close(scales, (top / 448).clamp(min=torch.finfo(torch.float32).tiny))
    codes = bits[..., :512].contiguous().view(FLOAT8).float().unflatten(-1, (4, 128))
    assert (codes.abs().amax(-1) == torch.where(top > 0, 448.0, 0.0)).all()
    near = codes * scales[..., None] - rows[..., :512].unflatten(-1, (4, 128))
    assert (near.abs() <= rows[..., :512].unflatten(-1, (4, 128)).abs() / 15 + scales[..., None] / 512).all()
    assert torch.equal(bits[..., 528:].contiguous().view(torch.bfloat16), rows[..., 512:].bfloat16())
    with pytest.raises(InvalidInputError, match="^rows: "):
        latent_rows(rows[..., :512])


BAD_ROWS = {
    "q of other columns": ("q", lambda q, c, t: attend(q[..., :512], c, c[..., :512], **t)),
    "q in float16": ("q", lambda q, c, t: attend(q.half(), c, c[..., :512], **t)),
    "q a list": ("q", lambda q, c, t: attend([q], c, c[..., :512], **t)),
    "values apart": ("v_cache", lambda q, c, t: attend(q, c, c[..., :512].clone(), **t)),
    "values whole": ("v_cache", lambda q, c, t: attend(q, c, c, **t)),
    "rows at odd places": ("k_cache", lambda q, c, t: attend(
        q, *(lambda x: (x[..., 1:657], x[..., 1:513]))(torch.zeros(14, 8, 1, 658, dtype=torch.uint8)), **t)),
    "new rows": ("k", lambda q, c, t: attend(q, c, c[..., :512], k=q[:, :, :1], **t)),
    "scales of values": ("v_scale", lambda q, c, t: attend(q, c, c[..., :512], v_scale=2.0, **t)),
    "qv": ("qv", lambda q, c, t: attend(q, c, c[..., :512], qv=q[..., :512], **t)),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_calls_over_rows_of_656_bytes(case: str) -> None:
    argument, call = BAD_ROWS[case]
    q, cache, table, _ = packed()
    with pytest.raises(InvalidInputError, match=f"^{argument}: "):
        call(q, cache, {"cache_seqlens": LENGTHS, "page_table": table})


def test_compiled_calls_over_rows_of_656_bytes_are_the_same() -> None:
    q, cache, table, _ = packed()

    def call(q: Tensor, cache: Tensor) -> Tensor:
        return attend(q, cache, cache[..., :512], cache_seqlens=LENGTHS, page_table=table)

    found = torch.compile(call, fullgraph=True, backend="aot_eager")(q, cache)
    assert torch.equal(found, call(q, cache))
    said = flashtile.explain(q, k_cache=cache, v_cache=cache[..., :512], cache_seqlens=LENGTHS, page_table=table)
    assert "rows of 656 bytes" in said


def test_an_8_bit_cache_with_one_scale_is_read_once() -> None:
    """Queries whole or in parts, a scale for all or by head, given once for keys and values: the same bits."""
    q, cache, table = tensors(torch.bfloat16)
    eight = torch.where(cache.isfinite(), 20 * cache.float(), torch.nan).clamp(-448, 448).to(FLOAT8)
    scale, parts = torch.tensor([0.05]), (q[..., :DIM_V], q[..., DIM_V:])
    options = {"cache_seqlens": LENGTHS, "page_table": table}
    out = attend(parts, eight, eight[..., :DIM_V], k_scale=scale, v_scale=scale, **options)
    for scales in ({"k_scale": scale, "v_scale": scale}, {"k_scale": 0.05, "v_scale": 0.05}):
        assert torch.equal(out, attend(q, eight, eight[..., :DIM_V], **scales, **options))
        said = flashtile.explain(q, k_cache=eight, v_cache=eight[..., :DIM_V], **scales, **options)
        assert "queries of values" in said
    apart = attend(q, eight, eight[..., :DIM_V], k_scale=scale, v_scale=scale.clone(), **options)
    torch.testing.assert_close(out, apart, atol=0.02, rtol=0.02)
    wide = eight.double() * 0.05
    exact = by_definition(q, wide, table, LENGTHS, torch.float64)["out"]
    assert (out.double() - exact).norm() < 0.01 * exact.norm()
