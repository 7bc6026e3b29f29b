"""Calls that differ in lengths alone: what is taken over from one to the next is what would be made anew."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

import flashtile
from flashtile import InvalidInputError
from flashtile.backends.gpu.launch import lower, specialise
from flashtile.call.arguments import OPTIONS, TENSORS, Grads, Options, Plain, Tensors, read, tensor_values
from flashtile.call.backend import FEATURES
from flashtile.call.prepared import without_data
from flashtile.call.problem import Problem
from flashtile.core.masks import Band
from flashtile.ops import dispatch, plans
from flashtile.ops import operators as ops
from flashtile.ops.operation import PlannedCall
from flashtile.ops.plans import ShapeClass, class_key
from flashtile_lab.kernels import hopper as hopper_builds
from tests.backends.hopper.emulated import on_cpu
from tests.cases import CASES, Case, build, judge

WITHOUT_SCORE_TENSORS = [case for case in CASES if case.mask is None and case.bias is None and not case.intervals]


def _longer(case: Case, more: int = 1) -> Case:
    """The same call of other lengths and another batch."""
    if case.lengths:
        lengths = tuple((q + 8 * more, k + 24 * more) for q, k in (*case.lengths, *case.lengths[:more]))
        return dataclasses.replace(case, lengths=lengths, batch=len(lengths))
    sizes = {"batch": case.batch + more, "seqlen_q": case.seqlen_q + 512 * more, "seqlen_k": case.seqlen_k + 24 * more}
    return dataclasses.replace(case, **sizes)


def _call(case: Case) -> tuple[Tensors, Options]:
    call = build(case, torch.float16)
    t, lengths = call.tensors, (None, None)
    if case.lengths and case.say_longest:
        lengths = (call.problem.seqlen_q, call.problem.seqlen_k)
    plain = Plain(case.scale, case.softcap, case.dropout, attention_chunk=case.chunk)
    return ops.REGULAR.readable(t), read(t, case.causal, case.window, False, plain, lengths)


def _count(record: type) -> int:
    """How many of these are kept."""
    return sum(type(x) is record for x in plans.kept.values())


@pytest.mark.parametrize("case", WITHOUT_SCORE_TENSORS, ids=str)
def test_a_resized_problem_is_the_one_that_would_be_made(case: Case) -> None:
    first, second = _call(case), _call(_longer(case))
    assert class_key(*first) is not None
    if case.head_dim % 8 == 0 and case.layout != "sliced":
        # Slopes with a batch are part of the family, and whether addresses and strides are on 16 bytes.
        of_one = case.alibi != "bh" and Problem.of(*first).tiny == Problem.of(*second).tiny
        assert (class_key(*first) == class_key(*second)) == of_one
        assert class_key(*second) == class_key(*_call(_longer(case, 2))) or case.alibi == "bh"
    like = Problem.of(*first)
    names = [name for name, x in vars(Problem).items() if isinstance(x, functools.cached_property)]
    before = [getattr(like, name) for name in names]
    made, want = like.resized(*second), Problem.of(*second)
    assert made == want and hash(made) == hash(want) and made != like
    assert [getattr(made, name) for name in names] == [getattr(want, name) for name in names]
    assert before == [getattr(like, name) for name in names]
    assert made.but(seqlen_q=3, softcap=2.0) == want.but(seqlen_q=3, softcap=2.0)


def test_every_option_but_the_longest_lengths_is_of_the_family() -> None:
    tensors, _ = _call(next(case for case in CASES if case.name == "varlen"))
    like = Options(max_seqlen_q=30, max_seqlen_k=30)
    others = dict(window_left=3, window_right=0, max_seqlen_q=31, max_seqlen_k=None, grads=Grads(True),
                  softmax_scale=2.0, softcap=1.0, dropout_p=0.5, deterministic=True, backend="portable",
                  attention_chunk=5, mirrored=True, listed=(16, 16), return_max_scores=True, batch_invariant="strict",
                  mods=("a text",), counted_by="sdpa")  # fmt: skip
    assert set(others) == set(OPTIONS), "a new option: is it part of the family?"
    for name, value in others.items():
        other = like._replace(**{name: value})
        assert (class_key(tensors, other) == class_key(tensors, like)) == name.startswith("max_seqlen"), name
    assert class_key(tensors, Options()) is not None
    seen = {
        "q", "k", "v", "alibi_slopes", "attn_mask", "attn_bias", "sinks", "cu_seqlens_q", "cu_seqlens_k", "rng_state",
        "row_keys", "key_rows", "row_blocks", "row_items", "key_blocks", "key_items", "origins", "operands", "numbers",
    }  # fmt: skip
    assert set(TENSORS) == seen, "a new tensor: what of it is part of the family?"


def _changed(t: Tensors) -> list[Tensors]:
    """The tensors with one dimension of one of them longer or shorter, or one dimension more or less."""
    made = []
    for name, x in vars(t).items():
        if x is None:
            continue
        for dim, change in itertools.product(range(x.dim()), (-1, 1)):
            shape = list(x.shape)
            shape[dim] = max(0, shape[dim] + change)
            made.append(dataclasses.replace(t, **{name: x.new_zeros(shape)}))
        made += [dataclasses.replace(t, **{name: x[None]})]
        made += [dataclasses.replace(t, **{name: x[0].contiguous()})] if x.dim() and len(x) else []
        if name not in "qkv":
            made.append(dataclasses.replace(t, **{name: None}))
    return made


@pytest.mark.parametrize("name", ["causal", "group_causal", "varlen_spare", "varlen", "sinks", "dropout", "alibi_bh"])
def test_what_would_be_refused_is_of_no_valid_family(name: str) -> None:
    (case,) = [each for each in CASES if each.name == name] or [Case(name, alibi="bh")]
    tensors, options = _call(case)
    seen = Counter[bool]()
    for changed in _changed(tensors):
        family = class_key(changed, options)
        is_same = family is not None and family == class_key(tensors, options)
        try:
            want = Problem.of(changed, options)
        except InvalidInputError:
            assert not is_same, [None if x is None else x.shape for x in tensor_values(changed)]
        else:
            assert not is_same or Problem.of(tensors, options).resized(changed, options) == want
        seen[is_same] += 1
    assert seen[False] > seen[True]


def test_masks_and_biases_have_no_family() -> None:
    for case in CASES:
        if case.mask is not None or case.bias is not None:
            assert class_key(*_call(case)) is None


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_launches_of_a_family_with_the_same_constants_ask_for_one_build(backend: str, direction: Any) -> None:
    shared = 0
    for case in WITHOUT_SCORE_TENSORS:
        if case.head_dim % 8 or (case.head_dim_v or 0) % 8 or case.layout == "sliced" or 0 in (case.batch,):
            continue
        if backend == "hopper" and direction == "backward" and (case.head_dim_v or case.head_dim > 256):
            continue
        if 0 in (case.seqlen_q, case.seqlen_k) and backend == "hopper":
            continue
        made = []
        for each in (case, _longer(case), _longer(case, 2), dataclasses.replace(_longer(case), head_dim=case.head_dim)):
            tensors, options = _call(each)
            problem = Problem.of(tensors, options).but(device_type="cuda", compute_capability=(9, 0))
            shapes = without_data(tensors)
            if case.dropout:
                shapes = dataclasses.replace(shapes, rng_state=torch.empty(2, dtype=torch.int64, device="meta"))
            made.append(dispatch.backend(backend).launches(problem, shapes, direction))
        for first, second in itertools.combinations(made, 2):
            for name in first.keys() & second.keys():
                a, b = specialise(first[name]), specialise(second[name])
                if a.constexprs == b.constexprs and first[name].options == second[name].options:
                    assert a == b and lower(first[name])[0] == lower(second[name])[0], (case.name, name)
                    shared += 1
    assert shared > 50


def test_no_capability_depends_on_a_length() -> None:
    for case in CASES:
        problem = build(case, torch.float16).problem
        other = problem.but(batch=7, seqlen_q=1234, seqlen_k=4321)
        assert [f.used(problem) for f in FEATURES] == [f.used(other) for f in FEATURES]
        for name, direction in itertools.product(dispatch.NAMES, ("forward", "backward")):
            assert dispatch.reasons(name, problem, direction) == dispatch.reasons(name, other, direction)  # type: ignore[arg-type]


def _counted(monkeypatch: pytest.MonkeyPatch, *places: tuple[Any, str]) -> Counter[str]:
    """Counts calls of functions from now on."""
    counts = Counter[str]()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for place, name in places:
        monkeypatch.setattr(place, name, counting(name, getattr(place, name)))
    return counts


KINDS = [
    Case("causal", batch=1, head_dim=64, causal=True, kv_heads=1),
    Case("window", batch=1, head_dim=64, window=(20, 6), softcap=4.0),
    Case("sinks", batch=1, head_dim=64, sinks=True, lse_grad=True, alibi="h"),
    Case("varlen", head_dim=64, causal=True, spare=5),
    Case("varlen_bounds", head_dim=64, window=(9, 4), say_longest=False),
]
LENGTHS = ((9, 133), (64, 65), (1, 70), (130, 40), (65, 0))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_many_lengths_of_one_family(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_cpu():
        counts = _counted(monkeypatch, (dispatch, "select"), (Problem, "resized"))
        for n, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
            sizes: dict[str, Any] = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
            if "varlen" in case.name:
                sizes = {"lengths": ((seqlen_q, seqlen_k), (7, 12), (0, n))[: n % 3 + 1], "batch": n % 3 + 1}
            judge(build(dataclasses.replace(case, **sizes), torch.bfloat16), "hopper")
        assert _count(ShapeClass) == 1 and _count(PlannedCall) == len(LENGTHS)
    assert counts["select"] == 2 and counts["resized"] == len(LENGTHS) - 1


def test_a_family_is_not_used_for_what_it_does_not_cover(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other settings, options, layouts and gradients, and what is refused, between calls of one family."""
    monkeypatch.setattr(plans, "kept", type(plans.kept)())

    def run(n: int, **keywords: Any) -> Tensor:
        q, k, v = (torch.randn(1, n, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
        out = flashtile.attention(q, k, v, **keywords)
        want = flashtile.reference.attention(
            Problem.of(Tensors(q, k, v), read(Tensors(q, k, v), False, None, False, Plain())),
            Tensors(q, k, v),
        )[0]
        torch.testing.assert_close(out, want)
        return out

    run(5)
    run(6)
    assert _count(ShapeClass) == 1
    monkeypatch.setenv("FLASHTILE_BACKEND", "hopper")
    with pytest.raises(flashtile.UnsupportedError):
        run(7)
    with pytest.raises(flashtile.UnsupportedError):
        run(8)
    monkeypatch.delenv("FLASHTILE_BACKEND")
    run(7)
    with torch.no_grad():
        run(8)
    assert _count(ShapeClass) == 3
    q, k = torch.randn(1, 9, 2, 8, dtype=torch.float64), torch.randn(1, 11, 2, 8, dtype=torch.float64)
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="^v: "):
            flashtile.attention(q, q, k)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tiny_dense_calls_are_a_family_of_their_own_and_go_past_the_wide_tiles(direction: Any) -> None:
    def problem(seqlen_q: int, seqlen_k: int, **more: Any) -> Problem:
        return hopper_builds._problem(64, Band(), seqlen_q=seqlen_q, seqlen_k=seqlen_k, **more)

    assert dispatch.select(problem(64, 64), direction).name == "portable"
    assert "slower up to 64 rows" in dispatch.explain(problem(64, 64), only=direction)
    for other in (problem(65, 64), problem(64, 65), problem(64, 64, varlen=True)):
        assert dispatch.select(other, direction).name == "hopper"
    assert dispatch.select(problem(64, 64), direction, "hopper").name == "hopper"

    def family(seqlen_q: int, seqlen_k: int) -> object:
        q, k = (torch.empty(2, n, 4, 64, dtype=torch.float16) for n in (seqlen_q, seqlen_k))
        return class_key(Tensors(q, k, k), read(Tensors(q, k, k), False, None, False, Plain()))

    assert family(49, 64) == family(64, 1) != family(65, 64) == family(64, 65) == family(999, 3)
