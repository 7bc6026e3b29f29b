"""Lets the portable backend run on CPU tensors, its kernels compiled and their PTX interpreted, the rest as it is."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from flashtile.backends.gpu import host
from flashtile.backends.gpu.launch import Launch
from flashtile.backends.portable import config as tiles
from flashtile.backends.portable import kernels as portable
from flashtile.ops import plans
from tests.ptx.launch import Kernels
from tests.ptx.machine import Options

_KERNELS: dict[int, Kernels] = {}


@contextmanager
def on_cpu(machine: Options, arch: str = "sm_90") -> Iterator[None]:
    """Within, ``backend="portable"`` takes CPU tensors, as if of a device of ``sm_90``, ``sm_89`` or ``sm_80``."""
    capability = {"sm_90": 90, "sm_89": 89, "sm_80": 80}[arch]
    kernels = _KERNELS.setdefault(capability, Kernels(capability))

    def run(launch: Launch) -> None:
        kernels.launch(launch.kernel, (launch.programs,), launch.arguments, dict(launch.options), machine)

    patches: list[tuple[Any, str, Any]] = [
        (portable.BACKEND, "able", {each: dataclasses.replace(able, device_types=("cpu",), min_compute_capability=None)
                                    for each, able in portable.BACKEND.able.items()}),
        (portable, "needs_widening", lambda problem: False),
        (tiles, "arch_of", lambda problem: "sm_86" if arch == "sm_89" else arch),
        (host, "interpret", run),
    ]  # fmt: skip
    plans.kept = OrderedDict()
    with ExitStack() as entered:
        for place, name, value in patches:
            entered.enter_context(mock.patch.object(place, name, value))
        yield
    plans.kept = OrderedDict()
