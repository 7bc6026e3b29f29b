"""Random calls of every kind, with functions of users, with symbolic sizes; steps of a server; the fuzz's own tests."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.backends import cpu
from flashtile.call.backend import Direction
from flashtile.call.problem import Problem
from flashtile.masks import Intervals
from tests.cases import Call, Case, gradient_of
from tests.cases import build as build_traced
from tests.fuzz import judged, mixed
from tests.fuzz.drawn import FLOATS, SMALL, Draw, Drawn, Kind, Sizes, _plain, _within
from tests.fuzz.functions import drawn, fuzz, judge_call
from tests.kvcache.cases import CacheCase, build
from tests.mods.functions import MASKS, SCORES
from tests.slow import slow_but


@pytest.mark.one_in(20)
@pytest.mark.parametrize("kind", ["plain", "cached", "quantized", "pieces"])
@pytest.mark.parametrize("shard", slow_but(range(20), lambda shard: shard < 1))
def test_random_calls(shard: int, kind: Kind) -> None:
    assert not judged.fuzz("cpu", 25 * shard, 25, print, kind)


def test_a_wrong_number_is_a_failure_with_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = cpu.CpuBackend.plan

    def off(self: cpu.CpuBackend, direction: Direction, *args: Any, **known: Any) -> Any:
        run = plan(self, direction, *args, **known)
        if direction != "forward":
            return run
        return lambda t, partial=None: (run(t, partial)[0] * 1.02, run(t, partial)[1])

    monkeypatch.setattr(cpu.CpuBackend, "plan", off)
    said: list[str] = []
    # Whatever is computed with is no other call's plan.
    wrong = judged.fuzz("cpu", 10**6, 6, said.append, "plain")
    assert len(wrong) >= 3 and said == [f"FAILED {each}" for each in wrong]
    assert any("out: error" in each for each in wrong) and all("Drawn(seed=" in each for each in wrong)


def test_gradients_that_are_exactly_0_are_not_judged_by_the_rule() -> None:
    def call(**about: object) -> Problem:
        case = Case("x", **{"seqlen_q": 8, "seqlen_k": 8} | about)  # type: ignore[arg-type]
        return judged.cases.build(case, torch.float32).problem

    assert judged.cancels(call(seqlen_k=1)) and judged.cancels(call(window=(0, 0)))
    assert not judged.cancels(call(seqlen_k=1, sinks=True)) and not judged.cancels(call(window=(0, 1)))
    assert not judged.cancels(call(causal=True))


@pytest.mark.parametrize("backend", ["cpu", "portable", "hopper"])
def test_calls_on_cpu_are_ones_that_the_backend_can_have(backend: str) -> None:
    calls = [judged.on_cpu(n, backend) for n in range(60)]
    assert len({call.kind for call in calls}) >= 4
    narrow = [call for call in calls if call.kind in ("cached", "latent", "quantizer") and call.dtype == torch.bfloat16]
    assert not narrow or backend != "portable"
    assert backend != "hopper" or not any(call.kind in ("cached", "latent") for call in calls)


def test_what_is_wanted_alone_is_computed() -> None:
    """The new fields of a case: some gradients, none, and out's gradient in another layout."""
    case = Case("wanted", causal=True, sinks=True, bias="hqk", wanted="vb", dout="expanded", lse_grad=True)
    made = judged.cases.build(case, torch.float32)
    assert list(made.leaves) == ["v", "bias"] and made.problem.grads.named == (False, False, True, True, False)
    assert judged.cases.gradient_of(made).stride()[-2:] == (0, 0)
    for wanted in ("vb", "q", "s", "b", ""):
        judged.judge(Drawn(0, "plain", dataclasses.replace(case, wanted=wanted), torch.float16), "cpu")


@pytest.mark.one_in(20)
@pytest.mark.parametrize("seed", range(300))
def test_random_functions_on_the_cpu(seed: int) -> None:
    judge_call(drawn(seed), "cpu", seed)


# Cheap ones that together have functions of both kinds, lists with and without bits, packed sequences, dropout, a
# softcap, tensors that are captured and scores too large for one sum.
FEW = (1, 2, 5, 7, 10, 13, 21)
SHARDS = [FEW, *(pytest.param(range(n, n + 5), marks=pytest.mark.long) for n in range(0, 200, 5))]


@pytest.mark.parametrize("seeds", SHARDS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_random_functions_on_hopper(seeds: Sequence[int]) -> None:
    pytest.importorskip("triton.experimental.gluon")
    assert not [wrong for seed in seeds for wrong in fuzz("hopper", seed, 1, print)]


def test_all_functions_and_layouts_are_drawn() -> None:
    every = [drawn(seed) for seed in range(300)]
    assert {score for _, score, *_ in every} == {*SCORES, None}
    assert {mask for _, _, mask, *_ in every} == {*MASKS, None}
    assert {mask for _, _, mask, _, listed in every if listed} == {*MASKS}
    assert any(case.lengths and listed for case, *_, listed in every)
    assert any(case.lengths for case, *_ in every) and any(case.dropout for case, *_ in every)


@pytest.mark.parametrize("shard", slow_but(range(50), lambda shard: shard < 1))
def test_random_batches(shard: int) -> None:
    assert not mixed.fuzz("cpu", 10 * shard, 10, print)


def test_every_feature_is_mixed() -> None:
    names = (
        "tree", "slots", "ragged", "causal_each", "rotary", "float8", "e5m2", "window", "leftpad", "alibi", "sinks",
        "entries", "out",
    )  # fmt: skip
    seen = Counter[str]()
    for number in range(300):
        case = mixed.draw_batch(number, Sizes(40, 2**13)).case
        assert isinstance(case, CacheCase) and case.packed
        seen.update(name for name in names if getattr(case, name))
        queries = {-1 if old < 0 else rows for old, rows, _ in case.sequences}
        seen.update(f"{rows} rows" for rows in queries & {-1, 0, 1})
        seen["more rows"] += max(queries) > 1 and len(queries) > 2
        seen["group"] += case.heads > case.kv_heads
    assert len(seen) == len(names) + 5 and min(seen.values()) >= 15, seen


def test_a_batch_that_changes_a_sequence_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other work in the batch, the last bit of every output differs."""
    from flashtile.backends.cpu import decode

    attend = decode.decode

    def off(problem, one, t):  # type: ignore[no-untyped-def]
        lse = attend(problem, one, t)
        return lse if problem.batch == 1 else lse.nextafter(lse * 2)

    monkeypatch.setattr(decode, "decode", off)
    said: list[str] = []
    wrong = mixed.fuzz("cpu", 10**6, 4, said.append)
    assert wrong and any("sequence " in each for each in wrong) and len(said) == len(wrong) + 1


def test_few_kinds_are_few_builds() -> None:
    """As many as there may be time for on a GPU, of batches that differ in lengths alone."""
    batches = [mixed.draw_batch(n, mixed.ON_GPU, 4) for n in range(40)]
    kinds = {(b.dtype, c.heads, c.head_dim, c.head_dim_v, c.page_size, c.window, c.rotary, c.float8, c.alibi, c.softcap)
             for b in batches if isinstance(c := b.case, CacheCase)}  # fmt: skip
    assert len(kinds) == 4 and len({str(b.case) for b in batches}) == 40
    assert not mixed.fuzz("cpu", 0, 2, print, kinds=2)


def test_a_seed_is_a_batch() -> None:
    assert [mixed.draw_batch(n) for n in range(20)] == [mixed.draw_batch(n) for n in range(20)]
    call = mixed.draw_batch(7)
    assert isinstance(call.case, CacheCase)
    assert build(call.case, call.dtype, "meta").problem.varlen


WAYS = ("export", "dynamic", "unbacked")
# Tensors whose last two dimensions are sizes too.
_PAIRS = ("attn_mask", "attn_bias")


def drawn_traced(seed: int) -> tuple[Case, torch.dtype, str]:
    """Call number ``seed``, and how it is traced."""
    d = Draw(("traced", seed), replace(SMALL, longest=60, most_pairs=2**15, most_dim=64))
    case = replace(_within(_plain(d, f"traced_{seed}"), d.sizes), deterministic=False)
    return case, d.pick(*FLOATS), d.pick(*WAYS)


class Attend(torch.nn.Module):
    """A call by the names of its tensors: out, and lse without the gradient of 0 that compiled code gives it."""

    def __init__(self, made: Call) -> None:
        super().__init__()
        self.packed, self.longest = made.tensors.cu_seqlens_q is not None, made.case.say_longest
        mask = made.keywords.get("block_mask")
        self.mirrored, self.has_mask = mask is not None and mask.mirrored, mask is not None
        self.plain = {n: x for n, x in made.keywords.items() if not isinstance(x, (Tensor, Intervals))}

    def forward(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Longest lengths are those of the data."""
        t: dict[str, Any] = dict(given)
        if self.has_mask:
            t["block_mask"] = Intervals(t.pop("row_keys", None), t.pop("key_rows", None), self.mirrored)
        if not self.packed:
            out, lse = flashtile.attention(**t, **self.plain, return_lse=True)
            return out, lse.detach()
        if self.longest:
            bounds = t["cu_seqlens_q"], t["cu_seqlens_k"]
            lengths = [(each[1:] - each[:-1]).max().item() for each in bounds]
            t |= {"max_seqlen_q": lengths[0], "max_seqlen_k": lengths[1]}
        out, lse = flashtile.attention_varlen(**t, **self.plain, return_lse=True)
        return out, lse.detach()


def judge_call_traced(seed: int) -> None:
    """Asserts that a call gives the same numbers and gradients traced as eager."""
    case, dtype, way = drawn_traced(seed)
    case = replace(case, out="", say_longest=case.say_longest and bool(case.lengths))
    made = build_traced(case, dtype, seed=seed)
    given = {n: x for n, x in vars(made.tensors).items() if isinstance(x, Tensor) and n != "rng_state"}
    attend, leaves = Attend(made), list(made.leaves.values())
    sizes = {name: _sizes(name, x, attend.packed) for name, x in given.items()}
    run: Callable[..., Any]
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch._dynamo.reset()
        if way == "export":
            shapes = {name: dict.fromkeys(dims, torch.export.Dim.DYNAMIC) for name, dims in sizes.items()}
            shapes = {name: {n: s for n, s in of.items() if given[name].shape[n] > 2} for name, of in shapes.items()}
            with torch.no_grad():
                run, leaves = torch.export.export(attend, (given,), dynamic_shapes=(shapes,)).module(), []
        else:
            for name, dims in sizes.items() if way == "unbacked" else ():
                for n in dims:
                    torch._dynamo.decorators.mark_unbacked(given[name], n)
            run = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=way == "dynamic" or None)
        found = [_results(each, given, leaves, gradient_of(made).contiguous()) for each in (attend, run)]
    for want, got in zip(*found, strict=True):
        assert torch.equal(want.nan_to_num(), got.nan_to_num()), (seed, case, dtype, way)


def _sizes(name: str, x: Tensor, packed: bool) -> range:
    """The dimensions that are a batch or a length."""
    if name in ("sinks", "alibi_slopes"):
        return range(x.dim() - 1)
    if name in _PAIRS:
        return range(x.dim())
    return range(1) if packed or x.dim() == 1 else range(2 if name in "qkv" else 1)


def _results(run: Callable[..., Any], given: dict[str, Tensor], leaves: list[Tensor], dout: Tensor) -> list[Tensor]:
    torch.manual_seed(7)
    out, lse = run(given)
    return [out, lse, *(torch.autograd.grad(out, leaves, dout) if leaves else ())]


@pytest.mark.one_in(25)
@pytest.mark.parametrize("seed", range(100))
def test_random_calls_with_symbolic_sizes(seed: int) -> None:
    judge_call_traced(seed)


def test_all_ways_and_features_are_drawn() -> None:
    every = [drawn_traced(seed) for seed in range(100)]
    assert {way for *_, way in every} == set(WAYS)
    for feature in ("lengths", "mask", "bias", "sinks", "alibi", "intervals", "dropout", "softcap"):
        assert any(getattr(case, feature) for case, *_ in every), feature
