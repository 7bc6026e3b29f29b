"""The ring by copy engines, with files in place of memory and signals: its places and its order."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashtile import InvalidInputError, distributed
from flashtile.distributed import copies, kinds
from flashtile.distributed.copies import SIGNALS, may_copy
from flashtile.distributed.exchange import RankLine, Ranks
from flashtile.ops import plans
from tests.distributed import ranks
from tests.distributed.pool import Pool
from tests.distributed.ranks import NAMED


class Mapped:
    """``copies.Memory`` in files, where every operation is done when it is queued."""

    def __init__(self, folder: str, line: Any, size: int) -> None:
        self.size, self._rank = size, line.rank
        names = [Path(folder) / f"{member}-{size}" for member in line.members]
        self._memories = [torch.from_file(str(name), shared=True, size=size, dtype=torch.uint8) for name in names]
        signals = Path(folder) / "signals"
        count = SIGNALS * line.size * line.size
        self._signals = torch.from_file(str(signals), shared=True, size=count, dtype=torch.int32)
        self._signals = self._signals.view(line.size, SIGNALS, line.size)
        self.local = self._memories[line.rank]

    def at(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.local[start : start + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(list(shape))

    def copy(self, peer: int, start: int, x: Tensor) -> None:
        assert peer != self._rank and x.is_contiguous()
        self._memories[peer][start : start + x.nbytes].view(x.dtype).view(x.shape).copy_(x)

    def put(self, peer: int, signal: int) -> None:
        assert self._signals[peer, signal, self._rank] == 0, "a signal that nobody has waited for"
        self._signals[peer, signal, self._rank] = 1

    def wait(self, peer: int, signal: int) -> None:
        stop_s = time.monotonic() + 60
        while not self._signals[self._rank, signal, peer]:
            assert time.monotonic() < stop_s, f"no signal {signal} of rank {peer}"
            time.sleep(0.0005)
        self._signals[self._rank, signal, peer] = 0

    @contextlib.contextmanager
    def beside(self, what: str, peers: Sequence[int]) -> Iterator[list[Any]]:
        events: list[Any] = []
        yield events
        events.append(None)


def compare(mesh: DeviceMesh, folder: str, name: str, layout: str) -> dict[str, float]:
    made: list[Mapped] = []

    def memory_of(line: Any, device: torch.device, size: int) -> Mapped:
        made.append(Mapped(folder, line, size))
        made[-1].local.fill_(255)  # NaN, in every float dtype
        torch.distributed.barrier(line.group)
        return made[-1]

    with (
        plans.own_plans(),
        mock.patch.object(copies, "memory_of", memory_of),
        mock.patch.object(kinds, "reach", lambda device: [str(mesh.get_rank()), *map(str, range(mesh.size()))]),
        mock.patch.dict(os.environ, FLASHTILE_COPIES="auto"),
        mock.patch.object(copies._Arrival, "wait", lambda self: None),
    ):
        found = ranks.compare(mesh, NAMED[name], torch.float64, [(layout, "ring")])
    assert made and not made[0]._signals[mesh.get_rank()].any()
    return found


@pytest.mark.parametrize(("world", "name", "layout"), [
    (2, "causal", "zigzag"), (3, "full", "zigzag"), (4, "everything", "striped"), (8, "packed_window", "contiguous"),
    (8, "packed", "zigzag"), (5, "wider_v", "contiguous"), (4, "only_k", "zigzag"), (4, "only_q", "zigzag"),
    (8, "window_causal", "zigzag"),
])  # fmt: skip
def test_copies_equal_messages(pool: Pool, world: int, name: str, layout: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for found in pool.run(compare, folder, name, layout, mesh=world):
            assert all(x < 1e-13 for x in found.values()), found


def test_only_dv_has_its_place(pool: Pool) -> None:
    """A parcel of values alone lies where values lie."""
    with tempfile.TemporaryDirectory() as folder:
        for found in pool.run(compare, folder, "only_v", "zigzag", mesh=4):
            assert all(x < 1e-13 for x in found.values()), found


def apart(mesh: DeviceMesh, copies_are: str) -> None:
    with mock.patch.dict(os.environ, FLASHTILE_COPIES=copies_are):
        x = torch.ones(1, 4, 2, 8)
        distributed.attention(x, x, x, mesh=mesh, comm="ring")


def test_asked_for_where_memory_is_not_reached(pool: Pool) -> None:
    for error in pool.errors(apart, "1", mesh=3)[:3]:
        said = "FLASHTILE_COPIES: is on, but rank 0 cannot write to the memory of rank 1's GPU"
        assert isinstance(error, InvalidInputError) and str(error) == said
    pool.run(apart, "auto", mesh=3)


def test_who_reaches_whom() -> None:
    """Four ranks, two rings of two: it counts who reaches whom in a ring."""
    ranks = Ranks(RankLine(None, 0, (0, 2)), RankLine(None, 0, (0, 1)), (0, 1, 2, 3))
    reached = [["a", "c"], ["b", "d"], ["c", "a"], ["d", "b"]]
    with mock.patch.dict(os.environ, FLASHTILE_COPIES="auto"):
        assert may_copy(ranks, reached)
        assert not may_copy(ranks, [*reached[:3], ["d", "a"]])
        assert not may_copy(ranks, [[]] * 4)
    with mock.patch.dict(os.environ, FLASHTILE_COPIES="0"):
        assert not may_copy(ranks, reached)
