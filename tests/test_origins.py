"""Parts of sequences on the CPU and in the reference, and where they are refused."""

from __future__ import annotations

import pytest
import torch

from flashtile import InvalidInputError, reference
from flashtile.backends import cpu
from flashtile.call.arguments import Options, Tensors
from flashtile.call.problem import Problem
from flashtile.core.masks import Band
from flashtile.ops import dispatch
from tests.origins import judge_parts
from tests.problems import banded_problem


@pytest.mark.parametrize(("dropout", "alibi"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_parts_are_drawn_and_sloped_as_in_the_whole(dtype: torch.dtype, dropout: bool, alibi: bool) -> None:
    judge_parts(cpu.BACKEND, dtype, dropout=dropout, alibi=alibi)


def test_the_reference_has_the_same_parts() -> None:
    class Oracle(cpu.CpuBackend):
        def plan(self, direction, problem, like, given=()):  # type: ignore[no-untyped-def]
            if direction == "forward":
                return lambda t: reference.attention(problem, t)
            return super().plan(direction, problem, like, given)

    judge_parts(Oracle(), torch.float64, dropout=True, alibi=True)


def test_hopper_refuses_parts_and_dense_calls_have_none() -> None:
    q, bounds = torch.zeros(8, 2, 16), torch.tensor([0, 8], dtype=torch.int32)
    origins = torch.zeros(1, 6, dtype=torch.int32)
    packed = Tensors(q, q, q, cu_seqlens_q=bounds, cu_seqlens_k=bounds, origins=origins)
    problem = banded_problem(packed, Band(), needs_grad=True)
    for direction in ("forward", "backward"):
        assert "no positions of a longer sequence (context parallel with dropout or ALiBi)" in dispatch.reasons(
            "hopper", problem, direction
        )
        assert not dispatch.reasons("cpu", problem, direction)
    with pytest.raises(InvalidInputError, match="^origins: is given, but goes with cu_seqlens alone"):
        Problem.of(Tensors(*(x[None] for x in (q, q, q)), origins=origins), Options())
    for wrong in (origins[:, :5], origins.expand(2, -1), origins.long()):
        with pytest.raises(InvalidInputError, match="^origins: "):
            banded_problem(Tensors(q, q, q, cu_seqlens_q=bounds, cu_seqlens_k=bounds, origins=wrong), Band())
