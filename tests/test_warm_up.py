"""warm_up: every kernel of a described call is built, side by side, and nothing is computed."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import InvalidInputError, UnsupportedError
from flashtile.call.backend import MEANWHILE, Build, Direction
from flashtile.call.problem import Problem, Tensors
from flashtile.ops import dispatch, plans


def _meta(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Direction, Problem, Tensors]]:
    """What the CPU backend was asked to build; two kernels a direction, which wait for one another."""
    seen: list[tuple[Direction, Problem, Tensors]] = []
    meet = {"forward": threading.Barrier(2, timeout=60), "backward": threading.Barrier(2, timeout=60)}

    def builds(self: object, problem: Problem, tensors: Tensors, direction: Direction) -> list[Build]:
        seen.append((direction, problem, tensors))
        return [Build(f"{direction}_{n}", meet[direction].wait) for n in range(2)]

    monkeypatch.setattr(type(dispatch.backend("cpu")), "builds", builds)
    return seen


def test_builds_both_directions_at_once(asked: list[tuple[Direction, Problem, Tensors]]) -> None:
    q, kv, sinks = _meta(2, 70, 4, 16), _meta(2, 90, 2, 16), _meta(4)
    times = flashtile.warm_up(q, kv, kv, causal=True, sinks=sinks, dropout_p=0.5, device="cpu")
    assert [(t.backend, t.direction, t.kernel) for t in times] == [
        ("cpu", direction, f"{direction}_{n}") for direction in ("forward", "backward") for n in range(2)
    ]
    assert all(t.seconds >= 0 for t in times)
    (_, forward, tensors), (_, backward, _) = asked
    assert (
        forward == backward and forward.device_type == "cpu" and forward.grads.named == (True, True, True, False, True)
    )
    assert (forward.seqlen_q, forward.seqlen_k, forward.group_size, str(forward.band)) == (70, 90, 2, "causal")
    assert tensors.rng_state is not None and tensors.k is tensors.v


def test_builds_what_is_asked_for(asked: list[tuple[Direction, Problem, Tensors]]) -> None:
    x = torch.randn(30, 2, 16).transpose(0, 1).contiguous().transpose(0, 1)
    bounds = torch.tensor([0, 10, 30], dtype=torch.int32)
    call = dict(cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=20, max_seqlen_k=20, device="cpu")
    flashtile.warm_up(x, x, x, **call, backward=False)
    flashtile.warm_up(x.requires_grad_(), x.detach(), x.detach(), **call)
    assert [direction for direction, *_ in asked] == ["forward", "forward", "backward"]
    assert asked[0][1].varlen and not asked[0][1].needs_grad and asked[2][1].grads.named == (True, *[False] * 4)
    tensors = asked[0][2]
    assert tensors.q.is_meta and tensors.q.stride() == x.stride() and tensors.cu_seqlens_q is tensors.cu_seqlens_k


def test_a_backend_without_kernels_builds_nothing() -> None:
    x = _meta(1, 8, 1, 8)
    assert flashtile.warm_up(x, x, x, device="cpu") == []


def test_refuses_what_the_call_would_refuse() -> None:
    x = _meta(1, 8, 1, 8)
    with pytest.raises(InvalidInputError, match="^dropout_p: "):
        flashtile.warm_up(x, x, x, dropout_p=1.0, device="cpu")
    with pytest.raises(UnsupportedError, match="hopper"):
        flashtile.warm_up(x, x, x, backend="hopper", device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidInputError, match="^device: "):
            flashtile.warm_up(x, x, x)


def test_a_backward_is_built_while_its_forward_is(
    asked: list[tuple[Direction, Problem, Tensors]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = type(dispatch.backend("cpu"))
    plan, threads = backend.plan, threading.active_count()

    def compiles(self: object, direction: Direction, *call: Any) -> Any:
        after = MEANWHILE.get()
        assert (after is not None) == (direction == "forward" and call[0].needs_grad)
        if after is not None:
            after()
        return plan(self, direction, *call)

    monkeypatch.setattr(backend, "plan", compiles)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    leaf, x = torch.randn(1, 9, 1, 8, requires_grad=True), torch.randn(1, 9, 1, 8)
    with plans.own_plans():
        flashtile.attention(x, x, x, causal=True)
        assert not asked
        flashtile.attention(x, leaf, x, causal=True).sum().backward()
    while threading.active_count() > threads:
        time.sleep(0.01)
    ((direction, problem, tensors),) = asked
    assert direction == "backward" and problem.grads.named[:3] == (False, True, False) and tensors.q.is_meta
    assert MEANWHILE.get() is None
