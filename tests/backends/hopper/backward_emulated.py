"""Lets the Hopper backward run on CPU tensors behind the oracle's forward, its kernels in the emulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flashtile import dispatch, ops, reference
from flashtile.backends import hopper
from flashtile.backends.base import Gradients
from flashtile.backends.hopper import backward_tiles, gradients, launch
from flashtile.backends.hopper.gluon_compat import tma_add
from flashtile.problem import Problem, Tensors
from tests import emulator

_REPLACEMENTS: dict[Any, Callable[..., Any]] = {tma_add: emulator.reduce_out}


class _Emulated:
    """Stands for a kernel: ``emulated[grid](*arguments)`` runs it, and gives what stands for its build."""

    def __init__(self, kernel: Any, seed: int) -> None:
        self._kernel = kernel
        self._seed = seed

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., _Emulated]:
        def run(*arguments: Any, **options: Any) -> _Emulated:
            emulator.launch(self._kernel, grid, arguments, replacements=_REPLACEMENTS, seed=self._seed)
            return self

        return run


def _forward(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    out, lse = reference.attention(problem, tensors)
    return out.to(problem.dtype).contiguous(), lse.to(problem.lse_dtype).contiguous()


@contextmanager
def on_cpu(seed: int = 0, num_sms: int = 3, config: backward_tiles.Config | None = None) -> Iterator[None]:
    """Within, ``backend="hopper"`` takes CPU tensors: exact forward, emulated backward.

    Args:
        seed: Draws the order of events.
        num_sms: Multiprocessors of the device.
        config: Tiles to use instead of the chosen ones.
    """
    properties = SimpleNamespace(multi_processor_count=num_sms)
    able = dataclasses.replace(
        hopper._FORWARD, device_types=("cpu",), min_compute_capability=None, max_compute_capability=None
    )

    def backward(self: Any, *call: Any) -> Gradients:
        return gradients.run(*call, config=config)

    def forget() -> None:
        gradients._plan.cache_clear()
        launch._descriptors.clear()
        ops._KNOWN.clear()
        dispatch._first.cache_clear()

    forget()
    with (
        mock.patch.object(hopper._Backend, "capabilities", lambda self, direction: able),
        mock.patch.object(hopper._Backend, "forward", lambda self, problem, tensors: _forward(problem, tensors)),
        mock.patch.object(hopper._Backend, "backward", backward),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        mock.patch.object(launch, "_Address", lambda tensor: tensor),
        mock.patch.object(gradients, "prepare_rows", _Emulated(gradients.prepare_rows, seed)),
        mock.patch.object(gradients, "attention_backward", _Emulated(gradients.attention_backward, seed)),
        mock.patch.object(gradients, "finish_dq", _Emulated(gradients.finish_dq, seed)),
    ):
        yield
    forget()
