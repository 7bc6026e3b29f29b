"""A child process of the demo that measures time and peak memory of one call at a time.

Apart from the demo's own process, so that nothing else moves the peak, and so that being killed for memory ends a
measurement and not the demo.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

import flashtile
from flashtile_lab.examples.char_gpt import Attention, flash_attention, sdpa_attention, standard_attention

WINDOW = 256


@functools.lru_cache(1)
def _window_mask(seqlen: int, device: torch.device) -> Tensor:
    return torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).tril_().triu_(1 - WINDOW)


def _sdpa_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's function has no window: it takes a mask of all pairs, which is made once."""
    return sdpa_attention(q, k, v, _window_mask(q.shape[1], q.device))


METHODS: dict[str, Attention] = {
    "standard": standard_attention,
    "SDPA": sdpa_attention,
    "flashtile": flash_attention,
    "SDPA, window": _sdpa_window,
    "flashtile, window": functools.partial(flashtile.attention, causal=True, window_size=(WINDOW - 1, 0)),
}
# Of glibc's mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


@dataclass(frozen=True)
class Setting:
    """What all measured calls share: causal attention, batch 1."""

    num_heads: int
    head_dim: int
    dtype: str
    device: str
    budget_bytes: int  # the most memory that a call may take beyond its inputs
    threads: int


@dataclass(frozen=True)
class Point:
    """One call, and what was measured."""

    method: str
    backward: bool
    seqlen: int
    fits: bool = False
    peak_bytes: int = 0  # beyond the inputs, output (and gradients) included; 0 if an allocation failed
    time_s: float = 0.0  # median of a few runs; 0 if it did not fit


def serve(connection: Connection, setting: Setting) -> None:
    """Answers each call, told as method, backward and seqlen, with what ``measure`` says of it."""
    with contextlib.suppress(EOFError):
        while True:
            connection.send(measure(setting, *connection.recv()))


def measure(setting: Setting, method: str, backward: bool, seqlen: int) -> Point:
    """Runs the call once under a hard limit for its peak, then a few times for its time."""
    torch.set_num_threads(setting.threads)
    _call(setting, method, backward, 64)()
    call = _call(setting, method, backward, seqlen)
    limited = _cuda_memory if setting.device == "cuda" else _process_memory
    try:
        with limited(setting.budget_bytes) as peak_so_far:
            call()
            peak = peak_so_far()
        if peak > setting.budget_bytes:
            return Point(method, backward, seqlen, peak_bytes=peak)
        return Point(method, backward, seqlen, True, peak, _median_time(call))
    except (MemoryError, RuntimeError) as error:
        out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not out_of_memory and "DefaultCPUAllocator" not in str(error):
            raise
        return Point(method, backward, seqlen)


def _call(setting: Setting, method: str, backward: bool, seqlen: int) -> Callable[[], None]:
    shape = (1, seqlen, setting.num_heads, setting.head_dim)
    draw = torch.Generator(setting.device).manual_seed(0)
    kind = {"dtype": getattr(torch, setting.dtype), "device": setting.device}
    q, k, v = (torch.randn(shape, generator=draw, **kind).requires_grad_(backward) for _ in range(3))
    dout = torch.randn(shape, generator=draw, **kind) if backward else None

    def call() -> None:
        out = METHODS[method](q, k, v)
        if dout is not None:
            torch.autograd.grad(out, (q, k, v), dout)
        if setting.device == "cuda":
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


@contextlib.contextmanager
def _process_memory(budget_bytes: int) -> Iterator[Callable[[], int]]:
    """Gives the peak of this process's resident memory from here on; on Linux allocations beyond the budget fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if sys.platform == "linux":
        # While memory is measured every tensor of a megabyte gets pages of its own, so that neither what the allocator
        # keeps for later nor holes in its heap count. For times it keeps what it has, as in a long training run.
        _glibc("mallopt", _M_MMAP_THRESHOLD, 1 << 20)
        limit = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() + budget_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        _glibc("malloc_trim", 0)
        # Resets the peak; where that is not allowed the peak is that of the process's whole life.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    try:
        base = _peak_of_process()
        yield lambda: _peak_of_process() - base
    finally:
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
            _glibc("mallopt", _M_MMAP_THRESHOLD, 32 << 20)
            _glibc("mallopt", _M_TRIM_THRESHOLD, 256 << 20)


def _peak_of_process() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _glibc(function: str, *numbers: int) -> None:
    """Calls a function of glibc's allocator; others have none of them and need none here."""
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(None), function)(*numbers)


@contextlib.contextmanager
def _cuda_memory(budget_bytes: int) -> Iterator[Callable[[], int]]:
    """Gives the peak of what PyTorch allocates on the GPU from here on; allocations beyond the budget fail."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + budget_bytes) / total))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    try:
        yield lambda: torch.cuda.max_memory_allocated() - base
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
