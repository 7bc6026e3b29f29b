"""Prompts over a cache on the Hopper forward: numbers, the bits of dense keys, and which calls are its own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from flashtile.backends.gpu import host
from flashtile.backends.gpu.decode import launch as decode
from flashtile.backends.hopper.decode.config import choose, describe, leaves_few, runs_forward
from flashtile.backends.hopper.decode.launch import CachedPlan
from flashtile.backends.hopper.forward import cached
from flashtile.backends.hopper.forward import config as tiles
from flashtile.backends.hopper.forward.launch import ForwardPlan
from flashtile.call.cached_arguments import CacheTensors
from flashtile.call.problem import Precision, Problem, SequenceLayout, Tensors, described
from flashtile.core.masks import Band
from tests.backends.hopper.emulated import on_cpu
from tests.poison import poisoned_memory
from tests.slow import slow_but

FULL, CAUSAL, WINDOW = Band(), Band(None, 0), Band(40, 3)


@dataclass(frozen=True)
class Case:
    """Sequences of (keys in the cache, queries), whose last ``new`` keys count as appended by the call.

    ``table``: whether a sequence's entry is by cache_batch_idx; ``one``: keys and values are views of one tensor.
    """

    sequences: tuple[tuple[int, int], ...]
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    page_size: int = 0
    packed: bool = False
    spare: int = 0
    new: int = 0
    table: bool = False
    one: bool = False
    band: Band = CAUSAL
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False

    @property
    def keys(self) -> list[int]:
        return [max(count, 0) for count, _ in self.sequences]


CASES = {
    "rows": Case(((200, 130), (150, 130))),
    "lengths": Case(((300, 70), (5, 70), (0, 70), (-1, 70), (128, 70)), heads=4, table=True),
    "pages_of_16": Case(((200, 140), (3, 140)), page_size=16),
    "pages_of_64": Case(((260, 140), (129, 140)), page_size=64, head_dim=128, one=True, new=7),
    "pages_of_256": Case(((300, 140), (256, 140)), page_size=256, heads=1, band=FULL),
    "window": Case(((280, 140), (90, 140)), page_size=32, band=WINDOW, sinks=True, one=True),
    "wide": Case(((150, 135),), page_size=64, heads=1, head_dim=256, softcap=5.0),
    "parts": Case(((150, 135),), page_size=16, heads=1, head_dim=96, alibi=True),
    "packed": Case(((200, 90), (70, 3), (30, 4), (40, 0), (150, 33)), packed=True, page_size=16, spare=2, sinks=True),
    "packed_apart": Case(((200, 90), (129, 129)), packed=True, table=True, new=3, alibi=True),
}  # fmt: skip


# Sequences of up to 16 packed rows and more than 40 keys.
LEAVES = (16, 40)


def tensors_of(case: Case) -> CacheTensors:
    """A case's tensors; what lies behind the keys, and pages that nobody has, is NaN."""
    torch.manual_seed(0)
    batch, size, dim = len(case.sequences), case.page_size, case.head_dim
    capacity = -(-max(case.keys) // max(size, 1)) * max(size, 1)
    shape = (batch * capacity // size + 2, size) if size else (batch + 2, capacity)
    both = torch.full((*shape, 2, case.kv_heads, dim), torch.nan).bfloat16()
    k, v = both.unbind(2) if case.one else (x.contiguous() for x in both.unbind(2))
    order = torch.randperm(shape[0], dtype=torch.int32)
    table = order[: batch * capacity // size].view(batch, -1) if size else None
    entries = order[:batch] if case.table else torch.arange(batch)
    for b, count in enumerate(case.keys):
        for cache in (k, v):
            for j, row in enumerate(torch.randn(count, case.kv_heads, dim).bfloat16()):
                cache[(int(table[b, j // size]), j % size) if table is not None else (int(entries[b]), j)] = row
    rows = [rows for _, rows in case.sequences]
    shape_q = (sum(rows) + case.spare,) if case.packed else (batch, rows[0])
    q = torch.randn(*shape_q, case.heads, dim).bfloat16()
    return CacheTensors(
        torch.full_like(q, torch.nan), q, k, v,
        torch.tensor([n - case.new if n >= case.new else n for n, _ in case.sequences], dtype=torch.int32),
        page_table=table,
        cache_batch_idx=order[:batch] if case.table else None,
        # Appended already: what the call adds to the lengths is all that counts here.
        k=q.new_empty(batch, case.new, case.kv_heads, dim) if case.new else None,
        v=q.new_empty(batch, case.new, case.kv_heads, dim) if case.new else None,
        cu_seqlens_q=torch.tensor([0, *rows]).cumsum(0).int() if case.packed else None,
        alibi_slopes=torch.rand(case.heads) if case.alibi else None,
        sinks=torch.randn(case.heads) if case.sinks else None,
    )  # fmt: skip


def problem_of(case: Case, tensors: CacheTensors, **changes: Any) -> Problem:
    t, size = tensors, case.page_size
    capacity = t.k_cache.shape[1] if t.page_table is None else t.page_table.shape[1] * size
    facts: dict[str, Any] = dict(
        device_type="cuda", compute_capability=(9, 0), batch=len(case.sequences), precision=Precision(*[t.q.dtype] * 4),
        queries=SequenceLayout(max(rows for _, rows in case.sequences), case.packed),
        keys=SequenceLayout(capacity, used=True, page_size=size), num_heads_q=case.heads, num_heads_kv=case.kv_heads,
        head_dim=case.head_dim, head_dim_v=case.head_dim, softmax_scale=case.head_dim**-0.5, band=case.band,
        softcap=case.softcap, alibi=case.alibi, sinks=case.sinks,
    )  # fmt: skip
    return described(**facts | changes)


def run(problem: Problem, tensors: CacheTensors, leaves: tuple[int, int] | None) -> Tensor:
    """Writes ``tensors.out``; returns lse, NaN where nothing is written."""
    t = tensors
    launched = cached.cached_launch(problem, t, leaves)
    counters = torch.zeros(1, dtype=torch.int32)
    lse = torch.full(problem.lse_shape(t.q), torch.nan)
    step = host.Step(launched, decode._OPERANDS, t.q.device)
    host.run((step,), (
        t.out, lse, t.q, t.k_cache, t.v_cache, t.cache_seqlens, None, t.cu_seqlens_q, t.cu_seqlens_k_new,
        t.cache_batch_idx, t.page_table, t.alibi_slopes, t.sinks, None, None, None, counters,
    ))  # fmt: skip
    assert counters == 0
    return lse


def alone(case: Case, problem: Problem, tensors: CacheTensors, b: int) -> tuple[Tensor, Tensor]:
    """(out, lse) of a sequence whose keys are a tensor of their own, by ``attention``'s plan."""
    t, count = tensors, case.keys[b]
    rows = case.sequences[b][1]
    start = int(t.cu_seqlens_q[b]) if t.cu_seqlens_q is not None else 0
    q = (t.q if case.packed else t.q[b])[start : start + rows]
    k, v = (
        (x[t.page_table[b].long()].flatten(0, 1) if t.page_table is not None
         else x[b if t.cache_batch_idx is None else int(t.cache_batch_idx[b])])[:count].contiguous()
        for x in (t.k_cache, t.v_cache)
    )  # fmt: skip
    own = problem.but(batch=1, queries=SequenceLayout(rows), keys=SequenceLayout(count), seqlen_q=rows, seqlen_k=count)
    out, lse = ForwardPlan(own, Tensors(q[None], k[None], v[None], t.alibi_slopes, sinks=t.sinks))(
        Tensors(q[None], k[None], v[None], t.alibi_slopes, sinks=t.sinks)
    )
    return out[0], lse[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_dense_keys(name: str) -> None:
    judge_bits(CASES[name], len(name), LEAVES if name == "packed" else None)


@pytest.mark.parametrize("shard", slow_but(range(60), lambda shard: shard < 1))
def test_bits_of_random_calls(shard: int) -> None:
    for seed in range(5 * shard, 5 * shard + 5):
        case = random_case(random.Random(seed))
        judge_bits(case, seed, LEAVES if case.packed and seed % 2 else None)


def random_case(draw: random.Random) -> Case:
    """Any combination of what a call on the forward may have, of up to 260 keys a sequence."""
    packed, kv_heads, page_size = draw.random() < 0.5, draw.choice([1, 1, 2]), draw.choice([0, 0, 16, 32, 64, 128, 256])
    rows, new = draw.choice([1, 33, 64, 65, 130, 150]), draw.choice([0, 0, 1, 9])

    def sequence() -> tuple[int, int]:
        keys = max(new, draw.choice([0, 1, 64, 128, 129, draw.randint(2, 260)]))
        return keys if draw.random() < 0.9 else -1, draw.choice([0, 1, 3, 40, rows]) if packed else rows

    return Case(
        (*(sequence() for _ in range(draw.randint(1, 3))), (draw.randint(20, 260), rows)),
        heads=kv_heads * draw.choice([1, 2, 3, 8]),
        kv_heads=kv_heads,
        head_dim=draw.choice([64, 64, 96, 128, 192, 256]),
        page_size=page_size,
        packed=packed,
        spare=draw.choice([0, 3]) if packed else 0,
        new=new,
        table=not page_size and draw.random() < 0.5,
        one=draw.random() < 0.5,
        band=draw.choice([FULL, CAUSAL, CAUSAL, WINDOW]),
        softcap=draw.choice([0.0, 0.0, 5.0]),
        alibi=draw.random() < 0.3,
        sinks=draw.random() < 0.3,
    )


def judge_bits(case: Case, seed: int, leaves: tuple[int, int] | None) -> None:
    """Asserts that each sequence's results are those of its keys in a tensor of their own, or that it is left out."""
    tensors = tensors_of(case)
    problem = problem_of(case, tensors)
    with on_cpu(seed=seed), poisoned_memory():
        lse = run(problem, tensors, leaves)
        at = 0
        for b, (count, rows) in enumerate(case.sequences):
            out, own = (
                (tensors.out[at : at + rows], lse[:, at : at + rows]) if case.packed else (tensors.out[b], lse[b])
            )
            at += rows
            if leaves is not None and rows * case.heads // case.kv_heads <= leaves[0] and count > leaves[1]:
                assert out.isnan().all() and own.isnan().all()  # left to another launch
                continue
            want, want_lse = alone(case, problem, tensors, b)
            assert want.isfinite().all() and (count > 0 or not want.any())
            assert torch.equal(out, want)
            if count > 0:
                assert torch.equal(own, want_lse)
            else:  # A plan without keys copies the sinks; a kernel multiplies by log2(e) and divides: four roundings.
                torch.testing.assert_close(own, want_lse, rtol=2**-22, atol=0)
    # Rows that belong to no sequence.
    assert not case.spare or not tensors.out[at:].any()


@pytest.mark.parametrize(("rows", "keys", "warpgroups", "strip"), [(500, 512, 2, 32), (2048, 6144, 3, 64)])
def test_short_prompts_take_two_warpgroups_and_long_ones_three(
    rows: int, keys: int, warpgroups: int, strip: int
) -> None:
    case = Case(((1, 1),), heads=64, kv_heads=8, packed=True, page_size=16)
    few = problem_of(case, tensors_of(case))
    keys_of = SequenceLayout(keys, used=True, page_size=16)
    problem = few.but(
        batch=8000 // rows, queries=SequenceLayout(rows, True), keys=keys_of, seqlen_q=rows, seqlen_k=keys
    )
    config = tiles.choose(problem, rows=8000)
    assert (config.num_warpgroups, config.strip) == (warpgroups, strip)


def test_packed_steps_on_the_kernel_for_wide_groups() -> None:
    case = Case(
        ((300, 5), (70, 3), (40, 0), (129, 1)), heads=16, kv_heads=2, packed=True, page_size=16, spare=2, sinks=True
    )
    tensors = tensors_of(case)
    problem = problem_of(case, tensors)
    config = choose(problem, tensors)
    assert config.specialised and not runs_forward(problem, tensors)
    with on_cpu(seed=3), poisoned_memory(), mock.patch.object(decode, "multiprocessors", lambda device: 3):
        lse = CachedPlan(problem, tensors)(tensors)
        at = 0
        for b, (_, rows) in enumerate(case.sequences):
            want, want_lse = alone(case, problem, tensors, b)
            # Both round probabilities and outputs to bfloat16: 2^-9 of each.
            assert (tensors.out[at : at + rows].float() - want.float()).norm() <= 6e-3 * want.float().norm()
            torch.testing.assert_close(lse[:, at : at + rows], want_lse, atol=1e-5, rtol=1e-5)
            at += rows
    assert not tensors.out[at:].any() and (lse[:, at:] == -torch.inf).all()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "the forward's kernel"),
        ({"packed": True, "capacity": 2**14}, "up to 16 rows over more than 8192 keys in Triton"),
        ({"rows": 2}, "Triton with Hopper's tiles"),
        ({"rows": 16}, "splits merged in the same launch"),
        ({"page_size": 8}, "not the forward's kernel: pages of 8"),
        ({"page_size": 48}, "not the forward's kernel: pages of 48"),
        ({"head_dim": 84}, "not the forward's kernel: head_dim that is no multiple of 8"),
        ({"kv": torch.float8_e4m3fn}, "not the forward's kernel: caches in 8 bits"),
    ],
    ids=str,
)
def test_which_kernel_and_why(change: dict[str, Any], says: str) -> None:
    facts: dict[str, Any] = {"rows": 100, "packed": False, "capacity": 4096, "page_size": 16, "head_dim": 128}
    facts |= {"kv": torch.bfloat16} | change
    problem = described(
        device_type="cuda", compute_capability=(9, 0), batch=4, num_heads_q=32, num_heads_kv=8, band=CAUSAL,
        precision=Precision(torch.bfloat16, facts["kv"], torch.bfloat16, torch.bfloat16),
        queries=SequenceLayout(facts["rows"], facts["packed"]),
        head_dim=facts["head_dim"], head_dim_v=facts["head_dim"],
        keys=SequenceLayout(facts["capacity"], used=True, page_size=facts["page_size"]), softmax_scale=0.1,
    )  # fmt: skip
    assert says in describe(problem)
    assert leaves_few(problem) == (facts["packed"] and facts["capacity"] > 8192)


def test_calls_that_tma_cannot_read_stay_where_they_were() -> None:
    case = CASES["pages_of_64"]
    tensors = tensors_of(case)
    problem = problem_of(case, tensors)
    assert runs_forward(problem, tensors)
    tensors.cache_leftpad = torch.zeros(2, dtype=torch.int32)
    assert not runs_forward(problem, tensors)
