"""Lets the Hopper backend run on CPU tensors, its kernels in the emulator, everything else as it is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from flashtile import dispatch, ops
from flashtile.backends import hopper
from flashtile.backends.hopper import backward_tiles, gradients, inline_asm, launch, tiles
from flashtile.backends.hopper.gluon_compat import tma_add
from tests import emulator
from tests.emulator.language import elementwise

# What the inline assembly means, and the name that only the newest Triton has.
REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    inline_asm.hold: lambda x: x,
    inline_asm.after_stores: lambda x: x,
    inline_asm.rescale: lambda acc, factor, width: acc * factor[:, None],
    inline_asm.least_integers: lambda numbers, signs: functools.reduce(elementwise(torch.minimum), numbers),
    # Turns decide who is first, not what comes out.
    inline_asm.take_turn: lambda x, group: x,
    inline_asm.pass_turn: lambda x, group: x,
    tma_add: emulator.reduce_out,
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


def _forget() -> None:
    launch._plan.cache_clear()
    launch._descriptors.clear()
    launch._counters.clear()
    gradients._plan.cache_clear()
    ops._KNOWN.clear()
    dispatch._first.cache_clear()


@contextmanager
def with_kernels(
    stand_in: Callable[[Any], Any],
    num_sms: int,
    forward: tiles.Config | None = None,
    backward: backward_tiles.Config | None = None,
) -> Iterator[None]:
    """Within, ``backend="hopper"`` takes CPU tensors, as if of a device with ``num_sms`` multiprocessors.

    Args:
        stand_in: Gives what stands for a kernel.
        num_sms: Multiprocessors of the device.
        forward: Tiles to use instead of the chosen ones.
        backward: The same for the backward.
    """
    here: dict[str, Any] = {"device_types": ("cpu",), "min_compute_capability": None, "max_compute_capability": None}
    properties = SimpleNamespace(multi_processor_count=num_sms)
    patches: list[tuple[Any, str, Any]] = [
        (hopper, "_FORWARD", dataclasses.replace(hopper._FORWARD, **here)),
        (hopper, "_BACKWARD", dataclasses.replace(hopper._BACKWARD, **here)),
        (torch.cuda, "current_device", lambda: None),
        (torch.cuda, "get_device_properties", lambda device: properties),
        (launch, "_Address", lambda tensor: tensor),
        (launch, "attention_forward", stand_in(launch.attention_forward)),
    ]
    for name in ("prepare_rows", "attention_backward", "finish_dq", "mend_gradients"):
        patches.append((gradients, name, stand_in(getattr(gradients, name))))
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


@contextmanager
def on_cpu(
    seed: int = 0,
    num_sms: int = 3,
    forward: tiles.Config | None = None,
    backward: backward_tiles.Config | None = None,
) -> Iterator[None]:
    """``with_kernels`` of the emulator; ``seed`` draws the order of events."""
    with with_kernels(lambda kernel: Emulated(kernel, seed), num_sms, forward, backward):
        yield
