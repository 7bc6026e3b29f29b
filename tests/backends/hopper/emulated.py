"""Lets the Hopper backend run on CPU tensors, its kernels in the emulator, everything else as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from flashtile import dispatch, ops
from flashtile.backends import hopper
from flashtile.backends.hopper import inline_asm, launch
from tests import emulator

# What the inline assembly means.
REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    inline_asm.hold: lambda x: x,
    inline_asm.rescale: lambda acc, factor, width: acc * factor[:, None],
}


class Emulated:
    """Stands for a kernel: ``emulated[grid](*arguments)`` runs it, and gives what stands for its build."""

    def __init__(self, kernel: Any, seed: int) -> None:
        self._kernel = kernel
        self._seed = seed

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Emulated]:
        def run(*arguments: Any, **options: Any) -> Emulated:
            emulator.launch(self._kernel, grid, arguments, replacements=REPLACEMENTS, seed=self._seed)
            return self

        return run


@contextmanager
def on_cpu(seed: int = 0, num_sms: int = 3) -> Iterator[None]:
    """Within, ``backend="hopper"`` takes CPU tensors, as if of a device with ``num_sms`` multiprocessors."""
    here = {"device_types": ("cpu",), "min_compute_capability": None, "max_compute_capability": None}
    properties = SimpleNamespace(multi_processor_count=num_sms)

    def forget() -> None:
        launch._plan.cache_clear()
        launch._descriptors.clear()
        ops._KNOWN.clear()
        dispatch._first.cache_clear()

    forget()
    with (
        mock.patch.object(hopper, "_FORWARD", dataclasses.replace(hopper._FORWARD, **here)),
        mock.patch.object(torch.cuda, "current_device", lambda: None),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        mock.patch.object(launch, "_Address", lambda tensor: tensor),
        mock.patch.object(launch, "attention_forward", Emulated(launch.attention_forward, seed)),
    ):
        yield
    forget()
