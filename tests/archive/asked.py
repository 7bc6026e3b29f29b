"""The kernels that public calls ask for on a GPU that is not here, and those that ``flashtile build`` lists."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from flashtile.backends.gpu import ahead, build, host, launch, records
from flashtile.backends.gpu.archive import key_of
from flashtile.backends.hopper import tensor_maps
from flashtile.call import problem
from flashtile.call.gpus import gpu_of
from flashtile.cli import build as command
from flashtile.cli.models import Call
from flashtile.ops import plans
from tests.archive.machine import Driver, present


@contextmanager
def asked(arch: str) -> Iterator[dict[bytes, str]]:
    """Within, calls on CPU tensors are planned for a GPU, and compute nothing: the names of kernels by their keys."""
    found: dict[bytes, str] = {}
    gpu, made = gpu_of(arch), problem.checked_problem
    assert gpu.capability is not None

    def on_gpu(t: Any, o: Any, sizes: Any, keys_values: tuple[Tensor, Tensor], **own: Any) -> problem.Problem:
        aligned = all(map(problem.is_aligned, (t.q, *keys_values)))
        on_cpu = made(t, o, sizes, keys_values, **own)
        return on_cpu.but(device_type="cuda", compute_capability=gpu.capability, aligned=on_cpu.aligned and aligned)

    def note(wanted: launch.Launch, device: int, key: tuple[Any, ...] | None = None) -> build.Build:
        text = launch.text_of(key or launch.lower(wanted)[0])
        assert text is not None
        found[key_of(arch, text)] = wanted.kernel.__name__
        return build.Build(None, (), "a test", 0, None, [])

    count = lambda device: gpu.multiprocessors  # noqa: E731
    patches: list[tuple[Any, str, Any]] = [
        (build, "find_build", note), (tensor_maps, "_num_sms", count),
        (host.Step, "start", lambda step, tensors, stream: None),
    ]  # fmt: skip
    replaced = {problem.checked_problem: on_gpu, records.multiprocessors: count}
    for module in [each for name, each in sys.modules.items() if name.startswith("flashtile.")]:
        for name, value in vars(module).items():
            if isinstance(value, types.FunctionType) and value in replaced:
                patches.append((module, name, replaced[value]))
    with ExitStack() as entered:
        entered.enter_context(plans.own_plans())
        entered.enter_context(present(gpu.capability, Driver()))
        for patch in patches:
            entered.enter_context(mock.patch.object(*patch))
        yield found


def listed(calls: Iterable[Call], arch: str, folder: Path) -> dict[bytes, str]:
    """The kernels that ``flashtile build`` would compile for calls."""
    with ahead.into(folder / "none.ftk", lists=True) as recorder:
        assert command._list([*calls], arch) == []
    return {key: each.kernel.__name__ for key, each in recorder.launches.items()}
