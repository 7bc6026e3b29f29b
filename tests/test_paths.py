"""How many modules a reader meets who follows a call from the public function to the kernel's last line.

Counted are modules of which a function runs, at the first call of its kind, and those of which one is compiled into a
kernel that the call starts. The driver's calls, a module more, are not reached without a GPU.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable
from types import CodeType, FrameType, ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import flashtile
from flashtile.distributed import kinds

pytest.importorskip("triton")

from flashtile.backends.gpu.launch import Launch, mapped
from tests.backends.hopper.emulated import with_kernels


def executed(run: Callable[[], object]) -> set[str]:
    """The project's modules of which a function runs."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_globals.get("__name__", "")
        # Not the statements of a module or of a class, which run at import.
        if event == "call" and name.startswith("flashtile.") and frame.f_code.co_flags & inspect.CO_NEWLOCALS:
            found.add(name)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def compiled(launches: Iterable[Launch]) -> set[str]:
    """The project's modules of device functions that kernels are made of."""
    todo: deque[Any] = deque()
    for launch in launches:
        mapped(launch, lambda _, leaf, is_constant: todo.append(leaf) if is_constant else None)
        todo.append(launch.kernel)
    seen: set[int] = set()
    modules: set[str] = set()
    while todo:
        function = getattr(todo.popleft(), "fn", None)
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        if not function.__module__.startswith("flashtile."):
            continue
        modules.add(function.__module__)
        names = set(_names(function.__code__))
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            parts = [getattr(value, each, None) for each in names] if isinstance(value, ModuleType) else [value]
            for part in parts:
                todo += vars(part).values() if isinstance(part, type) else [part]
    return modules


def _names(code: CodeType) -> Iterable[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _tensors(dim: int = 128, **more: Any) -> list[torch.Tensor]:
    return [torch.zeros(1, 256, 4, dim, dtype=torch.bfloat16, **more) for _ in range(3)]


def forward() -> object:
    return flashtile.attention(*_tensors(), causal=True, backend="hopper")


def training() -> object:
    q, k, v = _tensors(requires_grad=True)
    return flashtile.attention(q, k, v, causal=True, backend="hopper").sum().backward()


def cached() -> object:
    q = torch.zeros(2, 1, 8, 128, dtype=torch.bfloat16)
    pages, table = torch.zeros(8, 64, 1, 128, dtype=torch.bfloat16), torch.arange(8, dtype=torch.int32).view(2, 4)
    lengths = torch.full((2,), 100, dtype=torch.int32)
    return flashtile.attention_with_kvcache(
        q, pages, pages.clone(), cache_seqlens=lengths, page_table=table, causal=True, backend="hopper"
    )


def quantized() -> object:
    q, k, v = _tensors()
    record = flashtile.quantize(q, k, v)
    return lambda: flashtile.attention(record, causal=True, backend="hopper")


def ring() -> object:
    """A rank's two steps: with its own keys, and with those of the other rank, which does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        # All ranks say what this one says.
        with mock.patch.object(kinds, "_check_rows"):
            q, k, v = _tensors()
            return flashtile.distributed.attention(
                q, k, v, mesh=mesh, causal=True, seqlen_q=512, seqlen_k=512, comm="ring", backend="hopper"
            )
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("call", "most"), [(forward, 42), (training, 49), (cached, 33), (quantized, 49), (ring, 53)])
def test_modules_of_a_path(call: Callable[[], Any], most: int) -> None:
    launches: list[Launch] = []
    with with_kernels(launches.append, 2):
        run = call
        if call is quantized:
            run = call()
        found = executed(run) | compiled(launches)
    assert launches
    assert len(found) <= most, f"{len(found)}: {', '.join(sorted(found))}"
