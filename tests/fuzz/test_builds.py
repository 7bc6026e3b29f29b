"""The build fuzz itself: what is distinct, what it reports, and faults that it must see; and calls that it found."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from flashtile.backends.gpu.launch import leaf_names
from flashtile_lab.kernels.build import ARCHS
from tests.cases import Case
from tests.fuzz import builds
from tests.fuzz.constants import forgotten
from tests.fuzz.drawn import ENDLESS, KINDS, Drawn, Pieces, draw
from tests.kvcache.cases import CacheCase
from tests.quantization.quantizer import Case as Quantizer

SMALL = Drawn(0, "plain", Case("small", seqlen_q=100, seqlen_k=100, head_dim=16, wanted=""), torch.float16)


def test_calls_that_differ_in_lengths_share_a_build() -> None:
    case = SMALL.case
    assert isinstance(case, Case)
    longer = dataclasses.replace(SMALL, case=dataclasses.replace(case, seqlen_q=300, seqlen_k=501))
    masked = dataclasses.replace(SMALL, case=dataclasses.replace(case, causal=True))
    found, wrong = builds.distinct([SMALL, longer, masked], "sm_80")
    assert [each.call for each in found] == [SMALL, masked] and not wrong


@pytest.mark.parametrize("arch", ARCHS)
def test_every_drawn_call_is_laid_out_on_every_architecture(arch: str) -> None:
    """Not compiled, which takes seconds each: ``make fuzz``."""
    found, wrong = builds.distinct([draw(n, ENDLESS) for n in range(30)], arch)
    assert not wrong and len(found) > 50
    assert len({builds.key_of(each.build) for each in found}) == len(found)
    for each in found:
        assert [*each.build.tree] == each.build.kernel.arg_names
        assert sorted([*each.build.signature, *each.build.constexprs]) == sorted(leaf_names(each.build.tree))


class Inner(NamedTuple):
    """A record of a toy kernel."""

    ptr: Any
    SIZE: Any


def test_what_triton_forgets() -> None:
    """A record that is given a number after the records in it, and nothing more once they have their constants."""
    inner, constants = Inner("ptr", "SIZE"), {"SIZE": 64, "LAST": True, "none": None}
    assert forgotten({"a": (inner, "stride")}, constants) == {"SIZE"}
    assert forgotten({"a": ((inner, "stride"), "number")}, constants) == {"SIZE"}
    for record in ((inner,), ("stride", inner), (inner, "stride", "LAST"), (("none", "ptr"), "stride")):
        assert not forgotten({"a": record}, constants)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_kernel_forgets_constants_of_its_records(arch: str) -> None:
    """On Triton 3.6 gradients past head_dim 256 were without the slope of a score mod."""
    drawn = [draw(n, ENDLESS, kind) for n in range(10) for kind in sorted(set(KINDS))]
    big = Case("big", seqlen_q=100, seqlen_k=100, head_dim=320, bias="hqk", bias_grad=False)
    found, wrong = builds.distinct([dataclasses.replace(SMALL, case=big), *drawn], arch)
    lost = {each.build.label: forgotten(each.build.tree, each.build.constexprs) for each in found}
    assert not wrong and not {label: names for label, names in lost.items() if names}


def test_faults_are_failures_with_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHS, "sm_120", 100)
    said: list[str] = []
    (failure,) = builds.fuzz([SMALL], ["sm_120"], 1, None, said.append)
    assert failure.call == SMALL and "bytes of shared memory, sm_120 has 100" in failure.what
    assert said[0].startswith("FAILED sm_120: portable/attention_forward dtype=fp16") and "head_dim=16" in said[0]
    assert said[-1].startswith("sm_120: 1 of 1 distinct builds")

    def fail(*args: object) -> None:
        raise ValueError("no such thing") from KeyError("the cause")

    monkeypatch.setattr(builds.builds, "compile_build", fail)
    (failure,) = builds.fuzz([SMALL], ["sm_80"], 1, None, said.append)
    assert failure.what.endswith("does not build: KeyError: 'the cause'")
    monkeypatch.setattr(builds, "started", fail)
    (failure,) = builds.fuzz([SMALL], ["sm_80"], 1, None, said.append)
    assert failure.what == "no launch: ValueError: no such thing"


def test_workers_compile_the_same() -> None:
    todo, _ = builds.distinct([SMALL], "sm_80")
    (alone,), (forked,) = (list(builds.run(todo, "sm_80", workers)) for workers in (1, 2))
    assert alone.report == forked.report and alone.found is forked.found is todo[0] and not forked.faults


def test_a_few_builds_are_other_ones_for_each_architecture() -> None:
    todo = [builds.Found(None, dataclasses.replace(SMALL, seed=n)) for n in range(100)]  # type: ignore[arg-type]
    chosen = [[each.call.seed for each in builds.spread(todo, 10, turn / 4)] for turn in range(4)]
    assert all(len(each) == 10 for each in chosen) and len({n for each in chosen for n in each}) == 40
    assert builds.spread(todo, None) == builds.spread(todo, 200) == todo


# Calls that once failed to build.
_CHUNK = CacheCase(
    "128 rows of an 8-bit cache", ((900, 64, 64), (30, 64, 64)), appends=True, heads=8, kv_heads=2, head_dim=128,
    page_size=16, float8="none",
)  # fmt: skip
# On Triton 3.6, which cannot ask whether a record is None that holds one: ``make kernels``.
_PROMPT = dataclasses.replace(_CHUNK, name="a_prompt", sequences=((900, 300, 300),), float8="")
FOUND = (
    ("gfx950", Drawn(0, "plain", Case("products", seqlen_q=64, seqlen_k=64, head_dim=16, wanted=""))),
    ("gfx950", Drawn(0, "quantizer", Quantizer("rotation", rotate=True, smooth_k=False), torch.float32)),
    ("sm_120", Drawn(0, "cached", _CHUNK, torch.float16)),
    ("sm_90a", Drawn(0, "cached", _PROMPT, torch.bfloat16)),
)


@pytest.mark.long
@pytest.mark.parametrize(("arch", "call"), FOUND, ids=lambda x: x if isinstance(x, str) else x.case.name)
def test_calls_that_were_found_build(arch: str, call: Drawn) -> None:
    assert builds.fuzz([call], [arch], 1, None, print) == []


@pytest.mark.long
def test_partial_results_in_parts_of_columns_build() -> None:
    """Hopper's forward from a partial result, where the output's tile has two parts."""
    case = Case("parts", seqlen_q=100, seqlen_k=100, head_dim=64, head_dim_v=160, wanted="")
    todo, _ = builds.distinct([Drawn(0, "pieces", case, pieces=Pieces())], "sm_90a")
    joining = [each for each in todo if "output.partial_out" in each.build.signature and each.build.backend == "hopper"]
    assert len(joining) == 2 and not any(builds.compiled(each, "sm_90a").faults for each in joining)
