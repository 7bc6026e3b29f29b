"""A GPU that is not there: PyTorch and the driver say that it is, kernels are loaded and launched, and do nothing.

``python -m tests.archive.machine FILE`` runs a few calls on it with an archive and with Triton blocked, and prints as
JSON the kernels that were loaded and how many launches there were. With ``--list FILE sm_90`` public functions run each
call of a list, and the kernels are those of the wheel that is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from flashtile.backends.gpu import build, driver, host

Capability = tuple[int, int]
_THREADS, _SHARED = 1024, 227 * 1024


class Driver:
    """The driver's functions that loading and launching call.

    Attributes:
        loaded: Names of functions that were looked up, in order.
        started: Handles of functions that were launched.
        refuses: Whether it takes no code.
    """

    def __init__(self, refuses: bool = False) -> None:
        """A driver without code."""
        self.refuses, self.loaded, self.started = refuses, list[str](), list[int]()
        self._code: dict[int, bytes] = {}

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        if self.refuses or code[:4] != b"\x7fELF":
            return 200
        module._obj.value = len(self._code) + 1
        self._code[module._obj.value] = code
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        if name not in self._code[module.value]:
            return 500
        function._obj.value = 1000 + module.value
        self.loaded.append(name.decode())
        return 0

    def cuFuncGetAttribute(self, value: Any, number: int, function: Any) -> int:
        value._obj.value = _THREADS if number == 0 else 0
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, device: int) -> int:
        value._obj.value = _SHARED
        return 0

    def cuFuncSetCacheConfig(self, function: Any, config: int) -> int:
        return 0

    def cuFuncSetAttribute(self, function: Any, number: int, value: int) -> int:
        return 0

    def cuTensorMapEncodeTiled(self, place: int, *about: Any) -> int:
        ctypes.memset(place, 0xEE, 128)
        return 0

    def cuLaunchKernelEx(self, config: int, function: int, pointers: int, extra: None) -> int:
        self.started.append(function)
        return 0

    def cuGetErrorName(self, status: int, text: Any) -> int:
        text._obj.value = b"REFUSED"
        return 0


@contextmanager
def present(capability: Capability, cuda: Driver) -> Iterator[Driver]:
    """Within, launches of CPU tensors are those of the GPU 0 with a compute capability."""
    init = host.Launcher.__init__

    def on_gpu(launcher: Any, launch: Any, device: object, *operands: Any) -> None:
        init(launcher, launch, torch.device("cuda", 0), *operands)

    values: list[tuple[Any, str, Any]] = [
        (driver, "library", lambda: cuda), (driver, "ensure_context", lambda device: None),
        (build, "launcher", lambda: "driver"), (host.Launcher, "__init__", on_gpu),
        (torch._C, "_cuda_getDevice", lambda: 0), (torch._C, "_cuda_getCurrentRawStream", lambda device: 1),
        (torch.cuda, "get_device_capability", lambda device=None: capability), (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "device", lambda device: contextlib.nullcontext()),
    ]  # fmt: skip
    with ExitStack() as entered:
        for place, name, value in values:
            entered.enter_context(mock.patch.object(place, name, value, create=True))
        driver.tensor_map.cache_clear()
        yield cuda


def attend(capability: Capability, **options: Any) -> None:
    """The launches of a forward and a backward of a described call, without results."""
    from dataclasses import replace

    from flashtile.call.problem import Tensors
    from flashtile.core.masks import Band
    from flashtile.ops import dispatch
    from tests.problems import banded_problem

    backend, dtype = options.pop("backend", None), options.pop("dtype", torch.float16)
    shape, causal = options.pop("shape"), options.pop("causal", False)
    x = torch.zeros(shape, dtype=dtype)
    tensors = Tensors(x, x.clone(), x.clone())
    made = banded_problem(tensors, Band(None, 0) if causal else Band(), needs_grad=True)
    problem = replace(made, device_type="cuda", compute_capability=capability)
    out, lse = dispatch.select(problem, "forward", backend).plan("forward", problem, tensors)(tensors)
    dout = torch.zeros_like(out)
    backward = dispatch.select(problem, "backward", backend).plan("backward", problem, tensors, (dout, None))
    backward(tensors, out, lse, dout, None)


@contextmanager
def planned_for(arch: str) -> Iterator[Driver]:
    """``present``, where public calls on tensors without data run on a GPU of an architecture."""
    from flashtile.call.problem import AHEAD, Problem, gpu_of

    gpu, init = gpu_of(arch), Problem.__init__
    assert gpu.capability is not None

    def on_gpu(problem: Problem, *given: Any, **named: Any) -> None:
        init(problem, *given, **named)
        if problem.device_type == "meta":
            object.__setattr__(problem, "device_type", "cuda")
            object.__setattr__(problem, "compute_capability", gpu.capability)

    token = AHEAD.set(gpu)  # by which tensors without data are of a device with its multiprocessors
    try:
        with (
            present(gpu.capability, Driver()) as cuda,
            mock.patch.object(Problem, "__init__", on_gpu),
            mock.patch.object(torch.Tensor, "is_meta", False),  # PyTorch's operators would make results alone
        ):
            yield cuda
    finally:
        AHEAD.reset(token)


def call(given: tuple[torch.Tensor, ...], options: dict[str, Any]) -> None:
    """A call of ``cli.models`` as users write it."""
    import flashtile

    options = dict(options)
    backward = options.pop("backward", False)
    if "k_cache" in options:
        q, *new = given
        caches = options.pop("k_cache"), options.pop("v_cache")
        flashtile.attention_with_kvcache(q, *caches, **dict(zip("kv", new, strict=False)), **options)  # type: ignore[arg-type]
        return
    q, k, v = (x.detach().requires_grad_(backward) for x in given)
    function = flashtile.attention_varlen if "cu_seqlens_q" in options else flashtile.attention
    out: Any = function(q, k, v, **options)
    if backward:
        out.backward(torch.empty_like(out))


def run_list(file: str, arch: str) -> dict[str, Any]:
    """Runs the calls of a list with what is installed, and Triton blocked."""
    import typer

    from flashtile.cli.app import app
    from flashtile.cli.build import list_calls

    made = 0
    with planned_for(arch) as cuda:
        for what, given, options in list_calls(Path(file), typer.main.get_command(app).commands["build"]):  # type: ignore[attr-defined]
            before = len(cuda.started)
            call(given, options)
            assert len(cuda.started) > before, what
            made += 1
    return {"calls": made, "loaded": cuda.loaded, "launches": len(cuda.started)}


def run_archive(place: str) -> dict[str, Any]:
    """Runs three lengths with an archive."""
    os.environ["FLASHTILE_KERNELS"] = place
    with present((8, 0), Driver()) as cuda:
        for length in (100, 1000, 3001):
            attend((8, 0), shape=(2, length, 4, 64), causal=True, backend="portable")
    return {"loaded": cuda.loaded, "launches": len(cuda.started)}


if __name__ == "__main__":
    sys.modules["triton"] = None  # type: ignore[assignment]
    print(json.dumps(run_list(*sys.argv[2:]) if sys.argv[1] == "--list" else run_archive(sys.argv[1])))
