"""The forward with head dimensions past 256: numbers in the emulator and as compiled, and which calls are its own."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from flashtile.backends import hopper
from flashtile.backends.hopper.big_heads import config
from flashtile.call.problem import described
from tests.backends.hopper.emulated import on_cpu
from tests.cases import Case, build, judge
from tests.maxima import judge_maxima
from tests.partials import judge_chain
from tests.poison import poisoned_memory
from tests.ptx import hopper as compiled
from tests.ptx.machine import Options
from tests.slow import slow_but

CASES = (
    Case("full", batch=1, seqlen_q=70, seqlen_k=130, kv_heads=1, head_dim=512),
    Case("causal", batch=1, seqlen_q=130, seqlen_k=200, heads=1, kv_heads=1, head_dim=320, causal=True, sinks=True),
    Case("varlen", lengths=((70, 100), (0, 5), (3, 0), (20, 64)), heads=4, head_dim=384, window=(40, 3), spare=3),
    Case("wide_v", batch=1, seqlen_q=65, seqlen_k=65, heads=1, kv_heads=1, head_dim=64, head_dim_v=512, softcap=3.0),
    Case("narrow_v", batch=1, seqlen_q=65, seqlen_k=65, head_dim=448, head_dim_v=120, alibi="h", bias="hqk",
         bias_grad=False),
    Case("mask", batch=1, seqlen_q=65, seqlen_k=165, head_dim=264, mask="bqk"),
    Case("shared", seqlen_q=5, seqlen_k=165, heads=16, head_dim=512, causal=True, layout="transposed"),
)  # fmt: skip
CHAINS = (
    (Case("long", seqlen_q=70, seqlen_k=130, heads=2, kv_heads=1, head_dim=320, causal=True), (64, 7)),
    (Case("wide_v", batch=2, lengths=((20, 40), (0, 16), (90, 21)), head_dim=264, head_dim_v=512, sinks=True), (11,)),
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers(case: Case, dtype: torch.dtype) -> None:
    with on_cpu(len(case.name), 2):
        judge(build(replace(case, wanted=""), dtype), "hopper")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_largest_scores(case: Case) -> None:
    with on_cpu(len(case.name), 2):
        judge_maxima(build(replace(case, wanted=""), torch.bfloat16), "hopper")


@pytest.mark.parametrize("shard", slow_but(range(30), lambda shard: shard < 1))
def test_random_calls(shard: int) -> None:
    for seed in range(10 * shard, 10 * shard + 10):
        with on_cpu(seed, 1 + seed % 3):
            judge(build(random_case(random.Random(seed)), torch.bfloat16, seed=seed), "hopper")


def random_case(draw: random.Random) -> Case:
    """Any combination of what such a call may have."""
    dims = [draw.choice([264, 320, 384, 400, 512]), draw.choice([8, 64, 128, 200, 256, 320, 448, 512])]
    if draw.random() < 0.5:
        dims.reverse()
    elif draw.random() < 0.5:
        dims[1] = dims[0]
    length, kv_heads = draw.choice([1, 40, 64, 65, 150]), draw.choice([1, 1, 2])
    packed = tuple(
        (draw.choice([0, 1, 40, 100]), draw.choice([0, 1, 64, 90])) for _ in range(draw.choice([0, 0, 1, 3]))
    )
    bias, mask = (None if packed else draw.choice([None, None, kept]) for kept in ("hqk", "bqk"))
    heads, seqlen_k = kv_heads * draw.choice([1, 2, 8]), draw.choice([0, 1, 64, 128, 130, length])
    return Case(
        "", batch=1, seqlen_q=length, seqlen_k=seqlen_k, heads=heads,
        kv_heads=kv_heads, head_dim=dims[0], head_dim_v=dims[1], lengths=packed, spare=2 * (len(packed) > 1), wanted="",
        causal=draw.random() < 0.5, window=draw.choice([None, None, (40, 3)]), softcap=draw.choice([0.0, 0.0, 3.0]),
        alibi=draw.choice(["", "", "h"]), sinks=draw.random() < 0.3, bias=bias, bias_grad=False, mask=mask,
        layout=draw.choice(["contiguous", "transposed"]),
    )  # fmt: skip


@pytest.mark.parametrize(("case", "cuts"), CHAINS, ids=str)
def test_a_chain_of_partial_results_is_the_whole(case: Case, cuts: tuple[int, ...]) -> None:
    with on_cpu(len(cuts), 2), poisoned_memory(), torch.no_grad():
        judge_chain(hopper.BACKEND, case, cuts, torch.bfloat16)


@pytest.mark.long
@pytest.mark.parametrize("case", slow_but(CASES, lambda case: case.name == "shared"), ids=str)
def test_compiled_code(case: Case) -> None:
    small = replace(
        case, wanted="", heads=min(case.heads, 4), seqlen_q=min(case.seqlen_q, 70), seqlen_k=min(case.seqlen_k, 130)
    )
    with compiled.on_cpu(Options(seed=1)):
        judge(build(small, torch.bfloat16), "hopper")


def test_every_width_fits() -> None:
    call = described(device_type="cuda", compute_capability=(9, 0), dtype=torch.bfloat16, seqlen_q=999, seqlen_k=999)
    for dims in (dims for n in range(8, 513, 8) for dims in ((n, 512), (512, n), (n, 264), (264, n))):
        problem = call.but(head_dim=dims[0], head_dim_v=dims[1])
        chosen = config.choose(problem)
        assert chosen.block_d >= dims[0] and chosen.block_dv >= dims[1] and 0 < chosen.left < chosen.block_dv
        assert str(chosen) in hopper.BACKEND.describe(problem, "forward")
