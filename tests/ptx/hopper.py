"""Lets the Hopper backend run on CPU tensors, its kernels compiled and their PTX interpreted, everything else as is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flashtile.backends.hopper import backward_tiles, tiles
from tests.backends.hopper.emulated import with_kernels
from tests.ptx.launch import Kernels
from tests.ptx.machine import Options

_KERNELS = Kernels()


class Compiled:
    """Stands for a kernel: ``compiled[grid](*arguments)`` runs its PTX, and gives what stands for its build."""

    def __init__(self, kernel: Any, machine: Options, options: dict[str, Any] | None = None) -> None:
        self._kernel = kernel
        self._machine = machine
        self._options = options

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def run(*arguments: Any, **options: Any) -> Compiled:
            options = options if self._options is None else self._options
            _KERNELS.launch(self._kernel, grid, arguments, options, self._machine)
            return Compiled(self._kernel, self._machine, options)

        return run


@contextmanager
def on_cpu(
    machine: Options,
    num_sms: int = 2,
    forward: tiles.Config | None = None,
    backward: backward_tiles.Config | None = None,
) -> Iterator[None]:
    """``emulated.with_kernels`` as the compiler makes them; ``machine`` says how the machine behaves."""
    with with_kernels(lambda kernel: Compiled(kernel, machine), num_sms, forward, backward):
        yield
