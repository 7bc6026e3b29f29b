"""The backward of a ring on the Hopper backend, emulated: calls that share the workspace of their rows, or do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

import flashtile
from flashtile.backends.hopper.backward import launch
from flashtile.call.arguments import Grads, Options, Tensors
from flashtile.core.masks import Band
from flashtile.distributed import steps as execution
from flashtile.distributed.exchange import NOTHING, Messages, Parcel, Pending, RankLine
from flashtile.distributed.launches import OfRows, RankPart
from flashtile.distributed.layouts import Layout, ranges
from flashtile.distributed.plan import make_plan
from flashtile.distributed.steps import Steps
from tests.backends.hopper.emulated import on_cpu
from tests.poison import poisoned_memory

HEADS, KV_HEADS = 4, 2


class OneRank(Messages):
    """Gives a rank the other rank's keys, and eighths as their sums; keeps what it sends home to them."""

    def __init__(self, line: RankLine, theirs: tuple[Tensor, Tensor]) -> None:
        super().__init__(line)
        self._theirs = theirs
        self.sent: list[tuple[Tensor, ...]] = []

    def post(self, number: int, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Pending:
        home = (parcel.tensors for parcel in sends if parcel.kind == "back")
        self.sent += [tuple(x.clone() for parts in tensors for x in parts) for tensors in home]
        for parcel in receives:
            for parts, given in zip(parcel.tensors, self._theirs, strict=True):
                if parcel.kind == "keys":
                    for x, some in zip(parts, given.split([len(x) for x in parts]), strict=True):
                        x.copy_(some)
                else:
                    parts[0].fill_(0.125)
        return NOTHING


def gradients(
    lengths: tuple[int, ...], layout: Layout, band: Band, deterministic: bool, head_dim: int
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """The gradients of two ranks put together and those of one, and how many calls of a rank are in a chain."""
    make = torch.Generator().manual_seed(1)
    total, chained = sum(lengths), []
    q, k, v, dout = (
        torch.randn(total, heads, head_dim, generator=make).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    grads = [x.double().requires_grad_() for x in (q, k, v)]
    window = (band.left, band.right)
    exact = flashtile.attention_varlen(
        *grads, bounds, bounds, max(lengths), max(lengths), window_size=window, return_lse=True, backend="cpu"
    )
    want = torch.autograd.grad(exact[0], grads, dout.double())
    rows = [
        torch.cat([torch.arange(r.start, r.stop, r.step) for r in ranges(lengths, 2, rank, layout)]) for rank in (0, 1)
    ]
    got = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)]
    options = Options(
        window_left=band.left, window_right=band.right, softmax_scale=head_dim**-0.5, softcap=0.0, dropout_p=0.0,
        deterministic=deterministic, grads=Grads(True, True, True), backend="hopper",
    )  # fmt: skip
    for rank in (0, 1):
        mine, line = rows[rank], RankLine(None, rank, (0, 1))
        plan = make_plan(lengths, lengths, 2, rank, layout, band)
        spans = [slice(*span) for step in plan.steps[1:] for span in step.spans]
        travels = torch.cat([mine[:0], *(rows[1 - rank][span] for span in spans)])
        messages = OneRank(line, (k[travels], v[travels]))
        steps = Steps(plan, line, options, RankPart(HEADS, 0), q.device, messages, rounds=True)
        t = Tensors(q[mine], k[mine], v[mine])
        of_rows = OfRows(exact[0][mine].bfloat16(), exact[1][:, mine].float().contiguous(), dout[mine], None)
        with mock.patch.object(launch, "chain_launches", wraps=launch.chain_launches) as chain:
            found = steps.backward(t, of_rows)
        # All that came home are eighths.
        for span in (span for step in plan.steps for span in step.back):
            for total_of in got[1:]:
                total_of[mine[slice(*span)]] -= 0.125
        chained.append(chain.call_count)
        assert found.dq is not None and found.dk is not None and found.dv is not None
        assert found.dq.dtype == found.dk.dtype == found.dv.dtype == torch.bfloat16
        for total_of, part in zip(got, (found.dq, found.dk, found.dv), strict=True):
            total_of[mine] += part.double()
        for sums in messages.sent:
            for total_of, part in zip(got[1:], sums, strict=True):
                total_of[travels] += part.double()
    return got, list(want), chained


@pytest.mark.long
@pytest.mark.parametrize(("lengths", "layout", "band", "deterministic", "head_dim", "chained"), [
    ((1024,), "zigzag", Band(None, 0), False, 64, [3, 3]),
    pytest.param((1024,), "zigzag", Band(None, 0), True, 128, [3, 3], marks=pytest.mark.slow),
    ((700,), "contiguous", Band(), False, 64, [3, 3]),
    ((512, 512), "zigzag", Band(None, 0), False, 64, [3, 3]),
    ((1024,), "contiguous", Band(300, 0), False, 64, [2, 2]),
    ((2048,), "contiguous", Band(300, 0), False, 64, [2, 2]),
    ((1024,), "contiguous", Band(None, 0), False, 64, [2, 2]),
    ((500, 300), "zigzag", Band(None, 0), False, 64, [0, 0]),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("halves", ["rows", "heads"])
def test_the_backward_of_two_ranks_is_that_of_one(
    lengths: tuple[int, ...], layout: Any, band: Band, deterministic: bool, head_dim: int, chained: list[int],
    halves: str,
) -> None:  # fmt: skip
    enough = mock.patch.object(execution, "_ENOUGH_KEYS", 2**62 if halves == "rows" else 0)
    with on_cpu(3, 4), poisoned_memory(), enough:
        got, want, calls = gradients(lengths, layout, band, deterministic, head_dim)
    for name, x, right in zip(("dq", "dk", "dv"), got, want, strict=True):
        error = (x - right).norm() / right.norm()
        assert error < 6e-3, (name, error.item())
        assert (x - right).abs().max() < 0.03 * right.abs().max(), name
    assert calls == chained
