"""Repeated launches: the arguments that a fresh one would have, and a fresh one where anything but pointers moved."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from flashtile.backends.portable import forward, gradients, tiles, warm
from flashtile.backends.portable.launch import Launch
from flashtile.masks import Band
from flashtile.problem import Problem, Tensors


class _Compiled:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.calls.append((grid, *arguments))


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_known", {})


def _call(tensors: Tensors, compiled: _Compiled, config: tiles.Config) -> tuple[Any, bool]:
    """The fresh launch for some tensors, and whether ``warm`` made one."""
    problem = Problem.build(tensors, Band(None, 0))
    out, lse = torch.empty_like(tensors.q), torch.empty(2, 4, tensors.q.shape[1])
    fresh = forward.forward_launch(problem, tensors, out, lse, config)
    made = []

    class Made:
        kernel, programs, arguments = fresh.kernel, fresh.programs, fresh.arguments

        def run(self) -> _Compiled:
            made.append(True)
            return compiled

    operands = forward._operands(tensors, out, lse)
    with tiles.override(forward=config):
        warm._on_device("forward", problem, operands, lambda: [Made()], 0)  # type: ignore[list-item]
    return fresh, bool(made)


def _tensors(rows: int = 32, offset: int = 0) -> Tensors:
    def one() -> torch.Tensor:
        return torch.zeros(2 * rows * 4 * 64 + offset, dtype=torch.bfloat16)[offset:].view(2, rows, 4, 64)

    return Tensors(one(), one(), one())


@pytest.mark.parametrize("tma", [False, True])
def test_a_repeat_passes_what_a_fresh_launch_would(tma: bool) -> None:
    config, compiled = tiles.Config(64, 64, 4, 2, tma=tma), _Compiled()
    assert _call(_tensors(), compiled, config)[1]
    tensors = _tensors()
    fresh, made = _call(dataclasses.replace(tensors, v=tensors.k), compiled, config)
    assert not made
    ((grid, *arguments),) = compiled.calls
    assert grid == (fresh.programs, 1, 1)
    for parameter, got in zip(fresh.kernel.params, arguments, strict=True):
        want = fresh.arguments[parameter.name]
        if isinstance(want, TensorDescriptor):
            assert got.base is want.base
            assert (got.shape, got.strides, got.block_shape) == (want.shape, want.strides, want.block_shape)
        elif isinstance(want, torch.Tensor):
            assert got is want, parameter.name
        else:
            assert got == want, parameter.name


def test_whatever_a_kernel_is_built_on_makes_a_fresh_launch() -> None:
    compiled, config = _Compiled(), tiles.Config(64, 64, 4, 2)
    assert _call(_tensors(), compiled, config)[1]
    assert _call(_tensors(rows=48), compiled, config)[1]
    assert _call(_tensors(offset=1), compiled, config)[1]
    assert _call(_tensors(), compiled, tiles.Config(64, 32, 4, 2))[1]
    strided = _tensors()
    assert _call(
        dataclasses.replace(strided, k=strided.k.transpose(1, 2).contiguous().transpose(1, 2)), compiled, config
    )[1]
    assert not _call(_tensors(rows=48), compiled, config)[1]


def test_a_repeated_backward_passes_each_kernel_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, _Compiled]] = []

    def run(launch: Any) -> _Compiled:
        made.append((launch, _Compiled()))
        return made[-1][1]

    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.setattr(warm, "launch", lambda *arguments: warm._on_device(*arguments, 0))
    config = tiles.Config(64, 64, 4, 2)
    with tiles.override(dk=config, dv=dataclasses.replace(config, tma=True), dq=config):
        for expected in (4, 4):
            tensors = _tensors()
            problem = Problem.build(tensors, Band(None, 0), needs_grad=True)
            grads = gradients.run(problem, tensors, tensors.v, torch.zeros(2, 4, 32), tensors.v, None)
            assert len(made) == expected
    for launch, compiled in made:
        ((grid, *arguments),) = compiled.calls
        assert grid == (launch.programs, 1, 1)
        for parameter, got in zip(launch.kernel.params, arguments, strict=True):
            want, now = launch.arguments[parameter.name], {"q_ptr": tensors.q, "dq_ptr": grads.dq, "dk_ptr": grads.dk}
            if isinstance(want, TensorDescriptor):
                assert got.base is getattr(tensors, {"q": "q", "dout": "v"}[parameter.name.removesuffix("_source")])
            elif isinstance(want, torch.Tensor):
                assert got.shape == want.shape and got is now.get(parameter.name, got), parameter.name
            else:
                assert got == want, parameter.name
