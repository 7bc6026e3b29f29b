"""A backward by two backends: which calls get one, and that each computes its part."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashtile import UnsupportedError
from flashtile.backends import cpu
from flashtile.call.arguments import Grads
from flashtile.call.backend import Backend, Capabilities, Direction, Gradients
from flashtile.call.problem import Problem, described
from flashtile.core.states import in_one
from flashtile.ops import dispatch
from flashtile.ops.plans import ShapeClass
from tests.cases import Case, build

EVERY = Grads(True, True, True, True)


def _problem(**values: Any) -> Problem:
    usual = {
        "device_type": "cuda", "compute_capability": (9, 0), "dtype": torch.bfloat16, "batch": 2, "seqlen_q": 1024,
        "seqlen_k": 1024, "num_heads_q": 8, "num_heads_kv": 8, "head_dim": 64, "head_dim_v": 64,
        "bias_dtype": torch.bfloat16, "grads": EVERY,
    }  # fmt: skip
    return described(**usual | values)


def test_hopper_computes_what_it_can() -> None:
    problem = _problem()
    assert dispatch.select(problem).name == dispatch.select(problem, "backward").name == "hopper"
    said = dispatch.explain(problem)
    assert "backward: hopper: TMA and WGMMA" in said
    assert "gradient of attn_bias: portable: Triton, tiles dbias 64x64, 4 warps, 2 stages, TMA; no atomics" in said


def test_each_has_its_share() -> None:
    problem = _problem()
    found = dispatch.shares(dispatch.select(problem, "backward"), problem, "backward")
    assert [(backend.name, share.grads) for backend, share in found] == [
        ("hopper", Grads(True, True, True)),
        ("portable", Grads(bias=True)),
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"head_dim": 32, "head_dim_v": 32},
        {"seqlen_q": 50, "seqlen_k": 50},
        {"compute_capability": (8, 0)},
        {"grads": Grads(bias=True)},
    ],
    ids=str,
)
def test_one_backend_computes_all(values: dict[str, Any]) -> None:
    said = dispatch.explain(_problem(**values))
    assert "backward: portable: " in said
    assert "gradient of attn_bias: portable" not in said


def test_a_named_backend_computes_all() -> None:
    assert "backward: portable: " in dispatch.explain(_problem(), "portable")
    with pytest.raises(UnsupportedError, match="no gradient of attn_bias"):
        dispatch.select(_problem(), "backward", "hopper")


@torch.no_grad()
def test_each_computes_its_part() -> None:
    class Biasless(cpu.CpuBackend):
        def capabilities(self, direction: Direction) -> Capabilities:
            able = cpu.BACKEND.capabilities(direction)
            return dataclasses.replace(able, features=able.features - {"bias_grad"})

    call = build(Case("both", bias="hqk", sinks=True, kv_heads=1), torch.float32)
    t = call.tensors
    out, lse = cpu.BACKEND.plan("forward", call.problem, t)(t)
    dout, dlse = torch.randn_like(out), torch.randn_like(in_one(lse, out))

    def gradients(backend: Backend) -> Gradients:
        shape_class = ShapeClass()
        shape_class.backends["backward"] = backend
        found: Gradients = shape_class.plan("backward", call.problem, t, (dout, dlse))(t, out, lse, dout, dlse)
        return found

    assert len(dispatch.shares(Biasless(), call.problem, "backward")) == 2
    want, got = gradients(cpu.BACKEND), gradients(Biasless())
    for name in ("dq", "dk", "dv", "dbias", "dsinks"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name))
