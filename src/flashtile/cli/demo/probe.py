"""A child process of the demo that measures time and peak memory of one call at a time.

It reads requests and writes answers as JSON lines. Apart from the demo's own process, so that nothing else moves the
peak, and so that being killed for memory ends a measurement and not the demo.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import statistics
import sys
import time
import traceback
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
        return Answer(True, peak, _median_time(call), memory.reusable)
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


def _median_time(call: Callable[[], None]) -> float:
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
        # While memory is measured every tensor of a megabyte gets pages of its own, so that neither what the allocator
        # keeps for later nor holes in its heap count. For times it keeps what it has, as in a long training run.
        _malloc_option(_M_MMAP_THRESHOLD, 1 << 20)
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = _status_bytes("VmData") + budget_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
            _malloc_option(_M_MMAP_THRESHOLD, 32 << 20)
            _malloc_option(_M_TRIM_THRESHOLD, 256 << 20)

    def start(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
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


# Of glibc's mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def _malloc_option(option: int, value: int) -> None:
    """Sets an option of glibc's allocator; others have no such function and need none here."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(option, value)


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def serve() -> None:
    """Answers requests until standard input ends."""
    for line in sys.stdin:
        request = Request(**json.loads(line))
        apart = request.device == "cpu" and sys.platform == "linux"
        print(json.dumps(asdict(_measure_apart(request) if apart else measure(request))), flush=True)


def _measure_apart(request: Request) -> Answer:
    """Measures in a fork, so that every call starts from the same state.

    Buffers that mathematics libraries keep from one call would hide what the next one takes. The fork is safe because
    this process itself never computes and so has no pool of threads to lose.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write_end, json.dumps(asdict(measure(request))).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return Answer(fits=False)
    if not answer:
        sys.exit(1)
    return Answer(**json.loads(answer))
