"""Functions of users over ranks: they are given positions in the whole, and what they read gets its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flashtile
from flashtile import distributed
from tests.distributed import ranks
from tests.distributed.pool import Pool

ROWS, HEADS, BOUNDS = 45, 4, (0, 13, 14, 45)


def functions(kind: str, table: Tensor, scale: Tensor) -> dict[str, Any]:
    """The keywords of a kind; table is (heads, rows + 1), scale one number for each document or entry."""

    def relative(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * scale[b] + table[h, (q - k).abs()]

    def thirds(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q + 2 * k + b + h) % 3 != 0) | (q == k)

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    return {
        "score": {"score_mod": relative},
        "mask": {"mask_mod": thirds, "window_size": (20, 4)},
        "band": {"mask_mod": causal},
        "both": {"score_mod": relative, "mask_mod": thirds, "causal": True},
    }[kind]


def compare(mesh: DeviceMesh, kind: str, packed: bool, layout: str, comm: str) -> dict[str, float]:
    make = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    lead = (ROWS,) if packed else (2, ROWS)
    whole = [normal(*lead, heads, 8).requires_grad_() for heads in (HEADS, 2, 2)]
    read = [normal(HEADS, ROWS + 1).requires_grad_(), normal(3).requires_grad_()]
    read = [x for x in read if kind in ("score", "both")] or [torch.zeros(1, 1), torch.zeros(1)]
    keywords, leaves = functions(kind, *read), [x for x in read if x.requires_grad]
    dout, bounds = normal(*lead, HEADS, 8), torch.tensor(BOUNDS, dtype=torch.int32)
    if packed:
        out = flashtile.attention_varlen(*whole, bounds, bounds, **keywords)
    else:
        out = flashtile.attention(*whole, **keywords)
    want = [out.detach(), *torch.autograd.grad(out, [*whole, *leaves], dout)]
    where: dict[str, Any] = {"dim": 0, "cu_seqlens": BOUNDS} if packed else {}
    mine = [distributed.shard(x.detach(), mesh, layout, **where).requires_grad_() for x in whole]
    lengths: dict[str, Any] = {"seqlen_q": ROWS, "seqlen_k": ROWS}
    if packed:
        lengths = {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS}
    for _ in range(2):  # the second has new numbers in the same tensors' places
        out = distributed.attention(*mine, mesh=mesh, layout=layout, comm=comm, **lengths, **keywords)
        got = [out, *torch.autograd.grad(out, [*mine, *leaves], distributed.shard(dout, mesh, layout, **where))]
    parts = [*(distributed.shard(x, mesh, layout, **where) for x in want[:4]), *want[4:]]
    names = ("out", "dq", "dk", "dv", "dtable", "dscale")
    return {n: ranks.distance(x.detach(), y, w) for n, x, y, w in zip(names, got, parts, want, strict=False)}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["score", "mask", "band", "both"])
def test_functions_see_the_whole(pool: Pool, kind: str, packed: bool) -> None:
    for layout, comm in (("zigzag", "ring"), ("striped", "allgather"), ("contiguous", "ring"), ("zigzag", "ulysses")):
        for world in (2,) if comm == "ulysses" else (3, 4):
            for found in pool.run(compare, kind, packed, layout, comm, mesh=world):
                assert all(x < 1e-12 for x in found.values()), (layout, comm, world, found)
