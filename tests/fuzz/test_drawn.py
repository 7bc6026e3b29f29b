"""The generator: the same calls from the same seeds, everything that the API takes, and layouts as of real tensors."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest

from flashtile.backends.gpu.launch import specialise
from flashtile.call.backend import FEATURES
from tests import cases
from tests.cases import Case
from tests.fuzz import launches
from tests.fuzz.drawn import ENDLESS, KINDS, SMALL, SWEPT, Drawn, Kind, Sizes, draw, sweep
from tests.kvcache import cases as kvcache
from tests.kvcache.cases import CacheCase
from tests.quantization import cases as quantization
from tests.quantization import quantizer
from tests.quantization.cases import QuantizedCase

# Small enough to be laid out in memory in no time.
_SIZES = Sizes(40, 2**13)
_OF_KINDS = sorted(set(KINDS))


def test_a_seed_is_a_call() -> None:
    assert [draw(n, SMALL) for n in range(40)] == [draw(n, SMALL) for n in range(40)]
    assert len({draw(n, SMALL) for n in range(200)}) == 200
    # What a seed means must not change from one version of Python to another.
    assert (draw(3, SMALL).kind, draw(3, SMALL, "plain").case.head_dim) == ("cached", 208)


def test_every_feature_is_drawn() -> None:
    problems = []
    for number in range(400):
        call = draw(number, _SIZES)
        if isinstance(call.case, Case):
            problems.append(cases.build(call.case, call.dtype, "meta").problem.but(max_scores=call.maxima))
        elif isinstance(call.case, CacheCase):
            problems.append(kvcache.build(call.case, call.dtype).problem.but(max_scores=call.maxima))
        elif isinstance(call.case, QuantizedCase):
            problems.append(quantization.build(call.case).problem)
    used = Counter(feature.name for feature in FEATURES for problem in problems if feature.used(problem))
    # Only the pieces of ranks have origins, and they get them where they are launched; functions are in test_mods.
    elsewhere = {"origins", "score_mod", "mask_mod", "block_lists", "operand_grad"}
    assert all(used[feature.name] >= 5 for feature in FEATURES if feature.name not in elsewhere), used
    assert any(draw(number, _SIZES, "pieces").pieces.origins for number in range(40))  # type: ignore[union-attr]


def test_lengths_and_head_dims_that_hurt_are_drawn() -> None:
    plain = [draw(n, ENDLESS, "plain").case for n in range(400)]
    lengths = {n for case in plain for pair in case.lengths or [(case.seqlen_q, case.seqlen_k)] for n in pair}
    assert {0, 1, 2, 61, 127, 8191} <= lengths and max(lengths) > 10**5, sorted(lengths)
    assert all(any(n % block == rest for n in lengths) for block in (64, 128) for rest in (0, 1, block - 1))
    dims = {case.head_dim for case in plain}
    assert {16, 32, 64, 80, 96, 128, 160, 192, 256} <= dims and any(dim % 8 for dim in dims)
    assert {320, 512} <= dims and max(dims) == 512
    assert any(
        max(case.head_dim, case.head_dim_v or 0) > 256 > min(case.head_dim, case.head_dim_v or 0) > 0 for case in plain
    )


@pytest.mark.parametrize("kind", _OF_KINDS)
def test_what_a_reference_computes_is_small(kind: Kind) -> None:
    from tests.fuzz.drawn import _pairs

    assert all(_pairs(draw(n, SMALL, kind).case) <= SMALL.most_pairs for n in range(200))


def test_the_sweep_has_every_head_dim_in_both_directions() -> None:
    calls = sweep()
    for kind in ("plain", "pieces", "cached"):
        assert {call.case.head_dim for call in calls if call.kind == kind} == set(SWEPT)
    assert {call.case.head_dim for call in calls if call.kind == "quantized"} == {n for n in SWEPT if n % 16 == 0}
    edges = (16, 32, 64, 80, 96, 128, 160, 192, 256)
    assert set(edges) <= set(SWEPT)
    assert all(any(low < dim < high for dim in SWEPT) for low, high in itertools.pairwise(edges) if high - low > 16)
    assert all(build.leaves for call in calls if isinstance(call.case, Case)
               for build in [cases.build(call.case, call.dtype, "meta")])  # fmt: skip


@pytest.mark.parametrize("kind", _OF_KINDS)
def test_tensors_without_data_are_laid_out_like_those_with(kind: Kind) -> None:
    """What is built is what is computed."""
    for number in range(25):
        call = draw(number, _SIZES, kind)
        real, bare = _tensors(call)
        for name, x in real.items():
            y = bare[name]
            assert (x is None) == (y is None), (name, call)
            if x is not None and y is not None and x.numel():
                strides = [(a, b) for n, a, b in zip(x.shape, x.stride(), y.stride(), strict=True) if n > 1]
                assert x.shape == y.shape and x.dtype == y.dtype and all(a == b for a, b in strides), (name, call)
                assert x.data_ptr() % 16 == y.data_ptr() % 16, (name, call)


def _tensors(call: Drawn) -> tuple[dict[str, Any], dict[str, Any]]:
    case: Any = call.case
    if isinstance(case, Case):
        real, bare = cases.build(case, call.dtype), cases.build(case, call.dtype, "meta")
        assert dataclasses.replace(bare.problem, device_type="cpu", aligned=real.problem.aligned) == real.problem
        return vars(real.tensors), vars(bare.tensors)
    if isinstance(case, QuantizedCase):
        return vars(quantization.build(case).tensors), vars(launches.laid_out_8_bits(case))
    if isinstance(case, CacheCase):
        return vars(kvcache.build(case, call.dtype).tensors), vars(kvcache.build(case, call.dtype, "meta").tensors)
    return vars(quantizer.inputs(case, call.dtype)), vars(quantizer.inputs(case, call.dtype, "meta"))


def test_the_sweep_has_calls_with_splits_and_without() -> None:
    """Each takes a build of its own, but for Hopper's kernel for wide groups, which always has a workspace."""
    found = set()
    for call in sweep():
        if call.kind == "cached":
            for each in launches.started(call, (9, 0)):
                # Prompts run on the forward, which splits nothing.
                if "cache_attention" in each.launch.kernel.__name__:
                    whole = "call.results.acc" in specialise(each.launch).constexprs
                    found.add((each.launch.kernel.__name__, whole))
    assert found == {("cache_attention", False), ("cache_attention", True), ("wide_cache_attention", False)}


def test_launches_are_recorded_and_none_is_started() -> None:
    case = Case("varlen", lengths=((70, 70), (3, 9)), head_dim=64, causal=True)
    found = launches.started(Drawn(0, "plain", case), (8, 0))
    names = [(each.direction, each.launch.kernel.__name__) for each in found]
    assert names == [
        ("forward", "attention_forward"), ("backward", "prepare_rows"), ("backward", "attention_backward_dkdv"),
        ("backward", "attention_backward_dq"),
    ]  # fmt: skip
    on_hopper = {each.backend for each in launches.started(Drawn(0, "plain", case), (9, 0))}
    assert on_hopper == {"hopper", "portable"}
    assert len(launches.merging()) == 9
