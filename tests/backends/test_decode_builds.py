"""Which cached calls share a build: a server's batch and tables change from step to step, and a build takes seconds."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch

from flashtile.backends.gpu.decode.config import choose
from flashtile.backends.gpu.decode.launch import append_launch, attention_launch
from flashtile.backends.gpu.launch import Launch, lower, specialise
from flashtile.backends.hopper.decode.config import tiles
from flashtile.backends.hopper.decode.launch import wide_launch
from flashtile.call.backend import Direction
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Precision, Problem, SequenceLayout, Tensors, described
from flashtile.core.masks import Band
from flashtile.ops import dispatch
from flashtile_lab.kernels import decode
from flashtile_lab.kernels.decode import described_call
from tests.fuzz.constants import forgotten
from tests.fuzz.launches import recorded


def launches(batch: int, rows: int, pages: int, heads: int) -> tuple[Launch, Launch]:
    """Of packed queries that are appended to pages of 16."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    problem = described(
        device_type="cuda", compute_capability=(9, 0), precision=Precision(*[torch.bfloat16] * 4), batch=batch,
        queries=SequenceLayout(rows, packed=True), keys=SequenceLayout(16 * pages, used=True, page_size=16),
        num_heads_q=2 * heads, num_heads_kv=heads, band=Band(None, 0),
    )  # fmt: skip
    q, new, cache = empty(rows, 2 * heads, 64), empty(rows, heads, 64), empty(512, 16, heads, 64)
    lengths, bounds = empty(batch, dtype=torch.int32), empty(batch + 1, dtype=torch.int32)
    tensors = CacheTensors(
        out=q, q=q, k_cache=cache, v_cache=cache, cache_seqlens=lengths, k=new, v=new, cu_seqlens_q=bounds,
        cu_seqlens_k_new=bounds, page_table=empty(batch, pages, dtype=torch.int32),
    )  # fmt: skip
    return append_launch(problem, tensors), attention_launch(problem, tensors, choose(problem), num_sms=132)


@pytest.mark.parametrize("heads", [4, 5, 14])
def test_steps_of_a_server_share_builds(heads: int) -> None:
    steps = itertools.product((1, 2, 7, 16, 31), (40, 64, 512), (1, 4, 13, 32))
    made = [launches(*step, heads) for step in steps]
    append, attend = ({lower(each)[0] for each in kernel} for kernel in zip(*made, strict=True))
    assert len(append) == 1
    rows = {(each.arguments["call"].schedule.BLOCK_M, *each.options.values()) for _, each in made}
    assert len(rows) == 2
    assert len(attend) == 2 * len(rows)  # with splits and, where there are few pages, without


@pytest.mark.parametrize("call", [{"appends": True}, {"softcap": 30.0, "alibi": True, "sinks": True, "page_size": 16}])
def test_no_record_loses_constants(call: dict[str, Any]) -> None:
    problem, tensors = described_call((9, 0), num_heads_q=568, **call)
    wide = wide_launch(problem, tensors, tiles(problem), 132)
    for launch in (*decode.launches(problem, tensors).values(), wide):
        what = specialise(launch)
        assert not forgotten(what.tree, what.constexprs), launch


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize(
    "call",
    [{}, {"page_size": 16, "seqlen_q": 40, "appends": True, "packed": True}, {"seqlen_q": 8}, {"without": 3}],
    ids=["decode", "prompts", "wide", "no cache"],
)
def test_warm_up_builds_what_a_call_starts(backend: str, call: dict[str, Any]) -> None:
    direction: Direction = "forward" if "without" in call else "decode"
    problem: Problem
    tensors: Any
    if direction == "forward":
        q, k = (torch.empty(2, n, heads, 64, dtype=torch.bfloat16, device="meta") for n, heads in ((3, 8), (2048, 2)))
        tensors = Tensors(q, k, k)
        problem = Problem.build(tensors, Band()).but(device_type="cuda", compute_capability=(9, 0))
    else:
        problem, tensors = described_call((9, 0), **call)
    with recorded((9, 0)) as started:
        dispatch.backend(backend).plan(direction, problem, tensors)(tensors)
        module = importlib.import_module(f"flashtile.backends.{backend}.launches")
        ahead = module.launches(problem, tensors, direction)
    assert [each.kernel for each in started] == [each.kernel for each in ahead.values()]
    assert [lower(each)[0] for each in started] == [lower(each)[0] for each in ahead.values()]
    assert all(name == each.kernel.__name__ for name, each in ahead.items())
