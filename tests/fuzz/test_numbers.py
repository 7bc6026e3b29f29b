"""Random calls of every kind on the CPU backend against the oracle, and the fuzz's own tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashtile.backends import cpu
from flashtile.call.backend import Direction
from flashtile.call.problem import Problem
from tests.cases import Case
from tests.fuzz import judged
from tests.fuzz.drawn import Drawn, Kind
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
