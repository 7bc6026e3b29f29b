"""The decode for wide groups: numbers and bits in the emulator, compiled code, and which calls are its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

from flashtile.backends.gpu import table
from flashtile.backends.gpu.decode import launch
from flashtile.backends.gpu.decode.config import DecodeTiles, SplitRule
from flashtile.backends.gpu.trial import trial
from flashtile.backends.hopper import BACKEND
from flashtile.backends.hopper.decode import launch as hopper_decode
from flashtile.backends.hopper.decode.config import choose
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Problem
from flashtile.core.masks import Band
from tests import cases
from tests.backends.hopper.emulated import on_cpu
from tests.cases import Case
from tests.kvcache.alone import judge_alone
from tests.kvcache.cases import CacheCall, CacheCase, build, judge
from tests.maxima import judge_cached_maxima
from tests.ptx import hopper
from tests.ptx.machine import Options
from tests.slow import slow_but


def case_of(name: str, lengths: tuple[int, ...], rows: int = 1, **values: object) -> CacheCase:
    """Sequences of ``lengths`` keys and ``rows`` queries each, of one key head and many query heads."""
    sequences = tuple((length, rows, 0) for length in lengths)
    return CacheCase(name, sequences, **{"heads": 71, "kv_heads": 1, "head_dim": 64} | values)  # type: ignore[arg-type]


CASES = (
    case_of("splits", (500, 3, 0, 64)),
    case_of("two_tiles", (333, 70), 2),
    case_of("steps", (300, 65), 4, heads=16, kv_heads=2, sinks=True),
    case_of("more_rows_than_keys", (5, 200), 8, heads=8),
    case_of("entries", (200, 129), heads=24, entries=True, causal=False),
    case_of("ragged", (333, 0, 70), page_size=16, ragged="pages"),
    case_of("causal_each", (333, 70, 129), 5, heads=16, causal_each=True, page_size=32),
    case_of("pages", (500, 77), page_size=64, head_dim=128),
    case_of("wide", (300, 64), head_dim=256),
)
RULES = {"runs": SplitRule(8, 64, 128, 8, 4096, 2), "splits": SplitRule(8, 128, 128, 4, 4096, 1)}


def on_hopper(call: CacheCall) -> Problem:
    return call.problem.but(device_type="cuda", compute_capability=(9, 0))


@contextmanager
def running(case: CacheCase, rule: SplitRule, num_sms: int = 3, **changes: int) -> Iterator[None]:
    """Within, the kernel's own tiles with ``changes``; the first of a tile's counters must be 0 before and after."""
    left: list[Tensor] = []

    def zeros(device: torch.device, count: int) -> Tensor:
        left.append(torch.zeros(count, dtype=torch.int32))
        return left[-1]

    held = dataclasses.replace(choose(on_hopper(build(case, torch.bfloat16))), splitting=rule, **changes)
    with trial(decode=held), mock.patch.multiple(launch, zeros=zeros, multiprocessors=lambda device: num_sms):
        yield
    assert left and not any(each[::2].any() for each in left)


RUNS = [
    pytest.param(case, rule, marks=[pytest.mark.long] * ((n + m) % 2))
    for n, case in enumerate(CASES)
    for m, rule in enumerate(RULES.values())
]


@pytest.mark.parametrize(("case", "rule"), RUNS, ids=str)
def test_numbers(case: CacheCase, rule: SplitRule) -> None:
    with on_cpu(seed=len(case.sequences)), running(case, rule):
        judge(build(case, torch.bfloat16), "hopper")


@pytest.mark.one_in(9)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_largest_scores(case: CacheCase) -> None:
    with on_cpu(seed=2), running(case, RULES["runs"]):
        judge_cached_maxima(build(case, torch.bfloat16), build(case, torch.bfloat16), "hopper")


@pytest.mark.parametrize("seed", range(2))
def test_buffers_that_are_used_again_and_again(seed: int) -> None:
    """One program and two stages: a buffer that is released too early is loaded to while it is still read."""
    with on_cpu(seed=seed), running(CASES[0], RULES["runs"], num_sms=1, block_n=64, num_stages=2):
        judge(build(CASES[0], torch.bfloat16), "hopper")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_sequence_gives_the_same_bits_alone_and_on_any_number_of_programs(rule: SplitRule) -> None:
    results = []
    for num_sms in (2, 9, 1, 3):
        with on_cpu(seed=1), running(CASES[0], rule, num_sms):
            results.append(build(CASES[0], torch.bfloat16).run("hopper"))
            if num_sms == 3:
                judge_alone(CASES[0], torch.bfloat16, "hopper")
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))


# By their own rule, so few keys are one split however many rows there are.
ONE_SPLIT = (
    case_of("rows", (60, 5, 0), 33, heads=2),
    case_of("pages", (64, 9), 8, heads=8, head_dim=128, page_size=16),
    case_of("heads", (50,), 33, heads=2, kv_heads=2, head_dim=128),
    case_of("wide", (64, 0), head_dim=256),
)


@pytest.mark.long
@pytest.mark.parametrize("case", slow_but(ONE_SPLIT, lambda case: case.name in ("pages", "heads")), ids=str)
def test_calls_that_are_never_split(case: CacheCase) -> None:
    """In the emulator and as compiled: the kernel is the one that stores states of splits, and gets memory for them."""
    call = build(case, torch.bfloat16)
    problem = on_hopper(call)
    chosen = choose(problem, call.tensors)
    assert chosen.specialised
    assert chosen.splitting.bound(problem.seqlen_k, problem.seqlen_q * problem.group_size, 1, case.kv_heads) == 1
    for place in (on_cpu(seed=1), hopper.on_cpu(Options(seed=1))):
        with place, running(case, chosen.splitting):
            judge(build(case, torch.bfloat16), "hopper")


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_compiled_code(page_size: int) -> None:
    """Layouts, swizzles, and races of warps, with several boxes to a block; programs wait for each other's states."""
    case = case_of("boxes", (300, 64), page_size=page_size, head_dim=128 if page_size == 32 else 64)
    with hopper.on_cpu(Options(seed=page_size)), running(case, RULES["runs"]):
        judge(build(case, torch.bfloat16), "hopper")


@pytest.mark.parametrize("causal", [False, True])
def test_few_rows_without_a_cache(causal: bool) -> None:
    """Each sequence has a whole entry, whose length no tensor holds; keys lie between others."""
    own = case_of("splits", (300, 300), 30, heads=2, kv_heads=1)
    case = Case("few", seqlen_q=30, seqlen_k=300, heads=2, kv_heads=1, head_dim=64, causal=causal, layout="transposed")
    few = mock.patch.object(table, "_SPLIT_KEYS", 300)
    with (
        on_cpu(seed=2),
        running(own, RULES["runs"]),
        few,
        mock.patch.object(hopper_decode, "wide_launch", wraps=hopper_decode.wide_launch) as started,
    ):
        cases.judge(cases.build(case, torch.bfloat16), "hopper")
        assert started.called


def test_other_calls_stay_with_the_triton_kernel() -> None:
    call = build(CASES[0], torch.bfloat16)
    problem, tensors = on_hopper(call), call.tensors

    def kernel(problem: Problem, tensors: CacheTensors = tensors) -> str:
        return BACKEND.kernel("decode", problem, tensors).name

    assert kernel(problem) == "wide groups"
    for changes in (
        {"band": Band(100, 0)}, {"softcap": 2.0}, {"alibi": True}, {"softmax_scale": -1.0}, {"num_heads_q": 8},
        {"compute_capability": (8, 0)}, {"head_dim": 80, "head_dim_v": 80}, {"head_dim_v": 128},
        {"varlen": False, "seqlen_q": 2}, {"num_heads_q": 40, "head_dim": 256, "head_dim_v": 256},
    ):  # fmt: skip
        assert kernel(problem.but(**changes)) in ("decode", "prompts"), changes
    padded = dataclasses.replace(tensors, cache_leftpad=tensors.cache_seqlens)
    assert kernel(problem, padded) == "decode"
    with trial(decode=DecodeTiles(64, 64, 4, 3)):
        assert kernel(problem) == "decode"
