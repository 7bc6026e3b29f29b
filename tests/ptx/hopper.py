"""Lets the Hopper backend run on CPU tensors, its kernels compiled and their PTX interpreted, everything else as is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flashtile.backends.gpu.launch import Launch
from flashtile.backends.hopper.backward import config as backward_config
from flashtile.backends.hopper.forward import config as forward_config
from tests.backends.hopper.emulated import with_kernels
from tests.ptx.launch import Kernels
from tests.ptx.machine import Options

_KERNELS = Kernels()


@contextmanager
def on_cpu(
    machine: Options,
    num_sms: int = 2,
    forward: forward_config.ForwardTiles | None = None,
    backward: backward_config.BackwardTiles | None = None,
) -> Iterator[None]:
    """``emulated.with_kernels`` as the compiler makes them; ``machine`` says how the machine behaves."""

    def run(launch: Launch) -> None:
        options = dict(launch.options)
        _KERNELS.launch(launch.kernel, (launch.programs,), launch.arguments, options, machine, launch.cluster)

    with with_kernels(run, num_sms, forward, backward):
        yield
