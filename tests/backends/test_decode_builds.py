"""Which cached calls share a build: a server's batch and tables change from step to step, and a build takes seconds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from flashtile.backends.gpu.decode.config import choose
from flashtile.backends.gpu.decode.launch import append_launch, attention_launch
from flashtile.backends.gpu.launch import Launch, lower, specialise
from flashtile.backends.hopper.decode import config as wide_config
from flashtile.backends.hopper.decode.launch import wide_launch
from flashtile.backends.hopper.forward.paged.launch import cached_launch
from flashtile.call.backend import Direction
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Problem, Tensors, described
from flashtile.core.masks import Band
from flashtile.ops import dispatch
from flashtile_lab.kernels import decode
from flashtile_lab.kernels.decode import described_call
from tests.fuzz.constants import forgotten
from tests.fuzz.launches import recorded
from tests.problems import banded_problem


def launches(
    batch: int, rows: int, pages: int, heads: int, *, first: int = 0, num_sms: int = 132, few: bool = False
) -> tuple[Launch, Launch]:
    """Of packed queries that are appended to pages of 16; first: where lengths begin in a server's tensor of them."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def indices(count: int) -> torch.Tensor:
        return torch.zeros(4 + count, dtype=torch.int32)[first : first + count]

    problem = described(
        device_type="cuda", compute_capability=(9, 0), dtype=torch.bfloat16, batch=batch,
        seqlen_q=rows, varlen=True, seqlen_k=16 * pages, cached=True, page_size=16,
        num_heads_q=2 * heads, num_heads_kv=heads, band=Band(None, 0),
    )  # fmt: skip
    q, new, cache = empty(rows, 2 * heads, 64), empty(rows, heads, 64), empty(512, 16, heads, 64)
    lengths, bounds = indices(batch), indices(batch + 1)
    tensors = CacheTensors(
        out=q, q=q, k_cache=cache, v_cache=cache, cache_seqlens=lengths, k=new, v=new, cu_seqlens_q=bounds,
        cu_seqlens_k_new=bounds, page_table=empty(batch, pages, dtype=torch.int32),
    )  # fmt: skip
    attend = attention_launch(problem, tensors, choose(problem, few=few), num_sms, few=few)
    return append_launch(problem, tensors), attend


@pytest.mark.parametrize("heads", [4, 5, 14])
def test_steps_of_a_server_share_builds(heads: int) -> None:
    steps = itertools.product((1, 2, 7, 16, 31), (40, 64, 512), (1, 4, 13, 32))
    made = [launches(*step, heads) for step in steps]
    append, attend = ({lower(each)[0] for each in kernel} for kernel in zip(*made, strict=True))
    assert len(append) == 1
    rows = {(each.arguments["call"].schedule.BLOCK_M, *each.options.values()) for _, each in made}
    assert len(rows) == 2
    assert len(attend) == 2 * len(rows)  # with splits and, where there are few pages, without


def test_a_servers_batches_have_three_widths() -> None:
    batches = (1, 2, 31), (32, 63, 127), (128, 200, 255, 256)
    made = [[launches(batch, 512, 13, 8) for batch in each] for each in batches]
    keys = [{lower(attend)[0] for _, attend in each} for each in made]
    assert [len(each) for each in keys] == [1, 1, 1] and len(set.union(*keys)) == 3
    assert len({lower(append)[0] for each in made for append, _ in each}) == 1


@pytest.mark.parametrize("heads", [5, 8, 12])
def test_devices_of_an_architecture_share_builds(heads: int) -> None:
    """Programs of other devices than the usual one: whole teams, and no more than run at once."""
    made = {num_sms: launches(31, 512, 13, heads, num_sms=num_sms)[1] for num_sms in (132, 114, 78, 16)}
    assert len({lower(each)[0] for each in made.values()}) == 1
    lanes = made[132].arguments["call"].schedule.HEADS_IN_STEP
    assert lanes == {5: 1, 8: 4, 12: 12}[heads]  # of one program a multiprocessor
    assert all(n - lanes < each.programs <= n and each.programs % lanes == 0 for n, each in made.items())


def test_slices_of_lengths_share_builds() -> None:
    made = [launches(7, 512, 13, 8, first=first) for first in (0, 1)]
    pointers = [attend.arguments["call"].cache.cached for _, attend in made]
    assert pointers[0] == pointers[1]
    for kernel in zip(*made, strict=True):
        assert len({lower(each)[0] for each in kernel}) == 1


def test_sequences_that_the_forward_leaves_share_a_build_with_decodes() -> None:
    few, decodes = launches(7, 512, 1000, 8, few=True)[1], launches(7, 8, 1000, 8)[1]
    of_few, of_all = (each.arguments["call"].schedule for each in (few, decodes))
    assert lower(few)[0] == lower(decodes)[0]
    assert (of_few.most_rows, of_few.above_keys) == (16, 8192)
    assert of_all.most_rows * 2 >= 2**31 - 1 and of_all.above_keys < 0


def test_caches_of_any_capacity_share_a_build_of_the_forward() -> None:
    problem, tensors = described_call((9, 0), seqlen_q=200, packed=True, page_size=16)
    made = [cached_launch(problem, tensors, leaves) for leaves in (None, (16, 8192))]
    assert lower(made[0])[0] == lower(made[1])[0]
    assert [each.arguments["call"].keys.cache.few_rows for each in made] == [-1, 16]


@pytest.mark.parametrize("call", [{"appends": True}, {"softcap": 30.0, "alibi": True, "sinks": True, "page_size": 16}])
def test_no_record_loses_constants(call: dict[str, Any]) -> None:
    problem, tensors = described_call((9, 0), num_heads_q=568, **call)
    wide = wide_launch(problem, tensors, wide_config.choose(problem), 132)
    for launch in (*decode.launches(problem, tensors).values(), wide):
        what = specialise(launch)
        assert not forgotten(what.tree, what.constexprs), launch


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize(
    "call",
    [{}, {"page_size": 16, "seqlen_q": 40, "appends": True, "packed": True}, {"seqlen_q": 8}]
    + [{"keys": keys} for keys in (2048, 0)],
    ids=["decode", "prompts", "wide", "no cache", "no keys"],
)  # fmt: skip
def test_warm_up_builds_what_a_call_starts(backend: str, call: dict[str, Any]) -> None:
    direction: Direction = "forward" if "keys" in call else "decode"
    problem: Problem
    tensors: Any
    if direction == "forward":
        sizes = (3, 8), (call["keys"], 2)
        q, k = (torch.empty(2, *size, 64, dtype=torch.bfloat16, device="meta") for size in sizes)
        tensors = Tensors(q, k, k)
        problem = banded_problem(tensors, Band()).but(device_type="cuda", compute_capability=(9, 0))
    else:
        problem, tensors = described_call((9, 0), **call)
    with recorded((9, 0)) as started:
        table: Any = dispatch.backend(backend)
        table.plan(direction, problem, tensors)(tensors)
        ahead = table.launches(problem, tensors, direction)
    assert [each.kernel for each in started] == [each.kernel for each in ahead.values()]
    assert [lower(each)[0] for each in started] == [lower(each)[0] for each in ahead.values()]
    assert all(name == each.kernel.__name__ for name, each in ahead.items())
