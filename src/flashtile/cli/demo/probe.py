"""A child process of the demo that measures time and peak memory of one call at a time.

It reads requests and writes answers as JSON lines. Apart from the demo's own process, so that nothing else moves the
peak, and so that being killed for memory ends a measurement and not the demo.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from flashtile.examples.char_gpt import flash_attention, standard_attention

METHODS = {"standard": standard_attention, "flashtile": flash_attention}
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Request:
    """One causal call to measure.

    Attributes:
        method: A key of ``METHODS``.
        seqlen: Queries and keys.
        num_heads: Heads, batch 1.
        head_dim: Their width.
        dtype: Without the ``torch.``.
        device: ``cpu`` or ``cuda``.
        backward: Whether the gradients of q, k and v are computed too.
        budget_bytes: The most memory that the call may take beyond its inputs.
        threads: CPU threads.
    """

    method: str
    seqlen: int
    num_heads: int
    head_dim: int
    dtype: str
    device: str
    backward: bool
    budget_bytes: int
    threads: int


@dataclass(frozen=True)
class Answer:
    """What a request gave.

    Attributes:
        fits: Whether the call ran within its budget.
        peak_bytes: Peak memory beyond the inputs, output (and gradients) included; 0 if an allocation failed.
        time_s: Median of a few runs; 0 if it did not fit.
        reusable: Whether this process can measure another peak.
    """

    fits: bool
    peak_bytes: int = 0
    time_s: float = 0.0
    reusable: bool = True


def measure(request: Request) -> Answer:
    """Runs the call once under a hard limit for its peak, then a few times for its time."""
    torch.set_num_threads(request.threads)
    _call(request, 64)()
    call = _call(request, request.seqlen)
    memory = _CudaMemory() if request.device == "cuda" else _ProcessMemory()
    try:
        with memory.limited(request.budget_bytes):
            memory.start()
            call()
            peak = memory.peak()
            if peak > request.budget_bytes:
                return Answer(fits=False, peak_bytes=peak, reusable=memory.reusable)
            return Answer(True, peak, _median_time(call, request.device), memory.reusable)
    except (MemoryError, torch.OutOfMemoryError):
        return Answer(fits=False, reusable=memory.reusable)
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        return Answer(fits=False, reusable=memory.reusable)


def _call(request: Request, seqlen: int) -> Callable[[], None]:
    attention = METHODS[request.method]
    shape = (1, seqlen, request.num_heads, request.head_dim)
    draw = torch.Generator(request.device).manual_seed(0)
    kind = {"dtype": getattr(torch, request.dtype), "device": request.device}
    q, k, v = (torch.randn(shape, generator=draw, **kind).requires_grad_(request.backward) for _ in range(3))
    dout = torch.randn(shape, generator=draw, **kind) if request.backward else None

    def call() -> None:
        out = attention(q, k, v)
        if dout is not None:
            torch.autograd.grad(out, (q, k, v), dout)
        if request.device == "cuda":
            torch.cuda.synchronize()

    return call


def _median_time(call: Callable[[], None], device: str) -> float:
    """Seconds: the median of up to seven runs, fewer where one takes long."""
    times: list[float] = []
    while len(times) < 7 and sum(times) < 0.6:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class _ProcessMemory:
    """Peak resident memory of this process: reset by the kernel where that is Linux, else of its whole life."""

    def __init__(self) -> None:
        self.reusable = _STATUS.exists()
        self._base = 0

    @contextlib.contextmanager
    def limited(self, budget_bytes: int) -> Iterator[None]:
        """Makes allocations beyond the budget fail, where the system can; elsewhere the peak alone decides."""
        if not _STATUS.exists():
            yield
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = _status_bytes("VmData") + budget_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def start(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            # What the allocator keeps for later would hide what the call takes.
            ctypes.CDLL(None).malloc_trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.reusable = False
        self._base = self._peak_now()

    def peak(self) -> int:
        return self._peak_now() - self._base

    def _peak_now(self) -> int:
        if _STATUS.exists():
            return _status_bytes("VmHWM")
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class _CudaMemory:
    """Peak memory that PyTorch allocated on the GPU."""

    reusable = True

    def __init__(self) -> None:
        self._base = 0

    @contextlib.contextmanager
    def limited(self, budget_bytes: int) -> Iterator[None]:
        """Makes allocations beyond the budget fail."""
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + budget_bytes) / total))
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def start(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._base = torch.cuda.memory_allocated()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() - self._base


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(asdict(measure(Request(**json.loads(line))))), flush=True)
