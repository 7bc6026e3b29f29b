"""Rows whose scores are all huge and finite, over ranks that hold different numbers of their keys."""

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

# What is added to all scores of a row; of the last but one row all keys are dropped.
ROWS = (torch.finfo(torch.float32).min, -1e9, -3e5, 1e9, torch.finfo(torch.float32).max, -torch.inf, 0.0)
KEYS = 37


def compare(mesh: DeviceMesh, kind: str, layout: str, comm: str) -> dict[str, float]:
    """Distances of this rank's results from those of one."""
    make = torch.Generator().manual_seed(5)
    # Scores of whole numbers and halves, which float32 holds near 3e5 too, in whichever order they are summed.
    whole = [torch.randint(-1, 2, (2, n, 4, 4), generator=make).float() for n in (len(ROWS), KEYS, KEYS)]
    added = torch.tensor(ROWS)[:, None].expand(-1, KEYS)
    # The average of a row; one key more, without a value, for those of -1e9; all of the denominator for most rows.
    sinks = torch.tensor([-torch.inf, -1e9, 0.5, -torch.inf])
    leaves = [*whole, sinks] if kind == "function" else [*whole, sinks, added.contiguous()]
    leaves = [x.clone().requires_grad_() for x in leaves]

    def shifted(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + added[q, k]

    def call(function: Any, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Any:
        given = {"score_mod": shifted} if kind == "function" else {"attn_bias": leaves[4]}
        return function(q, k, v, sinks=leaves[3], return_lse=True, **given, **others)

    results = call(flashtile.attention, *leaves[:3])
    seeds = [torch.randn(x.shape, generator=make) for x in results]
    seeds[1][:, [0, 3], 5] = 0  # no key, no sink
    want = [*results, *torch.autograd.grad(results, leaves, seeds)]
    mean = leaves[2].mean(1, keepdim=True).expand(-1, 2, -1, -1)
    torch.testing.assert_close(results[0][:, :2, 0], mean[:, :, 0])
    torch.testing.assert_close(results[0][:, 1, 1], mean[:, 1, 1] * KEYS / (KEYS + 1))
    mine = [distributed.shard(x.detach(), mesh, layout).requires_grad_() for x in whole]
    lengths = {"seqlen_q": len(ROWS), "seqlen_k": KEYS}
    got = call(distributed.attention, *mine, mesh=mesh, layout=layout, comm=comm, **lengths)
    by_rows = zip((*results, *seeds), (1, 2, 1, 2), strict=True)
    of_rows = [distributed.shard(x.detach(), mesh, layout, dim=dim) for x, dim in by_rows]
    got = [*got, *torch.autograd.grad(got, [*mine, *leaves[3:]], of_rows[2:])]
    parts = [*of_rows[:2], *(distributed.shard(x, mesh, layout) for x in want[2:5]), *want[5:]]
    names = ("out", "lse", "dq", "dk", "dv", "dsinks", "dbias")
    return {n: ranks.distance(x.detach(), y, w, 1.0) for n, x, y, w in zip(names, got, parts, want, strict=False)}


@pytest.mark.parametrize("kind", ["bias", "function"])
@pytest.mark.parametrize(
    ("layout", "comm", "world"),
    [("contiguous", "ring", 3), ("zigzag", "allgather", 2), ("striped", "ulysses", 2), ("zigzag", "ring", 4)],
)
def test_counts_of_keys_are_not_lost(pool: Pool, kind: str, layout: str, comm: str, world: int) -> None:
    for found in pool.run(compare, kind, layout, comm, mesh=world):
        assert all(x < 1e-6 for x in found.values()), found
