"""Lets the Hopper backend run on CPU tensors, its kernels compiled and their PTX interpreted, everything else as is."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from flashtile import dispatch, ops
from flashtile.backends import hopper
from flashtile.backends.hopper import backward_tiles, gradients, launch, tiles
from tests.ptx.launch import Kernels
from tests.ptx.machine import Options

_BACKWARD = ("prepare_rows", "attention_backward", "finish_dq", "mend_gradients")
_KERNELS = Kernels()
LOG: list[tuple[str, tuple[int, ...], int, float]] = []


class Compiled:
    """Stands for a kernel: ``compiled[grid](*arguments)`` runs its PTX, and gives what stands for its build."""

    def __init__(self, kernel: Any, machine: Options, options: dict[str, Any] | None = None) -> None:
        self._kernel = kernel
        self._machine = machine
        self._options = options

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def run(*arguments: Any, **options: Any) -> Compiled:
            options = options if self._options is None else self._options
            start = time.perf_counter()
            done = _KERNELS.launch(self._kernel, grid, arguments, options, self._machine)
            LOG.append((self._kernel.__name__, grid, done.executed, time.perf_counter() - start))
            return Compiled(self._kernel, self._machine, options)

        return run


def _forget() -> None:
    launch._plan.cache_clear()
    launch._descriptors.clear()
    launch._counters.clear()
    gradients._plan.cache_clear()
    ops._KNOWN.clear()
    dispatch._first.cache_clear()


@contextmanager
def on_cpu(
    machine: Options,
    num_sms: int = 2,
    forward: tiles.Config | None = None,
    backward: backward_tiles.Config | None = None,
    only: tuple[str, ...] = ("attention_forward", *_BACKWARD),
    other: Callable[[Any], Any] | None = None,
) -> Iterator[None]:
    """Within, ``backend="hopper"`` takes CPU tensors, as if of a device with ``num_sms`` multiprocessors.

    Args:
        machine: How the machine behaves.
        num_sms: Multiprocessors of the device.
        forward: Tiles to use instead of the chosen ones.
        backward: The same for the backward.
        only: Kernels that run here.
        other: Gives what stands for the other kernels.
    """
    here: dict[str, Any] = {"device_types": ("cpu",), "min_compute_capability": None, "max_compute_capability": None}
    properties = SimpleNamespace(multi_processor_count=num_sms)
    patches: list[tuple[Any, str, Any]] = [
        (hopper, "_FORWARD", dataclasses.replace(hopper._FORWARD, **here)),
        (hopper, "_BACKWARD", dataclasses.replace(hopper._BACKWARD, **here)),
        (torch.cuda, "current_device", lambda: None),
        (torch.cuda, "get_device_properties", lambda device: properties),
        (launch, "_Address", lambda tensor: tensor),
    ]
    places = [(launch, "attention_forward")]
    places += [(gradients, name) for name in _BACKWARD if hasattr(gradients, name)]
    for place, name in places:
        kernel = getattr(place, name)
        stands = Compiled(kernel, machine) if name in only or other is None else other(kernel)
        patches.append((place, name, stands))
    if forward is not None:
        patches.append((tiles, "choose", lambda problem: forward))
    if backward is not None:
        patches.append((backward_tiles, "choose", lambda problem: backward))
    _forget()
    with ExitStack() as entered:
        for place, name, value in patches:
            entered.enter_context(mock.patch.object(place, name, value))
        yield
    _forget()
