"""The kernels that public calls ask for on a GPU that is not here, and those that ``flashtile build`` lists."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from flashtile.backends.gpu import ahead, build, host, launch, records
from flashtile.backends.gpu.archive import key_of
from flashtile.backends.hopper import tensor_maps
from flashtile.call import problem
from flashtile.call.problem import gpu_of
from flashtile.cli import build as command
from flashtile.cli.models import LayerShape, Uses, calls
from flashtile.ops import plans
from tests.archive.machine import Driver, present


@contextmanager
def on_gpu(arch: str) -> Iterator[Driver]:
    """Within, calls on CPU tensors are planned and launched as on a GPU, whose driver computes nothing."""
    gpu, made = gpu_of(arch), problem.checked_problem
    assert gpu.capability is not None

    def of_gpu(t: Any, o: Any, sizes: Any, keys_values: tuple[Tensor, Tensor], **own: Any) -> problem.Problem:
        aligned = all(map(problem.is_aligned, (t.q, *keys_values)))
        on_cpu = made(t, o, sizes, keys_values, **own)
        return on_cpu.but(device_type="cuda", compute_capability=gpu.capability, aligned=on_cpu.aligned and aligned)

    count = lambda device: gpu.multiprocessors  # noqa: E731
    replaced: dict[Any, Any] = {made: of_gpu, records.multiprocessors: count}
    replaced[problem.compute_capability] = lambda device: gpu.capability
    patches: list[tuple[Any, str, Any]] = [(tensor_maps, "_num_sms", count)]
    for module in [each for name, each in sys.modules.items() if name.startswith("flashtile.")]:
        for name, value in vars(module).items():
            if isinstance(value, types.FunctionType) and value in replaced:
                patches.append((module, name, replaced[value]))
    with ExitStack() as entered:
        entered.enter_context(plans.own_plans())
        for patch in patches:
            entered.enter_context(mock.patch.object(*patch))
        yield entered.enter_context(present(gpu.capability, Driver()))


@contextmanager
def asked(arch: str) -> Iterator[dict[bytes, launch.Launch]]:
    """Within, the launches of calls as in ``on_gpu``, of which none starts, by the keys of their kernels."""
    found: dict[bytes, launch.Launch] = {}

    def note(wanted: launch.Launch, device: int, key: tuple[Any, ...] | None = None) -> build.LoadedKernel:
        text = launch.text_of(key or launch.lower(wanted)[0])
        assert text is not None
        found.setdefault(key_of(arch, text), wanted)
        return build.LoadedKernel(None, (), "a test", 0, None, [])

    nothing = lambda *call: None  # noqa: E731
    with (
        on_gpu(arch),
        mock.patch.object(build, "find_build", note),
        mock.patch.object(host.Launcher, "start", nothing),
    ):
        yield found


@functools.cache
def _listed(shape: LayerShape, uses: Uses, arch: str) -> frozenset[bytes]:
    """The keys of the kernels that ``flashtile build`` compiles for the calls of a layer."""
    recorder = ahead.Recorder(lists=True)
    token = ahead.RECORDER.set(recorder)
    try:
        assert command.list_launches(calls(shape, uses), arch) == []
    finally:
        ahead.RECORDER.reset(token)
    return frozenset(recorder.asked)


def missing(found: dict[bytes, launch.Launch], shape: LayerShape, uses: Uses, arch: str) -> list[str]:
    """The kernels of launches that ``flashtile build`` would not compile for the calls of a layer."""
    listed = _listed(shape, uses, arch)
    return [each.kernel.__name__ for key, each in found.items() if key not in listed]
