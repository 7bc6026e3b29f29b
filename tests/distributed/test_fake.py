"""2,048 ranks of which few exist: what one posts for another is what that one expects, by number, shape and dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from flashtile import distributed
from flashtile.distributed import exchange, kinds

WORLD = 2048


@contextmanager
def one_of_many(rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def posted_by(rank: int, shape: tuple[int, ...], names: tuple[str, ...], rows: int, **keywords: Any) -> Any:
    """What a rank sends to others and expects of them, in order, and its collectives: (name, shapes, dtype, group)."""
    sends: dict[int, list[Any]] = {}
    expects: dict[int, list[Any]] = {}
    collectives: list[Any] = []
    batch, members = dist.batch_isend_irecv, dist.get_process_group_ranks

    def noted_batch(ops: Any) -> Any:
        for op in ops:
            found = sends if op.op is dist.isend else expects
            found.setdefault(op.peer, []).append((tuple(op.tensor.shape), op.tensor.dtype))
        return batch(ops)

    def noted(name: str, function: Any) -> Any:
        def run(out: Any, given: Any, *splits: Any, group: Any, **others: Any) -> Any:
            collectives.append((name, tuple(out.shape), tuple(given.shape), out.dtype, tuple(members(group)), splits))
            return function(out, given, *splits, group=group, **others)

        return run

    with (
        one_of_many(rank),
        mock.patch.object(kinds, "_check_rows"),  # all ranks say what this one says
        mock.patch.object(dist, "batch_isend_irecv", noted_batch),
        mock.patch.object(dist, "all_to_all_single", noted("all_to_all", dist.all_to_all_single)),
        mock.patch.object(exchange, "_all_gather", noted("gather", exchange._all_gather)),
        mock.patch.object(exchange, "_reduce_scatter", noted("scatter", exchange._reduce_scatter)),
    ):
        mesh: DeviceMesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        q, k, v = (distributed.shard(torch.ones(1, rows, 8, width), mesh).requires_grad_() for width in (4, 4, 6))
        lengths = {"seqlen_q": rows, "seqlen_k": rows}
        out = distributed.attention(q, k, v, mesh=mesh, causal=True, **lengths, **keywords)
        assert out.shape == (1, q.shape[1], 8, 6)
        out.sum().backward()
        assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]
    return sends, expects, collectives


@pytest.mark.long
@pytest.mark.parametrize(("shape", "names", "rows"), [
    ((WORLD,), ("ring",), WORLD),
    pytest.param((WORLD,), ("ring",), 2 * WORLD + 9, marks=pytest.mark.slow),
    ((256, 8), ("ring", "ulysses"), 2 * WORLD + 700),
], ids=str)  # fmt: skip
def test_posts_fit(shape: tuple[int, ...], names: tuple[str, ...], rows: int) -> None:
    parts = WORLD // shape[0]
    some = [parts * ring for ring in (0, 1, 2, 3, shape[0] - 2, shape[0] - 1)]
    found = {rank: posted_by(rank, shape, names, rows, comm="ring") for rank in some}
    compared = 0
    for rank, (sends, _, _) in found.items():
        for peer in some:
            compared += len(sends.get(peer, ()))
            assert sends.get(peer, []) == found[peer][1].get(rank, []), (rank, peer)
    assert compared > 4 * len(some)
    if parts > 1:
        check_exchange_of_heads(found, shape, names, rows)


def check_exchange_of_heads(found: dict[int, Any], shape: tuple[int, ...], names: tuple[str, ...], rows: int) -> None:
    """Ranks of one group say the same group, and what each gives another is what that one takes."""
    mine, other = found[8][2], posted_by(11, shape, names, rows, comm="ring")[2]
    exchanges = [[each for each in some if each[0] == "all_to_all"] for some in (mine, other)]
    assert len(exchanges[0]) == len(exchanges[1]) == 2 * 4 - 1
    for (_, _, given, dtype, group, splits), (_, _, _, other_dtype, other_group, other_splits) in zip(
        *exchanges, strict=True
    ):
        assert group == other_group == tuple(range(8, 16)) and dtype == other_dtype
        assert sum(splits[1]) == given[0] and splits[1][3] == other_splits[0][0] and splits[0][3] == other_splits[1][0]


@pytest.mark.long
def test_gathering(capsys: pytest.CaptureFixture[str]) -> None:
    first, last = (posted_by(rank, (WORLD,), ("ring",), WORLD + 5, comm="allgather")[2] for rank in (0, WORLD - 1))
    assert first == last
    names = [name for name, *_ in first]
    # What the call is; keys and values, twice; the sums of their gradients.
    assert names == ["gather", "gather", "gather", "gather", "gather", "scatter", "scatter"]
    assert [shape for _, shape, *_ in first[1:3]] == [(8 * WORLD, 8, 4), (8 * WORLD, 8, 6)]
