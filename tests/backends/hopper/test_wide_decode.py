"""The decode for wide groups: numbers and bits in the emulator, compiled code, and which calls are its own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from flashtile.backends.gpu.decode import launch
from flashtile.backends.gpu.decode.config import Config, Splitting
from flashtile.backends.gpu.trial import trial
from flashtile.backends.hopper.decode.config import choose, tiles
from flashtile.backends.hopper.decode.launch import CachedPlan
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Precision, Problem, SequenceLayout, described
from flashtile.core.masks import Band
from tests.backends.hopper.emulated import on_cpu
from tests.poison import poisoned_memory
from tests.ptx import hopper
from tests.ptx.machine import Options
from tests.slow import slow_but


@dataclass(frozen=True)
class Case:
    """A cached call of ``lengths`` keys and ``rows`` queries each."""

    lengths: tuple[int, ...]
    rows: int = 1
    heads: int = 71
    kv_heads: int = 1
    head_dim: int = 64
    page_size: int = 0
    entries: bool = False
    sinks: bool = False
    causal: bool = True


CASES = {
    "splits": Case((500, 3, 0, 64)),
    "two_tiles": Case((333, 70), rows=2),
    "steps": Case((300, 65), rows=4, heads=16, kv_heads=2, sinks=True),
    "more_rows_than_keys": Case((5, 200), rows=8, heads=8, kv_heads=1),
    "entries": Case((200, 129), heads=24, entries=True, causal=False),
    "pages": Case((500, 77), page_size=64, head_dim=128),
    "wide": Case((300, 64), head_dim=256),
}
RULES = {"runs": Splitting(8, 64, 128, 8, 4096, 2), "splits": Splitting(8, 128, 128, 4, 4096, 1)}


def tensors_of(case: Case) -> CacheTensors:
    torch.manual_seed(0)
    batch, size = len(case.lengths), case.page_size
    capacity = -(-max(case.lengths) // 64) * 64 + 64
    shape = (batch * capacity // size, size) if size else (batch + 1, capacity)
    k, v = (torch.randn(*shape, case.kv_heads, case.head_dim).bfloat16() for _ in range(2))
    q = torch.randn(batch, case.rows, case.heads, case.head_dim).bfloat16()
    order = torch.randperm(shape[0], dtype=torch.int32)
    tensors = CacheTensors(
        torch.empty_like(q), q, k, v, torch.tensor(case.lengths, dtype=torch.int32),
        page_table=order.view(batch, -1) if size else None, cache_batch_idx=order[:batch] if case.entries else None,
        sinks=torch.randn(case.heads) if case.sinks else None,
    )  # fmt: skip
    for b, length in enumerate(case.lengths):
        for cache in (k, v):
            # What lies past the last key must not be used.
            if size:
                at = torch.arange(length, capacity)
                cache[order.view(batch, -1)[b, at // size].long(), at % size] = torch.nan
            else:
                keys(cache, tensors, b)[length:] = torch.nan
    return tensors


def keys(cache: Tensor, tensors: CacheTensors, b: int) -> Tensor:
    """A sequence's keys or values; a copy where they lie in pages."""
    if tensors.page_table is not None:
        return cache[tensors.page_table[b].long()].flatten(0, 1)
    return cache[b if tensors.cache_batch_idx is None else int(tensors.cache_batch_idx[b])]


def problem_of(case: Case, tensors: CacheTensors, **changes: Any) -> Problem:
    t = tensors
    capacity = t.k_cache.shape[1] if t.page_table is None else t.page_table.shape[1] * case.page_size
    facts: dict[str, Any] = dict(
        device_type="cuda", compute_capability=(9, 0), batch=t.q.shape[0], precision=Precision(*[t.q.dtype] * 4),
        queries=SequenceLayout(case.rows), keys=SequenceLayout(capacity, used=True, page_size=case.page_size),
        num_heads_q=case.heads, num_heads_kv=case.kv_heads, head_dim=case.head_dim, head_dim_v=case.head_dim,
        softmax_scale=case.head_dim**-0.5, band=Band(None, 0 if case.causal else None), sinks=case.sinks,
    )  # fmt: skip
    return described(**facts | changes)


def reference(case: Case, tensors: CacheTensors, b: int) -> tuple[Tensor, Tensor]:
    """(out, lse) of a sequence in float64."""
    length, group = case.lengths[b], case.heads // case.kv_heads
    k, v = (
        keys(x, tensors, b)[:length].double().repeat_interleave(group, 1) for x in (tensors.k_cache, tensors.v_cache)
    )
    s = torch.einsum("qhd,khd->hqk", tensors.q[b].double(), k) * case.head_dim**-0.5
    if case.causal:
        past = torch.arange(length) > torch.arange(case.rows)[:, None] + length - case.rows
        s = s.masked_fill(past, -torch.inf)
    lse = s.logsumexp(-1)
    if tensors.sinks is not None:
        lse = torch.logaddexp(lse, tensors.sinks[:, None].double())
    probs = torch.where(s == -torch.inf, 0.0, torch.exp(s - lse[..., None]))
    return torch.einsum("hqk,khd->qhd", probs, v), lse


def run(case: Case, tensors: CacheTensors, rule: Splitting, num_sms: int = 3, **changes: int) -> tuple[Tensor, Tensor]:
    """Out and lse, with ``changes`` of the tiles; the first of a tile's counters must be 0 before and after."""
    problem = problem_of(case, tensors)
    config = dataclasses.replace(tiles(problem), splitting=rule, **changes)
    left = []

    def zeros(device: torch.device, count: int) -> Tensor:
        left.append(torch.zeros(count, dtype=torch.int32))
        return left[-1]

    tensors.out.fill_(torch.nan)
    patch = mock.patch.multiple(launch, zeros=zeros, multiprocessors=lambda device: num_sms)
    with trial(decode=config), patch, poisoned_memory():
        lse = CachedPlan(problem, tensors)(tensors)
    assert not any(each[::2].any() for each in left)
    return tensors.out.clone(), lse


def judge(case: Case, tensors: CacheTensors, out: Tensor, lse: Tensor) -> None:
    for b in range(len(case.lengths)):
        want, want_lse = reference(case, tensors, b)
        # bfloat16 probabilities and outputs: 2^-9 of each.
        assert (out[b].double() - want).norm() <= 4e-3 * want.norm()
        torch.testing.assert_close(lse[b].double(), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_numbers(case: Case, rule: Splitting) -> None:
    tensors = tensors_of(case)
    with on_cpu(seed=len(case.lengths)):
        judge(case, tensors, *run(case, tensors, rule))


@pytest.mark.parametrize("seed", range(2))
def test_buffers_that_are_used_again_and_again(seed: int) -> None:
    """One program and two stages: a buffer that is released too early is loaded to while it is still read."""
    case = CASES["splits"]
    tensors = tensors_of(case)
    with on_cpu(seed=seed):
        judge(case, tensors, *run(case, tensors, RULES["runs"], num_sms=1, block_n=64, num_stages=2))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_sequence_gives_the_same_bits_alone_and_on_any_number_of_programs(rule: Splitting) -> None:
    case = CASES["splits"]
    tensors = tensors_of(case)
    with on_cpu(seed=1):
        out, lse = run(case, tensors, rule)
        for b, num_sms in ((0, 2), (0, 9), (3, 1)):
            one = dataclasses.replace(
                tensors, q=tensors.q[b : b + 1], out=torch.empty_like(tensors.q[b : b + 1]),
                cache_seqlens=tensors.cache_seqlens[b : b + 1], cache_batch_idx=torch.tensor([b], dtype=torch.int32),
            )  # fmt: skip
            alone, alone_lse = run(case, one, rule, num_sms)
            assert torch.equal(alone[0], out[b])
            assert torch.equal(alone_lse[0], lse[b])


# By their own rule, so few keys are one split however many rows there are.
ONE_SPLIT = {
    "rows": Case((60, 5, 0), rows=33, heads=2),
    "pages": Case((64, 9), rows=8, heads=8, head_dim=128, page_size=16),
    "heads": Case((50,), rows=33, heads=2, kv_heads=2, head_dim=128),
    "wide": Case((64, 0), head_dim=256),
}


@pytest.mark.long
@pytest.mark.parametrize("name", slow_but(ONE_SPLIT, {"pages", "heads"}.__contains__))
def test_calls_that_are_never_split(name: str) -> None:
    """In the emulator and as compiled: the kernel is the one that stores states of splits, and gets memory for them."""
    case = ONE_SPLIT[name]
    tensors = tensors_of(case)
    problem = problem_of(case, tensors)
    chosen = choose(problem, tensors)
    assert chosen.specialised
    assert chosen.splitting.bound(problem.keys.length, case.rows * problem.group_size, 1, case.kv_heads) == 1
    for place in (on_cpu(seed=1), hopper.on_cpu(Options(seed=1))):
        with place:
            judge(case, tensors, *run(case, tensors, chosen.splitting))


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_compiled_code(page_size: int) -> None:
    """Layouts, swizzles, and races of warps, with several boxes to a block; programs wait for each other's states."""
    case = Case((300, 64), page_size=page_size, head_dim=128 if page_size == 32 else 64)
    tensors = tensors_of(case)
    with hopper.on_cpu(Options(seed=page_size)):
        judge(case, tensors, *run(case, tensors, RULES["runs"]))


def test_other_calls_stay_with_the_triton_kernel() -> None:
    case = CASES["splits"]
    tensors = tensors_of(case)
    problem = problem_of(case, tensors)
    assert choose(problem, tensors).specialised
    for changes in (
        {"band": Band(100, 0)}, {"softcap": 2.0}, {"alibi": True}, {"softmax_scale": -1.0}, {"num_heads_q": 8},
        {"compute_capability": (8, 0)}, {"head_dim": 80, "head_dim_v": 80}, {"head_dim_v": 128},
        {"queries": SequenceLayout(2)}, {"num_heads_q": 40, "head_dim": 256, "head_dim_v": 256},
    ):  # fmt: skip
        assert not choose(problem_of(case, tensors, **changes), tensors).specialised, changes
    padded = dataclasses.replace(tensors, cache_leftpad=tensors.cache_seqlens)
    assert not choose(problem, padded).specialised
    with trial(decode=Config(64, 64, 4, 3)):
        assert not choose(problem, tensors).specialised
