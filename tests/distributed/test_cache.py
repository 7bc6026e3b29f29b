"""Caches whose keys are spread over ranks give what one cache gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flashtile
from flashtile import InvalidInputError, distributed
from tests.distributed.pool import Pool

LENGTHS = torch.tensor([0, 1, 7, 29, 40], dtype=torch.int32)


def owners(layout: str, interleave: int, world: int, capacity: int) -> Tensor:
    """The rank that holds each of 40 keys."""
    keys = torch.arange(40)
    return keys // interleave % world if layout == "striped" else keys // capacity


def compare(
    mesh: DeviceMesh,
    layout: str,
    interleave: int,
    seqlen_q: int,
    pages: int,
    dtype: torch.dtype,
    keywords: dict[str, Any],
) -> tuple[float, float]:
    make = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype)

    q, k, v = normal(5, seqlen_q, 4, 8), normal(5, 40, 2, 8), normal(5, 40, 2, 12)
    sinks = normal(4) if keywords.get("sinks") else None
    keywords = {**keywords, "sinks": sinks, "return_lse": True}
    want = flashtile.attention_with_kvcache(q, k, v, cache_seqlens=LENGTHS, **keywords)
    world = len(mesh.mesh.flatten())
    rank = mesh.mesh.flatten().tolist().index(torch.distributed.get_rank())
    capacity = -(-40 // world) + 2 if layout == "contiguous" else 40  # a multiple of a page
    mine = owners(layout, interleave, world, capacity) == rank
    # What lies behind a rank's keys is never read into a result.
    here_k, here_v = (torch.full((5, capacity, 2, x.shape[-1]), torch.nan, dtype=dtype) for x in (k, v))
    here_k[:, : mine.sum()], here_v[:, : mine.sum()] = k[:, mine], v[:, mine]
    if pages:
        table = torch.randperm(5 * capacity // pages, generator=make).view(5, -1).int()
        paged = []
        for x in (here_k, here_v):
            pool = x.new_empty(5 * capacity // pages, pages, 2, x.shape[-1])
            pool[table.flatten().long()] = x.reshape(-1, pages, 2, x.shape[-1])
            paged.append(pool)
        here_k, here_v = paged
        keywords["page_table"] = table
    placed = {"mesh": mesh, "layout": layout, "interleave": interleave}
    got = distributed.attention_with_sharded_kvcache(q, here_k, here_v, cache_seqlens=LENGTHS, **placed, **keywords)
    assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(got, want, strict=True))
    assert torch.equal(got[1] == -torch.inf, want[1] == -torch.inf)
    apart = [
        torch.where(a == b, 0.0, a.double() - b.double()).abs().max().item() for a, b in zip(got, want, strict=True)
    ]
    return apart[0], apart[1]


@pytest.mark.one_in(7)
@pytest.mark.parametrize("keywords", [
    {}, {"causal": False}, {"window_size": (5, None)}, {"window_size": (3, 2), "causal": False},
    {"window_size": (None, 1), "causal": False}, {"softcap": 2.0, "sinks": True}, {"softmax_scale": 0.7},
], ids=str)  # fmt: skip
def test_sharded_caches_equal_one(pool: Pool, keywords: dict[str, Any]) -> None:
    for layout, interleave in (("striped", 1), ("striped", 4), ("contiguous", 1)):
        for seqlen_q, pages in ((1, 0), (3, 0), (2, 2)):
            for world in (1, 3):
                arguments = layout, interleave, seqlen_q, pages, torch.float64, keywords
                for apart in pool.run(compare, *arguments, mesh=world):
                    assert max(apart) < 1e-13, arguments


def test_ranks_of_two_dimensions_and_low_precision(pool: Pool) -> None:
    plane = {"mesh": ((0, 1), (2, 3)), "names": ("ring", "ulysses")}
    for apart in pool.run(compare, "striped", 2, 1, 0, torch.float32, {}, **plane):
        assert max(apart) < 2e-6
    for apart in pool.run(compare, "striped", 1, 1, 0, torch.bfloat16, {}, mesh=8):
        assert apart[0] < 2**-7 and apart[1] < 1e-2


def differently(mesh: DeviceMesh) -> None:
    q, cache = torch.ones(1, 1, 2, 8), torch.ones(1, 4, 2, 8)
    distributed.attention_with_sharded_kvcache(
        q, cache, cache, cache_seqlens=4, mesh=mesh, interleave=1 + mesh.get_rank(), layout="striped"
    )


def refused(mesh: DeviceMesh, keywords: dict[str, Any]) -> str:
    q, cache = torch.ones(1, 1, 2, 8), torch.ones(1, 4, 2, 8)
    with pytest.raises(InvalidInputError) as caught:
        distributed.attention_with_sharded_kvcache(
            **{"q": q, "k_cache": cache, "v_cache": cache, "cache_seqlens": 4, "mesh": mesh, **keywords}
        )
    return str(caught.value)


def test_wrong_calls(pool: Pool) -> None:
    for error in pool.errors(differently, mesh=2)[:2]:
        assert str(error) == "interleave: is 2 on rank 1, but 1 on rank 0"
    for keywords, message in (
        ({"layout": "zigzag"}, "layout: is 'zigzag', must be one of striped, contiguous"),
        ({"interleave": 0}, "interleave: is 0, must be an integer >= 1"),
        ({"q": torch.ones(2, 8)}, "q: has 2 dimensions, must have 4"),
        ({"q": torch.ones(1, 1, 2, 8, requires_grad=True)}, "q: requires grad, but a cached call has no gradient"),
    ):
        assert all(found.startswith(message) for found in pool.run(refused, keywords, mesh=1))
